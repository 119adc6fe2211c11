/* SPDX-License-Identifier: Apache-2.0
 *
 * Copies and fills with zero, within device memory. Kernels rather than calls of the runtime, which takes whatever
 * multiprocessors it likes: a block fills one, so that a limit is kept exactly. Bound by bandwidth; what the layer copies
 * is small. */
#include "launch.h"
#include "vector.cuh"

enum {
  THREADS = 1024
};

static __global__ void __launch_bounds__(THREADS, 1) copy_kernel(const __grid_constant__ moe_copy_args p) {
  uint4 *__restrict__ dst = static_cast<uint4 *>(p.dst);
  const uint4 *__restrict__ src = static_cast<const uint4 *>(p.src);
  const int64_t bytes = (int64_t)p.bytes, words = aligned_16(dst) && aligned_16(src) ? bytes / 16 : 0;
#pragma unroll 4
  for (int64_t i = grid_thread(); i < words; i += grid_threads()) dst[i] = src[i];
  for (int64_t i = words * 16 + grid_thread(); i < bytes; i += grid_threads())
    reinterpret_cast<char *>(dst)[i] = reinterpret_cast<const char *>(src)[i];
}

static __global__ void __launch_bounds__(THREADS, 1) zero_kernel(const __grid_constant__ moe_zero_args p) {
  uint4 *data = static_cast<uint4 *>(p.data);
  const int64_t bytes = (int64_t)p.bytes, words = aligned_16(data) ? bytes / 16 : 0;
  for (int64_t i = grid_thread(); i < words; i += grid_threads()) data[i] = make_uint4(0, 0, 0, 0);
  for (int64_t i = words * 16 + grid_thread(); i < bytes; i += grid_threads())
    reinterpret_cast<char *>(data)[i] = 0;
}

static struct cuda_grid grid_of(const moe_context *ctx, int64_t sm_limit, size_t bytes) {
  const int64_t blocks = CEIL_DIV((int64_t)bytes, 16 * THREADS), units = moe_cuda_units(ctx, sm_limit);
  return {blocks < units ? blocks : units, 1, 1, THREADS, 0};
}

size_t moe_cuda_copy_scratch(const moe_context *ctx, const moe_copy_args *args) {
  (void)ctx, (void)args;
  return 0;
}

moe_status moe_cuda_copy(moe_context *ctx, const moe_copy_args *args, moe_stream stream) {
  return launch("copy", copy_kernel, grid_of(ctx, args->sm_limit, args->bytes), *args, stream);
}

size_t moe_cuda_zero_scratch(const moe_context *ctx, const moe_zero_args *args) {
  (void)ctx, (void)args;
  return 0;
}

moe_status moe_cuda_zero(moe_context *ctx, const moe_zero_args *args, moe_stream stream) {
  return launch("zero", zero_kernel, grid_of(ctx, args->sm_limit, args->bytes), *args, stream);
}

KERNELS(copy, (const void *)copy_kernel, (const void *)zero_kernel)
