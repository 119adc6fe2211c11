/* SPDX-License-Identifier: Apache-2.0
 * The DACT rows of gemm.def. */
#define MOE_GEMM_DACT
#include "instances.cuh"

const gemm_instance *moe_cuda_gemm_dact(int bn, bool kn) { return find_instance(bn, kn); }
