/* SPDX-License-Identifier: Apache-2.0
 *
 * What a back end is: one table of functions, a pair an op. The arguments are the public structs of moeblas_ops.h and
 * have been checked (src/ops.c) or built from a checked plan (src/layer.c), so a back end trusts them: pointers that must
 * be there are there, enums are in range, defaults are filled in (moe_router_desc and moe_act_desc arrive resolved by
 * src/plan.c: no 0 that stands for a default, gate_max and up_max +INFINITY and up_min -INFINITY where there is no clamp,
 * interleave >= 1, groups >= 1, topk_groups >= 1). What lies in tensors (ids, offsets, values) is never trusted. */
#pragma once

#include <stdbool.h>

#include "moeblas_ops.h"

struct backend {
  moe_backend id;
  const char *name;
  /* MOE_OK if it can run here; else a status with its sentence. */
  moe_status (*available)(void);
  /* Resolves `device` into ctx->device, ctx->units and ctx->state. */
  moe_status (*open)(moe_context *ctx, int device);
  void (*close)(moe_context *ctx);
  /* Refuses, with a sentence, a configuration that is sound but not done here. */
  moe_status (*supports)(const moe_context *ctx, const moe_config *config);
  moe_status (*warmup)(moe_context *ctx, const moe_config *config, moe_stream stream);
  /* Whether products of tokens' rows with experts `inter` wide, or sums over those rows alone, are faster from a copy of the rows in
   * order, its making included, than by gathering. NULL: never. */
  bool (*orders_rows)(const moe_config *config, int64_t inter, bool sums);
  /* Memory, streams and time: moeblas_ops.h; arguments are checked in memory.c and stream.c. `event` is the back end's part of a timer. */
  moe_status (*memory_alloc)(moe_context *ctx, size_t bytes, void **out);
  void (*memory_free)(moe_context *ctx, void *memory);
  moe_status (*memory_copy)(moe_context *ctx, void *dst, const void *src, size_t bytes);
  moe_status (*memory_fill)(moe_context *ctx, void *dst, int byte, size_t bytes);
  moe_status (*synchronize)(moe_context *ctx, moe_stream stream);
  moe_status (*stream_create)(moe_context *ctx, moe_stream *out);
  void (*stream_destroy)(moe_context *ctx, moe_stream stream);
  /* Graphs: moeblas_ops.h. All four NULL: it has none. `executable` is the back end's part of a moe_graph. */
  moe_status (*graph_begin)(moe_context *ctx, moe_stream stream);
  moe_status (*graph_end)(moe_context *ctx, moe_stream stream, void **executable, int64_t *launches);
  moe_status (*graph_launch)(moe_context *ctx, void *executable, moe_stream stream);
  void (*graph_destroy)(moe_context *ctx, void *executable);
  moe_status (*event_create)(moe_context *ctx, void **event);
  moe_status (*event_record)(moe_context *ctx, void *event, moe_stream stream);
  moe_status (*event_elapsed_us)(moe_context *ctx, void *from, void *to, double *out);
  void (*event_destroy)(moe_context *ctx, void *event);
#define MOE_OP(name)                                                                       \
  moe_status (*name)(moe_context * ctx, const moe_##name##_args *args, moe_stream stream); \
  size_t (*name##_scratch)(const moe_context *ctx, const moe_##name##_args *args); /* NULL: needs none */
#include "ops.def"
#undef MOE_OP
};

struct moe_context {
  const struct backend *backend;
  int device;
  int units; /* CPU: threads; CUDA: multiprocessors */
  void *state;
};

extern const struct backend moe_cpu_backend;
#ifdef MOE_CUDA
extern const struct backend moe_cuda_backend;
#endif
