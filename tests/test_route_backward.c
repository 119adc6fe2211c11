/* SPDX-License-Identifier: Apache-2.0
 *
 * What: moe_cpu_route_backward against central differences of the double reference.
 * Idea: with ids, dropped slots and slopes fixed, a token's part of the loss is     L(z) = sum_j dw_j
 * w_j(z) + loss_scale (sum_e slope_e P_e(z) + slope_E/2 logsumexp(z)^2), whose gradient by z is what the
 * op must write. The slopes come from moe_cpu_router_loss, see test_balance.c.
 * Invariant: a logit of -inf gets exactly 0, as does every logit of a masked token; nothing is ever NaN. */
#include "router_reference.h"

#include <limits.h>

struct gradient {
  const struct routing *p;
  const int32_t *ids, *slot_row;  /* slot_row or NULL */
  const float *dweights, *slopes; /* or NULL */
  float loss_scale;
  moe_dtype dtype; /* of dlogits */
};

static int is_kept(const struct gradient *g, int64_t slot) {
  return ref_valid(g->p, g->ids[slot]) && (g->slot_row == NULL || g->slot_row[slot] >= 0);
}

static const float *slopes_of(const struct gradient *g, int64_t t) {
  const moe_router_desc *router = &g->p->router;
  const int64_t sequence = router->balance == MOE_BALANCE_SEQUENCE ? t / router->sequence_tokens : 0;
  return g->slopes ? g->slopes + sequence * (g->p->experts + 1) : NULL;
}

/* L(z) of token t; work holds E doubles. */
static double loss_of(const struct gradient *g, int64_t t, const double *z, double *work) {
  const struct routing *p = g->p;
  const float *slopes = slopes_of(g, t);
  double loss = 0, weights[MOE_MAX_TOPK];
  ref_scores(p, z, work);
  ref_weights(p, z, work, g->ids + t * p->topk, weights);
  for (int64_t j = 0; j < p->topk && g->dweights; j++)
    if (is_kept(g, t * p->topk + j)) loss += g->dweights[t * p->topk + j] * weights[j];
  if (slopes == NULL) return loss;
  double extra = 0;
  ref_shares(p, z, work);
  for (int64_t e = 0; e < p->experts; e++) extra += slopes[e] * work[e];
  const double logsumexp = ref_softmax(z, work, p->experts);
  if (logsumexp != -INFINITY) extra += slopes[p->experts] / 2 * logsumexp * logsumexp;
  return loss + (g->loss_scale != 0 ? g->loss_scale : 1) * extra;
}

static void check_token(const struct gradient *g, int64_t t, const void *dlogits) {
  const struct routing *p = g->p;
  const double step = 1e-4;
  double *z = malloc((size_t)p->experts * sizeof *z), *work = malloc((size_t)p->experts * sizeof *work);
  double *want = calloc((size_t)p->experts, sizeof *want), largest = 0;
  for (int64_t e = 0; e < p->experts; e++) z[e] = ref_logit(p, t, e);
  for (int64_t e = 0; e < p->experts; e++) {
    const double middle = z[e];
    if (middle == -INFINITY || (p->mask && p->mask[t])) continue;
    z[e] = middle + step;
    want[e] = loss_of(g, t, z, work);
    z[e] = middle - step;
    want[e] = (want[e] - loss_of(g, t, z, work)) / (2 * step);
    z[e] = middle;
    largest = fmax(largest, fabs(want[e]));
  }
  const double scale = 1e-7 * fabs((double)p->router.scale);
  for (int64_t e = 0; e < p->experts; e++) {
    const double got = at(dlogits, g->dtype, t * p->experts + e);
    const double bound = half_ulp(g->dtype) * fabs(want[e]) + 3e-6 * largest + scale;
    EXPECT(fabs(got - want[e]) <= bound, "token %d expert %d score %d: %.9g, want %.9g", (int)t, (int)e,
           (int)p->router.score, got, want[e]);
    if (want[e] == 0 && largest == 0) EXPECT(got == 0, "token %d expert %d: %g, want 0", (int)t, (int)e, got);
    if (z[e] == -INFINITY) EXPECT(got == 0, "token %d expert %d is -inf: %g", (int)t, (int)e, got);
  }
  free(z), free(work), free(want);
}

static void *call_backward(const struct gradient *g, int threads) {
  const struct routing *p = g->p;
  void *dlogits = guarded((size_t)(p->tokens * p->experts) * element_bytes(g->dtype));
  moe_route_backward_args args = {
      .tokens = p->tokens, .experts = p->experts, .topk = p->topk, .router = &p->router};
  args.logits = p->logits, args.logits_dtype = p->dtype, args.router_bias = p->router_bias;
  args.ids = g->ids, args.slot_row = g->slot_row, args.padding_mask = p->mask;
  args.dweights = g->dweights, args.slopes = g->slopes, args.loss_scale = g->loss_scale;
  args.dlogits = dlogits, args.dlogits_dtype = g->dtype;
  EXPECT(call_route_backward(&args, threads) == MOE_OK, "status");
  return dlogits;
}

static float *make_slopes(const struct routing *p, const int32_t *ids) {
  const moe_router_desc *router = &p->router;
  const int64_t length = router->balance == MOE_BALANCE_SEQUENCE ? router->sequence_tokens : p->tokens;
  const int64_t sequences = p->tokens > length ? (p->tokens + length - 1) / length : 1;
  float *slopes = guarded((size_t)(sequences * (p->experts + 1)) * 4);
  int64_t *counts = calloc((size_t)p->experts + 1, sizeof *counts);
  moe_router_loss_args args = {.tokens = p->tokens, .experts = p->experts, .topk = p->topk, .router = router};
  args.logits = p->logits, args.logits_dtype = p->dtype, args.router_bias = p->router_bias, args.ids = ids;
  args.padding_mask = p->mask, args.global_counts = counts, args.slopes = slopes;
  EXPECT(call_router_loss(&args, 2) == MOE_OK, "status");
  free(counts);
  return slopes;
}

/* Routes, then checks the gradient, leaving out some of its parts. */
static void check(const struct routing *p, uint64_t *seed) {
  const unsigned bits = (unsigned)(test_random(seed) >> 32);
  struct routed r = call_routing(p, 1);
  const int64_t slots = p->tokens * p->topk;
  float *dweights = random_array(MOE_FP32, slots, 2, seed), *slopes = make_slopes(p, r.ids);
  int32_t *slot_row = guarded((size_t)slots * 4);
  for (int64_t s = 0; s < slots; s++) slot_row[s] = test_random(seed) % 4 ? (int32_t)s : -1;
  struct gradient g = {.p = p, .ids = r.ids, .dtype = (moe_dtype)(1 + bits % 3)};
  g.dweights = bits & 1 ? NULL : dweights, g.slopes = bits & 2 ? slopes : NULL,
  g.slot_row = bits & 4 ? slot_row : NULL;
  g.loss_scale = bits & 8 ? 3 : 0;
  void *one = call_backward(&g, 1), *many = call_backward(&g, 2 + (int)(bits % 3));
  const size_t bytes = (size_t)(p->tokens * p->experts) * element_bytes(g.dtype);
  EXPECT(memcmp(one, many, bytes) == 0, "threads change the gradient");
  for (int64_t t = 0; t < p->tokens; t++) check_token(&g, t, one);
  guarded_free(one), guarded_free(many), guarded_free(dweights), guarded_free(slopes), guarded_free(slot_row);
  free_routed(&r);
}

static void set_losses(struct routing *p, int balance) {
  p->router.balance = (moe_balance)balance;
  p->router.balance_coeff = balance ? 0.5f : 0;
  p->router.z_coeff = balance == 1 ? 0 : 0.25f;
  p->router.sequence_tokens = balance == MOE_BALANCE_SEQUENCE ? 3 : 0;
}

TEST(gradient_is_the_derivative_of_weights_and_losses) {
  static const int64_t EXPERTS[] = {1, 2, 3, 8, 17, 31, 60, 129}, TOPK[] = {1, 2, 6, 22};
  uint64_t seed = 30;
  for (int e = 0; e < 8; e++)
    for (int k = 0; k < 4; k++)
      for (int c = 0; c < 32 && TOPK[k] <= EXPERTS[e]; c++) {
        struct routing p =
            make_routing(c % 8, EXPERTS[e], TOPK[k], (moe_score)(c % 4), (moe_dtype)(1 + c % 3), 3, &seed);
        p.router.renormalize = c / 4 & 1;
        p.router.scale = c % 5 ? 1 : 2.5f;
        p.router.renorm_epsilon = c % 7 ? 1e-20f : 0.05f;
        set_losses(&p, c / 8);
        if (c & 1) p.router_bias = random_array(MOE_FP32, p.experts, 1, &seed);
        if (c & 2) p.mask = guarded((size_t)p.tokens);
        for (int64_t t = 0; t < p.tokens && p.mask; t++) p.mask[t] = test_random(&seed) % 3 == 0;
        check(&p, &seed);
        free_routing(&p);
      }
}

TEST(given_ids_that_repeat_or_are_no_experts) {
  static const int32_t BAD[] = {-1, INT_MIN, INT_MAX, 9};
  uint64_t seed = 31;
  for (unsigned bits = 0; bits < 64; bits++) {
    struct routing p = make_routing(5, 9, 12, (moe_score)(bits % 4), MOE_FP32, 3, &seed);
    p.router.renormalize = bits >> 4 & 1;
    set_losses(&p, (int)(bits >> 2) % 4);
    p.given_ids = guarded(5 * 12 * 4);
    for (int s = 0; s < 5 * 12; s++) {
      const uint64_t r = test_random(&seed);
      p.given_ids[s] = s / 12 == 2 || r % 3 == 0 ? BAD[(r >> 8) % 4] : (int32_t)((r >> 8) % 9);
    }
    check(&p, &seed);
    free_routing(&p);
  }
}

TEST(infinite_and_missing_logits_have_no_gradient) {
  uint64_t seed = 32;
  for (unsigned bits = 0; bits < 128; bits++) {
    struct routing p = make_routing(6, 20, 4, (moe_score)(bits % 4), MOE_FP32, 3, &seed);
    p.router.renormalize = bits >> 4 & 1;
    set_losses(&p, (int)(bits >> 2) % 4);
    float *z = p.logits;
    for (int i = 0; i < 6 * 20; i++) {
      const int dead = i / 20 == 0 || (i / 20 == 1 && i % 20 >= 2) || test_random(&seed) % 4 == 0;
      if (dead) z[i] = test_random(&seed) & 1 ? NAN : -INFINITY;
    }
    check(&p, &seed);
    free_routing(&p);
  }
}

/* A gradient that has blown up stays where it is: logits of -inf and masked tokens keep their 0. */
TEST(bad_gradients_do_not_reach_missing_logits) {
  static const float BAD[] = {NAN, INFINITY, -INFINITY, 3e38f};
  uint64_t seed = 34;
  for (unsigned bits = 0; bits < 32; bits++) {
    struct routing p = make_routing(4, 12, 3, (moe_score)(bits % 4), MOE_FP32, 3, &seed);
    p.router.renormalize = bits >> 2 & 1;
    p.mask = guarded(4);
    for (int t = 0; t < 4; t++) p.mask[t] = t == 1;
    for (int i = 0; i < 4 * 12; i++)
      if (i % 3 == 0) ((float *)p.logits)[i] = -INFINITY;
    struct routed r = call_routing(&p, 1);
    float dweights[4 * 3];
    for (int s = 0; s < 4 * 3; s++) dweights[s] = BAD[test_random(&seed) % 4];
    const struct gradient g = {.p = &p, .ids = r.ids, .dweights = dweights, .dtype = MOE_FP32};
    float *dlogits = call_backward(&g, 1);
    for (int i = 0; i < 4 * 12; i++)
      if (i % 3 == 0 || i / 12 == 1)
        EXPECT(dlogits[i] == 0, "score %u logit %d: %g", bits % 4, i, dlogits[i]);
    guarded_free(dlogits), free_routed(&r), free_routing(&p);
  }
}

TEST(huge_logits_give_finite_gradients) {
  static const float VALUES[] = {INFINITY, 1e30f, -1e30f, FLT_MAX, -FLT_MAX, -100, 100, -40, 1e-40f, 0};
  uint64_t seed = 33;
  for (unsigned bits = 0; bits < 64; bits++) {
    struct routing p = make_routing(8, 16, 4, (moe_score)(bits % 4), MOE_FP32, 3, &seed);
    p.router.renormalize = bits >> 2 & 1;
    for (int i = 0; i < 8 * 16; i++) ((float *)p.logits)[i] = VALUES[test_random(&seed) % 10];
    struct routed r = call_routing(&p, 1);
    float *dweights = random_array(MOE_FP32, 8 * 4, 2, &seed);
    const struct gradient g = {.p = &p, .ids = r.ids, .dweights = dweights, .dtype = MOE_FP32};
    float *dlogits = call_backward(&g, 2);
    for (int i = 0; i < 8 * 16; i++)
      EXPECT(isfinite(dlogits[i]) && fabsf(dlogits[i]) <= 8, "logit %g: %g", ((float *)p.logits)[i],
             dlogits[i]);
    guarded_free(dlogits), guarded_free(dweights), free_routed(&r), free_routing(&p);
  }
}

TEST_MAIN()
