/* SPDX-License-Identifier: Apache-2.0
 * The instances of gemm.def as the host sees them: a table for each file that compiles some. */
#pragma once

#include <stddef.h>

#include "params.h"

struct gemm_instance {
  const void *kernel;
  int epilogue; /* of gemm.cuh */
  int bn, threads;
  bool kn;
  size_t shared_bytes;
};
struct gemm_table {
  const gemm_instance *rows;
  int count;
};

gemm_table moe_cuda_gemm_store(void);
gemm_table moe_cuda_gemm_act(void);
gemm_table moe_cuda_gemm_dact(void);

/* moe_cuda_wgmma_gemm over parts of its operands, which `a` and `b` point to where there are several; k is that of one. */
moe_status moe_cuda_wgmma_gemm_pairs(moe_context *ctx, const moe_gemm_args *args, const gemm_pairs &pairs,
                                     moe_stream stream);
