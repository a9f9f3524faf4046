// What skipped tiles hold of the softmax at most, and the certificate made of it.
#pragma once
#include "ptx/math.cuh"

// Upper bound on the mass of a tile of which a row sees `keys` keys, relative to a key at `reference`.
FS_DEVICE float most_of_tile(float tile_max, int keys, float reference, float scale_log2) {
  return tile_max == -INF ? 0.f : keys * ex2((tile_max - reference) * scale_log2);
}

// A mass that must outlive its reference: as a logarithm.
FS_DEVICE float log2_of_mass(float mass, float reference, float scale_log2) {
  return mass == 0.f ? -INF : lg2(mass) + reference * scale_log2;
}

// The sum of such masses, -INF for none.
struct SumOfLogs {
  float top = -INF, sum = 0.f;  // of exp2(log2 - top)

  FS_DEVICE void add(float mass_log2) {
    const float higher = fmaxf(top, mass_log2), to = higher == -INF ? 0.f : higher;
    sum = fmaf(ex2(top - to), sum, ex2(mass_log2 - to));
    top = higher;
  }

  FS_DEVICE float relative_to(float m_log2) const { return top == -INF ? 0.f : sum * ex2(top - m_log2); }
};

// Share of the whole that is omitted, given omitted over kept mass; inflated to cover rounding.
FS_DEVICE float certified_share(float omitted_over_kept) {
  constexpr float INFLATION = 1.f + 1.f / 1024;
  return omitted_over_kept / (1.f + omitted_over_kept) * INFLATION;
}
