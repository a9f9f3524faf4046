// What a unit of prefill rows leaves behind of one piece of its keys, and how the pieces are put together.
#pragma once
#include "ptx/global.cuh"
#include "softmax.cuh"

// As the 128 threads hold it, so that every access is of whole lines.
template <int O_REGISTERS>
struct UnitState {
  float4 o[O_REGISTERS / 4][128];  // not normalised
  float4 rows[128];                // m of the thread's two rows, and its parts of their l
  float omitted[128];

  FS_DEVICE void store(const float (&registers)[O_REGISTERS], const RowPair& own, float mass) {
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < O_REGISTERS; i += 4) {
      o[i / 4][thread] = make_float4(registers[i], registers[i + 1], registers[i + 2], registers[i + 3]);
    }
    rows[thread] = make_float4(own.m[0], own.m[1], own.l[0], own.l[1]);
    omitted[thread] = mass;
  }
};

// Adds the states of `pieces` pieces, `stride` states apart, in the order of the pieces: the result does not depend on
// which one was done first. The thread's omitted mass is relative to the same reference in all of them.
template <int O_REGISTERS>
FS_DEVICE void merge_pieces(const UnitState<O_REGISTERS>* state, int pieces, int stride, float scale_log2,
                            float (&o)[O_REGISTERS], RowPair& rows, float& omitted) {
  const int thread = threadIdx.x % 128;
  const auto rows_of = [&](int piece) {
    return ld_global_cg_v4(reinterpret_cast<const float*>(&state[piece * stride].rows[thread]));
  };
#pragma unroll
  for (int r = 0; r < 2; r++) rows.m[r] = -INF, rows.l[r] = 0.f;
#pragma unroll 4
  for (int piece = 0; piece < pieces; piece++) {
    const float4 added = rows_of(piece);
    rows.m[0] = max_nan(rows.m[0], added.x), rows.m[1] = max_nan(rows.m[1], added.y);
  }
  float shift[2];
#pragma unroll
  for (int r = 0; r < 2; r++) shift[r] = rows.m[r] == -INF ? 0.f : rows.m[r] * scale_log2;
  omitted = 0.f;
#pragma unroll
  for (int i = 0; i < O_REGISTERS; i++) o[i] = 0.f;
#pragma unroll 1
  for (int piece = 0; piece < pieces; piece++) {
    const float4 added = rows_of(piece);
    const float weight[2] = {ex2(__fmul_rn(added.x, scale_log2) - shift[0]),
                             ex2(__fmul_rn(added.y, scale_log2) - shift[1])};
    rows.l[0] = fmaf(weight[0], added.z, rows.l[0]), rows.l[1] = fmaf(weight[1], added.w, rows.l[1]);
    omitted += ld_global_cg(&state[piece * stride].omitted[thread]);
#pragma unroll
    for (int i = 0; i < O_REGISTERS; i += 4) {
      const float4 x = ld_global_cg_v4(reinterpret_cast<const float*>(&state[piece * stride].o[i / 4][thread]));
      o[i] = fmaf(weight[0], x.x, o[i]);
      o[i + 1] = fmaf(weight[0], x.y, o[i + 1]);
      o[i + 2] = fmaf(weight[1], x.z, o[i + 2]);
      o[i + 3] = fmaf(weight[1], x.w, o[i + 3]);
    }
  }
}
