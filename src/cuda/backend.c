/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA back end: the twins of src/cpu on a device of compute capability 9.0.
 * Idea: an entry of the table makes the context's device current and calls the op. The device stays current on the
 * calling thread: restoring it would cost every call two more, and a caller with several devices sets its own anyway.
 * Invariant: the ops launch kernels on the stream and do nothing else: no allocation, no wait, no read of the device. */
#include "launch.h"

#define MOE_OP(name)                                                                                 \
  static moe_status run_##name(moe_context *ctx, const moe_##name##_args *args, moe_stream stream) { \
    TRY(moe_cuda_enter(#name, ctx));                                                                 \
    return moe_cuda_##name(ctx, args, stream);                                                       \
  }
#include "../ops.def"
#undef MOE_OP

static moe_status supports(const moe_context *ctx, const moe_config *config) {
  (void)ctx, (void)config;
  return MOE_OK;
}

/* The copy takes the time of R D elements written, gathering some per cent of a product of R D inter, twice as many in a sum over rows: so
 * inter decides (docs/log/gemm.md, 18). */
static bool orders_rows(const moe_config *config, int64_t inter, bool sums) {
  return config->dtype == MOE_BF16 && inter >= (sums ? 1024 : 2048);
}

static moe_status load_kernels(void) {
#define LOAD(file) TRY(moe_cuda_load_##file());
  CUDA_KERNEL_FILES(LOAD)
#undef LOAD
  return MOE_OK;
}

/* All at once here, so that no run call, captured or timed, meets a first launch. */
static moe_status open_cuda(moe_context *ctx, int device) {
  TRY(moe_cuda_open(ctx, device));
  const moe_status status = load_kernels();
  if (status != MOE_OK) moe_cuda_close(ctx);
  return status;
}

/* Opening the context has loaded everything. */
static moe_status warmup(moe_context *ctx, const moe_config *config, moe_stream stream) {
  (void)config, (void)stream;
  return moe_cuda_enter("warmup", ctx);
}

/* ---- which product: the tensor cores where they can, by parts if need be, else the general kernel ----------------- */

static size_t largest(size_t a, size_t b, size_t c) {
  const size_t larger = a > b ? a : b;
  return larger > c ? larger : c;
}

/* What fits may depend on which arrays there are, so scratch is enough for any. */
size_t moe_cuda_gemm_scratch(const moe_context *ctx, const moe_gemm_args *args) {
  (void)ctx;
  return largest(moe_cuda_wgmma_gemm_scratch(args), moe_cuda_parts_gemm_scratch(args),
                 moe_cuda_simt_gemm_scratch(args));
}

moe_status moe_cuda_gemm(moe_context *ctx, const moe_gemm_args *args, moe_stream stream) {
  if (moe_cuda_wgmma_gemm_fits(args)) return moe_cuda_wgmma_gemm(ctx, args, stream);
  if (moe_cuda_parts_gemm_fits(args)) return moe_cuda_parts_gemm(ctx, args, stream);
  return moe_cuda_simt_gemm(ctx, args, stream);
}

size_t moe_cuda_wgrad_scratch(const moe_context *ctx, const moe_wgrad_args *args) {
  (void)ctx;
  return largest(moe_cuda_wgmma_wgrad_scratch(args), moe_cuda_parts_wgrad_scratch(args),
                 moe_cuda_simt_wgrad_scratch(args));
}

moe_status moe_cuda_wgrad(moe_context *ctx, const moe_wgrad_args *args, moe_stream stream) {
  if (moe_cuda_wgmma_wgrad_fits(args)) return moe_cuda_wgmma_wgrad(ctx, args, stream);
  if (moe_cuda_parts_wgrad_fits(args)) return moe_cuda_parts_wgrad(ctx, args, stream);
  return moe_cuda_simt_wgrad(ctx, args, stream);
}

const struct backend moe_cuda_backend = {
    .id = MOE_BACKEND_CUDA,
    .name = "cuda",
    .available = moe_cuda_available,
    .open = open_cuda,
    .close = moe_cuda_close,
    .supports = supports,
    .warmup = warmup,
    .orders_rows = orders_rows,
    .memory_alloc = moe_cuda_memory_alloc,
    .memory_free = moe_cuda_memory_free,
    .memory_copy = moe_cuda_memory_copy,
    .memory_fill = moe_cuda_memory_fill,
    .synchronize = moe_cuda_synchronize,
    .stream_create = moe_cuda_stream_create,
    .stream_destroy = moe_cuda_stream_destroy,
    .graph_begin = moe_cuda_graph_begin,
    .graph_end = moe_cuda_graph_end,
    .graph_launch = moe_cuda_graph_launch,
    .graph_destroy = moe_cuda_graph_destroy,
    .event_create = moe_cuda_event_create,
    .event_record = moe_cuda_event_record,
    .event_elapsed_us = moe_cuda_event_elapsed_us,
    .event_destroy = moe_cuda_event_destroy,
#define MOE_OP(name) .name = run_##name, .name##_scratch = moe_cuda_##name##_scratch,
#include "../ops.def"
#undef MOE_OP
};
