/* SPDX-License-Identifier: Apache-2.0
 *
 * Where a derivative jumps. The gradient masks of a clamp, and the slope of relu, are steps: an element of h that fp32 noise
 * puts on the other side of one changes a whole term of dh, and no tolerance for rounding covers that. Such elements are
 * rare and can be told from the oracle's h: the noise must be able to move the stored value across the step. Behind a latent
 * projection the noise may first round an element of x the other way: those near a tie of rounding are known, too, and so is
 * what each does to h.
 * Invariant: an element excuses an error of the size of its own term, in the rows that have that term, and no other. */
#include <math.h>
#include <stdlib.h>

#include "check_kinks.h"

#define SLOPE 1.13 /* the largest of an activation that may be clamped; a square has no step in its slope */
#define NOISE 1e-5 /* of an fp32 sum, relative to 1 + |value|: the limit of fp32 rows */

static bool is_gate(const moe_act_desc *act, int64_t inter, int64_t column) {
  const int64_t run = act->layout != MOE_LAYOUT_INTERLEAVED ? inter
                      : act->interleave > 0                 ? act->interleave
                                                            : 1;
  const bool first = column / run % 2 == 0;
  return !act->gated || (act->layout == MOE_LAYOUT_CONCAT_UP_FIRST ? !first : first);
}

static bool straddles(double h, double step, double noise, moe_dtype dtype) {
  return (oracle_round(h - noise, dtype) <= step) != (oracle_round(h + noise, dtype) <= step) ||
         (oracle_round(h - noise, dtype) < step) != (oracle_round(h + noise, dtype) < step);
}

static bool is_kink(const moe_config *config, int64_t column, double h, double noise) {
  const moe_act_desc *act = &config->act;
  const moe_dtype dtype = config->dtype;
  if (is_gate(act, config->inter, column))
    return (act->gate_max > 0 && straddles(h, (double)act->gate_max, noise, dtype)) ||
           (act->kind == MOE_ACT_RELU && straddles(h, 0, noise, dtype));
  if (act->up_min == 0 && act->up_max == 0) return false;
  return straddles(h, (double)act->up_min, noise, dtype) || straddles(h, (double)act->up_max, noise, dtype);
}

/* How far element i of a token's latent x is moved where fp32 noise rounds it the other way; mostly 0. */
static double latent_jump(double x, moe_dtype dtype) {
  const double noise = NOISE * (1 + fabs(x));
  return dtype == MOE_FP32 ? 0 : oracle_round(x + noise, dtype) - oracle_round(x - noise, dtype);
}

/* What the latents of a row that may be rounded the other way do to its element of h in `column`. */
static double latent_noise(const struct sample *s, const struct reference *r, int64_t token, int64_t expert,
                           int64_t column) {
  const moe_config *c = &s->problem.config;
  const int64_t width = c->act.gated ? 2 * c->inter : c->inter;
  double noise = 0;
  for (int64_t i = 0; i < c->latent; i++) {
    const double jump = latent_jump(r->ideal.latent_x[token * c->latent + i], c->dtype);
    if (jump == 0) continue;
    const int64_t at =
        c->transposed ? (expert * c->latent + i) * width + column : (expert * width + column) * c->latent + i;
    noise += jump * fabs(r->input[T_W1][at]);
  }
  return noise;
}

/* ---- what a step changes ------------------------------------------------------------------------------------------ */

struct kink {
  const struct sample *s;
  const struct reference *r;
  int64_t token, expert, column;
  double dh; /* what dh may be off by */
  double p;  /* weight on the input, or 1 */
};

static double norm_of(const double *v, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; i++) sum += v[i] * v[i];
  return sqrt(sum);
}

static double w1_at(const struct kink *k, int64_t i) {
  const moe_config *c = &k->s->problem.config;
  const int64_t width = c->act.gated ? 2 * c->inter : c->inter, in = problem_width(&k->s->problem);
  return k->r->input[T_W1][c->transposed ? (k->expert * in + i) * width + k->column
                                         : (k->expert * width + k->column) * in + i];
}

static double latent_down_at(const struct kink *k, int64_t latent, int64_t hidden) {
  const moe_config *c = &k->s->problem.config;
  return k->r
      ->input[T_LATENT_DOWN][c->transposed ? hidden * c->latent + latent : latent * c->hidden + hidden];
}

/* The norm of the row of W1 as dx sees it. */
static double reach(const struct kink *k) {
  const moe_config *c = &k->s->problem.config;
  double sum = 0;
  for (int64_t h = 0; h < c->hidden; h++) {
    double at = 0;
    for (int64_t i = 0; i < c->latent; i++) at += w1_at(k, i) * latent_down_at(k, i, h);
    if (c->latent == 0) at = w1_at(k, h);
    sum += at * at;
  }
  return sqrt(sum);
}

static void excuse_latent(const struct kink *k, double dh, struct kinks *to) {
  const moe_config *c = &k->s->problem.config;
  const double *x = k->r->input[T_X] + k->token * c->hidden;
  double w1 = 0;
  for (int64_t i = 0; i < c->latent; i++) w1 += w1_at(k, i) * w1_at(k, i);
  for (int64_t i = 0; i < c->latent && !c->transposed; i++)
    to->latent[i] += dh * fabs(w1_at(k, i)) * norm_of(x, c->hidden);
  for (int64_t i = 0; i < c->hidden && c->latent && c->transposed; i++)
    to->latent[i] += dh * sqrt(w1) * fabs(x[i]);
}

/* With the weight on the input its gradient is dh (x W1^T), which the router hands on, times p at most, to x as well. */
static void excuse_router(const struct kink *k, struct kinks *to) {
  const moe_config *c = &k->s->problem.config;
  const double *x = k->r->input[T_X] + k->token * c->hidden, *wr = k->r->input[T_ROUTER_WEIGHT];
  const double *in = c->latent ? k->r->ideal.latent_x + k->token * c->latent : x;
  double product = 0;
  for (int64_t i = 0; i < problem_width(&k->s->problem); i++) product += w1_at(k, i) * in[i];
  const double change = k->dh * fabs(product),
               dlogits = problem_routed(&k->s->problem) ? 2 * k->p * change : 0;
  to->weight[k->token] += problem_routed(&k->s->problem) ? dlogits : change;
  to->router_bias += dlogits;
  to->router_weight += dlogits * norm_of(x, c->hidden);
  if (wr) to->token[k->token] += dlogits * norm_of(wr, c->experts * c->hidden);
}

static void excuse(const struct kink *k, struct kinks *to) {
  const moe_config *c = &k->s->problem.config;
  const int64_t width = c->act.gated ? 2 * c->inter : c->inter, in = problem_width(&k->s->problem);
  const double *x = c->latent ? k->r->ideal.latent_x + k->token * in : k->r->input[T_X] + k->token * in;
  const double dh = k->p * k->dh;
  to->bias[k->expert] += k->dh;
  to->token[k->token] += dh * reach(k);
  for (int64_t i = 0; i < in && c->transposed; i++) to->w1[k->expert * in + i] += dh * fabs(x[i]);
  if (!c->transposed) to->w1[k->expert * width + k->column] += dh * norm_of(x, in);
  excuse_latent(k, dh, to);
  if (c->weight_on_input) excuse_router(k, to);
}

/* ---- all of it ---------------------------------------------------------------------------------------------------- */

static void look_at_row(const struct sample *s, const struct reference *r, int64_t slot, int64_t expert,
                        struct kinks *kinks) {
  const moe_config *c = &s->problem.config;
  const struct oracle *o = r->has_staged ? &r->staged : &r->ideal;
  const int64_t width = c->act.gated ? 2 * c->inter : c->inter, at = o->row_of_slot[slot] * width;
  const double p = c->weight_on_input ? fabs(o->weights[slot]) : 1;
  struct kink k = {.s = s, .r = r, .token = slot / c->topk, .expert = expert, .p = p};
  for (k.column = 0; k.column < width; k.column++) {
    const double h = o->h_sums[at + k.column];
    const double noise = NOISE * (1 + fabs(h)) + p * latent_noise(s, r, k.token, expert, k.column);
    if (!is_kink(c, k.column, h, noise)) continue;
    k.dh = SLOPE * o->dh_most[at + k.column];
    excuse(&k, kinks);
  }
}

static bool has_steps(const moe_act_desc *act) {
  return act->kind == MOE_ACT_RELU || act->gate_max > 0 || act->up_min != 0 || act->up_max != 0;
}

bool check_kinks(const struct sample *s, const struct reference *r, struct kinks *kinks) {
  const moe_config *c = &s->problem.config;
  const int64_t tokens = s->problem.tokens, rows = s->shape[T_W1].rows, latent = s->shape[T_LATENT_DOWN].rows;
  *kinks = (struct kinks){.token = calloc((size_t)tokens + 1, sizeof(double)),
                          .weight = calloc((size_t)tokens + 1, sizeof(double)),
                          .bias = calloc((size_t)c->experts, sizeof(double)),
                          .w1 = calloc((size_t)rows + 1, sizeof(double)),
                          .latent = calloc((size_t)latent + 1, sizeof(double))};
  if (!kinks->token || !kinks->weight || !kinks->bias || !kinks->w1 || !kinks->latent) return false;
  if (!s->problem.backward || !has_steps(&c->act)) return true;
  for (int64_t slot = 0; slot < tokens * c->topk; slot++)
    if (r->ideal.row_of_slot[slot] >= 0) look_at_row(s, r, slot, r->ideal.ids[slot], kinks);
  return true;
}

double kinks_excuse(const struct kinks *kinks, enum tensor id, int64_t row) {
  switch ((int)id) {
  case T_DX: return kinks->token[row];
  case T_DB1: return kinks->bias[row];
  case T_DW1: return kinks->w1[row];
  case T_DLATENT_DOWN: return kinks->latent[row];
  case T_DTOPK_WEIGHTS:
  case T_DLOGITS: return kinks->weight[row];
  case T_DROUTER_WEIGHT: return kinks->router_weight;
  case T_DROUTER_BIAS: return kinks->router_bias;
  default: return 0;
  }
}

void kinks_free(struct kinks *kinks) {
  free(kinks->token);
  free(kinks->weight);
  free(kinks->bias);
  free(kinks->w1);
  free(kinks->latent);
}
