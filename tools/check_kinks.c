/* SPDX-License-Identifier: Apache-2.0
 *
 * Where a derivative jumps. The gradient masks of a clamp, and the slope of relu, are steps: an element of h that fp32 noise
 * puts on the other side of one changes a whole term of dh, and no tolerance for rounding covers that. Such elements are
 * rare and can be told from the oracle's h: the noise must be able to move the stored value across the step. Behind a latent
 * projection the noise may first round an element of x the other way: those near a tie of rounding are known, too, and so is
 * what each does to h.
 * Invariant: an element excuses the token, the expert and the weights that it belongs to, and no other. */
#include <math.h>
#include <stdlib.h>

#include "check_kinks.h"

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

static void look_at_row(const struct sample *s, const struct reference *r, int64_t slot, int64_t expert,
                        struct kinks *kinks) {
  const moe_config *c = &s->problem.config;
  const struct oracle *o = r->has_staged ? &r->staged : &r->ideal;
  const int64_t width = c->act.gated ? 2 * c->inter : c->inter, token = slot / c->topk;
  const double *h = o->h_sums + o->row_of_slot[slot] * width;
  const double weight = c->weight_on_input ? fabs(o->weights[slot]) : 1;
  for (int64_t column = 0; column < width; column++) {
    const double noise = NOISE * (1 + fabs(h[column])) + weight * latent_noise(s, r, token, expert, column);
    if (!is_kink(c, column, h[column], noise)) continue;
    kinks->count++;
    kinks->token[token] = kinks->expert[expert] = kinks->column[expert * width + column] = true;
  }
}

bool check_kinks(const struct sample *s, const struct reference *r, struct kinks *kinks) {
  const moe_config *c = &s->problem.config;
  const bool steps =
      c->act.kind == MOE_ACT_RELU || c->act.gate_max > 0 || c->act.up_min != 0 || c->act.up_max != 0;
  const int64_t slots = s->problem.tokens * c->topk, width = c->act.gated ? 2 * c->inter : c->inter;
  *kinks = (struct kinks){.token = calloc((size_t)s->problem.tokens + 1, 1),
                          .expert = calloc((size_t)c->experts, 1),
                          .column = calloc((size_t)(c->experts * width), 1)};
  if (!kinks->token || !kinks->expert || !kinks->column) return false;
  for (int64_t slot = 0; steps && slot < slots; slot++)
    if (r->ideal.row_of_slot[slot] >= 0) look_at_row(s, r, slot, r->ideal.ids[slot], kinks);
  return true;
}

bool kinks_excuse(const struct sample *s, const struct kinks *kinks, enum tensor id, int64_t row) {
  const moe_config *c = &s->problem.config;
  if (kinks->count == 0) return false;
  switch ((int)id) {
  case T_DX: return kinks->token[row];
  case T_DB1: return kinks->expert[row];
  case T_DW1: return c->transposed ? kinks->expert[row / problem_width(&s->problem)] : kinks->column[row];
  case T_DLATENT_DOWN: return true;
  case T_DTOPK_WEIGHTS:
  case T_DLOGITS: return c->weight_on_input && kinks->token[row]; /* their gradient comes from dx there */
  case T_DROUTER_WEIGHT:
  case T_DROUTER_BIAS: return c->weight_on_input;
  default: return false;
  }
}

void kinks_free(struct kinks *kinks) {
  free(kinks->token);
  free(kinks->expert);
  free(kinks->column);
}
