/* SPDX-License-Identifier: Apache-2.0
 * The CPU back end: the specification of every op, on OpenMP threads. A context's state is the micro-kernel chosen for
 * this processor; its units are the threads. */

#include "cpu.h"
#include "kernel.h"

#define MAX_THREADS 1024

static moe_status available(void) { return MOE_OK; }

static moe_status open_cpu(moe_context *ctx, int device) {
  CHECK(device >= 0 && device <= MAX_THREADS, MOE_ERROR_ARGUMENT,
        "context: device = %d, wanted a number of threads 0 .. %d for the CPU", device, MAX_THREADS);
  const struct moe_cpu_kernel *kernel;
  TRY(moe_cpu_kernel_select(&kernel));
  const int offered = omp_get_max_threads();
  ctx->device = device;
  ctx->units = device > 0 ? device : offered < MAX_THREADS ? offered : MAX_THREADS;
  ctx->state = (void *)kernel;
  return MOE_OK;
}

static void close_cpu(moe_context *ctx) { (void)ctx; }

static moe_status supports(const moe_context *ctx, const moe_config *config) {
  (void)ctx, (void)config;
  return MOE_OK;
}

static moe_status warmup(moe_context *ctx, const moe_config *config, moe_stream stream) {
  (void)ctx, (void)config, (void)stream;
  return MOE_OK;
}

/* A limit is a context of fewer threads. */
#define MOE_OP(name)                                                                                 \
  static moe_context limited_##name(const moe_context *ctx, const moe_##name##_args *args) {         \
    moe_context limited = *ctx;                                                                      \
    if (args->sm_limit > 0) limited.units = (int)args->sm_limit;                                     \
    return limited;                                                                                  \
  }                                                                                                  \
  static size_t scratch_##name(const moe_context *ctx, const moe_##name##_args *args) {              \
    const moe_context limited = limited_##name(ctx, args);                                           \
    return moe_cpu_##name##_scratch(&limited, args);                                                 \
  }                                                                                                  \
  static moe_status run_##name(moe_context *ctx, const moe_##name##_args *args, moe_stream stream) { \
    moe_context limited = limited_##name(ctx, args);                                                 \
    return moe_cpu_##name(&limited, args, stream);                                                   \
  }
#include "../ops.def"
#undef MOE_OP

const struct backend moe_cpu_backend = {
    .id = MOE_BACKEND_CPU,
    .name = "cpu",
    .available = available,
    .open = open_cpu,
    .close = close_cpu,
    .supports = supports,
    .warmup = warmup,
    .memory_alloc = moe_cpu_memory_alloc,
    .memory_free = moe_cpu_memory_free,
    .memory_copy = moe_cpu_memory_copy,
    .memory_fill = moe_cpu_memory_fill,
    .synchronize = moe_cpu_synchronize,
    .stream_create = moe_cpu_stream_create,
    .stream_destroy = moe_cpu_stream_destroy,
    .event_create = moe_cpu_event_create,
    .event_record = moe_cpu_event_record,
    .event_elapsed_us = moe_cpu_event_elapsed_us,
    .event_destroy = moe_cpu_event_destroy,
#define MOE_OP(name) .name = run_##name, .name##_scratch = scratch_##name,
#include "../ops.def"
#undef MOE_OP
};
