/* SPDX-License-Identifier: Apache-2.0
 *
 * The choice of k experts of one token by one warp in registers: E <= 512 without groups, k <= 32.
 *
 * Lane l has experts l, l + 32, ... A lane sorts its own keys once, best first, by neighbours changing places, which keeps
 * equal keys in the order of ids; then the warp takes k times the best of what the lanes have in front:
 *
 *     lane 0   9 7 2 1      largest key of the front (one reduction), lowest id that has it (another); that lane's line
 *     lane 1   8 3 3 0      moves up; lane j remembers the j-th
 *
 * Lane j then has slot j. The logits of a warp's next token are under way meanwhile. A kernel knows PER = experts of a lane and
 * its score when it is compiled, and loops over slots are not unrolled: what it costs is, at first, to fetch its instructions.
 * Invariant    ids are those of the general kernel; sums over experts and slots are made by a tree in double, so that weights
 *              may differ from it where a sum rounds differently to fp32, in one of 10^8. */
#pragma once

#include <cuda_fp16.h>

#include "score.cuh"
#include "vector.cuh"

struct route_params {
  moe_route_args args;
  moe_router_desc router;
};

/* ---- logits and scores -------------------------------------------------------------------------------------------- */

__device__ __forceinline__ uint32_t bits_at(const moe_route_args &a, int64_t i) {
  return a.logits_dtype == MOE_FP32 ? static_cast<const uint32_t *>(a.logits)[i]
                                    : static_cast<const uint16_t *>(a.logits)[i];
}

/* The bits of this lane's logits of token t; 0 past the last expert or token. */
template <int PER> __device__ __forceinline__ void load_bits(uint32_t *bits, const moe_route_args &a, int64_t t) {
  const int left = t < a.tokens ? (int)a.experts - lane_id() : 0;
  const int64_t first = t * a.experts + lane_id();
#pragma unroll
  for (int i = 0; i < PER; i++) bits[i] = 32 * i < left ? bits_at(a, first + 32 * i) : 0;
}

__device__ __forceinline__ float logit_of_bits(const moe_route_args &a, uint32_t bits, int e) {
  float value = moe_of_bits(a.logits_dtype == MOE_FP32 ? bits : bits << 16);
  if (a.logits_dtype == MOE_FP16) value = __half2float(__ushort_as_half((unsigned short)bits));
  return bounded_logit(value, a.router_bias, e);
}

/* What scores need to know of all logits of a token. */
struct token_sum {
  float top, divisor; /* of MOE_SCORE_SOFTMAX */
};

template <moe_score SCORE> __device__ __forceinline__ float score_of(const token_sum &all, float z) {
  if (SCORE == MOE_SCORE_SIGMOID) return sigmoid_score(z);
  if (SCORE == MOE_SCORE_SQRT_SOFTPLUS) return sqrt_softplus_score(z);
  if (SCORE == MOE_SCORE_TOPK_SOFTMAX) return z;
  return all.top == -INFINITY ? 0.0f : moe_exp(z - all.top) / all.divisor;
}

template <int PER, moe_score SCORE>
__device__ __forceinline__ token_sum sum_of(const float *z, int experts) {
  if (SCORE != MOE_SCORE_SOFTMAX) return {0, 1};
  float top = -INFINITY;
#pragma unroll
  for (int i = 0; i < PER; i++) top = fmaxf(top, z[i]);
  top = lanes_max(top);
  double sum = 0;
#pragma unroll
  for (int i = 0; i < PER; i++)
    if (lane_id() + 32 * i < experts) sum += moe_exp(z[i] - top);
  return {top, (float)lanes_sum(sum)};
}

/* ---- the best keys ------------------------------------------------------------------------------------------------ */

/* Larger for better keys; 0 stands for no expert. */
__device__ __forceinline__ uint32_t ordered_key(float key) {
  const uint32_t bits = moe_bits_of(key + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

template <int PER> __device__ __forceinline__ void sort_line(uint32_t *key, int *id) {
#pragma unroll
  for (int pass = 0; pass < PER; pass++)
#pragma unroll
    for (int i = pass % 2; i + 1 < PER; i += 2) {
      const bool swap = key[i + 1] > key[i];
      const uint32_t low_key = swap ? key[i] : key[i + 1];
      const int low_id = swap ? id[i] : id[i + 1];
      key[i] = swap ? key[i + 1] : key[i], id[i] = swap ? id[i + 1] : id[i];
      key[i + 1] = low_key, id[i + 1] = low_id;
    }
}

/* The id of slot j on lane j. */
template <int PER> __device__ __forceinline__ int take_best(uint32_t *key, int *id, int topk) {
  int own = -1;
#pragma unroll 1
  for (int j = 0; j < topk; j++) {
    const uint32_t top = __reduce_max_sync(WARP, key[0]);
    const int best = (int)__reduce_min_sync(WARP, key[0] == top ? (uint32_t)id[0] : 0x7fffffffu);
    if (lane_id() == j) own = best;
    if (id[0] != best) continue;
#pragma unroll
    for (int i = 0; i + 1 < PER; i++) key[i] = key[i + 1], id[i] = id[i + 1];
    key[PER - 1] = 0;
  }
  return own;
}

/* ---- a token ------------------------------------------------------------------------------------------------------ */

/* The weight of the slot of this lane from the logit of its expert; lanes without a slot have `inside` false. */
template <moe_score SCORE>
__device__ __forceinline__ float slot_weight(const moe_router_desc &router, const token_sum &all, float z,
                                             bool inside) {
  float slot = inside ? score_of<SCORE>(all, z) : 0.0f;
  if (SCORE == MOE_SCORE_TOPK_SOFTMAX) {
    const float top = lanes_max(inside ? z : -INFINITY);
    const float e = inside && top != -INFINITY ? moe_exp(z - top) : 0.0f;
    const float divisor = (float)lanes_sum(e);
    slot = e > 0 ? e / divisor : 0.0f;
  }
  const double sum = router.renormalize ? lanes_sum(slot) + router.renorm_epsilon : 1.0;
  return (float)(slot * (router.scale / sum));
}

/* Keys rank by the logit where the score rises with it. Experts that are none, and lines past E, have key 0. */
template <int PER, moe_score SCORE>
__device__ __forceinline__ void make_line(uint32_t *key, int *id, const moe_route_args &a, const float *z,
                                          const token_sum &all) {
  const float *const bias = a.correction_bias;
  const bool by_logit =
      SCORE == MOE_SCORE_TOPK_SOFTMAX || (SCORE == MOE_SCORE_SOFTMAX && bias == nullptr);
#pragma unroll
  for (int i = 0; i < PER; i++) key[i] = moe_bits_of(z[i]);
#pragma unroll
  for (int i = 0; !by_logit && i < PER; i++) key[i] = moe_bits_of(score_of<SCORE>(all, z[i]));
#pragma unroll
  for (int i = 0; i < PER; i++) {
    const int e = lane_id() + 32 * i;
    const bool exists = e < (int)a.experts;
    float value = moe_of_bits(key[i]);
    if (bias != nullptr && exists) value += bias[e];
    id[i] = e;
    key[i] = exists ? ordered_key(value != value || z[i] == -INFINITY ? -INFINITY : value) : 0;
  }
}

template <int PER, moe_score SCORE>
__device__ __forceinline__ void route_small_token(const route_params &p, int64_t t, const uint32_t *bits,
                                                  int *counts) {
  const moe_route_args &a = p.args;
  const int experts = (int)a.experts, topk = (int)a.topk, lane = lane_id();
  float z[PER];
  uint32_t key[PER];
  int id[PER];
#pragma unroll
  for (int i = 0; i < PER; i++) {
    const int e = lane + 32 * i;
    z[i] = e < experts ? logit_of_bits(a, bits[i], e) : -INFINITY;
  }
  const token_sum all = sum_of<PER, SCORE>(z, experts);
  make_line<PER, SCORE>(key, id, a, z, all);
  sort_line<PER>(key, id);
  const int own = take_best<PER>(key, id, topk);
  const bool inside = lane < topk;
  const float own_z = inside ? logit_of_bits(a, bits_at(a, t * a.experts + own), own) : 0;
  const float weight = slot_weight<SCORE>(p.router, all, own_z, inside);
  if (!inside) return;
  a.ids[t * topk + lane] = own;
  a.weights[t * topk + lane] = weight;
  if (a.counts != nullptr) atomicAdd(&counts[own], 1);
}

/* Of a block, so that the logits of two tokens fit into registers; two blocks never fit into a multiprocessor. */
static __host__ __device__ constexpr int route_small_warps(int per) { return per < 16 ? 32 : 20; }

template <int PER, moe_score SCORE>
static __global__ void __launch_bounds__(route_small_warps(PER) * 32, 1)
    route_small_kernel(const __grid_constant__ route_params p) {
  __shared__ int counts[32 * PER];
  const moe_route_args &a = p.args;
  const int64_t first = grid_thread() / 32, step = grid_threads() / 32;
  uint32_t bits[PER], next[PER];
  load_bits<PER>(bits, a, first);
  for (int e = threadIdx.x; e < 32 * PER; e += blockDim.x) counts[e] = 0;
  __syncthreads();
#pragma unroll 1
  for (int64_t t = first; t < a.tokens; t += step) {
    load_bits<PER>(next, a, t + step);
    if (!is_masked(a.padding_mask, t))
      route_small_token<PER, SCORE>(p, t, bits, counts);
    else if (lane_id() < (int)a.topk)
      a.ids[t * a.topk + lane_id()] = -1, a.weights[t * a.topk + lane_id()] = 0;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < PER; i++) bits[i] = next[i];
  }
  __syncthreads();
#pragma unroll 1
  for (int e = threadIdx.x; a.counts != nullptr && e < (int)a.experts; e += blockDim.x)
    if (counts[e] > 0) atomicAdd(&a.counts[e], counts[e]);
}

/* ---- host --------------------------------------------------------------------------------------------------------- */

/* The kernels of a score, by the least of 32, 64, 128, 256, 512 that the experts fit into, as TYPE. */
#define ROUTE_SMALL(TYPE, SCORE)                                                                         \
  (TYPE)route_small_kernel<1, SCORE>, (TYPE)route_small_kernel<2, SCORE>,                                \
      (TYPE)route_small_kernel<4, SCORE>, (TYPE)route_small_kernel<8, SCORE>, \
      (TYPE)route_small_kernel<16, SCORE>
