// Output rows from accumulator registers to global memory in 16-byte stores, without shared memory.
#pragma once
#include "mask.cuh"
#include "types.cuh"

// Transposes 4x4 words among the four threads of a quad: thread q ends up with word q of each thread, in order.
FS_DEVICE void transpose_in_quad(uint32_t (&x)[4]) {
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    const bool upper = threadIdx.x & distance;
#pragma unroll
    for (int a = 0; a < 4; a++) {
      const int b = a + distance;
      if (a & distance) continue;
      const uint32_t received = __shfl_xor_sync(~0u, upper ? x[a] : x[b], distance);
      if (upper) x[a] = received;
      else x[b] = received;
    }
  }
}

// Stores row `ROW` (0 or 1) of a thread's pair times `factor`. An accumulator holds words of two columns; in groups of
// 32 columns each thread of a quad gathers 8 neighbouring ones. Whole quads take part; `valid` is the row's.
template <class Element, int ROW, int N>
FS_DEVICE void store_row(uint16_t* row, const float (&o)[N], float factor, bool valid) {
#pragma unroll
  for (int group = 0; group < N / 16; group++) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int pair = 16 * group + 4 * i + 2 * ROW;
      words[i] = Element::pack(o[pair] * factor, o[pair + 1] * factor);
    }
    transpose_in_quad(words);
    if (valid) {
      const int column = 32 * group + 8 * (threadIdx.x % 4);
      *reinterpret_cast<uint4*>(row + column) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}
