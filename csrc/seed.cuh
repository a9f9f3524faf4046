// Seeds: what the rows of a short request on a long cache are judged against. A row's seed is its maximum over vote
// tile 0 and over the vote tile of its own last visible key, each as far as it sees it, so that a decision depends on
// nothing that was visited before. All rows of such a request see a key.
#pragma once
#include "mask.cuh"
#include "ptx/shared.cuh"

// The load tiles that a block's seeds come from: those of its rows' last visible keys, downwards, then tile 0.
template <int TILE_KV, int VOTE_KV>
struct SeedTiles {
  int highest;
  int last_tiles;  // how many hold a row's last visible vote tile
  int count;

  // `keys`: of the block.
  FS_DEVICE explicit SeedTiles(const Visibility& keys) {
    const int lowest = (keys.end_all - 1) / TILE_KV;
    highest = (keys.end_some - 1) / TILE_KV;
    last_tiles = highest - lowest + 1;
    count = last_tiles + (lowest > 0 && keys.first_some < VOTE_KV);
  }

  FS_DEVICE int tile(int i) const { return i < last_tiles ? highest - i : 0; }
};

// Of the keys [x, y) that a row sees, those in the load tile at `first_key` that its seed is a maximum of.
template <int VOTE_KV>
FS_DEVICE int2 keys_of_seed(int2 keys, int first_key) {
  const int last_tile = (keys.y - 1) / VOTE_KV * VOTE_KV;
  if (first_key > 0) return make_int2(max(keys.x, last_tile), keys.y);
  return make_int2(keys.x, last_tile == VOTE_KV ? keys.y : min(keys.y, VOTE_KV));
}
