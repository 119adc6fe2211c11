/* SPDX-License-Identifier: Apache-2.0
 *
 * Each op of the layer alone, with the sizes, the data and the row map that the layer has: where its time goes. The routed
 * experts and the router only; the shared expert and the latent projections are the same ops once more. */
#include <math.h>

#include "bench.h"
#include "moeblas_ops.h"

struct ops {
  struct bench *bench;
  const char *problem;
  const struct run *run;
  const struct problem *p;
  const moe_config *c;
  const struct load *load;
  int64_t rows, width, columns; /* R = T k at most, D, F or 2F */
  double element;
  float *logits;
  int32_t *ids, *row_offset, *row_slot, *slot_row;
  float *weights, *dweights, *dlogits;
  void *h, *a, *y, *dh, *wa, *dx_rows;
  void *block[16]; /* all of the above, to be freed */
  int blocks;
  bool failed; /* an allocation did, with a sentence of the library */
};

static void *take(struct ops *o, int64_t count, size_t bytes) {
  moe_context *ctx = o->bench->ctx;
  void **block = &o->block[o->blocks++];
  const size_t size = ((size_t)count + 1) * bytes;
  if (moe_memory_alloc(ctx, size, block) != MOE_OK || moe_memory_fill(ctx, *block, 0, size) != MOE_OK)
    o->failed = true;
  return *block;
}

/* ---- timing one op --------------------------------------------------------------------------------------------- */

struct call {
  moe_context *ctx;
  const void *args;
};

#define CALL(name)                                                                    \
  static moe_status call_##name(void *call) {                                         \
    return moe_##name(((struct call *)call)->ctx, ((struct call *)call)->args, NULL); \
  }
CALL(gemm)
CALL(wgrad)
CALL(bias_grad)
CALL(route)
CALL(route_backward)
CALL(sort)
CALL(combine)
#undef CALL

static int time_op(struct ops *o, const char *pass, const char *name, bench_call function, const void *args,
                   size_t scratch_bytes, double flops, double bytes) {
  struct call call = {o->bench->ctx, args};
  struct bench_line line = {.pass = pass, .impl = name, .flops = flops, .bytes = bytes};
  line.peak_mib = (double)scratch_bytes / (1 << 20);
  const moe_status status = bench_time(o->bench, function, &call, &line.time);
  if (status != MOE_OK) return cli_fail_status("bench", status);
  bench_report(o->bench, o->problem, &line);
  return CLI_GO_ON;
}

/* Leaves the calling function with a code other than CLI_GO_ON if the op fails. */
#define TIME(o, pass, label, name, flops, bytes, ...)                                                    \
  do {                                                                                                   \
    moe_##name##_args args_ = {.size = sizeof args_, __VA_ARGS__};                                       \
    args_.scratch_bytes = moe_##name##_scratch((o)->bench->ctx, &args_);                                 \
    if (args_.scratch_bytes == SIZE_MAX) return cli_fail_status("bench", MOE_ERROR_INTERNAL);            \
    const moe_status had_ = moe_memory_alloc((o)->bench->ctx, args_.scratch_bytes, &args_.scratch);      \
    if (had_ != MOE_OK) return cli_fail_status("bench", had_);                                           \
    const int code_ = time_op((o), pass, label, call_##name, &args_, args_.scratch_bytes, flops, bytes); \
    moe_memory_free((o)->bench->ctx, args_.scratch);                                                     \
    if (code_ != CLI_GO_ON) return code_;                                                                \
  } while (0)

/* ---- the ops --------------------------------------------------------------------------------------------------- */

static int time_router(struct ops *o) {
  const moe_config *c = o->c;
  const double tokens = (double)o->p->tokens, experts = (double)c->experts, hidden = (double)c->hidden;
  const bool product = c->entry == MOE_ENTRY_HIDDEN;
  const moe_dtype router = c->router_dtype ? c->router_dtype : c->dtype;
  if (product)
    TIME(o, "fwd", "router", gemm, 2 * tokens * experts * hidden,
         o->element * (tokens + experts) * hidden + 4 * tokens * experts, .rows = o->p->tokens,
         .n = c->experts, .k = c->hidden, .experts = 1, .a = run_block(o->run, T_X), .a_dtype = c->dtype,
         .b = run_block(o->run, T_ROUTER_WEIGHT), .b_dtype = router, .d = o->logits, .d_dtype = MOE_FP32);
  if (problem_routed(o->p))
    TIME(o, "fwd", "route", route, 0, tokens * (4 * experts + 8 * (double)c->topk), .tokens = o->p->tokens,
         .experts = c->experts, .topk = c->topk, .router = &c->router,
         .logits = product ? o->logits : run_block(o->run, T_LOGITS),
         .logits_dtype = product ? MOE_FP32 : c->logits_dtype,
         .router_bias = run_block(o->run, T_ROUTER_BIAS),
         .correction_bias = run_block(o->run, T_CORRECTION_BIAS), .given_ids = run_block(o->run, T_GIVEN_IDS),
         .padding_mask = run_block(o->run, T_MASK), .ids = o->ids, .weights = o->weights);
  return CLI_GO_ON;
}

static int time_sort(struct ops *o) {
  const moe_config *c = o->c;
  const void *mask = run_block(o->run, T_MASK);
  if (c->entry == MOE_ENTRY_ROWS) return CLI_GO_ON;
  const int64_t capacity = (int64_t)ceil((double)o->rows / (double)c->experts * (double)c->capacity_factor);
  TIME(o, "fwd", "sort", sort, 0, 12.0 * (double)o->rows, .tokens = o->p->tokens, .experts = c->experts,
       .topk = c->topk, .ids = o->ids, .padding_mask = mask, .weights = o->weights, .capacity = capacity,
       .drop = c->drop, .row_offset = o->row_offset, .row_slot = o->row_slot, .slot_row = o->slot_row);
  return CLI_GO_ON;
}

/* Bytes of the weights of the experts in use, and of a matrix with a row a routed row. */
static double weight_bytes(const struct ops *o, int64_t n, int64_t k) {
  return o->element * o->load->experts * (double)n * (double)k;
}
static double row_bytes(const struct ops *o, int64_t columns) {
  return o->element * o->load->rows * (double)columns;
}
static double row_flops(const struct ops *o, int64_t n, int64_t k) {
  return 2 * o->load->rows * (double)n * (double)k;
}
static double token_bytes(const struct ops *o) {
  return o->element * (double)o->p->tokens * (double)o->width;
}

static int time_experts(struct ops *o) {
  const moe_config *c = o->c;
  const int64_t inter = c->inter;
  const float *in = c->weight_on_input ? o->weights : NULL, *out = c->weight_on_input ? NULL : o->weights;
  TIME(o, "fwd", "up", gemm, row_flops(o, o->columns, o->width),
       weight_bytes(o, o->columns, o->width) + token_bytes(o) + row_bytes(o, o->columns + inter),
       .rows = o->rows, .n = o->columns, .k = o->width, .experts = c->experts, .row_offset = o->row_offset,
       .row_slot = o->row_slot, .gather_topk = c->topk, .a = run_block(o->run, T_X), .a_dtype = c->dtype,
       .b = run_block(o->run, T_W1), .b_dtype = c->dtype, .b_kn = c->transposed, .epilogue = MOE_EPILOGUE_ACT,
       .weights = in, .bias = run_block(o->run, T_B1), .bias_dtype = c->dtype, .d = o->a, .d_dtype = c->dtype,
       .act = &c->act, .h = o->h);
  TIME(o, "fwd", "down", gemm, row_flops(o, o->width, inter),
       weight_bytes(o, o->width, inter) + row_bytes(o, inter + o->width), .rows = o->rows, .n = o->width,
       .k = inter, .experts = c->experts, .row_offset = o->row_offset, .row_slot = o->row_slot, .a = o->a,
       .a_dtype = c->dtype, .b = run_block(o->run, T_W2), .b_dtype = c->dtype, .b_kn = c->transposed,
       .bias = run_block(o->run, T_B2), .bias_dtype = c->dtype, .d = o->y, .d_dtype = c->dtype);
  TIME(o, "fwd", "combine", combine, 0, row_bytes(o, o->width) + token_bytes(o), .tokens = o->p->tokens,
       .hidden = o->width, .topk = c->topk, .rows = o->rows, .slot_row = o->slot_row,
       .row_end = o->row_offset + c->experts, .weights = out, .y = o->y, .y_dtype = c->dtype,
       .out = run_block(o->run, T_OUT), .out_dtype = c->dtype);
  return CLI_GO_ON;
}

static int time_weight_grads(struct ops *o) {
  const moe_config *c = o->c;
  const moe_dtype dtype = c->grad_dtype ? c->grad_dtype : c->dtype;
  const double grad = (double)moe_dtype_bytes(dtype) * (double)c->experts * (double)o->width;
  const int64_t inter = c->inter, topk = c->topk;
  const bool swap = c->transposed;
  const void *x = run_block(o->run, T_X), *g = run_block(o->run, T_DOUT);
  TIME(o, "bwd", "dw2", wgrad, row_flops(o, o->width, inter),
       grad * (double)inter + token_bytes(o) + row_bytes(o, inter), .rows = o->rows,
       .m = swap ? inter : o->width, .n = swap ? o->width : inter, .experts = c->experts,
       .row_offset = o->row_offset, .row_slot = o->row_slot, .a = swap ? o->wa : g, .a_dtype = c->dtype,
       .a_gather_topk = swap ? 0 : topk, .b = swap ? g : o->wa, .b_dtype = c->dtype,
       .b_gather_topk = swap ? topk : 0, .d = run_block(o->run, T_DW2), .d_dtype = dtype);
  TIME(o, "bwd", "dw1", wgrad, row_flops(o, o->columns, o->width),
       grad * (double)o->columns + token_bytes(o) + row_bytes(o, o->columns), .rows = o->rows,
       .m = swap ? o->width : o->columns, .n = swap ? o->columns : o->width, .experts = c->experts,
       .row_offset = o->row_offset, .row_slot = o->row_slot, .a = swap ? x : o->dh, .a_dtype = c->dtype,
       .a_gather_topk = swap ? topk : 0, .b = swap ? o->dh : x, .b_dtype = c->dtype,
       .b_gather_topk = swap ? 0 : topk, .weights = c->weight_on_input ? o->weights : NULL,
       .d = run_block(o->run, T_DW1), .d_dtype = dtype);
  if (o->p->bias)
    TIME(o, "bwd", "db1", bias_grad, 0, row_bytes(o, o->columns), .rows = o->rows, .n = o->columns,
         .experts = c->experts, .row_offset = o->row_offset, .row_slot = o->row_slot, .v = o->dh,
         .v_dtype = c->dtype, .d = run_block(o->run, T_DB1), .d_dtype = dtype);
  return CLI_GO_ON;
}

static int time_backward(struct ops *o) {
  const moe_config *c = o->c;
  const int64_t inter = c->inter;
  const float *in = c->weight_on_input ? o->weights : NULL, *out = c->weight_on_input ? NULL : o->weights;
  TIME(o, "bwd", "dact", gemm, row_flops(o, inter, o->width),
       weight_bytes(o, inter, o->width) + token_bytes(o) + row_bytes(o, 2 * o->columns + inter),
       .rows = o->rows, .n = inter, .k = o->width, .experts = c->experts, .row_offset = o->row_offset,
       .row_slot = o->row_slot, .gather_topk = c->topk, .a = run_block(o->run, T_DOUT), .a_dtype = c->dtype,
       .b = run_block(o->run, T_W2), .b_dtype = c->dtype, .b_kn = !c->transposed,
       .epilogue = MOE_EPILOGUE_DACT, .weights = out, .d = o->wa, .d_dtype = c->dtype, .act = &c->act,
       .h = o->h, .dh = o->dh, .dweights = in ? NULL : o->dweights, .dot_bias = run_block(o->run, T_B2),
       .bias_dtype = c->dtype);
  const int code = time_weight_grads(o);
  if (code != CLI_GO_ON) return code;
  TIME(o, "bwd", "dx rows", gemm, row_flops(o, o->width, o->columns),
       weight_bytes(o, o->width, o->columns) + row_bytes(o, o->columns + o->width), .rows = o->rows,
       .n = o->width, .k = o->columns, .experts = c->experts, .row_offset = o->row_offset,
       .row_slot = o->row_slot, .a = o->dh, .a_dtype = c->dtype, .b = run_block(o->run, T_W1),
       .b_dtype = c->dtype, .b_kn = !c->transposed, .d = o->dx_rows, .d_dtype = c->dtype);
  TIME(o, "bwd", "combine dx", combine, 0, row_bytes(o, o->width) + token_bytes(o), .tokens = o->p->tokens,
       .hidden = o->width, .topk = c->topk, .rows = o->rows, .slot_row = o->slot_row,
       .row_end = o->row_offset + c->experts, .weights = in, .y = o->dx_rows, .y_dtype = c->dtype,
       .out = run_block(o->run, T_DX), .out_dtype = c->dtype);
  return CLI_GO_ON;
}

static int time_router_backward(struct ops *o) {
  const moe_config *c = o->c;
  const bool product = c->entry == MOE_ENTRY_HIDDEN;
  const double tokens = (double)o->p->tokens;
  if (!problem_routed(o->p)) return CLI_GO_ON;
  TIME(o, "bwd", "route bwd", route_backward, 0, tokens * (8 * (double)c->experts + 12 * (double)c->topk),
       .tokens = o->p->tokens, .experts = c->experts, .topk = c->topk, .router = &c->router,
       .logits = product ? o->logits : run_block(o->run, T_LOGITS),
       .logits_dtype = product ? MOE_FP32 : c->logits_dtype, .router_bias = run_block(o->run, T_ROUTER_BIAS),
       .ids = o->ids, .slot_row = o->slot_row, .padding_mask = run_block(o->run, T_MASK),
       .dweights = o->dweights, .dlogits = o->dlogits, .dlogits_dtype = MOE_FP32);
  return CLI_GO_ON;
}

/* ---- without fusion -------------------------------------------------------------------------------------------- */

/* The products once more, each without one thing that is fused into it: the epilogue of up and dact, the gathering of rows
 * that up does; and the gradient of W1 added to fp32. */
static int time_unfused(struct ops *o) {
  const moe_config *c = o->c;
  const int64_t inter = c->inter, columns = o->columns, width = o->width;
  const double wide = weight_bytes(o, columns, width) + row_bytes(o, columns);
  const double grad = 8 * (double)c->experts * (double)columns * (double)width;
  TIME(o, "fwd", "up plain", gemm, row_flops(o, columns, width), wide + token_bytes(o), .rows = o->rows,
       .n = columns, .k = width, .experts = c->experts, .row_offset = o->row_offset, .row_slot = o->row_slot,
       .gather_topk = c->topk, .a = run_block(o->run, T_X), .a_dtype = c->dtype, .b = run_block(o->run, T_W1),
       .b_dtype = c->dtype, .b_kn = c->transposed, .d = o->h, .d_dtype = c->dtype);
  TIME(o, "fwd", "up rows", gemm, row_flops(o, columns, width), wide + row_bytes(o, width + inter),
       .rows = o->rows, .n = columns, .k = width, .experts = c->experts, .row_offset = o->row_offset,
       .row_slot = o->row_slot, .a = o->y, .a_dtype = c->dtype, .b = run_block(o->run, T_W1),
       .b_dtype = c->dtype, .b_kn = c->transposed, .epilogue = MOE_EPILOGUE_ACT, .d = o->a,
       .d_dtype = c->dtype, .act = &c->act, .h = o->h);
  if (!o->p->backward) return CLI_GO_ON;
  TIME(o, "bwd", "dact plain", gemm, row_flops(o, inter, width),
       weight_bytes(o, inter, width) + token_bytes(o) + row_bytes(o, inter), .rows = o->rows, .n = inter,
       .k = width, .experts = c->experts, .row_offset = o->row_offset, .row_slot = o->row_slot,
       .gather_topk = c->topk, .a = run_block(o->run, T_DOUT), .a_dtype = c->dtype,
       .b = run_block(o->run, T_W2), .b_dtype = c->dtype, .b_kn = !c->transposed, .d = o->wa,
       .d_dtype = c->dtype);
  float *d = take(o, c->experts * columns * width, sizeof *d);
  if (o->failed) return cli_fail("bench", CLI_IO, "%s: %s", o->problem, moe_last_error());
  TIME(o, "bwd", "dw1 += fp32", wgrad, row_flops(o, columns, width),
       grad + token_bytes(o) + row_bytes(o, columns), .rows = o->rows, .m = columns, .n = width,
       .experts = c->experts, .row_offset = o->row_offset, .row_slot = o->row_slot, .a = o->dh,
       .a_dtype = c->dtype, .b = run_block(o->run, T_X), .b_dtype = c->dtype, .b_gather_topk = c->topk,
       .d = d, .d_dtype = MOE_FP32, .accumulate = 1);
  return CLI_GO_ON;
}

/* ---- all of them ----------------------------------------------------------------------------------------------- */

static void take_buffers(struct ops *o) {
  const moe_config *c = o->c;
  const size_t element = (size_t)o->element;
  const int64_t pairs = o->p->tokens * c->experts;
  const bool rows = c->entry == MOE_ENTRY_ROWS, router = problem_routed(o->p);
  o->logits = take(o, router ? pairs : 0, sizeof(float));
  o->ids = router ? take(o, o->rows, sizeof(int32_t)) : run_block(o->run, T_GIVEN_IDS);
  o->weights = router ? take(o, o->rows, sizeof(float)) : run_block(o->run, T_GIVEN_WEIGHTS);
  o->row_offset = rows ? run_block(o->run, T_ROW_OFFSET) : take(o, c->experts + 1, sizeof(int32_t));
  o->row_slot = rows ? NULL : take(o, o->rows, sizeof(int32_t));
  o->slot_row = rows ? NULL : take(o, o->rows, sizeof(int32_t));
  o->h = take(o, o->rows * o->columns, element);
  o->a = take(o, o->rows * c->inter, element);
  o->y = take(o, o->rows * o->width, element);
  if (!o->p->backward) return;
  o->dh = take(o, o->rows * o->columns, element);
  o->wa = take(o, o->rows * c->inter, element);
  o->dx_rows = take(o, o->rows * o->width, element);
  o->dweights = take(o, o->rows, sizeof(float));
  o->dlogits = take(o, router ? pairs : 0, sizeof(float));
}

static int time_all(struct ops *o) {
  int (*const steps[])(struct ops *) = {time_router, time_sort, time_experts, time_backward,
                                        time_router_backward};
  int code = CLI_GO_ON;
  for (int i = 0; i < (o->p->backward ? 5 : 3) && code == CLI_GO_ON; i++) code = steps[i](o);
  if (code == CLI_GO_ON && o->bench->unfused) code = time_unfused(o);
  return code;
}

int bench_ops(struct bench *bench, const char *problem, const struct run *run, const struct load *load) {
  const struct problem *p = &run->sample->problem;
  struct ops o = {.bench = bench, .problem = problem, .run = run, .p = p, .c = &p->config, .load = load};
  if (p->config.latent) return CLI_GO_ON; /* the experts' x is inside the layer then */
  o.rows = p->tokens * p->config.topk;
  o.width = problem_width(p);
  o.columns = problem_halves(p) * p->config.inter;
  o.element = (double)moe_dtype_bytes(p->config.dtype);
  take_buffers(&o);
  const int code = o.failed ? cli_fail("bench", CLI_IO, "%s: %s", problem, moe_last_error()) : time_all(&o);
  for (int i = 0; i < o.blocks; i++) moe_memory_free(bench->ctx, o.block[i]);
  return code;
}
