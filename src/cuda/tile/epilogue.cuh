/* SPDX-License-Identifier: Apache-2.0
 *
 * What happens to a warp's accumulators. A tile's 128 rows are two halves of 64; of each half that its consumer has, a warp has 16
 * rows. An epilogue walks them in steps of 64 columns of results or 32 elements of the activation. Results pass through shared
 * memory of the warp's own, so that device memory sees whole 16-byte pieces of rows; h of DACT comes through it the other way.
 *
 * Accumulator 4 J + 2 i + c of lane l is row l/4 + 8 i, column 8 J + 2 (l%4) + c of the warp's rows in a half. A pair is the two
 * columns c = 0, 1; the activation is computed on 4 pairs at a time: all are read, then computed, then written, for only
 * independent instructions hide their latency where a scheduler has one or two warps. No two lanes meet in a bank.
 * h in staging: gate and up of an element are 32 columns apart, or (interleave 1) beside each other. */
#pragma once

#include "../../act.h"

enum {
  STORE = MOE_EPILOGUE_STORE,
  ACT = MOE_EPILOGUE_ACT,
  DACT = MOE_EPILOGUE_DACT
};

typedef __nv_bfloat16 bf16;
typedef __nv_bfloat162 bf16x2;

struct warp_tile {
  bf16 *h;             /* [16, STAGING_LINE], DACT: two of them */
  float *da;           /* [16, DA_LINE], DACT; weight * a takes its place, a pair that of an element */
  const float *weight; /* [16] */
  int lane;
  int row0, row1; /* of the matrix: first row of the warp, end of the tile's rows */
};

/* Columns of h that hold some elements: one or two runs. The second is staged `second` columns after the first. */
struct h_runs {
  int width;     /* of h */
  int begin, up; /* first columns */
  int count;     /* columns of each; 0 or less: none */
  int second;    /* 0: there is one run */
};

__device__ __forceinline__ h_runs runs_of(const gemm_params &p, int f0, int elements) {
  const int left = min(elements, p.inter - f0);
  if (!p.act.gated) return {p.inter, f0, 0, left, 0};
  if (p.act.layout == MOE_LAYOUT_INTERLEAVED) return {2 * p.inter, 2 * f0, 0, 2 * left, 0};
  const int gate = p.up_distance > 0 ? 0 : p.inter;
  return {2 * p.inter, gate + f0, gate + p.up_distance + f0, left, elements};
}

/* The 16-byte piece of a staged line that a lane copies, of lines lane / 8 + 4 i; every count is a multiple of 8 because F is. */
struct lane_piece {
  int staged; /* from the start of the staging */
  int column; /* of the matrix; -1: none */
};

__device__ __forceinline__ lane_piece piece_of(const warp_tile &w, const h_runs &r) {
  const int at = w.lane % 8 * 8;
  const bool up = r.second > 0 && at >= r.second;
  const int inside = up ? at - r.second : at;
  return {w.lane / 8 * STAGING_LINE + at, inside < r.count ? (up ? r.up : r.begin) + inside : -1};
}

__device__ __forceinline__ void rows_out(const warp_tile &w, bf16 *dst, const h_runs &r) {
  const lane_piece piece = piece_of(w, r);
  if (piece.column < 0) return;
  const int row = w.row0 + w.lane / 8;
  bf16 *to = dst + (int64_t)row * r.width + piece.column;
#pragma unroll 2
  for (int i = 0; i < 4; i++)
    if (row + 4 * i < w.row1)
      *reinterpret_cast<int4 *>(to + (int64_t)i * 4 * r.width) =
          *reinterpret_cast<const int4 *>(w.h + piece.staged + i * 4 * STAGING_LINE);
}
/* The other way, asynchronously; columns that there are not come as zeros. */
__device__ __forceinline__ void rows_in(const warp_tile &w, const bf16 *src, const h_runs &r) {
  const lane_piece piece = piece_of(w, r);
  const int row = w.row0 + w.lane / 8;
  const bf16 *from = src + (int64_t)row * r.width + max(piece.column, 0);
  const uint32_t to = smem_address(w.h + piece.staged);
#pragma unroll 1
  for (int i = 0; i < 4; i++)
    if (row + 4 * i < w.row1)
      cp_async_16(to + i * 4 * STAGING_LINE * 2, from + (int64_t)i * 4 * r.width, piece.column >= 0);
}

__device__ __forceinline__ float2 bias_at(const bf16 *bias, int column, int n) {
  if (bias == nullptr || column >= n) return make_float2(0, 0);
  return __bfloat1622float2(*reinterpret_cast<const bf16x2 *>(bias + column));
}

/* COUNT groups of 8 accumulator columns, scaled, biased and rounded, to staging columns `to` on. */
template <int COUNT>
__device__ __forceinline__ void stage_h(const float *acc, const warp_tile &w, int to, const float *weight,
                                        const bf16 *bias, int n0, int n) {
#pragma unroll
  for (int jj = 0; jj < COUNT; jj++) {
    const int inside = 8 * jj + 2 * (w.lane % 4);
    const float2 b = bias_at(bias, n0 + inside, n);
#pragma unroll
    for (int i = 0; i < 2; i++)
      *reinterpret_cast<bf16x2 *>(w.h + (w.lane / 4 + 8 * i) * STAGING_LINE + to + inside) =
          __floats2bfloat162_rn(weight[i] * acc[4 * jj + 2 * i] + b.x,
                                weight[i] * acc[4 * jj + 2 * i + 1] + b.y);
  }
}

#include "activation.cuh"

/* [16, 32] elements from staged lines of `line`, pairs `stride` apart, to columns f0 .. of d [., F]. */
__device__ __forceinline__ void elements_out(const warp_tile &w, const bf16 *src, int line, int stride,
                                             bf16 *d, int width, int f0) {
  const int column = w.lane % 4 * 8, row = w.row0 + w.lane / 4;
  if (f0 + column >= width) return;
  const bf16 *from = src + w.lane / 4 * line + column / 2 * stride;
  bf16 *to = d + (int64_t)row * width + f0 + column;
#pragma unroll 1
  for (int i = 0; i < 2; i++) {
    uint4 v;
    if (stride == 2) {
      v = *reinterpret_cast<const uint4 *>(from + i * 8 * line);
    } else {
      const uint2 *pair = reinterpret_cast<const uint2 *>(from + i * 8 * line);
      v = make_uint4(pair[0].x, pair[1].x, pair[2].x, pair[3].x);
    }
    if (row + 8 * i < w.row1) *reinterpret_cast<uint4 *>(to + (int64_t)i * 8 * width) = v;
  }
}

/* ---- The three epilogues. The loop over steps stays a loop, so that what it does is expanded once; only the part that names
 * accumulators is a switch over constants, as registers cannot be indexed. */

#define EACH_OF_12(CASE) \
  CASE(0) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11)
/* Keeps the compiler from scaling all accumulators before a loop, which would take as many registers again. */
#define HERE_AND_NOW(weight) asm volatile("" : "+f"(weight[0]), "+f"(weight[1]))

/* What a warp has of a half of its consumer's. Made anew in every step from a thread index that is read anew, so that nothing of
 * it takes a register from one step to the next. */
template <int BN, int EPILOGUE>
__device__ __forceinline__ warp_tile half_of(warp_staging<EPILOGUE> *staging, int row0, int row1, int half) {
  const int thread = thread_index(), warp = thread / 32 - GROUP_WARPS, group = warp / GROUP_WARPS;
  const int place = (tile_shape<BN>::in_turn ? half : group) * 64 + warp % GROUP_WARPS * 16;
  return {staging[warp].h[0], staging[warp].da, staging[warp].weight + 16 * half,
          thread % 32,        row0 + place,     row1};
}

/* Before the product: what the epilogue will need of the tile, and the factors of its rows, whose loads the product hides. */
template <int BN, int EPILOGUE>
__device__ __forceinline__ void begin_epilogue(warp_staging<EPILOGUE> *staging, const gemm_params &p,
                                               const tile_place &place) {
  warp_staging<EPILOGUE> &own = staging[warp_index()];
  own.place = place;
  const warp_tile w = half_of<BN>(staging, place.row0, place.row1, 0);
  const int row = w.row0 + w.lane % 16 + w.lane / 16 * 64;
  const bool have = p.weights != nullptr && row < place.row1 && w.lane < 16 * tile_shape<BN>::halves;
  own.weight[w.lane] = have ? p.weights[p.row_slot ? p.row_slot[row] : row] : 1.0f;
  __syncwarp();
}

/* Where plain results go: rows of n columns. */
struct output {
  void *d;
  int n;
  bool fp32, accumulate;
};

/* 8 groups of accumulator columns straight to their place, added to what is there: four lanes hold a 32-byte (fp32) or
 * 16-byte (bf16) piece of a row. */
__device__ __forceinline__ void store_direct(const float *acc, const warp_tile &w, const output &out, int n0,
                                             const float *weight, const bf16 *bias) {
#pragma unroll
  for (int jj = 0; jj < 8; jj++) {
    const int column = n0 + 8 * jj + 2 * (w.lane % 4);
    const float2 b = bias_at(bias, column, out.n);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = w.row0 + w.lane / 4 + 8 * i;
      if (row >= w.row1 || column >= out.n) continue;
      const int64_t at = (int64_t)row * out.n + column;
      const float x = weight[i] * acc[4 * jj + 2 * i] + b.x, y = weight[i] * acc[4 * jj + 2 * i + 1] + b.y;
      if (out.fp32) {
        float2 *d = reinterpret_cast<float2 *>(static_cast<float *>(out.d) + at);
        const float2 old = out.accumulate ? *d : make_float2(0, 0);
        *d = make_float2(old.x + x, old.y + y);
      } else {
        bf16x2 *d = reinterpret_cast<bf16x2 *>(static_cast<bf16 *>(out.d) + at);
        const float2 old = __bfloat1622float2(*d);
        *d = __floats2bfloat162_rn(old.x + x, old.y + y);
      }
    }
  }
}

/* The factors of a lane's two rows. */
struct two_weights {
  float of[2];
};
__device__ __forceinline__ two_weights weights_of(const warp_tile &w) {
  return {{w.weight[w.lane / 4], w.weight[w.lane / 4 + 8]}};
}

/* 32 columns of a half, 16 accumulators, to staging columns `to` on; `unit` counts them in the order of accumulators. */
template <int BN>
__device__ __forceinline__ void stage_unit(const float *acc, const warp_tile &w, int unit, int to,
                                           const float *weight, const bf16 *bias, int n0, int n) {
  switch (unit) {
#define CASE(U)                                             \
  case U:                                                   \
    if constexpr (U < tile_shape<BN>::accumulators / 16)    \
      stage_h<4>(acc + U * 16, w, to, weight, bias, n0, n); \
    break;
    EACH_OF_12(CASE)
#undef CASE
  }
}

/* One step of a plain result, of STEPS. */
template <int STEPS>
__device__ __forceinline__ void store_step(const float *acc, const warp_tile &w, const output &out, int step,
                                           int n0, const bf16 *bias, const two_weights &weight) {
  const bool direct = out.fp32 || out.accumulate;
  switch (step) {
#define CASE(STEP)                                                     \
  case STEP:                                                           \
    if constexpr (STEP < STEPS) {                                      \
      if (direct)                                                      \
        store_direct(acc + STEP * 32, w, out, n0, weight.of, bias);    \
      else                                                             \
        stage_h<8>(acc + STEP * 32, w, 0, weight.of, bias, n0, out.n); \
    }                                                                  \
    break;
    EACH_OF_12(CASE)
#undef CASE
  }
  if (direct) return;
  __syncwarp();
  rows_out(w, static_cast<bf16 *>(out.d), {out.n, n0, 0, min(64, out.n - n0), 0});
  __syncwarp();
}

template <int BN>
__device__ __forceinline__ void store_steps(const float *acc, warp_staging<STORE> *staging,
                                            const gemm_params &p) {
#pragma unroll 1
  for (int step = 0; step < tile_shape<BN>::accumulators / 32; step++) {
    const tile_place place = staging[warp_index()].place;
    const warp_tile w = half_of<BN>(staging, place.row0, place.row1, step / (BN / 64));
    const int n0 = place.column * BN + step % (BN / 64) * 64;
    if (n0 >= p.n || w.row0 >= w.row1) continue;
    const bf16 *bias = p.bias ? p.bias + (int64_t)place.expert * p.n : nullptr;
    store_step<tile_shape<BN>::accumulators / 32>(acc, w, {p.d, p.n, p.d_fp32 != 0, p.accumulate != 0}, step,
                                                  n0, bias, weights_of(w));
  }
}

template <int BN>
__device__ __forceinline__ void act_steps(const float *acc, warp_staging<ACT> *staging,
                                          const gemm_params &p) {
  const int parts = p.act.gated ? 2 : 1; /* of 32 columns each */
  const int steps = BN / 32 / parts;     /* of a half */
#pragma unroll 1
  for (int half = 0, step = 0; half < tile_shape<BN>::halves;
       step + 1 < steps ? step++ : (half++, step = 0)) {
    const tile_place place = staging[warp_index()].place;
    const warp_tile w = half_of<BN>(staging, place.row0, place.row1, half);
    const bf16 *bias = p.bias ? p.bias + (int64_t)place.expert * p.n : nullptr;
    const int f0 = (place.column * steps + step) * 32;
    if (f0 >= p.inter || w.row0 >= w.row1) continue;
    const h_runs runs = runs_of(p, f0, 32);
    two_weights weight = weights_of(w);
#pragma unroll 1
    for (int part = 0; part < parts; part++) {
      HERE_AND_NOW(weight.of);
      const int unit = half * (BN / 32) + (p.halves == 2 ? part * steps + step : step * parts + part);
      const int n0 = runs.second > 0 && part > 0 ? runs.up : runs.begin + 32 * part;
      stage_unit<BN>(acc, w, unit, 32 * part, weight.of, bias, n0, p.n);
    }
    __syncwarp();
    if (p.h != nullptr) rows_out(w, p.h, runs);
    __syncwarp();
    act_switch(w, p);
    __syncwarp();
    elements_out(w, w.h, STAGING_LINE, in_pairs(p) ? 4 : 2, static_cast<bf16 *>(p.d), p.inter, f0);
    __syncwarp();
  }
}

/* The part of the tile and the staging that a DACT step works on. */
template <int BN>
__device__ __forceinline__ warp_tile dact_part(warp_staging<DACT> *staging, const tile_place &place,
                                               int step) {
  warp_tile w = half_of<BN>(staging, place.row0, place.row1, step / (BN / 32));
  w.h += step % 2 * 16 * STAGING_LINE;
  return w;
}

/* Asks for the h of a step. */
template <int BN>
__device__ __forceinline__ void dact_ask(warp_staging<DACT> *staging, const gemm_params &p, int step) {
  const tile_place place = staging[warp_index()].place;
  const int f0 = place.column * BN + step % (BN / 32) * 32;
  if (step < tile_shape<BN>::accumulators / 16)
    rows_in(dact_part<BN>(staging, place, step), p.h, runs_of(p, f0, 32));
  cp_async_commit();
}

/* The last step of a half: the sums of its rows, over the four lanes of each. */
__device__ __forceinline__ void dact_sums(const warp_tile &w, const gemm_params &p, int column, float *sums) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = w.row0 + w.lane / 4 + 8 * i;
    float sum = sums[i] + __shfl_xor_sync(0xffffffffu, sums[i], 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (p.partial != nullptr && w.lane % 4 == 0 && row < w.row1)
      p.partial[(int64_t)row * p.column_tiles + column] = sum;
    sums[i] = 0;
  }
}

/* Hands a lane's da of a step to where its pairs are computed. */
template <int BN> __device__ __forceinline__ void stage_da(const float *acc, const warp_tile &w, int step) {
  float *da = w.da + w.lane / 4 * DA_LINE + w.lane % 4 * 2;
  switch (step) {
#define CASE(U)                                                                    \
  case U:                                                                          \
    if constexpr (U < tile_shape<BN>::accumulators / 16)                           \
      for (int q = 0; q < 8; q++) /* unrolled, so that acc has constant indices */ \
        *reinterpret_cast<float2 *>(da + q % 2 * 8 * DA_LINE + q / 2 * 8) =        \
            make_float2(acc[U * 16 + 2 * q], acc[U * 16 + 2 * q + 1]);             \
    break;
    EACH_OF_12(CASE)
#undef CASE
  }
}

/* 32 elements a step; h is asked for a step ahead, for the first one before the product. */
template <int BN>
__device__ __forceinline__ void dact_steps(const float *acc, warp_staging<DACT> *staging,
                                           const gemm_params &p) {
  float sums[2] = {0, 0};
#pragma unroll 1
  for (int step = 0; step < tile_shape<BN>::accumulators / 16; step++) {
    dact_ask<BN>(staging, p, step + 1);
    stage_da<BN>(acc, dact_part<BN>(staging, staging[warp_index()].place, step), step);
    cp_async_wait<1>();
    __syncwarp();
    dact_switch(dact_part<BN>(staging, staging[warp_index()].place, step), p, sums);
    __syncwarp();
    const tile_place place = staging[warp_index()].place;
    const warp_tile w = dact_part<BN>(staging, place, step);
    const int f0 = place.column * BN + step % (BN / 32) * 32;
    if (p.d != nullptr)
      elements_out(w, reinterpret_cast<const bf16 *>(w.da), 2 * DA_LINE, 4, static_cast<bf16 *>(p.d), p.inter,
                   f0);
    rows_out(w, p.dh, runs_of(p, f0, 32));
    if (step % (BN / 32) == BN / 32 - 1) dact_sums(w, p, place.column, sums);
    __syncwarp();
  }
  cp_async_wait<0>();
}

template <int BN>
__device__ __forceinline__ void epilogue(const float *acc, warp_staging<STORE> *staging,
                                         const gemm_params &p) {
  store_steps<BN>(acc, staging, p);
}
template <int BN>
__device__ __forceinline__ void epilogue(const float *acc, warp_staging<ACT> *staging, const gemm_params &p) {
  act_steps<BN>(acc, staging, p);
}
template <int BN>
__device__ __forceinline__ void epilogue(const float *acc, warp_staging<DACT> *staging,
                                         const gemm_params &p) {
  dact_steps<BN>(acc, staging, p);
}
