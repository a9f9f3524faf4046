// How tiles lie in shared memory, and the descriptors with which wgmma finds them.
// A 16-bit tile is stored as chunks of 64 columns, [chunk][row][128 bytes], 16-byte units XOR-swizzled over 8 rows.
#pragma once
#include "types.cuh"

constexpr int CHUNK_COLUMNS = 64;  // of a 128-byte swizzled row
constexpr int CHUNK_ROW_BYTES = 128;

// Chunks of a row of `columns` columns; the last one may be half empty.
FS_DEVICE constexpr int num_chunks(int columns) { return (columns + CHUNK_COLUMNS - 1) / CHUNK_COLUMNS; }

FS_DEVICE constexpr int tile_bytes(int rows, int columns) { return rows * num_chunks(columns) * CHUNK_ROW_BYTES; }

enum class Swizzle : uint32_t { NONE = 0, BYTES_128 = 1, BYTES_64 = 2, BYTES_32 = 3 };

// The 64-bit matrix descriptor. K-major operands: `stride_bytes` leads to the next 8 rows, `leading_bytes` is
// ignored. MN-major: `stride_bytes` leads to the next 8 k, `leading_bytes` to the next 64 columns (or, without
// a swizzle, to the next 8 along the contiguous dimension). `address` of a 128-byte swizzled atom: multiple of 1024.
FS_DEVICE uint64_t matrix_descriptor(uint32_t address, uint32_t leading_bytes, uint32_t stride_bytes, Swizzle swizzle) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | static_cast<uint64_t>(leading_bytes >> 4) << 16 |
         static_cast<uint64_t>(stride_bytes >> 4) << 32 | static_cast<uint64_t>(swizzle) << 62;
}

// Moves a descriptor's start by `bytes` (a multiple of 16). In PTX: of an addition in C++ the compiler makes an OR of a
// half and a copy of the other one where it knows the bits.
FS_DEVICE uint64_t advance_descriptor(uint64_t descriptor, uint32_t bytes) {
  uint64_t moved;
  asm("add.s64 %0, %1, %2;" : "=l"(moved) : "l"(descriptor), "l"(static_cast<int64_t>(bytes >> 4)));
  return moved;
}

// A matrix descriptor that is moved by constants. A compiler that knows its upper half may put that together anew for
// each slice, with two or three instructions: HIDDEN adds `blockIdx.y` to it, which is 0.
template <bool HIDDEN>
struct SlicedOperand {
  uint64_t first;

  FS_DEVICE explicit SlicedOperand(uint64_t descriptor) : first(descriptor) {
    if (HIDDEN) first += static_cast<uint64_t>(blockIdx.y) << 32;
  }

  FS_DEVICE uint64_t at(uint32_t bytes) const {
    if (!HIDDEN) return advance_descriptor(first, bytes);
    const uint32_t low = static_cast<uint32_t>(first) + (bytes >> 4), high = static_cast<uint32_t>(first >> 32);
    uint64_t descriptor;
    asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low), "r"(high));
    return descriptor;
  }
};

// Bytes from a K-major tile's start to its k-th slice of 16 columns.
FS_DEVICE constexpr uint32_t k_slice_bytes(int k, int rows) {
  return (k / 4) * rows * CHUNK_ROW_BYTES + (k % 4) * 32;
}
