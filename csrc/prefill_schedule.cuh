// Which rows of which request a CTA attends to. Worked out on the device from the index tensors: no length ever
// reaches the host.
#pragma once
#include "types.cuh"

// One row block of one head of one request, as the producer posts it to the consumers.
struct WorkItem {
  int request;  // -1: no work is left
  int head;
  int first_row;     // row of q
  int num_rows;      // valid rows of the block
  int first_kv;      // row of k and v; of a paged cache: entry of the page table
  int kv_len;        // keys of the request
  int diagonal;      // key on the first row's diagonal, counted from the request's first; may be negative
  float threshold;   // log2 lambda in raw score units; -INF where nothing may be skipped
};

// First token and number of tokens of a request; offsets on the device are bounded here, never trusted.
struct Span {
  int first, length;

  FS_DEVICE Span(int first, int length) : first(first), length(length) {}

  FS_DEVICE Span(const int32_t* indptr, int request, int limit) {
    first = min(max(indptr[request], 0), limit);
    length = max(min(indptr[request + 1], limit) - first, 0);
  }
};

// Hands out items in one global order: requests as they come; within one, head sections whose keys and values fit
// into L2, long rows first, the heads of a section side by side. All 32 lanes of the scheduling warp call it.
// Without a causal limit all items of a request cost the same, and the last wave may leave most CTAs idle. Its row
// blocks are then cut into pieces of whole units, which changes no decision: units vote alone, in the same order.
// `Keys::keys_of` finds a request's keys.
template <class Keys, int TILE_Q, int UNIT_ROWS, bool CAUSAL, int KV_HEAD_BYTES>
struct Scheduler {
  static constexpr int L2_BYTES = 32 << 20;  // of keys and values in use at a time; the L2 holds 50 MB
  static constexpr int UNITS = TILE_Q / UNIT_ROWS;
  static constexpr int MOST_COUNTED = 1024;  // requests: counting the items of more would take longer than it saves

  uint32_t claimed = blockIdx.x;  // in lane 0: this CTA's next turn; the first one needs no counter
  uint32_t first_item = 0;        // number of items before `request`
  int request = 0;                // items are claimed in ascending order, so the search never goes back
  uint32_t whole_items = ~0u;     // the items after these are cut
  uint32_t pieces = 1;

  template <class Params>
  FS_DEVICE explicit Scheduler(const Params& p) {
    if (CAUSAL || p.batch_size > MOST_COUNTED) return;
    uint32_t items = 0;
    for (int i = threadIdx.x % 32; i < p.batch_size; i += 32) items += num_items(p, i);
    items = __reduce_add_sync(~0u, items);
    const uint32_t last_wave = items % gridDim.x;
    if (2 * last_wave > gridDim.x) return;
    whole_items = items - last_wave;
    pieces = 3 * last_wave > gridDim.x ? 2 : UNITS;
  }

  // The last CTA to finish leaves both words at zero for the next launch or graph replay.
  FS_DEVICE static void finish(uint32_t* work_counter) {
    if (atomicAdd(work_counter + 1, 1) == gridDim.x - 1) work_counter[0] = work_counter[1] = 0;
  }

  // The next item; its `request` is -1 when no work is left. The turn after it is claimed early, because the
  // counter takes about a microsecond to answer.
  template <class Params>
  FS_DEVICE WorkItem next(const Params& p) {
    uint32_t item = __shfl_sync(~0u, claimed, 0), piece = 0;
    const bool is_cut = item >= whole_items;
    if (is_cut) {
      piece = (item - whole_items) % pieces;
      item = whole_items + (item - whole_items) / pieces;
    }
    if (!find_request(p, item)) return {-1};
    if (threadIdx.x % 32 == 0) claimed = atomicAdd(p.work_counter, 1) + gridDim.x;
    WorkItem work = describe(p, item - first_item);
    if (is_cut) cut(work, piece * UNITS / pieces, (piece + 1) * UNITS / pieces);
    return work;
  }

  // Leaves units [first, end) of a row block.
  FS_DEVICE static void cut(WorkItem& work, int first, int end) {
    work.num_rows = min(max(work.num_rows - first * UNIT_ROWS, 0), (end - first) * UNIT_ROWS);
    work.first_row += first * UNIT_ROWS;
    work.diagonal += first * UNIT_ROWS;
  }

  // Moves to the request that `item` lies in, 32 requests at a time.
  template <class Params>
  FS_DEVICE bool find_request(const Params& p, uint32_t item) {
    for (; request < p.batch_size; request += 32) {
      const int candidate = request + threadIdx.x % 32;
      const uint32_t items = candidate < p.batch_size ? num_items(p, candidate) : 0;
      const uint32_t end = first_item + sum_up_to_lane(items);
      const uint32_t holders = __ballot_sync(~0u, item < end);
      if (holders) {
        const int lane = __ffs(holders) - 1;
        first_item = __shfl_sync(~0u, end - items, lane);
        request += lane;
        return true;
      }
      first_item = __shfl_sync(~0u, end, 31);
    }
    return false;
  }

  template <class Params>
  FS_DEVICE static uint32_t num_items(const Params& p, int request) {
    return num_blocks(Span(p.qo_indptr, request, p.nnz_qo).length) * p.num_qo_heads;
  }

  FS_DEVICE static uint32_t num_blocks(int qo_len) { return (qo_len + TILE_Q - 1u) / TILE_Q; }

  FS_DEVICE static uint32_t sum_up_to_lane(uint32_t value) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint32_t below = __shfl_up_sync(~0u, value, distance);
      if (threadIdx.x % 32 >= distance) value += below;
    }
    return value;
  }

  // Item `index` of the request.
  template <class Params>
  FS_DEVICE WorkItem describe(const Params& p, uint32_t index) const {
    const Span qo(p.qo_indptr, request, p.nnz_qo), kv = Keys::keys_of(p, request);
    const uint32_t blocks = num_blocks(qo.length), group_size = p.num_qo_heads / p.num_kv_heads;
    const uint32_t fitting = L2_BYTES / KV_HEAD_BYTES / max(kv.length, 1);  // KV heads
    const uint32_t section_heads = min(max(fitting, 1u), static_cast<uint32_t>(p.num_kv_heads)) * group_size;
    const uint32_t section = index / (section_heads * blocks), rest = index % (section_heads * blocks);
    const uint32_t first_head = section * section_heads;
    const uint32_t heads = min(section_heads, p.num_qo_heads - first_head);
    const int block = blocks - 1 - rest / heads;
    const int row = block * TILE_Q;
    WorkItem item;
    item.request = request;
    item.head = first_head + rest % heads;
    item.first_row = qo.first + row;
    item.num_rows = min(qo.length - row, TILE_Q);
    item.first_kv = kv.first;
    item.kv_len = kv.length;
    item.diagonal = row + kv.length - qo.length;
    return item;
  }
};
