/* SPDX-License-Identifier: Apache-2.0
 * The forward pass, as a straight line of ops. Read layer.c first. */

#include <math.h>

#include "layer.h"

/* Slots that an expert keeps; 0: all, also where the factor is so large that the product is no int64_t. */
static int64_t capacity(const moe_config *c, int64_t tokens) {
  const double slots = (double)tokens * (double)c->topk;
  const double limit = ceil(slots / (double)c->experts * (double)c->capacity_factor);
  return limit < slots ? (int64_t)limit : 0;
}

/* Scores, choice, losses, and the map from slots to rows. */
static moe_status route(struct run *run, const moe_forward_args *io, const moe_params *params,
                        struct saved *s) {
  const moe_config *c = run->config;
  const int64_t tokens = run->tokens;
  if (c->entry == MOE_ENTRY_HIDDEN)
    RUN(run, gemm, .rows = tokens, .n = c->experts, .k = c->hidden, .experts = 1, .a = io->x,
        .a_dtype = c->dtype, .b = params->router_weight, .b_dtype = c->router_dtype, .d = s->logits,
        .d_dtype = MOE_FP32);
  const void *logits = c->entry == MOE_ENTRY_HIDDEN ? s->logits : io->logits;
  const moe_dtype logits_dtype = c->entry == MOE_ENTRY_HIDDEN ? MOE_FP32 : c->logits_dtype;
  if (moe_has_router(c))
    RUN(run, route, .tokens = tokens, .experts = c->experts, .topk = c->topk, .router = &c->router,
        .logits = logits, .logits_dtype = logits_dtype, .router_bias = params->router_bias,
        .correction_bias = params->correction_bias, .given_ids = io->given_ids,
        .padding_mask = io->padding_mask, .ids = s->ids, .weights = s->weights);
  if (moe_has_losses(c))
    RUN(run, router_loss, .tokens = tokens, .experts = c->experts, .topk = c->topk, .router = &c->router,
        .logits = logits, .logits_dtype = logits_dtype, .router_bias = params->router_bias, .ids = s->ids,
        .padding_mask = io->padding_mask, .global_counts = io->global_counts, .losses = io->losses,
        .slopes = s->slopes);
  else if (io->losses != NULL)
    RUN(run, zero, .data = io->losses, .bytes = 2 * sizeof *io->losses);
  if (c->entry == MOE_ENTRY_ROWS) return MOE_OK;
  RUN(run, sort, .tokens = tokens, .experts = c->experts, .topk = c->topk,
      .ids = moe_has_router(c) ? s->ids : io->given_ids, .padding_mask = io->padding_mask,
      .weights = moe_has_router(c) ? s->weights : io->given_weights, .capacity = capacity(c, tokens),
      .drop = c->drop, .row_offset = s->map.row_offset, .row_slot = s->map.row_slot,
      .slot_row = s->map.slot_row, .counts = io->counts);
  return MOE_OK;
}

/* Up projection, activation, down projection: y [R,D] on the workspace, where up to then x may lie in order. h may be NULL: not kept. */
static moe_status run_experts(struct run *run, const struct experts *e, void *h, void *y) {
  const moe_config *c = run->config;
  const size_t mark = run->workspace.used;
  void *a = moe_take(&run->workspace, e->rows * e->inter, c->dtype);
  struct operand x;
  TRY(moe_order_rows(run, e, e->x, y, false, &x));
  RUN(run, gemm, .rows = e->rows, .n = moe_preact_width(&c->act, e->inter), .k = e->width,
      .experts = e->count, .row_offset = e->map.row_offset, .row_slot = e->map.row_slot,
      .gather_topk = x.topk, .a = x.data, .a_dtype = c->dtype, .b = e->w1, .b_dtype = c->dtype,
      .b_kn = c->transposed, .epilogue = MOE_EPILOGUE_ACT, .weights = e->weight_on_input ? e->weights : NULL,
      .bias = e->b1, .bias_dtype = c->dtype, .d = a, .d_dtype = c->dtype, .act = &c->act, .h = h);
  RUN(run, gemm, .rows = e->rows, .n = e->width, .k = e->inter, .experts = e->count,
      .row_offset = e->map.row_offset, .row_slot = e->map.row_slot, .a = a, .a_dtype = c->dtype, .b = e->w2,
      .b_dtype = c->dtype, .b_kn = c->transposed, .bias = e->b2, .bias_dtype = c->dtype, .d = y,
      .d_dtype = c->dtype);
  run->workspace.used = mark;
  return MOE_OK;
}

/* out = what the experts give a token; the shared expert, if any, comes on top of `partial` in run_shared. */
static moe_status run_routed(struct run *run, const moe_forward_args *io, const moe_params *params,
                             struct saved *s, void *out, moe_dtype out_dtype) {
  const moe_config *c = run->config;
  const size_t mark = run->workspace.used;
  struct experts e = moe_routed_experts(run, params, s);
  e.x = io->x;
  if (!moe_has_router(c)) e.weights = io->given_weights;
  if (c->entry == MOE_ENTRY_ROWS) e.map.row_offset = (int32_t *)io->row_offset;
  if (c->latent > 0) {
    RUN(run, gemm, .rows = run->tokens, .n = c->latent, .k = c->hidden, .experts = 1, .a = io->x,
        .a_dtype = c->dtype, .b = params->latent_down, .b_dtype = c->dtype, .b_kn = c->transposed,
        .d = s->latent_x, .d_dtype = c->dtype);
    e.x = s->latent_x;
  }
  void *y = moe_take(&run->workspace, e.rows * e.width, c->dtype);
  TRY(run_experts(run, &e, s->h, y));
  if (c->latent > 0) {
    TRY(moe_sum_rows(run, &e, y, !e.weight_on_input, NULL, s->latent_out, c->dtype));
    RUN(run, gemm, .rows = run->tokens, .n = c->hidden, .k = c->latent, .experts = 1, .a = s->latent_out,
        .a_dtype = c->dtype, .b = params->latent_up, .b_dtype = c->dtype, .b_kn = c->transposed, .d = out,
        .d_dtype = out_dtype);
  } else {
    TRY(moe_sum_rows(run, &e, y, !e.weight_on_input, NULL, out, out_dtype));
  }
  run->workspace.used = mark;
  return MOE_OK;
}

/* out = partial + the shared expert, weighted by its gate. */
static moe_status run_shared(struct run *run, const moe_forward_args *io, const moe_params *params,
                             const struct saved *s, const float *partial) {
  const moe_config *c = run->config;
  struct experts e = moe_shared_experts(run, params, s);
  e.x = io->x;
  TRY(moe_map_tokens(run, io->padding_mask, &e.map));
  if (params->shared_gate != NULL) {
    RUN(run, gemm, .rows = run->tokens, .n = 1, .k = c->hidden, .experts = 1, .a = io->x, .a_dtype = c->dtype,
        .b = params->shared_gate, .b_dtype = c->dtype, .d = s->gate_logits, .d_dtype = MOE_FP32);
    RUN(run, route, .tokens = run->tokens, .experts = 1, .topk = 1, .router = &moe_gate_router,
        .logits = s->gate_logits, .logits_dtype = MOE_FP32, .padding_mask = io->padding_mask,
        .ids = s->gate_ids, .weights = s->gate_weights);
  }
  void *y = moe_take(&run->workspace, e.rows * e.width, c->dtype);
  TRY(run_experts(run, &e, s->shared_h, y));
  return moe_sum_rows(run, &e, y, !e.weight_on_input, partial, io->out, c->dtype);
}

/* The optional copies of what was decided. */
static moe_status report(struct run *run, const moe_forward_args *io, const struct saved *s) {
  const size_t bytes = (size_t)(run->tokens * run->config->topk) * sizeof(float);
  if (io->topk_ids != NULL) RUN(run, copy, .dst = io->topk_ids, .src = s->ids, .bytes = bytes);
  if (io->topk_weights != NULL) RUN(run, copy, .dst = io->topk_weights, .src = s->weights, .bytes = bytes);
  if (io->slot_row != NULL) RUN(run, copy, .dst = io->slot_row, .src = s->map.slot_row, .bytes = bytes);
  return MOE_OK;
}

moe_status moe_run_forward(struct run *run, moe_forward_args *io, const moe_params *params) {
  const moe_config *c = run->config;
  struct saved s;
  const bool keep = run->saved.base != 0;
  moe_lay_out_saved(run, keep ? &run->saved : &run->workspace, keep, &s);
  TRY(moe_mask_tokens(run, io->token_count, &io->padding_mask));
  TRY(route(run, io, params, &s));
  TRY(report(run, io, &s));
  if (c->shared_inter == 0) return run_routed(run, io, params, &s, io->out, c->dtype);
  float *partial = moe_take(&run->workspace, run->tokens * c->hidden, MOE_FP32);
  TRY(run_routed(run, io, params, &s, partial, MOE_FP32));
  return run_shared(run, io, params, &s, partial);
}
