/* SPDX-License-Identifier: Apache-2.0
 *
 * What happens to a warp's 16 x BN accumulators: 64 columns a step, through shared memory of the warp's own, so that device
 * memory sees whole 32-byte sectors of rows and the activation runs in a plain loop, on any activation, without registers
 * of the product being indexed. Lines of 72 (36) elements keep both sides free of bank conflicts.
 *
 * Accumulator 4 J + 2 i + c of lane l is row l/4 + 8 i, column 8 J + 2 (l%4) + c of the warp's rows.
 * Staged h of a step: 64 columns as they come, except that a gated pair in halves is staged as 32 gate | 32 up. Element f of
 * a step is then at f * stride and its up element `up` further on: (1, 32) for halves and for runs of 32, (2, 1) for pairs. */
#pragma once

#include "../../act.h"

enum { STORE = MOE_EPILOGUE_STORE, ACT = MOE_EPILOGUE_ACT, DACT = MOE_EPILOGUE_DACT };

typedef __nv_bfloat16 bf16;
typedef __nv_bfloat162 bf16x2;

struct warp_tile {
  bf16 *h;     /* [16, STAGING_COLUMNS] */
  float *da;   /* [16, 36], DACT */
  float *sum;  /* [16], DACT */
  int lane;
  int row0, row1; /* of the matrix: first row of the warp, end of the tile's rows */
};

/* Columns of h of elements f0 .. of a step: one or two runs. */
struct h_runs {
  int64_t width;    /* of h */
  int64_t begin[2]; /* first column */
  int count[2];     /* columns, 0 .. 64 */
};

__device__ __forceinline__ h_runs runs_of(const gemm_params &p, int64_t f0, int elements) {
  const int left = (int)min((int64_t)elements, p.inter - f0);
  if (!p.act.gated) return {p.inter, {f0, 0}, {left, 0}};
  if (p.act.layout == MOE_LAYOUT_INTERLEAVED) return {2 * (int64_t)p.inter, {2 * f0, 0}, {2 * left, 0}};
  const int64_t gate = p.up_distance > 0 ? 0 : p.inter;
  return {2 * (int64_t)p.inter, {gate + f0, gate + p.up_distance + f0}, {left, left}};
}

/* Second run is staged from column 32 on. 16-byte pieces; every count is a multiple of 8 because F is. */
__device__ __forceinline__ void rows_out(const warp_tile &w, bf16 *dst, const h_runs &r) {
  for (int run = 0; run < 2; run++) {
    const int pieces = r.count[run] / 8;
    for (int piece = w.lane; piece < 128; piece += 32) {
      const int line = piece / 8, at = piece % 8;
      if (at < pieces && w.row0 + line < w.row1)
        *reinterpret_cast<int4 *>(dst + (w.row0 + line) * r.width + r.begin[run] + at * 8) =
            *reinterpret_cast<const int4 *>(w.h + line * STAGING_COLUMNS + run * 32 + at * 8);
    }
  }
}
__device__ __forceinline__ void rows_in(const warp_tile &w, const bf16 *src, const h_runs &r) {
  for (int run = 0; run < 2; run++) {
    const int pieces = r.count[run] / 8;
    for (int piece = w.lane; piece < 128; piece += 32) {
      const int line = piece / 8, at = piece % 8;
      if (at < pieces && w.row0 + line < w.row1)
        *reinterpret_cast<int4 *>(w.h + line * STAGING_COLUMNS + run * 32 + at * 8) =
            *reinterpret_cast<const int4 *>(src + (w.row0 + line) * r.width + r.begin[run] + at * 8);
    }
  }
}

__device__ __forceinline__ float row_weight(const gemm_params &p, int row, int row1) {
  if (p.weights == nullptr || row >= row1) return 1.0f;
  return p.weights[p.row_slot ? p.row_slot[row] : row];
}

__device__ __forceinline__ float2 bias_at(const bf16 *bias, int64_t column, int64_t n) {
  if (bias == nullptr || column >= n) return make_float2(0, 0);
  return __bfloat1622float2(*reinterpret_cast<const bf16x2 *>(bias + column));
}

/* COUNT groups of 8 accumulator columns, scaled, biased and rounded, to staging columns `to` on. */
template <int COUNT>
__device__ __forceinline__ void stage_h(const float *acc, const warp_tile &w, int to, const float *weight,
                                        const bf16 *bias, int64_t n0, int64_t n) {
#pragma unroll
  for (int jj = 0; jj < COUNT; jj++) {
    const int inside = 8 * jj + 2 * (w.lane % 4);
    const float2 b = bias_at(bias, n0 + inside, n);
#pragma unroll
    for (int i = 0; i < 2; i++)
      *reinterpret_cast<bf16x2 *>(w.h + (w.lane / 4 + 8 * i) * STAGING_COLUMNS + to + inside) =
          __floats2bfloat162_rn(weight[i] * acc[4 * jj + 2 * i] + b.x,
                                weight[i] * acc[4 * jj + 2 * i + 1] + b.y);
  }
}

/* ---- the activation on staged rows: two elements a lane, so that a warp writes 64 or 128 bytes of a row at once */

template <int KIND>
__device__ __forceinline__ void act_rows(const warp_tile &w, const gemm_params &p, int64_t f0, int elements) {
  const bool pairs = p.act.gated && p.act.layout == MOE_LAYOUT_INTERLEAVED && p.act.interleave == 1;
  const int stride = pairs ? 2 : 1, up = pairs ? 1 : 32, half = elements / 2;
#pragma unroll 4
  for (int it = 0; it < half / 2; it++) {
    const int at = it * 32 + w.lane, line = at / half, f = at % half * 2;
    const bf16 *h = w.h + line * STAGING_COLUMNS + f * stride;
    float a[2];
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const float g = __bfloat162float(h[c * stride]);
      a[c] = moe_act_f(KIND, g > p.act.gate_max ? p.act.gate_max : g, p.act.alpha, p.act.beta);
      if (p.act.gated) a[c] *= moe_act_up(&p.act, __bfloat162float(h[c * stride + up]));
    }
    if (w.row0 + line < w.row1 && f0 + f < p.inter)
      *reinterpret_cast<bf16x2 *>(static_cast<bf16 *>(p.d) + (int64_t)(w.row0 + line) * p.inter + f0 + f) =
          __floats2bfloat162_rn(a[0], a[1]);
  }
}

/* Reads staged h and da, writes dh over h, weight * a to p.d, and adds <da, a> to the sum of each line. 32 elements. */
template <int KIND> __device__ __forceinline__ void dact_rows(const warp_tile &w, const gemm_params &p, int64_t f0) {
  const bool pairs = p.act.gated && p.act.layout == MOE_LAYOUT_INTERLEAVED && p.act.interleave == 1;
  const int stride = pairs ? 2 : 1, up = pairs ? 1 : 32;
#pragma unroll 2
  for (int it = 0; it < 8; it++) {
    const int line = it * 2 + w.lane / 16, f = w.lane % 16 * 2;
    const bool inside = w.row0 + line < w.row1 && f0 + f < p.inter;
    bf16 *h = w.h + line * STAGING_COLUMNS + f * stride;
    const float weight = row_weight(p, w.row0 + line, w.row1);
    float wa[2], sum = 0;
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const float g = __bfloat162float(h[c * stride]), da = w.da[line * 36 + f + c];
      const float u = p.act.gated ? __bfloat162float(h[c * stride + up]) : 0;
      const float fg = moe_act_f(KIND, g > p.act.gate_max ? p.act.gate_max : g, p.act.alpha, p.act.beta);
      const float dg = g > p.act.gate_max ? 0 : moe_act_df(KIND, g, p.act.alpha, p.act.beta);
      const float v = p.act.gated ? moe_act_up(&p.act, u) : 1.0f, a = fg * v;
      if (inside) sum += da * a;
      wa[c] = weight * a;
      h[c * stride] = __float2bfloat16_rn(weight * da * dg * v);
      if (p.act.gated) h[c * stride + up] = __float2bfloat16_rn(weight * da * fg * moe_act_dup(&p.act, u));
    }
    if (inside && p.d != nullptr)
      *reinterpret_cast<bf16x2 *>(static_cast<bf16 *>(p.d) + (int64_t)(w.row0 + line) * p.inter + f0 + f) =
          __floats2bfloat162_rn(wa[0], wa[1]);
#pragma unroll
    for (int d = 8; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if (w.lane % 16 == 0) w.sum[line] += sum;
  }
}

/* The switch stands outside the loops, one expansion a row of moeblas_act.def. */
__device__ __forceinline__ void act_switch(const warp_tile &w, const gemm_params &p, int64_t f0, int elements) {
  switch ((int)p.act.kind) {
#define MOE_ACT(ENUM, value, fn, plain, gated, a0, b0, f, df) \
  case value: act_rows<value>(w, p, f0, elements); break;
#include "moeblas_act.def"
#undef MOE_ACT
  }
}
__device__ __forceinline__ void dact_switch(const warp_tile &w, const gemm_params &p, int64_t f0) {
  switch ((int)p.act.kind) {
#define MOE_ACT(ENUM, value, fn, plain, gated, a0, b0, f, df) \
  case value: dact_rows<value>(w, p, f0); break;
#include "moeblas_act.def"
#undef MOE_ACT
  }
}

/* ---- The three epilogues. The loop over steps stays a loop, so that what it does is expanded once; only the part that
 * names accumulators is a switch over constants, as registers cannot be indexed. */

#define EACH_STEP(CASE) CASE(0) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7)

/* Keeps the compiler from scaling all accumulators before the loop, which would take as many registers again. */
#define HERE_AND_NOW(weight) asm volatile("" : "+f"(weight[0]), "+f"(weight[1]))

/* Where plain results go: rows of n columns. */
struct output {
  void *d;
  int64_t n;
  bool fp32, accumulate;
};

/* 8 groups of accumulator columns straight to their place, added to what is there: four lanes hold a 32-byte (fp32) or
 * 16-byte (bf16) piece of a row. */
__device__ __forceinline__ void store_direct(const float *acc, const warp_tile &w, const output &out, int64_t n0,
                                             const float *weight, const bf16 *bias) {
#pragma unroll
  for (int jj = 0; jj < 8; jj++) {
    const int64_t column = n0 + 8 * jj + 2 * (w.lane % 4);
    const float2 b = bias_at(bias, column, out.n);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = w.row0 + w.lane / 4 + 8 * i;
      if (row >= w.row1 || column >= out.n) continue;
      const int64_t at = row * out.n + column;
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

template <int BN>
__device__ __forceinline__ void store_steps(const float *acc, const warp_tile &w, const output &out, int column,
                                            const bf16 *bias, const float *row_weights) {
  const bool direct = out.fp32 || out.accumulate;
#pragma unroll 1
  for (int step = 0; step < BN / 64; step++) {
    const int64_t n0 = (int64_t)column * BN + step * 64;
    if (n0 >= out.n) return;
    float weight[2] = {row_weights[0], row_weights[1]};
    HERE_AND_NOW(weight);
    switch (step) {
#define CASE(STEP)                                                     \
  case STEP:                                                           \
    if constexpr (STEP < BN / 64) {                                    \
      if (direct)                                                      \
        store_direct(acc + STEP * 32, w, out, n0, weight, bias);       \
      else                                                             \
        stage_h<8>(acc + STEP * 32, w, 0, weight, bias, n0, out.n);    \
    }                                                                  \
    break;
      EACH_STEP(CASE)
#undef CASE
    }
    if (direct) continue;
    __syncwarp();
    rows_out(w, static_cast<bf16 *>(out.d), {out.n, {n0, 0}, {(int)min((int64_t)64, out.n - n0), 0}});
    __syncwarp();
  }
}

/* 64 columns of h a step. */
template <int BN>
__device__ __forceinline__ void act_steps(const float *acc, const warp_tile &w, const gemm_params &p, int column,
                                          const bf16 *bias, const float *row_weights) {
  const int elements = p.act.gated ? 32 : 64;
#pragma unroll 1
  for (int step = 0; step < BN / 64; step++) {
    const int64_t f0 = (int64_t)column * (p.act.gated ? BN / 2 : BN) + step * elements;
    if (f0 >= p.inter) return;
    const h_runs runs = runs_of(p, f0, elements);
    const int64_t end = runs.begin[0] + runs.count[0], up_end = runs.begin[1] + runs.count[1];
    float weight[2] = {row_weights[0], row_weights[1]};
    HERE_AND_NOW(weight);
    switch (step) {
#define CASE(STEP)                                                                                                  \
  case STEP:                                                                                                        \
    if constexpr (STEP < BN / 64) {                                                                                 \
      if (p.halves == 2) {                                                                                          \
        stage_h<4>(acc + STEP * 16, w, 0, weight, bias, runs.begin[0], end);                                        \
        stage_h<4>(acc + BN / 4 + STEP * 16, w, 32, weight, bias, runs.begin[1], up_end);                           \
      } else {                                                                                                      \
        stage_h<8>(acc + STEP * 32, w, 0, weight, bias, runs.begin[0], end);                                        \
      }                                                                                                             \
    }                                                                                                               \
    break;
      EACH_STEP(CASE)
#undef CASE
    }
    __syncwarp();
    if (p.h != nullptr) rows_out(w, p.h, runs);
    act_switch(w, p, f0, elements);
    __syncwarp();
  }
}

/* 32 elements of a step; their h comes in, and dh goes out over it. */
template <int BN>
__device__ __forceinline__ void dact_steps(const float *acc, const warp_tile &w, const gemm_params &p, int column) {
#pragma unroll 1
  for (int step = 0; step < BN / 32; step++) {
    const int64_t f0 = (int64_t)column * BN + step * 32;
    if (f0 >= p.inter) return;
    const h_runs runs = runs_of(p, f0, 32);
    rows_in(w, p.h, runs);
    float *da = w.da + w.lane / 4 * 36 + 2 * (w.lane % 4);
    switch (step) {
#define CASE(STEP)                                                                                                  \
  case STEP:                                                                                                        \
    if constexpr (STEP < BN / 32)                                                                                   \
      for (int i = 0; i < 8; i++) /* unrolled: the index is made of constants */                                    \
        *reinterpret_cast<float2 *>(da + i % 2 * 8 * 36 + i / 2 * 8) =                                              \
            make_float2(acc[STEP * 16 + 2 * i], acc[STEP * 16 + 2 * i + 1]);                                        \
    break;
      EACH_STEP(CASE)
#undef CASE
    }
    __syncwarp();
    dact_switch(w, p, f0);
    __syncwarp();
    rows_out(w, p.dh, runs);
    __syncwarp();
  }
}

template <int BN, int EPILOGUE>
__device__ __forceinline__ void epilogue(const float *acc, const warp_tile &w, const gemm_params &p,
                                         const tile_place &place) {
  const int row = w.row0 + w.lane / 4;
  if (EPILOGUE == DACT) {
    if (w.lane < 16) w.sum[w.lane] = 0;
    __syncwarp();
    dact_steps<BN>(acc, w, p, place.column);
    if (p.partial != nullptr && w.lane < 16 && w.row0 + w.lane < w.row1)
      p.partial[(int64_t)(w.row0 + w.lane) * p.column_tiles + place.column] = w.sum[w.lane];
    return;
  }
  const float weight[2] = {row_weight(p, row, w.row1), row_weight(p, row + 8, w.row1)};
  const bf16 *bias = p.bias ? p.bias + (int64_t)place.expert * p.n : nullptr;
  if (EPILOGUE == ACT)
    act_steps<BN>(acc, w, p, place.column, bias, weight);
  else
    store_steps<BN>(acc, w, {p.d, p.n, p.d_fp32 != 0, p.accumulate != 0}, place.column, bias, weight);
}
