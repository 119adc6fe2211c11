/* SPDX-License-Identifier: Apache-2.0
 *
 * What: memory and timers of a context, for callers that know no CUDA.
 * Idea: check the arguments, call the table. A timer is a context and an event of its back end.
 * Invariant: nothing here is called by the layer, whose run calls never allocate. */
#include "backend.h"
#include "util.h"

struct moe_timer {
  moe_context *ctx;
  void *event;
  bool recorded;
};

#define CONTEXT(op, ctx) CHECK((ctx) != NULL, MOE_ERROR_ARGUMENT, "%s: ctx = NULL, wanted a context", op)
#define STREAM(op, ctx, stream)                                                        \
  CHECK((stream) == NULL || (ctx)->backend->id != MOE_BACKEND_CPU, MOE_ERROR_ARGUMENT, \
        "%s: stream is given, wanted NULL for the CPU", op)

moe_status moe_memory_alloc(moe_context *ctx, size_t bytes, void **out) {
  CHECK(out != NULL, MOE_ERROR_ARGUMENT, "memory_alloc: out = NULL, wanted a place for the pointer");
  *out = NULL;
  CONTEXT("memory_alloc", ctx);
  CHECK(bytes <= PTRDIFF_MAX, MOE_ERROR_ARGUMENT, "memory_alloc: bytes = %zu, wanted at most %td", bytes,
        (ptrdiff_t)PTRDIFF_MAX);
  const moe_status status = ctx->backend->memory_alloc(ctx, bytes, out);
  if (status != MOE_OK) *out = NULL; /* a failed call of CUDA may have written it */
  return status;
}

void moe_memory_free(moe_context *ctx, void *memory) {
  if (ctx != NULL && memory != NULL) ctx->backend->memory_free(ctx, memory);
}

moe_status moe_memory_copy(moe_context *ctx, void *dst, const void *src, size_t bytes) {
  CONTEXT("memory_copy", ctx);
  if (bytes == 0) return MOE_OK;
  CHECK(dst != NULL && src != NULL, MOE_ERROR_ARGUMENT,
        "memory_copy: dst or src = NULL, wanted both for %zu bytes", bytes);
  return ctx->backend->memory_copy(ctx, dst, src, bytes);
}

moe_status moe_memory_fill(moe_context *ctx, void *dst, int byte, size_t bytes) {
  CONTEXT("memory_fill", ctx);
  if (bytes == 0) return MOE_OK;
  CHECK(dst != NULL, MOE_ERROR_ARGUMENT, "memory_fill: dst = NULL, wanted %zu bytes", bytes);
  return ctx->backend->memory_fill(ctx, dst, byte, bytes);
}

moe_status moe_synchronize(moe_context *ctx, moe_stream stream) {
  CONTEXT("synchronize", ctx);
  STREAM("synchronize", ctx, stream);
  return ctx->backend->synchronize(ctx, stream);
}

moe_status moe_timer_create(moe_context *ctx, moe_timer **out) {
  CHECK(out != NULL, MOE_ERROR_ARGUMENT, "timer_create: out = NULL, wanted a place for the timer");
  *out = NULL;
  CONTEXT("timer_create", ctx);
  moe_timer *timer = moe_host_alloc(sizeof *timer);
  CHECK(timer != NULL, MOE_ERROR_MEMORY, "timer_create: no memory for %zu bytes", sizeof *timer);
  timer->ctx = ctx;
  const moe_status status = ctx->backend->event_create(ctx, &timer->event);
  if (status == MOE_OK)
    *out = timer;
  else
    moe_host_free(timer);
  return status;
}

moe_status moe_timer_record(moe_timer *timer, moe_stream stream) {
  CHECK(timer != NULL, MOE_ERROR_ARGUMENT, "timer_record: timer = NULL, wanted a timer");
  STREAM("timer_record", timer->ctx, stream);
  TRY(timer->ctx->backend->event_record(timer->ctx, timer->event, stream));
  timer->recorded = true;
  return MOE_OK;
}

moe_status moe_timer_elapsed_us(moe_timer *from, moe_timer *to, double *out) {
  CHECK(from != NULL && to != NULL && out != NULL, MOE_ERROR_ARGUMENT,
        "timer_elapsed_us: from, to or out = NULL, wanted two timers and a place for the time");
  CHECK(from->ctx == to->ctx, MOE_ERROR_ARGUMENT,
        "timer_elapsed_us: timers of two contexts, wanted two of one");
  CHECK(from->recorded && to->recorded, MOE_ERROR_ARGUMENT,
        "timer_elapsed_us: a timer was never recorded, wanted two that were");
  return to->ctx->backend->event_elapsed_us(to->ctx, from->event, to->event, out);
}

void moe_timer_destroy(moe_timer *timer) {
  if (timer == NULL) return;
  timer->ctx->backend->event_destroy(timer->ctx, timer->event);
  moe_host_free(timer);
}
