/* SPDX-License-Identifier: Apache-2.0
 * The STORE rows of gemm.def. */
#define MOE_GEMM_STORE
#include "instances.cuh"

const gemm_instance *moe_cuda_gemm_store(int bn, bool kn) { return find_instance(bn, kn); }
