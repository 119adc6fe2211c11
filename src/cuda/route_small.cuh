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
 * Lane j then has slot j. About 350 instructions a token at E = 128, k = 8, bound by their issue.
 * Invariant    ids are those of the general kernel; sums over experts and slots are made by a tree in double, so that weights
 *              may differ from it where a sum rounds differently to fp32, in one of 10^8. */
#pragma once

#include "score.cuh"

/* What scores need to know of all logits of a token. */
struct token_sum {
  float top, divisor; /* of MOE_SCORE_SOFTMAX */
};

__device__ __forceinline__ float score_of(const moe_router_desc &router, const token_sum &all, float z) {
  if (router.score == MOE_SCORE_SIGMOID) return sigmoid_score(z);
  if (router.score == MOE_SCORE_SQRT_SOFTPLUS) return sqrt_softplus_score(z);
  if (router.score == MOE_SCORE_TOPK_SOFTMAX) return z;
  return all.top == -INFINITY ? 0.0f : moe_exp(z - all.top) / all.divisor;
}

template <int PER>
__device__ __forceinline__ token_sum sum_of(const moe_router_desc &router, const float *z, int experts) {
  if (router.score != MOE_SCORE_SOFTMAX) return {0, 1};
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

/* The weight of the slot of this lane from the logit of its expert; lanes without a slot have `inside` false. */
__device__ __forceinline__ float slot_weight(const moe_router_desc &router, const token_sum &all, float z,
                                             bool inside) {
  float slot = inside ? score_of(router, all, z) : 0.0f;
  if (router.score == MOE_SCORE_TOPK_SOFTMAX) {
    const float top = lanes_max(inside ? z : -INFINITY);
    const float e = inside && top != -INFINITY ? moe_exp(z - top) : 0.0f;
    const float divisor = (float)lanes_sum(e);
    slot = e > 0 ? e / divisor : 0.0f;
  }
  const double sum = router.renormalize ? lanes_sum(slot) + router.renorm_epsilon : 1.0;
  return (float)(slot * (router.scale / sum));
}
