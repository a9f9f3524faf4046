// Soft cap of scores: c * tanh(s / c), before mask and test.
#pragma once
#include "ptx/math.cuh"

// `cap` is c in the units of `s`. tanh(x) = 1 - 2 / (exp(2x) + 1) is exact at both ends, unlike tanh.approx.
template <int N>
FS_DEVICE void soft_cap(float (&s)[N], float cap) {
  const float to_exponent = 2.f * LOG2E / cap;
#pragma unroll
  for (int i = 0; i < N; i++) s[i] = fmaf(-2.f * cap, rcp(ex2(s[i] * to_exponent) + 1.f), cap);
}
