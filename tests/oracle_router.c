/* SPDX-License-Identifier: Apache-2.0
 *
 * The router half of the oracle: scores, choice, weights, losses, rows, and the gradient of the logits.
 * Invariant: a token that is not live has ids -1, weights 0, no row, and is read nowhere. */
#include "oracle_internal.h"

#include <float.h>

static int in_range(const struct run *w, int32_t id) { return id >= 0 && id < w->experts; }

/* p = softmax(z), all 0 if every z is -inf; returns log sum exp z. p may be z. */
static double softmax(const double *z, double *p, int64_t n) {
  double top = -INFINITY, sum = 0;
  for (int64_t i = 0; i < n; i++) top = fmax(top, z[i]);
  for (int64_t i = 0; i < n; i++) p[i] = top == -INFINITY ? 0 : exp(z[i] - top);
  for (int64_t i = 0; i < n; i++) sum += p[i];
  for (int64_t i = 0; i < n && sum > 0; i++) p[i] /= sum;
  return top + log(sum);
}

/* log(1 + e^z) without overflow for large z and without cancellation for small. */
static double softplus(double z) { return fmax(z, 0) + log1p(exp(-fabs(z))); }

/* Scores are those of moe_score; share is what the balancing loss averages. */
static void score_token(struct run *w, int64_t t) {
  const struct oracle *o = w->o;
  const int64_t experts = w->experts;
  double *z = w->z + t * experts, *score = w->score + t * experts, *share = w->share + t * experts,
         sum = 1e-20;
  for (int64_t e = 0; e < experts; e++) {
    const double product = w->c.entry == MOE_ENTRY_LOGITS
                               ? o->logits[t * experts + e]
                               : dot(o->x + t * w->hidden, o->router_weight + e * w->hidden, w->hidden);
    const double logit = product + (o->router_bias ? o->router_bias[e] : 0);
    z[e] = isnan(logit) ? -INFINITY : fmin(logit, FLT_MAX);
  }
  w->logsumexp[t] = softmax(z, share, experts);
  const int elementwise =
      w->c.router.score == MOE_SCORE_SIGMOID || w->c.router.score == MOE_SCORE_SQRT_SOFTPLUS;
  for (int64_t e = 0; e < experts; e++) {
    score[e] = share[e];
    if (w->c.router.score == MOE_SCORE_SIGMOID) score[e] = logistic(z[e]);
    if (w->c.router.score == MOE_SCORE_SQRT_SOFTPLUS) score[e] = sqrt(softplus(z[e]));
    sum += score[e];
  }
  for (int64_t e = 0; e < experts && elementwise; e++) share[e] = score[e] / sum;
}

/* Index of the largest key not taken, ties to the lower index; -1 if all are taken. */
static int64_t take_best(const double *key, uint8_t *taken, int64_t n) {
  int64_t best = -1;
  for (int64_t i = 0; i < n; i++)
    if (!taken[i] && (best < 0 || key[i] > key[best])) best = i;
  if (best >= 0) taken[best] = 1;
  return best;
}

/* Sum of the best keys of a group; how many is the group score's business. */
static double group_key(const struct run *w, const double *key, int64_t size) {
  const moe_router_desc *router = &w->c.router;
  int64_t best = 1;
  if (router->group_score == MOE_GROUP_TOP2_SUM) best = 2;
  if (router->group_score == MOE_GROUP_TOPK_SUM) best = w->topk / router->topk_groups;
  if (best < 1) best = 1;
  if (best > size) best = size;
  double sum = 0;
  for (int64_t e = 0; e < size; e++) w->taken[e] = 0;
  for (int64_t i = 0; i < best; i++) sum += key[take_best(key, w->taken, size)];
  return isnan(sum) ? -INFINITY : sum;
}

/* Leaves `taken` set, and the key -inf, for the experts of the groups that were not chosen. */
static void choose_groups(struct run *w, double *key) {
  const int64_t groups = w->c.router.groups, size = w->experts / groups;
  for (int64_t g = 0; g < groups; g++) w->group_key[g] = group_key(w, key + g * size, size);
  for (int64_t g = 0; g < groups; g++) w->group_taken[g] = 0;
  for (int64_t i = 0; i < w->c.router.topk_groups; i++) take_best(w->group_key, w->group_taken, groups);
  for (int64_t e = 0; e < w->experts; e++) {
    w->taken[e] = !w->group_taken[e / size];
    if (w->taken[e]) key[e] = -INFINITY;
  }
}

/* Keys are always made, so that a test can judge a decision it imposed. A logit of -inf ranks last whatever its score
 * and correction would say. */
static void choose(struct run *w, int64_t t) {
  const moe_router_desc *router = &w->c.router;
  const double *bias = w->o->correction_bias, *z = w->z + t * w->experts;
  double *key = w->o->keys + t * w->experts;
  const int by_logit = router->score == MOE_SCORE_TOPK_SOFTMAX ||
                       (router->score == MOE_SCORE_SOFTMAX && router->groups == 1 && bias == NULL);
  for (int64_t e = 0; e < w->experts; e++) {
    const double value = (by_logit ? z[e] : w->score[t * w->experts + e]) + (bias ? bias[e] : 0);
    key[e] = z[e] == -INFINITY || isnan(value) ? -INFINITY : value;
    w->o->raw_keys[t * w->experts + e] = key[e];
    w->taken[e] = 0;
  }
  if (router->groups > 1) choose_groups(w, key);
  const int32_t *decided = w->o->use_ids ? w->o->use_ids : w->o->given_ids;
  for (int64_t s = t * w->topk; s < (t + 1) * w->topk; s++)
    w->o->ids[s] = decided ? decided[s] : (int32_t)take_best(key, w->taken, w->experts);
}

/* Skipped slots have raw weight 0, so they are in no sum. */
static void weigh(struct run *w, int64_t t) {
  const moe_router_desc *router = &w->c.router;
  const int32_t *ids = w->o->ids + t * w->topk;
  double *raw = w->raw + t * w->topk, sum = router->renorm_epsilon;
  for (int64_t j = 0; j < w->topk; j++) {
    raw[j] = in_range(w, ids[j]) ? w->score[t * w->experts + ids[j]] : 0;
    w->slot_logit[j] = in_range(w, ids[j]) ? w->z[t * w->experts + ids[j]] : -INFINITY;
  }
  if (router->score == MOE_SCORE_TOPK_SOFTMAX) softmax(w->slot_logit, raw, w->topk);
  for (int64_t j = 0; j < w->topk; j++) sum += raw[j];
  for (int64_t j = 0; j < w->topk; j++)
    w->o->weights[t * w->topk + j] = router->scale * raw[j] / (router->renormalize ? sum : 1);
}

/* Ids and weights as the caller gives them. */
static void take_given(struct run *w, int64_t t) {
  const struct oracle *o = w->o;
  if (w->c.entry == MOE_ENTRY_ROWS) {
    int32_t e = 0;
    while (t >= o->row_offset[e + 1]) e++;
    o->ids[t] = e;
    o->weights[t] = o->given_weights ? o->given_weights[t] : 1;
    return;
  }
  for (int64_t s = t * w->topk; s < (t + 1) * w->topk; s++) {
    o->ids[s] = o->given_ids[s];
    o->weights[s] = in_range(w, o->ids[s]) ? o->given_weights[s] : 0;
  }
}

/* ---- losses */

int64_t oracle_sequences(const struct run *w) {
  if (w->c.router.balance != MOE_BALANCE_SEQUENCE) return 1;
  return (w->tokens + w->c.router.sequence_tokens - 1) / w->c.router.sequence_tokens;
}

/* Without sequences the whole batch is one. */
static int64_t sequence_of(const struct run *w, int64_t t) {
  return w->c.router.balance == MOE_BALANCE_SEQUENCE ? t / w->c.router.sequence_tokens : 0;
}

/* slope[e] = coeff E f_e / (live tokens of the sequence), still to be averaged. Returns 1 if a token is live. */
static int slope_of_sequence(struct run *w, int64_t sequence) {
  const struct oracle *o = w->o;
  const int global = w->c.router.balance == MOE_BALANCE_GLOBAL;
  double *slope = w->slope + sequence * w->experts, live = 0;
  for (int64_t t = 0; t < w->tokens; t++) {
    if (!w->live[t] || sequence_of(w, t) != sequence) continue;
    live++;
    for (int64_t s = t * w->topk; s < (t + 1) * w->topk; s++)
      if (in_range(w, o->ids[s])) slope[o->ids[s]]++;
  }
  if (live == 0) return 0;
  const double slots = (double)w->topk * (live + (global ? (double)o->global_counts[w->experts] : 0));
  for (int64_t e = 0; e < w->experts; e++) {
    const double chosen = slope[e] + (global ? (double)o->global_counts[e] : 0);
    slope[e] = w->c.router.balance_coeff * (double)w->experts * chosen / slots / live;
  }
  return 1;
}

static void balance_loss(struct run *w) {
  const int64_t sequences = oracle_sequences(w);
  int64_t occupied = 0;
  for (int64_t i = 0; i < sequences; i++) occupied += slope_of_sequence(w, i);
  for (int64_t i = 0; i < sequences * w->experts && occupied > 0; i++) w->slope[i] /= (double)occupied;
  for (int64_t t = 0; t < w->tokens; t++) {
    if (!w->live[t]) continue;
    const double *slope = w->slope + sequence_of(w, t) * w->experts;
    w->o->losses[0] += dot(slope, w->share + t * w->experts, w->experts);
  }
}

/* The z-loss is the sum of weight * logsumexp^2; a token without a finite logit has none. */
static double z_loss_weight(const struct run *w, int64_t t) {
  return w->logsumexp[t] == -INFINITY ? 0 : w->c.router.z_coeff / (double)w->live_tokens;
}

static void z_loss(struct run *w) {
  for (int64_t t = 0; t < w->tokens; t++)
    if (w->live[t] && z_loss_weight(w, t) > 0)
      w->o->losses[1] += z_loss_weight(w, t) * w->logsumexp[t] * w->logsumexp[t];
}

void oracle_route(struct run *w) {
  struct oracle *o = w->o;
  for (int64_t s = 0; s < w->tokens * w->topk; s++) o->ids[s] = -1;
  for (int64_t i = 0; w->has_router && i < w->tokens * w->experts; i++) o->keys[i] = -INFINITY;
  for (int64_t t = 0; t < w->tokens; t++) {
    if (!w->live[t]) continue;
    if (w->has_router) {
      score_token(w, t);
      choose(w, t);
      weigh(w, t);
    } else {
      take_given(w, t);
    }
    for (int64_t s = t * w->topk; s < (t + 1) * w->topk; s++)
      if (in_range(w, o->ids[s])) o->counts[o->ids[s]]++;
  }
  if (!w->has_router) return;
  if (w->c.router.balance != MOE_BALANCE_NONE) balance_loss(w);
  z_loss(w);
}

/* ---- rows */

/* How many slots of the expert go before the i-th one when it is over capacity. */
static int64_t rank_of(const struct run *w, const int32_t *slots, int64_t count, int64_t i) {
  if (w->c.drop == MOE_DROP_POSITION) return i;
  const double *weights = w->o->weights;
  const double own = isnan(weights[slots[i]]) ? -INFINITY : weights[slots[i]];
  int64_t rank = 0;
  for (int64_t n = 0; n < count; n++) {
    const double other = isnan(weights[slots[n]]) ? -INFINITY : weights[slots[n]];
    rank += other > own || (other == own && n < i);
  }
  return rank;
}

static void add_row(struct run *w, int32_t slot, int64_t row) {
  w->o->row_of_slot[slot] = (int32_t)row;
  w->routed.token[row] = slot / w->topk;
  w->routed.weight[row] = w->o->use_weights ? (double)w->o->use_weights[slot] : w->o->weights[slot];
}

/* Rows are the caller's: row r is slot r. */
static void take_rows(struct run *w) {
  for (int64_t e = 0; e <= w->experts; e++) w->o->offsets[e] = w->o->row_offset[e];
  for (int64_t r = 0; r < w->o->row_offset[w->experts]; r++)
    if (w->live[r]) add_row(w, (int32_t)r, r);
}

void oracle_sort(struct run *w) {
  struct oracle *o = w->o;
  const int64_t slots = w->tokens * w->topk;
  const double share = (double)w->tokens * (double)w->topk / (double)w->experts;
  const int64_t capacity = w->c.capacity_factor > 0 ? (int64_t)ceil(share * w->c.capacity_factor) : slots;
  int64_t row = 0;
  for (int64_t s = 0; s < slots; s++) o->row_of_slot[s] = -1;
  for (int64_t r = 0; r < slots; r++) w->routed.token[r] = -1;
  if (w->c.entry == MOE_ENTRY_ROWS) {
    take_rows(w);
    return;
  }
  for (int64_t e = 0; e < w->experts; e++) {
    int64_t count = 0;
    for (int64_t s = 0; s < slots && count < o->counts[e]; s++)
      if (o->ids[s] == e) w->slot_list[count++] = (int32_t)s;
    for (int64_t i = 0; i < count; i++) {
      const int32_t slot = w->slot_list[i];
      if (o->use_slot_row ? o->use_slot_row[slot] >= 0 : rank_of(w, w->slot_list, count, i) < capacity)
        add_row(w, slot, row++);
    }
    o->offsets[e + 1] = (int32_t)row;
  }
}

/* ---- backward */

/* Gradient of the raw weights: through scale and renormalisation. */
static void weigh_backward(const struct run *w, int64_t t, double *draw) {
  const moe_router_desc *router = &w->c.router;
  const double *raw = w->raw + t * w->topk, *dweights = w->o->dtopk_weights + t * w->topk;
  double sum = router->renorm_epsilon;
  for (int64_t j = 0; j < w->topk; j++) sum += raw[j];
  const double mean = router->renormalize ? dot(dweights, raw, w->topk) / sum : 0;
  for (int64_t j = 0; j < w->topk; j++)
    draw[j] = router->scale * (dweights[j] - mean) / (router->renormalize ? sum : 1);
}

/* dz += the softmax Jacobian p (d - <d,p>). */
static void softmax_backward(const double *p, const double *d, double *dz, int64_t n) {
  const double mean = dot(p, d, n);
  for (int64_t i = 0; i < n; i++) dz[i] += p[i] * (d[i] - mean);
}

/* ds/dz of the elementwise scores. */
static double score_slope(moe_score kind, double z, double score) {
  if (kind == MOE_SCORE_SIGMOID) return score * logistic(-z);
  return score > 0 ? logistic(z) / (2 * score) : 0;
}

/* dshare from the balancing loss; dz from the z-loss, whose logsumexp has the softmax as gradient. */
static void losses_backward(struct run *w, int64_t t, double *dz) {
  const struct oracle *o = w->o;
  const double scale = o->skip_losses ? 0 : o->loss_scale != 0 ? o->loss_scale : 1;
  const double *slope = w->slope + sequence_of(w, t) * w->experts;
  const double z_slope = z_loss_weight(w, t) > 0 ? scale * 2 * z_loss_weight(w, t) * w->logsumexp[t] : 0;
  for (int64_t e = 0; e < w->experts; e++) {
    w->dshare[e] = scale * slope[e];
    if (z_slope != 0) dz[e] += z_slope * exp(w->z[t * w->experts + e] - w->logsumexp[t]);
  }
}

/* A slot without a row has dweight 0 but still feels the others through the renormalisation. */
static void token_backward(struct run *w, int64_t t) {
  const int64_t experts = w->experts;
  const double *z = w->z + t * experts, *score = w->score + t * experts, *share = w->share + t * experts;
  const int32_t *ids = w->o->ids + t * w->topk;
  double *dz = w->o->dlogits + t * experts, *draw = w->slot_logit, sum = 1e-20;
  const moe_score kind = w->c.router.score;
  for (int64_t e = 0; e < experts; e++) w->dscore[e] = 0;
  weigh_backward(w, t, draw);
  losses_backward(w, t, dz);
  const double mean = dot(w->raw + t * w->topk, draw, w->topk);
  for (int64_t j = 0; j < w->topk; j++) {
    if (!in_range(w, ids[j])) continue;
    if (kind == MOE_SCORE_TOPK_SOFTMAX)
      dz[ids[j]] += w->raw[t * w->topk + j] * (draw[j] - mean);
    else
      w->dscore[ids[j]] += draw[j];
  }
  if (kind == MOE_SCORE_SOFTMAX || kind == MOE_SCORE_TOPK_SOFTMAX) {
    for (int64_t e = 0; e < experts; e++) w->dscore[e] += w->dshare[e];
    softmax_backward(share, w->dscore, dz, experts);
    return;
  }
  for (int64_t e = 0; e < experts; e++) sum += score[e];
  const double mean_share = dot(w->dshare, share, experts);
  for (int64_t e = 0; e < experts; e++)
    dz[e] += (w->dscore[e] + (w->dshare[e] - mean_share) / sum) * score_slope(kind, z[e], score[e]);
}

void oracle_route_backward(struct run *w) {
  for (int64_t t = 0; t < w->tokens; t++)
    if (w->live[t]) token_backward(w, t);
}
