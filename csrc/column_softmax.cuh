// Online softmax where keys are the rows of the score accumulator and query rows its columns (S^T = K Q^T).
// A thread of the warpgroup holds 2 keys of each of its N / 4 columns. Scores stay raw (q.k) until the exponent.
#pragma once
#include "ptx/math.cuh"
#include "ptx/shared.cuh"
#include "ptx/warpgroup.cuh"
#include "types.cuh"

// Query row to which entry c of a thread's per-column arrays belongs.
FS_DEVICE int column_of(int c) { return c / 2 * 8 + threadIdx.x % 4 * 2 + c % 2; }

// Register of column entry c and key half (keys key_of(0) and key_of(1)) in the accumulator.
FS_DEVICE constexpr int score_of(int c, int half) { return c / 2 * 4 + half * 2 + c % 2; }

FS_DEVICE int key_of(int half) { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + half * 8; }

// Selects -INF for keys from `visible` on, whatever their score is.
template <int N>
FS_DEVICE void mask_keys(float (&s)[N], int visible) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const bool hidden = key_of(half) >= visible;
#pragma unroll
    for (int c = 0; c < N / 2; c++)
      if (hidden) s[score_of(c, half)] = -INF;
  }
}

// The same where columns differ: `bounds(c)` are the first key that column entry c sees and the end of them.
template <int N, class Bounds>
FS_DEVICE void mask_keys_by_column(float (&s)[N], Bounds bounds) {
#pragma unroll
  for (int c = 0; c < N / 2; c++) {
    const int2 visible = bounds(c);
#pragma unroll
    for (int half = 0; half < 2; half++)
      if (key_of(half) < visible.x || key_of(half) >= visible.y) s[score_of(c, half)] = -INF;
  }
}

// Column maxima of a thread's keys, of several tiles, to those of the warp's 16 keys; all lanes of a column agree. NaN wins.
template <int TILES, int C>
FS_DEVICE void maximum_in_warp(float (&t)[TILES][C]) {
#pragma unroll
  for (int x = 4; x < 32; x *= 2)  // the tiles' shuffles overlap
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
      for (int c = 0; c < C; c++) t[i][c] = max_nan(t[i][c], __shfl_xor_sync(~0u, t[i][c], x));
}

// `exchange` [tile][column][warp]: each warp writes its value of every column; after a barrier all read all four.
template <int TILES, int C>
FS_DEVICE void write_exchange(uint32_t exchange, const float (&value)[TILES][C]) {
  if (threadIdx.x % 32 >= 4) return;
  const uint32_t own = exchange + column_of(0) * 16 + threadIdx.x % 128 / 32 * 4;
#pragma unroll
  for (int i = 0; i < TILES; i++)
#pragma unroll
    for (int c = 0; c < C; c++) st_shared(own + i * C * 64 + c / 2 * 128 + c % 2 * 16, value[i][c]);
}

FS_DEVICE float maximum_of_warps(uint32_t exchange, int c) {
  const uint4 v = ld_shared_v4(exchange + column_of(c) * 16);
  return max_nan(max_nan(__uint_as_float(v.x), __uint_as_float(v.y)),
                 max_nan(__uint_as_float(v.z), __uint_as_float(v.w)));
}

FS_DEVICE float sum_of_warps(uint32_t exchange, int c) {
  const uint4 v = ld_shared_v4(exchange + column_of(c) * 16);
  return (__uint_as_float(v.x) + __uint_as_float(v.y)) + (__uint_as_float(v.z) + __uint_as_float(v.w));
}

// Running state of a thread's columns.
template <int C>
struct ColumnState {
  float m[C];  // maximum of the raw scores of kept tiles, -INF before the first key; the same in all threads
  float l[C];  // this thread's part of the sum of exp2((s - m) * scale_log2)

  FS_DEVICE ColumnState() {
#pragma unroll
    for (int c = 0; c < C; c++) {
      m[c] = -INF;
      l[c] = 0.f;
    }
  }
};

// What keeps earlier sums and outputs comparable when the maximum rises from `m` to `higher`; exactly 1 if it stays.
FS_DEVICE float rescale_factor(float m, float higher, float scale_log2) {
  return ex2((m - (higher == -INF ? 0.f : higher)) * scale_log2);
}

// What exponents subtract: 0 for a column without keys so far.
FS_DEVICE float exponent_shift(float m, float scale_log2) { return m == -INF ? 0.f : m * scale_log2; }

// Scores to probabilities, summed in fp32 and rounded into P^T, wgmma's B operand without a swizzle:
// [8 query rows][8 keys][key][query row], so that a thread's two columns are one word and no banks collide.
template <class Element, int N>
FS_DEVICE void exponentiate(const float (&s)[N], ColumnState<N / 2>& state, float scale_log2, uint32_t probabilities) {
#pragma unroll
  for (int c = 0; c < N / 2; c += 2) {
    const float shift0 = exponent_shift(state.m[c], scale_log2), shift1 = exponent_shift(state.m[c + 1], scale_log2);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float a = ex2(fmaf(s[score_of(c, half)], scale_log2, -shift0));
      const float b = ex2(fmaf(s[score_of(c + 1, half)], scale_log2, -shift1));
      state.l[c] += a;
      state.l[c + 1] += b;
      const int key = key_of(half);
      st_shared(probabilities + c / 2 * 1024 + key / 8 * 128 + key % 8 * 16 + threadIdx.x % 4 * 4, Element::pack(a, b));
    }
  }
}
