/* SPDX-License-Identifier: Apache-2.0
 *
 * Eight neighbouring elements of any format as fp32 in registers, and back: the unit of work of the kernels that move rows.
 * `vector` says that the eight begin at a multiple of 16 bytes; then they move by 16-byte accesses, else one by one. The
 * formats are those of ../format.h, so a value has the same bits as on the CPU. */
#pragma once

#include "../format.h"

enum {
  EIGHT = 8
};

__device__ __forceinline__ bool aligned_16(const void *p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

/* Whether every row of `columns` elements begins at a multiple of 16 bytes. */
__device__ __forceinline__ bool aligned_rows(const void *p, moe_dtype dtype, int64_t columns) {
  return aligned_16(p) && columns % (dtype == MOE_FP32 ? 4 : 8) == 0;
}

__device__ __forceinline__ void decode_pair(float *v, uint32_t word, moe_dtype dtype) {
  if (dtype == MOE_BF16) {
    v[0] = moe_decode_bf16((uint16_t)word);
    v[1] = moe_decode_bf16((uint16_t)(word >> 16));
  } else {
    v[0] = moe_decode_fp16((uint16_t)word);
    v[1] = moe_decode_fp16((uint16_t)(word >> 16));
  }
}

__device__ __forceinline__ uint32_t encode_pair(const float *v, moe_dtype dtype) {
  if (dtype == MOE_BF16) return moe_encode_bf16(v[0]) | (uint32_t)moe_encode_bf16(v[1]) << 16;
  return moe_encode_fp16(v[0]) | (uint32_t)moe_encode_fp16(v[1]) << 16;
}

/* v[0..count) = elements first .. first+count-1; the rest of v is 0. */
__device__ __forceinline__ void load_eight(float *v, const void *array, moe_dtype dtype, int64_t first,
                                           int64_t count, bool vector) {
  if (!vector || count < EIGHT) {
#pragma unroll
    for (int i = 0; i < EIGHT; i++) v[i] = i < count ? moe_load(array, dtype, first + i) : 0.0f;
  } else if (dtype == MOE_FP32) {
    const float4 *from = reinterpret_cast<const float4 *>(static_cast<const float *>(array) + first);
    const float4 low = from[0], high = from[1];
    v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
    v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
  } else {
    const uint4 w = *reinterpret_cast<const uint4 *>(static_cast<const uint16_t *>(array) + first);
    decode_pair(v, w.x, dtype);
    decode_pair(v + 2, w.y, dtype);
    decode_pair(v + 4, w.z, dtype);
    decode_pair(v + 6, w.w, dtype);
  }
}

__device__ __forceinline__ void store_eight(void *array, moe_dtype dtype, int64_t first, const float *v,
                                            int64_t count, bool vector) {
  if (!vector || count < EIGHT) {
#pragma unroll
    for (int i = 0; i < EIGHT; i++)
      if (i < count) moe_store(array, dtype, first + i, v[i]);
  } else if (dtype == MOE_FP32) {
    float4 *to = reinterpret_cast<float4 *>(static_cast<float *>(array) + first);
    to[0] = make_float4(v[0], v[1], v[2], v[3]);
    to[1] = make_float4(v[4], v[5], v[6], v[7]);
  } else {
    *reinterpret_cast<uint4 *>(static_cast<uint16_t *>(array) + first) =
        make_uint4(encode_pair(v, dtype), encode_pair(v + 2, dtype), encode_pair(v + 4, dtype),
                   encode_pair(v + 6, dtype));
  }
}

/* The index of this thread in the whole grid, and how many threads there are, for loops over more work than threads. */
__device__ __forceinline__ int64_t grid_thread() { return (int64_t)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ int64_t grid_threads() { return (int64_t)gridDim.x * blockDim.x; }

/* Blocks of 256 threads for `work` items, at most 2^20 of them. */
static inline struct cuda_grid grid_over(int64_t work) {
  const int64_t blocks = CEIL_DIV(work, 256);
  return {blocks < 1 << 20 ? blocks : 1 << 20, 1, 1, 256, 0};
}
