/* SPDX-License-Identifier: Apache-2.0
 *
 * Eight neighbouring elements of any format as fp32 in registers, and back: the unit of work of the kernels that move rows.
 * `vector` says that the eight begin at a multiple of 16 bytes; then they move by 16-byte accesses, else one by one. The
 * formats are those of ../format.h, so a value has the same bits as on the CPU. */
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../format.h"

enum {
  EIGHT = 8
};

__host__ __device__ __forceinline__ bool aligned_16(const void *p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

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

/* By the hardware's conversion, which rounds alike; NaN, whose bits it does not keep, by the codec. */
__device__ __forceinline__ uint4 encode_word(const float *v, moe_dtype dtype) {
  uint32_t word[EIGHT / 2];
  bool nan = false;
#pragma unroll
  for (int i = 0; i < EIGHT; i++) nan |= v[i] != v[i];
#pragma unroll
  for (int i = 0; i < EIGHT / 2; i++) {
    const __nv_bfloat162 bf16 = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
    const __half2 fp16 = __floats2half2_rn(v[2 * i], v[2 * i + 1]);
    if (dtype == MOE_BF16)
      memcpy(&word[i], &bf16, sizeof bf16);
    else
      memcpy(&word[i], &fp16, sizeof fp16);
  }
#pragma unroll
  for (int i = 0; nan && i < EIGHT; i++) {
    const uint32_t code = dtype == MOE_BF16 ? moe_encode_bf16(v[i]) : moe_encode_fp16(v[i]);
    word[i / 2] = i % 2 ? word[i / 2] | code << 16 : code;
  }
  return make_uint4(word[0], word[1], word[2], word[3]);
}

__device__ __forceinline__ void decode_word(float *v, const uint4 &w, moe_dtype dtype) {
  decode_pair(v, w.x, dtype);
  decode_pair(v + 2, w.y, dtype);
  decode_pair(v + 4, w.z, dtype);
  decode_pair(v + 6, w.w, dtype);
}

/* Eight aligned elements that are read once, undecoded: all loads of a thread can be under way before one is waited for. */
template <int DTYPE> struct raw_eight { uint4 word[DTYPE == MOE_FP32 ? 2 : 1]; };

template <int DTYPE> __device__ __forceinline__ raw_eight<DTYPE> load_raw(const char *at) {
  const uint4 *from = reinterpret_cast<const uint4 *>(at);
  if constexpr (DTYPE == MOE_FP32)
    return {__ldcs(from), __ldcs(from + 1)};
  else
    return {__ldcs(from)};
}

template <int DTYPE> __device__ __forceinline__ void decode_raw(float *v, const raw_eight<DTYPE> &raw) {
  if constexpr (DTYPE == MOE_FP32) {
#pragma unroll
    for (int i = 0; i < EIGHT / 4; i++) {
      v[4 * i] = __uint_as_float(raw.word[i].x), v[4 * i + 1] = __uint_as_float(raw.word[i].y);
      v[4 * i + 2] = __uint_as_float(raw.word[i].z), v[4 * i + 3] = __uint_as_float(raw.word[i].w);
    }
  } else {
    decode_word(v, raw.word[0], (moe_dtype)DTYPE);
  }
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
    decode_word(v, *reinterpret_cast<const uint4 *>(static_cast<const uint16_t *>(array) + first), dtype);
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
    *reinterpret_cast<uint4 *>(static_cast<uint16_t *>(array) + first) = encode_word(v, dtype);
  }
}

/* Rows in memory, `bytes` each, from the columns of this lane on; of `columns` so many are left. */
struct row_source {
  const char *first;
  uint32_t bytes;
  int columns;
};

/* sum[c] += weight x eight columns of `rows` rows, in order, c spans of 256 columns apart. Lane from + j knows row j and its
 * weight; a row of -1 is none. A warp. */
template <int DTYPE, int ROWS, int SPAN>
__device__ __forceinline__ void add_rows(float (*sum)[EIGHT], const row_source &source, int own_row,
                                         float own_weight, int from) {
  constexpr int SPAN_COLUMNS = 32 * EIGHT, BYTES = DTYPE == MOE_FP32 ? 4 : 2;
  const unsigned present = __ballot_sync(0xffffffffu, own_row >= 0) >> from;
  raw_eight<DTYPE> raw[ROWS][SPAN];
#pragma unroll
  for (int j = 0; j < ROWS; j++) {
    const uint32_t row = (uint32_t)__shfl_sync(0xffffffffu, own_row, from + j);
    const char *at = source.first + (uint64_t)row * source.bytes;
#pragma unroll
    for (int c = 0; c < SPAN; c++)
      if ((present >> j & 1) && c * SPAN_COLUMNS < source.columns)
        raw[j][c] = load_raw<DTYPE>(at + c * SPAN_COLUMNS * BYTES);
  }
#pragma unroll
  for (int j = 0; j < ROWS; j++) {
    const float weight = __shfl_sync(0xffffffffu, own_weight, from + j);
    if (!(present >> j & 1)) continue;
#pragma unroll
    for (int c = 0; c < SPAN; c++) {
      float v[EIGHT];
      decode_raw<DTYPE>(v, raw[j][c]);
#pragma unroll
      for (int i = 0; i < EIGHT; i++) sum[c][i] += weight * v[i];
    }
  }
}

/* The index of this thread in the whole grid, and how many threads there are, for loops over more work than threads. */
__device__ __forceinline__ int64_t grid_thread() { return (int64_t)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ int64_t grid_threads() { return (int64_t)gridDim.x * blockDim.x; }

/* Work cut into `pieces` a row, walked with a fixed stride and no division but at the start. */
struct walk {
  int64_t row, row_step;
  int piece, piece_step, pieces;
};

__device__ __forceinline__ walk walk_from(int64_t first, int64_t stride, int pieces) {
  return {first / pieces, stride / pieces, (int)(first % pieces), (int)(stride % pieces), pieces};
}

__device__ __forceinline__ void walk_on(walk *w) {
  w->row += w->row_step;
  w->piece += w->piece_step;
  if (w->piece >= w->pieces) w->piece -= w->pieces, w->row++;
}

/* Blocks for `work` warps: at most one a multiprocessor, so that a limit of those is kept exactly, of at most `most` warps;
 * little work is spread over many small blocks. */
static inline struct cuda_grid grid_of_warps(int64_t units, int64_t work, int most) {
  const int64_t each = CEIL_DIV(work, units),
                warps = each < 1      ? 1
                        : each < most ? each
                                      : most,
                blocks = CEIL_DIV(work, warps);
  return {blocks < units ? blocks : units, 1, 1, (int)warps * 32, 0};
}
