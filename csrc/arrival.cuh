// How the warpgroups that share some work find out which of them is done last.
#pragma once
#include "ptx/global.cuh"
#include "ptx/warpgroup.cuh"

// True in the one that arrives after `others` others, for all 128 threads of the warpgroup; what they wrote before
// this call is then visible to it. The counter is 0 again. `is_last` is the warpgroup's own word of shared memory.
FS_DEVICE bool arrive_last(uint32_t* counter, uint32_t others, int barrier, uint32_t& is_last) {
  named_barrier_sync(barrier, 128);  // the warpgroup's writes before thread 0's release
  if (threadIdx.x % 128 == 0) is_last = atom_inc_acq_rel_gpu(counter, others) == others;
  named_barrier_sync(barrier, 128);
  return is_last;
}
