/* SPDX-License-Identifier: Apache-2.0
 *
 * The activation and its gradient on the staged lines of a warp (epilogue.cuh, which includes this in its middle): 16 elements of 16
 * rows at a time, 4 pairs a lane, read, computed and written as three blocks of independent instructions. */
#pragma once

/* How much of moe_act_desc there is to do beyond f(gate) * up, or f(h). */
enum {
  PLAIN,
  CLAMPED,
  SOFT
};

__device__ __forceinline__ float2 floats_of(uint32_t pair) {
  return __bfloat1622float2(*reinterpret_cast<const bf16x2 *>(&pair));
}
__device__ __forceinline__ uint32_t pair_of(float x, float y) {
  const bf16x2 pair = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<const uint32_t *>(&pair);
}

/* Where the pairs of a lane lie in staged h, and how they are sorted into two of gate and two of up, and back. */
struct pair_layout {
  int up, column; /* elements from gate to up, staged columns an element takes at `gate` */
  bool gated;
  uint32_t first, second; /* byte selectors */
};
__device__ __forceinline__ bool in_pairs(const gemm_params &p) {
  return p.act.gated && p.act.layout == MOE_LAYOUT_INTERLEAVED && p.act.interleave == 1;
}
__device__ __forceinline__ pair_layout layout_of(const gemm_params &p) {
  if (in_pairs(p)) return {2, 2, true, 0x5410, 0x7632};
  return {32, 1, p.act.gated != 0, 0x3210, 0x7654};
}

/* 4 pairs of gate and of up, of 16 elements from `column` on: pair q is elements 8 (q/2) + 2 (l%4) of row l/4 + 8 (q%2). */
struct pairs {
  uint32_t gate[4], up[4];
};
__device__ __forceinline__ bf16 *pair_at(const warp_tile &w, const pair_layout &l, int column, int q) {
  const int element = column + q / 2 * 8 + w.lane % 4 * 2;
  return w.h + (w.lane / 4 + q % 2 * 8) * STAGING_LINE + element * l.column;
}
__device__ __forceinline__ pairs load_pairs(const warp_tile &w, const pair_layout &l, int column) {
  pairs h;
#pragma unroll
  for (int q = 0; q < 4; q++) {
    const bf16 *at = pair_at(w, l, column, q);
    const uint32_t x = *reinterpret_cast<const uint32_t *>(at);
    const uint32_t y =
        l.gated ? *reinterpret_cast<const uint32_t *>(at + l.up) : 0x3f803f80; /* 1: up of what has none */
    h.gate[q] = __byte_perm(x, y, l.first);
    h.up[q] = __byte_perm(x, y, l.second);
  }
  return h;
}
__device__ __forceinline__ void store_pairs(const warp_tile &w, const pair_layout &l, int column,
                                            const pairs &h) {
#pragma unroll
  for (int q = 0; q < 4; q++) {
    bf16 *at = pair_at(w, l, column, q);
    *reinterpret_cast<uint32_t *>(at) = __byte_perm(h.gate[q], h.up[q], l.first);
    if (l.gated) *reinterpret_cast<uint32_t *>(at + l.up) = __byte_perm(h.gate[q], h.up[q], l.second);
  }
}

/* v(u') + offset and its slope. Selections rather than branches, so that elements overlap in the pipelines. */
template <int LEVEL> __device__ __forceinline__ float up_value(const gemm_params &p, float u) {
  if (LEVEL == PLAIN) return u;
  float v = u < p.act.up_min ? p.act.up_min : u;
  v = v > p.act.up_max ? p.act.up_max : v;
  if (LEVEL == SOFT) v = p.act.up_beta * act_tanh(v / p.act.up_beta);
  return v + p.act.up_offset;
}
template <int LEVEL> __device__ __forceinline__ float up_slope(const gemm_params &p, float u) {
  if (LEVEL == PLAIN) return 1.0f;
  float slope = 1.0f;
  if (LEVEL == SOFT) {
    const float t = act_tanh(u / p.act.up_beta);
    slope = 1.0f - t * t;
  }
  return u < p.act.up_min || u > p.act.up_max ? 0.0f : slope;
}

/* a of 32 elements, each pair where its gate was. */
template <int KIND, int LEVEL>
__device__ __forceinline__ void act_rows(const warp_tile &w, const gemm_params &p) {
  const pair_layout l = layout_of(p);
#pragma unroll 1
  for (int column = 0; column < 32; column += 16) {
    pairs h = load_pairs(w, l, column);
#pragma unroll
    for (int q = 0; q < 4; q++) {
      const float2 g = floats_of(h.gate[q]), u = floats_of(h.up[q]);
      const float gates[2] = {g.x, g.y}, ups[2] = {u.x, u.y};
      float a[2];
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const float bounded = LEVEL > PLAIN && gates[c] > p.act.gate_max ? p.act.gate_max : gates[c];
        a[c] = moe_act_f(KIND, bounded, p.act.alpha, p.act.beta) * up_value<LEVEL>(p, ups[c]);
      }
      h.gate[q] = pair_of(a[0], a[1]);
    }
#pragma unroll
    for (int q = 0; q < 4; q++) *reinterpret_cast<uint32_t *>(pair_at(w, l, column, q)) = h.gate[q];
  }
}

/* 16 elements from `column` on: h becomes dh, weight * a is staged; adds da * a to the sums of a lane's two rows. da as in
 * accumulators. */
template <int KIND, int LEVEL>
__device__ __forceinline__ void dact_rows(const warp_tile &w, const gemm_params &p, const float *da,
                                          int column, int left, float *sum) {
  const pair_layout l = layout_of(p);
  pairs h = load_pairs(w, l, column);
  uint32_t weighted[4];
#pragma unroll
  for (int q = 0; q < 4; q++) {
    const float2 g = floats_of(h.gate[q]), u = floats_of(h.up[q]);
    const float gates[2] = {g.x, g.y}, ups[2] = {u.x, u.y}, weight = w.weight[w.lane / 4 + q % 2 * 8];
    const bool inside = column + q / 2 * 8 + w.lane % 4 * 2 < left; /* past the end h is anything */
    float a[2], dg[2], du[2];
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const bool over = LEVEL > PLAIN && gates[c] > p.act.gate_max;
      const float gate = over ? p.act.gate_max : gates[c];
      const float f = moe_act_f(KIND, gate, p.act.alpha, p.act.beta),
                  inner = moe_act_df(KIND, gate, p.act.alpha, p.act.beta);
      const float v = up_value<LEVEL>(p, ups[c]), d = da[q / 2 * 4 + q % 2 * 2 + c], scaled = weight * d;
      a[c] = f * v;
      sum[q % 2] += inside ? d * a[c] : 0.0f;
      a[c] *= weight;
      dg[c] = scaled * (over ? 0.0f : inner) * v;
      du[c] = scaled * f * up_slope<LEVEL>(p, ups[c]);
    }
    weighted[q] = pair_of(a[0], a[1]);
    h.gate[q] = pair_of(dg[0], dg[1]);
    h.up[q] = pair_of(du[0], du[1]);
  }
  store_pairs(w, l, column, h);
#pragma unroll
  for (int q = 0; q < 4; q++)
    *reinterpret_cast<uint32_t *>(w.a + (w.lane / 4 + q % 2 * 8) * A_LINE + column + q / 2 * 8 +
                                  w.lane % 4 * 2) = weighted[q];
}

/* The switches stand outside the loops, one expansion a row of moeblas_act.def and level. */
__device__ __forceinline__ void act_switch(const warp_tile &w, const gemm_params &p) {
  switch ((int)p.act.kind * 3 + p.act_level) {
#define MOE_ACT(ENUM, value, fn, plain, gated, a0, b0, f, df)      \
  case value * 3 + PLAIN: act_rows<value, PLAIN>(w, p); break;     \
  case value * 3 + CLAMPED: act_rows<value, CLAMPED>(w, p); break; \
  case value * 3 + SOFT:                                           \
    act_rows<value, SOFT>(w, p);                                   \
    break;
#include "moeblas_act.def"
#undef MOE_ACT
  }
}
__device__ __forceinline__ void dact_switch(const warp_tile &w, const gemm_params &p, const float *da,
                                            int column, int left, float *sum) {
  switch ((int)p.act.kind * 3 + p.act_level) {
#define MOE_ACT(ENUM, value, fn, plain, gated, a0, b0, f, df)                              \
  case value * 3 + PLAIN: dact_rows<value, PLAIN>(w, p, da, column, left, sum); break;     \
  case value * 3 + CLAMPED: dact_rows<value, CLAMPED>(w, p, da, column, left, sum); break; \
  case value * 3 + SOFT:                                                                   \
    dact_rows<value, SOFT>(w, p, da, column, left, sum);                                   \
    break;
#include "moeblas_act.def"
#undef MOE_ACT
  }
}

