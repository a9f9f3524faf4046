// What a CTA of prefill does at a time: units of rows that share K and V, as the scheduling warp posts them.
#pragma once
#include "mask.cuh"

constexpr int MOST_UNITS = 3;  // of a CTA
constexpr int NO_REQUEST = -1;

// Of the first and the last of some rows; none where `last` is before `first`.
struct Diagonals {
  int first, last;
};

// Rows [first, first + count) of a sequence of rows whose first head is `head`.
struct UnitRows {
  int head, first, count;
  Diagonals diagonals;
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
  int piece, pieces;    // of the keys if the request is short, else of the block's units
  int key_pieces;       // of the keys
  int slot;             // of the first piece: where their states meet
  Diagonals rows;       // of all units
  UnitRows units[MOST_UNITS];

  FS_DEVICE int token_of(int row) const { return row_heads == 1 ? row : __umulhi(row, reciprocal); }
  FS_DEVICE int head_of(int row) const { return row - token_of(row) * row_heads; }  // in the sequence
  FS_DEVICE int diagonal_of(int row) const { return token_of(row) + kv_len - qo_len; }
};

// The same in all threads of a warp, and the compiler knows it.
FS_DEVICE int uniform(int value) { return __shfl_sync(~0u, value, 0); }

// What rows with these diagonals see. Called by whole warps.
template <bool CAUSAL>
FS_DEVICE Visibility keys_of_rows(const WorkItem& work, const Diagonals& diagonals, int window_left) {
  return visibility_of<CAUSAL>(uniform(diagonals.first), uniform(diagonals.last), uniform(work.kv_len), window_left);
}
