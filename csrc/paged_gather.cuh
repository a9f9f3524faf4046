// Loads tiles of a paged cache row by row: two warps, each copies 32 rows in pieces of 16 bytes. Any page size.
#pragma once
#include "decode_schedule.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

constexpr int LOADER_WARPS = 2;              // that load K, and as many for V
constexpr int LOADER_TURNS = 1;              // both take part in each tile
constexpr int LOADER_ARRIVALS = 2 * 32 + 2;  // on the barrier of a loaded stage: every copy, and the page ids
constexpr bool TAIL_IS_ZERO = true;          // rows past the last key are written as zeros
constexpr int PAGE_IDS = DECODE_TILE_KV;     // in a tile: one a row

FS_DEVICE int row_of_lane() { return threadIdx.x % (32 * LOADER_WARPS); }
FS_DEVICE int page_of_lane() { return row_of_lane(); }  // of a tile's page ids the one that a lane knows

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

  FS_DEVICE explicit PageReader(const Params& p) : p(p), page_size(p.page_size, p.page_reciprocal) {}

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

template <class Tile, int HEAD_DIM>
struct TileLoader {
  static constexpr int ELEMENT_BYTES = Tile::ROW_BYTES / Tile::COLUMNS;
  static constexpr int PIECES = HEAD_DIM * ELEMENT_BYTES / 16;  // of a row
  static constexpr int ROWS_AT_ONCE = PIECES > 16 ? 1 : PIECES > 8 ? 2 : PIECES > 4 ? 4 : 8;
  static constexpr bool ALL_LANES = PIECES * ROWS_AT_ONCE == 32;  // copy; else the last ones idle
  const CacheView cache;
  const uint64_t policy;
  const PageSize page_size;
  int sub;                // this lane's row among those copied at once
  uint32_t piece_offset;  // of its piece in a row, bytes
  uint32_t to, swizzled;  // where its first piece goes in a tile: row and chunk, and the bytes in the row

  template <class Params>
  FS_DEVICE TileLoader(const Params& p, const TensorMap*, const CacheView& cache)
      : cache(cache), policy(createpolicy_evict_first()), page_size(p.page_size, p.page_reciprocal) {
    const int lane = threadIdx.x % 32, piece = lane % PIECES;
    sub = lane / PIECES;
    piece_offset = piece * 16;
    to = piece / Tile::UNITS * Tile::CHUNK_BYTES + (row_of_lane() - lane + sub) * Tile::ROW_BYTES;
    swizzled = (piece % Tile::UNITS ^ Tile::swizzle(sub)) * 16;
  }

  FS_DEVICE static bool takes(int) { return true; }

  // Copies this warp's rows of one tile. `page` is that of this lane's row.
  FS_DEVICE void load(uint32_t dst, uint32_t barrier, int tile, int kv_head, int page) const {
    const uint32_t token = page_size.place(tile * DECODE_TILE_KV + row_of_lane()).token;
    const uint32_t valid = __ballot_sync(~0u, page != NO_PAGE);
    const int64_t offset = page * cache.stride_page + token * cache.stride_token + kv_head * cache.stride_head;
    const uint64_t mine = reinterpret_cast<uint64_t>(cache.base) + (page == NO_PAGE ? 0 : ELEMENT_BYTES * offset);
#pragma unroll 4
    for (int first = 0; first < 32; first += ROWS_AT_ONCE) {  // `first` and `sub` have no common bits
      const uint64_t row = __shfl_sync(~0u, mine, first + sub);
      if (ALL_LANES || sub < ROWS_AT_ONCE)
        cp_async_16(dst + to + first * Tile::ROW_BYTES + (swizzled ^ Tile::swizzle(first) * 16),
                    reinterpret_cast<const void*>(row + piece_offset), valid >> (first + sub) & 1, policy);
    }
    cp_async_mbarrier_arrive_noinc(barrier);
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);  // for what the warp stored beside the copies
  }

  // Arrives as a load would.
  FS_DEVICE void load_nothing(uint32_t barrier) const {
    mbarrier_arrive(barrier);
    if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
  }
};
