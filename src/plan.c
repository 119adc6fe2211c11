/* SPDX-License-Identifier: Apache-2.0
 *
 * moe_plan: every configuration is checked here, once, so that run calls have only pointers left to check. What cannot be
 * done is refused with the reason; nothing that was set is ever ignored. */

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "plan.h"

moe_status moe_take_struct(const char *what, void *copy, size_t copy_size, const void *given) {
  CHECK(given != NULL, MOE_ERROR_ARGUMENT, "%s: NULL, wanted a struct", what);
  size_t size;
  memcpy(&size, given, sizeof size);
  CHECK(size >= sizeof size && size <= 1 << 16, MOE_ERROR_ARGUMENT,
        "%s: size = %zu, wanted %zu (initialise it with its _INIT macro)", what, size, copy_size);
  const unsigned char *bytes = given;
  for (size_t i = copy_size; i < size; i++)
    CHECK(bytes[i] == 0, MOE_ERROR_UNSUPPORTED,
          "%s: size = %zu with a field set beyond the %zu bytes that moeblas %s knows", what, size, copy_size,
          moe_version());
  memset(copy, 0, copy_size);
  memcpy(copy, given, size < copy_size ? size : copy_size);
  return MOE_OK;
}

moe_status moe_check_range(const char *what, const char *field, int64_t value, int64_t low, int64_t high) {
  CHECK(value >= low && value <= high, MOE_ERROR_ARGUMENT,
        "%s: %s = %" PRId64 ", wanted %" PRId64 " .. %" PRId64, what, field, value, low, high);
  return MOE_OK;
}

moe_status moe_check_dtype(const char *what, const char *field, moe_dtype dtype) {
  CHECK(moe_dtype_bytes(dtype) != 0, MOE_ERROR_ARGUMENT, "%s: %s = %d, wanted MOE_FP32, MOE_BF16 or MOE_FP16",
        what, field, (int)dtype);
  return MOE_OK;
}

static moe_status check_finite(const char *what, const char *field, float value, float low) {
  CHECK(isfinite(value) && value >= low, MOE_ERROR_ARGUMENT, "%s: %s = %g, wanted a finite number >= %g",
        what, field, (double)value, (double)low);
  return MOE_OK;
}

/* ---- descriptors */

static const struct activation_default {
  float alpha, beta;
} activation_defaults[] = {
#define MOE_ACT(ENUM, value, fn, plain, gated, a, b, f, df) [value] = {a, b},
#include "moeblas_act.def"
#undef MOE_ACT
};

static moe_status resolve_parameter(const char *what, const char *field, float *value, float by_default,
                                    const char *activation) {
  CHECK(by_default != 0 || *value == 0, MOE_ERROR_ARGUMENT, "%s: %s = %g, but %s has no such parameter", what,
        field, (double)*value, activation);
  if (*value == 0) *value = by_default;
  CHECK(isfinite(*value) && *value >= 0, MOE_ERROR_ARGUMENT, "%s: %s = %g, wanted a positive number", what,
        field, (double)*value);
  return MOE_OK;
}

static moe_status resolve_clamps(const char *what, moe_act_desc *act) {
  CHECK(act->gate_max >= 0, MOE_ERROR_ARGUMENT, "%s: act.gate_max = %g, wanted > 0, or 0 for none", what,
        (double)act->gate_max);
  if (act->gate_max == 0) act->gate_max = INFINITY;
  if (act->up_min == 0 && act->up_max == 0) {
    act->up_min = -INFINITY;
    act->up_max = INFINITY;
  }
  CHECK(act->up_min < act->up_max, MOE_ERROR_ARGUMENT,
        "%s: act.up_min = %g, wanted less than act.up_max = %g", what, (double)act->up_min,
        (double)act->up_max);
  return MOE_OK;
}

static moe_status resolve_layout(const char *what, moe_act_desc *act, int64_t inter) {
  CHECK((int)act->layout >= 0 && act->layout <= MOE_LAYOUT_INTERLEAVED, MOE_ERROR_ARGUMENT,
        "%s: act.layout = %d, wanted a moe_layout", what, (int)act->layout);
  CHECK(act->interleave == 0 || act->layout == MOE_LAYOUT_INTERLEAVED, MOE_ERROR_ARGUMENT,
        "%s: act.interleave = %" PRId64 ", wanted 0 without MOE_LAYOUT_INTERLEAVED", what, act->interleave);
  if (act->interleave == 0) act->interleave = 1;
  CHECK(act->interleave > 0 && inter % act->interleave == 0, MOE_ERROR_ARGUMENT,
        "%s: act.interleave = %" PRId64 ", wanted a divisor of inter = %" PRId64, what, act->interleave,
        inter);
  return MOE_OK;
}

moe_status moe_resolve_act(const char *what, moe_act_desc *act, int64_t inter) {
  CHECK((int)act->kind >= 0 && act->kind < MOE_ACT_COUNT, MOE_ERROR_ARGUMENT,
        "%s: act.kind = %d, wanted a row of moeblas_act.def (0 .. %d)", what, (int)act->kind,
        MOE_ACT_COUNT - 1);
  CHECK(act->gated == 0 || act->gated == 1, MOE_ERROR_ARGUMENT, "%s: act.gated = %d, wanted 0 or 1", what,
        act->gated);
  const char *name = moe_activation_name(act->kind, act->gated);
  TRY(resolve_parameter(what, "act.alpha", &act->alpha, activation_defaults[act->kind].alpha, name));
  TRY(resolve_parameter(what, "act.beta", &act->beta, activation_defaults[act->kind].beta, name));
  CHECK(act->gated || (act->up_min == 0 && act->up_max == 0 && act->up_offset == 0 && act->up_beta == 0 &&
                       act->layout == MOE_LAYOUT_CONCAT_GATE_FIRST && act->interleave == 0),
        MOE_ERROR_ARGUMENT, "%s: act.up_* or act.layout set, but %s is not gated", what, name);
  TRY(check_finite(what, "act.up_offset", act->up_offset, -INFINITY));
  TRY(check_finite(what, "act.up_beta", act->up_beta, 0));
  TRY(resolve_clamps(what, act));
  return resolve_layout(what, act, inter);
}

static moe_status resolve_groups(const char *what, moe_router_desc *r, int64_t experts, int64_t topk) {
  if (r->groups == 0) r->groups = 1;
  if (r->groups == 1 && r->topk_groups == 0) r->topk_groups = 1;
  CHECK(r->groups >= 1 && experts % r->groups == 0, MOE_ERROR_ARGUMENT,
        "%s: router.groups = %" PRId64 ", wanted a divisor of experts = %" PRId64, what, r->groups, experts);
  TRY(moe_check_range(what, "router.topk_groups", r->topk_groups, 1, r->groups));
  CHECK(topk > experts || r->topk_groups * (experts / r->groups) >= topk, MOE_ERROR_ARGUMENT,
        "%s: router.topk_groups = %" PRId64 " groups of %" PRId64 " experts, wanted at least topk = %" PRId64
        " experts",
        what, r->topk_groups, experts / r->groups, topk);
  CHECK((int)r->group_score >= 0 && r->group_score <= MOE_GROUP_TOPK_SUM, MOE_ERROR_ARGUMENT,
        "%s: router.group_score = %d, wanted a moe_group_score", what, (int)r->group_score);
  CHECK(r->groups > 1 || r->group_score == MOE_GROUP_MAX, MOE_ERROR_ARGUMENT,
        "%s: router.group_score = %d, wanted 0 without router.groups", what, (int)r->group_score);
  return MOE_OK;
}

moe_status moe_resolve_router(const char *what, moe_router_desc *r, int64_t experts, int64_t topk) {
  CHECK((int)r->score >= 0 && r->score <= MOE_SCORE_SQRT_SOFTPLUS, MOE_ERROR_ARGUMENT,
        "%s: router.score = %d, wanted a moe_score", what, (int)r->score);
  CHECK(r->renormalize == 0 || r->renormalize == 1, MOE_ERROR_ARGUMENT,
        "%s: router.renormalize = %d, wanted 0 or 1", what, r->renormalize);
  CHECK(r->renormalize || r->renorm_epsilon == 0, MOE_ERROR_ARGUMENT,
        "%s: router.renorm_epsilon = %g, wanted 0 without router.renormalize", what,
        (double)r->renorm_epsilon);
  if (r->renorm_epsilon == 0) r->renorm_epsilon = 1e-20f;
  TRY(check_finite(what, "router.renorm_epsilon", r->renorm_epsilon, 0));
  if (r->scale == 0) r->scale = 1;
  TRY(check_finite(what, "router.scale", r->scale, -INFINITY));
  TRY(resolve_groups(what, r, experts, topk));
  CHECK((int)r->balance >= 0 && r->balance <= MOE_BALANCE_GLOBAL, MOE_ERROR_ARGUMENT,
        "%s: router.balance = %d, wanted a moe_balance", what, (int)r->balance);
  CHECK(r->balance != MOE_BALANCE_NONE || r->balance_coeff == 0, MOE_ERROR_ARGUMENT,
        "%s: router.balance_coeff = %g, wanted 0 with MOE_BALANCE_NONE", what, (double)r->balance_coeff);
  TRY(check_finite(what, "router.balance_coeff", r->balance_coeff, 0));
  TRY(check_finite(what, "router.z_coeff", r->z_coeff, 0));
  CHECK((r->balance == MOE_BALANCE_SEQUENCE) == (r->sequence_tokens > 0) && r->sequence_tokens >= 0,
        MOE_ERROR_ARGUMENT,
        "%s: router.sequence_tokens = %" PRId64 ", wanted > 0 with MOE_BALANCE_SEQUENCE, else 0", what,
        r->sequence_tokens);
  return MOE_OK;
}

/* ---- the configuration */

static moe_status resolve_dtypes(moe_config *c) {
  if (c->dtype == MOE_DTYPE_DEFAULT) c->dtype = MOE_BF16;
  if (c->logits_dtype == MOE_DTYPE_DEFAULT) c->logits_dtype = MOE_FP32;
  if (c->router_dtype == MOE_DTYPE_DEFAULT) c->router_dtype = c->dtype;
  if (c->grad_dtype == MOE_DTYPE_DEFAULT) c->grad_dtype = c->dtype;
  TRY(moe_check_dtype("plan", "dtype", c->dtype));
  TRY(moe_check_dtype("plan", "logits_dtype", c->logits_dtype));
  CHECK(c->router_dtype == MOE_FP32 || c->router_dtype == c->dtype, MOE_ERROR_ARGUMENT,
        "plan: router_dtype = %d, wanted MOE_FP32 or dtype", (int)c->router_dtype);
  CHECK(c->grad_dtype == MOE_FP32 || c->grad_dtype == c->dtype, MOE_ERROR_ARGUMENT,
        "plan: grad_dtype = %d, wanted MOE_FP32 or dtype", (int)c->grad_dtype);
  return MOE_OK;
}

static moe_status check_sizes(const moe_config *c) {
  TRY(moe_check_range("plan", "hidden", c->hidden, 1, MOE_MAX_WIDTH));
  TRY(moe_check_range("plan", "inter", c->inter, 1, MOE_MAX_WIDTH));
  TRY(moe_check_range("plan", "experts", c->experts, 1, MOE_MAX_EXPERTS));
  TRY(moe_check_range("plan", "topk", c->topk, 1, MOE_MAX_TOPK));
  TRY(moe_check_range("plan", "shared_inter", c->shared_inter, 0, MOE_MAX_WIDTH));
  TRY(moe_check_range("plan", "latent", c->latent, 0, MOE_MAX_WIDTH));
  return MOE_OK;
}

static moe_status check_flags(const moe_config *c) {
  TRY(moe_check_range("plan", "weight_on_input", c->weight_on_input, 0, 1));
  TRY(moe_check_range("plan", "transposed", c->transposed, 0, 1));
  TRY(moe_check_range("plan", "entry", (int)c->entry, MOE_ENTRY_HIDDEN, MOE_ENTRY_ROWS));
  TRY(moe_check_range("plan", "drop", (int)c->drop, MOE_DROP_WEIGHT, MOE_DROP_POSITION));
  TRY(moe_check_range("plan", "recompute", (int)c->recompute, MOE_RECOMPUTE_NONE, MOE_RECOMPUTE_H));
  TRY(moe_check_range("plan", "schedule", (int)c->schedule, MOE_SCHEDULE_STATIC, MOE_SCHEDULE_DYNAMIC));
  CHECK(c->capacity_factor != 0 || c->drop == MOE_DROP_WEIGHT, MOE_ERROR_ARGUMENT,
        "plan: drop = %d, wanted 0 without capacity_factor", (int)c->drop);
  return check_finite("plan", "capacity_factor", c->capacity_factor, 0);
}

/* Each way into the layer leaves some of its parts outside; setting those is a mistake, not a wish to ignore. */
static moe_status check_entry(const moe_config *c) {
  const bool routed = c->entry == MOE_ENTRY_HIDDEN || c->entry == MOE_ENTRY_LOGITS;
  static const moe_router_desc none;
  CHECK(routed || memcmp(&c->router, &none, sizeof none) == 0, MOE_ERROR_ARGUMENT,
        "plan: router is set, wanted all zero: MOE_ENTRY_IDS and MOE_ENTRY_ROWS have no router");
  if (c->entry != MOE_ENTRY_ROWS) return MOE_OK;
  CHECK(c->topk == 1, MOE_ERROR_ARGUMENT, "plan: topk = %" PRId64 ", wanted 1 with MOE_ENTRY_ROWS", c->topk);
  CHECK(c->shared_inter == 0 && c->latent == 0 && c->capacity_factor == 0, MOE_ERROR_ARGUMENT,
        "plan: shared_inter, latent or capacity_factor is set, wanted 0 with MOE_ENTRY_ROWS");
  return MOE_OK;
}

static moe_status resolve_config(moe_config *c) {
  TRY(check_sizes(c));
  TRY(check_flags(c));
  TRY(resolve_dtypes(c));
  TRY(check_entry(c));
  TRY(moe_resolve_act("plan", &c->act, c->inter));
  if (c->act.layout == MOE_LAYOUT_INTERLEAVED && c->shared_inter % c->act.interleave != 0)
    return moe_fail(MOE_ERROR_ARGUMENT,
                    "plan: act.interleave = %" PRId64 ", wanted a divisor of shared_inter = %" PRId64,
                    c->act.interleave, c->shared_inter);
  return moe_resolve_router("plan", &c->router, c->experts, c->topk);
}

moe_status moe_plan_create(moe_plan **out, moe_context *ctx, const moe_config *config) {
  CHECK(out != NULL, MOE_ERROR_ARGUMENT, "plan: out = NULL, wanted a place for the plan");
  *out = NULL;
  CHECK(ctx != NULL, MOE_ERROR_ARGUMENT, "plan: ctx = NULL, wanted a context");
  moe_config resolved;
  TRY(moe_take_struct("plan: config", &resolved, sizeof resolved, config));
  TRY(resolve_config(&resolved));
  TRY(moe_check_range("plan", "sm_limit", resolved.sm_limit, 0, ctx->units));
  TRY(ctx->backend->supports(ctx, &resolved));
  moe_plan *plan = moe_host_alloc(sizeof *plan);
  CHECK(plan != NULL, MOE_ERROR_MEMORY, "plan: no memory for %zu bytes", sizeof *plan);
  plan->ctx = ctx;
  plan->config = resolved;
  *out = plan;
  return MOE_OK;
}

void moe_plan_destroy(moe_plan *plan) { moe_host_free(plan); }

moe_status moe_warmup(const moe_plan *plan, moe_stream stream) {
  CHECK(plan != NULL, MOE_ERROR_ARGUMENT, "warmup: plan = NULL, wanted a plan");
  CHECK(stream == NULL || plan->ctx->backend->id != MOE_BACKEND_CPU, MOE_ERROR_ARGUMENT,
        "warmup: stream is given, wanted NULL for the CPU");
  return plan->ctx->backend->warmup(plan->ctx, &plan->config, stream);
}

size_t moe_plan_describe(const moe_plan *plan, int64_t tokens, char *text, size_t bytes) {
  if (bytes > 0 && text != NULL) *text = '\0';
  if (plan == NULL) return 0;
  const moe_config *c = &plan->config;
  const int length = snprintf(
      text, text ? bytes : 0,
      "back end   %s, %d units\n"
      "layer      hidden %" PRId64 ", inter %" PRId64 ", experts %" PRId64 ", topk %" PRId64 ", %s, %s\n"
      "extras     shared %" PRId64 ", latent %" PRId64 ", recompute %s\n"
      "holds      at most %" PRId64 " units, %s schedule\n"
      "tokens     %" PRId64 "\n"
      "workspace  %zu bytes\n"
      "saved      %zu bytes\n",
      plan->ctx->backend->name, plan->ctx->units, c->hidden, c->inter, c->experts, c->topk,
      moe_activation_name(c->act.kind, c->act.gated), moe_dtype_name(c->dtype), c->shared_inter, c->latent,
      c->recompute == MOE_RECOMPUTE_H ? "h" : "none", c->sm_limit > 0 ? c->sm_limit : plan->ctx->units,
      c->schedule == MOE_SCHEDULE_DYNAMIC ? "dynamic" : "static", tokens, moe_plan_workspace(plan, tokens),
      moe_plan_saved(plan, tokens));
  return length < 0 ? 0 : (size_t)length;
}
