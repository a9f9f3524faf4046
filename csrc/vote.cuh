// How the 64 rows of a warpgroup decide together which vote tiles of a load tile they need.
// Four warps cast a byte each into a word of shared memory. A warp that needs every vote tile knows the outcome and
// goes on at once; only a warp that could spare something waits for the others. A barrier would stop all of them.
#pragma once
#include "ptx/shared.cuh"
#include "skip.cuh"
#include "softmax.cuh"
#include "work_item.cuh"

// Words of a warpgroup, used in turn. No warp may be this many turns ahead of another one.
constexpr int BALLOT_BOXES = 4;

// What a warp's rows need of a load tile, by vote tile.
template <int VOTES>
struct Needs {
  bool tile[VOTES];

  // Each thread tests the part of its two rows that it holds: a row spares a tile iff its four parts do. All vote
  // tiles are judged alike, by what is below the maxima from before the load tile, or seeds. NaN needs its tile.
  FS_DEVICE Needs(const float (&t)[VOTES][2], const float (&below)[2]) {
#pragma unroll
    for (int i = 0; i < VOTES; i++) {
      tile[i] = __any_sync(~0u, !(t[i][0] < below[0] && t[i][1] < below[1]));
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

// A warp's place at the ballot boxes of its warpgroup, which begin at `boxes`.
struct Voter {
  uint32_t boxes, own;  // own: the warp's byte of the first box
  uint32_t turn = 0;    // 4 times the number of votes so far

  FS_DEVICE explicit Voter(uint32_t boxes) : boxes(uniform(boxes)), own(uniform(boxes + threadIdx.x / 32 % 4)) {}
};

// Bit i: vote tile i is kept, because a warp needs it. The same in all warps, and the compiler knows it.
template <int VOTES>
FS_DEVICE uint32_t vote(Voter& voter, const Needs<VOTES>& needs) {
  static_assert(VOTES <= 2, "a ballot has two bits for the votes and six for the turn");
  voter.turn += 4;
  const uint32_t place = voter.turn % (4 * BALLOT_BOXES), stamp = voter.turn % 256;
  if (threadIdx.x % 32 == 0) st_shared_volatile_u8(voter.own + place, stamp | needs.ballot());
  if (needs.everything()) return (1 << VOTES) - 1;
  uint32_t ballots;
  do {
    ballots = ld_shared_volatile(voter.boxes + place) ^ stamp * 0x01010101u;  // an earlier turn's leaves a high bit
  } while (__any_sync(~0u, ballots & 0xFCFCFCFCu));
  ballots |= ballots >> 16;
  ballots |= ballots >> 8;
  return __shfl_sync(~0u, ballots & 3, 0);
}
