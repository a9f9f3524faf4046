// In which order the load tiles of a row block are visited.
#pragma once
#include "mask.cuh"

enum class Order { DIAGONAL_SINK_DESCENDING, DESCENDING, ASCENDING };

// The load tiles that some row of a block sees, in visiting order, and which steps of it belong to one piece.
struct TileOrder {
  int first;   // lowest tile
  int before;  // one above the highest tile
  int cut;     // how many, the highest ones, the causal limit of the block's first row cuts
  int begin, end;  // steps

  template <int TILE_KV>
  FS_DEVICE static TileOrder of(const Visibility& keys, int kv_len, int piece, int pieces) {
    TileOrder order;
    order.first = keys.first_some / TILE_KV;
    const int count = keys.end_some > keys.first_some ? (keys.end_some + TILE_KV - 1) / TILE_KV - order.first : 0;
    order.before = order.first + count;
    order.cut = keys.end_all < kv_len ? min(order.before - keys.end_all / TILE_KV, count) : 0;
    order.begin = 0;
    order.end = count;
    if (pieces > 1) {
      order.begin = count * piece / pieces;
      order.end = count * (piece + 1) / pieces;
    }
    return order;
  }

  template <Order ORDER>
  FS_DEVICE int tile(int step) const {
    if (ORDER == Order::ASCENDING) return first + step;
    const int descending = before - 1 - step;
    if (ORDER == Order::DESCENDING || first > 0 || step < cut) return descending;
    return step == cut ? 0 : descending + 1;  // the sink tile comes between the diagonal and the rest
  }
};
