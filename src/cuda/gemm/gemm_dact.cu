/* SPDX-License-Identifier: Apache-2.0
 * The DACT rows of gemm.def. */
#define MOE_GEMM_DACT
#include "instances.cuh"

gemm_table moe_cuda_gemm_dact() { return table(); }
