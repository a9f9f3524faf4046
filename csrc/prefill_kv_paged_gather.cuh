// Where prefill finds K and V: pages of any size, row by row: two warps, each copies half of a tile's rows in pieces of
// 16 bytes.
#pragma once
#include "page_table.cuh"
#include "prefill_schedule.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "swizzle.cuh"

constexpr int LOADER_WARPS = 2;
constexpr int LOADER_ARRIVALS = 32 * LOADER_WARPS;  // on the barrier of a loaded stage
constexpr bool GATHERS = true;                      // K and V are written by ordinary threads
constexpr bool TAIL_IS_ZERO = true;                 // rows past the request's last key

template <class Params, int TILE_KV>
struct KvLoader {
  static constexpr int ROWS = TILE_KV / LOADER_WARPS;  // of a warp
  static constexpr int OWN = ROWS / 32;                // rows of a lane, 32 apart: whose pages it knows
  static constexpr int AT_ONCE = 4;                    // rows that a warp copies together: 8 lanes take a chunk's row
  const Params& p;
  int kv_head;                     // of the work item
  int page[OWN], next_page[OWN];  // of the tile that is loaded, and of the one after it

  FS_DEVICE explicit KvLoader(const Params& p) : p(p) {}

  FS_DEVICE PageSize page_size() const { return PageSize(p.page_size, p.page_reciprocal); }

  FS_DEVICE static Span keys_of(const Params& p, int request) {
    const RequestPages pages = request_pages(p, request);
    return {pages.first_index, pages.kv_len};
  }

  FS_DEVICE static CacheView k_of(const Params& p) {
    return {p.k_cache, p.k_stride_page, p.k_stride_token, p.k_stride_head};
  }
  FS_DEVICE static CacheView v_of(const Params& p) {
    return {p.v_cache, p.v_stride_page, p.v_stride_token, p.v_stride_head};
  }

  FS_DEVICE static int first_row() { return threadIdx.x / 32 % LOADER_WARPS * ROWS; }
  FS_DEVICE static int own_row(int i) { return first_row() + 32 * i + threadIdx.x % 32; }

  FS_DEVICE void fetch(const WorkItem& work, int tile) {
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      next_page[i] = page_id_of_key(p, page_size(), {work.first_kv, work.kv_len}, tile * TILE_KV + own_row(i));
    }
  }

  FS_DEVICE void begin(const WorkItem& work, int first_tile) {
    kv_head = work.kv_head;
    fetch(work, first_tile);
  }

  // The page table is read a tile ahead.
  FS_DEVICE void advance(const WorkItem& work, int next_tile) {
#pragma unroll
    for (int i = 0; i < OWN; i++) page[i] = bounded_page(p, next_page[i]);
    fetch(work, next_tile);
  }

  template <int HEAD_DIM, class Wait>
  FS_DEVICE void load(const WorkItem&, const CacheView& cache, int tile, const void* stage, uint64_t& loaded,
                      const Wait& until_released) const {
    const uint64_t policy = createpolicy_evict_last();
    const int piece = threadIdx.x % 8, sub = threadIdx.x % 32 / 8;  // of this lane: 16 bytes of a chunk's row
    until_released();
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const uint32_t token = page_size().place(tile * TILE_KV + own_row(i)).token;
      const int64_t offset = page[i] * cache.stride_page + token * cache.stride_token + kv_head * cache.stride_head;
      const uint64_t mine = reinterpret_cast<uint64_t>(cache.base) + (page[i] == NO_PAGE ? 0 : 2 * offset);
      const uint32_t valid = __ballot_sync(~0u, page[i] != NO_PAGE);
      const uint32_t rows = shared_address(stage) + (first_row() + 32 * i + sub) * CHUNK_ROW_BYTES;
#pragma unroll 2
      for (int first = 0; first < 32; first += AT_ONCE) {
        const uint64_t row = __shfl_sync(~0u, mine, first + sub) + piece * 16;
        const uint32_t to = rows + first * CHUNK_ROW_BYTES + (piece ^ (first + sub) % 8) * 16;
#pragma unroll
        for (int chunk = 0; chunk < num_chunks(HEAD_DIM); chunk++) {
          if (chunk * CHUNK_COLUMNS + piece * 8 >= HEAD_DIM) continue;  // a half empty chunk
          cp_async_16(to + chunk * TILE_KV * CHUNK_ROW_BYTES,
                      reinterpret_cast<const void*>(row + chunk * CHUNK_ROW_BYTES), valid >> (first + sub) & 1, policy);
        }
      }
    }
    cp_async_mbarrier_arrive_noinc(shared_address(&loaded));
  }
};
