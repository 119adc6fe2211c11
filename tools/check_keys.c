/* SPDX-License-Identifier: Apache-2.0
 *
 * The router's decisions and weights against the oracle's keys and logits, token by token.
 *
 * An fp32 key is off by CHECK_KEY_TOLERANCE of 1 + |key|, so that near ties may fall either way: those of experts, and before them
 * those of groups. Invariant: whatever these checks let pass, the oracle may follow, since a choice that they allow is one
 * that exact arithmetic on keys within the tolerance could have made. */
#include <math.h>

#include "check.h"
#include "check_reference.h"

#define UNDERFLOWN 1e-16 /* e^-87 is 0 in fp32, over the least sum that is divided by, 1e-20 */

static double key_noise(double key) { return CHECK_KEY_TOLERANCE * (1 + fabs(key)); }

bool check_masked(const struct sample *s, int64_t token) {
  const uint8_t *mask = s->data[T_MASK];
  return mask && mask[token];
}

/* Ids of a router are experts and distinct; given ids are copied; masked tokens have -1. */
void check_choice(const struct sample *s, const struct run *run, struct verdict *v) {
  const int64_t topk = s->problem.config.topk, experts = s->problem.config.experts;
  const int32_t *ids = run_data(run, T_TOPK_IDS), *given = s->data[T_GIVEN_IDS];
  for (int64_t t = 0; ids && t < s->problem.tokens; t++) {
    for (int64_t j = 0; j < topk; j++) {
      const int32_t id = ids[t * topk + j];
      const int32_t copied = given ? given[t * topk + j] : 0;
      bool good = check_masked(s, t) ? id == -1 : given ? id == copied : id >= 0 && id < experts;
      for (int64_t i = 0; i < j && good && !given && !check_masked(s, t); i++) good = ids[t * topk + i] != id;
      if (!good)
        verdict_fail(v, "topk_ids[%lld,%lld] = %d is no choice that could be made", (long long)t,
                     (long long)j, id);
    }
  }
}

/* What is known of one token's choice. */
struct choice {
  const double *keys; /* [experts], whatever the groups */
  int64_t token, experts, groups, topk_groups, best;
  double lowest; /* key of a chosen expert */
  bool chosen[MOE_MAX_EXPERTS];
  bool open[MOE_MAX_EXPERTS];   /* by group: its experts were candidates */
  bool spared[MOE_MAX_EXPERTS]; /* by group: it may have been one of the best, or not */
};

/* Expert, among those of a group or all, that was left out though its key is beyond noise of the lowest chosen; or -1. */
static int64_t passed_over(const struct choice *c, int64_t first, int64_t count) {
  for (int64_t e = first; e < first + count; e++)
    if (!c->chosen[e] && c->keys[e] > c->lowest + key_noise(c->keys[e])) return e;
  return -1;
}

static void fail_passed_over(const struct choice *c, int64_t expert, struct verdict *v) {
  verdict_fail(v, "topk_ids[%lld]: expert %lld has key %.9g and was left out for one of %.9g",
               (long long)c->token, (long long)expert, c->keys[expert], c->lowest);
}

/* The sum of a group's best keys, and how far fp32 may be off. */
static double group_key(const struct choice *c, int64_t group, double *noise) {
  const int64_t size = c->experts / c->groups;
  bool taken[MOE_MAX_EXPERTS] = {false};
  double sum = 0;
  *noise = 0;
  for (int64_t n = 0; n < c->best; n++) {
    int64_t best = -1;
    for (int64_t e = group * size; e < (group + 1) * size; e++)
      if (!taken[e] && (best < 0 || c->keys[e] > c->keys[best])) best = e;
    if (best < 0) break; /* a group of fewer */
    taken[best] = true;
    sum += c->keys[best];
    *noise += isfinite(c->keys[best]) ? key_noise(c->keys[best]) : 0;
  }
  return isnan(sum) ? -INFINITY : sum;
}

/* How many groups are beyond noise of this one: below it (way 1), or above it (way -1). */
static int64_t groups_beyond(const struct choice *c, const double *low, const double *high, int64_t group,
                             int way) {
  int64_t count = 0;
  for (int64_t g = 0; g < c->groups; g++) count += way > 0 ? high[g] < low[group] : low[g] > high[group];
  return count;
}

/* A group is one of the best for sure if all but topk_groups - 1 are below it, and is none if topk_groups are above. A group
 * with a chosen expert was open. Returns one that was, though it is none of the best, or -1; `left` is how many of those
 * that are spared must have been open as well. */
static int64_t open_groups(struct choice *c, int64_t *left) {
  const int64_t size = c->experts / c->groups;
  double low[MOE_MAX_EXPERTS], high[MOE_MAX_EXPERTS], noise;
  *left = c->topk_groups;
  for (int64_t g = 0; g < c->groups; g++) {
    const double key = group_key(c, g, &noise);
    low[g] = key - noise;
    high[g] = key + noise;
  }
  for (int64_t g = 0; g < c->groups; g++) {
    const bool never = groups_beyond(c, low, high, g, -1) >= c->topk_groups;
    bool used = false;
    for (int64_t e = g * size; e < (g + 1) * size; e++) used = used || c->chosen[e];
    if (used && never) return g;
    c->open[g] = used || groups_beyond(c, low, high, g, 1) >= c->groups - c->topk_groups;
    c->spared[g] = !c->open[g] && !never;
    *left -= c->open[g];
  }
  return -1;
}

static void check_groups(struct choice *c, struct verdict *v) {
  const int64_t size = c->experts / c->groups;
  int64_t left;
  const int64_t wrong = open_groups(c, &left);
  if (wrong >= 0)
    verdict_fail(v, "topk_ids[%lld]: an expert of group %lld was chosen, which is none of the best groups",
                 (long long)c->token, (long long)wrong);
  else if (left < 0)
    verdict_fail(v, "topk_ids[%lld]: experts of more than %lld groups were chosen", (long long)c->token,
                 (long long)c->topk_groups);
  if (wrong >= 0 || left < 0) return;
  for (int64_t g = 0; g < c->groups; g++) {
    const int64_t e = passed_over(c, g * size, size);
    left -= c->spared[g] && e < 0;
    if (c->open[g] && e >= 0) fail_passed_over(c, e, v);
  }
  if (left > 0)
    verdict_fail(v, "topk_ids[%lld]: a group that is one of the best was left out", (long long)c->token);
}

static void check_token(struct choice *c, struct verdict *v) {
  if (c->groups > 1) {
    check_groups(c, v);
    return;
  }
  const int64_t e = passed_over(c, 0, c->experts);
  if (e >= 0) fail_passed_over(c, e, v);
}

static int64_t keys_of_group(const moe_config *c) {
  const int64_t groups = c->router.groups, size = groups > 1 ? c->experts / groups : c->experts;
  int64_t best = c->router.group_score == MOE_GROUP_TOP2_SUM ? 2 : 1;
  if (c->router.group_score == MOE_GROUP_TOPK_SUM && c->router.topk_groups > 0)
    best = c->topk / c->router.topk_groups;
  return best < 1 ? 1 : best > size ? size : best;
}

void check_keys(const struct sample *s, const struct run *run, const struct oracle *o, struct verdict *v) {
  const moe_config *config = &s->problem.config;
  const int32_t *ids = run_data(run, T_TOPK_IDS);
  if (o->raw_keys == NULL || s->problem.replay) return;
  for (int64_t t = 0; t < s->problem.tokens; t++) {
    if (check_masked(s, t)) continue;
    struct choice c = {.keys = o->raw_keys + t * config->experts,
                       .token = t,
                       .experts = config->experts,
                       .groups = config->router.groups,
                       .topk_groups = config->router.topk_groups,
                       .best = keys_of_group(config),
                       .lowest = INFINITY};
    for (int64_t j = 0; j < config->topk; j++) {
      const int32_t id = ids[t * config->topk + j];
      c.chosen[id] = true;
      c.lowest = fmin(c.lowest, c.keys[id]);
    }
    check_token(&c, v);
  }
}

/* ---- weights ----------------------------------------------------------------------------------------------------- */

/* exp turns what a logit is off by into a relative error, once for the logit and once for those it is divided by. */
static double weight_noise(const struct oracle *o, int64_t t, int64_t topk, int64_t experts) {
  double largest = 0, top = -INFINITY;
  for (int64_t e = 0; e < experts; e++) top = fmax(top, o->z[t * experts + e]);
  for (int64_t i = t * topk; i < (t + 1) * topk; i++) {
    const int32_t id = o->ids[i];
    const double z = id >= 0 && id < experts ? o->z[t * experts + id] : 0;
    largest = fmax(largest, isfinite(z) ? fabs(z) : 0);
  }
  return 2 * key_noise(fmax(largest, isfinite(top) ? fabs(top) : 0));
}

void check_weights(const struct sample *s, const struct run *run, const struct oracle *o, struct verdict *v) {
  const int64_t topk = s->problem.config.topk, experts = s->problem.config.experts;
  const float *weights = run_data(run, T_TOPK_WEIGHTS);
  if (o->z == NULL || weights == NULL) return;
  for (int64_t t = 0; t < s->problem.tokens; t++) {
    if (check_masked(s, t)) continue;
    const double noise = weight_noise(o, t, topk, experts);
    for (int64_t i = t * topk; i < (t + 1) * topk; i++) {
      const double wanted = o->weights[i], error = fabs((double)weights[i] - wanted);
      if (!(error <= noise * wanted + UNDERFLOWN))
        verdict_fail(v, "topk_weights[%lld,%lld] = %.9g, wanted %.9g up to %.2g of it", (long long)t,
                     (long long)(i % topk), (double)weights[i], wanted, noise);
    }
  }
}
