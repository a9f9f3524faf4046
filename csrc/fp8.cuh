// FP8 (e4m3) keys and values as operands of fp16 products: exact, in registers, the A operand of wgmma (64 keys or
// channels by 16). Queries to match: fp16, their channels in the order in which a thread finds those of a key.
#pragma once
#include "kv_tile.cuh"
#include "ptx/math.cuh"
#include "ptx/shared.cuh"

// Slices of 16 channels of a tile's keys. A thread has channels 4q..4q+3 of its keys (q = lane % 4) where wgmma
// expects 2q, 2q+1, 2q+8 and 2q+9: the sum over channels is the same when queries are permuted alike.
template <int HEAD_DIM>
FS_DEVICE void keys_as_operand(uint32_t (&a)[HEAD_DIM / 16][4], uint32_t k) {
  using Tile = KvTile<HEAD_DIM, 1>;
  const uint32_t lane = threadIdx.x % 32, key = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 16; i += 2) {
    uint32_t w[4];  // keys 0..7 and 8..15 of slice i, then of the next
    ld_matrix_x4(w, k + Tile::place(key, i + lane / 16));
#pragma unroll
    for (int j = 0; j < 2; j++) {
      fp16_of_e4m3(w[2 * j], a[i + j][0], a[i + j][2]);
      fp16_of_e4m3(w[2 * j + 1], a[i + j][1], a[i + j][3]);
    }
  }
}

// Where a query's channels `8 * piece` and on go in its row of 16-byte units, and how.
struct QueryPiece {
  uint4 words;  // eight fp16 channels

  // Calls `store(unit, byte, two words)` for both units.
  template <class Store>
  FS_DEVICE void permuted(int piece, Store store) const {
    const int unit = piece / 2 * 2, byte = piece % 2 * 8;
    store(unit, byte, words.x, words.z);
    store(unit + 1, byte, words.y, words.w);
  }
};

// Eight bf16 channels of a row that LANES neighbouring lanes hold become fp16, times the power of two that brings the
// row's largest below 2^16; returns the inverse of that power. All bits of a channel stay, unless it is 2^29 times
// smaller than the largest. A row that holds NaN or infinity is not scaled.
template <int LANES>
FS_DEVICE float fp16_of_bf16_row(uint4& words) {
  uint32_t* const w = &words.x;
  uint32_t largest = 0;  // magnitudes order as their bits do
#pragma unroll
  for (int i = 0; i < 4; i++) largest = max(largest, max(w[i] & 0x7fff, w[i] >> 16 & 0x7fff));
#pragma unroll
  for (int x = 1; x < LANES; x *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, x));
  const int exponent = largest >> 7, shift = exponent == 255 ? 0 : min(127 + 15 - exponent, 126);
  const float scale = __int_as_float(127 + shift << 23);
#pragma unroll
  for (int i = 0; i < 4; i++)
    w[i] = Fp16::pack(__uint_as_float(w[i] << 16) * scale, __uint_as_float(w[i] & 0xffff0000) * scale);
  return __int_as_float(127 - shift << 23);
}

// Slices of 16 keys of 64 channels from 64 * block on. Row r of a warp's 16 is channel 2 * (r % 8) + r / 8 of its 16,
// see `fp8_channel_of`.
template <int HEAD_DIM>
FS_DEVICE void values_as_operand(uint32_t (&a)[DECODE_TILE_KV / 16][4], uint32_t v, int block) {
  const uint32_t lane = threadIdx.x % 32, unit = 4 * block + threadIdx.x % 128 / 32;
#pragma unroll
  for (int i = 0; i < DECODE_TILE_KV / 16; i += 2) {
    uint32_t w[4];  // two channels of two keys each; 8 keys a word
    ld_matrix_x4_trans(w, v + KvTile<HEAD_DIM, 1>::place(16 * i + lane, unit));
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const uint32_t by_channel = __byte_perm(w[j], 0, 0x3120);
      fp16_of_e4m3(by_channel, a[i + j / 2][j % 2 * 2], a[i + j / 2][j % 2 * 2 + 1]);
    }
  }
}

FS_DEVICE int fp8_channel_of(int half) { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 * 2 + half; }
