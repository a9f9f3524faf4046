// Clusters of CTAs: each other's shared memory, and a barrier of all their threads.
#pragma once
#include "types.cuh"

// The same place in the shared memory of the CTA with this rank.
FS_DEVICE uint32_t shared_of_rank(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// All threads of all CTAs have come here. It orders nothing: a release would wait for every store to memory.
FS_DEVICE void cluster_meet() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Arrives at a barrier of another CTA. It releases this thread's own reads and writes in its CTA, which is what a stage
// takes that is free; at cluster scope it would wait for every store to memory.
FS_DEVICE void mbarrier_arrive_there(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Returns when the phase with this parity is complete; sees what other CTAs have stored for it.
FS_DEVICE void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred complete;\n"
      "FS_WAIT:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 complete, [%0], %1;\n"
      "@complete bra FS_DONE;\n"
      "bra FS_WAIT;\n"
      "FS_DONE:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Stores to another CTA, whose barrier receives the bytes.
FS_DEVICE void st_async(uint32_t address, uint32_t value, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address), "r"(value),
               "r"(barrier)
               : "memory");
}

FS_DEVICE void st_async_v4(uint32_t address, uint4 v, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
               : "memory");
}
