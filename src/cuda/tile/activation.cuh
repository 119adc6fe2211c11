/* SPDX-License-Identifier: Apache-2.0
 *
 * The activation and its gradient on what a thread of the epilogue has: of each of ACT_ROWS rows 8 elements, a piece of h with their
 * gates and one with their ups. The thread computes all of them as one block of independent instructions, for only these hide
 * their latency where a scheduler has one warp that computes. */
#pragma once

#include "../../act.h"
#include "../gemm/params.h"
#include "result.cuh"

enum {
  ACT_ROWS = 2
};

/* How much of moe_act_desc there is to do beyond f(gate) * up, or f(h). */
enum {
  PLAIN,
  CLAMPED,
  SOFT
};

/* Where a lane's pieces are: columns of h, and of a tile that holds h; both move by 64 << h_shift a step of 64 elements. */
struct h_place {
  int element; /* of the step's 64, the first */
  int gate, up;
  int tile_gate, tile_up;
};
__device__ __forceinline__ h_place place_of_h(const gemm_params &p, int piece) {
  const int f = piece * 8, inside = p.h_shift == 0 ? f : p.in_pairs ? 2 * f : f + (f & 32);
  return {f, p.gate_column + inside, p.gate_column + inside + p.h_up, inside, inside + p.tile_up};
}

/* Pieces as they lie in h: gates and ups, or, where the two of an element are beside each other, the first and the last 4 elements. */
struct h_pieces {
  uint4 gate[ACT_ROWS], up[ACT_ROWS];
};

/* 8 elements by pairs. */
struct pairs {
  uint32_t gate[4], up[4];
};
__device__ __forceinline__ pairs sorted(const gemm_params &p, const uint4 &v, const uint4 &w) {
  if (p.in_pairs)
    return {{__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.z, v.w, 0x5410), __byte_perm(w.x, w.y, 0x5410),
             __byte_perm(w.z, w.w, 0x5410)},
            {__byte_perm(v.x, v.y, 0x7632), __byte_perm(v.z, v.w, 0x7632), __byte_perm(w.x, w.y, 0x7632),
             __byte_perm(w.z, w.w, 0x7632)}};
  return {{v.x, v.y, v.z, v.w}, {w.x, w.y, w.z, w.w}};
}
__device__ __forceinline__ void unsorted(const gemm_params &p, const pairs &h, uint4 &v, uint4 &w) {
  v = make_uint4(h.gate[0], h.gate[1], h.gate[2], h.gate[3]);
  w = make_uint4(h.up[0], h.up[1], h.up[2], h.up[3]);
  if (!p.in_pairs) return;
  v = make_uint4(__byte_perm(h.gate[0], h.up[0], 0x5410), __byte_perm(h.gate[0], h.up[0], 0x7632),
                 __byte_perm(h.gate[1], h.up[1], 0x5410), __byte_perm(h.gate[1], h.up[1], 0x7632));
  w = make_uint4(__byte_perm(h.gate[2], h.up[2], 0x5410), __byte_perm(h.gate[2], h.up[2], 0x7632),
                 __byte_perm(h.gate[3], h.up[3], 0x5410), __byte_perm(h.gate[3], h.up[3], 0x7632));
}
__device__ __forceinline__ uint4 ones() { return make_uint4(0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80); }

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

template <int KIND, int LEVEL>
__device__ __forceinline__ void act_rows(const gemm_params &p, const h_pieces &h, uint4 (&a)[ACT_ROWS]) {
#pragma unroll
  for (int j = 0; j < ACT_ROWS; j++) {
    const pairs own = sorted(p, h.gate[j], h.up[j]);
    uint32_t pair[4];
#pragma unroll
    for (int q = 0; q < 4; q++) {
      const float2 g = floats_of(own.gate[q]), u = floats_of(own.up[q]);
      const float gates[2] = {g.x, g.y}, ups[2] = {u.x, u.y};
      float result[2];
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const float bounded = LEVEL > PLAIN && gates[c] > p.act.gate_max ? p.act.gate_max : gates[c];
        result[c] = moe_act_f(KIND, bounded, p.act.alpha, p.act.beta) * up_value<LEVEL>(p, ups[c]);
      }
      pair[q] = pair_of(result[0], result[1]);
    }
    a[j] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
  }
}

/* The gradient of a pair: `weight` da and h become weight * a, d gate and d up; `sum` grows by da * a. */
struct pair_grads {
  uint32_t a, gate, up;
};
template <int KIND, int LEVEL>
__device__ __forceinline__ pair_grads dact_pair(const gemm_params &p, uint32_t da_pair, uint32_t gate_pair,
                                                uint32_t up_pair, float weight, float &sum) {
  const float2 x = floats_of(da_pair), g = floats_of(gate_pair), u = floats_of(up_pair);
  const float da[2] = {x.x, x.y}, gates[2] = {g.x, g.y}, ups[2] = {u.x, u.y};
  float a[2], dg[2], du[2];
#pragma unroll
  for (int c = 0; c < 2; c++) {
    const bool over = LEVEL > PLAIN && gates[c] > p.act.gate_max;
    const float gate = over ? p.act.gate_max : gates[c];
    const float f = moe_act_f(KIND, gate, p.act.alpha, p.act.beta),
                inner = moe_act_df(KIND, gate, p.act.alpha, p.act.beta);
    const float v = up_value<LEVEL>(p, ups[c]), scaled = weight * da[c];
    a[c] = f * v;
    sum += da[c] * a[c];
    a[c] *= weight;
    dg[c] = scaled * (over ? 0.0f : inner) * v;
    du[c] = scaled * f * up_slope<LEVEL>(p, ups[c]);
  }
  return {pair_of(a[0], a[1]), pair_of(dg[0], dg[1]), pair_of(du[0], du[1])};
}

/* h becomes dh; a: weight * a; sum: the rows' sums of da * a grow. */
template <int KIND, int LEVEL>
__device__ __forceinline__ void dact_rows(const gemm_params &p, h_pieces &h, const uint4 (&da)[ACT_ROWS],
                                          const float (&weight)[ACT_ROWS], uint4 (&a)[ACT_ROWS],
                                          float (&sum)[ACT_ROWS]) {
#pragma unroll
  for (int j = 0; j < ACT_ROWS; j++) {
    pairs own = sorted(p, h.gate[j], h.up[j]);
    const uint32_t da_pair[4] = {da[j].x, da[j].y, da[j].z, da[j].w};
    uint32_t pair[4];
#pragma unroll
    for (int q = 0; q < 4; q++) {
      const pair_grads d = dact_pair<KIND, LEVEL>(p, da_pair[q], own.gate[q], own.up[q], weight[j], sum[j]);
      own.gate[q] = d.gate;
      own.up[q] = d.up;
      pair[q] = d.a;
    }
    a[j] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
    unsorted(p, own, h.gate[j], h.up[j]);
  }
}

/* One expansion a row of moeblas_act.def and level. */
__device__ __forceinline__ void act_switch(const gemm_params &p, const h_pieces &h, uint4 (&a)[ACT_ROWS]) {
  switch ((int)p.act.kind * 3 + p.act_level) {
#define MOE_ACT(ENUM, value, fn, plain, gated, a0, b0, f, df)         \
  case value * 3 + PLAIN: act_rows<value, PLAIN>(p, h, a); break;     \
  case value * 3 + CLAMPED: act_rows<value, CLAMPED>(p, h, a); break; \
  case value * 3 + SOFT:                                              \
    act_rows<value, SOFT>(p, h, a);                                   \
    break;
#include "moeblas_act.def"
#undef MOE_ACT
  }
}
__device__ __forceinline__ void dact_switch(const gemm_params &p, h_pieces &h, const uint4 (&da)[ACT_ROWS],
                                            const float (&weight)[ACT_ROWS], uint4 (&a)[ACT_ROWS],
                                            float (&sum)[ACT_ROWS]) {
  switch ((int)p.act.kind * 3 + p.act_level) {
#define MOE_ACT(ENUM, value, fn, plain, gated, a0, b0, f, df)                           \
  case value * 3 + PLAIN: dact_rows<value, PLAIN>(p, h, da, weight, a, sum); break;     \
  case value * 3 + CLAMPED: dact_rows<value, CLAMPED>(p, h, da, weight, a, sum); break; \
  case value * 3 + SOFT:                                                                \
    dact_rows<value, SOFT>(p, h, da, weight, a, sum);                                   \
    break;
#include "moeblas_act.def"
#undef MOE_ACT
  }
}
