// How the 64 rows of a warpgroup decide together which vote tiles of a load tile they need.
// Four warps cast a byte each into a word of shared memory. A warp that needs every vote tile knows the outcome and
// goes on at once; only a warp that could spare something waits for the others. A barrier would stop all of them.
#pragma once
#include "ptx/shared.cuh"
#include "skip.cuh"
#include "softmax.cuh"

// Words of a warpgroup, used in turn. No warp may be this many turns ahead of another one.
constexpr int BALLOT_BOXES = 4;

// What a warp's rows need of a load tile, by vote tile.
template <int VOTES>
struct Needs {
  bool tile[VOTES];

  // Each thread tests the part of its two rows that it holds: a row spares a tile iff its four parts do. All vote
  // tiles are judged against the same references: maxima from before the load tile, or seeds. NaN needs its tile.
  FS_DEVICE Needs(const float (&t)[VOTES][2], const float (&reference)[2], float threshold) {
    const float bound[2] = {spares_below(reference[0], threshold), spares_below(reference[1], threshold)};
#pragma unroll
    for (int i = 0; i < VOTES; i++) {
      tile[i] = __any_sync(~0u, !(t[i][0] < bound[0] && t[i][1] < bound[1]));
    }
  }

  // Each thread says what its two rows need.
  FS_DEVICE explicit Needs(const bool (&needs)[VOTES]) {
#pragma unroll
    for (int i = 0; i < VOTES; i++) tile[i] = __any_sync(~0u, needs[i]);
  }

  FS_DEVICE bool everything() const { return tile[0] && tile[VOTES - 1]; }
  FS_DEVICE uint32_t ballot() const { return tile[0] + (VOTES == 2 && tile[VOTES - 1] ? 2 : 0); }
};

// Bit i: vote tile i is kept, because a warp needs it. The same in all warps, and the compiler knows it.
// `boxes` is the warpgroup's array of ballot boxes; `turn` counts its votes, from 1 on.
template <int VOTES>
FS_DEVICE uint32_t vote(uint32_t boxes, uint32_t turn, const Needs<VOTES>& needs) {
  static_assert(VOTES <= 2, "a ballot has two bits for the votes and six for the turn");
  const uint32_t box = boxes + turn % BALLOT_BOXES * 4, stamp = turn % 64 * 4;
  if (threadIdx.x % 32 == 0) st_shared_volatile_u8(box + threadIdx.x / 32 % 4, stamp | needs.ballot());
  if (needs.everything()) return (1 << VOTES) - 1;
  uint32_t ballots;
  do {
    ballots = ld_shared_volatile(box) ^ stamp * 0x01010101u;  // the stamp of an earlier turn leaves a high bit
  } while (__any_sync(~0u, ballots & 0xFCFCFCFCu));
  ballots |= ballots >> 16;
  ballots |= ballots >> 8;
  return __shfl_sync(~0u, ballots & 3, 0);
}
