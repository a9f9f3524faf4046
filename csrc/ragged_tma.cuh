// Rows of one request of a ragged tensor through the copy engine.
#pragma once
#include "pair.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "swizzle.cuh"

constexpr int REQUEST_END = 1 << 30;  // row coordinate at which a ragged tensor map ends (flashskip/_maps.py)

// Loads `rows` rows, the first one `from_end` after the row `end` at which the request ends (so it is negative).
// Rows past that end arrive as zeros. `COLUMNS` columns from `FIRST_COLUMN` on, those chunks that `copies` has.
template <int COLUMNS, int FIRST_COLUMN = 0>
FS_DEVICE void load_rows(const void* dst, const TensorMap* map, const uint64_t& loaded, uint64_t policy, int rows,
                         int from_end, int head, int end, const Copies& copies = {}) {
#pragma unroll
  for (int chunk = 0; chunk < num_chunks(COLUMNS); chunk++) {
    if (!copies.have(chunk)) continue;
    const auto load = [&](auto copy) {
      copy(shared_address(dst) + chunk * rows * CHUNK_ROW_BYTES, map, shared_address(&loaded), policy,
           FIRST_COLUMN + chunk * CHUNK_COLUMNS, REQUEST_END + from_end, head, end, REQUEST_END);
    };
    if (copies.for_both) load(tma_load_5d_for_both);
    else load(tma_load_5d);
  }
}
