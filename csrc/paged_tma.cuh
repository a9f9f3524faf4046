// Loads tiles of a paged cache with the copy engine: one warp, a lane per box (rows of one page, 64 columns).
// The page size is a run-time value: a multiple of 64, or 8, 16, 32.
#pragma once
#include "decode_schedule.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "swizzle.cuh"

constexpr int LOADER_WARPS = 1;     // that load K, and as many for V
constexpr int LOADER_ARRIVALS = 1;  // on the barrier of a loaded stage
constexpr bool TAIL_IS_ZERO = false;  // rows past the last key are whatever the page holds
constexpr int PAGE_IDS = 8;         // at most, in a tile

template <class Params>
FS_DEVICE int boxes_per_tile(const Params& p) {
  return DECODE_TILE_KV / min(p.page_size, DECODE_TILE_KV);
}

// Page ids of the tiles of a segment, 32 boxes a load, the next load always under way.
template <class Params>
struct PageReader {
  const Params& p;
  RequestPages request;
  int boxes, tiles_per_load;
  int last, first_id, last_id;      // of the first and the last tile, which are visited out of order
  int group, ids, next_ids;         // first tile that `ids` covers

  FS_DEVICE PageReader(const Params& p, const Segment& s, const VisitOrder& order)
      : p(p), request(s.pages), boxes(boxes_per_tile(p)), tiles_per_load(32 / boxes), last(order.last) {
    first_id = fetch(0);
    last_id = fetch(last);
    group = order.inner_begin;
    ids = fetch(group);
    next_ids = fetch(group + tiles_per_load);
  }

  // This lane's box of the tiles from `first` on.
  FS_DEVICE int fetch(int first) const {
    return page_of_key(p, request, first * DECODE_TILE_KV + (threadIdx.x % 32) * (DECODE_TILE_KV / boxes));
  }

  // Page id of the tile's box number `lane`; tiles between the first and the last ascend one by one.
  FS_DEVICE int at(int tile) {
    if (tile == 0) return first_id;
    if (tile == last) return last_id;
    if (tile - group == tiles_per_load) {
      group = tile;
      ids = next_ids;
      next_ids = fetch(group + tiles_per_load);
    }
    return __shfl_sync(~0u, ids, (tile - group) * boxes + threadIdx.x % 32);
  }
};

// Announces and issues the loads of one tile. `page` is that of box number `lane`.
template <int HEAD_DIM, class Params>
FS_DEVICE void load_tile(const Params& p, uint32_t dst, uint32_t barrier, const TensorMap* map, const CacheView&,
                         int tile, int kv_head, int page, uint64_t policy) {
  constexpr int CHUNKS = HEAD_DIM / CHUNK_COLUMNS;
  const int lane = threadIdx.x % 32, boxes = boxes_per_tile(p);
  const int box = lane / CHUNKS, chunk = lane % CHUNKS;
  const int token = boxes == 1 ? tile * DECODE_TILE_KV % p.page_size : 0;
  page = __shfl_sync(~0u, page, box);
  if (lane == 0) mbarrier_arrive_expect_tx(barrier, DECODE_TILE_KV * HEAD_DIM * 2);
  __syncwarp();  // the bytes are announced before any can arrive
  if (box >= boxes) return;
  const uint32_t row = box * (DECODE_TILE_KV / boxes);
  tma_load_4d(dst + (chunk * DECODE_TILE_KV + row) * CHUNK_ROW_BYTES, map, barrier, policy, chunk * CHUNK_COLUMNS,
              token, kv_head, page);
}

// Arrives as a load of nothing would.
FS_DEVICE void load_nothing(uint32_t barrier) {
  if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}
