// From a request to its length and pages. Contents of the index tensors are bounded here: bad ones give wrong
// numbers for that request, never an access outside a tensor.
#pragma once
#include "types.cuh"

constexpr int NO_PAGE = -1;  // reads as zeros

// K or V of the cache, as rows of `head_dim` elements.
struct CacheView {
  const void* base;
  int64_t stride_page, stride_token, stride_head;  // elements
};

struct RequestPages {
  int first_index;  // into p.indices
  int kv_len;       // keys
};

template <class Params>
FS_DEVICE RequestPages request_pages(const Params& p, int request) {
  const int begin = min(max(p.indptr[request], 0), p.num_indices);
  const int end = min(p.indptr[request + 1], p.num_indices);
  const int last_page_len = min(max(p.last_page_len[request], 1), p.page_size);
  const int64_t keys = static_cast<int64_t>(end - begin - 1) * p.page_size + last_page_len;
  return {begin, end > begin ? static_cast<int>(min(keys, static_cast<int64_t>(0x7fffff00))) : 0};
}

// Divides positions by the page size, a run-time value, without a division.
struct PageSize {
  uint32_t size, reciprocal;

  struct Place {
    uint32_t page, token;
  };

  FS_DEVICE PageSize(uint32_t size, uint32_t reciprocal) : size(size), reciprocal(reciprocal) {}

  FS_DEVICE Place place(uint32_t position) const {
    const uint32_t page = __umulhi(position, reciprocal), token = position - page * size;  // page may be one low
    return token >= size ? Place{page + 1, token - size} : Place{page, token};
  }
};

// What the page table says of a request's key at `position`; NO_PAGE past its end. Does not wait for the load.
template <class Params>
FS_DEVICE int page_id_of_key(const Params& p, const PageSize& page_size, const RequestPages& request,
                             uint32_t position) {
  if (position >= static_cast<uint32_t>(request.kv_len)) return NO_PAGE;
  return p.indices[request.first_index + page_size.place(position).page];
}

// Ids outside the cache become NO_PAGE.
template <class Params>
FS_DEVICE int bounded_page(const Params& p, int id) {
  return static_cast<uint32_t>(id) < static_cast<uint32_t>(p.num_pages) ? id : NO_PAGE;
}

// Asks L2 for page ids, a line a lane of all CTAs: who needs which is not known before lengths are.
template <class Params>
FS_DEVICE void prefetch_page_ids(const Params& p) {
  constexpr int IDS = 32;  // of a line
  const int first = static_cast<int>(threadIdx.x % 32 * gridDim.x + blockIdx.x) * IDS;
  if (first < p.num_indices) asm volatile("prefetch.global.L2 [%0];" ::"l"(p.indices + first));
}

// How a tile falls into boxes of rows that lie in one page: the page size is a multiple of the tile's, or divides it
// and is a multiple of the swizzle's 8 rows.
template <int TILE_KV>
struct PageBoxes {
  int log2_rows, log2_count, count;  // rows of a box, boxes of a tile

  FS_DEVICE explicit PageBoxes(int page_size)
      : log2_rows(__ffs(min(page_size, TILE_KV)) - 1), log2_count(__ffs(TILE_KV) - 1 - log2_rows),
        count(1 << log2_count) {}
};
