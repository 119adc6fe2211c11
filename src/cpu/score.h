/* SPDX-License-Identifier: Apache-2.0
 *
 * What: router logits and scores of one token, and their derivatives; shared by route.c and router_loss.c.
 * Idea: every function is one or two plain loops over the experts. Reductions run in a fixed number of
 * lanes, so that they vectorise and yet have one order of addition.
 * Invariant: z is never NaN and never +inf; a logit of -inf scores exactly 0 and has slope exactly 0. */
#pragma once

#include <float.h>

#include "../act.h"
#include "cpu.h"

#define SCORE_LANES 8
#define SCORE_FLOOR 1e-20 /* keeps a sum of scores that are all 0 from dividing */

static inline double score_dot(const float *a, const float *b, int64_t n) {
  double lane[SCORE_LANES] = {0};
  int64_t i = 0;
  for (; i + SCORE_LANES <= n; i += SCORE_LANES)
    for (int l = 0; l < SCORE_LANES; l++) lane[l] += (double)a[i + l] * b[i + l];
  for (int l = 0; i + l < n; l++) lane[l] += (double)a[i + l] * b[i + l];
  for (int half = SCORE_LANES / 2; half > 0; half /= 2)
    for (int l = 0; l < half; l++) lane[l] += lane[l + half];
  return lane[0];
}

static inline double score_sum(const float *a, int64_t n) {
  double lane[SCORE_LANES] = {0};
  int64_t i = 0;
  for (; i + SCORE_LANES <= n; i += SCORE_LANES)
    for (int l = 0; l < SCORE_LANES; l++) lane[l] += a[i + l];
  for (int l = 0; i + l < n; l++) lane[l] += a[i + l];
  for (int half = SCORE_LANES / 2; half > 0; half /= 2)
    for (int l = 0; l < half; l++) lane[l] += lane[l + half];
  return lane[0];
}

static inline float score_max(const float *a, int64_t n) {
  float lane[SCORE_LANES], top = -INFINITY;
  for (int l = 0; l < SCORE_LANES; l++) lane[l] = -INFINITY;
  int64_t i = 0;
  for (; i + SCORE_LANES <= n; i += SCORE_LANES)
    for (int l = 0; l < SCORE_LANES; l++) lane[l] = a[i + l] > lane[l] ? a[i + l] : lane[l];
  for (int l = 0; l < SCORE_LANES; l++) top = lane[l] > top ? lane[l] : top;
  for (; i < n; i++) top = a[i] > top ? a[i] : top;
  return top;
}

/* z = logits of token t plus bias, NaN as -inf, +inf as the largest finite number. */
static inline void score_logits(float *z, const void *logits, moe_dtype dtype, const float *bias, int64_t t,
                                int64_t experts) {
  moe_cpu_read(z, logits, dtype, t * experts, experts);
  if (bias != NULL)
    for (int64_t e = 0; e < experts; e++) z[e] += bias[e];
  for (int64_t e = 0; e < experts; e++) {
    const float bounded = z[e] > FLT_MAX ? FLT_MAX : z[e];
    z[e] = bounded != bounded ? -INFINITY : bounded;
  }
}

/* s = softmax(z), all 0 if every z is -inf; returns log sum exp z. s may be z. */
static inline double score_softmax(float *s, const float *z, int64_t n) {
  const float top = score_max(z, n);
  if (top == -INFINITY) {
    memset(s, 0, (size_t)n * sizeof *s);
    return -INFINITY;
  }
  for (int64_t e = 0; e < n; e++) s[e] = moe_exp(z[e] - top);
  const double sum = score_sum(s, n);
  const float divisor = (float)sum;
  for (int64_t e = 0; e < n; e++) s[e] /= divisor;
  return top + log(sum);
}

/* Scores that look at one logit at a time. */
static inline bool score_is_elementwise(moe_score score) {
  return score == MOE_SCORE_SIGMOID || score == MOE_SCORE_SQRT_SOFTPLUS;
}

/* e^-|z| never overflows, and no difference of near equals appears. */
static inline float score_sigmoid(float z) {
  const float e = moe_exp(z < 0 ? z : -z);
  return (z < 0 ? e : 1.0f) / (1.0f + e);
}

/* Below this, log(1+e^z) is e^z to within e^-17/2 = 2^-25.5, and the root is taken in the exponent, which
 * reaches twice as far. */
#define SOFTPLUS_TAIL -17.0f

static inline float score_sqrt_softplus(float z) {
  if (z < SOFTPLUS_TAIL) return moe_exp(0.5f * z);
  return sqrtf((z < 0 ? 0 : z) + log1pf(moe_exp(z < 0 ? z : -z)));
}

static inline void score_elementwise(moe_score score, float *s, const float *z, int64_t n) {
  if (score == MOE_SCORE_SIGMOID)
    for (int64_t e = 0; e < n; e++) s[e] = score_sigmoid(z[e]);
  else
    for (int64_t e = 0; e < n; e++) s[e] = score_sqrt_softplus(z[e]);
}

/* ds/dz of an elementwise score s(z). */
static inline float score_slope(moe_score score, float z, float s) {
  if (score == MOE_SCORE_SQRT_SOFTPLUS) return z < SOFTPLUS_TAIL ? 0.5f * s : score_sigmoid(z) / (2.0f * s);
  const float e = moe_exp(z < 0 ? z : -z);
  return e / ((1.0f + e) * (1.0f + e));
}
