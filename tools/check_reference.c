/* SPDX-License-Identifier: Apache-2.0
 *
 * The references of `moeblas check`: the oracle in double throughout (ideal), rounded where the library rounds (staged), and
 * how large the terms are of which a result is the sum.
 *
 * For that the oracle runs once more, on the inputs' magnitudes or on their squares, with the choice and the weights as
 * they were and an activation above all others: relu2 above its kin, relu (the identity there) above the rest, nothing
 * clamped. From magnitudes comes the sum of the terms' magnitudes, which no order of summation can exceed; from squares the
 * square of what the result would be if the terms' signs were random, its usual size. Slopes are as large as the true
 * ones but for 1.13, the largest slope of silu and gelu. The weight p of a chosen expert changes with a logit by p at most,
 * so that what goes through the router of token t is m(t) = sum over j of p dp. */
#include "check_reference.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- the oracle's two runs ------------------------------------------------------------------------------------- */

static double *decode(const void *data, const struct shape *shape) {
  const int64_t count = shape_count(shape);
  double *values = malloc((size_t)(count + 1) * sizeof *values);
  for (int64_t i = 0; values && i < count; i++) values[i] = element_load(data, shape->element, i);
  return values;
}

bool reference_make(struct reference *r, const struct sample *s) {
  *r = (struct reference){0};
  for (int id = 0; id < T_INPUTS; id++) {
    if (s->data[id] == NULL || s->shape[id].element > ELEMENT_FP16) continue;
    r->input[id] = decode(s->data[id], &s->shape[id]);
    if (r->input[id] == NULL) return false;
  }
  return true;
}

struct oracle oracle_of(const struct sample *s, const struct reference *r) {
  return (struct oracle){.config = &s->problem.config,
                         .tokens = s->problem.tokens,
                         .x = r->input[T_X],
                         .logits = r->input[T_LOGITS],
                         .router_weight = r->input[T_ROUTER_WEIGHT],
                         .router_bias = r->input[T_ROUTER_BIAS],
                         .correction_bias = r->input[T_CORRECTION_BIAS],
                         .given_ids = s->data[T_GIVEN_IDS],
                         .given_weights = r->input[T_GIVEN_WEIGHTS],
                         .row_offset = s->data[T_ROW_OFFSET],
                         .padding_mask = s->data[T_MASK],
                         .global_counts = s->data[T_GLOBAL_COUNTS],
                         .w1 = r->input[T_W1],
                         .b1 = r->input[T_B1],
                         .w2 = r->input[T_W2],
                         .b2 = r->input[T_B2],
                         .shared_w1 = r->input[T_SHARED_W1],
                         .shared_w2 = r->input[T_SHARED_W2],
                         .shared_gate = r->input[T_SHARED_GATE],
                         .latent_down = r->input[T_LATENT_DOWN],
                         .latent_up = r->input[T_LATENT_UP],
                         .dout = r->input[T_DOUT]};
}

bool reference_run(struct reference *r, const struct sample *s, const struct run *run, bool staged) {
  const moe_dtype dtype = s->problem.config.dtype;
  struct oracle o = oracle_of(s, r);
  if (run) {
    o.use_ids = problem_routed(&s->problem) ? run_data(run, T_TOPK_IDS) : NULL;
    o.use_slot_row = s->problem.config.capacity_factor > 0 ? run_data(run, T_SLOT_ROW) : NULL;
    o.use_weights = problem_routed(&s->problem) ? run_data(run, T_TOPK_WEIGHTS) : NULL;
  }
  r->ideal = r->staged = o;
  r->staged.staged = dtype;
  if (oracle_run(&r->ideal)) return false;
  r->has_staged = staged || dtype != MOE_FP32 || s->shape[T_DLOGITS].element > ELEMENT_FP32;
  return !r->has_staged || oracle_run(&r->staged) == 0;
}

double *oracle_tensor(const struct oracle *o, enum tensor id) {
  switch ((int)id) {
  case T_OUT: return o->out;
  case T_TOPK_WEIGHTS: return o->weights;
  case T_LOSSES: return (double *)o->losses;
  case T_DX: return o->dx;
  case T_DLOGITS: return o->dlogits;
  case T_DTOPK_WEIGHTS: return o->dtopk_weights;
  case T_DROUTER_WEIGHT: return o->drouter_weight;
  case T_DROUTER_BIAS: return o->drouter_bias;
  case T_DW1: return o->dw1;
  case T_DB1: return o->db1;
  case T_DW2: return o->dw2;
  case T_DB2: return o->db2;
  case T_DSHARED_W1: return o->dshared_w1;
  case T_DSHARED_W2: return o->dshared_w2;
  case T_DSHARED_GATE: return o->dshared_gate;
  case T_DLATENT_DOWN: return o->dlatent_down;
  case T_DLATENT_UP: return o->dlatent_up;
  default: return NULL;
  }
}

/* ---- sizes of terms ------------------------------------------------------------------------------------------------- */

/* The layer with ids and weights given, and the activation above. */
static moe_config sizes_config(const moe_config *config) {
  moe_config c = *config;
  const bool square = c.act.kind == MOE_ACT_RELU2 || c.act.kind == MOE_ACT_RELU2_TANH;
  c.act.kind = square ? MOE_ACT_RELU2 : MOE_ACT_RELU;
  c.act.alpha = c.act.beta = c.act.up_beta = c.act.gate_max = c.act.up_min = c.act.up_max = 0;
  if (c.entry != MOE_ENTRY_ROWS) c.entry = MOE_ENTRY_IDS;
  return c;
}

/* |v| or v^2. */
static double *powers(const double *values, int64_t count, int power) {
  double *to = malloc((size_t)(count + 1) * sizeof *to);
  for (int64_t i = 0; to && i < count; i++) to[i] = power == 1 ? fabs(values[i]) : values[i] * values[i];
  return to;
}

/* The inputs. The gate of the shared expert is 0, where its slope is largest. */
static bool take_powers(const struct sample *s, const struct reference *r, int power, struct reference *m) {
  for (int id = 0; id < T_INPUTS; id++) {
    if (r->input[id] == NULL) continue;
    const int64_t count = shape_count(&s->shape[id]);
    m->input[id] = powers(r->input[id], count, power);
    if (m->input[id] == NULL) return false;
    if (id == T_SHARED_GATE) memset(m->input[id], 0, (size_t)count * sizeof(double));
  }
  return true;
}

/* What goes through the router: to every logit, its weight and bias, and to x. */
static void add_router(const struct sample *s, struct reference *r, const struct reference *m,
                       const struct oracle *o) {
  const int64_t topk = s->problem.config.topk, experts = s->problem.config.experts,
                hidden = s->problem.config.hidden;
  double *dx = r->size[T_DX], *dlogits = r->size[T_DLOGITS], *bias = r->size[T_DROUTER_BIAS],
         *weight = r->size[T_DROUTER_WEIGHT];
  for (int64_t t = 0; t < s->problem.tokens; t++) {
    double through = 0;
    for (int64_t i = t * topk; i < (t + 1) * topk; i++) through += o->weights[i] * o->dtopk_weights[i];
    for (int64_t e = 0; e < experts; e++) {
      if ((float)r->ideal.dlogits[t * experts + e] == 0) continue; /* nothing of this expert was asked */
      if (dlogits) dlogits[t * experts + e] = through;
      if (bias) bias[e] += through;
      for (int64_t i = 0; weight && i < hidden; i++) {
        weight[e * hidden + i] += through * m->input[T_X][t * hidden + i];
        dx[t * hidden + i] += through * m->input[T_ROUTER_WEIGHT][e * hidden + i];
      }
    }
  }
}

/* Copies of the results; the router's gradients, of which the oracle has none when ids are given, start at 0. */
static bool take_results(const struct sample *s, struct reference *r, struct oracle *o) {
  for (int i = T_INPUTS; i < T_RESULTS; i++) {
    const enum tensor id = (enum tensor)i;
    const bool routers = id == T_DLOGITS || id == T_DROUTER_WEIGHT || id == T_DROUTER_BIAS;
    const double *values = oracle_tensor(o, id);
    if (!s->shape[id].present || (!values && !routers) || id == T_LOSSES) continue;
    const int64_t count = shape_count(&s->shape[id]);
    r->size[id] = routers ? calloc((size_t)count + 1, sizeof(double)) : powers(values, count, 1);
    if (r->size[id] == NULL) return false;
  }
  return true;
}

bool reference_sizes(struct reference *r, const struct sample *s, int power) {
  const moe_config config = sizes_config(&s->problem.config);
  struct reference m = {0};
  double *weights = NULL;
  bool done = take_powers(s, r, power, &m);
  struct oracle o = oracle_of(s, &m);
  o.config = &config;
  o.logits = NULL;
  o.use_slot_row = r->ideal.row_of_slot;
  if (done && problem_routed(&s->problem)) {
    weights = powers(r->ideal.weights, s->problem.tokens * s->problem.config.topk, power);
    done = weights != NULL;
    o.given_ids = r->ideal.ids;
    o.given_weights = weights;
  }
  done = done && oracle_run(&o) == 0;
  if (done) {
    done = take_results(s, r, &o);
    if (done && problem_routed(&s->problem) && o.dx) add_router(s, r, &m, &o);
    oracle_free(&o);
  }
  for (int id = 0; id < T_INPUTS; id++) free(m.input[id]);
  free(weights);
  return done;
}

void reference_free(struct reference *r) {
  if (r->ideal.config) oracle_free(&r->ideal);
  if (r->has_staged) oracle_free(&r->staged);
  for (int id = 0; id < T_INPUTS; id++) free(r->input[id]);
  for (int id = 0; id < T_RESULTS; id++) free(r->size[id]);
}
