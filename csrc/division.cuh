// How the rows of a request fall into units and row blocks, by its own lengths.
#pragma once
#include "types.cuh"

constexpr int PACKED_QO_LEN = 64;  // requests of fewer tokens pack the heads of a group (flashskip/geometry.py)
constexpr int LONG_KV_RATIO = 8;   // a request of at most `short_qo_len` tokens is short on a cache so much longer

// First token and number of tokens of a request; offsets on the device are bounded here, never trusted.
struct Span {
  int first, length;

  FS_DEVICE Span(int first, int length) : first(first), length(length) {}

  FS_DEVICE Span(const int32_t* indptr, int request, int limit) {
    first = min(max(indptr[request], 0), limit);
    length = max(min(indptr[request + 1], limit) - first, 0);
  }
};

// Tokens and keys of a request.
struct Lengths {
  int qo, kv;

  // Few tokens on a long cache.
  template <class Params>
  FS_DEVICE bool are_short(const Params& p) const {
    return qo > 0 && qo <= p.short_qo_len && kv >= LONG_KV_RATIO * qo;
  }

  // Keys that the rows see together, at most.
  template <class Params>
  FS_DEVICE int seen(const Params& p) const {
    return p.window_left < 0 ? kv : min(kv, p.window_left + qo);
  }
};

// How a request's rows fall into units and items.
struct Division {
  bool is_short;        // few tokens on a long cache: judged against seeds, and may be cut over the keys
  int row_heads;        // as in WorkItem
  int unit_heads;       // heads of units side by side: the group where they share K, else 1
  uint32_t sequences;   // of rows or, where units share K, of units
  uint32_t units;       // of each
  uint32_t blocks;      // of units of one sequence: an item each, or several where it is cut

  template <class Params>
  FS_DEVICE Division(const Params& p, int qo_len, bool is_short, int units_of_block) : is_short(is_short) {
    const bool packed = qo_len < PACKED_QO_LEN;
    row_heads = packed ? p.group_size : 1;
    unit_heads = !packed && is_short ? p.group_size : 1;
    sequences = packed || is_short ? p.num_kv_heads : p.num_qo_heads;
    units = (qo_len * row_heads + 63u) / 64 * unit_heads;
    blocks = (units + units_of_block - 1) / units_of_block;
  }

  template <class Params>
  FS_DEVICE Division(const Params& p, const Lengths& lengths, bool shorts, int units_of_block)
      : Division(p, lengths.qo, shorts && lengths.are_short(p), units_of_block) {}

  FS_DEVICE uint32_t items() const { return sequences * blocks; }
  FS_DEVICE uint32_t heads() const { return row_heads * unit_heads; }  // of a sequence
};
