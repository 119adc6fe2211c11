/* SPDX-License-Identifier: Apache-2.0
 *
 * What: one token of the router in double, by the formulas of moe_router_desc, and a routing problem with
 * its arrays.
 * Idea: no cleverness: the choice is left to the caller, who checks it; everything else is one loop a
 * formula.
 * Invariant: shares nothing with src/cpu but the logits as they were stored. */
#pragma once

#include <float.h>

#include "ops_call.h"

struct routing {
  int64_t tokens, experts, topk;
  moe_router_desc router;
  moe_dtype dtype;
  void *logits;
  float *router_bias, *correction_bias; /* or NULL */
  int32_t *given_ids;                   /* or NULL */
  uint8_t *mask;                        /* or NULL */
};

/* What moe_cpu_route wrote. */
struct routed {
  int32_t *ids, *counts;
  float *weights;
};

static inline double ref_logit(const struct routing *p, int64_t t, int64_t e) {
  const float z =
      (float)at(p->logits, p->dtype, t * p->experts + e) + (p->router_bias ? p->router_bias[e] : 0);
  return isnan(z) ? -INFINITY : fmin(z, FLT_MAX);
}

/* p = softmax(z); all 0 if nothing is above -inf; returns log sum exp z. */
static inline double ref_softmax(const double *z, double *p, int64_t n) {
  double top = -INFINITY, sum = 0;
  for (int64_t i = 0; i < n; i++) top = fmax(top, z[i]);
  for (int64_t i = 0; i < n; i++) sum += top == -INFINITY ? 0 : exp(z[i] - top);
  for (int64_t i = 0; i < n; i++) p[i] = top == -INFINITY ? 0 : exp(z[i] - top) / sum;
  return top + log(sum);
}

static inline double ref_score_of(moe_score score, double z) {
  if (score == MOE_SCORE_SIGMOID) return z < 0 ? exp(z) / (1 + exp(z)) : 1 / (1 + exp(-z));
  return sqrt(z > 0 ? z + log1p(exp(-z)) : log1p(exp(z)));
}

/* Scores over all experts; the softmax for both softmax kinds. */
static inline void ref_scores(const struct routing *p, const double *z, double *s) {
  const moe_score score = p->router.score;
  if (score == MOE_SCORE_SOFTMAX || score == MOE_SCORE_TOPK_SOFTMAX)
    ref_softmax(z, s, p->experts);
  else
    for (int64_t e = 0; e < p->experts; e++) s[e] = ref_score_of(score, z[e]);
}

static inline int ref_valid(const struct routing *p, int32_t id) { return id >= 0 && id < p->experts; }

/* Weights of the given slots, from logits z and scores s. */
static inline void ref_weights(const struct routing *p, const double *z, const double *s, const int32_t *ids,
                               double *w) {
  double slot[MOE_MAX_TOPK], sum = p->router.renorm_epsilon;
  for (int64_t j = 0; j < p->topk; j++) {
    slot[j] = ref_valid(p, ids[j]) ? z[ids[j]] : -INFINITY;
    w[j] = ref_valid(p, ids[j]) ? s[ids[j]] : 0;
  }
  if (p->router.score == MOE_SCORE_TOPK_SOFTMAX) ref_softmax(slot, w, p->topk);
  for (int64_t j = 0; j < p->topk; j++) sum += w[j];
  for (int64_t j = 0; j < p->topk; j++) w[j] *= p->router.scale / (p->router.renormalize ? sum : 1);
}

/* Scores normalised to sum 1, as the balancing loss sees them. */
static inline void ref_shares(const struct routing *p, const double *z, double *share) {
  double sum = 1e-20;
  ref_scores(p, z, share);
  for (int64_t e = 0; e < p->experts; e++) sum += share[e];
  const int softmax = p->router.score == MOE_SCORE_SOFTMAX || p->router.score == MOE_SCORE_TOPK_SOFTMAX;
  for (int64_t e = 0; e < p->experts && !softmax; e++) share[e] /= sum;
}

static inline struct routing make_routing(int64_t tokens, int64_t experts, int64_t topk, moe_score score,
                                          moe_dtype dtype, float range, uint64_t *seed) {
  struct routing p = {.tokens = tokens, .experts = experts, .topk = topk, .dtype = dtype};
  p.router =
      (moe_router_desc){.score = score, .renorm_epsilon = 1e-20f, .scale = 1, .groups = 1, .topk_groups = 1};
  p.logits = random_array(dtype, tokens * experts, range, seed);
  return p;
}

static inline struct routed call_routing(const struct routing *p, int threads) {
  struct routed r = {guarded((size_t)(p->tokens * p->topk) * 4), guarded((size_t)p->experts * 4),
                     guarded((size_t)(p->tokens * p->topk) * 4)};
  memset(r.ids, 0x55, (size_t)(p->tokens * p->topk) * 4); /* the fill of guarded() would pass for -1 */
  moe_route_args args = {.tokens = p->tokens, .experts = p->experts, .topk = p->topk, .router = &p->router};
  args.logits = p->logits, args.logits_dtype = p->dtype, args.router_bias = p->router_bias;
  args.correction_bias = p->correction_bias, args.given_ids = p->given_ids, args.padding_mask = p->mask;
  args.ids = r.ids, args.weights = r.weights, args.counts = r.counts;
  EXPECT(call_route(&args, threads) == MOE_OK, "status");
  return r;
}

static inline void free_routed(struct routed *r) {
  guarded_free(r->ids), guarded_free(r->counts), guarded_free(r->weights);
}

static inline void free_routing(struct routing *p) {
  guarded_free(p->logits);
  if (p->router_bias) guarded_free(p->router_bias);
  if (p->correction_bias) guarded_free(p->correction_bias);
  if (p->given_ids) guarded_free(p->given_ids);
  if (p->mask) guarded_free(p->mask);
}
