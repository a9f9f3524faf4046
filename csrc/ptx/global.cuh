// Global-memory accesses that take part in communication between CTAs.
#pragma once
#include "types.cuh"

// Reads from L2: what another CTA wrote, never a stale line of this SM's L1.
FS_DEVICE float ld_global_cg(const float* address) {
  float value;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(address) : "memory");
  return value;
}

FS_DEVICE float4 ld_global_cg_v4(const float* address) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

// Returns the old value; the new one is old + 1, or 0 if old was `last`. Releases this thread's and its
// barrier partners' writes, acquires those of the CTAs that arrived before.
FS_DEVICE uint32_t atom_inc_acq_rel_gpu(uint32_t* counter, uint32_t last) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(old) : "l"(counter), "r"(last) : "memory");
  return old;
}
