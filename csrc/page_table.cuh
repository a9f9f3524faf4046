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

// The page that holds a request's key at `position`; NO_PAGE past its end and for ids outside the cache.
template <class Params>
FS_DEVICE int page_of_key(const Params& p, const RequestPages& request, int position) {
  if (static_cast<uint32_t>(position) >= static_cast<uint32_t>(request.kv_len)) return NO_PAGE;
  const int page = p.indices[request.first_index + static_cast<uint32_t>(position) / p.page_size];
  return static_cast<uint32_t>(page) < static_cast<uint32_t>(p.num_pages) ? page : NO_PAGE;
}
