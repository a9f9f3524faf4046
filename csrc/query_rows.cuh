// The query rows of a decode work item: where they are, and which keys they see.
#pragma once
#include "column_softmax.cuh"
#include "decode_schedule.cuh"

// Where the query rows of a segment's unit are: rows are the (token, head) pairs of a KV head's group, token by token.
template <int ROWS>
struct QueryRows {
  int64_t token;                // of the request's first
  int head;                     // first of the group
  int first, count;             // the unit's rows in the group
  uint32_t group, reciprocal;   // 2^32 / group, rounded up: exact for fewer than 2^16 rows

  template <class Params>
  FS_DEVICE QueryRows(const Params& p, const Segment& s)
      : token(static_cast<int64_t>(s.request) * p.q_len_per_req),
        first(s.unit * ROWS),
        group(p.group_size),
        reciprocal(p.group_reciprocal) {
    head = s.kv_head * group;
    count = min(p.q_len_per_req * static_cast<int>(group) - first, ROWS);
  }

  FS_DEVICE int token_in_request(int row) const { return group == 1 ? first + row : __umulhi(first + row, reciprocal); }
  FS_DEVICE int64_t token_of(int row) const { return token + token_in_request(row); }
  FS_DEVICE int head_of(int row) const { return head + first + row - token_in_request(row) * group; }
};

// Which keys the rows of a unit see.
template <class Params, int ROWS, bool CAUSAL, bool WINDOW>
struct Visibility {
  const Params& p;
  const QueryRows<ROWS> rows;
  const int kv_len;

  FS_DEVICE Visibility(const Params& p, const Segment& s) : p(p), rows(p, s), kv_len(s.pages.kv_len) {}

  FS_DEVICE int end(int row) const {
    return CAUSAL ? min(kv_len - p.q_len_per_req + rows.token_in_request(row) + 1, kv_len) : kv_len;
  }
  FS_DEVICE int begin(int row) const { return WINDOW ? max(end(row) - 1 - min(p.window_left, kv_len), 0) : 0; }

  // Keys of a tile that a row sees.
  FS_DEVICE int keys_in(int row, int tile) const {
    const int first_key = tile * DECODE_TILE_KV;
    return min(end(row), first_key + DECODE_TILE_KV) - max(begin(row), first_key);
  }

  // Whether all rows see all keys of a tile, as is so of most.
  FS_DEVICE bool all_see(int tile) const {
    const int first_key = tile * DECODE_TILE_KV;
    return first_key >= begin(rows.count - 1) && end(0) - first_key >= DECODE_TILE_KV;
  }

  // Hides keys that a row does not see.
  FS_DEVICE void mask(float (&s)[ROWS / 2], int tile) const {
    const int first_key = tile * DECODE_TILE_KV;
    if (CAUSAL || WINDOW) {
      mask_keys_by_column(s, [&](int c) {
        const int row = column_of(c);
        return make_int2(begin(row) - first_key, end(row) - first_key);
      });
    } else {
      mask_keys(s, kv_len - first_key);
    }
  }
};
