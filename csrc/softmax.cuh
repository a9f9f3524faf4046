// Online softmax of the two rows of a score tile that a thread holds a quarter of.
// Scores stay raw (q.k) until the exponent's one FMA with sm_scale * log2(e).
#pragma once
#include "mask.cuh"
#include "ptx/math.cuh"

// Running state of a thread's two rows.
struct RowPair {
  float m[2];  // maximum of the raw scores so far, -INF before the first key; the same in all four threads of a row
  float l[2];  // this thread's part of the sum of exp2((s - m) * scale_log2)
};

// Maxima of the two rows over this thread's columns, apart for the `PARTS` halves of the tile. NaN wins.
template <int N, int PARTS>
FS_DEVICE void maxima_in_thread(const float (&s)[N], float (&t)[PARTS][2]) {
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    const int first = part * (N / PARTS), end = first + N / PARTS;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float even = s[first + 2 * r], odd = s[first + 2 * r + 1];  // two chains: half the latency
#pragma unroll
      for (int i = first + 4 + 2 * r; i < end; i += 4) {
        even = max_nan(even, s[i]);
        odd = max_nan(odd, s[i + 1]);
      }
      t[part][r] = max_nan(even, odd);
    }
  }
}

// Maxima over whole rows: the quad's four threads agree on the result.
FS_DEVICE void maximum_in_row(float (&t)[2]) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    t[r] = max_nan(t[r], __shfl_xor_sync(~0u, t[r], 1));
    t[r] = max_nan(t[r], __shfl_xor_sync(~0u, t[r], 2));
  }
}

// Takes tile maxima `t` into `rows`. `shift` becomes what exponents subtract (0 for a row without keys so far),
// `rescale` the factor that keeps earlier sums and outputs comparable. True where a maximum has moved, or is NaN.
FS_DEVICE bool raise_maximum(RowPair& rows, const float (&t)[2], float scale_log2, float (&shift)[2],
                             float (&rescale)[2]) {
  const bool moved = !(t[0] <= rows.m[0] && t[1] <= rows.m[1]);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float m = max_nan(rows.m[r], t[r]);
    shift[r] = m == -INF ? 0.f : m * scale_log2;
    // Two roundings, as in the shifts before and after: exactly 1 where the maximum stays.
    rescale[r] = ex2(__fmul_rn(rows.m[r], scale_log2) - shift[r]);
    rows.m[r] = m;
    rows.l[r] *= rescale[r];
  }
  return moved;
}

// Score registers [FIRST, FIRST + COUNT) to probabilities, summed into l in fp32 and rounded into wgmma's A operand,
// 16 keys a fragment. The accumulator's layout is the fragment's: no data moves between threads.
template <class Element, int FIRST, int COUNT, int N>
FS_DEVICE void exponentiate(const float (&s)[N], RowPair& rows, const float (&shift)[2], float scale_log2,
                            uint32_t (&probabilities)[N / 8][4]) {
#pragma unroll
  for (int i = FIRST; i < FIRST + COUNT; i += 2) {
    const int r = row_of(i);
    const float a = ex2(fmaf(s[i], scale_log2, -shift[r]));
    const float b = ex2(fmaf(s[i + 1], scale_log2, -shift[r]));
    rows.l[r] += a + b;
    probabilities[i / 8][i % 8 / 2] = Element::pack(a, b);
  }
}

// The same of all registers, in two steps.
template <int N>
FS_DEVICE void exponentiate(float (&s)[N], RowPair& rows, const float (&shift)[2], float scale_log2) {
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const int r = row_of(i);
    s[i] = ex2(fmaf(s[i], scale_log2, -shift[r]));
    s[i + 1] = ex2(fmaf(s[i + 1], scale_log2, -shift[r]));
    rows.l[r] += s[i] + s[i + 1];
  }
}

template <class Element, int N>
FS_DEVICE void pack(const float (&s)[N], uint32_t (&probabilities)[N / 8][4]) {
#pragma unroll
  for (int i = 0; i < N; i += 2) probabilities[i / 8][i % 8 / 2] = Element::pack(s[i], s[i + 1]);
}

// Multiplies the output's rows where a maximum of the warp `moved`; most tiles move none. True where it did.
// The sums `l` are never negative: asking makes the compiler add up here what was exponentiated, instead of keeping
// all unrounded probabilities in registers until later.
template <int N>
FS_DEVICE bool rescale_output(float (&o)[N], bool moved, const float (&rescale)[2], const float (&l)[2]) {
  if (!__any_sync(~0u, moved || l[0] + l[1] < 0.f)) return false;
#pragma unroll
  for (int i = 0; i < N; i++) o[i] *= rescale[row_of(i)];
  return true;
}

// Adds up the four parts of each row's sum.
FS_DEVICE void sum_in_row(float (&l)[2]) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    l[r] += __shfl_xor_sync(~0u, l[r], 1);
    l[r] += __shfl_xor_sync(~0u, l[r], 2);
  }
}

// What a row's accumulator is multiplied by to be the output, and the row's LSE in log2 units.
struct RowEnd {
  float factor, lse_log2;
};

// `m_log2` is the row's maximum, `sink_log2` a logit that joins the denominator, -INF for none. A row without either is
// exactly zero and its LSE -INF.
FS_DEVICE RowEnd end_of_row(float m_log2, float l, float sink_log2) {
  const float top = max_nan(m_log2, sink_log2);
  if (top == -INF) return {0.f, -INF};
  const float weight = ex2(m_log2 - top), total = l * weight + ex2(sink_log2 - top);
  return {weight / total, top + lg2(total)};
}
