/* SPDX-License-Identifier: Apache-2.0
 * The ACT rows of gemm.def. */
#define MOE_GEMM_ACT
#include "instances.cuh"

gemm_table moe_cuda_gemm_act() { return table(); }
