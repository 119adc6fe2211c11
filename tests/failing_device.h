/* SPDX-License-Identifier: Apache-2.0
 *
 * What: a device that fails: each call of a back end in turn.
 * Idea: a back end that computes on the CPU and for the rest looks like a device: memory apart, streams, graphs. Its n-th
 * call is refused with a sentence, for every n.
 * Invariant: the sentence arrives as it was said, all that was had is given back, and the same call succeeds afterwards. */
#pragma once

#include "test.h"

#include "../src/backend.h"
#include "../src/util.h"

/* ---- the device --------------------------------------------------------------------------------------------------- */

static struct {
  int64_t calls;
  int64_t fail_at; /* the number of the call that fails; -1: none */
  int held;        /* contexts, blocks, streams, events and graphs */
} device = {.fail_at = -1};

static moe_status turn(const char *name) {
  if (device.calls++ != device.fail_at) return MOE_OK;
  return moe_fail(MOE_ERROR_DEVICE, "%s: the device fails at call %d", name, (int)device.fail_at);
}

static moe_status had(const char *name) {
  TRY(turn(name));
  device.held++;
  return MOE_OK;
}

#define MOE_OP(name)                                                                                  \
  static moe_status call_##name(moe_context *ctx, const moe_##name##_args *args, moe_stream stream) { \
    TRY(turn(#name));                                                                                 \
    return moe_cpu_backend.name(ctx, args, stream);                                                   \
  }
#include "../src/ops.def"
#undef MOE_OP

/* Before each timed call a bench clears more than any cache. That block is only written, so here it is none. */
enum {
  VAST = 1 << 24
};
static moe_status call_zero_unless_vast(moe_context *ctx, const moe_zero_args *args, moe_stream stream) {
  return args->bytes > VAST ? turn("zero") : call_zero(ctx, args, stream);
}

static moe_status memory_alloc(moe_context *ctx, size_t bytes, void **out) {
  TRY(had("memory_alloc"));
  return moe_cpu_backend.memory_alloc(ctx, bytes > VAST ? 1 : bytes, out);
}
static void memory_free(moe_context *ctx, void *memory) {
  device.held--;
  moe_cpu_backend.memory_free(ctx, memory);
}
static moe_status memory_copy(moe_context *ctx, void *dst, const void *src, size_t bytes) {
  TRY(turn("memory_copy"));
  return moe_cpu_backend.memory_copy(ctx, dst, src, bytes);
}
static moe_status memory_fill(moe_context *ctx, void *dst, int byte, size_t bytes) {
  TRY(turn("memory_fill"));
  return moe_cpu_backend.memory_fill(ctx, dst, byte, bytes);
}
static moe_status synchronize(moe_context *ctx, moe_stream stream) {
  (void)ctx, (void)stream;
  return turn("synchronize");
}
static moe_status warmup(moe_context *ctx, const moe_config *config, moe_stream stream) {
  (void)ctx, (void)config, (void)stream;
  return turn("warmup");
}

static moe_status stream_create(moe_context *ctx, moe_stream *out) {
  TRY(had("stream_create"));
  *out = (moe_stream)(void *)ctx;
  return MOE_OK;
}
static void stream_destroy(moe_context *ctx, moe_stream stream) {
  (void)ctx, (void)stream;
  device.held--;
}

/* What is recorded is computed at once: a launch finds its results there. */
static moe_status graph_begin(moe_context *ctx, moe_stream stream) {
  (void)ctx, (void)stream;
  return turn("graph_begin");
}
static moe_status graph_end(moe_context *ctx, moe_stream stream, void **executable, int64_t *launches) {
  (void)stream;
  TRY(had("graph_end"));
  *executable = ctx;
  *launches = 7;
  return MOE_OK;
}
static moe_status graph_launch(moe_context *ctx, void *executable, moe_stream stream) {
  (void)ctx, (void)executable, (void)stream;
  return turn("graph_launch");
}
static void graph_destroy(moe_context *ctx, void *executable) {
  (void)ctx, (void)executable;
  device.held--;
}

static moe_status event_create(moe_context *ctx, void **event) {
  TRY(had("timer_create"));
  return moe_cpu_backend.event_create(ctx, event);
}
static moe_status event_record(moe_context *ctx, void *event, moe_stream stream) {
  (void)stream;
  TRY(turn("timer_record"));
  return moe_cpu_backend.event_record(ctx, event, NULL);
}
/* All calls take the same time, so that nothing hangs on the noise of a clock. */
static moe_status event_elapsed_us(moe_context *ctx, void *from, void *to, double *out) {
  (void)ctx, (void)from, (void)to;
  TRY(turn("timer_elapsed_us"));
  *out = 8;
  return MOE_OK;
}
static void event_destroy(moe_context *ctx, void *event) {
  device.held--;
  moe_cpu_backend.event_destroy(ctx, event);
}

static void close_context(moe_context *ctx) {
  device.held--;
  moe_cpu_backend.close(ctx);
}

static struct backend failing_backend;
__attribute__((constructor)) static void make_failing_backend(void) {
  failing_backend = moe_cpu_backend; /* the queries for scratch, and what the CPU supports */
  failing_backend.id = MOE_BACKEND_CUDA;
  failing_backend.name = "test";
  failing_backend.close = close_context;
  failing_backend.warmup = warmup;
  failing_backend.memory_alloc = memory_alloc, failing_backend.memory_free = memory_free;
  failing_backend.memory_copy = memory_copy, failing_backend.memory_fill = memory_fill;
  failing_backend.synchronize = synchronize;
  failing_backend.stream_create = stream_create, failing_backend.stream_destroy = stream_destroy;
  failing_backend.graph_begin = graph_begin, failing_backend.graph_end = graph_end;
  failing_backend.graph_launch = graph_launch, failing_backend.graph_destroy = graph_destroy;
  failing_backend.event_create = event_create, failing_backend.event_record = event_record;
  failing_backend.event_elapsed_us = event_elapsed_us, failing_backend.event_destroy = event_destroy;
#define MOE_OP(name) failing_backend.name = call_##name;
#include "../src/ops.def"
#undef MOE_OP
  failing_backend.zero = call_zero_unless_vast;
}

/* The n-th call of those that `run` makes fails, for each n; then none. -1 as an answer: it went wrong, and it was said. */
struct scene {
  const char *name;
  int (*run)(void *context); /* 0, or how it failed, its sentence in `said` */
  void *context;
};
static char said[4096];

static inline int attempt(const struct scene *scene, int64_t n) {
  const int held = device.held;
  char sentence[64];
  said[0] = '\0';
  device.calls = 0;
  device.fail_at = n;
  const int status = scene->run(scene->context);
  const bool failed = n >= 0 && device.calls > n;
  device.fail_at = -1;
  snprintf(sentence, sizeof sentence, ": the device fails at call %d", (int)n);
  EXPECT(device.held == held, "%s, call %d fails: %d things are kept", scene->name, (int)n,
         device.held - held);
  EXPECT((status != 0) == failed, "%s, call %d %s: status %d", scene->name, (int)n,
         failed ? "fails" : "does not fail", status);
  EXPECT(!failed || strstr(said, sentence) != NULL, "%s, call %d fails, but it says: %s", scene->name, (int)n,
         said);
  return status;
}

static inline void fail_in_turn(const struct scene *scene) {
  REQUIRE(attempt(scene, -1) == 0, "%s fails on a device that works: %s", scene->name, said);
  const int64_t calls = device.calls;
  REQUIRE(calls > 0, "%s calls nothing", scene->name);
  for (int64_t n = 0; n < calls; n++) attempt(scene, n);
  REQUIRE(attempt(scene, -1) == 0, "%s fails afterwards: %s", scene->name, said);
  printf("     %s: %d calls failed in turn\n", scene->name, (int)calls);
}

/* Puts the device in place of the CPU. */
static inline void fail_on(moe_context *cpu) {
  cpu->backend = &failing_backend;
  device.held++;
}
