/* SPDX-License-Identifier: Apache-2.0
 *
 * The layer: the file to read first. moe_forward and moe_backward check the pointers, then run a straight line of ops
 * (forward.c, backward.c). moe_plan_workspace and moe_plan_saved run the same lines on arenas without memory.
 *
 *   forward:  router product -> route -> (losses) -> sort -> up + act -> down -> combine
 *   backward: dh [epilogue: dh, weight * a, dweights] -> dW2, db2, db1, dW1 -> dx rows -> route backward -> dx, router dW
 *
 * The shared expert is the same thing once more with one expert that every token chooses; its sigmoid gate is a router
 * of one logit. The latent projections are one-expert products around the routed experts. */

#include <inttypes.h>
#include <string.h>

#include "layer.h"

#define MOE_OP(name)                                                                               \
  moe_status moe_run_##name(struct run *run, moe_##name##_args *args) {                            \
    const struct backend *backend = run->ctx->backend;                                             \
    const size_t used = run->workspace.used;                                                       \
    args->sm_limit = run->config->sm_limit;                                                        \
    args->schedule = run->config->schedule;                                                        \
    args->scratch_bytes = backend->name##_scratch ? backend->name##_scratch(run->ctx, args) : 0;   \
    args->scratch = args->scratch_bytes ? arena_take(&run->workspace, args->scratch_bytes) : NULL; \
    run->workspace.used = used;                                                                    \
    return run->measure ? MOE_OK : backend->name(run->ctx, args, run->stream);                     \
  }
#include "ops.def"
#undef MOE_OP

void *moe_take(struct arena *arena, int64_t count, moe_dtype dtype) {
  return arena_take(arena, (size_t)count * moe_dtype_bytes(dtype));
}

bool moe_has_router(const moe_config *config) {
  return config->entry == MOE_ENTRY_HIDDEN || config->entry == MOE_ENTRY_LOGITS;
}

bool moe_has_losses(const moe_config *config) {
  return config->router.balance != MOE_BALANCE_NONE || config->router.z_coeff > 0;
}

static int64_t sequences(const struct run *run) {
  const int64_t length = run->config->router.sequence_tokens;
  return length > 0 && run->tokens > length ? CEIL_DIV(run->tokens, length) : 1;
}

/* Integers and fp32 are of one size; h and what follows are of the plan's dtype. */
void moe_lay_out_saved(const struct run *run, struct arena *arena, bool keep_h, struct saved *saved) {
  const moe_config *c = run->config;
  const int64_t tokens = run->tokens, slots = tokens * c->topk;
  keep_h = keep_h && c->recompute == MOE_RECOMPUTE_NONE;
  *saved = (struct saved){0};
  if (c->entry == MOE_ENTRY_HIDDEN) saved->logits = moe_take(arena, tokens * c->experts, MOE_FP32);
  if (moe_has_router(c)) {
    saved->ids = moe_take(arena, slots, MOE_FP32);
    saved->weights = moe_take(arena, slots, MOE_FP32);
  }
  if (moe_has_losses(c)) saved->slopes = moe_take(arena, sequences(run) * (c->experts + 1), MOE_FP32);
  if (c->entry != MOE_ENTRY_ROWS) {
    saved->map.row_offset = moe_take(arena, c->experts + 1, MOE_FP32);
    saved->map.row_slot = moe_take(arena, slots, MOE_FP32);
    saved->map.slot_row = moe_take(arena, slots, MOE_FP32);
  }
  if (keep_h) saved->h = moe_take(arena, slots * moe_preact_width(&c->act, c->inter), c->dtype);
  if (c->shared_inter > 0) {
    saved->gate_logits = moe_take(arena, tokens, MOE_FP32);
    saved->gate_ids = moe_take(arena, tokens, MOE_FP32);
    saved->gate_weights = moe_take(arena, tokens, MOE_FP32);
    if (keep_h)
      saved->shared_h = moe_take(arena, tokens * moe_preact_width(&c->act, c->shared_inter), c->dtype);
  }
  if (c->latent > 0) {
    saved->latent_x = moe_take(arena, tokens * c->latent, c->dtype);
    saved->latent_out = moe_take(arena, tokens * c->latent, c->dtype);
  }
}

moe_status moe_mask_tokens(struct run *run, const int32_t *token_count, const uint8_t **padding_mask) {
  /* As the mask: known only at run time, so a measurement counts it in. */
  if (run->config->entry == MOE_ENTRY_ROWS || (token_count == NULL && !run->measure)) return MOE_OK;
  uint8_t *mask = arena_take(&run->workspace, (size_t)run->tokens);
  RUN(run, token_mask, .tokens = run->tokens, .token_count = token_count, .padding_mask = *padding_mask,
      .mask = mask);
  *padding_mask = mask;
  return MOE_OK;
}

moe_status moe_map_tokens(struct run *run, const uint8_t *padding_mask, struct row_map *map) {
  *map = (struct row_map){0};
  /* The mask is known only at run time, so a measurement counts it in. */
  if (padding_mask == NULL && !run->measure) return MOE_OK;
  map->row_offset = moe_take(&run->workspace, 2, MOE_FP32);
  map->row_slot = moe_take(&run->workspace, run->tokens, MOE_FP32);
  map->slot_row = moe_take(&run->workspace, run->tokens, MOE_FP32);
  RUN(run, sort, .tokens = run->tokens, .experts = 1, .topk = 1, .padding_mask = padding_mask,
      .row_offset = map->row_offset, .row_slot = map->row_slot, .slot_row = map->slot_row);
  return MOE_OK;
}

struct experts moe_routed_experts(const struct run *run, const moe_params *params,
                                  const struct saved *saved) {
  const moe_config *c = run->config;
  return (struct experts){.width = c->latent > 0 ? c->latent : c->hidden,
                          .inter = c->inter,
                          .count = c->experts,
                          .topk = c->topk,
                          .rows = run->tokens * c->topk,
                          .w1 = params->w1,
                          .b1 = params->b1,
                          .w2 = params->w2,
                          .b2 = params->b2,
                          .weights = saved->weights,
                          .weight_on_input = c->weight_on_input,
                          .map = saved->map};
}

struct experts moe_shared_experts(const struct run *run, const moe_params *params,
                                  const struct saved *saved) {
  const moe_config *c = run->config;
  return (struct experts){.width = c->hidden,
                          .inter = c->shared_inter,
                          .count = 1,
                          .topk = 1,
                          .rows = run->tokens,
                          .w1 = params->shared_w1,
                          .w2 = params->shared_w2,
                          .weights = params->shared_gate ? saved->gate_weights : NULL};
}

moe_status moe_order_rows(struct run *run, const struct experts *e, const void *data, void *buffer, bool sums,
                          struct operand *rows) {
  const struct backend *backend = run->ctx->backend;
  *rows = (struct operand){data, e->topk};
  if (backend->orders_rows == NULL || !backend->orders_rows(run->config, e->inter, sums)) return MOE_OK;
  if (buffer == NULL || e->map.slot_row == NULL) return MOE_OK; /* without a map they are in order */
  RUN(run, combine_backward, .tokens = run->tokens, .hidden = e->width, .topk = e->topk, .rows = e->rows,
      .slot_row = e->map.slot_row, .row_end = e->map.row_offset + e->count, .dout = data,
      .dout_dtype = run->config->dtype, .dy = buffer, .y_dtype = run->config->dtype);
  *rows = (struct operand){buffer, 0};
  return MOE_OK;
}

const moe_router_desc moe_gate_router = {
    .score = MOE_SCORE_SIGMOID, .renorm_epsilon = 1e-20f, .scale = 1, .groups = 1, .topk_groups = 1};

moe_status moe_sum_rows(struct run *run, const struct experts *e, const void *rows, bool weighted,
                        const float *addend, void *out, moe_dtype out_dtype) {
  RUN(run, combine, .tokens = run->tokens, .hidden = e->width, .topk = e->topk, .rows = e->rows,
      .slot_row = e->map.slot_row, .row_end = e->map.row_offset ? e->map.row_offset + e->count : NULL,
      .weights = weighted ? e->weights : NULL, .addend = addend, .y = rows, .y_dtype = run->config->dtype,
      .out = out, .out_dtype = out_dtype);
  return MOE_OK;
}

/* ---- size queries: the same code, measuring */

static struct run measuring(const moe_plan *plan, int64_t tokens) {
  return (struct run){.ctx = plan->ctx, .config = &plan->config, .tokens = tokens, .measure = true};
}

static bool tokens_in_range(const moe_plan *plan, int64_t tokens) {
  return plan != NULL && tokens >= 0 && tokens <= INT32_MAX / plan->config.topk;
}

/* While measuring, every optional part is asked for, so that the figure holds for any call. */
static char anything[1];

static size_t forward_need(const moe_plan *plan, int64_t tokens) {
  struct run run = measuring(plan, tokens);
  const moe_params params = {.router_bias = (const float *)(const void *)anything,
                             .b1 = anything,
                             .b2 = anything,
                             .shared_gate = anything};
  moe_forward_args io = {.tokens = tokens};
  if (moe_run_forward(&run, &io, &params) != MOE_OK) return SIZE_MAX;
  return run.workspace.peak;
}

static size_t backward_need(const moe_plan *plan, int64_t tokens) {
  struct run run = measuring(plan, tokens);
  const moe_params params = {.b1 = anything, .b2 = anything, .shared_gate = anything};
  const moe_param_grads grads = {.router_weight = anything,
                                 .router_bias = (float *)(void *)anything,
                                 .w1 = anything,
                                 .b1 = anything,
                                 .w2 = anything,
                                 .b2 = anything,
                                 .shared_w1 = anything,
                                 .shared_w2 = anything,
                                 .shared_gate = anything,
                                 .latent_down = anything,
                                 .latent_up = anything};
  moe_backward_args io = {.tokens = tokens, .dx = anything, .dtopk_weights = (float *)(void *)anything};
  if (moe_run_backward(&run, &io, &params, &grads) != MOE_OK) return SIZE_MAX;
  return run.workspace.peak;
}

size_t moe_plan_workspace(const moe_plan *plan, int64_t tokens) {
  if (!tokens_in_range(plan, tokens)) return SIZE_MAX;
  const size_t forward = forward_need(plan, tokens), backward = backward_need(plan, tokens);
  return forward > backward ? forward : backward;
}

size_t moe_plan_saved(const moe_plan *plan, int64_t tokens) {
  if (!tokens_in_range(plan, tokens)) return SIZE_MAX;
  const struct run run = measuring(plan, tokens);
  struct arena arena = {0};
  struct saved saved;
  moe_lay_out_saved(&run, &arena, true, &saved);
  return arena.peak;
}

/* ---- run calls: what is left to check is pointers */

/* An array that must be there (when it has elements) or must not; aligned as the header says. */
static moe_status check_array(const char *op, const char *name, const void *array, bool wanted,
                              bool allowed) {
  CHECK(array != NULL || !wanted, MOE_ERROR_ARGUMENT, "%s: %s = NULL, wanted an array for this plan", op,
        name);
  CHECK(array == NULL || allowed, MOE_ERROR_ARGUMENT,
        "%s: %s is given, wanted NULL: this plan has no use for it", op, name);
  CHECK((uintptr_t)array % 16 == 0, MOE_ERROR_ARGUMENT, "%s: %s = %p, wanted an address aligned to 16 bytes",
        op, name, array);
  return MOE_OK;
}

static moe_status check_params(const char *op, const struct run *run, const moe_params *p) {
  const moe_config *c = run->config;
  const bool some = run->tokens > 0, router = moe_has_router(c), shared = c->shared_inter > 0,
             latent = c->latent > 0;
  TRY(check_array(op, "params.router_weight", p->router_weight, some && c->entry == MOE_ENTRY_HIDDEN,
                  c->entry == MOE_ENTRY_HIDDEN));
  TRY(check_array(op, "params.router_bias", p->router_bias, false, router));
  TRY(check_array(op, "params.correction_bias", p->correction_bias, false, router));
  TRY(check_array(op, "params.w1", p->w1, some, true));
  TRY(check_array(op, "params.b1", p->b1, false, true));
  TRY(check_array(op, "params.w2", p->w2, some, true));
  TRY(check_array(op, "params.b2", p->b2, false, true));
  TRY(check_array(op, "params.shared_w1", p->shared_w1, some && shared, shared));
  TRY(check_array(op, "params.shared_w2", p->shared_w2, some && shared, shared));
  TRY(check_array(op, "params.shared_gate", p->shared_gate, false, shared));
  TRY(check_array(op, "params.latent_down", p->latent_down, some && latent, latent));
  return check_array(op, "params.latent_up", p->latent_up, some && latent, latent);
}

static moe_status check_buffer(const char *op, const char *name, const void *buffer, size_t found,
                               size_t wanted) {
  CHECK(found >= wanted, MOE_ERROR_WORKSPACE, "%s: %s_bytes = %zu, wanted at least %zu", op, name, found,
        wanted);
  CHECK(buffer != NULL || wanted == 0, MOE_ERROR_WORKSPACE, "%s: %s = NULL, wanted %zu bytes", op, name,
        wanted);
  return check_array(op, name, buffer, false, true);
}

static moe_status check_tokens(const char *op, const moe_plan *plan, int64_t tokens) {
  CHECK(tokens_in_range(plan, tokens), MOE_ERROR_ARGUMENT,
        "%s: tokens = %" PRId64 ", wanted 0 .. %" PRId64 " (tokens * topk below 2^31)", op, tokens,
        INT32_MAX / plan->config.topk);
  return MOE_OK;
}

static moe_status check_stream(const char *op, const moe_plan *plan, moe_stream stream) {
  CHECK(stream == NULL || moe_context_backend(plan->ctx) != MOE_BACKEND_CPU, MOE_ERROR_ARGUMENT,
        "%s: stream is given, wanted NULL for the CPU", op);
  return MOE_OK;
}

/* The arrays that say where tokens go; the same for both directions. */
static moe_status check_routing(const char *op, const struct run *run, const void *logits,
                                const void *given_weights, const void *row_offset, const void *padding_mask,
                                const int32_t *token_count) {
  const moe_config *c = run->config;
  const bool some = run->tokens > 0, ids = c->entry == MOE_ENTRY_IDS, rows = c->entry == MOE_ENTRY_ROWS;
  TRY(check_array(op, "logits", logits, some && c->entry == MOE_ENTRY_LOGITS, c->entry == MOE_ENTRY_LOGITS));
  TRY(check_array(op, "given_weights", given_weights, some && ids, ids || rows));
  TRY(check_array(op, "row_offset", row_offset, some && rows, rows));
  CHECK(token_count == NULL || !rows, MOE_ERROR_ARGUMENT,
        "%s: token_count is given, wanted NULL: with MOE_ENTRY_ROWS row_offset[E] says how many there are",
        op);
  CHECK((uintptr_t)token_count % sizeof *token_count == 0, MOE_ERROR_ARGUMENT,
        "%s: token_count = %p, wanted an address aligned to 4 bytes", op, (const void *)token_count);
  return check_array(op, "padding_mask", padding_mask, false, !rows);
}

static moe_status check_forward(const struct run *run, const moe_forward_args *io) {
  const moe_config *c = run->config;
  const bool some = run->tokens > 0, rows = c->entry == MOE_ENTRY_ROWS, router = moe_has_router(c);
  const bool global = c->router.balance == MOE_BALANCE_GLOBAL;
  TRY(check_array("forward", "x", io->x, some, true));
  TRY(check_routing("forward", run, io->logits, io->given_weights, io->row_offset, io->padding_mask,
                    io->token_count));
  TRY(check_array("forward", "given_ids", io->given_ids,
                  some && (c->entry == MOE_ENTRY_IDS || (router && c->topk > c->experts)), !rows));
  TRY(check_array("forward", "global_counts", io->global_counts, global, global));
  TRY(check_array("forward", "out", io->out, some, true));
  TRY(check_array("forward", "topk_ids", io->topk_ids, false, router));
  TRY(check_array("forward", "topk_weights", io->topk_weights, false, router));
  TRY(check_array("forward", "counts", io->counts, false, !rows));
  TRY(check_array("forward", "slot_row", io->slot_row, false, !rows));
  TRY(check_array("forward", "losses", io->losses, false, router));
  return check_array("forward", "saved", io->saved, false, true);
}

moe_status moe_forward(const moe_plan *plan, const moe_forward_args *given, moe_stream stream) {
  CHECK(plan != NULL, MOE_ERROR_ARGUMENT, "forward: plan = NULL, wanted a plan");
  moe_forward_args io;
  moe_params params;
  TRY(moe_take_struct("forward: args", &io, sizeof io, given));
  TRY(moe_take_struct("forward: params", &params, sizeof params, io.params));
  TRY(check_tokens("forward", plan, io.tokens));
  TRY(check_stream("forward", plan, stream));
  struct run run = {.ctx = plan->ctx, .config = &plan->config, .tokens = io.tokens, .stream = stream};
  TRY(check_params("forward", &run, &params));
  TRY(check_forward(&run, &io));
  TRY(check_buffer("forward", "workspace", io.workspace, io.workspace_bytes,
                   moe_plan_workspace(plan, io.tokens)));
  if (io.saved != NULL)
    TRY(check_buffer("forward", "saved", io.saved, io.saved_bytes, moe_plan_saved(plan, io.tokens)));
  run.workspace.base = (uintptr_t)io.workspace;
  run.saved.base = (uintptr_t)io.saved;
  return moe_run_forward(&run, &io, &params);
}

static moe_status check_grads(const struct run *run, const moe_params *params, const moe_param_grads *g) {
  const moe_config *c = run->config;
  const bool shared = c->shared_inter > 0, latent = c->latent > 0;
  TRY(check_array("backward", "grads.router_weight", g->router_weight, false, c->entry == MOE_ENTRY_HIDDEN));
  TRY(check_array("backward", "grads.router_bias", g->router_bias, false, moe_has_router(c)));
  TRY(check_array("backward", "grads.w1", g->w1, false, true));
  TRY(check_array("backward", "grads.b1", g->b1, false, true));
  TRY(check_array("backward", "grads.w2", g->w2, false, true));
  TRY(check_array("backward", "grads.b2", g->b2, false, true));
  TRY(check_array("backward", "grads.shared_w1", g->shared_w1, false, shared));
  TRY(check_array("backward", "grads.shared_w2", g->shared_w2, false, shared));
  TRY(check_array("backward", "grads.shared_gate", g->shared_gate, false,
                  shared && params->shared_gate != NULL));
  TRY(check_array("backward", "grads.latent_down", g->latent_down, false, latent));
  return check_array("backward", "grads.latent_up", g->latent_up, false, latent);
}

static moe_status check_backward(const struct run *run, const moe_backward_args *io) {
  const moe_config *c = run->config;
  const bool some = run->tokens > 0, given = c->entry == MOE_ENTRY_IDS || c->entry == MOE_ENTRY_ROWS;
  TRY(check_array("backward", "x", io->x, some, true));
  TRY(check_routing("backward", run, io->logits, io->given_weights, io->row_offset, io->padding_mask,
                    io->token_count));
  TRY(check_array("backward", "dout", io->dout, some, true));
  TRY(check_array("backward", "dx", io->dx, false, true));
  TRY(check_array("backward", "dlogits", io->dlogits, false, c->entry == MOE_ENTRY_LOGITS));
  TRY(check_array("backward", "dtopk_weights", io->dtopk_weights, false, given));
  TRY(check_array("backward", "dlosses", io->dlosses, false, moe_has_losses(c)));
  TRY(moe_check_range("backward", "accumulate", io->accumulate, 0, 1));
  TRY(moe_check_range("backward", "skip_losses", io->skip_losses, 0, 1));
  CHECK(io->loss_scale - io->loss_scale == 0, MOE_ERROR_ARGUMENT,
        "backward: loss_scale = %g, wanted a finite number", (double)io->loss_scale);
  return MOE_OK;
}

moe_status moe_backward(const moe_plan *plan, const moe_backward_args *given, moe_stream stream) {
  CHECK(plan != NULL, MOE_ERROR_ARGUMENT, "backward: plan = NULL, wanted a plan");
  moe_backward_args io;
  moe_params params;
  moe_param_grads grads = MOE_PARAM_GRADS_INIT;
  TRY(moe_take_struct("backward: args", &io, sizeof io, given));
  TRY(moe_take_struct("backward: params", &params, sizeof params, io.params));
  if (io.grads != NULL) TRY(moe_take_struct("backward: grads", &grads, sizeof grads, io.grads));
  TRY(check_tokens("backward", plan, io.tokens));
  TRY(check_stream("backward", plan, stream));
  struct run run = {.ctx = plan->ctx, .config = &plan->config, .tokens = io.tokens, .stream = stream};
  TRY(check_params("backward", &run, &params));
  TRY(check_grads(&run, &params, &grads));
  TRY(check_backward(&run, &io));
  TRY(check_buffer("backward", "workspace", io.workspace, io.workspace_bytes,
                   moe_plan_workspace(plan, io.tokens)));
  TRY(check_buffer("backward", "saved", io.saved, io.saved_bytes, moe_plan_saved(plan, io.tokens)));
  run.workspace.base = (uintptr_t)io.workspace;
  run.saved.base = (uintptr_t)io.saved;
  return moe_run_backward(&run, &io, &params, &grads);
}
