// Where the final threshold of a request comes from.
#pragma once
#include "ptx/math.cuh"

// log2 of the final lambda of one request, at most 0; -INF where nothing may be skipped.
// Reads live tensors, so a value changed between two runs or graph replays is honoured.
template <class Params>
FS_DEVICE float final_threshold_log2(const Params& p, int request, int kv_len) {
  float value = p.threshold ? p.threshold[request] : p.threshold_value;
  if (!(value > 0.f)) return -INF;  // zero, negative or NaN
  float log2_lambda = lg2(value);
  if (!p.threshold_is_factor) return fminf(log2_lambda, 0.f);
  int length = p.threshold_kv_len ? p.threshold_kv_len[request] : kv_len;
  log2_lambda -= p.length_exponent * lg2(static_cast<float>(max(length, 1)));
  if (log2_lambda < 0.f) return log2_lambda;
  return p.overflow_is_dense ? -INF : 0.f;
}
