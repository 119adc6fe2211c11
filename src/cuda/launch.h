/* SPDX-License-Identifier: Apache-2.0
 *
 * The ops of the CUDA back end: one function of C linkage a column of the table, and the launch of a kernel in them.
 * Scratch depends on sizes and flags alone, never on pointers, and grows with tokens and rows. */
#pragma once

#include "device.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MOE_OP(name)                                                                              \
  moe_status moe_cuda_##name(moe_context *ctx, const moe_##name##_args *args, moe_stream stream); \
  size_t moe_cuda_##name##_scratch(const moe_context *ctx, const moe_##name##_args *args);
#include "../ops.def"
#undef MOE_OP

/* The multiprocessors that an op may hold: one that launches no more blocks than these, each too large to share one, holds
 * no more of them. */
static inline int64_t moe_cuda_units(const moe_context *ctx, int64_t sm_limit) {
  return sm_limit > 0 && sm_limit < ctx->units ? sm_limit : ctx->units;
}

/* Each file of kernels loads its own. */
#define CUDA_KERNEL_FILES(FILE) \
  FILE(act)                     \
  FILE(balance)                 \
  FILE(bias_grad)               \
  FILE(combine)                 \
  FILE(convert)                 \
  FILE(copy)                    \
  FILE(parts)                   \
  FILE(permute)                 \
  FILE(route)                   \
  FILE(router_loss)             \
  FILE(simt)                    \
  FILE(sort)                    \
  FILE(token_mask)              \
  FILE(wgmma)
#define FILE_LOADER(file) moe_status moe_cuda_load_##file(void);
CUDA_KERNEL_FILES(FILE_LOADER)
#undef FILE_LOADER

/* The general matrix products: any size, dtype and alignment (simt.cu). */
moe_status moe_cuda_simt_gemm(moe_context *ctx, const moe_gemm_args *args, moe_stream stream);
size_t moe_cuda_simt_gemm_scratch(const moe_gemm_args *args);
moe_status moe_cuda_simt_wgrad(moe_context *ctx, const moe_wgrad_args *args, moe_stream stream);
size_t moe_cuda_simt_wgrad_scratch(const moe_wgrad_args *args);

/* The fast ones on the tensor cores, where they fit (gemm/). */
bool moe_cuda_wgmma_gemm_fits(const moe_gemm_args *args);
moe_status moe_cuda_wgmma_gemm(moe_context *ctx, const moe_gemm_args *args, moe_stream stream);
size_t moe_cuda_wgmma_gemm_scratch(const moe_gemm_args *args);
bool moe_cuda_wgmma_wgrad_fits(const moe_wgrad_args *args);
moe_status moe_cuda_wgmma_wgrad(moe_context *ctx, const moe_wgrad_args *args, moe_stream stream);
size_t moe_cuda_wgmma_wgrad_scratch(const moe_wgrad_args *args);

/* Products of one expert with an fp32 operand, on the tensor cores by parts of it (gemm/parts.cu). */
bool moe_cuda_parts_gemm_fits(const moe_gemm_args *args);
moe_status moe_cuda_parts_gemm(moe_context *ctx, const moe_gemm_args *args, moe_stream stream);
size_t moe_cuda_parts_gemm_scratch(const moe_gemm_args *args);
bool moe_cuda_parts_wgrad_fits(const moe_wgrad_args *args);
moe_status moe_cuda_parts_wgrad(moe_context *ctx, const moe_wgrad_args *args, moe_stream stream);
size_t moe_cuda_parts_wgrad_scratch(const moe_wgrad_args *args);

/* dweights[slot(r)] = sum over c < column_tiles of partial[r, c], in a fixed order, + <A row, dot_bias[e]>, for the rows that an
 * expert has. The last step of MOE_EPILOGUE_DACT. */
moe_status moe_cuda_finish_dweights(const moe_gemm_args *args, const float *partial, int64_t column_tiles,
                                    moe_stream stream);

#ifdef __cplusplus
}

/* Launches a kernel of one argument; the types must agree. */
template <typename P>
static inline moe_status launch(const char *op, void (*kernel)(P), struct cuda_grid grid, P argument,
                                moe_stream stream) {
  return moe_cuda_launch(op, (const void *)kernel, grid, &argument, stream);
}

/* Defines moe_cuda_load_<file>. */
#define KERNELS(file, ...)                                                  \
  moe_status moe_cuda_load_##file(void) {                                   \
    const void *const kernels[] = {__VA_ARGS__};                            \
    return moe_cuda_load(kernels, (int)(sizeof kernels / sizeof *kernels)); \
  }
#endif
