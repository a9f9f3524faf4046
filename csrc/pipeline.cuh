// A ring of shared-memory stages that two sides walk through in the same order.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"

// One arrival of the whole warp.
FS_DEVICE void release(uint64_t& barrier) {
  if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&barrier));
}

// One of each lane: it has written or read what the others have not.
FS_DEVICE void release_by_lanes(uint64_t& barrier) { mbarrier_arrive(shared_address(&barrier)); }

// Two barriers a stage: one side arrives at `loaded` when it has filled it, the other at `released` when it is done.
template <int STAGES>
struct RingBarriers {
  uint64_t loaded[STAGES], released[STAGES];

  FS_DEVICE void initialise(int loaders, int readers) {
    for (int i = 0; i < STAGES; i++) {
      mbarrier_init(shared_address(&loaded[i]), loaders);
      mbarrier_init(shared_address(&released[i]), readers);
    }
  }
};

template <int STAGES>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;  // of the phase that fills the stage; its release by the readers has `parity ^ 1`

  FS_DEVICE static RingPosition at(uint32_t turn) {
    return {static_cast<int>(turn % STAGES), turn / STAGES % 2};
  }

  FS_DEVICE void advance() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }

  FS_DEVICE void advance(int steps) {  // at most STAGES
    stage += steps;
    if (stage >= STAGES) {
      stage -= STAGES;
      parity ^= 1;
    }
  }

  FS_DEVICE RingPosition after(int steps) const {
    RingPosition later = *this;
    later.advance(steps);
    return later;
  }
};
