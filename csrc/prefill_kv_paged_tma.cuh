// Where prefill finds K and V: pages, a load tile by copies of boxes (rows of one page, 64 columns), a lane each.
#pragma once
#include "page_table.cuh"
#include "pair.cuh"
#include "prefill_schedule.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "swizzle.cuh"

constexpr int LOADER_WARPS = 2;
constexpr int LOADER_ARRIVALS = LOADER_WARPS;  // on the barrier of a loaded stage
constexpr bool GATHERS = false;                // K and V are written by the copy engine
constexpr bool TAIL_IS_ZERO = false;           // rows past the request's last key are whatever the page holds

template <class Params, int TILE_KV>
struct KvLoader {
  const Params& p;
  const bool elected = elect_one();  // once: behind a wait, lanes need not be together
  int kv_head;                       // of the work item
  int page, next_page;               // of this lane's box: of the tile that is loaded, and of the one after it

  FS_DEVICE explicit KvLoader(const Params& p) : p(p) {}

  FS_DEVICE PageSize page_size() const { return PageSize(p.page_size, p.page_reciprocal); }

  FS_DEVICE static Span keys_of(const Params& p, int request) {
    const RequestPages pages = request_pages(p, request);
    return {pages.first_index, pages.kv_len};
  }

  FS_DEVICE static const TensorMap* k_of(const Params& p) { return &p.k_map; }
  FS_DEVICE static const TensorMap* v_of(const Params& p) { return &p.v_map; }

  FS_DEVICE PageBoxes<TILE_KV> boxes() const { return PageBoxes<TILE_KV>(p.page_size); }

  FS_DEVICE int fetch(const WorkItem& work, int tile) const {
    return page_id_of_key(p, page_size(), {work.first_kv, work.kv_len}, tile * TILE_KV + (threadIdx.x % 32 << boxes().log2_rows));
  }

  FS_DEVICE void begin(const WorkItem& work, int first_tile) {
    kv_head = uniform(work.kv_head);
    next_page = fetch(work, first_tile);
  }

  // The page table is read a tile ahead.
  FS_DEVICE void advance(const WorkItem& work, int next_tile) {
    page = bounded_page(p, next_page);
    next_page = fetch(work, next_tile);
  }

  // Boxes and chunks are dealt to the warps in turn; those of a warp to the CTAs of a pair, if they copy for both.
  template <int COLUMNS, int FIRST_COLUMN, class Wait, class Meet = NoMeeting>
  FS_DEVICE void load(const WorkItem&, const TensorMap* map, int tile, const void* stage, uint64_t& loaded,
                      const Wait& until_released, const Copies& copies = {}, const Meet& meet = {}) const {
    constexpr int CHUNKS = num_chunks(COLUMNS);
    static_assert(TILE_KV / 8 * CHUNKS <= 32 * LOADER_WARPS, "a lane has one box at most");
    const PageBoxes<TILE_KV> boxes = this->boxes();
    const int warp = threadIdx.x / 32 % LOADER_WARPS, item = threadIdx.x % 32 * LOADER_WARPS + warp;
    const int box = item / CHUNKS, chunk = item % CHUNKS;
    const int page_of_box = __shfl_sync(~0u, page, box);
    const int token = boxes.count == 1 ? page_size().place(tile * TILE_KV).token : 0;
    const uint32_t to = shared_address(stage) + (chunk * TILE_KV + (box << boxes.log2_rows)) * CHUNK_ROW_BYTES;
    const int mine = (boxes.count * CHUNKS - warp + LOADER_WARPS - 1) / LOADER_WARPS;
    const uint64_t policy = createpolicy_evict_last();
    until_released();
    if (elected) {
      mbarrier_arrive_expect_tx(shared_address(&loaded), (mine << boxes.log2_rows) * CHUNK_ROW_BYTES);
    }
    __syncwarp();  // the bytes are announced before any can arrive
    meet(elected);
    if (box >= boxes.count || !copies.have(threadIdx.x % 32)) return;
    const auto load = [&](auto copy) {
      copy(to, map, shared_address(&loaded), policy, FIRST_COLUMN + chunk * CHUNK_COLUMNS, token, kv_head, page_of_box);
    };
    if (copies.for_both) load(tma_load_4d_for_both);
    else load(tma_load_4d);
  }
};
