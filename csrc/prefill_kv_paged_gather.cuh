// Where prefill finds K and V: pages of any size, row by row: the warps share a tile's rows, in pieces of 16 bytes.
#pragma once
#include "page_table.cuh"
#include "prefill_schedule.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "swizzle.cuh"

constexpr int LOADER_WARPS = 3;
constexpr int LOADER_ARRIVALS = 32 * LOADER_WARPS;  // on the barrier of a loaded stage
constexpr bool GATHERS = true;                      // K and V are written by ordinary threads
constexpr bool TAIL_IS_ZERO = true;                 // rows past the request's last key

// Groups of rows are dealt to the warps in turn. The eight lanes that copy the same row of each group know the pages
// of eight such rows, a lane each.
template <class Params, int TILE_KV>
struct KvLoader {
  static constexpr int AT_ONCE = 4;                    // rows of a group, which a warp copies together
  static constexpr int GROUPS = TILE_KV / AT_ONCE;
  static constexpr int OF_WARP = (GROUPS + LOADER_WARPS - 1) / LOADER_WARPS;  // at most
  static constexpr int OWN = (OF_WARP + 7) / 8;        // rows of which a lane knows the page
  static constexpr int SHUFFLED = 4;                   // groups whose addresses are in registers at a time
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

  FS_DEVICE static int warp() { return threadIdx.x / 32 % LOADER_WARPS; }
  FS_DEVICE static int sub() { return threadIdx.x % 32 / 8; }  // the lane's row of a group

  // The lane's own one among those of groups 8 i to 8 i + 7 of the warp. It may lie past the tile: nobody asks then.
  FS_DEVICE static int own_row(int i) {
    return ((8 * i + threadIdx.x % 8) * LOADER_WARPS + warp()) * AT_ONCE + sub();
  }

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

  // Addresses of several rows are shuffled before the first one is copied: one after the other would wait for each.
  template <int COLUMNS, int FIRST_COLUMN, class Wait>
  FS_DEVICE void load(const WorkItem&, const CacheView& cache, int tile, const void* stage, uint64_t& loaded,
                      const Wait& until_released) const {
    const uint64_t policy = createpolicy_evict_last();
    const int piece = threadIdx.x % 8;  // of this lane: 16 bytes of a chunk's row
    const int first = warp() * AT_ONCE + sub();
    // Through a shuffle, or ptxas 13.0 adds the uniform part in the copy itself and encodes the policy in an odd
    // register: an illegal instruction (tests/test_compile.py looks for it).
    const uint32_t lane_offset = first * CHUNK_ROW_BYTES + (piece ^ first % 8) * 16;
    const uint32_t to = __shfl_sync(~0u, shared_address(stage) + lane_offset, threadIdx.x % 32);
    until_released();
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const uint32_t token = page_size().place(tile * TILE_KV + own_row(i)).token;
      const int64_t offset = page[i] * cache.stride_page + token * cache.stride_token + kv_head * cache.stride_head;
      const int64_t from_base = page[i] == NO_PAGE ? 0 : 2 * (offset + FIRST_COLUMN);
      const uint64_t mine = reinterpret_cast<uint64_t>(cache.base) + from_base;
      const uint32_t valid = __ballot_sync(~0u, page[i] != NO_PAGE) >> 8 * sub();
#pragma unroll
      for (int begin = 0; begin < 8; begin += SHUFFLED) {
        uint64_t row[SHUFFLED];
#pragma unroll
        for (int j = 0; j < SHUFFLED; j++) row[j] = __shfl_sync(~0u, mine, begin + j, 8) + piece * 16;
#pragma unroll
        for (int j = 0; j < SHUFFLED; j++) {
          const int group = (8 * i + begin + j) * LOADER_WARPS, above = group * AT_ONCE;  // the warp's first one
          if (group >= GROUPS || (group + LOADER_WARPS > GROUPS && group + warp() >= GROUPS)) continue;
          copy_row<COLUMNS>((to ^ above % 8 * 16) + above * CHUNK_ROW_BYTES, row[j],
                             (valid & 1u << (begin + j)) != 0, policy);
        }
      }
    }
    cp_async_mbarrier_arrive_noinc(shared_address(&loaded));
  }

  // This lane's pieces, one of each chunk.
  template <int COLUMNS>
  FS_DEVICE static void copy_row(uint32_t to, uint64_t row, bool valid, uint64_t policy) {
#pragma unroll
    for (int chunk = 0; chunk < num_chunks(COLUMNS); chunk++) {
      if (chunk * CHUNK_COLUMNS + threadIdx.x % 8 * 8 >= COLUMNS) continue;  // a half empty chunk
      cp_async_16(to + chunk * TILE_KV * CHUNK_ROW_BYTES, reinterpret_cast<const void*>(row + chunk * CHUNK_ROW_BYTES),
                  valid, policy);
    }
  }
};
