// Barriers in shared memory that count arrivals and bytes (mbarrier).
#pragma once
#include "types.cuh"

FS_DEVICE void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Orders the inits above before any use by other threads or by the copy engine.
FS_DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

FS_DEVICE void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives and announces that `bytes` will be written by the copy engine in this phase.
FS_DEVICE void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Whether the phase with this parity is complete. Several of these overlap, where waits add up.
FS_DEVICE bool mbarrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t complete;
  asm volatile(
      "{\n"
      ".reg .pred complete;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
      "selp.u32 %0, 1, 0, complete;\n"
      "}"
      : "=r"(complete)
      : "r"(barrier), "r"(parity)
      : "memory");
  return complete != 0;
}

// Returns when the phase with this parity is complete.
FS_DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred complete;\n"
      "FS_WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1;\n"
      "@complete bra FS_DONE;\n"
      "bra FS_WAIT;\n"
      "FS_DONE:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
