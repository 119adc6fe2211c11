/* SPDX-License-Identifier: Apache-2.0
 *
 * MoE layers on a back end, called with arrays of the host. All memory is had in experts_create, in one block of the back
 * end that one function lays out twice: first to count, then to place.
 *
 * Everything runs on the default stream, after which the copies are ordered, so that nothing else has to wait.
 * Invariant: where `apart` is not set, no array of the back end has a place here but saved and workspace. */
#include "experts.h"

#include <stdlib.h>

#include "moeblas_ops.h"
#include "text.h"

#define ALIGN 256 /* bytes; the library asks for 16 */
#define TRY(call)                          \
  do {                                     \
    moe_status status_ = (call);           \
    if (status_ != MOE_OK) return status_; \
  } while (0)

/* The back end's side of an array [tokens, hidden] of the host. */
struct port {
  float *plain;      /* as it travels, and as a layer in fp32 has it */
  uint16_t *rounded; /* as a layer in bf16 has it */
};

struct experts {
  moe_context *ctx;
  moe_plan *plan;
  moe_config config;
  struct experts_run run;
  int64_t layers, tokens;
  int training;
  int apart; /* the back end works on arrays of its own */
  int half;  /* and in bf16 */
  size_t saved_bytes;
  size_t workspace_bytes;
  /* memory of the back end */
  void *memory; /* owns the rest */
  char *saved;  /* [layers, saved_bytes] */
  void *workspace;
  float *params;               /* [layers, run.floats] */
  uint16_t *params16;          /* the same without the router's, rounded */
  float *dparams;              /* [run.floats] */
  float *bias;                 /* [layers, experts] */
  struct port x, result, dout; /* result: out or dx */
  int32_t *counts;
  float *losses;
  moe_params view[]; /* [layers] what experts_load took */
};

/* ---- memory --------------------------------------------------------------------------------------------------- */

static void *carve(struct experts *e, size_t *bytes, int64_t count, size_t element) {
  void *p = e->memory ? (char *)e->memory + *bytes : NULL;
  *bytes += ((size_t)count * element + ALIGN - 1) / ALIGN * ALIGN;
  return p;
}

static void carve_port(struct experts *e, size_t *bytes, struct port *p) {
  const int64_t count = e->tokens * e->config.hidden;
  p->plain = carve(e, bytes, count, sizeof *p->plain);
  p->rounded = e->half ? carve(e, bytes, count, sizeof *p->rounded) : NULL;
}

static size_t carve_all(struct experts *e) {
  const int64_t experts = e->config.experts;
  size_t bytes = 0;
  if (e->training) e->saved = carve(e, &bytes, e->layers, e->saved_bytes);
  e->workspace = carve(e, &bytes, 1, e->workspace_bytes);
  if (!e->apart) return bytes;
  e->params = carve(e, &bytes, e->layers * e->run.floats, sizeof(float));
  if (e->training) e->dparams = carve(e, &bytes, e->run.floats, sizeof(float));
  e->bias = carve(e, &bytes, e->layers * experts, sizeof(float));
  carve_port(e, &bytes, &e->x);
  carve_port(e, &bytes, &e->result);
  if (e->training) carve_port(e, &bytes, &e->dout);
  e->counts = carve(e, &bytes, experts, sizeof(int32_t));
  e->losses = carve(e, &bytes, 2, sizeof(float));
  if (e->half) e->params16 = carve(e, &bytes, e->layers * (e->run.floats - e->run.w1), sizeof(uint16_t));
  return bytes;
}

static moe_status open(struct experts *e) {
  TRY(moe_plan_create(&e->plan, e->ctx, &e->config));
  e->saved_bytes = (moe_plan_saved(e->plan, e->tokens) + ALIGN - 1) / ALIGN * ALIGN;
  e->workspace_bytes = moe_plan_workspace(e->plan, e->tokens);
  TRY(moe_memory_alloc(e->ctx, carve_all(e), &e->memory));
  carve_all(e);
  /* Between the parameters of a run there may be floats of nothing, which belong to the gradient's norm. */
  if (e->dparams) TRY(moe_memory_fill(e->ctx, e->dparams, 0, (size_t)e->run.floats * sizeof(float)));
  return moe_warmup(e->plan, NULL);
}

struct experts *experts_create(moe_context *host, moe_context *ctx, const moe_config *config,
                               const struct experts_run *run, int64_t layers, int64_t tokens, int training,
                               char *error, size_t error_bytes) {
  struct experts *e = calloc(1, sizeof *e + (size_t)layers * sizeof *e->view);
  if (!e) {
    text_fail(0, error, error_bytes, "not enough memory for %d MoE layers", (int)layers);
    return NULL;
  }
  e->ctx = ctx;
  e->config = *config;
  e->run = *run;
  e->layers = layers;
  e->tokens = tokens;
  e->training = training;
  e->half = config->dtype != MOE_FP32;
  e->apart = host != ctx || e->half;
  if (open(e) == MOE_OK) return e;
  text_fail(0, error, error_bytes, "%s", moe_last_error());
  experts_destroy(e);
  return NULL;
}

void experts_destroy(struct experts *e) {
  if (!e) return;
  moe_memory_free(e->ctx, e->memory);
  moe_plan_destroy(e->plan);
  free(e);
}

/* ---- to the back end and back ----------------------------------------------------------------------------------- */

static moe_status convert(const struct experts *e, void *y, moe_dtype y_dtype, const void *x,
                          moe_dtype x_dtype, int64_t count) {
  moe_convert_args c = MOE_INIT(moe_convert_args);
  c.scratch = e->workspace;
  c.scratch_bytes = e->workspace_bytes;
  c.count = count;
  c.x = x;
  c.x_dtype = x_dtype;
  c.y = y;
  c.y_dtype = y_dtype;
  return moe_convert(e->ctx, &c, NULL);
}

/* *there is where the layer finds what is at `host`. */
static moe_status send(const struct experts *e, const struct port *port, const void **there,
                       const float *host, int64_t count) {
  *there = host;
  if (!e->apart) return MOE_OK;
  *there = e->half ? (const void *)port->rounded : port->plain;
  TRY(moe_memory_copy(e->ctx, port->plain, host, (size_t)count * sizeof *host));
  return e->half ? convert(e, port->rounded, MOE_BF16, port->plain, MOE_FP32, count) : MOE_OK;
}

/* Where the layer writes what `fetch` brings to `host`. */
static void *result(const struct experts *e, float *host) {
  if (!e->apart) return host;
  return e->half ? (void *)e->result.rounded : e->result.plain;
}

static moe_status fetch(const struct experts *e, float *host, int64_t count) {
  const struct port *port = &e->result;
  if (!e->apart) return MOE_OK;
  if (e->half) TRY(convert(e, port->plain, MOE_FP32, port->rounded, MOE_BF16, count));
  return moe_memory_copy(e->ctx, host, port->plain, (size_t)count * sizeof *host);
}

moe_status experts_load(struct experts *e, int64_t layer, const float *params, const float *correction_bias) {
  const int64_t experts = e->config.experts, products = e->run.floats - e->run.w1;
  moe_params *view = e->view + layer;
  *view = (moe_params)MOE_PARAMS_INIT;
  if (e->apart) {
    float *there = e->params + layer * e->run.floats, *bias = e->bias + layer * experts;
    TRY(moe_memory_copy(e->ctx, there, params, (size_t)e->run.floats * sizeof *params));
    params = there;
    if (correction_bias) TRY(moe_memory_copy(e->ctx, bias, correction_bias, (size_t)experts * sizeof *bias));
    correction_bias = correction_bias ? bias : NULL;
  }
  view->router_weight = params;
  view->correction_bias = correction_bias;
  view->w1 = params + e->run.w1;
  view->w2 = params + e->run.w2;
  if (!e->half) return MOE_OK;
  uint16_t *rounded = e->params16 + layer * products;
  view->w1 = rounded;
  view->w2 = rounded + (e->run.w2 - e->run.w1);
  return convert(e, rounded, MOE_BF16, params + e->run.w1, MOE_FP32, products);
}

/* ---- the layer -------------------------------------------------------------------------------------------------- */

moe_status experts_forward(struct experts *e, int64_t layer, int64_t tokens, const float *x, float *out,
                           int32_t *counts, float *losses) {
  const int64_t activations = tokens * e->config.hidden;
  moe_forward_args f = MOE_FORWARD_ARGS_INIT;
  f.tokens = tokens;
  TRY(send(e, &e->x, &f.x, x, activations));
  f.params = e->view + layer;
  f.out = result(e, out);
  f.counts = e->apart ? e->counts : counts;
  f.losses = e->apart ? e->losses : losses;
  f.saved = e->training ? e->saved + (size_t)layer * e->saved_bytes : NULL;
  f.saved_bytes = e->training ? e->saved_bytes : 0;
  f.workspace = e->workspace;
  f.workspace_bytes = e->workspace_bytes;
  TRY(moe_forward(e->plan, &f, NULL));
  TRY(fetch(e, out, activations));
  if (!e->apart) return MOE_OK;
  TRY(moe_memory_copy(e->ctx, counts, e->counts, (size_t)e->config.experts * sizeof *counts));
  return moe_memory_copy(e->ctx, losses, e->losses, 2 * sizeof *losses);
}

moe_status experts_backward(struct experts *e, int64_t layer, int64_t tokens, const float *x,
                            const float *dout, float *dx, float *dparams) {
  const int64_t activations = tokens * e->config.hidden;
  float *there = e->apart ? e->dparams : dparams;
  moe_param_grads grads = MOE_PARAM_GRADS_INIT;
  grads.router_weight = there;
  grads.w1 = there + e->run.w1;
  grads.w2 = there + e->run.w2;
  moe_backward_args b = MOE_BACKWARD_ARGS_INIT;
  b.tokens = tokens;
  TRY(send(e, &e->x, &b.x, x, activations));
  TRY(send(e, &e->dout, &b.dout, dout, activations));
  b.params = e->view + layer;
  b.saved = e->saved + (size_t)layer * e->saved_bytes;
  b.saved_bytes = e->saved_bytes;
  b.workspace = e->workspace;
  b.workspace_bytes = e->workspace_bytes;
  b.dx = result(e, dx);
  b.grads = &grads;
  TRY(moe_backward(e->plan, &b, NULL));
  TRY(fetch(e, dx, activations));
  return e->apart ? moe_memory_copy(e->ctx, dparams, there, (size_t)e->run.floats * sizeof *dparams) : MOE_OK;
}
