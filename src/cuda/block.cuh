/* SPDX-License-Identifier: Apache-2.0
 * Sums over the threads of a block, in an order fixed by the number of threads. The block has whole warps, at most 32; all of
 * its threads call, and `shared` (32 elements) may be used again at once. */
#pragma once

/* The same sum on every thread. */
template <typename T> __device__ __forceinline__ T block_sum(T value, T *shared) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) value += __shfl_xor_sync(0xffffffffu, value, d);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  T sum = 0;
  for (int w = 0; w < (int)blockDim.x / 32; w++) sum += shared[w];
  __syncthreads();
  return sum;
}

/* Sum of the values of lanes 0 .. this one. */
__device__ __forceinline__ int warp_scan(int value) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, value, d);
    if ((int)threadIdx.x % 32 >= d) value += other;
  }
  return value;
}

/* Sum of the values of threads 0 .. this one; *total is that of all. */
__device__ __forceinline__ int block_scan(int value, int *shared, int *total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  value = warp_scan(value);
  if (lane == 31) shared[warp] = value;
  __syncthreads();
  const int sums = warp_scan(lane < (int)blockDim.x / 32 ? shared[lane] : 0);
  const int before = __shfl_sync(0xffffffffu, sums, (warp + 31) % 32);
  __syncthreads();
  *total = __shfl_sync(0xffffffffu, sums, 31);
  return value + (warp > 0 ? before : 0);
}
