// Shared-memory addresses, loads and stores by 32-bit address.
#pragma once
#include "types.cuh"

FS_DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

FS_DEVICE void st_shared(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

FS_DEVICE void st_shared(uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

FS_DEVICE void st_shared_v4(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

FS_DEVICE void st_shared_v2(uint32_t address, uint32_t x, uint32_t y) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(x), "r"(y) : "memory");
}

// Four matrices of 8 rows of 16 bytes; lane 8 i + j gives the address of row j of matrix i. Lane l receives bytes
// 4 (l % 4) .. of row l / 4 of each matrix.
FS_DEVICE void ld_matrix_x4(uint32_t (&d)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}

// The same, but lane l receives bytes 2 (l / 4) and the next of rows 2 (l % 4) and the next.
FS_DEVICE void ld_matrix_x4_trans(uint32_t (&d)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}

FS_DEVICE uint32_t ld_shared(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

FS_DEVICE float ld_shared_f32(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

FS_DEVICE uint4 ld_shared_v4(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// Volatile: for words by which warps signal each other without a barrier.
FS_DEVICE void st_shared_volatile_u8(uint32_t address, uint32_t value) {
  asm volatile("st.volatile.shared.b8 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

FS_DEVICE uint32_t ld_shared_volatile(uint32_t address) {
  uint32_t value;
  asm volatile("ld.volatile.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
