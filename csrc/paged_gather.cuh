// Loads tiles of a paged cache row by row: two warps, each copies 32 rows in pieces of 16 bytes. Any page size.
#pragma once
#include "decode_schedule.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "swizzle.cuh"

constexpr int LOADER_WARPS = 2;  // that load K, and as many for V
constexpr int LOADER_ARRIVALS = 2 * 32 + 2;  // on the barrier of a loaded stage: every copy, and the page ids
constexpr bool TAIL_IS_ZERO = true;          // rows past the last key are written as zeros
constexpr int PAGE_IDS = DECODE_TILE_KV;     // in a tile: one a row

FS_DEVICE int row_of_lane() { return threadIdx.x % (32 * LOADER_WARPS); }

// Page ids of the tiles of a segment, a row a lane, the next tile's always under way.
template <class Params>
struct PageReader {
  const Params& p;
  RequestPages request;
  int last, first_id, last_id;  // of the first and the last tile, which are visited out of order
  int next_id;

  FS_DEVICE PageReader(const Params& p, const Segment& s, const VisitOrder& order)
      : p(p), request(s.pages), last(order.last) {
    first_id = fetch(0);
    last_id = fetch(last);
    next_id = fetch(order.inner_begin);
  }

  FS_DEVICE int fetch(int tile) const { return page_of_key(p, request, tile * DECODE_TILE_KV + row_of_lane()); }

  // Page id of the tile's row of this lane; tiles between the first and the last ascend one by one.
  FS_DEVICE int at(int tile) {
    if (tile == 0) return first_id;
    if (tile == last) return last_id;
    const int id = next_id;
    next_id = fetch(tile + 1);
    return id;
  }
};

// Copies this warp's rows of one tile. `page` is that of this lane's row.
template <int HEAD_DIM, class Params>
FS_DEVICE void load_tile(const Params& p, uint32_t dst, uint32_t barrier, const TensorMap*, const CacheView& cache,
                         int tile, int kv_head, int page, uint64_t policy) {
  constexpr int PIECES = HEAD_DIM * 2 / 16;     // of a row
  constexpr int ROWS_AT_ONCE = 32 / PIECES;
  const int lane = threadIdx.x % 32, piece = lane % PIECES;
  const int token = (tile * DECODE_TILE_KV + row_of_lane()) % p.page_size;
  const int64_t offset = page * cache.stride_page + token * cache.stride_token + kv_head * cache.stride_head;
  const int64_t mine = page == NO_PAGE ? -1 : offset;
#pragma unroll 4
  for (int i = 0; i < 32 / ROWS_AT_ONCE; i++) {
    const int source = i * ROWS_AT_ONCE + lane / PIECES;
    const int64_t from = __shfl_sync(~0u, mine, source);
    const int row = row_of_lane() - lane + source;
    const uint32_t to = (piece / 8 * DECODE_TILE_KV + row) * CHUNK_ROW_BYTES + ((piece ^ row) % 8) * 16;
    const uint16_t* address = static_cast<const uint16_t*>(cache.base) + (from < 0 ? 0 : from + piece * 8);
    cp_async_16(dst + to, address, from >= 0, policy);
  }
  cp_async_mbarrier_arrive_noinc(barrier);
  __syncwarp();
  if (lane == 0) mbarrier_arrive(barrier);  // for what the warp stored beside the copies
}

// Arrives as a load of nothing would.
FS_DEVICE void load_nothing(uint32_t barrier) {
  mbarrier_arrive(barrier);
  if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}
