/* SPDX-License-Identifier: Apache-2.0
 * moeblas_ops.h: check the arguments, call the table. One expansion of ops.def gives both functions of every op. */

#include "ops_check.h"

static moe_status check_scratch(const char *op, const void *scratch, size_t found, size_t wanted) {
  CHECK(found >= wanted, MOE_ERROR_WORKSPACE, "%s: scratch_bytes = %zu, wanted at least %zu", op, found,
        wanted);
  CHECK(scratch != NULL || wanted == 0, MOE_ERROR_WORKSPACE, "%s: scratch = NULL, wanted %zu bytes", op,
        wanted);
  CHECK((uintptr_t)scratch % 16 == 0, MOE_ERROR_ARGUMENT,
        "%s: scratch = %p, wanted an address aligned to 16 bytes", op, scratch);
  return MOE_OK;
}

static moe_status check_context(const char *op, const moe_context *ctx, moe_stream stream) {
  CHECK(ctx != NULL, MOE_ERROR_ARGUMENT, "%s: ctx = NULL, wanted a context", op);
  CHECK(stream == NULL || ctx->backend->id != MOE_BACKEND_CPU, MOE_ERROR_ARGUMENT,
        "%s: stream is given, wanted NULL for the CPU", op);
  return MOE_OK;
}

static moe_status check_use(const char *op, const moe_context *ctx, int64_t sm_limit, moe_schedule schedule) {
  TRY(moe_check_range(op, "sm_limit", sm_limit, 0, ctx->units));
  return moe_check_range(op, "schedule", (int)schedule, MOE_SCHEDULE_STATIC, MOE_SCHEDULE_DYNAMIC);
}

#define MOE_OP(name)                                                                                 \
  size_t moe_##name##_scratch(const moe_context *ctx, const moe_##name##_args *given) {              \
    moe_##name##_args args;                                                                          \
    struct resolved resolved;                                                                        \
    if (check_context(#name, ctx, NULL) != MOE_OK) return SIZE_MAX;                                  \
    if (moe_take_struct(#name ": args", &args, sizeof args, given) != MOE_OK) return SIZE_MAX;       \
    if (check_use(#name, ctx, args.sm_limit, args.schedule) != MOE_OK) return SIZE_MAX;              \
    if (moe_sizes_##name(&args, &resolved) != MOE_OK) return SIZE_MAX;                               \
    return ctx->backend->name##_scratch ? ctx->backend->name##_scratch(ctx, &args) : 0;              \
  }                                                                                                  \
  moe_status moe_##name(moe_context *ctx, const moe_##name##_args *given, moe_stream stream) {       \
    moe_##name##_args args;                                                                          \
    struct resolved resolved;                                                                        \
    TRY(check_context(#name, ctx, stream));                                                          \
    TRY(moe_take_struct(#name ": args", &args, sizeof args, given));                                 \
    TRY(check_use(#name, ctx, args.sm_limit, args.schedule));                                        \
    TRY(moe_sizes_##name(&args, &resolved));                                                         \
    TRY(moe_arrays_##name(&args));                                                                   \
    TRY(check_scratch(#name, args.scratch, args.scratch_bytes,                                       \
                      ctx->backend->name##_scratch ? ctx->backend->name##_scratch(ctx, &args) : 0)); \
    return ctx->backend->name(ctx, &args, stream);                                                   \
  }
#include "ops.def"
#undef MOE_OP
