// From a row's final maximum and sum to its output factor and LSE.
#pragma once
#include "ptx/math.cuh"

// What a row's accumulator is multiplied by to be the output, and the row's LSE in log2 units.
struct RowEnd {
  float factor, lse_log2;
};

// `m` in raw score units, `sink` in natural-log units (read only with SINKS). A row that saw no key is exactly zero,
// its LSE -INF or the sink.
template <bool SINKS>
FS_DEVICE RowEnd end_of_row(float m, float l, float scale_log2, float sink) {
  if (!SINKS) return l == 0.f ? RowEnd{0.f, -INF} : RowEnd{1.f / l, m * scale_log2 + lg2(l)};
  const float m_log2 = m * scale_log2, sink_log2 = sink * LOG2E, top = max_nan(m_log2, sink_log2);
  const float weight = l == 0.f ? 0.f : ex2(m_log2 - top);
  const float total = l * weight + ex2(sink_log2 - top);
  return top == -INF ? RowEnd{0.f, -INF} : RowEnd{weight / total, top + lg2(total)};
}
