/* SPDX-License-Identifier: Apache-2.0 */
#include "gemm.cuh"
template __global__ void gemm_kernel<256, 4, STORE, false>(const __grid_constant__ CUtensorMap, const __grid_constant__ gemm_params);
template __global__ void gemm_kernel<256, 4, STORE, true>(const __grid_constant__ CUtensorMap, const __grid_constant__ gemm_params);
template __global__ void gemm_kernel<256, 4, ACT, false>(const __grid_constant__ CUtensorMap, const __grid_constant__ gemm_params);
template __global__ void gemm_kernel<128, 4, DACT, true>(const __grid_constant__ CUtensorMap, const __grid_constant__ gemm_params);
