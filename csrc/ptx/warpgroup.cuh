// Warpgroup control: wgmma ordering, register reallocation, named barriers and votes.
#pragma once
#include "types.cuh"

// Orders register and shared-memory accesses before the wgmma batch that follows.
FS_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

FS_DEVICE void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
FS_DEVICE void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Tells the compiler that wgmma may have changed these accumulators until here.
template <int N>
FS_DEVICE void keep_after_wait(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

template <int REGISTERS>
FS_DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
FS_DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

FS_DEVICE void named_barrier_sync(int id, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

FS_DEVICE void named_barrier_arrive(int id, int threads) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// True in all 128 threads iff `predicate` holds in all of them.
FS_DEVICE bool warpgroup_all(int barrier_id, bool predicate) {
  uint32_t all;
  asm volatile(
      "{\n"
      ".reg .pred mine, everyone;\n"
      "setp.ne.u32 mine, %1, 0;\n"
      "barrier.cta.red.and.pred everyone, %2, 128, mine;\n"
      "selp.u32 %0, 1, 0, everyone;\n"
      "}"
      : "=r"(all)
      : "r"(static_cast<uint32_t>(predicate)), "r"(barrier_id)
      : "memory");
  return all != 0;
}

// Makes ordinary writes to shared memory visible to wgmma and to the copy engine.
FS_DEVICE void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
