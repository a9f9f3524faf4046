// Which keys rows see, and how the others leave the scores.
#pragma once
#include "types.cuh"

// What a vote unit of up to 64 rows sees of its request, as numbers of keys from the first one on.
struct Visibility {
  int some;  // keys before this one are seen by a row of the unit; 0 when it has no valid row
  int all;   // keys before this one are seen by every row
};

// `last_visible`: the last key that row 0 of the block sees; each further row sees one more, up to kv_len.
template <bool CAUSAL>
FS_DEVICE Visibility visibility_of(int first_row, int num_rows, int kv_len, int last_visible) {
  if (first_row >= num_rows) return {0, 0};
  if (!CAUSAL) return {kv_len, kv_len};
  const int last_row = min(first_row + 64, num_rows) - 1;
  return {min(max(last_visible + last_row + 1, 0), kv_len), min(max(last_visible + first_row + 1, 0), kv_len)};
}

// Column of accumulator register `i` of an m64nN tile, apart from the thread's own offset (first_column).
FS_DEVICE constexpr int column_of(int i) { return 8 * (i / 4) + i % 2; }

FS_DEVICE int first_column() { return 2 * (threadIdx.x % 4); }

// Registers 0, 1, 4, 5, ... belong to a thread's first row, 2, 3, 6, 7, ... to the one 8 below.
FS_DEVICE constexpr int row_of(int i) { return (i / 2) % 2; }

// Hides the columns after each row's last visible one; `last` is relative to the tile.
template <int N>
FS_DEVICE void mask_after(float (&s)[N], const int (&last)[2]) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    if (column_of(i) > last[row_of(i)] - first_column()) s[i] = -INF;
  }
}
