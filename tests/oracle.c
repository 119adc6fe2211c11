/* SPDX-License-Identifier: Apache-2.0
 *
 * The oracle: experts, shared expert, latent projections and their gradients in double (the router is in
 * oracle_router.c). Everything is a plain loop over the formulas at the top of moeblas.h; the one device is that the
 * shared expert is a bank of one expert whose rows are the tokens, so that both use the same code.
 * Invariant: gradients are summed in [out,in] order and brought into the caller's order once, at the end. */
#include "oracle_internal.h"

static void round_all(double *v, int64_t n, moe_dtype dtype) {
  for (int64_t i = 0; i < n && dtype != MOE_DTYPE_DEFAULT; i++) v[i] = oracle_round(v[i], dtype);
}

/* ---- the activation on a row of h */

/* Interleaved halves alternate in blocks of `step` columns. */
static int64_t gate_column(const struct mlp *m, int64_t f) {
  const int64_t step = m->act->interleave;
  if (!m->act->gated || m->act->layout == MOE_LAYOUT_CONCAT_GATE_FIRST) return f;
  return m->act->layout == MOE_LAYOUT_CONCAT_UP_FIRST ? m->inter + f : f / step * 2 * step + f % step;
}

static int64_t up_column(const struct mlp *m, int64_t f) {
  if (m->act->layout == MOE_LAYOUT_INTERLEAVED) return gate_column(m, f) + m->act->interleave;
  return m->act->layout == MOE_LAYOUT_CONCAT_UP_FIRST ? f : m->inter + f;
}

static double gate_value(const moe_act_desc *act, double g) {
  return oracle_act(act->kind, g > act->gate_max ? act->gate_max : g, act->alpha, act->beta);
}

/* The masks are inclusive and look at the unclamped value. */
static double gate_slope(const moe_act_desc *act, double g) {
  return g > act->gate_max ? 0 : oracle_dact(act->kind, g, act->alpha, act->beta);
}

static double up_value(const moe_act_desc *act, double u) {
  const double c = u < act->up_min ? act->up_min : u > act->up_max ? act->up_max : u;
  return (act->up_beta > 0 ? act->up_beta * tanh(c / act->up_beta) : c) + act->up_offset;
}

static double up_slope(const moe_act_desc *act, double u) {
  if (u < act->up_min || u > act->up_max) return 0;
  return act->up_beta > 0 ? 1 - pow(tanh(u / act->up_beta), 2) : 1;
}

static double act_value(const struct mlp *m, const double *h, int64_t f) {
  const double gate = gate_value(m->act, h[gate_column(m, f)]);
  return m->act->gated ? gate * up_value(m->act, h[up_column(m, f)]) : gate;
}

static void act_backward(const struct mlp *m, const double *h, int64_t f, double da, double *dh) {
  const double g = h[gate_column(m, f)];
  const double u = m->act->gated ? h[up_column(m, f)] : 0;
  dh[gate_column(m, f)] = gate_slope(m->act, g) * da * (m->act->gated ? up_value(m->act, u) : 1);
  if (m->act->gated) dh[up_column(m, f)] = gate_value(m->act, g) * da * up_slope(m->act, u);
}

/* What a step of a slope may change dh by: da times the other half. */
static void most_backward(const struct mlp *m, const double *h, int64_t f, double da, double *most) {
  const int64_t gate = gate_column(m, f);
  most[gate] = fabs(da * (m->act->gated ? up_value(m->act, h[up_column(m, f)]) : 1));
  if (m->act->gated) most[up_column(m, f)] = fabs(da * gate_value(m->act, h[gate]));
}

/* ---- a bank of experts */

/* h = weight x W1^T + b1, a = act(h), y = a W2^T + b2; a is the act of the rounded h. */
static void row_forward(const struct mlp *m, int64_t e, int64_t r) {
  const double *x = m->x + m->token[r] * m->width, weight = m->weight_on_input ? m->weight[r] : 1;
  double *h = m->h + r * m->columns, *a = m->a + r * m->inter, *y = m->y + r * m->width;
  for (int64_t c = 0; c < m->columns; c++) {
    const double bias = m->b1 ? m->b1[e * m->columns + c] : 0;
    h[c] = weight * dot(x, m->w1 + (e * m->columns + c) * m->width, m->width) + bias;
  }
  if (m->h_sums) memcpy(m->h_sums + r * m->columns, h, (size_t)m->columns * sizeof *h);
  round_all(h, m->columns, m->rounding);
  for (int64_t f = 0; f < m->inter; f++) a[f] = act_value(m, h, f);
  round_all(a, m->inter, m->rounding);
  for (int64_t d = 0; d < m->width; d++) {
    const double bias = m->b2 ? m->b2[e * m->width + d] : 0;
    y[d] = dot(a, m->w2 + (e * m->width + d) * m->inter, m->inter) + bias;
  }
  round_all(y, m->width, m->rounding);
}

/* From the gradient of the combined output to dh, and a = weight * act(h), the operand of dW2; dweight on the way. */
static void down_backward(const struct mlp *m, int64_t e, int64_t r) {
  const double *g = m->dcombined + m->token[r] * m->width, *h = m->h + r * m->columns;
  const double weight = m->weight_on_input ? 1 : m->weight[r];
  double *da = m->da + r * m->inter, *a = m->a + r * m->inter, *dh = m->dh + r * m->columns;
  m->dweight[r] = m->b2 ? dot(g, m->b2 + e * m->width, m->width) : 0;
  for (int64_t d = 0; d < m->width; d++)
    add_scaled(da, g[d], m->w2 + (e * m->width + d) * m->inter, m->inter);
  round_all(da, m->inter, m->rounding);
  for (int64_t f = 0; f < m->inter; f++) {
    const double exact = act_value(m, h, f);
    m->dweight[r] += da[f] * exact;
    a[f] = weight * exact;
    act_backward(m, h, f, weight * da[f], dh);
    if (m->dh_most) most_backward(m, h, f, weight * da[f], m->dh_most + r * m->columns);
  }
  round_all(a, m->inter, m->rounding);
  round_all(dh, m->columns, m->rounding);
  for (int64_t d = 0; d < m->width; d++) {
    add_scaled(m->dw2 + (e * m->width + d) * m->inter, g[d], a, m->inter);
    m->db2[e * m->width + d] += weight * g[d];
  }
}

/* From dh to dx, dW1 and db1. A weight on the input is a factor of x W1^T, so its gradient is <dh W1, x>, and the
 * product of it and dh is never stored, hence never rounded. */
static void up_backward(const struct mlp *m, int64_t e, int64_t r) {
  const double *x = m->x + m->token[r] * m->width, weight = m->weight_on_input ? m->weight[r] : 1;
  double *dh = m->dh + r * m->columns, *dx = m->dx + r * m->width;
  for (int64_t c = 0; c < m->columns; c++) {
    const int64_t row = e * m->columns + c;
    add_scaled(dx, dh[c], m->w1 + row * m->width, m->width);
    add_scaled(m->dw1 + row * m->width, weight * dh[c], x, m->width);
    m->db1[row] += dh[c];
  }
  round_all(dx, m->width, m->rounding);
  if (!m->weight_on_input) return;
  m->dweight[r] = dot(dx, x, m->width);
  for (int64_t d = 0; d < m->width; d++) dx[d] *= weight;
}

/* Experts share nothing, so the bits do not depend on the threads. */
static void bank_run(const struct mlp *m, int backward) {
#pragma omp parallel for schedule(dynamic) if (m->offsets[m->experts] > 32)
  for (int64_t e = 0; e < m->experts; e++) {
    for (int64_t r = m->offsets[e]; r < m->offsets[e + 1]; r++) {
      if (m->token[r] < 0) continue;
      if (!backward) {
        row_forward(m, e, r);
      } else {
        down_backward(m, e, r);
        up_backward(m, e, r);
      }
    }
  }
}

/* to[token(r),:] += the row r of v, times its weight where asked. */
static void add_rows(const struct mlp *m, const double *v, int weighted, double *to) {
  for (int64_t r = 0; r < m->offsets[m->experts]; r++)
    if (m->token[r] >= 0)
      add_scaled(to + m->token[r] * m->width, weighted ? m->weight[r] : 1, v + r * m->width, m->width);
}

/* ---- dense projections of the live tokens, w [out,in] */

static void project(const struct run *w, const double *x, const double *weight, int64_t in, int64_t out,
                    double *y) {
  for (int64_t t = 0; t < w->tokens; t++)
    for (int64_t i = 0; i < out && w->live[t]; i++) y[t * out + i] += dot(x + t * in, weight + i * in, in);
}

/* Adds to dx and dweight, both of which other terms share. */
static void project_backward(const struct run *w, const double *x, const double *dy, const double *weight,
                             int64_t in, int64_t out, double *dx, double *dweight) {
  for (int64_t t = 0; t < w->tokens; t++)
    for (int64_t i = 0; i < out && w->live[t]; i++) {
      add_scaled(dx + t * in, dy[t * out + i], weight + i * in, in);
      add_scaled(dweight + i * in, dy[t * out + i], x + t * in, in);
    }
}

/* ---- configuration and memory */

static const float default_parameter[][2] = {
#define MOE_ACT(ENUM, value, fn, plain, gated, a, b, f, df) [value] = {a, b},
#include "moeblas_act.def"
#undef MOE_ACT
};

static void resolve_act(moe_act_desc *act) {
  if (act->alpha == 0) act->alpha = default_parameter[act->kind][0];
  if (act->beta == 0) act->beta = default_parameter[act->kind][1];
  if (act->gate_max == 0) act->gate_max = INFINITY;
  if (act->up_min == 0 && act->up_max == 0) {
    act->up_min = -INFINITY;
    act->up_max = INFINITY;
  }
  if (act->interleave == 0) act->interleave = 1;
}

/* The defaults of moeblas.h, as the floats that a caller would have written. */
static void resolve(moe_config *c) {
  if (c->dtype == MOE_DTYPE_DEFAULT) c->dtype = MOE_BF16;
  if (c->logits_dtype == MOE_DTYPE_DEFAULT) c->logits_dtype = MOE_FP32;
  if (c->grad_dtype == MOE_DTYPE_DEFAULT) c->grad_dtype = c->dtype;
  if (c->router.renorm_epsilon == 0) c->router.renorm_epsilon = 1e-20f;
  if (c->router.scale == 0) c->router.scale = 1;
  if (c->router.groups == 0) c->router.groups = 1;
  if (c->router.topk_groups == 0) c->router.topk_groups = 1;
  resolve_act(&c->act);
}

/* Zeroed, never of size 0. */
static void *zeros(struct run *w, int64_t count, size_t size) {
  void *block = calloc((size_t)(count > 0 ? count : 1), size);
  if (block == NULL) w->failed = 1;
  return block;
}
static double *output(struct run *w, int64_t count) { return zeros(w, count, sizeof(double)); }

static void *scratch(struct run *w, int64_t count, size_t size) {
  return w->block[w->blocks++] = zeros(w, count, size);
}
static double *doubles(struct run *w, int64_t count) { return scratch(w, count, sizeof(double)); }

/* to [cols,rows] = from [rows,cols], for each of `count` matrices. */
static void transpose(const double *from, double *to, int64_t count, int64_t rows, int64_t cols) {
  for (int64_t n = 0; n < count; n++)
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < cols; j++) to[(n * cols + j) * rows + i] = from[(n * rows + i) * cols + j];
}

/* The weights as [count,out,in]. */
static const double *canonical(struct run *w, const double *weight, int64_t count, int64_t out, int64_t in) {
  if (!w->c.transposed) return weight;
  double *copy = doubles(w, count * out * in);
  if (copy != NULL) transpose(weight, copy, count, in, out);
  return copy;
}

/* A gradient [count,out,in] into the caller's order and precision. */
static void deliver(struct run *w, double *grad, int64_t count, int64_t out, int64_t in) {
  if (w->o->staged != MOE_DTYPE_DEFAULT) round_all(grad, count * out * in, w->c.grad_dtype);
  for (int64_t n = 0; n < count && w->c.transposed; n++) {
    double *matrix = grad + n * out * in;
    transpose(matrix, w->transposer, 1, out, in);
    for (int64_t i = 0; i < out * in; i++) matrix[i] = w->transposer[i];
  }
}

static void allocate_bank(struct run *w, struct mlp *m, int64_t rows) {
  m->act = &w->c.act;
  m->columns = m->act->gated ? 2 * m->inter : m->inter;
  m->token = scratch(w, rows, sizeof *m->token);
  m->weight = doubles(w, rows);
  m->a = doubles(w, rows * m->inter);
  m->y = doubles(w, rows * m->width);
  m->w1 = canonical(w, m->w1, m->experts, m->columns, m->width);
  m->w2 = canonical(w, m->w2, m->experts, m->width, m->inter);
  if (w->o->dout == NULL) return;
  m->da = doubles(w, rows * m->inter);
  m->dh = doubles(w, rows * m->columns);
  m->dx = doubles(w, rows * m->width);
  m->dweight = doubles(w, rows);
  m->dw1 = output(w, m->experts * m->columns * m->width);
  m->dw2 = output(w, m->experts * m->width * m->inter);
}

static void allocate_routed(struct run *w) {
  struct oracle *o = w->o;
  struct mlp *m = &w->routed;
  const int64_t slots = w->tokens * w->topk;
  *m = (struct mlp){.experts = w->experts, .width = w->width, .inter = w->c.inter};
  m->weight_on_input = w->c.weight_on_input;
  m->rounding = o->staged;
  m->w1 = o->w1, m->w2 = o->w2, m->b1 = o->b1, m->b2 = o->b2;
  allocate_bank(w, m, slots);
  m->h = o->h = output(w, slots * m->columns);
  m->h_sums = o->h_sums = output(w, slots * m->columns);
  m->offsets = o->offsets = zeros(w, w->experts + 1, sizeof(int32_t));
  o->dw1 = m->dw1, o->dw2 = m->dw2;
  if (o->dout == NULL) return;
  m->dh_most = o->dh_most = output(w, slots * m->columns);
  m->db1 = o->db1 = output(w, m->experts * m->columns);
  m->db2 = o->db2 = output(w, m->experts * m->width);
}

static void allocate_shared(struct run *w) {
  struct oracle *o = w->o;
  struct mlp *m = &w->shared;
  *m = (struct mlp){.experts = 1, .width = w->hidden, .inter = w->c.shared_inter, .rounding = o->staged};
  m->x = o->x, m->dcombined = o->dout;
  m->w1 = o->shared_w1, m->w2 = o->shared_w2;
  allocate_bank(w, m, w->tokens);
  m->h = doubles(w, w->tokens * m->columns);
  m->offsets = scratch(w, 2, sizeof(int32_t));
  o->dshared_w1 = m->dw1, o->dshared_w2 = m->dw2;
  if (o->dout == NULL) return;
  m->db1 = doubles(w, m->columns);
  m->db2 = doubles(w, m->width);
  if (o->shared_gate) o->dshared_gate = output(w, w->hidden);
}

static void allocate_latent(struct run *w) {
  const int64_t latent = w->c.latent, hidden = w->hidden;
  w->latent_down = canonical(w, w->o->latent_down, 1, latent, hidden);
  w->latent_up = canonical(w, w->o->latent_up, 1, hidden, latent);
  w->latent_x = w->o->latent_x = output(w, w->tokens * latent);
  w->latent_y = doubles(w, w->tokens * latent);
  if (w->o->dout == NULL) return;
  w->latent_dx = doubles(w, w->tokens * latent);
  w->latent_dy = doubles(w, w->tokens * latent);
  w->o->dlatent_down = output(w, latent * hidden);
  w->o->dlatent_up = output(w, hidden * latent);
}

static void allocate_router(struct run *w) {
  struct oracle *o = w->o;
  o->keys = output(w, w->tokens * w->experts);
  o->raw_keys = output(w, w->tokens * w->experts);
  w->z = o->z = output(w, w->tokens * w->experts);
  w->score = doubles(w, w->tokens * w->experts);
  w->share = doubles(w, w->tokens * w->experts);
  w->logsumexp = doubles(w, w->tokens);
  w->raw = doubles(w, w->tokens * w->topk);
  w->slope = doubles(w, (oracle_sequences(w) + 1) * w->experts);
  w->slot_logit = doubles(w, w->topk);
  w->group_key = doubles(w, w->experts);
  w->dscore = doubles(w, w->experts);
  w->dshare = doubles(w, w->experts);
  w->taken = scratch(w, w->experts, 1);
  w->group_taken = scratch(w, w->experts, 1);
  if (o->dout == NULL) return;
  o->dlogits = output(w, w->tokens * w->experts);
  o->drouter_bias = output(w, w->experts);
  if (w->c.entry == MOE_ENTRY_HIDDEN) o->drouter_weight = output(w, w->experts * w->hidden);
}

static void allocate(struct run *w) {
  struct oracle *o = w->o;
  const int64_t slots = w->tokens * w->topk;
  o->out = output(w, w->tokens * w->hidden);
  o->ids = zeros(w, slots, sizeof *o->ids);
  o->weights = output(w, slots);
  o->counts = zeros(w, w->experts, sizeof *o->counts);
  o->row_of_slot = zeros(w, slots, sizeof *o->row_of_slot);
  w->slot_list = scratch(w, slots, sizeof *w->slot_list);
  w->live = scratch(w, w->tokens, 1);
  w->transposer =
      doubles(w, (2 * w->c.inter + 2 * w->c.shared_inter + w->c.latent) * (w->hidden + w->c.latent));
  allocate_routed(w);
  if (w->c.shared_inter > 0) allocate_shared(w);
  if (w->c.latent > 0) allocate_latent(w);
  if (w->has_router) allocate_router(w);
  if (o->dout == NULL) return;
  o->dx = output(w, w->tokens * w->hidden);
  o->dtopk_weights = output(w, slots);
}

/* ---- the layer */

/* Rows behind the last expert are treated as masked: nothing reads them. */
static void find_live(struct run *w) {
  for (int64_t t = 0; t < w->tokens; t++) {
    const int tail = w->c.entry == MOE_ENTRY_ROWS && t >= w->o->row_offset[w->experts];
    w->live[t] = !tail && !(w->o->padding_mask && w->o->padding_mask[t]);
    w->live_tokens += w->live[t];
  }
}

static void forward(struct run *w) {
  struct oracle *o = w->o;
  const int64_t values = w->tokens * w->hidden;
  if (w->c.latent > 0) {
    project(w, o->x, w->latent_down, w->hidden, w->c.latent, w->latent_x);
    round_all(w->latent_x, w->tokens * w->c.latent, o->staged);
  }
  w->routed.x = w->c.latent > 0 ? w->latent_x : o->x;
  bank_run(&w->routed, 0);
  add_rows(&w->routed, w->routed.y, !w->c.weight_on_input, w->c.latent > 0 ? w->latent_y : o->out);
  if (w->c.latent > 0) {
    round_all(w->latent_y, w->tokens * w->c.latent, o->staged);
    project(w, w->latent_y, w->latent_up, w->c.latent, w->hidden, o->out);
  }
  if (w->c.shared_inter > 0) {
    for (int64_t t = 0; t < w->tokens; t++) {
      if (!w->live[t]) continue;
      const int32_t r = w->shared.offsets[1]++;
      const double *x = o->x + t * w->hidden;
      w->shared.token[r] = t;
      w->shared.weight[r] = o->shared_gate ? logistic(dot(x, o->shared_gate, w->hidden)) : 1;
    }
    bank_run(&w->shared, 0);
    add_rows(&w->shared, w->shared.y, 1, o->out);
  }
  round_all(o->out, values, o->staged);
}

/* dx is left unrounded: the shared expert and the router still add to it. */
static void routed_backward(struct run *w) {
  struct oracle *o = w->o;
  const int64_t latent = w->c.latent;
  if (latent > 0) {
    project_backward(w, w->latent_y, o->dout, w->latent_up, latent, w->hidden, w->latent_dy, o->dlatent_up);
    round_all(w->latent_dy, w->tokens * latent, o->staged);
  }
  w->routed.dcombined = latent > 0 ? w->latent_dy : o->dout;
  bank_run(&w->routed, 1);
  add_rows(&w->routed, w->routed.dx, 0, latent > 0 ? w->latent_dx : o->dx);
  for (int64_t s = 0; s < w->tokens * w->topk; s++)
    if (o->row_of_slot[s] >= 0) o->dtopk_weights[s] = w->routed.dweight[o->row_of_slot[s]];
  if (latent == 0) return;
  round_all(w->latent_dx, w->tokens * latent, o->staged);
  project_backward(w, o->x, w->latent_dx, w->latent_down, w->hidden, latent, o->dx, o->dlatent_down);
}

static void shared_backward(struct run *w) {
  const struct mlp *m = &w->shared;
  bank_run(m, 1);
  add_rows(m, m->dx, 0, w->o->dx);
  for (int64_t r = 0; r < m->offsets[1] && w->o->shared_gate; r++) {
    const double dz = m->dweight[r] * m->weight[r] * (1 - m->weight[r]);
    add_scaled(w->o->dx + m->token[r] * w->hidden, dz, w->o->shared_gate, w->hidden);
    add_scaled(w->o->dshared_gate, dz, w->o->x + m->token[r] * w->hidden, w->hidden);
  }
}

/* The gradient of the router bias is the sum of dlogits as they are stored. */
static void router_backward(struct run *w) {
  struct oracle *o = w->o;
  const int64_t experts = w->experts;
  const int hidden = w->c.entry == MOE_ENTRY_HIDDEN;
  oracle_route_backward(w);
  if (o->staged != MOE_DTYPE_DEFAULT && !hidden)
    round_all(o->dlogits, w->tokens * experts, w->c.logits_dtype);
  for (int64_t t = 0; t < w->tokens; t++) add_scaled(o->drouter_bias, 1, o->dlogits + t * experts, experts);
  if (hidden)
    project_backward(w, o->x, o->dlogits, o->router_weight, w->hidden, experts, o->dx, o->drouter_weight);
}

static void deliver_all(struct run *w) {
  struct oracle *o = w->o;
  const struct mlp *m = &w->routed, *shared = &w->shared;
  const int64_t hidden = w->hidden, latent = w->c.latent;
  const moe_dtype grad = o->staged == MOE_DTYPE_DEFAULT ? MOE_DTYPE_DEFAULT : w->c.grad_dtype;
  round_all(o->dx, w->tokens * hidden, o->staged);
  deliver(w, o->dw1, m->experts, m->columns, m->width);
  deliver(w, o->dw2, m->experts, m->width, m->inter);
  round_all(o->db1, m->experts * m->columns, grad);
  round_all(o->db2, m->experts * m->width, grad);
  if (o->drouter_weight) round_all(o->drouter_weight, w->experts * hidden, grad);
  if (o->dshared_w1) deliver(w, o->dshared_w1, 1, shared->columns, hidden);
  if (o->dshared_w2) deliver(w, o->dshared_w2, 1, hidden, shared->inter);
  if (o->dshared_gate) round_all(o->dshared_gate, hidden, grad);
  if (o->dlatent_down) deliver(w, o->dlatent_down, 1, latent, hidden);
  if (o->dlatent_up) deliver(w, o->dlatent_up, 1, hidden, latent);
}

static void run_layer(struct run *w) {
  find_live(w);
  oracle_route(w);
  oracle_sort(w);
  forward(w);
  if (w->o->dout == NULL) return;
  routed_backward(w);
  if (w->c.shared_inter > 0) shared_backward(w);
  if (w->has_router) router_backward(w);
  deliver_all(w);
}

/* The i-th output array of doubles, NULL after the last. */
static double **output_array(struct oracle *o, size_t i) {
  double **all[] = {&o->out,          &o->keys,       &o->weights,       &o->h,
                    &o->dx,           &o->dlogits,    &o->dtopk_weights, &o->drouter_weight,
                    &o->drouter_bias, &o->dw1,        &o->db1,           &o->dw2,
                    &o->db2,          &o->dshared_w1, &o->dshared_w2,    &o->dshared_gate,
                    &o->dlatent_down, &o->dlatent_up, &o->raw_keys,      &o->z,
                    &o->h_sums,       &o->latent_x,   &o->dh_most};
  return i < sizeof all / sizeof *all ? all[i] : NULL;
}

int oracle_run(struct oracle *o) {
  struct run w = {.o = o, .c = *o->config, .tokens = o->tokens};
  resolve(&w.c);
  w.hidden = w.c.hidden, w.experts = w.c.experts, w.topk = w.c.topk;
  w.width = w.c.latent > 0 ? w.c.latent : w.c.hidden;
  w.has_router = w.c.entry == MOE_ENTRY_HIDDEN || w.c.entry == MOE_ENTRY_LOGITS;
  for (size_t i = 0; output_array(o, i); i++) *output_array(o, i) = NULL;
  o->ids = o->counts = o->row_of_slot = o->offsets = NULL;
  o->losses[0] = o->losses[1] = 0;
  allocate(&w);
  if (w.failed)
    oracle_free(o);
  else
    run_layer(&w);
  for (int i = 0; i < w.blocks; i++) free(w.block[i]);
  return w.failed ? -1 : 0;
}

void oracle_free(struct oracle *o) {
  int32_t **integers[] = {&o->ids, &o->counts, &o->row_of_slot, &o->offsets};
  for (size_t i = 0; output_array(o, i); i++) {
    free(*output_array(o, i));
    *output_array(o, i) = NULL;
  }
  for (size_t i = 0; i < sizeof integers / sizeof *integers; i++) {
    free(*integers[i]);
    *integers[i] = NULL;
  }
}
