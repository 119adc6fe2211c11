/* SPDX-License-Identifier: Apache-2.0
 *
 * What: memory and time of the CUDA back end.
 * Idea: cudaMalloc aligns to 256 bytes or more; events are the runtime's; a copy finds its direction by itself.
 * Invariant: a copy or fill is done when it returns. */
#include "device.h"

/* The runtime has no block of 0 bytes, so that gets one byte. */
moe_status moe_cuda_memory_alloc(moe_context *ctx, size_t bytes, void **out) {
  TRY(moe_cuda_enter("memory_alloc", ctx));
  return moe_cuda_result("memory_alloc", cudaMalloc(out, bytes > 0 ? bytes : 1));
}

/* An error that surfaces in a call without a status stays with the runtime, which repeats it at the next call. */
void moe_cuda_memory_free(moe_context *ctx, void *memory) {
  if (moe_cuda_enter("memory_free", ctx) == MOE_OK) (void)moe_cuda_result("memory_free", cudaFree(memory));
}

moe_status moe_cuda_memory_copy(moe_context *ctx, void *dst, const void *src, size_t bytes) {
  TRY(moe_cuda_enter("memory_copy", ctx));
  CUDA_TRY("memory_copy", cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, NULL));
  return moe_cuda_result("memory_copy", cudaStreamSynchronize(NULL));
}

moe_status moe_cuda_memory_fill(moe_context *ctx, void *dst, int byte, size_t bytes) {
  TRY(moe_cuda_enter("memory_fill", ctx));
  CUDA_TRY("memory_fill", cudaMemsetAsync(dst, byte, bytes, NULL));
  return moe_cuda_result("memory_fill", cudaStreamSynchronize(NULL));
}

moe_status moe_cuda_synchronize(moe_context *ctx, moe_stream stream) {
  TRY(moe_cuda_enter("synchronize", ctx));
  return moe_cuda_result("synchronize", cudaStreamSynchronize(stream));
}

moe_status moe_cuda_event_create(moe_context *ctx, void **event) {
  TRY(moe_cuda_enter("timer_create", ctx));
  cudaEvent_t created;
  CUDA_TRY("timer_create", cudaEventCreate(&created));
  *event = created;
  return MOE_OK;
}

moe_status moe_cuda_event_record(moe_context *ctx, void *event, moe_stream stream) {
  TRY(moe_cuda_enter("timer_record", ctx));
  return moe_cuda_result("timer_record", cudaEventRecord(event, stream));
}

moe_status moe_cuda_event_elapsed_us(moe_context *ctx, void *from, void *to, double *out) {
  TRY(moe_cuda_enter("timer_elapsed_us", ctx));
  float milliseconds;
  CUDA_TRY("timer_elapsed_us", cudaEventSynchronize(to));
  CUDA_TRY("timer_elapsed_us", cudaEventElapsedTime(&milliseconds, from, to));
  *out = 1e3 * (double)milliseconds;
  return MOE_OK;
}

void moe_cuda_event_destroy(moe_context *ctx, void *event) {
  if (moe_cuda_enter("timer_destroy", ctx) == MOE_OK)
    (void)moe_cuda_result("timer_destroy", cudaEventDestroy(event));
}
