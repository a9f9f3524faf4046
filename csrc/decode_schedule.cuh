// Who attends what in decode (stream-K): the tiles of all work items form one list, ordered by request, KV head,
// row unit and key, which is cut evenly over the CTAs. Every CTA finds its share from the index tensors alone.
//   item     one (request, KV head, unit of query rows) with all its tiles
//   segment  the tiles of one item that one CTA owns; an item cut by a share's end has several, merged later
#pragma once
#include "page_table.cuh"

constexpr int DECODE_TILE_KV = 64;   // keys of a tile
constexpr int MIN_TILES_PER_CTA = 2;  // below this, fewer CTAs start sooner than more merge

struct Segment {
  int request, kv_head, unit;
  RequestPages pages;
  int num_tiles;   // of the item
  int begin, end;  // tiles of the item that belong to this CTA
  int64_t offset;  // of the item in the list

  FS_DEVICE bool is_whole() const { return begin == 0 && end == num_tiles; }
  FS_DEVICE bool owns(int tile) const { return tile >= begin && tile < end; }
  FS_DEVICE int keys_in(int tile) const { return min(pages.kv_len - tile * DECODE_TILE_KV, DECODE_TILE_KV); }
};

// The share of one CTA.
struct WorkShare {
  int64_t begin, end;   // in the list
  int64_t total;        // tiles of all
  int ctas;             // that have a share
  int items;            // per request: KV heads times row units
  int window;           // request at which a walk starts, at most 31 before the first one of the share
  int64_t window_begin; // its offset in the list

  FS_DEVICE int owner_of(int64_t tile) const { return static_cast<int>(((tile + 1) * ctas - 1) / total); }
};

FS_DEVICE int num_tiles(int kv_len) { return static_cast<int>((static_cast<uint32_t>(kv_len) + DECODE_TILE_KV - 1) / DECODE_TILE_KV); }

// Called by all threads. `sums` [warps] is shared; each warp adds up a slab of consecutive requests.
template <int WARPS, class Params>
FS_DEVICE WorkShare find_share(const Params& p, int items, int64_t (&sums)[WARPS]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int slab = ((p.batch_size + WARPS - 1) / WARPS + 31) / 32 * 32;
  const int stop = min((warp + 1) * slab, p.batch_size);
  int64_t tiles = 0;
#pragma unroll 4
  for (int request = warp * slab + lane; request < stop; request += 32)
    tiles += num_tiles(request_pages(p, request).kv_len);
#pragma unroll
  for (int x = 16; x > 0; x /= 2) tiles += __shfl_xor_sync(~0u, tiles, x);
  if (lane == 0) sums[warp] = tiles * items;
  __syncthreads();

  WorkShare share{};
  share.items = items;
#pragma unroll
  for (int w = 0; w < WARPS; w++) share.total += sums[w];
  share.ctas = static_cast<int>(min(static_cast<int64_t>(gridDim.x), max(share.total / MIN_TILES_PER_CTA, 1ll)));
  if (static_cast<int>(blockIdx.x) >= share.ctas) return share;
  share.begin = share.total * blockIdx.x / share.ctas;
  share.end = share.total * (blockIdx.x + 1) / share.ctas;
  for (int w = 0; w < WARPS - 1 && share.window_begin + sums[w] <= share.begin; w++) {
    share.window_begin += sums[w];
    share.window += slab;
  }
  return share;
}

// Enumerates the segments of a share. Called by whole warps; each lane knows one of 32 consecutive requests.
template <class Params>
struct SegmentWalk {
  const Params& p;
  int items;
  int64_t position, end;
  int window;
  int64_t window_end;  // offset in the list after the window
  int64_t lane_end;    // after this lane's request
  RequestPages lane_pages;

  FS_DEVICE SegmentWalk(const Params& p, const WorkShare& share)
      : p(p), items(share.items), position(share.begin), end(share.end), window(share.window) {
    window_end = share.window_begin;
    if (position < end) load_window();
  }

  FS_DEVICE void load_window() {
    const int request = window + threadIdx.x % 32;
    lane_pages = request < p.batch_size ? request_pages(p, request) : RequestPages{0, 0};
    lane_end = static_cast<int64_t>(num_tiles(lane_pages.kv_len)) * items;
#pragma unroll
    for (int x = 1; x < 32; x *= 2) {
      const int64_t before = __shfl_up_sync(~0u, lane_end, x);
      if (threadIdx.x % 32 >= x) lane_end += before;
    }
    lane_end += window_end;
    window_end = __shfl_sync(~0u, lane_end, 31);
  }

  FS_DEVICE bool next(Segment& s) {
    if (position >= end) return false;
    while (position >= window_end) {
      window += 32;
      load_window();
    }
    const int lane = __popc(__ballot_sync(~0u, lane_end <= position));
    s.request = window + lane;
    s.pages.first_index = __shfl_sync(~0u, lane_pages.first_index, lane);
    s.pages.kv_len = __shfl_sync(~0u, lane_pages.kv_len, lane);
    s.num_tiles = num_tiles(s.pages.kv_len);
    const int64_t request_begin = __shfl_sync(~0u, lane_end, lane) - static_cast<int64_t>(s.num_tiles) * items;
    const int item = static_cast<int>((position - request_begin) / s.num_tiles);
    s.offset = request_begin + static_cast<int64_t>(item) * s.num_tiles;
    s.kv_head = item % p.num_kv_heads;
    s.unit = item / p.num_kv_heads;
    s.begin = static_cast<int>(position - s.offset);
    s.end = static_cast<int>(min(static_cast<int64_t>(s.num_tiles), end - s.offset));
    position = s.offset + s.end;
    return true;
  }
};

// In which order a segment's tiles are scored: tile 0 and the item's last tile, then those between, upwards.
// With seeds both are scored even where another CTA owns them.
struct VisitOrder {
  int last;         // the item's last tile
  bool visits_first, visits_last;
  int inner_begin;  // tiles between
  int count;        // of all visits

  FS_DEVICE VisitOrder(const Segment& s, bool seeded)
      : last(s.num_tiles - 1),
        visits_first(seeded || s.begin == 0),
        visits_last(last > 0 && (seeded || s.end > last)),
        inner_begin(max(s.begin, 1)) {
    count = num_ends() + max(min(s.end, last) - inner_begin, 0);
  }

  FS_DEVICE int num_ends() const { return visits_first + visits_last; }

  FS_DEVICE int tile(int visit) const {
    if (visit == 0 && visits_first) return 0;
    if (visit == visits_first && visits_last) return last;
    return inner_begin + visit - num_ends();
  }
};
