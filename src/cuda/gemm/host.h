/* SPDX-License-Identifier: Apache-2.0
 * The instances of gemm.def as the host sees them: a table for each file that compiles some. */
#pragma once

#include <stddef.h>

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
