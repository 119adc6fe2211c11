/* SPDX-License-Identifier: Apache-2.0
 * What the host side of the CUDA back end shares: a context's device, errors, the launch. */
#pragma once

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "../backend.h"
#include "../util.h"

/* ctx->state. */
struct cuda_device {
  void *encode_tensor_map; /* cuTensorMapEncodeTiled of the driver, NULL if it has none */
};

/* MOE_OK, or MOE_ERROR_DEVICE with the name of the op and the runtime's words. */
moe_status moe_cuda_result(const char *op, cudaError_t result);
#define CUDA_TRY(op, call) TRY(moe_cuda_result((op), (call)))

/* Makes the context's device current on this thread; it stays so, as with cudaSetDevice. */
moe_status moe_cuda_enter(const char *op, const moe_context *ctx);

/* MOE_OK if there is a driver and a device of compute capability 9.0, else what is missing. */
moe_status moe_cuda_available(void);
moe_status moe_cuda_open(moe_context *ctx, int device);
void moe_cuda_close(moe_context *ctx);

/* A launch with one argument, passed by value. The status is that of this launch (or of an earlier error that stays). */
struct cuda_grid {
  int64_t x, y, z;
  int threads;
  size_t shared; /* dynamic, bytes */
};
moe_status moe_cuda_launch(const char *op, const void *kernel, struct cuda_grid grid, void *argument,
                           moe_stream stream);

/* Loads kernels onto the current device, which otherwise happens at their first launch, and allows them all the shared
 * memory that a block can have. Every kernel must have been loaded before it is launched. */
moe_status moe_cuda_load(const void *const *kernels, int count);

/* Memory and time of the table in backend.h (memory.c). */
moe_status moe_cuda_memory_alloc(moe_context *ctx, size_t bytes, void **out);
void moe_cuda_memory_free(moe_context *ctx, void *memory);
moe_status moe_cuda_memory_copy(moe_context *ctx, void *dst, const void *src, size_t bytes);
moe_status moe_cuda_memory_fill(moe_context *ctx, void *dst, int byte, size_t bytes);
moe_status moe_cuda_synchronize(moe_context *ctx, moe_stream stream);
moe_status moe_cuda_event_create(moe_context *ctx, void **event);
moe_status moe_cuda_event_record(moe_context *ctx, void *event, moe_stream stream);
moe_status moe_cuda_event_elapsed_us(moe_context *ctx, void *from, void *to, double *out);
void moe_cuda_event_destroy(moe_context *ctx, void *event);

/* Streams and graphs of the table (stream.c). */
moe_status moe_cuda_stream_create(moe_context *ctx, moe_stream *out);
void moe_cuda_stream_destroy(moe_context *ctx, moe_stream stream);
moe_status moe_cuda_graph_begin(moe_context *ctx, moe_stream stream);
moe_status moe_cuda_graph_end(moe_context *ctx, moe_stream stream, void **executable, int64_t *launches);
moe_status moe_cuda_graph_launch(moe_context *ctx, void *executable, moe_stream stream);
void moe_cuda_graph_destroy(moe_context *ctx, void *executable);

#ifdef __cplusplus
}
#endif
