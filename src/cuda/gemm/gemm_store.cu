/* SPDX-License-Identifier: Apache-2.0
 * The STORE rows of gemm.def. */
#define MOE_GEMM_STORE
#include "instances.cuh"

gemm_table moe_cuda_gemm_store() { return table(); }
