/* SPDX-License-Identifier: Apache-2.0
 * The ACT rows of gemm.def. */
#define MOE_GEMM_ACT
#include "instances.cuh"

const gemm_instance *moe_cuda_gemm_act(int bn, bool kn) { return find_instance(bn, kn); }
