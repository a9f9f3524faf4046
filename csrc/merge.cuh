// Attention states of the segments of one item, and how the last CTA to finish combines them.
#pragma once
#include "arrival.cuh"
#include "decode_schedule.cuh"
#include "omitted.cuh"
#include "ptx/global.cuh"
#include "ptx/math.cuh"

// What the scorer knows of a row when its segment ends.
enum RowValue {
  MAXIMUM,       // of the raw scores, -INF if nothing was kept: then o and the sum are 0
  SUM,           // of exp2((s - maximum) * scale_log2)
  OMITTED_LOG2,  // of the most that skipped tiles hold; only where the bound is asked for
};

// What a cut segment leaves behind; rows as in the work item.
template <int ROWS, int HEAD_DIM, int VALUES>
struct PartialState {
  float o[ROWS][HEAD_DIM];     // not normalised
  float values[VALUES][ROWS];  // by RowValue
};

// The segments of one cut item: one in each of the CTAs first..last.
struct CutItem {
  int first, last;

  template <class Schedule>
  FS_DEVICE CutItem(const Schedule& schedule, const Segment& s)
      : first(schedule.owner_of(s.offset)), last(schedule.owner_of(s.offset + s.tiles.last - s.tiles.first)) {}

  // Of a CTA's two places the first is for an item that began earlier, the second for one that ends later.
  FS_DEVICE int place(int cta) const { return 2 * cta + (cta == first); }

  FS_DEVICE bool arrive_last(uint32_t* counters, int barrier, uint32_t& is_last) const {
    return ::arrive_last(counters + first, last - first, barrier, is_last);
  }
};

// Combines the states of `cut` in the order of their keys, so the result does not depend on who finished when.
// A warpgroup; each thread takes four channels of a row at a time and calls `finish(row, channel, o, m, l, omitted)`;
// the last one relative to m, 0 where it is not asked for.
template <int ROWS, int HEAD_DIM, int VALUES, class Finish>
FS_DEVICE void merge_states(const PartialState<ROWS, HEAD_DIM, VALUES>* partial, const CutItem& cut, int rows,
                            float scale_log2, Finish finish) {
  constexpr int QUADS = HEAD_DIM / 4;
  for (int i = threadIdx.x % 128; i < rows * QUADS; i += 128) {
    const int row = i / QUADS, channel = i % QUADS * 4;
    float m = -INF, l = 0.f;
    SumOfLogs omitted;
    float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
    for (int cta = cut.first; cta <= cut.last; cta++) {
      const auto& state = partial[cut.place(cta)];
      const float m_add = ld_global_cg(&state.values[MAXIMUM][row]);
      const float l_add = ld_global_cg(&state.values[SUM][row]);
      const float4 o_add = ld_global_cg_v4(&state.o[row][channel]);
      const float m_new = max_nan(m, m_add), to = m_new == -INF ? 0.f : m_new;
      const float keep = ex2((m - to) * scale_log2), add = ex2((m_add - to) * scale_log2);
      l = fmaf(add, l_add, keep * l);
      if constexpr (VALUES > OMITTED_LOG2) omitted.add(ld_global_cg(&state.values[OMITTED_LOG2][row]));
      o = make_float4(fmaf(add, o_add.x, keep * o.x), fmaf(add, o_add.y, keep * o.y),
                      fmaf(add, o_add.z, keep * o.z), fmaf(add, o_add.w, keep * o.w));
      m = m_new;
    }
    finish(row, channel, o, m, l, omitted.relative_to(m * scale_log2));
  }
}
