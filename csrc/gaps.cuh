// Measuring: decisions counted by the log2 lambda above which they would skip, in bins of 1/8 from -32 to 0.
#pragma once
#include "types.cuh"

constexpr int GAP_BINS = 256;

// Bin of one row's gap (tile_max - reference) * scale_log2. A unit's bin is the largest of its rows': what decides.
// As in the skip test, a row that sees no key spares every tile; NaN and a missing reference spare none.
FS_DEVICE int gap_bin(float tile_max, float reference, float scale_log2) {
  if (tile_max == -INF) return 0;
  const float gap = (tile_max - reference) * scale_log2;
  return gap < 0.f ? min(max(__float2int_rd((gap + 32.f) * 8.f), 0), GAP_BINS - 1) : GAP_BINS - 1;
}

// Counts one decision of a request's head; `heads` are those that decide apart.
template <class Params>
FS_DEVICE void count_gap(const Params& p, int request, int heads, int head, int bin) {
  const int64_t row = static_cast<int64_t>(request) * heads + head;
  atomicAdd(reinterpret_cast<unsigned long long*>(p.gaps) + row * GAP_BINS + bin, 1ull);
}
