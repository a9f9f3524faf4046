// Position in a ring of shared-memory stages that two sides walk through in the same order.
#pragma once
#include "types.cuh"

template <int STAGES>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;  // of the phase that fills the stage; its release by the readers has `parity ^ 1`

  FS_DEVICE void advance() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};
