/* SPDX-License-Identifier: Apache-2.0
 *
 * The shape of the model: parameters, memory, first values. What is computed with them is in pass.c.
 *
 * Parameters and memory are each laid out by one function that runs twice, first to count and then to place, so that
 * sizes and places cannot disagree. Invariant: every parameter starts at a multiple of ALIGN bytes. */
#include "model.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "model_parts.h"
#include "moeblas_ops.h"
#include "../random.h"
#include "text.h"

#define ALIGN 64 /* bytes; the library asks for 16 */

/* ---- parameters ----------------------------------------------------------------------------------------------- */

struct table {
  struct param *param; /* NULL: only count */
  int count;
  int64_t floats;
};

__attribute__((format(printf, 7, 8))) static void place(struct table *t, double init, int rank, int64_t a,
                                                        int64_t b, int64_t c, const char *format, ...) {
  const int64_t count = a * (rank > 1 ? b : 1) * (rank > 2 ? c : 1);
  if (t->param) {
    struct param *p = t->param + t->count;
    va_list list;
    va_start(list, format);
    vsnprintf(p->name, sizeof p->name, format, list);
    va_end(list);
    memcpy(p->shape, (int64_t[]){a, b, c}, sizeof p->shape);
    p->rank = rank;
    p->offset = t->floats;
    p->count = count;
    p->init = (float)init;
    p->decay = rank > 1;
  }
  t->count++;
  t->floats += (count + 15) / 16 * 16;
}

/* In the order of enum model_part. Matrices start at 1/sqrt(fan in); those that write into the residual stream are
 * smaller, so that its variance does not grow with depth; the head starts near 0, at a uniform guess. */
static void place_all(struct table *t, const struct model_config *c) {
  const double dense = 1 / sqrt((double)c->dim), depth = 1 / sqrt(2.0 * (double)c->layers);
  place(t, 0.5, 2, MODEL_BYTES, c->dim, 0, "embed");
  for (int l = 0; l < c->layers; l++) {
    place(t, 0, 1, c->dim, 0, 0, "layer.%d.norm1", l);
    place(t, dense, 2, 3 * c->dim, c->dim, 0, "layer.%d.qkv", l);
    place(t, dense * depth, 2, c->dim, c->dim, 0, "layer.%d.proj", l);
    place(t, 0, 1, c->dim, 0, 0, "layer.%d.norm2", l);
    place(t, 0.3 * dense, 2, c->experts, c->dim, 0, "layer.%d.router", l);
    place(t, dense, 3, c->experts, 2 * c->inter, c->dim, "layer.%d.w1", l);
    place(t, depth / sqrt((double)c->inter), 3, c->experts, c->dim, c->inter, "layer.%d.w2", l);
  }
  place(t, 0, 1, c->dim, 0, 0, "norm");
  place(t, 0.1 * dense, 2, MODEL_BYTES, c->dim, 0, "head");
}

int64_t model_params(const struct model_config *c) {
  const int64_t experts = c->layers * c->experts * 3 * c->inter * c->dim;
  return model_active_params(c) - c->dim + MODEL_BYTES * c->dim +
         (experts - c->layers * c->topk * 3 * c->inter * c->dim);
}

int64_t model_active_params(const struct model_config *c) {
  const int64_t attention = 4 * c->dim * c->dim, norms = 2 * c->dim, router = c->experts * c->dim;
  const int64_t experts = c->topk * 3 * c->inter * c->dim;
  return c->layers * (attention + norms + router + experts) + 2 * c->dim + MODEL_BYTES * c->dim;
}

void model_init(struct model *m, uint64_t seed) {
  for (int i = 0; i < m->params; i++) {
    const struct param *p = m->param + i;
    const uint64_t stream = random_at(seed, (uint64_t)i);
    float *value = m->value + p->offset;
#pragma omp parallel for schedule(static)
    for (int64_t j = 0; j < p->count; j++)
      value[j] = p->init > 0 ? p->init * random_normal(stream, (uint64_t)j) : 1;
  }
}

/* ---- memory --------------------------------------------------------------------------------------------------- */

struct carver {
  char *base; /* NULL: only count */
  size_t bytes;
};

static void *carve(struct carver *c, int64_t count, size_t element) {
  void *p = c->base ? c->base + c->bytes : NULL;
  c->bytes += ((size_t)count * element + ALIGN - 1) / ALIGN * ALIGN;
  return p;
}

static float *floats(struct carver *c, int64_t count) { return carve(c, count, sizeof(float)); }

/* What one layer keeps for its backward. */
static void carve_layer(struct carver *c, struct layer *y, const struct model *m) {
  const int64_t dim = m->config.dim;
  y->x = floats(c, m->tokens * dim);
  y->rstd1 = floats(c, m->tokens);
  y->lse = floats(c, m->tokens * m->config.heads);
  y->mixed = floats(c, m->tokens * dim);
  y->x2 = floats(c, m->tokens * dim);
  y->rstd2 = floats(c, m->tokens);
}

static void carve_all(struct carver *c, struct model *m) {
  const int64_t dim = m->config.dim, layers = m->config.layers;
  m->param = carve(c, m->params, sizeof *m->param);
  m->value = floats(c, m->count);
  m->grad = m->training ? floats(c, m->count) : NULL;
  m->correction_bias = floats(c, layers * m->config.experts);
  struct layer *layer = carve(c, layers, sizeof *layer), one;
  m->layer = layer;
  for (int64_t l = 0; l < layers; l++) {
    struct layer *y = layer ? layer + l : &one; /* not there yet while counting */
    if (m->training || l == 0)
      carve_layer(c, y, m);
    else if (layer)
      *y = layer[0];
    y->qkv = floats(c, m->tokens * 3 * dim);
    y->counts = carve(c, m->config.experts, sizeof *y->counts);
  }
  m->x = m->training || !layer ? floats(c, m->training ? m->tokens * dim : 0) : layer[0].x;
  m->rstd = floats(c, m->tokens);
  m->norm = floats(c, m->tokens * dim);
  m->dnorm = floats(c, m->tokens * dim);
  m->dx = m->training ? floats(c, m->tokens * dim) : NULL;
  m->dmixed = m->training ? floats(c, m->tokens * dim) : NULL;
  m->dqkv = m->training ? floats(c, m->tokens * 3 * dim) : NULL;
  m->step_qkv = floats(c, 3 * dim);
  m->logits = floats(c, m->tokens * MODEL_BYTES);
  m->row_loss = carve(c, m->tokens, sizeof *m->row_loss);
  m->rope = floats(c, m->config.sequence * m->attention.width);
  m->attention.scratch = floats(c, attention_scratch(&m->attention));
  m->workspace = carve(c, (int64_t)m->workspace_bytes, 1);
}

static int allocate(struct model *m) {
  struct carver carver = {NULL, 0};
  carve_all(&carver, m);
  carver.base = m->memory = aligned_alloc(ALIGN, carver.bytes);
  if (!m->memory) return 0;
  memset(m->memory, 0, carver.bytes);
  carver.bytes = 0;
  carve_all(&carver, m);
  struct table table = {m->param, 0, 0};
  place_all(&table, &m->config);
  rope_table(m->rope, m->config.sequence, m->attention.width);
  return 1;
}

static struct experts *create_experts(const struct model *m, moe_context *ctx, char *error,
                                      size_t error_bytes) {
  const struct model_config *c = &m->config;
  const int64_t first = model_offset(m, 0, PART_ROUTER);
  const struct experts_run run = {.w1 = model_offset(m, 0, PART_W1) - first,
                                  .w2 = model_offset(m, 0, PART_W2) - first,
                                  .floats = model_offset(m, 1, PART_NORM1) - first};
  moe_config config = MOE_CONFIG_INIT;
  config.hidden = c->dim;
  config.inter = c->inter;
  config.experts = c->experts;
  config.topk = c->topk;
  config.dtype = c->dtype == MOE_BF16 ? MOE_BF16 : MOE_FP32;
  config.router_dtype = config.grad_dtype = MOE_FP32;
  config.act = (moe_act_desc){.kind = MOE_ACT_SILU, .gated = 1};
  config.router.renormalize = 1;
  if (c->balance == BALANCE_LOSS) {
    config.router.balance = MOE_BALANCE_BATCH;
    config.router.balance_coeff = 0.01f;
    config.router.z_coeff = 1e-3f;
  } else {
    config.router.score = MOE_SCORE_SIGMOID;
  }
  return experts_create(m->ctx, ctx, &config, &run, c->layers, m->tokens, m->training, error, error_bytes);
}

/* Fills in what follows from the configuration. */
static int create(struct model *m, moe_context *experts_ctx, char *error, size_t error_bytes) {
  struct table table = {NULL, 0, 0};
  place_all(&table, &m->config);
  m->params = table.count;
  m->count = table.floats;
  m->attention = (struct attention){
      .length = m->config.sequence, .heads = m->config.heads, .width = m->config.dim / m->config.heads};
  m->workspace_bytes = model_workspace(m);
  if (m->workspace_bytes == SIZE_MAX || !allocate(m)) {
    text_fail(0, error, error_bytes, "not enough memory for the model and %lld tokens", (long long)m->tokens);
    return 0;
  }
  m->experts = create_experts(m, experts_ctx, error, error_bytes);
  return m->experts != NULL;
}

struct model *model_create(moe_context *ctx, moe_context *experts_ctx, const struct model_config *config,
                           int64_t tokens, int training, char *error, size_t error_bytes) {
  if (config->dim % (2 * config->heads) || config->experts % 4) {
    text_fail(0, error, error_bytes, "dim %d must be a multiple of 2 heads (%d), and experts (%d) of 4",
              (int)config->dim, (int)config->heads, (int)config->experts);
    return NULL;
  }
  struct model *m = calloc(1, sizeof *m);
  if (!m) {
    text_fail(0, error, error_bytes, "not enough memory for the model");
    return NULL;
  }
  *m = (struct model){.config = *config, .ctx = ctx, .tokens = tokens, .training = training};
  if (create(m, experts_ctx, error, error_bytes)) return m;
  model_destroy(m);
  return NULL;
}

void model_destroy(struct model *m) {
  if (!m) return;
  experts_destroy(m->experts);
  free(m->memory);
  free(m);
}
