/* SPDX-License-Identifier: Apache-2.0
 *
 * mask[t] = t >= *token_count or padding_mask[t]; twin of src/cpu/token_mask.c. A thread has one token; a byte a token is
 * far below what matters. */
#include "launch.h"

enum {
  THREADS = 1024
};

static __global__ void token_mask_kernel(const __grid_constant__ moe_token_mask_args p) {
  const int64_t count = p.token_count != nullptr ? *p.token_count : p.tokens;
  for (int64_t t = (int64_t)blockIdx.x * THREADS + threadIdx.x; t < p.tokens;
       t += (int64_t)gridDim.x * THREADS)
    p.mask[t] = t >= count || (p.padding_mask != nullptr && p.padding_mask[t] != 0);
}

size_t moe_cuda_token_mask_scratch(const moe_context *ctx, const moe_token_mask_args *args) {
  (void)ctx, (void)args;
  return 0;
}

moe_status moe_cuda_token_mask(moe_context *ctx, const moe_token_mask_args *args, moe_stream stream) {
  const int64_t blocks = CEIL_DIV(args->tokens, THREADS), units = moe_cuda_units(ctx, args->sm_limit);
  return launch("token_mask", token_mask_kernel, {blocks < units ? blocks : units, 1, 1, THREADS, 0}, *args,
                stream);
}

KERNELS(token_mask, (const void *)token_mask_kernel)
