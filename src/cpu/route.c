/* SPDX-License-Identifier: Apache-2.0
 *
 * What: the choice of k experts a token and their weights, and the gradient of the logits.
 * Idea: a token at a time, all of it in fp32 with sums in double. The k best keys are kept in a short
 * sorted list whose last key is a threshold; experts are scanned in blocks, and a block with nothing above
 * the threshold costs one vectorised comparison.
 * Invariant: a token's result depends on its own logits only, so neither threads nor batch change a bit. */
#include "cpu.h"

#include <string.h>

#include "score.h"

enum {
  SCAN = 16
}; /* experts compared with the threshold at once */

/* ---- the n best of a list of keys ---------------------------------------------------------------------- */

/* Best first; of equal keys the one offered first. */
struct best {
  float *key;
  int32_t *id;
  int64_t found;
  int64_t wanted;
};

static void offer(struct best *best, float key, int64_t id) {
  if (best->found == best->wanted && !(key > best->key[best->wanted - 1])) return;
  int64_t at = best->found < best->wanted ? best->found++ : best->wanted - 1;
  for (; at > 0 && best->key[at - 1] < key; at--) {
    best->key[at] = best->key[at - 1];
    best->id[at] = best->id[at - 1];
  }
  best->key[at] = key;
  best->id[at] = (int32_t)id;
}

static bool any_above(const float *key, float threshold) {
  int any = 0;
  for (int i = 0; i < SCAN; i++) any |= key[i] > threshold;
  return any;
}

static void offer_range(struct best *best, const float *key, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; i += SCAN) {
    const int64_t end = i + SCAN < last ? i + SCAN : last;
    const bool whole = end - i == SCAN && best->found == best->wanted;
    if (whole && !any_above(key + i, best->key[best->wanted - 1])) continue;
    for (int64_t e = i; e < end; e++) offer(best, key[e], e);
  }
}

/* ---- route --------------------------------------------------------------------------------------------- */

/* A thread's scratch: six arrays of E elements. */
struct work {
  float *z, *score, *key, *group_key, *best_key;
  int32_t *best_id;
};

static size_t work_floats(int64_t experts) { return (size_t)ALIGN_UP(6 * experts, MOE_ALIGN / 4); }

static struct work work_of(void *scratch, int64_t experts) {
  float *base = (float *)scratch + work_floats(experts) * (size_t)omp_get_thread_num();
  return (struct work){base,
                       base + experts,
                       base + 2 * experts,
                       base + 3 * experts,
                       base + 4 * experts,
                       (int32_t *)(base + 5 * experts)};
}

size_t moe_cpu_route_scratch(const moe_context *ctx, const moe_route_args *args) {
  return (size_t)ctx->units * work_floats(args->experts) * sizeof(float);
}

static bool is_masked(const uint8_t *padding_mask, int64_t t) {
  return padding_mask != NULL && padding_mask[t] != 0;
}

/* A key that is NaN (an infinite bias on an infinite score) ranks as -inf, like an expert whose logit is
 * -inf. */
static void make_keys(const moe_route_args *args, const struct work *w) {
  const moe_router_desc *router = args->router;
  const float *bias = args->correction_bias;
  const bool by_logit = router->score == MOE_SCORE_TOPK_SOFTMAX ||
                        (router->score == MOE_SCORE_SOFTMAX && router->groups <= 1 && bias == NULL);
  const float *value = by_logit ? w->z : w->score;
  for (int64_t e = 0; e < args->experts; e++) {
    const float key = bias != NULL ? value[e] + bias[e] : value[e];
    w->key[e] = key != key || w->z[e] == -INFINITY ? -INFINITY : key;
  }
}

/* The sum of the best keys of experts first .. last-1, best first; how many is the group score's business. */
static float group_key(const moe_route_args *args, const float *key, int64_t first, int64_t last) {
  const moe_router_desc *router = args->router;
  int64_t wanted = 1;
  if (router->group_score == MOE_GROUP_TOP2_SUM) wanted = 2;
  if (router->group_score == MOE_GROUP_TOPK_SUM) wanted = args->topk / router->topk_groups;
  if (wanted < 1) wanted = 1;
  if (wanted > last - first) wanted = last - first;
  float best_key[MOE_MAX_TOPK], sum = 0;
  int32_t best_id[MOE_MAX_TOPK];
  struct best best = {best_key, best_id, 0, wanted};
  offer_range(&best, key, first, last);
  for (int64_t i = 0; i < best.found; i++) sum += best_key[i];
  return sum != sum ? -INFINITY : sum;
}

/* Experts of the groups that rank no lower than the last chosen group. */
static void choose_in_groups(const moe_route_args *args, const struct work *w, struct best *best) {
  const int64_t groups = args->router->groups, size = args->experts / groups;
  struct best chosen = {w->best_key, w->best_id, 0, args->router->topk_groups};
  for (int64_t g = 0; g < groups; g++) w->group_key[g] = group_key(args, w->key, g * size, (g + 1) * size);
  offer_range(&chosen, w->group_key, 0, groups);
  const float last_key = w->best_key[chosen.found - 1];
  const int64_t last_id = w->best_id[chosen.found - 1];
  for (int64_t g = 0; g < groups; g++)
    if (w->group_key[g] > last_key || (w->group_key[g] == last_key && g <= last_id))
      offer_range(best, w->key, g * size, (g + 1) * size);
}

static void choose(const moe_route_args *args, const struct work *w, int32_t *ids) {
  float best_key[MOE_MAX_TOPK];
  struct best best = {best_key, ids, 0, args->topk};
  make_keys(args, w);
  if (args->router->groups > 1)
    choose_in_groups(args, w, &best);
  else
    offer_range(&best, w->key, 0, args->experts);
}

/* score[j] of the expert of each slot, 0 where the id is no expert; returns their sum. */
static double slot_scores(const moe_router_desc *router, const int32_t *ids, int64_t topk, int64_t experts,
                          const float *z, const float *all, float *score) {
  const bool over_slots = router->score == MOE_SCORE_TOPK_SOFTMAX;
  double sum = 0;
  for (int64_t j = 0; j < topk; j++) {
    const bool valid = ids[j] >= 0 && ids[j] < experts;
    if (over_slots)
      score[j] = valid ? z[ids[j]] : -INFINITY;
    else
      score[j] = valid ? all[ids[j]] : 0;
  }
  if (over_slots) score_softmax(score, score, topk);
  for (int64_t j = 0; j < topk; j++) sum += score[j];
  return sum;
}

static void route_token(const moe_route_args *args, int64_t t, const struct work *w) {
  const moe_router_desc *router = args->router;
  int32_t *ids = args->ids + t * args->topk;
  float *weights = args->weights + t * args->topk;
  if (is_masked(args->padding_mask, t)) {
    for (int64_t j = 0; j < args->topk; j++) ids[j] = -1, weights[j] = 0;
    return;
  }
  score_logits(w->z, args->logits, args->logits_dtype, args->router_bias, t, args->experts);
  if (router->score == MOE_SCORE_SOFTMAX) score_softmax(w->score, w->z, args->experts);
  if (score_is_elementwise(router->score)) score_elementwise(router->score, w->score, w->z, args->experts);
  if (args->given_ids == NULL)
    choose(args, w, ids);
  else
    memcpy(ids, args->given_ids + t * args->topk, (size_t)args->topk * sizeof *ids);
  const double sum = slot_scores(router, ids, args->topk, args->experts, w->z, w->score, weights);
  const double factor = router->scale / (router->renormalize ? sum + router->renorm_epsilon : 1.0);
  for (int64_t j = 0; j < args->topk; j++) weights[j] = (float)(weights[j] * factor);
}

/* After the parallel loop: counting a slot takes a hundredth of the time of choosing it. */
static void count_slots(const moe_route_args *args) {
  memset(args->counts, 0, (size_t)args->experts * sizeof *args->counts);
  for (int64_t s = 0; s < args->tokens * args->topk; s++)
    if (args->ids[s] >= 0 && args->ids[s] < args->experts) args->counts[args->ids[s]]++;
}

moe_status moe_cpu_route(moe_context *ctx, const moe_route_args *args, moe_stream stream) {
  (void)stream;
#pragma omp parallel num_threads(ctx->units)
  {
    const struct work w = work_of(args->scratch, args->experts);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < args->tokens; t++) route_token(args, t, &w);
  }
  if (args->counts != NULL) count_slots(args);
  return MOE_OK;
}

/* ---- backward ------------------------------------------------------------------------------------------ */

size_t moe_cpu_route_backward_scratch(const moe_context *ctx, const moe_route_backward_args *args) {
  return (size_t)ctx->units * work_floats(args->experts) * sizeof(float);
}

/* dscore[j], the gradient of the slots' scores from that of their weights, through scale and
 * renormalisation. */
static void slot_gradients(const moe_route_backward_args *args, int64_t t, const float *score, double sum,
                           double *dscore) {
  const moe_router_desc *router = args->router;
  const double divisor = router->renormalize ? sum + router->renorm_epsilon : 1.0;
  double mean = 0;
  for (int64_t j = 0; j < args->topk; j++) {
    const int64_t s = t * args->topk + j;
    const bool valid = args->ids[s] >= 0 && args->ids[s] < args->experts;
    const bool kept = valid && (args->slot_row == NULL || args->slot_row[s] >= 0);
    dscore[j] = kept ? (double)args->dweights[s] * router->scale : 0;
    mean += dscore[j] * score[j] / divisor;
  }
  for (int64_t j = 0; j < args->topk; j++)
    dscore[j] = (dscore[j] - (router->renormalize ? mean : 0)) / divisor;
}

/* d += gradient of all scores from the balancing loss; slope[e] is its derivative by the normalised score. */
static void add_balance(const moe_router_desc *router, const float *slope, double loss_scale,
                        const float *score, int64_t experts, float *d) {
  double mean = 0, divisor = 1;
  if (score_is_elementwise(router->score)) {
    divisor = score_sum(score, experts) + SCORE_FLOOR;
    mean = score_dot(slope, score, experts) / divisor;
  }
  for (int64_t e = 0; e < experts; e++) d[e] += (float)(loss_scale * (slope[e] - mean) / divisor);
}

/* From the gradient of the scores to that of the logits, in place. */
static void through_score(const moe_router_desc *router, const struct work *w, int64_t experts, float *d) {
  if (score_is_elementwise(router->score)) {
    for (int64_t e = 0; e < experts; e++) d[e] *= score_slope(router->score, w->z[e], w->score[e]);
  } else {
    const double mean = score_dot(d, w->score, experts);
    for (int64_t e = 0; e < experts; e++) d[e] = (float)(w->score[e] * (d[e] - mean));
  }
}

/* d += the gradient of the logits of the slots, whose softmax `score` is. */
static void through_slot_softmax(const int32_t *ids, const float *score, const double *dscore, int64_t topk,
                                 float *d) {
  double mean = 0;
  for (int64_t j = 0; j < topk; j++) mean += score[j] * dscore[j];
  for (int64_t j = 0; j < topk; j++)
    if (score[j] > 0) d[ids[j]] += (float)(score[j] * (dscore[j] - mean));
}

static double dloss(const moe_route_backward_args *args, int which) {
  return args->dlosses ? args->dlosses[which] : 1;
}

static void backward_token(const moe_route_backward_args *args, int64_t t, const struct work *w, float *d) {
  const moe_router_desc *router = args->router;
  const int64_t experts = args->experts, topk = args->topk;
  const int32_t *ids = args->ids + t * topk;
  const bool over_slots = router->score == MOE_SCORE_TOPK_SOFTMAX;
  const double loss_scale = args->loss_scale != 0 ? args->loss_scale : 1;
  const int64_t sequence = router->balance == MOE_BALANCE_SEQUENCE ? t / router->sequence_tokens : 0;
  const float *slopes = args->slopes != NULL ? args->slopes + sequence * (experts + 1) : NULL;
  float score[MOE_MAX_TOPK];
  double dscore[MOE_MAX_TOPK], logsumexp = -INFINITY;

  score_logits(w->z, args->logits, args->logits_dtype, args->router_bias, t, experts);
  if (score_is_elementwise(router->score))
    score_elementwise(router->score, w->score, w->z, experts);
  else
    logsumexp = score_softmax(w->score, w->z, experts);
  if (args->dweights != NULL) {
    const double sum = slot_scores(router, ids, topk, experts, w->z, w->score, score);
    slot_gradients(args, t, score, sum, dscore);
    for (int64_t j = 0; j < topk && !over_slots; j++)
      if (ids[j] >= 0 && ids[j] < experts) d[ids[j]] += (float)dscore[j];
  }
  if (slopes != NULL) add_balance(router, slopes, loss_scale * dloss(args, 0), w->score, experts, d);
  through_score(router, w, experts, d);
  if (args->dweights != NULL && over_slots) through_slot_softmax(ids, score, dscore, topk, d);
  if (slopes != NULL && slopes[experts] != 0) {
    if (score_is_elementwise(router->score)) logsumexp = score_softmax(w->score, w->z, experts);
    const double slope =
        logsumexp == -INFINITY ? 0 : loss_scale * dloss(args, 1) * slopes[experts] * logsumexp;
    for (int64_t e = 0; e < experts; e++) d[e] += (float)(slope * w->score[e]);
  }
  for (int64_t e = 0; e < experts; e++) d[e] = w->z[e] == -INFINITY ? 0 : d[e];
}

moe_status moe_cpu_route_backward(moe_context *ctx, const moe_route_backward_args *args, moe_stream stream) {
  (void)stream;
#pragma omp parallel num_threads(ctx->units)
  {
    const struct work w = work_of(args->scratch, args->experts);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < args->tokens; t++) {
      memset(w.key, 0, (size_t)args->experts * sizeof *w.key);
      if (!is_masked(args->padding_mask, t)) backward_token(args, t, &w, w.key);
      moe_cpu_write(args->dlogits, args->dlogits_dtype, t * args->experts, w.key, args->experts);
    }
  }
  return MOE_OK;
}
