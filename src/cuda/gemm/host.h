/* SPDX-License-Identifier: Apache-2.0
 * The instances of gemm.def as the host sees them. */
#pragma once

#include <stddef.h>

struct gemm_instance {
  const void *kernel;
  int bn;
  bool kn;
  size_t shared_bytes;
};

const gemm_instance *moe_cuda_gemm_store(int bn, bool kn);
const gemm_instance *moe_cuda_gemm_act(int bn, bool kn);
const gemm_instance *moe_cuda_gemm_dact(int bn, bool kn);
