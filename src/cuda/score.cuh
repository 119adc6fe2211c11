/* SPDX-License-Identifier: Apache-2.0
 *
 * Router logits and scores of one token by one warp; the twin of src/cpu/score.h, shared by route.cu and router_loss.cu; and
 * what the kernels that have tokens in registers (route_small.cuh, route_small_backward.cuh) share with them.
 *
 * The arrays of a token lie in shared memory, lane l of the warp has elements l, l + 32, ... Sums are made in the CPU's eight
 * running sums and its tree, by lanes 0 .. 7, so that scores have the same bits there and here (but for log1pf).
 * Invariants   z is never NaN and never +inf; a logit of -inf scores exactly 0 and has slope exactly 0. Every function is
 *              called by a whole warp, has its inputs behind a __syncwarp and leaves its outputs behind one. */
#pragma once

#include <float.h>

#include "../act.h"

#define WARP         0xffffffffu
#define SUM_LANES    8
#define SHARE_FLOOR  1e-20 /* keeps a sum of scores that are all 0 from dividing */
#define SOFTPLUS_LOW -17.0f

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }

/* Of LANES neighbouring lanes that begin at a multiple of LANES, by a tree; each gets the result. */
template <int LANES = 32> __device__ __forceinline__ float lanes_max(float v) {
#pragma unroll
  for (int d = LANES / 2; d > 0; d /= 2) v = fmaxf(v, __shfl_xor_sync(WARP, v, d));
  return v;
}

template <int LANES = 32> __device__ __forceinline__ double lanes_sum(double v) {
#pragma unroll
  for (int d = LANES / 2; d > 0; d /= 2) v += __shfl_xor_sync(WARP, v, d);
  return v;
}

/* Sum of a[i] b[i]; of a[i] if b is NULL. */
__device__ __forceinline__ double warp_dot(const float *a, const float *b, int n) {
  double sum = 0;
  if (lane_id() < SUM_LANES)
    for (int i = lane_id(); i < n; i += SUM_LANES)
      sum += b != nullptr ? (double)a[i] * (double)b[i] : (double)a[i];
#pragma unroll
  for (int half = SUM_LANES / 2; half > 0; half /= 2) sum += __shfl_down_sync(WARP, sum, half);
  return __shfl_sync(WARP, sum, 0);
}

__device__ __forceinline__ double warp_sum(const float *a, int n) { return warp_dot(a, nullptr, n); }

__device__ __forceinline__ float warp_max(const float *a, int n) {
  float top = -INFINITY;
  for (int i = lane_id(); i < n; i += 32) top = a[i] > top ? a[i] : top;
  return lanes_max(top);
}

/* A logit plus its bias, NaN as -inf, +inf as the largest finite number. */
__device__ __forceinline__ float bounded_logit(float value, const float *bias, int e) {
  if (bias != nullptr) value += bias[e];
  const float bounded = value > FLT_MAX ? FLT_MAX : value;
  return bounded != bounded ? -INFINITY : bounded;
}

/* z = bounded logits of token t. */
__device__ __forceinline__ void warp_logits(float *z, const void *logits, moe_dtype dtype, const float *bias,
                                            int64_t t, int experts) {
  for (int e = lane_id(); e < experts; e += 32) {
    z[e] = bounded_logit(moe_load(logits, dtype, t * experts + e), bias, e);
  }
  __syncwarp();
}

/* s = softmax(z), all 0 if every z is -inf; returns log sum exp z. s may be z. */
__device__ __forceinline__ double warp_softmax(float *s, const float *z, int n) {
  const float top = warp_max(z, n);
  if (top == -INFINITY) {
    for (int i = lane_id(); i < n; i += 32) s[i] = 0;
    __syncwarp();
    return -INFINITY;
  }
  for (int i = lane_id(); i < n; i += 32) s[i] = moe_exp(z[i] - top);
  __syncwarp();
  const double sum = warp_sum(s, n);
  const float divisor = (float)sum;
  for (int i = lane_id(); i < n; i += 32) s[i] /= divisor;
  __syncwarp();
  return top + log(sum);
}

/* Scores that look at one logit at a time. */
__device__ __forceinline__ bool is_elementwise(moe_score score) {
  return score == MOE_SCORE_SIGMOID || score == MOE_SCORE_SQRT_SOFTPLUS;
}

__device__ __forceinline__ float sigmoid_score(float z) {
  const float e = moe_exp(z < 0 ? z : -z);
  return (z < 0 ? e : 1.0f) / (1.0f + e);
}

__device__ __forceinline__ float sqrt_softplus_score(float z) {
  if (z < SOFTPLUS_LOW) return moe_exp(0.5f * z);
  return sqrtf((z < 0 ? 0 : z) + log1pf(moe_exp(z < 0 ? z : -z)));
}

__device__ __forceinline__ float elementwise_score(moe_score score, float z) {
  return score == MOE_SCORE_SIGMOID ? sigmoid_score(z) : sqrt_softplus_score(z);
}

__device__ __forceinline__ void warp_elementwise(moe_score score, float *s, const float *z, int n) {
  for (int i = lane_id(); i < n; i += 32) s[i] = elementwise_score(score, z[i]);
  __syncwarp();
}

/* ds/dz of an elementwise score s(z). */
__device__ __forceinline__ float slope_of_score(moe_score score, float z, float s) {
  const float e = moe_exp(z < 0 ? z : -z);
  if (score == MOE_SCORE_SIGMOID) return e / ((1.0f + e) * (1.0f + e));
  return z < SOFTPLUS_LOW ? 0.5f * s : sigmoid_score(z) / (2.0f * s);
}

__device__ __forceinline__ bool is_masked(const uint8_t *padding_mask, int64_t t) {
  return padding_mask != nullptr && padding_mask[t] != 0;
}

/* score[j] of the expert of each slot, 0 where the id is no expert; returns their sum, in the order of the slots. */
__device__ __forceinline__ double warp_slot_scores(const moe_router_desc &router, const int *ids, int topk,
                                                   int experts, const float *z, const float *all,
                                                   float *score) {
  const bool over_slots = router.score == MOE_SCORE_TOPK_SOFTMAX;
  for (int j = lane_id(); j < topk; j += 32) {
    const bool valid = ids[j] >= 0 && ids[j] < experts;
    if (over_slots)
      score[j] = valid ? z[ids[j]] : -INFINITY;
    else
      score[j] = valid ? all[ids[j]] : 0;
  }
  __syncwarp();
  if (over_slots) warp_softmax(score, score, topk);
  double sum = 0;
  for (int j = 0; j < topk; j++) sum += score[j];
  return sum;
}

/* Host: how many warps of so many bytes of shared memory a block has: up to 16, as long as 160 KiB hold them. */
static inline int warps_of_block(size_t warp_bytes) {
  const size_t fit = 160 * 1024 / warp_bytes;
  return fit > 16 ? 16 : fit < 1 ? 1 : (int)fit;
}
