/* SPDX-License-Identifier: Apache-2.0
 *
 * The gradient of the logits of several tokens by one warp: E <= 512.
 *
 * LANES neighbouring lanes have a token, lane l of them its experts 16 l .. 16 l + 15 and its slots l, l + LANES, ...; so a
 * warp works on 32 / LANES tokens at once. A lane has two lines of shared memory, where the others of its token find its
 * experts:
 *
 *     value   the logits z; then, if scores or their losses are a softmax over all experts, e^(z - top)
 *     d       what the slots add to its scores, then the gradient, which the warp writes in the order of memory
 *
 * Lines are 20 words apart: eight lanes use all banks once in 16-byte accesses. Walks over a line are loops of four elements,
 * so that the code stays short: the kernel is bound by the issue of instructions.
 * Invariant    experts E and up, and all of a token that is masked or none, are logits of -inf. Slots add to d in their order,
 *              as ids may be equal. Sums are in double, over a lane's own and then by a tree; a difference d - mean is taken
 *              with the mean in two parts, which is as good as in double where most of it cancels. */
#pragma once

#include "score.cuh"
#include "vector.cuh"

struct route_backward_params {
  moe_route_backward_args args;
  moe_router_desc router;
};

/* Gradient of the balancing loss (0) or the z-loss (1). */
__device__ __forceinline__ double loss_gradient(const moe_route_backward_args &a, int which) {
  return (double)a.loss_scale * (a.dlosses != nullptr ? a.dlosses[which] : 1.0f);
}

/* ---- a lane's share of a token ------------------------------------------------------------------------------------ */

enum {
  LINE = 16,
  LINE_STRIDE = 20,
  LINES_WORDS = 32 * LINE_STRIDE
};

/* A warp's part of shared memory; lines are those of this lane, slots those of its token. */
struct gradient_memory {
  float *lines;     /* [2, 32, LINE_STRIDE] of the warp */
  float *value, *d; /* [LINE] */
  int *id;          /* [k]; -1: none */
  float *score;     /* [k] the logit, the score, at last what the slot adds to d */
  float *dweight;   /* [k] */
};

__host__ __device__ __forceinline__ int gradient_warp_words(int lanes, int topk) {
  return 2 * LINES_WORDS + ALIGN_UP(32 / lanes * topk * 3, 4);
}

template <int LANES> __device__ __forceinline__ gradient_memory gradient_memory_of(int topk) {
  extern __shared__ float4 gradient_shared[];
  float *const lines =
      reinterpret_cast<float *>(gradient_shared) + threadIdx.x / 32 * gradient_warp_words(LANES, topk);
  float *const value = lines + lane_id() * LINE_STRIDE, *const slots = lines + 2 * LINES_WORDS +
                                                                       lane_id() / LANES * topk * 3;
  return {lines, value, value + LINES_WORDS, reinterpret_cast<int *>(slots), slots + topk, slots + 2 * topk};
}

/* Where expert e of this lane's token is, from the first of the lines on. */
template <int LANES> __device__ __forceinline__ int place_of(int e) {
  return (lane_id() / LANES * LANES + e / LINE) * LINE_STRIDE + e % LINE;
}

template <int LANES> __device__ __forceinline__ int first_expert() { return lane_id() % LANES * LINE; }

/* What a lane knows of its token. */
struct token_gradient {
  bool over_slots, elementwise;
  float top, inverse; /* the softmax over all experts is e^(z - top) inverse, 0 where z is -inf */
  double sum;         /* of e^(z - top) */
  float z_slope;      /* the z-loss adds z_slope times that softmax to the gradient */
};

/* What e^(z - top) are divided by, of which either one is 1 or all are 0. */
__device__ __forceinline__ float divisor_of(double sum) { return fmaxf((float)sum, 1.0f); }

/* A number in double as the sum of two in float. */
struct split {
  float high, low;
};

__device__ __forceinline__ split split_of(double v) { return {(float)v, (float)(v - (float)v)}; }
__device__ __forceinline__ float minus(float a, split b) { return a - b.high - b.low; }

__device__ __forceinline__ void fetch_four(float *v, const float *at) {
  const float4 four = *reinterpret_cast<const float4 *>(at);
  v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
}

__device__ __forceinline__ void keep_four(float *at, const float *v) {
  *reinterpret_cast<float4 *>(at) = make_float4(v[0], v[1], v[2], v[3]);
}

/* ---- from memory and to it ---------------------------------------------------------------------------------------- */

/* value = the logits, d = 0; returns the largest of the lane's logits that is finite. */
template <int LANES>
__device__ __forceinline__ float load_lines(const moe_route_backward_args &a, int64_t t, bool live,
                                            const gradient_memory &m) {
  const int first = first_expert<LANES>(), count = live ? (int)a.experts - first : 0;
  const int64_t element = t * a.experts + first;
  const bool vector = aligned_rows(a.logits, a.logits_dtype, a.experts);
  const float zero[4] = {};
  float z[LINE], top = -FLT_MAX;
#pragma unroll
  for (int i = 0; i < LINE; i += EIGHT)
    load_eight(z + i, a.logits, a.logits_dtype, element + i, count - i, vector);
#pragma unroll
  for (int i = 0; a.router_bias != nullptr && i < LINE; i++)
    z[i] += i < count ? a.router_bias[first + i] : 0.0f;
#pragma unroll
  for (int i = 0; i < LINE; i++) z[i] = bounded_logit(z[i], nullptr, 0);
#pragma unroll
  for (int i = 0; count < LINE && i < LINE; i++) z[i] = i < count ? z[i] : -INFINITY;
#pragma unroll
  for (int i = 0; i < LINE; i++) top = fmaxf(top, z[i]);
#pragma unroll
  for (int i = 0; i < LINE; i += 4) keep_four(m.value + i, z + i), keep_four(m.d + i, zero);
  __syncwarp();
  return top;
}

/* The gradients of the warp's tokens, of which t is the first: neighbouring lanes write neighbouring elements. */
template <int LANES>
__device__ __forceinline__ void write_lines(const moe_route_backward_args &a, int64_t t,
                                            const gradient_memory &m) {
  const bool vector = aligned_rows(a.dlogits, a.dlogits_dtype, a.experts);
#pragma unroll 1
  for (int q = lane_id(); q < 32 * LINE / EIGHT; q += 32) {
    const int line = q / 2, e = line % LANES * LINE + q % 2 * EIGHT;
    const int64_t token = t + line / LANES, count = token < a.tokens ? a.experts - e : 0;
    const float *const from = m.lines + LINES_WORDS + line * LINE_STRIDE + q % 2 * EIGHT;
    float v[EIGHT];
    fetch_four(v, from), fetch_four(v + 4, from + 4);
    store_eight(a.dlogits, a.dlogits_dtype, token * a.experts + e, v, count, vector);
  }
  __syncwarp();
}

/* ---- slots -------------------------------------------------------------------------------------------------------- */

/* Reads the slots of the token, and the logits of their experts. */
template <int LANES>
__device__ __forceinline__ void load_slots(const moe_route_backward_args &a, int64_t t, bool live,
                                           const gradient_memory &m) {
  const int topk = (int)a.topk;
#pragma unroll 1
  for (int j = lane_id() % LANES; j < topk; j += LANES) {
    const int64_t s = t * topk + j;
    const int id = live ? a.ids[s] : -1;
    const bool valid = id >= 0 && id < (int)a.experts;
    const bool kept = valid && (a.slot_row == nullptr || a.slot_row[s] >= 0);
    m.id[j] = valid ? id : -1;
    m.score[j] = valid ? m.lines[place_of<LANES>(id)] : -INFINITY;
    m.dweight[j] = kept ? a.dweights[s] : 0.0f;
  }
  __syncwarp();
}

template <int LANES> __device__ __forceinline__ double sum_slots(const float *v, int topk) {
  double sum = 0;
#pragma unroll 1
  for (int j = lane_id() % LANES; j < topk; j += LANES) sum += v[j];
  return lanes_sum<LANES>(sum);
}

/* Logits become their softmax. */
template <int LANES> __device__ __forceinline__ void softmax_slots(float *v, int topk) {
  const int first = lane_id() % LANES;
  float top = -FLT_MAX;
#pragma unroll 1
  for (int j = first; j < topk; j += LANES) top = fmaxf(top, v[j]);
  top = lanes_max<LANES>(top);
#pragma unroll 1
  for (int j = first; j < topk; j += LANES) v[j] = moe_exp(v[j] - top);
  const float divisor = divisor_of(sum_slots<LANES>(v, topk));
#pragma unroll 1
  for (int j = first; j < topk; j += LANES) v[j] /= divisor;
}

/* From the logits of the slots to their scores; a logit of -inf scores 0. */
template <int LANES>
__device__ __forceinline__ void score_slots(moe_score score, const token_gradient &g, int topk, float *v) {
  if (g.over_slots) return softmax_slots<LANES>(v, topk);
#pragma unroll 1
  for (int j = lane_id() % LANES; j < topk; j += LANES)
    v[j] = g.elementwise ? elementwise_score(score, v[j]) : moe_exp(v[j] - g.top) * g.inverse;
}

/* score[j] = what slot j adds to d, through scale, renormalisation and the softmax over slots. */
template <int LANES>
__device__ __forceinline__ void slot_gradients(const moe_router_desc &router, bool over_slots, int topk,
                                               const gradient_memory &m) {
  const int first = lane_id() % LANES;
  const double scale = router.scale, sum = sum_slots<LANES>(m.score, topk);
  const double inverse = router.renormalize ? 1 / (sum + router.renorm_epsilon) : 1;
  double dot = 0;
#pragma unroll 1
  for (int j = first; j < topk; j += LANES) dot += m.dweight[j] * scale * m.score[j];
  dot = lanes_sum<LANES>(dot);
  const double mean = router.renormalize ? dot * inverse : 0;
  const double slot_mean = over_slots ? (dot - mean * sum) * inverse : 0;
#pragma unroll 1
  for (int j = first; j < topk; j += LANES) {
    const double dslot = (m.dweight[j] * scale - mean) * inverse;
    m.score[j] = (float)(over_slots ? m.score[j] * (dslot - slot_mean) : dslot);
  }
}

/* d += what the slots add. */
template <int LANES> __device__ __forceinline__ void add_slots(int topk, const gradient_memory &m) {
  float *const d = m.lines + LINES_WORDS;
  for (int j = 0; j < topk; j++) {
    if (j % LANES == lane_id() % LANES && m.id[j] >= 0) d[place_of<LANES>(m.id[j])] += m.score[j];
    __syncwarp();
  }
}

/* ---- experts ------------------------------------------------------------------------------------------------------ */

/* The softmax over all experts, whose e^(z - top) take the place of the logits if `keep`; `top` is that of the lane. */
template <int LANES>
__device__ __forceinline__ void sum_experts(token_gradient *g, float top, bool keep, float *value) {
  g->top = lanes_max<LANES>(top);
  double sum = 0;
#pragma unroll 1
  for (int i = 0; i < LINE; i += 4) {
    float e[4];
    fetch_four(e, value + i);
#pragma unroll
    for (int c = 0; c < 4; c++) e[c] = moe_exp(e[c] - g->top);
    if (keep) keep_four(value + i, e);
    sum += ((double)e[0] + (double)e[1]) + ((double)e[2] + (double)e[3]);
  }
  g->sum = lanes_sum<LANES>(sum);
  g->inverse = 1 / divisor_of(g->sum);
}

/* d += the gradient of the scores from the balancing loss; slope[e] is its derivative by the normalised score. */
template <int LANES>
__device__ __forceinline__ void add_balance(const route_backward_params &p, const float *slope,
                                            bool elementwise, const gradient_memory &m) {
  const int first = first_expert<LANES>(), count = min((int)p.args.experts - first, (int)LINE);
  double sum = 0, dot = 0, divisor = 1;
  split mean = {};
  if (elementwise) {
#pragma unroll 1
    for (int i = 0; i < count; i++) {
      const float score = elementwise_score(p.router.score, m.value[i]);
      sum += score, dot += (double)score * slope[first + i];
    }
    divisor = lanes_sum<LANES>(sum) + SHARE_FLOOR;
    mean = split_of(lanes_sum<LANES>(dot) / divisor);
  }
  const float scale = (float)(loss_gradient(p.args, 0) / divisor);
#pragma unroll 4
  for (int i = 0; i < count; i++) m.d[i] += scale * minus(slope[first + i], mean);
}

/* d = the gradient of the logits, through the softmax that `value` times `inverse` is, and of the z-loss. */
template <int LANES>
__device__ __forceinline__ void finish_softmax(const token_gradient &g, const gradient_memory &m) {
  double dot = 0;
#pragma unroll 1
  for (int i = 0; i < LINE; i += 4) {
    float e[4], d[4];
    fetch_four(e, m.value + i), fetch_four(d, m.d + i);
    dot += ((double)e[0] * d[0] + (double)e[1] * d[1]) + ((double)e[2] * d[2] + (double)e[3] * d[3]);
  }
  const split mean = split_of(lanes_sum<LANES>(dot) * g.inverse);
#pragma unroll 1
  for (int i = 0; i < LINE; i += 4) {
    float e[4], d[4];
    fetch_four(e, m.value + i), fetch_four(d, m.d + i);
#pragma unroll
    for (int c = 0; c < 4; c++) d[c] = e[c] == 0 ? 0.0f : e[c] * g.inverse * (minus(d[c], mean) + g.z_slope);
    keep_four(m.d + i, d);
  }
}

/* The same through scores that look at one logit at a time. */
__device__ __forceinline__ void finish_elementwise(moe_score score, const token_gradient &g,
                                                   const gradient_memory &m) {
#pragma unroll 1
  for (int i = 0; i < LINE; i++) {
    const float z = m.value[i];
    const float s =
        score == MOE_SCORE_SIGMOID ? 0.0f : elementwise_score(score, z); /* its slope needs none */
    const float share = g.z_slope != 0 ? moe_exp(z - g.top) * g.inverse : 0.0f;
    m.d[i] = z == -INFINITY ? 0.0f : m.d[i] * slope_of_score(score, z, s) + g.z_slope * share;
  }
}

/* ---- a token ------------------------------------------------------------------------------------------------------ */

/* The slopes of the token's sequence, or NULL; any for a token that is not there. */
__device__ __forceinline__ const float *slopes_of(const route_backward_params &p, int64_t t) {
  if (p.args.slopes == nullptr || p.router.balance != MOE_BALANCE_SEQUENCE) return p.args.slopes;
  return p.args.slopes + min(t, p.args.tokens - 1) / p.router.sequence_tokens * (p.args.experts + 1);
}

/* Leaves the gradient in d. */
template <int LANES>
__device__ __forceinline__ void token_gradients(const route_backward_params &p, int64_t t,
                                                const gradient_memory &m) {
  const moe_route_backward_args &a = p.args;
  const int topk = (int)a.topk;
  const float *const slopes = slopes_of(p, t);
  const bool live = t < a.tokens && !is_masked(a.padding_mask, t), slots = a.dweights != nullptr;
  token_gradient g = {p.router.score == MOE_SCORE_TOPK_SOFTMAX, is_elementwise(p.router.score)};
  const bool z_loss = slopes != nullptr && slopes[a.experts] != 0; /* of this sequence */
  const bool softmax = p.router.score == MOE_SCORE_SOFTMAX || (slopes != nullptr && !g.elementwise) ||
                       __any_sync(WARP, z_loss);
  const float top = load_lines<LANES>(a, t, live, m);
  if (slots) load_slots<LANES>(a, t, live, m);
  if (softmax) sum_experts<LANES>(&g, top, !g.elementwise, m.value);
  if (z_loss && g.sum > 0)
    g.z_slope = (float)(loss_gradient(a, 1) * slopes[a.experts] * (g.top + log(g.sum)));
  if (slots) {
    score_slots<LANES>(p.router.score, g, topk, m.score);
    slot_gradients<LANES>(p.router, g.over_slots, topk, m);
    if (!g.over_slots) add_slots<LANES>(topk, m);
  }
  if (slopes != nullptr) add_balance<LANES>(p, slopes, g.elementwise, m);
  if (softmax && !g.elementwise) finish_softmax<LANES>(g, m);
  if (g.elementwise) finish_elementwise(p.router.score, g, m);
  __syncwarp();
  if (slots && g.over_slots) add_slots<LANES>(topk, m);
}
