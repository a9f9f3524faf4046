// Loads tiles of a paged cache row by row: two warps, each copies 32 rows in pieces of 16 bytes. Any page size.
#pragma once
#include "decode_schedule.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "swizzle.cuh"

constexpr int LOADER_WARPS = 2;              // that load K, and as many for V
constexpr int LOADER_ARRIVALS = 2 * 32 + 2;  // on the barrier of a loaded stage: every copy, and the page ids
constexpr bool TAIL_IS_ZERO = true;          // rows past the last key are written as zeros
constexpr int PAGE_IDS = DECODE_TILE_KV;     // in a tile: one a row

FS_DEVICE int row_of_lane() { return threadIdx.x % (32 * LOADER_WARPS); }

// Page ids of the tiles of a segment, a row a lane, several tiles a load, the next load always under way.
template <class Params>
struct PageReader {
  static constexpr int TILES_PER_LOAD = 4;
  const Params& p;
  const PageSize page_size;
  RequestPages request;
  TileRange ends;               // visited out of order
  int first_id, last_id;
  int group;                    // first tile that `ids` covers
  int ids[TILES_PER_LOAD], next_ids[TILES_PER_LOAD];

  FS_DEVICE explicit PageReader(const Params& p) : p(p), page_size(p.page_size) {}

  FS_DEVICE int fetch(int tile) const {
    return page_id_of_key(p, page_size, request, tile * DECODE_TILE_KV + row_of_lane());
  }

  FS_DEVICE void begin(const Segment& s, const VisitOrder& order) {
    request = s.pages;
    ends = order.tiles;
    first_id = fetch(ends.first);
    last_id = fetch(ends.last);
    group = order.inner_begin;
#pragma unroll
    for (int i = 0; i < TILES_PER_LOAD; i++) {
      ids[i] = fetch(group + i);
      next_ids[i] = fetch(group + TILES_PER_LOAD + i);
    }
  }

  // Page of the tile's row of this lane; tiles between the first and the last ascend one by one.
  FS_DEVICE int at(int tile) const {
    int id = tile == ends.first ? first_id : last_id;
#pragma unroll
    for (int i = 0; i < TILES_PER_LOAD; i++)
      if (tile == group + i && tile < ends.last) id = ids[i];
    return bounded_page(p, id);
  }

  // After the use of `tile`'s id.
  FS_DEVICE void prefetch(int tile) {
    if (tile + 1 - group != TILES_PER_LOAD || tile == ends.last) return;
    group += TILES_PER_LOAD;
#pragma unroll
    for (int i = 0; i < TILES_PER_LOAD; i++) {
      ids[i] = next_ids[i];
      next_ids[i] = fetch(group + TILES_PER_LOAD + i);
    }
  }
};

template <int HEAD_DIM>
struct TileLoader {
  static constexpr int PIECES = HEAD_DIM * 2 / 16;  // of a row
  static constexpr int ROWS_AT_ONCE = 32 / PIECES;
  const CacheView cache;
  const uint64_t policy;
  const PageSize page_size;

  template <class Params>
  FS_DEVICE TileLoader(const Params& p, const TensorMap*, const CacheView& cache)
      : cache(cache), policy(createpolicy_evict_first()), page_size(p.page_size) {}

  // Copies this warp's rows of one tile. `page` is that of this lane's row.
  FS_DEVICE void load(uint32_t dst, uint32_t barrier, int tile, int kv_head, int page) const {
    const int lane = threadIdx.x % 32, piece = lane % PIECES, first_row = row_of_lane() - lane;
    const uint32_t token = page_size.place(tile * DECODE_TILE_KV + row_of_lane()).token;
    const int64_t offset = page * cache.stride_page + token * cache.stride_token + kv_head * cache.stride_head;
    const int64_t mine = page == NO_PAGE ? -1 : offset;
#pragma unroll 4
    for (int i = 0; i < 32 / ROWS_AT_ONCE; i++) {
      const int source = i * ROWS_AT_ONCE + lane / PIECES, row = first_row + source;
      const int64_t from = __shfl_sync(~0u, mine, source);
      const uint32_t to = (piece / 8 * DECODE_TILE_KV + row) * CHUNK_ROW_BYTES + ((piece ^ row) % 8) * 16;
      const uint16_t* address = static_cast<const uint16_t*>(cache.base) + (from < 0 ? 0 : from + piece * 8);
      cp_async_16(dst + to, address, from >= 0, policy);
    }
    cp_async_mbarrier_arrive_noinc(barrier);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barrier);  // for what the warp stored beside the copies
  }

  // Arrives as a load would.
  FS_DEVICE void load_nothing(uint32_t barrier) const {
    mbarrier_arrive(barrier);
    if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
  }
};
