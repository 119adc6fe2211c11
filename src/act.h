/* SPDX-License-Identifier: Apache-2.0
 *
 * Activations: act_<fn>(x, alpha, beta) and its derivative dact_<fn>, one pair a row of moeblas_act.def, and the gated
 * form built from them. Compiled alike by gcc and nvcc; no table, no branch on data, so that loops over them vectorise. */
#pragma once

#include <math.h>

#include "format.h"

/* e^x, error below 2 ulp, 0 below -87.3, capped at e^88.7. x = n log 2 + r with |r| <= log(2)/2, and the degree-6
 * Taylor polynomial of e^r, whose remainder r^7/5040 is below 2^-23.6 of the result and is halved by its last term. */
MOE_FN float moe_exp(float x) {
  const float bounded = x < -87.3f ? -87.3f : x > 88.7f ? 88.7f : x; /* NaN passes through */
  const float shifted = bounded * 1.44269504f + 12582912.0f;         /* 1.5 * 2^23: rounds to an integer */
  const float n = shifted - 12582912.0f;
  const float r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const uint32_t exponent = (moe_bits_of(shifted) - 0x4b400000u) << 23;
  const float result = moe_of_bits(moe_bits_of(p) + exponent);
  return x < -87.3f ? 0.0f : x != x ? x : result;
}

MOE_FN float moe_sigmoid(float x) { return 1.0f / (1.0f + moe_exp(-x)); }

/* tanh x, relative error below 4 ulp: the odd Taylor series below 0.3, the exponential form above, where nothing cancels. */
MOE_FN float moe_tanh(float x) {
  const float a = x < 0 ? -x : x;
  const float s = x * x;
  float p = 21844.0f / 6081075;
  p = p * -s + 1382.0f / 155925;
  p = p * -s + 62.0f / 2835;
  p = p * -s + 17.0f / 315;
  p = p * -s + 2.0f / 15;
  p = p * -s + 1.0f / 3;
  const float small = x - x * s * p;
  const float large = 1.0f - 2.0f / (moe_exp(2.0f * a) + 1.0f);
  return a < 0.3f ? small : x < 0 ? -large : large;
}

/* What activations are built from. On the GPU by its own exponential and reciprocal, good to 2^-21 for |x| < 10: more than
 * the 16-bit formats hold, at a fifth of the instructions. Router scores use the functions above on both sides. */
#ifdef __CUDA_ARCH__
MOE_FN float act_reciprocal(float x) { /* of __fdividef(1, x) the compiler makes one instruction more */
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
MOE_FN float act_sigmoid(float x) { return act_reciprocal(1.0f + __expf(-x)); }
MOE_FN float act_tanh(float x) {
  const float s = x * x, a = x < 0 ? -x : x;
  const float small = x - x * s * (1.0f / 3 - s * (2.0f / 15 - s * (17.0f / 315 - s * (62.0f / 2835))));
  const float large = 1.0f - 2.0f * act_reciprocal(__expf(2.0f * a) + 1.0f);
  return a < 0.3f ? small : x < 0 ? -large : large;
}
#else
MOE_FN float act_sigmoid(float x) { return moe_sigmoid(x); }
MOE_FN float act_tanh(float x) { return moe_tanh(x); }
#endif

MOE_FN float act_silu(float x, float alpha, float beta) {
  (void)beta;
  return x * act_sigmoid(alpha * x);
}
MOE_FN float dact_silu(float x, float alpha, float beta) {
  (void)beta;
  const float s = act_sigmoid(alpha * x);
  return s * (1.0f + alpha * x * (1.0f - s));
}

MOE_FN float act_gelu(float x, float alpha, float beta) {
  (void)alpha, (void)beta;
  return 0.5f * x * erfcf(-0.70710678f * x); /* erfc keeps its relative accuracy far out, 1 + erf does not */
}
MOE_FN float dact_gelu(float x, float alpha, float beta) {
  (void)alpha, (void)beta;
  return 0.5f * erfcf(-0.70710678f * x) + x * 0.39894228f * moe_exp(-0.5f * x * x);
}

/* 0.5 (1 + tanh u) is sigmoid(2u): no cancellation for negative x. */
MOE_FN float act_gelu_tanh(float x, float alpha, float beta) {
  (void)alpha, (void)beta;
  return x * act_sigmoid(1.59576912f * (x + 0.044715f * x * x * x));
}
MOE_FN float dact_gelu_tanh(float x, float alpha, float beta) {
  (void)alpha, (void)beta;
  const float s = act_sigmoid(1.59576912f * (x + 0.044715f * x * x * x));
  return s + x * s * (1.0f - s) * 1.59576912f * (1.0f + 0.134145f * x * x);
}

MOE_FN float act_quick_gelu(float x, float alpha, float beta) { return act_silu(x, alpha, beta); }
MOE_FN float dact_quick_gelu(float x, float alpha, float beta) { return dact_silu(x, alpha, beta); }

/* x < 0 ? 0 : x rather than fmaxf, so that NaN stays NaN. */
MOE_FN float act_relu(float x, float alpha, float beta) {
  (void)alpha, (void)beta;
  return x < 0 ? 0.0f : x;
}
MOE_FN float dact_relu(float x, float alpha, float beta) {
  (void)alpha, (void)beta;
  return x <= 0 ? 0.0f : x > 0 ? 1.0f : x;
}

MOE_FN float act_relu2(float x, float alpha, float beta) {
  (void)alpha, (void)beta;
  return x < 0 ? 0.0f : x * x;
}
MOE_FN float dact_relu2(float x, float alpha, float beta) {
  (void)alpha, (void)beta;
  return x < 0 ? 0.0f : 2.0f * x;
}

MOE_FN float act_relu2_tanh(float x, float alpha, float beta) {
  (void)alpha;
  const float t = beta * act_tanh(x / beta);
  return x < 0 ? 0.0f : t * t;
}
MOE_FN float dact_relu2_tanh(float x, float alpha, float beta) {
  (void)alpha;
  const float t = act_tanh(x / beta);
  return x < 0 ? 0.0f : 2.0f * beta * t * (1.0f - t * t);
}

MOE_FN float act_situ(float x, float alpha, float beta) {
  (void)alpha;
  return beta * act_tanh(x / beta) * act_sigmoid(x);
}
MOE_FN float dact_situ(float x, float alpha, float beta) {
  (void)alpha;
  const float t = act_tanh(x / beta);
  const float s = act_sigmoid(x);
  return (1.0f - t * t) * s + beta * t * s * (1.0f - s);
}

MOE_FN float moe_act_f(int kind, float x, float alpha, float beta) {
  switch (kind) {
#define MOE_ACT(ENUM, value, fn, plain, gated, a0, b0, f, df) \
  case value:                                                 \
    return act_##fn(x, alpha, beta);
#include "moeblas_act.def"
#undef MOE_ACT
  default: return 0;
  }
}

MOE_FN float moe_act_df(int kind, float x, float alpha, float beta) {
  switch (kind) {
#define MOE_ACT(ENUM, value, fn, plain, gated, a0, b0, f, df) \
  case value:                                                 \
    return dact_##fn(x, alpha, beta);
#include "moeblas_act.def"
#undef MOE_ACT
  default: return 0;
  }
}

/* The up half v(u') + offset, and its derivative with the inclusive mask. */
MOE_FN float moe_act_up(const moe_act_desc *act, float u) {
  const float c = u < act->up_min ? act->up_min : u > act->up_max ? act->up_max : u;
  return (act->up_beta > 0 ? act->up_beta * act_tanh(c / act->up_beta) : c) + act->up_offset;
}
MOE_FN float moe_act_dup(const moe_act_desc *act, float u) {
  if (u < act->up_min || u > act->up_max) return 0;
  if (!(act->up_beta > 0)) return 1;
  const float t = act_tanh(u / act->up_beta);
  return 1.0f - t * t;
}

MOE_FN float moe_act_gate(const moe_act_desc *act, float g) {
  return moe_act_f(act->kind, g > act->gate_max ? act->gate_max : g, act->alpha, act->beta);
}
MOE_FN float moe_act_dgate(const moe_act_desc *act, float g) {
  return g > act->gate_max ? 0 : moe_act_df(act->kind, g, act->alpha, act->beta);
}

/* Column of gate element f, and the distance from there to its up element, in a row of h [2F]. */
MOE_FN int64_t moe_gate_column(const moe_act_desc *act, int64_t inter, int64_t f) {
  switch ((int)act->layout) {
  case MOE_LAYOUT_CONCAT_UP_FIRST: return inter + f;
  case MOE_LAYOUT_INTERLEAVED: return f / act->interleave * act->interleave + f;
  default: return f;
  }
}
MOE_FN int64_t moe_up_distance(const moe_act_desc *act, int64_t inter) {
  switch ((int)act->layout) {
  case MOE_LAYOUT_CONCAT_UP_FIRST: return -inter;
  case MOE_LAYOUT_INTERLEAVED: return act->interleave;
  default: return inter;
  }
}
