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

/* A lane has 8 pairs of a step: pair n is elements 8 (n/2) + 2 (l%4) of row l/4 + 8 (n%2). COUNT of them at once, from `first` on. */
template <int COUNT> struct pairs { uint32_t gate[COUNT], up[COUNT]; };
__device__ __forceinline__ bf16 *pair_at(const warp_tile &w, const pair_layout &l, int n) {
  return w.h + (w.lane / 4 + n % 2 * 8) * STAGING_LINE + (n / 2 * 8 + w.lane % 4 * 2) * l.column;
}
__device__ __forceinline__ float *da_at(const warp_tile &w, int n) {
  return w.da + (w.lane / 4 + n % 2 * 8) * DA_LINE + n / 2 * 8 + w.lane % 4 * 2;
}
template <int COUNT>
__device__ __forceinline__ pairs<COUNT> load_pairs(const warp_tile &w, const pair_layout &l, int first) {
  pairs<COUNT> h;
#pragma unroll
  for (int q = 0; q < COUNT; q++) {
    const bf16 *at = pair_at(w, l, first + q);
    const uint32_t x = *reinterpret_cast<const uint32_t *>(at);
    const uint32_t y =
        l.gated ? *reinterpret_cast<const uint32_t *>(at + l.up) : 0x3f803f80; /* 1: up of what has none */
    h.gate[q] = __byte_perm(x, y, l.first);
    h.up[q] = __byte_perm(x, y, l.second);
  }
  return h;
}
template <int COUNT>
__device__ __forceinline__ void store_pairs(const warp_tile &w, const pair_layout &l, int first,
                                            const pairs<COUNT> &h) {
#pragma unroll
  for (int q = 0; q < COUNT; q++) {
    bf16 *at = pair_at(w, l, first + q);
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
  for (int first = 0; first < 8; first += 4) {
    pairs<4> h = load_pairs<4>(w, l, first);
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
    for (int q = 0; q < 4; q++) *reinterpret_cast<uint32_t *>(pair_at(w, l, first + q)) = h.gate[q];
  }
}

/* The gradient of a pair: `weight` da and h become weight * a, d gate and d up; returns da * a. */
struct pair_grads {
  uint32_t a, gate, up;
};
template <int KIND, int LEVEL>
__device__ __forceinline__ float dact_pair(const gemm_params &p, float2 da, uint32_t gate_pair,
                                           uint32_t up_pair, float weight, pair_grads *d) {
  const float2 g = floats_of(gate_pair), u = floats_of(up_pair);
  const float gates[2] = {g.x, g.y}, ups[2] = {u.x, u.y}, ds[2] = {da.x, da.y};
  float a[2], dg[2], du[2], sum = 0;
#pragma unroll
  for (int c = 0; c < 2; c++) {
    const bool over = LEVEL > PLAIN && gates[c] > p.act.gate_max;
    const float gate = over ? p.act.gate_max : gates[c];
    const float f = moe_act_f(KIND, gate, p.act.alpha, p.act.beta),
                inner = moe_act_df(KIND, gate, p.act.alpha, p.act.beta);
    const float v = up_value<LEVEL>(p, ups[c]), scaled = weight * ds[c];
    a[c] = f * v;
    sum += ds[c] * a[c];
    a[c] *= weight;
    dg[c] = scaled * (over ? 0.0f : inner) * v;
    du[c] = scaled * f * up_slope<LEVEL>(p, ups[c]);
  }
  *d = {pair_of(a[0], a[1]), pair_of(dg[0], dg[1]), pair_of(du[0], du[1])};
  return sum;
}

/* 32 elements: h becomes dh, da becomes weight * a; adds da * a to the sums of a lane's two rows. As many pairs at once as
 * registers beside 192 accumulators allow. */
template <int KIND, int LEVEL>
__device__ __forceinline__ void dact_rows(const warp_tile &w, const gemm_params &p, float *sum) {
  constexpr bool large =
      KIND == MOE_ACT_GELU || KIND == MOE_ACT_GELU_TANH || KIND == MOE_ACT_RELU2_TANH || KIND == MOE_ACT_SITU;
  constexpr int COUNT = large || LEVEL == SOFT ? 1 : LEVEL == PLAIN && KIND == MOE_ACT_SILU ? 4 : 2;
  const pair_layout l = layout_of(p);
#pragma unroll 1
  for (int first = 0; first < 8; first += COUNT) {
    pairs<COUNT> h = load_pairs<COUNT>(w, l, first);
    pair_grads d[COUNT];
#pragma unroll
    for (int q = 0; q < COUNT; q++) {
      const int i = (first + q) % 2;
      const float2 da = *reinterpret_cast<const float2 *>(da_at(w, first + q));
      const float part =
          dact_pair<KIND, LEVEL>(p, da, h.gate[q], h.up[q], w.weight[w.lane / 4 + 8 * i], &d[q]);
      sum[0] += i == 0 ? part : 0.0f;
      sum[1] += i == 1 ? part : 0.0f;
      h.gate[q] = d[q].gate;
      h.up[q] = d[q].up;
    }
    store_pairs<COUNT>(w, l, first, h);
#pragma unroll
    for (int q = 0; q < COUNT; q++) *reinterpret_cast<uint32_t *>(da_at(w, first + q)) = d[q].a;
  }
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
__device__ __forceinline__ void dact_switch(const warp_tile &w, const gemm_params &p, float *sum) {
  switch ((int)p.act.kind * 3 + p.act_level) {
#define MOE_ACT(ENUM, value, fn, plain, gated, a0, b0, f, df)            \
  case value * 3 + PLAIN: dact_rows<value, PLAIN>(w, p, sum); break;     \
  case value * 3 + CLAMPED: dact_rows<value, CLAMPED>(w, p, sum); break; \
  case value * 3 + SOFT:                                                 \
    dact_rows<value, SOFT>(w, p, sum);                                   \
    break;
#include "moeblas_act.def"
#undef MOE_ACT
  }
}
