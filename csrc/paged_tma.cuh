// Loads tiles of a paged cache with the copy engine: a lane per box (rows of one page, a chunk), two warps in turns:
// what a tile costs a warp is longer than what a small one takes to arrive. The page size is a run-time value: a
// multiple of 64, or 8, 16, 32.
#pragma once
#include "decode_schedule.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

constexpr int LOADER_WARPS = 2;       // that load K, and as many for V
constexpr int LOADER_TURNS = 2;       // groups of them, of which each fills every second stage
constexpr int LOADER_ARRIVALS = 1;    // on the barrier of a loaded stage
constexpr bool TAIL_IS_ZERO = false;  // rows past the last key are whatever the page holds
constexpr int PAGE_IDS = 8;           // at most, in a tile

using Boxes = PageBoxes<DECODE_TILE_KV>;

FS_DEVICE int page_of_lane() { return threadIdx.x % 32; }  // the box of a tile whose page a lane knows, if there is one

// Page ids of the tiles of a segment, 32 boxes a load, the next load always under way.
template <class Params>
struct PageReader {
  const Params& p;
  const PageSize page_size;
  const Boxes boxes;
  RequestPages request;
  TileRange ends;               // visited out of order
  int first_id, last_id;
  int group, ids, next_ids;     // first tile that `ids` covers

  FS_DEVICE explicit PageReader(const Params& p) : p(p), page_size(p.page_size, p.page_reciprocal), boxes(p.page_size) {}

  FS_DEVICE int tiles_per_load() const { return 32 >> boxes.log2_count; }

  // This lane's box of the tiles from `tile` on.
  FS_DEVICE int fetch(int tile) const {
    return page_id_of_key(p, page_size, request, tile * DECODE_TILE_KV + (threadIdx.x % 32 << boxes.log2_rows));
  }

  FS_DEVICE void begin(const Segment& s, const VisitOrder& order) {
    request = s.pages;
    ends = order.tiles;
    group = order.inner_begin;
    first_id = fetch(ends.first);
    last_id = fetch(ends.last);
    ids = fetch(group);
    next_ids = fetch(group + tiles_per_load());
  }

  // Page of the tile's box number `lane`; tiles between the first and the last ascend one by one.
  FS_DEVICE int at(int tile) {
    if (tile == ends.first) return bounded_page(p, first_id);
    if (tile == ends.last) return bounded_page(p, last_id);
    return bounded_page(p, __shfl_sync(~0u, ids, (tile - group << boxes.log2_count) + threadIdx.x % 32));
  }

  // After the use of `tile`'s ids.
  FS_DEVICE void prefetch(int tile) {
    if (tile == ends.first || tile == ends.last || tile + 1 - group < tiles_per_load()) return;
    group = tile + 1;
    ids = next_ids;
    next_ids = fetch(group + tiles_per_load());
  }
};

template <class Tile, int HEAD_DIM>
struct TileLoader {
  static constexpr int CHUNKS = Tile::CHUNKS;
  const TensorMap* const map;
  const uint64_t policy;
  const PageSize page_size;
  const Boxes boxes;
  int box, chunk;         // of this lane
  uint32_t offset;  // of this lane's box in a tile

  template <class Params>
  FS_DEVICE TileLoader(const Params& p, const TensorMap* map, const CacheView&)
      : map(map), policy(createpolicy_evict_first()), page_size(p.page_size, p.page_reciprocal), boxes(p.page_size) {
    box = threadIdx.x % 32 / CHUNKS;
    chunk = threadIdx.x % 32 % CHUNKS;
    offset = chunk * Tile::CHUNK_BYTES + (box << boxes.log2_rows) * Tile::ROW_BYTES;
    if (threadIdx.x % 32 == 0) prefetch_tensormap(map);
  }

  // A stage stays with its warp, in rings of odd length too: who waits for each second fill of a stage cannot tell by
  // the parity whether the one between has begun.
  FS_DEVICE static bool takes(int stage) { return stage % LOADER_TURNS == threadIdx.x / 32 % LOADER_TURNS; }

  // Announces and issues the loads of one tile. `page` is that of box number `lane`.
  FS_DEVICE void load(uint32_t dst, uint32_t barrier, int tile, int kv_head, int page) const {
    page = __shfl_sync(~0u, page, box);
    if (threadIdx.x % 32 == 0) mbarrier_arrive_expect_tx(barrier, Tile::BYTES);  // zeros past the head's channels count
    __syncwarp();  // the bytes are announced before any can arrive
    if (box >= boxes.count) return;
    const int token = boxes.count == 1 ? page_size.place(tile * DECODE_TILE_KV).token : 0;
    tma_load_4d(dst + offset, map, barrier, policy, chunk * Tile::COLUMNS, token, kv_head, page);
  }

  // Arrives as a load would.
  FS_DEVICE void load_nothing(uint32_t barrier) const {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
  }
};
