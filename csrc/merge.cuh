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
  float m[ROWS];            // maximum of the raw scores, -INF if nothing was kept
  float l[ROWS];            // sum of exp2((s - m) * scale_log2)
};

// The segments of one cut item: one in each of the CTAs first..last.
struct CutItem {
  int first, last;

  FS_DEVICE CutItem(const WorkShare& share, const Segment& s)
      : first(share.owner_of(s.offset)), last(share.owner_of(s.offset + s.num_tiles - 1)) {}

  // Of a CTA's two places the first is for an item that began earlier, the second for one that ends later.
  FS_DEVICE int place(int cta) const { return 2 * cta + (cta == first); }

  // True in the CTA that arrives last, for all 128 threads of the warpgroup, whose writes before this call are
  // then visible to that CTA. The counter is 0 again.
  FS_DEVICE bool arrive_last(uint32_t* counters, int barrier, uint32_t& is_last) const {
    named_barrier_sync(barrier, 128);  // the warpgroup's writes before thread 0's release
    if (threadIdx.x % 128 == 0)
      is_last = atom_inc_acq_rel_gpu(counters + first, last - first) == static_cast<uint32_t>(last - first);
    named_barrier_sync(barrier, 128);
    return is_last;
  }
};

FS_DEVICE float4 scaled(float4 v, float factor) {
  return make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor);
}

// Combines the states of `cut` in the order of the CTAs, so the result does not depend on who finished when.
// A warpgroup; each thread takes four channels of a row at a time. `store(row, channel, float4)` takes the
// normalised output, `store_lse(row, m, l)` the final state.
template <int ROWS, int HEAD_DIM, class Store, class StoreLse>
FS_DEVICE void merge_states(const PartialState<ROWS, HEAD_DIM>* partial, const CutItem& cut, int rows, float scale_log2,
                            Store store, StoreLse store_lse) {
  constexpr int QUADS = HEAD_DIM / 4;
  for (int i = threadIdx.x % 128; i < rows * QUADS; i += 128) {
    const int row = i / QUADS, channel = i % QUADS * 4;
    float m = -INF;
#pragma unroll 4
    for (int cta = cut.first; cta <= cut.last; cta++) m = max_nan(m, ld_global_cg(&partial[cut.place(cta)].m[row]));
    const float shift = m == -INF ? 0.f : m * scale_log2;
    float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
    float l = 0.f;
#pragma unroll 4
    for (int cta = cut.first; cta <= cut.last; cta++) {
      const auto& state = partial[cut.place(cta)];
      const float weight = ex2(fmaf(ld_global_cg(&state.m[row]), scale_log2, -shift));
      const float4 part = ld_global_cg_v4(&state.o[row][channel]);
      l = fmaf(weight, ld_global_cg(&state.l[row]), l);
      o = make_float4(fmaf(weight, part.x, o.x), fmaf(weight, part.y, o.y), fmaf(weight, part.z, o.z),
                      fmaf(weight, part.w, o.w));
    }
    store(row, channel, scaled(o, l == 0.f ? 0.f : 1.f / l));
    if (channel == 0) store_lse(row, m, l);
  }
}
