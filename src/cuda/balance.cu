/* SPDX-License-Identifier: Apache-2.0
 *
 * The load of the experts, measured (load_stats) and evened out without a loss term (bias_update); twin of
 * src/cpu/balance.c. One block, as there are at most 4096 numbers.
 * Invariant    comparisons with the mean are made in integers; an expert at exactly the mean load keeps its bias. */
#include "launch.h"
#include "block.cuh"

enum {
  THREADS = 1024
};

static __global__ void bias_update_kernel(const __grid_constant__ moe_bias_update_args p) {
  __shared__ long long shared[32];
  long long total = 0;
  for (int64_t e = threadIdx.x; e < p.experts; e += THREADS) total += p.counts[e];
  total = block_sum(total, shared);
  for (int64_t e = threadIdx.x; e < p.experts; e += THREADS) {
    const long long load = p.counts[e] * p.experts; /* against the mean, both times E */
    p.bias[e] += p.rate * (float)((load < total) - (load > total));
  }
}

/* Counts come from a tensor: a negative one is taken as 0. */
__device__ __forceinline__ double count_of(const moe_load_stats_args &p, int64_t e) {
  return p.counts[e] > 0 ? p.counts[e] : 0;
}

__device__ __forceinline__ double block_max(double value, double *shared) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) value = fmax(value, __shfl_xor_sync(0xffffffffu, value, d));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  for (int w = 0; w < THREADS / 32; w++) value = fmax(value, shared[w]);
  __syncthreads();
  return value;
}

static __global__ void load_stats_kernel(const __grid_constant__ moe_load_stats_args p) {
  __shared__ double shared[32];
  double total = 0, max = 0, squares = 0, entropy = 0;
  for (int64_t e = threadIdx.x; e < p.experts; e += THREADS) {
    total += count_of(p, e);
    max = fmax(max, count_of(p, e));
  }
  total = block_sum(total, shared);
  max = block_max(max, shared);
  const double mean = total / (double)p.experts;
  for (int64_t e = threadIdx.x; e < p.experts; e += THREADS) {
    const double count = count_of(p, e), share = count / total;
    squares += (count - mean) * (count - mean);
    if (count > 0) entropy -= share * log(share);
  }
  squares = block_sum(squares, shared);
  entropy = block_sum(entropy, shared);
  if (threadIdx.x != 0) return;
  moe_load_summary load = {0, 0, 0, 0, 0, 0};
  if (total > 0)
    load = {(float)total,        (float)max,
            (float)mean,         (float)(sqrt(squares / (double)p.experts) / mean),
            (float)(max / mean), (float)entropy};
  *p.load = load;
}

size_t moe_cuda_bias_update_scratch(const moe_context *ctx, const moe_bias_update_args *args) {
  (void)ctx, (void)args;
  return 0;
}

moe_status moe_cuda_bias_update(moe_context *ctx, const moe_bias_update_args *args, moe_stream stream) {
  (void)ctx;
  return launch("bias_update", bias_update_kernel, {1, 1, 1, THREADS, 0}, *args, stream);
}

size_t moe_cuda_load_stats_scratch(const moe_context *ctx, const moe_load_stats_args *args) {
  (void)ctx, (void)args;
  return 0;
}

moe_status moe_cuda_load_stats(moe_context *ctx, const moe_load_stats_args *args, moe_stream stream) {
  (void)ctx;
  return launch("load_stats", load_stats_kernel, {1, 1, 1, THREADS, 0}, *args, stream);
}

KERNELS(balance, (const void *)bias_update_kernel, (const void *)load_stats_kernel)
