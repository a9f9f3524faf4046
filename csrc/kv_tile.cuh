// How a tile of the cache lies in shared memory: chunks of columns, [chunk][key][row of the chunk], the 16-byte units
// of a row XOR-swizzled. Chunks are 64 bytes wide where 128 would leave half of the last one empty.
#pragma once
#include "swizzle.cuh"
#include "types.cuh"

constexpr int DECODE_TILE_KV = 64;  // keys of a tile

template <int HEAD_DIM, int ELEMENT_BYTES>
struct KvTile {
  static constexpr int ROW_BYTES = HEAD_DIM * ELEMENT_BYTES % 128 == 64 ? 64 : 128;  // of a chunk: its swizzle's span
  static constexpr int UNITS = ROW_BYTES / 16;                                 // of such a row
  static constexpr int COLUMNS = ROW_BYTES / ELEMENT_BYTES;
  static constexpr int CHUNKS = (HEAD_DIM + COLUMNS - 1) / COLUMNS;
  static constexpr int CHUNK_BYTES = DECODE_TILE_KV * ROW_BYTES;
  static constexpr int BYTES = CHUNKS * CHUNK_BYTES;

  static constexpr Swizzle SWIZZLE = ROW_BYTES == 128 ? Swizzle::BYTES_128 : Swizzle::BYTES_64;
  static constexpr int STRIDE_BYTES = 8 * ROW_BYTES;  // a matrix descriptor's: to the next 8 keys

  // Bytes from the tile's start to its i-th slice of 32 bytes of each row.
  static FS_DEVICE constexpr uint32_t slice_bytes(int i) {
    return i / (ROW_BYTES / 32) * CHUNK_BYTES + i % (ROW_BYTES / 32) * 32;
  }

  // What the units of a key's row are XORed with; of a sum of keys without common bits, the XOR of both.
  static FS_DEVICE uint32_t swizzle(uint32_t key) { return ROW_BYTES == 128 ? key % 8 : key / 2 % 4; }

  // Bytes from the tile's start to unit `unit` of the head's row of `key`.
  static FS_DEVICE uint32_t place(uint32_t key, uint32_t unit) {
    return unit / UNITS * CHUNK_BYTES + key * ROW_BYTES + (unit % UNITS ^ swizzle(key)) * 16;
  }
};
