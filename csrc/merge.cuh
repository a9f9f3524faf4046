// Attention states of the segments of one item, and how the last CTA to finish combines them.
#pragma once
#include "decode_schedule.cuh"
#include "ptx/global.cuh"
#include "ptx/math.cuh"
#include "ptx/warpgroup.cuh"

// What a cut segment leaves behind; rows as in the work item.
template <int ROWS, int HEAD_DIM>
struct PartialState {
  float o[ROWS][HEAD_DIM];  // not normalised
  float m[ROWS];            // maximum of the raw scores, -INF if nothing was kept: then o and l are 0
  float l[ROWS];            // sum of exp2((s - m) * scale_log2)
};

// The segments of one cut item: one in each of the CTAs first..last.
struct CutItem {
  int first, last;

  template <class Schedule>
  FS_DEVICE CutItem(const Schedule& schedule, const Segment& s)
      : first(schedule.owner_of(s.offset)), last(schedule.owner_of(s.offset + s.tiles.last - s.tiles.first)) {}

  // Of a CTA's two places the first is for an item that began earlier, the second for one that ends later.
  FS_DEVICE int place(int cta) const { return 2 * cta + (cta == first); }

  // True in the CTA that arrives last, for all 128 threads of the warpgroup, whose writes before this call are
  // then visible to that CTA. The counter is 0 again.
  FS_DEVICE bool arrive_last(uint32_t* counters, int barrier, uint32_t& is_last) const {
    named_barrier_sync(barrier, 128);  // the warpgroup's writes before thread 0's release
    const uint32_t others = last - first;
    if (threadIdx.x % 128 == 0) is_last = atom_inc_acq_rel_gpu(counters + first, others) == others;
    named_barrier_sync(barrier, 128);
    return is_last;
  }
};

// Combines the states of `cut` in the order of their keys, so the result does not depend on who finished when.
// A warpgroup; each thread takes four channels of a row at a time and calls `finish(row, channel, o, m, l)`.
template <int ROWS, int HEAD_DIM, class Finish>
FS_DEVICE void merge_states(const PartialState<ROWS, HEAD_DIM>* partial, const CutItem& cut, int rows, float scale_log2,
                            Finish finish) {
  constexpr int QUADS = HEAD_DIM / 4;
  for (int i = threadIdx.x % 128; i < rows * QUADS; i += 128) {
    const int row = i / QUADS, channel = i % QUADS * 4;
    float m = -INF, l = 0.f;
    float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
    for (int cta = cut.first; cta <= cut.last; cta++) {
      const auto& state = partial[cut.place(cta)];
      const float m_add = ld_global_cg(&state.m[row]), l_add = ld_global_cg(&state.l[row]);
      const float4 o_add = ld_global_cg_v4(&state.o[row][channel]);
      const float m_new = max_nan(m, m_add), to = m_new == -INF ? 0.f : m_new;
      const float keep = ex2((m - to) * scale_log2), add = ex2((m_add - to) * scale_log2);
      l = fmaf(add, l_add, keep * l);
      o = make_float4(fmaf(add, o_add.x, keep * o.x), fmaf(add, o_add.y, keep * o.y),
                      fmaf(add, o_add.z, keep * o.z), fmaf(add, o_add.w, keep * o.w));
      m = m_new;
    }
    finish(row, channel, o, m, l);
  }
}
