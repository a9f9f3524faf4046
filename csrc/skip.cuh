// The Skip-Softmax test (arXiv 2512.12087): the one place that says what a row can spare.
#pragma once
#include "types.cuh"

// A row spares a tile iff exp(t - reference) < lambda for its largest score t there, solved for t: what is below this
// bound. `threshold` is log2(lambda) in the units of raw scores, like the other two. A row that has no reference yet
// (-INF) needs every tile of which it sees a key; -INF, the maximum of a row that sees none, is below every bound. NaN
// is below none, so it keeps its tile.
FS_DEVICE float spares_below(float reference, float threshold) {
  constexpr float LOWEST = -3.402823466e38f;
  return fmaxf(reference + threshold, LOWEST);
}
