// Who attends what in decode (stream-K): the tiles of all work items form one list, ordered by strand, request, row
// unit, KV head and key, which is cut evenly over the CTAs. Every CTA finds its share from the index tensors alone.
//   strand   of each request every `strands`-th KV head. Strands are equally long and have equally many CTAs, which
//            therefore are at the same tokens of heads side by side at about the same time: memory is faster where they
//            lie side by side too. The first head is another one in the next request: heads skip differently
//   item     one (request, KV head, unit of query rows) with all its tiles
//   segment  the tiles of one item that one CTA owns; an item cut by a share's end has several, merged later
#pragma once
#include "kv_tile.cuh"
#include "page_table.cuh"

constexpr int MIN_TILES_PER_CTA = 2;  // below this, fewer CTAs start sooner than more merge

// Most lists are short enough for a division that takes a fifth of the time.
FS_DEVICE int64_t quotient(int64_t a, int64_t b) {
  if ((a | b) >> 32 == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

// The tiles of a request of which some query row sees a key; none if `last` is before `first`.
struct TileRange {
  int first, last;

  FS_DEVICE int count() const { return last - first + 1; }
};

// The last token sees all keys, the first one the earliest of the window.
template <class Params>
FS_DEVICE TileRange visible_tiles(const Params& p, int kv_len) {
  const int before = kv_len - p.q_len_per_req;  // keys before the first token's own
  const int first_key = p.window_left < 0 || before <= p.window_left ? 0 : before - p.window_left;
  return {first_key / DECODE_TILE_KV, kv_len > 0 ? (kv_len - 1) / DECODE_TILE_KV : first_key / DECODE_TILE_KV - 1};
}

struct Segment {
  int request, kv_head, unit;
  RequestPages pages;
  TileRange tiles;  // of the item
  int begin, end;   // those that belong to this CTA
  int64_t offset;   // of the item in the whole list

  FS_DEVICE bool is_whole() const { return begin == tiles.first && end > tiles.last; }
  FS_DEVICE bool owns(int tile) const { return tile >= begin && tile < end; }
  FS_DEVICE int keys_in(int tile) const { return min(pages.kv_len - tile * DECODE_TILE_KV, DECODE_TILE_KV); }
};

// The list and this CTA's share of it, which lies in one strand: but for the two marked, numbers of tiles are the
// strand's. In shared memory.
template <int WARPS>
struct Schedule {
  int64_t slab_tiles[WARPS];  // of consecutive slabs of requests
  int64_t total, strand_begin;  // of the whole list, and in it
  int64_t begin, end;    // of the share
  int64_t window_begin;  // before request `window`, from which the share's first request is at most a slab away
  int window;
  int strand;
  int items;  // of a request in the strand: KV heads times row units
  int ctas;   // that have a share of the whole list

  FS_DEVICE int owner_of(int64_t tile) const { return static_cast<int>(quotient((tile + 1) * ctas - 1, total)); }

  // Called by all threads; each warp adds up a slab.
  template <class Params>
  FS_DEVICE void make(const Params& p, int units) {
    const int items_per_request = p.strand_heads * units;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int slab = ((p.batch_size + WARPS - 1) / WARPS + 31) / 32 * 32;
    const int stop = min((warp + 1) * slab, p.batch_size);
    int64_t tiles = 0;
#pragma unroll 4
    for (int request = warp * slab + lane; request < stop; request += 32)
      tiles += visible_tiles(p, request_pages(p, request).kv_len).count();
#pragma unroll
    for (int x = 16; x > 0; x /= 2) tiles += __shfl_xor_sync(~0u, tiles, x);
    if (lane == 0) slab_tiles[warp] = tiles * items_per_request;
    __syncthreads();
    if (warp == 0) cut(items_per_request, slab, p.strands);
    __syncthreads();
  }

  // A warp, a slab a lane: this is what all wait for.
  FS_DEVICE void cut(int items_per_request, int slab, uint32_t strands) {
    const int lane = threadIdx.x;
    int64_t upto = lane < WARPS ? slab_tiles[lane] : 0;  // the end of the slab
#pragma unroll
    for (int x = 1; x < WARPS; x *= 2) {
      const int64_t before = __shfl_up_sync(~0u, upto, x);
      if (lane >= x) upto += before;
    }
    const int64_t sum = __shfl_sync(~0u, upto, WARPS - 1);
    const uint32_t shares = min(static_cast<int64_t>(gridDim.x / strands), max(sum / MIN_TILES_PER_CTA, 1ll));
    const uint32_t in_strand = blockIdx.x / shares, number = blockIdx.x - in_strand * shares;
    const uint32_t edges = in_strand < strands ? number + lane % 2 : shares;  // before this one
    const int64_t edge = quotient(sum * edges, shares);
    const int64_t first = __shfl_sync(~0u, edge, 0);
    const int slabs = __popc(__ballot_sync(~0u, lane < WARPS - 1 && upto <= first));  // that the share is past
    const int64_t before = __shfl_sync(~0u, upto, max(slabs - 1, 0));
    if (lane == 0) {
      items = items_per_request;
      total = sum * strands;
      ctas = shares * strands;
      strand = in_strand;
      strand_begin = sum * in_strand;
      begin = edge;
      window_begin = slabs > 0 ? before : 0;
      window = slabs * slab;
    }
    if (lane == 1) end = edge;
  }
};

// Enumerates the segments of a share. Called by whole warps; each lane knows one of 32 consecutive requests.
template <class Params, class Schedule>
struct SegmentWalk {
  const Params& p;
  const Schedule& schedule;
  const int items;
  int64_t position;    // in the strand, as the next ones
  const int64_t end;
  int window;          // first of the requests that lanes know
  int64_t window_end;  // after the window
  int64_t lane_end;    // after this lane's request
  RequestPages lane_pages;

  FS_DEVICE SegmentWalk(const Params& p, const Schedule& schedule)
      : p(p),
        schedule(schedule),
        items(schedule.items),
        position(schedule.begin),
        end(schedule.end),
        window(schedule.window - 32),
        window_end(schedule.window_begin) {}

  FS_DEVICE void load_window() {
    const int request = window + threadIdx.x % 32;
    lane_pages = request < p.batch_size ? request_pages(p, request) : RequestPages{0, 0};
    int upto = visible_tiles(p, lane_pages.kv_len).count();  // of 32 requests: fewer than 2^31
#pragma unroll
    for (int x = 1; x < 32; x *= 2) {
      const int before = __shfl_up_sync(~0u, upto, x);
      if (threadIdx.x % 32 >= x) upto += before;
    }
    lane_end = window_end + static_cast<int64_t>(upto) * items;
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
    s.tiles = visible_tiles(p, s.pages.kv_len);
    const int count = s.tiles.count();
    const int64_t request_begin = __shfl_sync(~0u, lane_end, lane) - static_cast<int64_t>(count) * items;
    const int item = static_cast<int>(quotient(position - request_begin, count));
    const int64_t item_begin = request_begin + static_cast<int64_t>(item) * count;
    int head = item;  // of the strand
    s.unit = 0;
    for (; head >= p.strand_heads; head -= p.strand_heads) s.unit++;  // hardly ever: no division
    s.kv_head = head * p.strands + static_cast<uint32_t>(schedule.strand + s.request) % p.strands;
    s.offset = schedule.strand_begin + item_begin;
    s.begin = s.tiles.first + static_cast<int>(position - item_begin);
    s.end = s.tiles.first + static_cast<int>(min(static_cast<int64_t>(count), end - item_begin));
    position += s.end - s.begin;
    return true;
  }
};

// In which order a segment's tiles are scored: the item's first and last, then those between, upwards. The ends that
// are seeds (tile 0 and the last) are scored even where another CTA owns them. Where the rows of a multi-token
// request end in two tiles, the earlier one is scored before all others, for the seed alone.
struct VisitOrder {
  TileRange tiles;
  bool scores_ahead, visits_first, visits_last;
  int inner_begin;  // tiles between
  int count;        // of all visits but the one ahead

  FS_DEVICE VisitOrder(const Segment& s, bool seeded, int q_len)
      : tiles(s.tiles),
        scores_ahead(seeded && tiles.last > 1 && s.pages.kv_len - q_len < tiles.last * DECODE_TILE_KV),
        visits_first(seeded && tiles.first == 0 || s.begin == tiles.first),
        visits_last(tiles.last > tiles.first && (seeded || s.end > tiles.last)),
        inner_begin(max(s.begin, tiles.first + 1)) {
    count = num_ends() + max(min(s.end, tiles.last) - inner_begin, 0);
  }

  FS_DEVICE int num_ends() const { return visits_first + visits_last; }

  // Visits are counted from the ends on: -1 is the one ahead of them.
  FS_DEVICE int tile(int visit) const {
    if (visit < 0) return tiles.last - 1;
    if (visit == 0 && visits_first) return tiles.first;
    if (visit == visits_first && visits_last) return tiles.last;
    return inner_begin + visit - num_ends();
  }

  FS_DEVICE bool is_seed(int tile) const { return tile == 0 || tile == tiles.last; }
};

constexpr int NO_TILE = 0x1ffffff;  // beyond the longest request

// Tiles that are scored together. Group 0 holds the first and the last tile, as far as they are visited, so that
// seeds come before any decision, and groups are the same with and without them. Group -1 is the tile scored ahead.
template <int GROUP>
struct TileGroup {
  int tile[GROUP];
  int count;  // at least 1; the rest is NO_TILE, of which all keys are hidden

  FS_DEVICE TileGroup(const VisitOrder& order, int group) {
    if (group > 0) {
      const int inner = GROUP * (group - 1);
      count = min(order.count - order.num_ends() - inner, GROUP);
#pragma unroll
      for (int i = 0; i < GROUP; i++) tile[i] = i < count ? order.inner_begin + inner + i : NO_TILE;
    } else {
      count = group < 0 ? 1 : order.num_ends();
#pragma unroll
      for (int i = 0; i < GROUP; i++) tile[i] = i < count ? order.tile(group + i) : NO_TILE;
    }
  }
};
