/* SPDX-License-Identifier: Apache-2.0
 *
 * What happens to a warp's 16 x BN accumulators. They pass through shared memory of the warp's own, 64 columns (DACT: 32) a
 * step, so that device memory sees whole 16-byte pieces of rows and the activation runs in a plain loop, on any activation,
 * without registers of the product being indexed. Lane l then has line l/2 and every other 4 columns: sums over a line stay
 * in a register, and no two lanes meet in a bank.
 *
 * Accumulator 4 J + 2 i + c of lane l is row l/4 + 8 i, column 8 J + 2 (l%4) + c of the warp's rows.
 * h in staging: columns as they come, or, for a gated pair in halves, first the gate run and then the up run. */
#pragma once

#include "../../act.h"

enum { STORE = MOE_EPILOGUE_STORE, ACT = MOE_EPILOGUE_ACT, DACT = MOE_EPILOGUE_DACT };

typedef __nv_bfloat16 bf16;
typedef __nv_bfloat162 bf16x2;

enum { DA_LINE = 40 }; /* floats of a staged line of 32 */

struct warp_tile {
  bf16 *h;        /* [16, line] */
  int line;       /* elements: STAGING_COLUMNS, or 2 BN + 8 for DACT, so that lines are 4 banks apart */
  float *da;      /* [16, DA_LINE], DACT */
  int lane;
  int row0, row1; /* of the matrix: first row of the warp, end of the tile's rows */
};

/* Columns of h that hold some elements: one or two runs. The second is staged `second` columns after the first. */
struct h_runs {
  int64_t width;    /* of h */
  int64_t begin[2]; /* first column */
  int count[2];     /* columns */
  int second;
};

__device__ __forceinline__ h_runs runs_of(const gemm_params &p, int64_t f0, int elements) {
  const int left = (int)min((int64_t)elements, p.inter - f0);
  if (!p.act.gated) return {p.inter, {f0, 0}, {left, 0}, 0};
  if (p.act.layout == MOE_LAYOUT_INTERLEAVED) return {2 * (int64_t)p.inter, {2 * f0, 0}, {2 * left, 0}, 0};
  const int64_t gate = p.up_distance > 0 ? 0 : p.inter;
  return {2 * (int64_t)p.inter, {gate + f0, gate + p.up_distance + f0}, {left, left}, elements};
}

/* 16-byte pieces; every count is a multiple of 8 because F is. MOST: pieces of a line that there can be. */
template <int MOST> __device__ __forceinline__ void rows_out(const warp_tile &w, bf16 *dst, const h_runs &r) {
#pragma unroll 2
  for (int piece = w.lane; piece < 16 * MOST; piece += 32) {
    const int line = piece / MOST, at = piece % MOST * 8;
    if (w.row0 + line >= w.row1) return;
#pragma unroll
    for (int run = 0; run < 2; run++)
      if (at < r.count[run])
        *reinterpret_cast<int4 *>(dst + (w.row0 + line) * r.width + r.begin[run] + at) =
            *reinterpret_cast<const int4 *>(w.h + line * w.line + run * r.second + at);
  }
}
template <int MOST> __device__ __forceinline__ void rows_in(const warp_tile &w, const bf16 *src, const h_runs &r) {
  for (int piece = w.lane; piece < 16 * MOST; piece += 32) {
    const int line = piece / MOST, at = piece % MOST * 8;
    if (w.row0 + line >= w.row1) return;
#pragma unroll
    for (int run = 0; run < 2; run++)
      if (at < r.count[run])
        cp_async_16(smem_address(w.h + line * w.line + run * r.second + at),
                    src + (w.row0 + line) * r.width + r.begin[run] + at, true);
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
      *reinterpret_cast<bf16x2 *>(w.h + (w.lane / 4 + 8 * i) * w.line + to + inside) = __floats2bfloat162_rn(
          weight[i] * acc[4 * jj + 2 * i] + b.x, weight[i] * acc[4 * jj + 2 * i + 1] + b.y);
  }
}

/* ---- the activation on staged lines, four elements at a time */

__device__ __forceinline__ void unpack(uint2 v, float *f) {
  const float2 low = __bfloat1622float2(*reinterpret_cast<bf16x2 *>(&v.x));
  const float2 high = __bfloat1622float2(*reinterpret_cast<bf16x2 *>(&v.y));
  f[0] = low.x, f[1] = low.y, f[2] = high.x, f[3] = high.y;
}
__device__ __forceinline__ uint2 pack(const float *f) {
  const bf16x2 low = __floats2bfloat162_rn(f[0], f[1]), high = __floats2bfloat162_rn(f[2], f[3]);
  return make_uint2(*reinterpret_cast<const uint32_t *>(&low), *reinterpret_cast<const uint32_t *>(&high));
}

__device__ __forceinline__ bool in_pairs(const gemm_params &p) {
  return p.act.gated && p.act.layout == MOE_LAYOUT_INTERLEAVED && p.act.interleave == 1;
}

/* Gate and up of 4 elements: at `gate`, and `up` further on or (pairs) alternating. */
__device__ __forceinline__ void load_h(const bf16 *gate, int up, bool pairs, bool gated, float *g, float *u) {
  if (pairs) {
    float both[8];
    unpack(*reinterpret_cast<const uint2 *>(gate), both);
    unpack(*reinterpret_cast<const uint2 *>(gate + 4), both + 4);
#pragma unroll
    for (int c = 0; c < 4; c++) g[c] = both[2 * c], u[c] = both[2 * c + 1];
    return;
  }
  unpack(*reinterpret_cast<const uint2 *>(gate), g);
  if (gated) unpack(*reinterpret_cast<const uint2 *>(gate + up), u);
}
__device__ __forceinline__ void store_h(bf16 *gate, int up, bool pairs, bool gated, const float *g, const float *u) {
  if (pairs) {
    const float both[8] = {g[0], u[0], g[1], u[1], g[2], u[2], g[3], u[3]};
    *reinterpret_cast<uint2 *>(gate) = pack(both);
    *reinterpret_cast<uint2 *>(gate + 4) = pack(both + 4);
    return;
  }
  *reinterpret_cast<uint2 *>(gate) = pack(g);
  if (gated) *reinterpret_cast<uint2 *>(gate + up) = pack(u);
}

/* v(u') + offset and its slope. Selections rather than branches, so that elements overlap in the pipelines. */
template <bool TANH> __device__ __forceinline__ float up_value(const gemm_params &p, float u) {
  float v = u < p.act.up_min ? p.act.up_min : u;
  v = v > p.act.up_max ? p.act.up_max : v;
  if (TANH) v = p.act.up_beta * act_tanh(v / p.act.up_beta);
  return v + p.act.up_offset;
}
template <bool TANH> __device__ __forceinline__ float up_slope(const gemm_params &p, float u) {
  float slope = 1.0f;
  if (TANH) {
    const float t = act_tanh(u / p.act.up_beta);
    slope = 1.0f - t * t;
  }
  return u < p.act.up_min || u > p.act.up_max ? 0.0f : slope;
}

/* a over the gate elements it came from. */
template <int KIND, bool TANH>
__device__ __forceinline__ void act_rows(const warp_tile &w, const gemm_params &p, int elements) {
  const bool pairs = in_pairs(p), gated = p.act.gated;
  const float max = p.act.gate_max, alpha = p.act.alpha, beta = p.act.beta;
  bf16 *line = w.h + w.lane / 2 * w.line;
#pragma unroll 2
  for (int column = w.lane % 2 * 4; column < elements; column += 8) {
    float g[4], u[4];
    bf16 *at = line + (pairs ? 2 * column : column);
    load_h(at, 32, pairs, gated, g, u);
#pragma unroll
    for (int c = 0; c < 4; c++) g[c] = moe_act_f(KIND, g[c] > max ? max : g[c], alpha, beta);
    if (gated) {
#pragma unroll
      for (int c = 0; c < 4; c++) g[c] *= up_value<TANH>(p, u[c]);
    }
    *reinterpret_cast<uint2 *>(at) = pack(g);
  }
}

/* h of 32 elements from `gate` on becomes dh, da becomes weight * a; returns the line's sum of da * a. */
template <int KIND, bool TANH>
__device__ __forceinline__ float dact_rows(const warp_tile &w, const gemm_params &p, int gate, int up, int left,
                                           float weight) {
  const bool pairs = in_pairs(p), gated = p.act.gated;
  const float max = p.act.gate_max, alpha = p.act.alpha, beta = p.act.beta;
  float sum = 0;
#pragma unroll 2
  for (int column = w.lane % 2 * 4; column < left; column += 8) {
    float g[4], u[4] = {0, 0, 0, 0}, a[4];
    bf16 *at = w.h + w.lane / 2 * w.line + gate + (pairs ? 2 * column : column);
    float4 *da4 = reinterpret_cast<float4 *>(w.da + w.lane / 2 * DA_LINE + column);
    const float4 loaded = *da4;
    const float da[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
    load_h(at, up, pairs, gated, g, u);
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const float f = moe_act_f(KIND, g[c] > max ? max : g[c], alpha, beta), inner = moe_act_df(KIND, g[c], alpha, beta);
      const float df = g[c] > max ? 0.0f : inner;
      const float v = gated ? up_value<TANH>(p, u[c]) : 1.0f, scaled = weight * da[c];
      a[c] = f * v;
      sum += da[c] * a[c];
      a[c] *= weight;
      g[c] = scaled * df * v;
      u[c] = scaled * f * up_slope<TANH>(p, u[c]);
    }
    store_h(at, up, pairs, gated, g, u);
    *reinterpret_cast<uint2 *>(da4) = pack(a);
  }
  return sum;
}

/* The switches stand outside the loops, one expansion a row of moeblas_act.def. */
template <bool TANH> __device__ __forceinline__ void act_switch(const warp_tile &w, const gemm_params &p, int elements) {
  switch ((int)p.act.kind) {
#define MOE_ACT(ENUM, value, fn, plain, gated, a0, b0, f, df) \
  case value: act_rows<value, TANH>(w, p, elements); break;
#include "moeblas_act.def"
#undef MOE_ACT
  }
}
template <bool TANH>
__device__ __forceinline__ float dact_switch(const warp_tile &w, const gemm_params &p, int gate, int up, int left,
                                             float weight) {
  switch ((int)p.act.kind) {
#define MOE_ACT(ENUM, value, fn, plain, gated, a0, b0, f, df) \
  case value: return dact_rows<value, TANH>(w, p, gate, up, left, weight);
#include "moeblas_act.def"
#undef MOE_ACT
  }
  return 0;
}

/* [16, elements] from groups of 4 that lie `stride` elements apart in lines of `line`, to columns f0 .. of d [., F]. */
__device__ __forceinline__ void groups_out(const warp_tile &w, const bf16 *src, int line, int stride, int elements,
                                           bf16 *d, int64_t width, int64_t f0) {
  const int pieces = elements / 8;
  for (int piece = w.lane; piece < 16 * pieces; piece += 32) {
    const int row = piece / pieces, at = piece % pieces;
    if (w.row0 + row >= w.row1 || f0 + at * 8 >= width) continue;
    const uint2 low = *reinterpret_cast<const uint2 *>(src + row * line + 2 * at * stride);
    const uint2 high = *reinterpret_cast<const uint2 *>(src + row * line + (2 * at + 1) * stride);
    *reinterpret_cast<uint4 *>(d + (w.row0 + row) * width + f0 + at * 8) = make_uint4(low.x, low.y, high.x, high.y);
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
#define CASE(STEP)                                                  \
  case STEP:                                                        \
    if constexpr (STEP < BN / 64) {                                 \
      if (direct)                                                   \
        store_direct(acc + STEP * 32, w, out, n0, weight, bias);    \
      else                                                          \
        stage_h<8>(acc + STEP * 32, w, 0, weight, bias, n0, out.n); \
    }                                                               \
    break;
      EACH_STEP(CASE)
#undef CASE
    }
    if (direct) continue;
    __syncwarp();
    rows_out<8>(w, static_cast<bf16 *>(out.d), {out.n, {n0, 0}, {(int)min((int64_t)64, out.n - n0), 0}, 0});
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
#define CASE(STEP)                                                                        \
  case STEP:                                                                              \
    if constexpr (STEP < BN / 64) {                                                       \
      if (p.halves == 2) {                                                                \
        stage_h<4>(acc + STEP * 16, w, 0, weight, bias, runs.begin[0], end);              \
        stage_h<4>(acc + BN / 4 + STEP * 16, w, 32, weight, bias, runs.begin[1], up_end); \
      } else {                                                                            \
        stage_h<8>(acc + STEP * 32, w, 0, weight, bias, runs.begin[0], end);              \
      }                                                                                   \
    }                                                                                     \
    break;
      EACH_STEP(CASE)
#undef CASE
    }
    __syncwarp();
    if (p.h != nullptr) rows_out<8>(w, p.h, runs);
    __syncwarp();
    if (p.act.up_beta > 0)
      act_switch<true>(w, p, elements);
    else
      act_switch<false>(w, p, elements);
    __syncwarp();
    groups_out(w, w.h, w.line, in_pairs(p) ? 8 : 4, elements, static_cast<bf16 *>(p.d), p.inter, f0);
    __syncwarp();
  }
}

/* Before the product: asks for all of h of the tile's elements, and returns the weight of the lane's line. */
template <int BN> __device__ __forceinline__ float dact_begin(const warp_tile &w, const gemm_params &p, int column) {
  const int64_t f0 = (int64_t)column * BN;
  if (p.act.gated && p.act.layout == MOE_LAYOUT_INTERLEAVED)
    rows_in<BN / 4>(w, p.h, runs_of(p, f0, BN));
  else
    rows_in<BN / 8>(w, p.h, runs_of(p, f0, BN));
  return row_weight(p, w.row0 + w.lane / 2, w.row1);
}

/* 32 elements a step. */
template <int BN>
__device__ __forceinline__ void dact_steps(const float *acc, const warp_tile &w, const gemm_params &p, int column,
                                           float weight) {
  const bool interleaved = p.act.gated && p.act.layout == MOE_LAYOUT_INTERLEAVED;
  float sum = 0;
  cp_async_commit();
  cp_async_wait<0>();
  __syncwarp();
#pragma unroll 1
  for (int step = 0; step < BN / 32; step++) {
    const int64_t f0 = (int64_t)column * BN + step * 32;
    if (f0 >= p.inter) break;
    float *da = w.da + w.lane / 4 * DA_LINE + 2 * (w.lane % 4);
    switch (step) {
#define CASE(STEP)                                                               \
  case STEP:                                                                     \
    if constexpr (STEP < BN / 32)                                                \
      for (int i = 0; i < 8; i++) /* unrolled: the index is made of constants */ \
        *reinterpret_cast<float2 *>(da + i % 2 * 8 * DA_LINE + i / 2 * 8) =      \
            make_float2(acc[STEP * 16 + 2 * i], acc[STEP * 16 + 2 * i + 1]);     \
    break;
      EACH_STEP(CASE)
#undef CASE
    }
    __syncwarp();
    const int gate = interleaved ? 64 * step : 32 * step, up = interleaved ? 32 : BN;
    const int left = (int)min((int64_t)32, p.inter - f0);
    sum += p.act.up_beta > 0 ? dact_switch<true>(w, p, gate, up, left, weight)
                             : dact_switch<false>(w, p, gate, up, left, weight);
    __syncwarp();
    if (p.d != nullptr)
      groups_out(w, reinterpret_cast<const bf16 *>(w.da), 2 * DA_LINE, 8, 32, static_cast<bf16 *>(p.d), p.inter, f0);
    __syncwarp();
  }
  if (interleaved)
    rows_out<BN / 4>(w, p.dh, runs_of(p, (int64_t)column * BN, BN));
  else
    rows_out<BN / 8>(w, p.dh, runs_of(p, (int64_t)column * BN, BN));
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  if (p.partial != nullptr && w.lane % 2 == 0 && w.row0 + w.lane / 2 < w.row1)
    p.partial[(int64_t)(w.row0 + w.lane / 2) * p.column_tiles + column] = sum;
  __syncwarp();
}

template <int BN, int EPILOGUE>
__device__ __forceinline__ void epilogue(const float *acc, const warp_tile &w, const gemm_params &p,
                                         const tile_place &place, float line_weight) {
  if constexpr (EPILOGUE == DACT) {
    dact_steps<BN>(acc, w, p, place.column, line_weight);
  } else {
    const int row = w.row0 + w.lane / 4;
    const float weight[2] = {row_weight(p, row, w.row1), row_weight(p, row + 8, w.row1)};
    const bf16 *bias = p.bias ? p.bias + (int64_t)place.expert * p.n : nullptr;
    if constexpr (EPILOGUE == ACT)
      act_steps<BN>(acc, w, p, place.column, bias, weight);
    else
      store_steps<BN>(acc, w, {p.d, p.n, p.d_fp32 != 0, p.accumulate != 0}, place.column, bias, weight);
  }
}
