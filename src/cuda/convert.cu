/* SPDX-License-Identifier: Apache-2.0
 *
 * y[i] = x[i] in another format, by the codecs of ../format.h: the bits are those of the CPU. A thread converts eight
 * elements at a time; a block fills a multiprocessor, so that a limit of those is kept exactly. Bound by bandwidth. */
#include "launch.h"
#include "vector.cuh"

enum {
  THREADS = 1024
};

static __global__ void __launch_bounds__(THREADS, 1)
    convert_kernel(const __grid_constant__ moe_convert_args p) {
  const bool vector = aligned_16(p.x) && aligned_16(p.y);
  for (int64_t i = grid_thread() * EIGHT; i < p.count; i += grid_threads() * EIGHT) {
    float v[EIGHT];
    load_eight(v, p.x, p.x_dtype, i, p.count - i, vector);
    store_eight(p.y, p.y_dtype, i, v, p.count - i, vector);
  }
}

size_t moe_cuda_convert_scratch(const moe_context *ctx, const moe_convert_args *args) {
  (void)ctx, (void)args;
  return 0;
}

moe_status moe_cuda_convert(moe_context *ctx, const moe_convert_args *args, moe_stream stream) {
  const int64_t blocks = CEIL_DIV(args->count, EIGHT * THREADS), units = moe_cuda_units(ctx, args->sm_limit);
  return launch("convert", convert_kernel, {blocks < units ? blocks : units, 1, 1, THREADS, 0}, *args,
                stream);
}

KERNELS(convert, (const void *)convert_kernel)
