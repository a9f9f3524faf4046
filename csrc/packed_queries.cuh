// Loads the rows of a packed unit: (token, head) pairs, which no box of the copy engine covers.
#pragma once
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "swizzle.cuh"
#include "work_item.cuh"

// Called by the warpgroup that reads the tile; rows past the unit's last are zeros.
template <int HEAD_DIM, class Params>
FS_DEVICE void load_packed_rows(const Params& p, const WorkItem& work, const UnitRows& rows, const void* tile,
                                int barrier) {
  constexpr int PIECES = HEAD_DIM / 8, PIECES_OF_CHUNK = CHUNK_ROW_BYTES / 16;  // of 16 bytes
  const uint64_t policy = createpolicy_evict_first();
#pragma unroll 4
  for (int i = threadIdx.x % 128; i < 64 * PIECES; i += 128) {
    const int row = i / PIECES, piece = i % PIECES, in_sequence = rows.first + row;
    const bool valid = row < rows.count;
    const int64_t token = work.first_token + work.token_of(in_sequence), head = rows.head + work.head_of(in_sequence);
    const uint16_t* q = static_cast<const uint16_t*>(p.q) + token * p.q_stride_token + head * p.q_stride_head;
    cp_async_16(shared_address(tile) + (piece / PIECES_OF_CHUNK * 64 + row) * CHUNK_ROW_BYTES +
                    (piece % PIECES_OF_CHUNK ^ row % 8) * 16,
                valid ? q + piece * 8 : p.q, valid, policy);
  }
  cp_async_wait_all();
  fence_proxy_async_shared();
  named_barrier_sync(barrier, 128);
}
