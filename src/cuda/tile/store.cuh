/* SPDX-License-Identifier: Apache-2.0
 *
 * Epilogues that store results: rounded to bf16, or as fp32, or added to what is there. Device memory sees whole 16-byte pieces,
 * 128 bytes of a row at a time, all loads of a thread before its stores. */
#pragma once

#include "result.cuh"

/* Where results go: rows of n columns, of which the tile has `rows` from row0 on and those from column0 on. */
struct output {
  void *d;
  int n;
  bool fp32, accumulate;
  int64_t row0;
  int rows, column0;
};

template <int BN>
__device__ __forceinline__ void store_result(const result_tile<bf16, BN> &tile, const output &out, int band) {
  const epilogue_lane own = lane_of_band(band);
  const int column0 = out.column0 + own.piece * 8;
  bf16 *to = static_cast<bf16 *>(out.d) + (out.row0 + own.line) * out.n + column0;
  const bf16 *from = &tile.line[own.line][own.piece * 8];
#pragma unroll 1
  for (int column = 0; column < BN && column0 + column < out.n; column += 64) {
    uint4 v[EPILOGUE_ROWS];
#pragma unroll
    for (int i = 0; i < EPILOGUE_ROWS; i++)
      v[i] = *reinterpret_cast<const uint4 *>(from + 4 * i * (BN + 8) + column);
#pragma unroll
    for (int i = 0; i < EPILOGUE_ROWS; i++)
      if (own.line + 4 * i < out.rows)
        *reinterpret_cast<uint4 *>(to + 4 * i * (int64_t)out.n + column) = v[i];
  }
}

__device__ __forceinline__ float4 sum_of(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ __forceinline__ float4 floats_of(uint2 pairs) {
  const float2 x = floats_of(pairs.x), y = floats_of(pairs.y);
  return make_float4(x.x, x.y, y.x, y.y);
}

/* Pieces of 4 numbers to, or onto, results of type T: float or bf16. */
template <typename T, int BN>
__device__ __forceinline__ void store_numbers(const result_tile<float, BN> &tile, const output &out,
                                              int band) {
  constexpr bool fp32 = sizeof(T) == 4;
  const epilogue_lane own = lane_of_band(band);
  const int column0 = out.column0 + own.piece * 4;
  T *to = static_cast<T *>(out.d) + (out.row0 + own.line) * out.n + column0;
  const float *from = &tile.line[own.line][own.piece * 4];
#pragma unroll 1
  for (int column = 0; column < BN && column0 + column < out.n; column += 32) {
    float4 v[EPILOGUE_ROWS];
    if (out.accumulate) {
#pragma unroll
      for (int i = 0; i < EPILOGUE_ROWS; i++) {
        const T *old = to + 4 * i * (int64_t)out.n + column;
        if (own.line + 4 * i >= out.rows) continue;
        if constexpr (fp32)
          v[i] = *reinterpret_cast<const float4 *>(old);
        else
          v[i] = floats_of(*reinterpret_cast<const uint2 *>(old));
      }
    }
#pragma unroll
    for (int i = 0; i < EPILOGUE_ROWS; i++) {
      const float4 x = *reinterpret_cast<const float4 *>(from + 4 * i * (BN + 8) + column);
      v[i] = out.accumulate ? sum_of(v[i], x) : x;
    }
#pragma unroll
    for (int i = 0; i < EPILOGUE_ROWS; i++) {
      T *at = to + 4 * i * (int64_t)out.n + column;
      if (own.line + 4 * i >= out.rows) continue;
      if constexpr (fp32)
        *reinterpret_cast<float4 *>(at) = v[i];
      else
        *reinterpret_cast<uint2 *>(at) = make_uint2(pair_of(v[i].x, v[i].y), pair_of(v[i].z, v[i].w));
    }
  }
}

template <int BN>
__device__ __forceinline__ void store_result(const result_tile<float, BN> &tile, const output &out,
                                             int band) {
  if (out.fp32)
    store_numbers<float>(tile, out, band);
  else
    store_numbers<bf16>(tile, out, band);
}
