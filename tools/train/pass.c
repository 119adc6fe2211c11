/* SPDX-License-Identifier: Apache-2.0
 *
 * A pass through the model: forward, loss, backward. Straight-line calls; read it beside the formula in model.h.
 *
 * Every matrix product is the library's, as a product of one expert. A layer keeps its two inputs, q k v, what attention
 * gives, and the experts what moe_forward saves; normalised inputs are computed again in the backward. The gradient of the residual
 * stream is m->dx, to which each branch adds its own. */
#include "model.h"

#include <omp.h>
#include <string.h>

#include "model_parts.h"
#include "moeblas_ops.h"

#define TRY(call)                          \
  do {                                     \
    moe_status status_ = (call);           \
    if (status_ != MOE_OK) return status_; \
  } while (0)

/* Books the time since the last call under `what`. */
static void spent(struct model *m, enum model_time what) {
  const double now = omp_get_wtime();
  m->seconds[what] += now - m->mark;
  m->mark = now;
}

/* ---- dense products ------------------------------------------------------------------------------------------- */

enum direction {
  TO_OUTPUT,  /* out = x w^T,   w [n,k] */
  ADD_OUTPUT, /* out += x w^T */
  TO_INPUT    /* dx = dout w,   w [k,n] */
};

static moe_gemm_args gemm_args(const struct model *m, int64_t rows, int64_t n, int64_t k,
                               enum direction way) {
  moe_gemm_args g = MOE_INIT(moe_gemm_args);
  g.scratch = m->workspace;
  g.scratch_bytes = m->workspace_bytes;
  g.rows = rows;
  g.n = n;
  g.k = k;
  g.experts = 1;
  g.a_dtype = g.b_dtype = g.d_dtype = MOE_FP32;
  g.b_kn = way == TO_INPUT;
  g.accumulate = way == ADD_OUTPUT;
  return g;
}

static moe_status dense(const struct model *m, float *out, const float *x, const float *w, int64_t rows,
                        int64_t n, int64_t k, enum direction way) {
  moe_gemm_args g = gemm_args(m, rows, n, k, way);
  g.a = x;
  g.b = w;
  g.d = out;
  return moe_gemm(m->ctx, &g, NULL);
}

static moe_wgrad_args wgrad_args(const struct model *m, int64_t rows, int64_t n, int64_t k) {
  moe_wgrad_args g = MOE_INIT(moe_wgrad_args);
  g.scratch = m->workspace;
  g.scratch_bytes = m->workspace_bytes;
  g.rows = rows;
  g.m = n;
  g.n = k;
  g.experts = 1;
  g.a_dtype = g.b_dtype = g.d_dtype = MOE_FP32;
  return g;
}

/* dw [n,k] = dout^T x, and dx = dout w. */
static moe_status dense_backward(const struct model *m, float *dx, float *dw, const float *dout,
                                 const float *x, const float *w, int64_t rows, int64_t n, int64_t k) {
  moe_wgrad_args g = wgrad_args(m, rows, n, k);
  g.a = dout;
  g.b = x;
  g.d = dw;
  TRY(moe_wgrad(m->ctx, &g, NULL));
  return dense(m, dx, dout, w, rows, k, n, TO_INPUT);
}

size_t model_workspace(const struct model *m) {
  const int64_t dim = m->config.dim, width[] = {3 * dim, dim, MODEL_BYTES};
  size_t most = 0;
  for (int i = 0; i < 3; i++) {
    const moe_gemm_args out = gemm_args(m, m->tokens, width[i], dim, TO_OUTPUT);
    const moe_gemm_args in = gemm_args(m, m->tokens, dim, width[i], TO_INPUT);
    const moe_wgrad_args weight = wgrad_args(m, m->tokens, width[i], dim);
    const size_t bytes[] = {moe_gemm_scratch(m->ctx, &out), moe_gemm_scratch(m->ctx, &in),
                            moe_wgrad_scratch(m->ctx, &weight)};
    for (int j = 0; j < 3; j++) most = bytes[j] > most ? bytes[j] : most;
  }
  return most;
}

/* ---- forward -------------------------------------------------------------------------------------------------- */

static moe_status attention_forward(struct model *m, int64_t l, int64_t tokens) {
  struct layer *y = m->layer + l;
  const int64_t dim = m->config.dim;
  float *const kept = y->qkv + m->position * 3 * dim, *const qkv = m->position > 0 ? m->step_qkv : kept;
  rmsnorm_rstd(y->rstd1, y->x, tokens, dim);
  rmsnorm_apply(m->norm, y->x, y->rstd1, model_value(m, l, PART_NORM1), tokens, dim);
  spent(m, TIME_OTHER);
  TRY(dense(m, qkv, m->norm, model_value(m, l, PART_QKV), tokens, 3 * dim, dim, TO_OUTPUT));
  spent(m, TIME_DENSE);
  rope(&m->attention, qkv, m->rope + m->position * m->attention.width, 0);
  if (m->position > 0) {
    memcpy(kept, qkv, (size_t)(3 * dim) * sizeof *qkv);
    attention_step(&m->attention, y->mixed, y->qkv, m->position + 1);
  } else {
    attention(&m->attention, y->mixed, y->lse, qkv);
  }
  memcpy(y->x2, y->x, (size_t)(tokens * dim) * sizeof *y->x2);
  spent(m, TIME_ATTENTION);
  TRY(dense(m, y->x2, y->mixed, model_value(m, l, PART_PROJ), tokens, dim, dim, ADD_OUTPUT));
  spent(m, TIME_DENSE);
  return MOE_OK;
}

static moe_status experts_layer_forward(struct model *m, int64_t l, int64_t tokens) {
  struct layer *y = m->layer + l;
  const int64_t dim = m->config.dim;
  rmsnorm_rstd(y->rstd2, y->x2, tokens, dim);
  rmsnorm_apply(m->norm, y->x2, y->rstd2, model_value(m, l, PART_NORM2), tokens, dim);
  spent(m, TIME_OTHER);
  TRY(experts_forward(m->experts, l, tokens, m->norm, m->dnorm, y->counts, y->losses));
  add(l + 1 < m->config.layers ? y[1].x : m->x, y->x2, m->dnorm, tokens * dim);
  spent(m, TIME_EXPERTS);
  return MOE_OK;
}

/* What a pass begins with: the optimizer has changed the parameters since the last. */
static moe_status load_experts(struct model *m) {
  for (int64_t l = 0; l < m->config.layers; l++)
    TRY(experts_load(m->experts, l, model_value(m, l, PART_ROUTER),
                     m->config.balance == BALANCE_BIAS ? m->correction_bias + l * m->config.experts : NULL));
  spent(m, TIME_EXPERTS);
  return MOE_OK;
}

static moe_status forward(struct model *m, const uint8_t *input, int64_t sequences, int64_t length,
                          int64_t position) {
  const int64_t tokens = sequences * length, dim = m->config.dim, last = m->config.layers;
  m->mark = omp_get_wtime();
  m->attention.sequences = sequences;
  m->attention.length = length;
  m->position = position;
  if (position == 0) TRY(load_experts(m));
  embed(m->layer[0].x, m->value + m->param[0].offset, input, tokens, dim);
  for (int64_t l = 0; l < last; l++) {
    TRY(attention_forward(m, l, tokens));
    TRY(experts_layer_forward(m, l, tokens));
  }
  rmsnorm_rstd(m->rstd, m->x, tokens, dim);
  rmsnorm_apply(m->norm, m->x, m->rstd, model_value(m, last, PART_LAST_NORM), tokens, dim);
  spent(m, TIME_OTHER);
  TRY(dense(m, m->logits, m->norm, model_value(m, last, PART_HEAD), tokens, MODEL_BYTES, dim, TO_OUTPUT));
  spent(m, TIME_DENSE);
  return MOE_OK;
}

moe_status model_forward(struct model *m, const uint8_t *input, int64_t sequences, int64_t length) {
  return forward(m, input, sequences, length, 0);
}

moe_status model_step(struct model *m, uint8_t byte, int64_t position) {
  return forward(m, &byte, 1, 1, position);
}

moe_status model_loss(struct model *m, const uint8_t *input, const uint8_t *target, int64_t sequences,
                      int64_t length, double *loss) {
  TRY(model_forward(m, input, sequences, length));
  *loss = cross_entropy(m->logits, m->row_loss, target, sequences * length, MODEL_BYTES, 0);
  spent(m, TIME_OTHER);
  return MOE_OK;
}

/* ---- backward: m->dx holds the gradient of a layer's output, then of x2, then of x ------------------------------ */

static moe_status experts_layer_backward(struct model *m, int64_t l, int64_t tokens) {
  struct layer *y = m->layer + l;
  const float *gain = model_value(m, l, PART_NORM2);
  rmsnorm_apply(m->norm, y->x2, y->rstd2, gain, tokens, m->config.dim);
  spent(m, TIME_OTHER);
  TRY(experts_backward(m->experts, l, tokens, m->norm, m->dx, m->dnorm, model_grad(m, l, PART_ROUTER)));
  spent(m, TIME_EXPERTS);
  rmsnorm_backward(m->dx, model_grad(m, l, PART_NORM2), m->dnorm, y->x2, y->rstd2, gain, tokens,
                   m->config.dim, 1);
  spent(m, TIME_OTHER);
  return MOE_OK;
}

static moe_status attention_layer_backward(struct model *m, int64_t l, int64_t tokens) {
  struct layer *y = m->layer + l;
  const int64_t dim = m->config.dim;
  const float *gain = model_value(m, l, PART_NORM1);
  TRY(dense_backward(m, m->dmixed, model_grad(m, l, PART_PROJ), m->dx, y->mixed, model_value(m, l, PART_PROJ),
                     tokens, dim, dim));
  spent(m, TIME_DENSE);
  attention_backward(&m->attention, m->dqkv, m->dmixed, y->mixed, y->lse, y->qkv);
  rope(&m->attention, m->dqkv, m->rope, 1);
  spent(m, TIME_ATTENTION);
  rmsnorm_apply(m->norm, y->x, y->rstd1, gain, tokens, dim);
  spent(m, TIME_OTHER);
  TRY(dense_backward(m, m->dnorm, model_grad(m, l, PART_QKV), m->dqkv, m->norm, model_value(m, l, PART_QKV),
                     tokens, 3 * dim, dim));
  spent(m, TIME_DENSE);
  rmsnorm_backward(m->dx, model_grad(m, l, PART_NORM1), m->dnorm, y->x, y->rstd1, gain, tokens, dim, 1);
  spent(m, TIME_OTHER);
  return MOE_OK;
}

moe_status model_gradient(struct model *m, const uint8_t *input, const uint8_t *target, int64_t sequences,
                          int64_t length, double *loss) {
  const int64_t tokens = sequences * length, dim = m->config.dim, last = m->config.layers;
  TRY(model_forward(m, input, sequences, length));
  *loss = cross_entropy(m->logits, m->row_loss, target, tokens, MODEL_BYTES, 1);
  spent(m, TIME_OTHER);
  TRY(dense_backward(m, m->dnorm, model_grad(m, last, PART_HEAD), m->logits, m->norm,
                     model_value(m, last, PART_HEAD), tokens, MODEL_BYTES, dim));
  spent(m, TIME_DENSE);
  rmsnorm_backward(m->dx, model_grad(m, last, PART_LAST_NORM), m->dnorm, m->x, m->rstd,
                   model_value(m, last, PART_LAST_NORM), tokens, dim, 0);
  for (int64_t l = last - 1; l >= 0; l--) {
    TRY(experts_layer_backward(m, l, tokens));
    TRY(attention_layer_backward(m, l, tokens));
  }
  embed_backward(m->grad + m->param[0].offset, m->dx, input, tokens, dim);
  spent(m, TIME_OTHER);
  return MOE_OK;
}

moe_status model_rebalance(struct model *m, float rate) {
  if (m->config.balance != BALANCE_BIAS) return MOE_OK;
  for (int64_t l = 0; l < m->config.layers; l++) {
    moe_bias_update_args u = MOE_INIT(moe_bias_update_args);
    u.scratch = m->workspace;
    u.scratch_bytes = m->workspace_bytes;
    u.experts = m->config.experts;
    u.counts = m->layer[l].counts;
    u.rate = rate;
    u.bias = m->correction_bias + l * m->config.experts;
    TRY(moe_bias_update(m->ctx, &u, NULL));
  }
  return MOE_OK;
}
