// The Skip-Softmax test (arXiv 2512.12087): the one place that decides whether a row can spare a tile.
#pragma once
#include "types.cuh"

// True iff exp(t - reference) < lambda for a row whose largest raw score in the tile is `tile_max`.
// A row that sees no key of the tile spares it; one that has no reference yet needs it.
// NaN compares false, so a NaN score keeps its tile.
FS_DEVICE bool row_spares_tile(float tile_max, float reference, float scale_log2, float threshold_log2) {
  return tile_max == -INF || (tile_max - reference) * scale_log2 < threshold_log2;
}

// The same test solved for the tile's maximum: a row spares a tile iff !(tile_max >= spares_below(...)), NaN apart.
// `threshold` is log2(lambda) in the units of the scores. The largest negative float keeps -INF, the maximum of a row
// that sees no key, below every bound.
FS_DEVICE float spares_below(float reference, float threshold) {
  constexpr float LOWEST = -3.402823466e38f;
  return fmaxf(reference + threshold, LOWEST);
}
