// What a CTA of prefill does at a time: units of rows that share K and V, as the scheduling warp posts them.
#pragma once
#include "mask.cuh"
#include "tile_order.cuh"

constexpr int MOST_UNITS = 3;  // of a CTA
constexpr int NO_REQUEST = -1;

// Rows [first, first + count) of a sequence of rows whose first head is `head`.
struct UnitRows {
  int head, first, count;
  Visibility keys;
};

// A request's rows are cut into units of 64 in one of three ways:
//   plain   a sequence of rows for each head; units side by side are of one head
//   shared  the same, but units side by side are of the same tokens and of the heads of a group
//   packed  a sequence for each group: its (token, head) pairs, token by token
struct WorkItem {
  int request;          // NO_REQUEST: no work is left
  int first_token;      // row of q: the request's first
  int qo_len, kv_len;   // tokens and keys of the request
  int first_kv;         // row of k and v; of a paged cache: entry of the page table
  int head, kv_head;    // the first head of the block's sequence
  int block;            // of the sequence
  int row_heads;        // heads of a token in a sequence: the group where it is packed, else 1
  uint32_t reciprocal;  // 2^32 / row_heads, rounded up: exact for the rows of fewer than 64 tokens
  int is_short;         // few tokens on a long cache: may be cut over the keys
  int seeded;           // judged against seeds
  float threshold;      // log2 lambda in raw score units; -INF where nothing may be skipped
  int piece, pieces;    // of the block's keys or units
  int key_pieces;       // of its keys
  int slot;             // of the first piece: where their states meet
  int paired;           // the other CTA of the pair attends to the same tiles
  TileOrder order;      // of the item's tiles
  Visibility keys;      // of all units
  UnitRows units[MOST_UNITS];

  FS_DEVICE int token_of(int row) const { return row_heads == 1 ? row : __umulhi(row, reciprocal); }
  FS_DEVICE int head_of(int row) const { return row - token_of(row) * row_heads; }  // in the sequence
  FS_DEVICE int diagonal_of(int row) const { return token_of(row) + kv_len - qo_len; }
};

// The same in all threads of a warp, and the compiler knows it. Called by whole warps.
FS_DEVICE int uniform(int value) { return __shfl_sync(~0u, value, 0); }

FS_DEVICE Visibility uniform(const Visibility& keys) {
  return {uniform(keys.first_some), uniform(keys.end_some), uniform(keys.first_all), uniform(keys.end_all)};
}

// Without a window nothing is hidden on the left, and the compiler should know it.
template <bool WINDOW>
FS_DEVICE TileOrder order_of(const WorkItem& work) {
  const TileOrder& order = work.order;
  return {WINDOW ? uniform(order.first) : 0, uniform(order.before), uniform(order.cut), uniform(order.begin),
          uniform(order.end)};
}
