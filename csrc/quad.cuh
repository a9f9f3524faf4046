// A quad's four threads hold parts of two rows. Here each takes one (row, vote tile) for itself, so that what is worked
// out for a row and tile is worked out once: row `quad_row()` of the pair, vote tile `quad_tile()`.
#pragma once
#include "ptx/math.cuh"

FS_DEVICE int quad_row() { return threadIdx.x & 1; }

FS_DEVICE float of_own_row(const float (&x)[2]) { return quad_row() ? x[1] : x[0]; }

template <int VOTES>
FS_DEVICE int quad_tile() { return VOTES == 2 ? threadIdx.x >> 1 & 1 : 0; }

// What this thread keeps of two values, and what it gets of its neighbour's in return for the other.
struct Exchanged {
  float mine, received;

  FS_DEVICE Exchanged(float even, float odd, int bit) {
    const bool is_odd = threadIdx.x & bit;
    mine = is_odd ? odd : even;
    received = __shfl_xor_sync(~0u, is_odd ? even : odd, bit);
  }
};

// The thread's own one of the quad's maxima, complete, of parts `t`. NaN wins.
template <int VOTES>
FS_DEVICE float maximum_of_own(const float (&t)[VOTES][2]) {
  float x[VOTES];
#pragma unroll
  for (int i = 0; i < VOTES; i++) {
    const Exchanged rows(t[i][0], t[i][1], 1);
    x[i] = max_nan(rows.mine, rows.received);
  }
  const Exchanged tiles(x[0], x[VOTES - 1], 2);  // of one vote tile both are the same
  return max_nan(tiles.mine, tiles.received);
}

// The sum of the own row's four parts.
FS_DEVICE float sum_of_own_row(const float (&l)[2]) {
  const Exchanged rows(l[0], l[1], 1);
  const float half = rows.mine + rows.received;
  return half + __shfl_xor_sync(~0u, half, 2);
}

// The sum over the row's vote tiles of what their threads have.
template <int VOTES>
FS_DEVICE float sum_of_tiles(float x) { return VOTES == 2 ? x + __shfl_xor_sync(~0u, x, 2) : x; }
