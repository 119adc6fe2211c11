/* SPDX-License-Identifier: Apache-2.0
 * The backward pass, as a straight line of ops. Read layer.c and forward.c first. */

#include "layer.h"

/* Where the gradients of a set of experts go; NULL: not wanted. */
struct expert_grads {
  void *dw1, *db1, *dw2, *db2;
  float *dweights; /* by slot */
  bool wants_dx;
  void *dx_rows; /* made by run_experts: [R,D] gradient of each row's x, without a weight on the input */
};

/* d[E,m,n] = sum over rows of A^T B; the other way round when weights are stored transposed. */
static moe_status weight_grad(struct run *run, const struct experts *e, const void *a, int64_t m,
                              int64_t a_topk, const void *b, int64_t n, int64_t b_topk, const float *weights,
                              void *d, int accumulate) {
  const moe_config *c = run->config;
  const bool swap = c->transposed;
  if (d == NULL) return MOE_OK;
  RUN(run, wgrad, .rows = e->rows, .m = swap ? n : m, .n = swap ? m : n, .experts = e->count,
      .row_offset = e->map.row_offset, .row_slot = e->map.row_slot, .a = swap ? b : a, .a_dtype = c->dtype,
      .a_gather_topk = swap ? b_topk : a_topk, .b = swap ? a : b, .b_dtype = c->dtype,
      .b_gather_topk = swap ? a_topk : b_topk, .weights = weights, .d = d, .d_dtype = c->grad_dtype,
      .accumulate = accumulate);
  return MOE_OK;
}

static moe_status bias_grad(struct run *run, const struct experts *e, const void *v, int64_t n, int64_t topk,
                            const float *weights, void *d, int accumulate) {
  if (d == NULL) return MOE_OK;
  RUN(run, bias_grad, .rows = e->rows, .n = n, .experts = e->count, .row_offset = e->map.row_offset,
      .row_slot = e->map.row_slot, .gather_topk = topk, .v = v, .v_dtype = run->config->dtype,
      .weights = weights, .d = d, .d_dtype = run->config->grad_dtype, .accumulate = accumulate);
  return MOE_OK;
}

/* The up projection once more; the same bits as in the forward pass. `rows` [R,D] is for x in order. */
static moe_status recompute_h(struct run *run, const struct experts *e, void *h, void *rows) {
  const moe_config *c = run->config;
  struct operand x;
  TRY(moe_order_rows(run, e, e->x, rows, false, &x));
  RUN(run, gemm, .rows = e->rows, .n = moe_preact_width(&c->act, e->inter), .k = e->width,
      .experts = e->count, .row_offset = e->map.row_offset, .row_slot = e->map.row_slot,
      .gather_topk = x.topk, .a = x.data, .a_dtype = c->dtype, .b = e->w1, .b_dtype = c->dtype,
      .b_kn = c->transposed, .weights = e->weight_on_input ? e->weights : NULL, .bias = e->b1,
      .bias_dtype = c->dtype, .d = h, .d_dtype = c->dtype);
  return MOE_OK;
}

/* Where the gradient of the output may lie in order [R,D]: dW1 is written last and till then free, unless it is added to. */
static void *place_of_dy(const struct run *run, const struct experts *e, const struct expert_grads *d,
                         int accumulate) {
  const moe_config *c = run->config;
  const int64_t f2 = moe_preact_width(&c->act, e->inter);
  const bool fits =
      e->rows * (int64_t)moe_dtype_bytes(c->dtype) <= e->count * f2 * (int64_t)moe_dtype_bytes(c->grad_dtype);
  return fits && !accumulate ? d->dw1 : NULL;
}

/* From g = dout [T,D] to every gradient of these experts. h is the saved one, or NULL: computed again. The rows of dx stay
 * on the workspace. */
static moe_status run_experts(struct run *run, const struct experts *e, const void *g, const void *h,
                              struct expert_grads *d, int accumulate) {
  const moe_config *c = run->config;
  const int64_t f2 = moe_preact_width(&c->act, e->inter);
  const float *out_weights = e->weight_on_input ? NULL : e->weights;
  const float *in_weights = e->weight_on_input ? e->weights : NULL;
  /* in turn x in order, weight * a [R,F] up to dW2, x in order once more, the rows of dx [R,D] */
  void *rows = moe_take(&run->workspace, e->rows * (e->inter > e->width ? e->inter : e->width), c->dtype);
  void *wa = d->dw2 ? rows : NULL;
  struct operand x, dy;
  const size_t mark = run->workspace.used;
  void *dh = moe_take(&run->workspace, e->rows * f2, c->dtype);
  d->dx_rows = d->wants_dx ? rows : NULL;
  if (h == NULL) TRY(recompute_h(run, e, dh, rows)); /* and then overwritten in place by its gradient */
  TRY(moe_order_rows(run, e, g, place_of_dy(run, e, d, accumulate), false, &dy));
  RUN(run, gemm, .rows = e->rows, .n = e->inter, .k = e->width, .experts = e->count,
      .row_offset = e->map.row_offset, .row_slot = e->map.row_slot, .gather_topk = dy.topk, .a = dy.data,
      .a_dtype = c->dtype, .b = e->w2, .b_dtype = c->dtype, .b_kn = !c->transposed,
      .epilogue = MOE_EPILOGUE_DACT, .weights = out_weights, .d = wa, .d_dtype = c->dtype, .act = &c->act,
      .h = h ? (void *)h : dh, .dh = dh, .dweights = e->weight_on_input ? NULL : d->dweights,
      .dot_bias = e->b2, .bias_dtype = c->dtype);
  TRY(weight_grad(run, e, dy.data, e->width, dy.topk, wa, e->inter, 0, NULL, d->dw2, accumulate));
  TRY(bias_grad(run, e, g, e->width, e->topk, out_weights, d->db2, accumulate));
  TRY(bias_grad(run, e, dh, f2, 0, NULL, d->db1, accumulate));
  TRY(moe_order_rows(run, e, e->x, d->dw1 ? rows : NULL, true, &x));
  TRY(weight_grad(run, e, dh, f2, 0, x.data, e->width, x.topk, in_weights, d->dw1, accumulate));
  if (d->dx_rows != NULL)
    RUN(run, gemm, .rows = e->rows, .n = e->width, .k = f2, .experts = e->count,
        .row_offset = e->map.row_offset, .row_slot = e->map.row_slot, .a = dh, .a_dtype = c->dtype,
        .b = e->w1, .b_dtype = c->dtype, .b_kn = !c->transposed, .d = d->dx_rows, .d_dtype = c->dtype);
  if (e->weight_on_input && d->dweights != NULL) /* h = p (x W1^T) + b1, so dp = <x, dh W1> */
    RUN(run, combine_backward, .tokens = run->tokens, .hidden = e->width, .topk = e->topk, .rows = e->rows,
        .slot_row = e->map.slot_row, .row_end = e->map.row_offset ? e->map.row_offset + e->count : NULL,
        .y = d->dx_rows, .y_dtype = c->dtype, .dout = e->x, .dout_dtype = c->dtype, .dweights = d->dweights);
  run->workspace.used = mark;
  return MOE_OK;
}

/* dx [T,H] has up to four contributions: of the router, the experts, the gate of the shared expert and that expert. */
struct dx {
  void *out;  /* NULL: not wanted */
  float *sum; /* of the contributions so far, in fp32; NULL: there is only one, which goes straight to out */
  bool started; /* sum holds something */
};

/* dx += A [T,k] B [k,H]. */
static moe_status add_product(struct run *run, struct dx *dx, const void *a, moe_dtype a_dtype, const void *b,
                              moe_dtype b_dtype, int64_t k, bool b_kn) {
  const moe_config *c = run->config;
  if (dx->out == NULL) return MOE_OK;
  RUN(run, gemm, .rows = run->tokens, .n = c->hidden, .k = k, .experts = 1, .a = a, .a_dtype = a_dtype,
      .b = b, .b_dtype = b_dtype, .b_kn = b_kn, .d = dx->sum ? (void *)dx->sum : dx->out,
      .d_dtype = dx->sum ? MOE_FP32 : c->dtype, .accumulate = dx->started);
  dx->started = true;
  return MOE_OK;
}

/* dx += the rows of each token; the last contribution is rounded into dx->out with all before. */
static moe_status add_rows(struct run *run, struct dx *dx, const struct experts *e, const void *rows,
                           bool last) {
  if (dx->out == NULL) return MOE_OK;
  TRY(moe_sum_rows(run, e, rows, e->weight_on_input, dx->started ? dx->sum : NULL, last ? dx->out : dx->sum,
                   last ? run->config->dtype : MOE_FP32));
  dx->started = true;
  return MOE_OK;
}

/* Gradients of one-expert parameters over the tokens that take part:  d[m,n] = A^T B, A [T,m], B [T,n] in the plan's dtype. */
static moe_status token_grad(struct run *run, const struct row_map *tokens, const void *a, moe_dtype a_dtype,
                             int64_t m, const void *b, int64_t n, void *d, int accumulate) {
  const moe_config *c = run->config;
  if (d == NULL) return MOE_OK;
  RUN(run, wgrad, .rows = run->tokens, .m = m, .n = n, .experts = 1, .row_offset = tokens->row_offset,
      .row_slot = tokens->row_slot, .a = a, .a_dtype = a_dtype, .a_gather_topk = 1, .b = b,
      .b_dtype = c->dtype, .b_gather_topk = 1, .d = d, .d_dtype = c->grad_dtype, .accumulate = accumulate);
  return MOE_OK;
}

/* Through the router: dlogits, its parameters, and its share of dx. */
static moe_status run_router(struct run *run, const moe_backward_args *io, const moe_params *params,
                             const moe_param_grads *grads, const struct saved *s,
                             const struct row_map *tokens, const float *dweights, struct dx *dx) {
  const moe_config *c = run->config;
  const size_t mark = run->workspace.used;
  const bool hidden = c->entry == MOE_ENTRY_HIDDEN;
  if (!hidden && io->dlogits == NULL && grads->router_bias == NULL) return MOE_OK;
  void *dlogits = io->dlogits ? io->dlogits : moe_take(&run->workspace, run->tokens * c->experts, MOE_FP32);
  const moe_dtype dtype = hidden ? MOE_FP32 : c->logits_dtype;
  RUN(run, route_backward, .tokens = run->tokens, .experts = c->experts, .topk = c->topk,
      .router = &c->router, .logits = hidden ? s->logits : io->logits, .logits_dtype = dtype,
      .router_bias = params->router_bias, .ids = s->ids, .slot_row = s->map.slot_row,
      .padding_mask = io->padding_mask, .dweights = dweights, .slopes = io->skip_losses ? NULL : s->slopes,
      .loss_scale = io->loss_scale, .dlosses = io->dlosses, .dlogits = dlogits, .dlogits_dtype = dtype);
  if (grads->router_bias != NULL)
    RUN(run, bias_grad, .rows = run->tokens, .n = c->experts, .experts = 1, .row_offset = tokens->row_offset,
        .row_slot = tokens->row_slot, .gather_topk = 1, .v = dlogits, .v_dtype = dtype,
        .d = grads->router_bias, .d_dtype = MOE_FP32, .accumulate = io->accumulate);
  if (hidden) {
    TRY(token_grad(run, tokens, dlogits, MOE_FP32, c->experts, io->x, c->hidden, grads->router_weight,
                   io->accumulate));
    TRY(add_product(run, dx, dlogits, MOE_FP32, params->router_weight, c->router_dtype, c->experts, true));
  }
  run->workspace.used = mark;
  return MOE_OK;
}

/* Through the latent projections: dxl is the gradient of xl. */
static moe_status run_latent(struct run *run, const moe_backward_args *io, const moe_params *params,
                             const moe_param_grads *grads, const struct row_map *tokens, const void *dxl,
                             struct dx *dx) {
  const moe_config *c = run->config;
  const bool swap = c->transposed;
  TRY(token_grad(run, tokens, swap ? io->x : dxl, c->dtype, swap ? c->hidden : c->latent, swap ? dxl : io->x,
                 swap ? c->latent : c->hidden, grads->latent_down, io->accumulate));
  return add_product(run, dx, dxl, c->dtype, params->latent_down, c->dtype, c->latent, !c->transposed);
}

static moe_status latent_up_grad(struct run *run, const moe_backward_args *io, const struct saved *s,
                                 const moe_param_grads *grads, const struct row_map *tokens) {
  const moe_config *c = run->config;
  const bool swap = c->transposed;
  return token_grad(run, tokens, swap ? s->latent_out : io->dout, c->dtype, swap ? c->latent : c->hidden,
                    swap ? io->dout : s->latent_out, swap ? c->hidden : c->latent, grads->latent_up,
                    io->accumulate);
}

/* Back through latent_up: the gradient of what the experts gave. */
static moe_status run_latent_up(struct run *run, const moe_backward_args *io, const moe_params *params,
                                const moe_param_grads *grads, const struct saved *s,
                                const struct row_map *tokens, const void **g) {
  const moe_config *c = run->config;
  void *dlatent = moe_take(&run->workspace, run->tokens * c->latent, c->dtype);
  RUN(run, gemm, .rows = run->tokens, .n = c->latent, .k = c->hidden, .experts = 1, .a = io->dout,
      .a_dtype = c->dtype, .b = params->latent_up, .b_dtype = c->dtype, .b_kn = !c->transposed, .d = dlatent,
      .d_dtype = c->dtype);
  *g = dlatent;
  return latent_up_grad(run, io, s, grads, tokens);
}

/* The routed experts, their router and the latent projections. dx->sum is taken once dh is dead, and stays on the
 * workspace with all that lies below it. */
static moe_status run_routed(struct run *run, const moe_backward_args *io, const moe_params *params,
                             const moe_param_grads *grads, const struct saved *s,
                             const struct row_map *tokens, struct dx *dx) {
  const moe_config *c = run->config;
  struct experts e = moe_routed_experts(run, params, s);
  e.x = c->latent > 0 ? s->latent_x : io->x;
  if (!moe_has_router(c)) e.weights = io->given_weights;
  if (c->entry == MOE_ENTRY_ROWS) e.map.row_offset = (int32_t *)io->row_offset;
  const void *g = io->dout;
  if (c->latent > 0) TRY(run_latent_up(run, io, params, grads, s, tokens, &g));
  struct expert_grads d = {.dw1 = grads->w1, .db1 = grads->b1, .dw2 = grads->w2, .db2 = grads->b2};
  d.dweights = moe_has_router(c) ? moe_take(&run->workspace, e.rows, MOE_FP32) : io->dtopk_weights;
  if (!moe_has_router(c) && d.dweights != NULL) /* slots without a row stay 0 */
    RUN(run, zero, .data = d.dweights, .bytes = (size_t)e.rows * sizeof(float));
  d.wants_dx = dx->out != NULL || (c->weight_on_input && d.dweights != NULL) || grads->latent_down != NULL;
  TRY(run_experts(run, &e, g, s->h, &d, io->accumulate));
  if (dx->out != NULL && (c->entry == MOE_ENTRY_HIDDEN || c->shared_inter > 0))
    dx->sum = moe_take(&run->workspace, run->tokens * c->hidden, MOE_FP32);
  const size_t mark = run->workspace.used;
  if (moe_has_router(c)) TRY(run_router(run, io, params, grads, s, tokens, d.dweights, dx));
  if (c->latent == 0) return add_rows(run, dx, &e, d.dx_rows, c->shared_inter == 0);
  if (!d.wants_dx) return MOE_OK;
  void *dxl = moe_take(&run->workspace, run->tokens * c->latent, c->dtype);
  TRY(moe_sum_rows(run, &e, d.dx_rows, e.weight_on_input, NULL, dxl, c->dtype));
  TRY(run_latent(run, io, params, grads, tokens, dxl, dx));
  run->workspace.used = mark;
  return MOE_OK;
}

static moe_status run_gate(struct run *run, const moe_backward_args *io, const moe_params *params,
                           const moe_param_grads *grads, const struct saved *s, const struct row_map *tokens,
                           const float *dweights, struct dx *dx) {
  const moe_config *c = run->config;
  float *dlogits = moe_take(&run->workspace, run->tokens, MOE_FP32);
  RUN(run, route_backward, .tokens = run->tokens, .experts = 1, .topk = 1, .router = &moe_gate_router,
      .logits = s->gate_logits, .logits_dtype = MOE_FP32, .ids = s->gate_ids,
      .padding_mask = io->padding_mask, .dweights = dweights, .loss_scale = 1, .dlogits = dlogits,
      .dlogits_dtype = MOE_FP32);
  TRY(token_grad(run, tokens, dlogits, MOE_FP32, 1, io->x, c->hidden, grads->shared_gate, io->accumulate));
  return add_product(run, dx, dlogits, MOE_FP32, params->shared_gate, c->dtype, 1, true);
}

static moe_status run_shared(struct run *run, const moe_backward_args *io, const moe_params *params,
                             const moe_param_grads *grads, const struct saved *s,
                             const struct row_map *tokens, struct dx *dx) {
  struct experts e = moe_shared_experts(run, params, s);
  e.x = io->x;
  e.map = *tokens;
  struct expert_grads d = {.dw1 = grads->shared_w1, .dw2 = grads->shared_w2};
  if (params->shared_gate != NULL) {
    d.dweights = moe_take(&run->workspace, run->tokens, MOE_FP32);
    RUN(run, zero, .data = d.dweights, .bytes = (size_t)run->tokens * sizeof(float));
  }
  d.wants_dx = dx->out != NULL;
  TRY(run_experts(run, &e, io->dout, s->shared_h, &d, io->accumulate));
  if (params->shared_gate != NULL) TRY(run_gate(run, io, params, grads, s, tokens, d.dweights, dx));
  return add_rows(run, dx, &e, d.dx_rows, true);
}

moe_status moe_run_backward(struct run *run, moe_backward_args *io, const moe_params *params,
                            const moe_param_grads *grads) {
  const moe_config *c = run->config;
  struct saved s;
  struct row_map tokens = {0};
  struct dx dx = {.out = io->dx};
  moe_lay_out_saved(run, &run->saved, true, &s);
  TRY(moe_mask_tokens(run, io->token_count, &io->padding_mask));
  if (moe_has_router(c) || c->shared_inter > 0 || c->latent > 0)
    TRY(moe_map_tokens(run, io->padding_mask, &tokens));
  TRY(run_routed(run, io, params, grads, &s, &tokens, &dx));
  if (c->shared_inter > 0) return run_shared(run, io, params, grads, &s, &tokens, &dx);
  if (c->latent > 0 && dx.sum != NULL) /* only products so far: round their sum */
    RUN(run, combine, .tokens = run->tokens, .hidden = c->hidden, .addend = dx.sum, .out = io->dx,
        .out_dtype = c->dtype);
  return MOE_OK;
}
