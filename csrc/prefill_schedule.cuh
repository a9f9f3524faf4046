// Which rows of which request a CTA attends to, and to which of their keys. Worked out on the device from the index
// tensors: no length ever reaches the host.
#pragma once
#include "division.cuh"
#include "work_item.cuh"

// What the scheduling warp has no registers for, in shared memory: which items of the global order are cut, and into how
// many pieces.
struct Cut {
  uint32_t whole_items;  // the first ones are not
  uint32_t key_pieces, unit_pieces;
};

// The request that the last claimed item lies in.
struct Place {
  uint32_t first_item, end_item;  // its items' numbers
  uint32_t first_whole;           // number of the first one if none were cut
  int request;
};

constexpr int PIECES_PER_CTA = 2;  // at most: what the workspace holds

// Hands out items in one global order: requests as they come; within one, sections of heads whose keys and values fit
// into L2, long rows first, the heads of a section side by side. All 32 lanes of the scheduling warp call it.
// The items from `cut.whole_items` on are cut into pieces, so that they fill the last waves of CTAs. Neither way of
// cutting changes a decision:
//   over the keys    items of short requests, which are judged against seeds, if at all; pieces are merged
//   over the units   without a causal limit, where all items of a request cost the same: units vote alone, in the same
//                    order
// `Keys::keys_of` finds a request's keys; `SHORTS`: whether the kernel treats short requests as such; `PAIRS_ROWS`: whether
// all rows of a head see the same, so that a pair of CTAs may take two blocks of one.
template <class Keys, int UNITS, int TILE_KV, bool CAUSAL, bool SHORTS, bool PAIRS_ROWS, int KV_HEAD_BYTES>
struct Scheduler {
  static constexpr int L2_BYTES = 32 << 20;  // of keys and values in use at a time; the L2 holds 50 MB
  static constexpr int MOST_COUNTED = 1024;  // requests: counting the items of more would take longer than it saves
  static constexpr int MOST_WAVES = 8;       // of whole items: with more, the last one hardly matters
  static constexpr int MOST_PIECES = 32;     // of an item: one warpgroup merges them
  static constexpr int LEAST_TILES = 16;     // of a piece
  static constexpr int NONE = -(1 << 30);    // below every diagonal

  uint32_t claimed = blockIdx.x;  // in lane 0: this CTA's next turn; the first one needs no counter
  Cut& cut;
  Place& place;

  template <class Params>
  FS_DEVICE Scheduler(const Params& p, Cut& cut, Place& place) : cut(cut), place(place) {
    if (threadIdx.x % 32 == 0) place = {0, 0, 0, 0};
    set_cut({~0u, 1, 1});
    if ((CAUSAL && !SHORTS) || p.batch_size > MOST_COUNTED) return;
    uint32_t items = 0, longest = 0;
    float tiles = 0.f;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < p.batch_size; i += 32) {
      const Lengths lengths = {qo_len_of(p, i), kv_len_of(p, i)};  // loaded together: the launch waits for it
      const Division d(p, lengths, SHORTS, UNITS);
      items += d.items();
      if (!SHORTS) continue;
      const uint32_t count = lengths.seen(p) / TILE_KV;
      if (d.is_short) longest = max(longest, count);
      tiles += static_cast<float>(d.items()) * count;
    }
    items = __reduce_add_sync(~0u, items);
    if (SHORTS) longest = __reduce_max_sync(~0u, longest);
    if (SHORTS && longest >= 2 * LEAST_TILES) {
      if (items < MOST_WAVES * gridDim.x) cut_over_keys(items, longest, sum(tiles));
    } else if (!CAUSAL) {
      cut_over_units(items);
    }
  }

  FS_DEVICE void set_cut(const Cut& chosen) {
    if (threadIdx.x % 32 == 0) cut = chosen;
    __syncwarp();
  }

  // The last wave, if it fills at most half of the CTAs.
  FS_DEVICE void cut_over_units(uint32_t items) {
    const uint32_t last_wave = items % gridDim.x;
    if (2 * last_wave > gridDim.x) return;
    set_cut({items - last_wave, 1, 3 * last_wave > gridDim.x ? 2u : UNITS});
  }

  // Each lane estimates how long one way of cutting takes, in load tiles of a CTA, as if items were of average
  // length: the lower half cuts what does not fill a wave, the upper half everything.
  FS_DEVICE void cut_over_keys(uint32_t items, uint32_t longest, float tiles) {
    constexpr float PER_PIECE = 4.f, PER_MERGED = 0.25f;  // to start one and leave its state; to merge one
    const int lane = threadIdx.x % 32;
    const uint32_t whole = lane < 16 ? items - items % gridDim.x : 0, rest = items - whole;
    const uint32_t room = PIECES_PER_CTA * gridDim.x / max(rest, 1u);
    const uint32_t most = max(min(min(room, longest / LEAST_TILES), MOST_PIECES), 1u);
    const uint32_t pieces = 1 + lane % 16 * (most - 1) / 15;
    const float average = tiles / items;
    const uint32_t waves = (rest * pieces + gridDim.x - 1) / gridDim.x;
    float time = waves * (average / pieces + PER_PIECE) + whole / gridDim.x * average;
    time = fmaxf(time, whole ? longest : longest / pieces) + pieces * PER_MERGED;
    const uint32_t best = __reduce_min_sync(~0u, (__float_as_uint(time) & ~31u) + lane) % 32;
    const uint32_t key_pieces = __shfl_sync(~0u, pieces, best);
    if (key_pieces > 1) set_cut({__shfl_sync(~0u, whole, best), key_pieces, 1});
  }

  // The last CTA to finish leaves both words at zero for the next launch or graph replay.
  FS_DEVICE static void finish(uint32_t* work_counter) {
    if (atomicAdd(work_counter + 1, 1) == gridDim.x - 1) work_counter[0] = work_counter[1] = 0;
  }

  // Writes the claimed item; its request is NO_REQUEST when no work is left. What belongs to the request is only
  // written if the slot held an item of another one: then the result is true, and threshold and `seeded` are missing.
  template <class Params>
  FS_DEVICE bool next(const Params& p, WorkItem& work, int window_left) {
    const uint32_t item = __shfl_sync(~0u, claimed, 0);
    if (item >= place.end_item && !find_request(p, item)) {
      work.request = NO_REQUEST;
      return false;
    }
    const bool is_new = work.request != place.request;
    __syncwarp();
    if (is_new) describe_request(p, work);
    __syncwarp();
    describe_piece(p, item, work);
    __syncwarp();
    describe_units(p, work, window_left);
    return is_new;
  }

  // Claims the next `count` turns. The counter takes about a microsecond to answer.
  template <class Params>
  FS_DEVICE void claim(const Params& p, uint32_t count) {
    if (threadIdx.x % 32 == 0) claimed = atomicAdd(p.work_counter, count) + gridDim.x;
  }

  // Moves to the request that `item` lies in, 32 requests at a time. Items are claimed in ascending order, so the search
  // never goes back.
  template <class Params>
  FS_DEVICE bool find_request(const Params& p, uint32_t item) {
    Place at = place;
    for (; at.request < p.batch_size; at.request += 32) {
      const int candidate = at.request + threadIdx.x % 32;
      uint32_t whole = 0, pieces = 1;
      if (candidate < p.batch_size) {
        Lengths lengths = {qo_len_of(p, candidate), 0};
        if (SHORTS && lengths.qo <= p.short_qo_len) lengths.kv = kv_len_of(p, candidate);  // others do not depend on it
        const Division d(p, lengths, SHORTS, UNITS);
        whole = d.items();
        pieces = num_pieces(d.is_short, lengths.seen(p));
      }
      const uint32_t end_whole = at.first_whole + sum_up_to_lane(whole);
      uint32_t end = end_whole, items = whole;
      if (cut.whole_items != ~0u) {
        items = pieces * whole - (pieces - 1) * num_whole(end_whole - whole, whole);
        end = at.first_item + sum_up_to_lane(items);
      }
      const uint32_t holders = __ballot_sync(~0u, item < end);
      if (holders) {
        const int lane = __ffs(holders) - 1;
        if (threadIdx.x % 32 == lane) place = {end - items, end, end_whole - whole, candidate};
        __syncwarp();
        return true;
      }
      at.first_item = __shfl_sync(~0u, end, 31);
      at.first_whole = __shfl_sync(~0u, end_whole, 31);
    }
    return false;
  }

  template <class Params>
  FS_DEVICE static int qo_len_of(const Params& p, int request) {
    return Span(p.qo_indptr, request, p.nnz_qo).length;
  }

  template <class Params>
  FS_DEVICE static int kv_len_of(const Params& p, int request) {
    return Keys::keys_of(p, request).length;
  }

  // Of a request's `whole` items, the first one of which has number `first`: how many are not cut.
  FS_DEVICE uint32_t num_whole(uint32_t first, uint32_t whole) const {
    return min(cut.whole_items - min(cut.whole_items, first), whole);
  }

  // Into how many pieces the others are cut, by the keys that the request's rows see together, at most.
  FS_DEVICE uint32_t num_pieces(bool is_short, int seen) const {
    if (SHORTS && is_short && cut.key_pieces > 1) return max(min(cut.key_pieces, seen / (TILE_KV * LEAST_TILES)), 1u);
    return CAUSAL ? 1 : cut.unit_pieces;
  }

  // Over the warp: up to this lane, and over all.
  FS_DEVICE static uint32_t sum_up_to_lane(uint32_t value) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint32_t below = __shfl_up_sync(~0u, value, distance);
      if (threadIdx.x % 32 >= distance) value += below;
    }
    return value;
  }

  FS_DEVICE static float sum(float value) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) value += __shfl_xor_sync(~0u, value, distance);
    return value;
  }

  // The steps know of each other what is in shared memory: registers are few.
  template <class Params>
  FS_DEVICE void describe_request(const Params& p, WorkItem& work) const {
    const int request = place.request;
    const Span qo(p.qo_indptr, request, p.nnz_qo);
    work.request = request;
    work.first_token = qo.first;
    work.qo_len = qo.length;
    const Span kv = Keys::keys_of(p, request);
    work.first_kv = kv.first;
    work.kv_len = kv.length;
    const Division d(p, Lengths{qo.length, kv.length}, SHORTS, UNITS);
    work.is_short = d.is_short;
    work.row_heads = d.row_heads;
    if (work.row_heads > 1) work.reciprocal = 0xffffffffu / work.row_heads + 1;
  }

  // Which piece of which block it is.
  template <class Params>
  FS_DEVICE void describe_piece(const Params& p, uint32_t item, WorkItem& work) const {
    const Division d(p, work.qo_len, work.is_short, UNITS);
    const uint32_t uncut = num_whole(place.first_whole, d.items());
    uint32_t index = item - place.first_item, piece = 0, pieces = 1;
    if (index >= uncut) {
      pieces = num_pieces(work.is_short, Lengths{work.qo_len, work.kv_len}.seen(p));
      piece = (index - uncut) % pieces;
      index = uncut + (index - uncut) / pieces;
    }
    work.piece = piece;
    work.pieces = pieces;
    work.key_pieces = work.is_short && cut.key_pieces > 1 ? pieces : 1;
    work.slot = item - piece - cut.whole_items;

    const uint32_t fitting = L2_BYTES / KV_HEAD_BYTES / max(work.kv_len, 1);  // KV heads
    uint32_t first_sequence = 0, sequences = d.sequences;
    if (fitting < p.num_kv_heads) {
      const uint32_t section_size = max(fitting, 1u) * (d.sequences == p.num_kv_heads ? 1 : p.group_size);
      const uint32_t section = index / (section_size * d.blocks);
      index -= section * section_size * d.blocks;
      first_sequence = section * section_size;
      sequences = min(section_size, d.sequences - first_sequence);
    }
    uint32_t row = index / sequences;  // of blocks
    uint32_t sequence = first_sequence + index - row * sequences;
    if (PAIRS_ROWS && index < d.blocks / 2 * 2 * sequences) {  // two blocks of rows side by side
      row = index / (2 * sequences) * 2 + index % 2;
      sequence = first_sequence + index % (2 * sequences) / 2;
    }
    work.block = d.blocks - 1 - row;
    work.head = sequence * d.heads();
    work.kv_head = d.heads() == p.group_size ? sequence : sequence / p.group_size;
  }

  // A lane for each unit. What they see and in which order is worked out here, where nobody waits for it.
  template <class Params>
  FS_DEVICE static void describe_units(const Params& p, WorkItem& work, int window_left) {
    const int unit = threadIdx.x % 32;
    int first = NONE, last = NONE - 1;  // diagonals of its rows
    if (unit < UNITS) {
      UnitRows rows = rows_of_unit(p, work, unit);
      if (rows.count > 0) first = work.diagonal_of(rows.first), last = work.diagonal_of(rows.first + rows.count - 1);
      rows.keys = visibility_of<CAUSAL>(first, last, work.kv_len, window_left);
      work.units[unit] = rows;
    }
    first = __shfl_sync(~0u, first, 0);  // units ascend, and those without rows are the last ones
    last = __reduce_max_sync(~0u, last);
    const Visibility keys = visibility_of<CAUSAL>(first, last, work.kv_len, window_left);
    work.keys = keys;
    work.order = TileOrder::of<TILE_KV>(keys, work.kv_len, work.piece, work.key_pieces);
  }

  // Units of a short request are spread evenly over its blocks; others fill a block before the next.
  template <class Params>
  FS_DEVICE static UnitRows rows_of_unit(const Params& p, const WorkItem& work, int index) {
    const Division d(p, work.qo_len, work.is_short, UNITS);
    const uint32_t block = work.block;
    uint32_t first = block * UNITS, end = min(first + UNITS, d.units);
    if (work.is_short) {
      first = block * d.units / d.blocks;
      end = (block + 1) * d.units / d.blocks;
    }
    if (!CAUSAL && work.key_pieces == 1) {
      end = min(first + (work.piece + 1) * UNITS / work.pieces, end);
      first += work.piece * UNITS / work.pieces;
    }
    const uint32_t unit = first + index;
    if (unit >= end) return {0, 0, 0};
    const uint32_t number = d.unit_heads == 1 ? unit : unit / d.unit_heads;  // of the head's
    const int row = number * 64, count = min(work.qo_len * d.row_heads - row, 64);
    const int head = work.head + unit - number * d.unit_heads;
    return {head, row, count};
  }
};
