// Which keys rows see, and how the others leave the scores.
#pragma once
#include "types.cuh"

// What some rows see of their request: keys are counted from the request's first one. A row's diagonal is the last key
// that the causal limit lets it see; a window lets it see `window_left` keys before.
struct alignas(16) Visibility {
  int first_some, end_some;  // a row sees key k only if first_some <= k < end_some
  int first_all, end_all;    // and every row does if first_all <= k < end_all
};

// Of rows with diagonals from `first` to `last`; none if `last` is before `first`. A negative `window_left` is
// unlimited.
template <bool CAUSAL>
FS_DEVICE Visibility visibility_of(int first, int last, int kv_len, int window_left) {
  if (last < first) return {0, 0, 0, 0};
  Visibility keys;
  keys.end_some = CAUSAL ? min(max(last + 1, 0), kv_len) : kv_len;
  keys.end_all = CAUSAL ? min(max(first + 1, 0), kv_len) : kv_len;
  keys.first_some = window_left < 0 ? 0 : min(max(first - window_left, 0), keys.end_some);
  keys.first_all = window_left < 0 ? 0 : max(last - window_left, 0);
  return keys;
}

// Tiles of `tile_kv` keys of which some row sees a key.
FS_DEVICE int num_visible_tiles(const Visibility& keys, int tile_kv) {
  if (keys.end_some <= keys.first_some) return 0;
  return (keys.end_some + tile_kv - 1) / tile_kv - keys.first_some / tile_kv;
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

// Hides the columns before each row's first visible one.
template <int N>
FS_DEVICE void mask_before(float (&s)[N], const int (&first)[2]) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    if (column_of(i) < first[row_of(i)] - first_column()) s[i] = -INF;
  }
}
