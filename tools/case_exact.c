/* SPDX-License-Identifier: Apache-2.0
 *
 * Data of an `exact` problem: small integers, most of them 0, so that every product and every partial sum of the layer is
 * exact in fp32. Then no order of summation changes a bit, and each rounding to the storage format is that of a known number.
 *
 * Activations that are not piecewise polynomial are used where they are: at 0, and so far out that their sigmoid is 1. There
 * x and the gate rows of W1 are not negative, a gate is a multiple of 64, and W2 is smaller by as much. Weights of a router
 * are exact if the chosen logits are equal and the others lie 256 below, where a softmax has nothing left. Where logits come
 * from x, its first columns say of which type a token is, one of them being 1; the next, silent, are 0 in x, so that the router
 * and the gate of the shared expert may have weights there, which reach dx and nothing else.
 *
 *     column of x      types (0 or 1)     silent (0)     the rest (-1, 0, 1)
 *     router weight    the logits         -1, 0, 1       0 */
#include <stdlib.h>
#include <string.h>

#include "case_data.h"

enum {
  TERMS = 5,   /* of a product that are not 0, about */
  TYPES = 8,   /* of tokens, at most */
  BELOW = -256 /* logit of an expert that is not to be chosen */
};
#define FAR 64 /* e^-64 is less than half of the last place of 1, in double */

/* -1, 0 or 1; 0 but for `terms` of `of`, at most half. */
static int64_t small(uint64_t bits, int64_t terms, int64_t of) {
  const uint64_t share = 2 * terms < of ? (uint64_t)((terms << 16) / of) : 1 << 15;
  return (bits & 0xffff) >= share ? 0 : bits >> 32 & 1 ? 1 : -1;
}

static void fill_small(struct sample *s, enum tensor id, int64_t of, double unit) {
  const struct shape *shape = &s->shape[id];
  for (int64_t i = 0; s->data[id] && i < shape_count(shape); i++)
    element_store(s->data[id], shape->element, i,
                  unit * (double)small(word(stream(s, (int)id), i), TERMS, of));
}

static bool saturates(const struct sample *s) {
  const moe_activation kind = s->problem.config.act.kind;
  return kind != MOE_ACT_RELU && kind != MOE_ACT_RELU2;
}

static void drop_signs(struct sample *s, enum tensor id) {
  const struct shape *shape = &s->shape[id];
  for (int64_t i = 0; s->data[id] && i < shape_count(shape); i++)
    if (element_load(s->data[id], shape->element, i) < 0) element_store(s->data[id], shape->element, i, 1);
}

/* Column c of h is a gate. */
static bool is_gate(const moe_act_desc *act, int64_t inter, int64_t c) {
  const int64_t group = act->interleave > 0 ? act->interleave : 1;
  if (!act->gated) return true;
  if (act->layout == MOE_LAYOUT_INTERLEAVED) return c / group % 2 == 0;
  return act->layout == MOE_LAYOUT_CONCAT_UP_FIRST ? c >= inter : c < inter;
}

/* The gates' part of W1 or b1, of `width` columns: not negative, and multiples of `unit`. */
static void raise_gates(struct sample *s, enum tensor id, int64_t inter, int64_t width, bool transposed,
                        double unit) {
  const struct shape *shape = &s->shape[id];
  const int64_t f2 = problem_halves(&s->problem) * inter;
  for (int64_t i = 0; s->data[id] && i < shape_count(shape); i++) {
    const double value = element_load(s->data[id], shape->element, i);
    const int64_t c = transposed ? i % f2 : i / width % f2;
    if (is_gate(&s->problem.config.act, inter, c))
      element_store(s->data[id], shape->element, i, unit * (value < 0 ? -value : value));
  }
}

/* A weight on the input may be as small as 1/k, or 1/2, and the gate must still be FAR. */
static void fill_experts(struct sample *s) {
  const moe_config *c = &s->problem.config;
  const int64_t width = problem_width(&s->problem);
  const bool far = saturates(s);
  const double gate = c->weight_on_input ? (double)(FAR * (c->topk > 2 ? c->topk : 2)) : FAR;
  fill_small(s, T_W1, width, 1);
  fill_small(s, T_B1, 2 * TERMS, 1);
  fill_small(s, T_W2, c->inter, far ? 1 / gate : 1);
  fill_small(s, T_B2, 2 * TERMS, 1);
  fill_small(s, T_SHARED_W1, c->hidden, 1);
  fill_small(s, T_SHARED_W2, c->shared_inter, far ? 1.0 / FAR : 1);
  fill_small(s, T_LATENT_DOWN, c->hidden, 1);
  fill_small(s, T_LATENT_UP, width, 1);
  if (!far) return;
  drop_signs(s, T_X);
  drop_signs(s, T_LATENT_DOWN);
  raise_gates(s, T_W1, c->inter, width, c->transposed, gate);
  raise_gates(s, T_B1, c->inter, 1, false, FAR);
  raise_gates(s, T_SHARED_W1, c->shared_inter, c->hidden, c->transposed, FAR);
}

/* The logits of one token or type, less the bias that is added to them. */
static void logits(const struct sample *s, const double *log_share, int64_t t, double *z) {
  const moe_config *c = &s->problem.config;
  const double chosen = c->router.score == MOE_SCORE_SQRT_SOFTPLUS ? 64 : 0; /* of score 8 */
  int32_t ids[MOE_MAX_TOPK];
  draw_experts(s, log_share, t, ids);
  for (int64_t e = 0; e < c->experts; e++) z[e] = BELOW;
  for (int64_t j = 0; j < c->topk; j++) z[ids[j]] = chosen;
  for (int64_t e = 0; e < c->experts && s->data[T_ROUTER_BIAS]; e++)
    z[e] -= element_load(s->data[T_ROUTER_BIAS], ELEMENT_FP32, e);
}

static void fill_router(struct sample *s, const double *log_share, int64_t types, int64_t silent) {
  const moe_config *c = &s->problem.config;
  const struct shape *router = &s->shape[T_ROUTER_WEIGHT], *given = &s->shape[T_LOGITS];
  double z[MOE_MAX_EXPERTS];
  fill_small(s, T_ROUTER_BIAS, 2 * TERMS, 8); /* a multiple of the spacing of bf16 at BELOW */
  fill_small(s, T_CORRECTION_BIAS, 2 * TERMS, 1);
  drop_signs(s, T_CORRECTION_BIAS);
  for (int64_t t = 0; s->data[T_LOGITS] && t < s->problem.tokens; t++) {
    logits(s, log_share, t, z);
    for (int64_t e = 0; e < c->experts; e++)
      element_store(s->data[T_LOGITS], given->element, t * c->experts + e, z[e]);
  }
  fill_small(s, T_ROUTER_WEIGHT, 2 * TERMS, 1);
  for (int64_t i = 0; s->data[T_ROUTER_WEIGHT] && i < c->hidden; i++) {
    if (i < types) logits(s, log_share, i, z);
    if (i >= types && i < types + silent) continue;
    for (int64_t e = 0; e < c->experts; e++)
      element_store(s->data[T_ROUTER_WEIGHT], router->element, e * c->hidden + i, i < types ? z[e] : 0);
  }
  fill_small(s, T_SHARED_GATE, 2 * TERMS, 1);
  for (int64_t i = 0; s->data[T_SHARED_GATE] && i < c->hidden; i++)
    if (i < types || i >= types + silent)
      element_store(s->data[T_SHARED_GATE], s->shape[T_SHARED_GATE].element, i, 0);
}

void fill_exact(struct sample *s, const double *log_share) {
  const moe_config *c = &s->problem.config;
  const int64_t quarter = c->hidden / 4;
  const int64_t types = c->entry != MOE_ENTRY_HIDDEN ? 0
                        : quarter < 1                ? 1
                        : quarter < TYPES            ? quarter
                                                     : TYPES;
  const int64_t silent = types || s->problem.shared_gate ? quarter : 0;
  float *weights = s->data[T_GIVEN_WEIGHTS];
  for (int64_t i = 0; weights && i < shape_count(&s->shape[T_GIVEN_WEIGHTS]); i++)
    weights[i] = (float)(1 << word(stream(s, T_GIVEN_WEIGHTS), i) % 3) / 2;
  fill_small(s, T_X, 2 * TERMS, 1);
  fill_small(s, T_DOUT, 4 * TERMS, 1);
  for (int id = T_DROUTER_WEIGHT; id < T_RESULTS; id++) fill_small(s, (enum tensor)id, 2 * TERMS, 8);
  fill_experts(s);
  fill_router(s, log_share, types, silent);
  for (int64_t t = 0; t < s->problem.tokens; t++)
    for (int64_t i = 0; i < types + silent; i++)
      element_store(s->data[T_X], s->shape[T_X].element, t * c->hidden + i,
                    i < types && (int64_t)(word(stream(s, T_COUNT + 1), t) % (uint64_t)types) == i);
}
