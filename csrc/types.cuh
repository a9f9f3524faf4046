// Integer names, 16-bit float conversions and the opaque tensor map. No toolkit header is used anywhere.
#pragma once

using int8_t = signed char;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;

#define FS_DEVICE __device__ __forceinline__

constexpr float INF = __builtin_bit_cast(float, 0x7f800000);
constexpr float LOG2E = 1.4426950408889634f;

// CUtensorMap as the driver encodes it.
struct alignas(64) TensorMap {
  uint8_t bytes[128];
};

// The 16-bit element types as tags: `Bf16::pack` rounds two floats into one register, `lo` in the low half.
struct Bf16 {
  static FS_DEVICE uint32_t pack(float lo, float hi) {
    uint32_t d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
    return d;
  }
};

struct Fp16 {
  static FS_DEVICE uint32_t pack(float lo, float hi) {
    uint32_t d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
    return d;
  }
};
