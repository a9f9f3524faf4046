// Zeros for the rows of a tile that hold no key of the request: 0 times whatever a page holds there could be NaN.
#pragma once
#include "ptx/shared.cuh"
#include "ptx/warpgroup.cuh"
#include "swizzle.cuh"

// Clears the rows of a V tile from `keys` on, with the 128 threads of a warpgroup. Several warpgroups may clear the
// same rows: each only reads what it has cleared itself.
template <int HEAD_DIM, int TILE_KV>
FS_DEVICE void zero_tail(uint32_t tile, int keys) {
  constexpr int PIECES = CHUNK_ROW_BYTES / 16;
#pragma unroll 1
  for (int i = keys * PIECES + threadIdx.x % 128; i < TILE_KV * PIECES; i += 128) {
#pragma unroll
    for (int chunk = 0; chunk < num_chunks(HEAD_DIM); chunk++) {
      st_shared_v4(tile + chunk * TILE_KV * CHUNK_ROW_BYTES + i * 16, make_uint4(0, 0, 0, 0));
    }
  }
  fence_proxy_async_shared();  // zeros before the wgmma that reads them, and the copy engine's next write
}
