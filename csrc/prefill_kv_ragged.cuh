// Where prefill finds K and V: ragged tensors, a load tile by one copy for each chunk of columns.
#pragma once
#include "prefill_schedule.cuh"
#include "ragged_tma.cuh"

constexpr int LOADER_WARPS = 1;
constexpr int LOADER_ARRIVALS = 1;   // on the barrier of a loaded stage
constexpr bool GATHERS = false;      // K and V are written by the copy engine
constexpr bool TAIL_IS_ZERO = true;  // rows past the request's last key

template <class Params, int TILE_KV>
struct KvLoader {
  const bool elected = elect_one();  // once: behind a wait, lanes need not be together
  int kv_head, kv_len, end_kv;       // of the work item; read once, as every tile's loads wait for them

  FS_DEVICE explicit KvLoader(const Params&) {}

  FS_DEVICE static Span keys_of(const Params& p, int request) { return Span(p.kv_indptr, request, p.nnz_kv); }
  FS_DEVICE static const TensorMap* k_of(const Params& p) { return &p.k_map; }
  FS_DEVICE static const TensorMap* v_of(const Params& p) { return &p.v_map; }

  FS_DEVICE void begin(const WorkItem& work, int) {
    kv_head = uniform(work.kv_head);
    kv_len = uniform(work.kv_len);
    end_kv = uniform(work.first_kv) + kv_len;
  }

  FS_DEVICE void advance(const WorkItem&, int) {}

  template <int COLUMNS, int FIRST_COLUMN, class Wait, class Meet = NoMeeting>
  FS_DEVICE void load(const WorkItem&, const TensorMap* map, int tile, const void* stage, uint64_t& loaded,
                      const Wait& until_released, const Copies& copies = {}, const Meet& meet = {}) const {
    until_released();
    if (elected) mbarrier_arrive_expect_tx(shared_address(&loaded), tile_bytes(TILE_KV, COLUMNS));
    meet(elected);
    if (!elected) return;
    load_rows<COLUMNS, FIRST_COLUMN>(stage, map, loaded, createpolicy_evict_last(), TILE_KV,
                                     tile * TILE_KV - kv_len, kv_head, end_kv, copies);
  }
};
