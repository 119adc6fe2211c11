/* SPDX-License-Identifier: Apache-2.0
 *
 * The general matrix products, for every size, format, layout and alignment, by fp32 multiply-adds:
 *     gemm     acc[r,n] = sum over k of A[src(r),k] B[e(r)][n,k], then one of the three epilogues
 *     wgrad    d[e][m,n] = sum over the rows r of e of weight(r) A[srca(r),m] B[srcb(r),n]
 *
 *            64 columns         a block has a tile of 64 x 64; the contraction goes by slices of 16 through shared memory, as
 *          ┌───────────┐        fp32 and with the contraction outermost; thread (ty, tx) of 16 x 16 has 4 x 4 results, rows
 *   64     │ 4x4 │ …   │        4 ty .. 4 ty + 3 and columns 4 tx .. 4 tx + 3
 *   rows   └───────────┘
 *
 * In a gated ACT the four columns of a thread are two gates and the two ups that belong to them: 32 elements of a a tile.
 * DACT sums <acc, a> over the columns of a tile into partial[row, tile]; dweights_kernel adds those up.
 * Invariants   one chain of multiply-adds over ascending k (rows, for wgrad) an element, as on the CPU and whatever the batch;
 *              no row outside of the clamped offsets is read or written; dh may be h, as a thread reads what it overwrites.
 * Barriers     every thread of a block takes the same path up to the epilogue: an empty piece leaves as a whole.
 * Floor        67 TFLOP/s of fp32; loads are scalar, so expect a third of that. The tensor cores are in gemm/. */
#include "launch.h"
#include "../act.h"
#include "rows.cuh"
#include "vector.cuh"

enum {
  TILE = 64,
  DEPTH = 16,
  LINE = TILE + 4, /* keeps 16-byte alignment, and stores of four rows off one bank */
  THREADS = 256
};

struct slices {
  float a[DEPTH][LINE], b[DEPTH][LINE];
};

/* acc += the product of one slice. */
__device__ __forceinline__ void multiply_slice(float (*acc)[4], const slices &s, int ty, int tx) {
#pragma unroll
  for (int k = 0; k < DEPTH; k++) {
    const float4 a = *reinterpret_cast<const float4 *>(&s.a[k][4 * ty]),
                 b = *reinterpret_cast<const float4 *>(&s.b[k][4 * tx]);
    const float left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) acc[i][j] = fmaf(left[i], right[j], acc[i][j]);
  }
}

/* ---- gemm --------------------------------------------------------------------------------------------------------- */

struct simt_gemm_params {
  moe_gemm_args args;
  moe_act_desc act;
  int gated;
  int64_t inter;        /* columns of d */
  int64_t pieces;       /* of rows, TILE each */
  int64_t column_tiles; /* of d */
  int64_t tiles;        /* of both */
  float *partial;       /* [rows, column_tiles] or NULL */
};

__device__ __forceinline__ row_groups groups_of(const moe_gemm_args &a) {
  return {a.row_offset, a.rows, a.experts};
}

__device__ __forceinline__ int64_t slot_of(const moe_gemm_args &a, int64_t row) {
  return a.row_slot != nullptr ? a.row_slot[row] : row;
}

/* The column of B, and of h, that column j of a tile stands for; -1 outside. */
template <int EPILOGUE>
__device__ __forceinline__ int64_t column_at(const simt_gemm_params &p, int64_t tile, int j) {
  if (EPILOGUE != MOE_EPILOGUE_ACT || !p.gated) {
    const int64_t column = tile * TILE + j;
    return column < p.args.n ? column : -1;
  }
  const int64_t f = tile * (TILE / 2) + j / 4 * 2 + j % 2;
  if (f >= p.inter) return -1;
  return moe_gate_column(&p.act, p.inter, f) + (j % 4 >= 2 ? moe_up_distance(&p.act, p.inter) : 0);
}

/* Where a thread reads its four elements of a slice: row or column `line`, or none. */
struct reader {
  int64_t first; /* index of element k = 0, or -1 */
  int line, k;
};

__device__ __forceinline__ reader a_reader(const moe_gemm_args &a, const piece &rows) {
  const int line = threadIdx.x / 4;
  const int64_t row = rows.begin + line;
  if (row >= rows.end) return {-1, line, (int)threadIdx.x % 4 * 4};
  const int64_t source = a.gather_topk > 0 ? slot_of(a, row) / a.gather_topk : row;
  return {source * a.k, line, (int)threadIdx.x % 4 * 4};
}

/* dst[k][line] for four k. */
__device__ __forceinline__ void read_along_k(float (*dst)[LINE], const reader &r, const void *array,
                                             moe_dtype dtype, int64_t k0, int64_t depth) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int64_t k = k0 + r.k + i;
    dst[r.k + i][r.line] = r.first >= 0 && k < depth ? moe_load(array, dtype, r.first + k) : 0.0f;
  }
}

/* B [k,n]: a thread has one k and four columns. */
__device__ __forceinline__ void read_across_k(float (*dst)[LINE], const int64_t *column,
                                              const moe_gemm_args &a, int64_t expert, int64_t k0) {
  const int k = threadIdx.x / 16, j = threadIdx.x % 16 * 4;
  const int64_t first = (expert * a.k + k0 + k) * a.n;
#pragma unroll
  for (int i = 0; i < 4; i++)
    dst[k][j + i] = column[i] >= 0 && k0 + k < a.k ? moe_load(a.b, a.b_dtype, first + column[i]) : 0.0f;
}

template <int EPILOGUE>
__device__ __forceinline__ void accumulate_tile(float (*acc)[4], slices &s, const simt_gemm_params &p,
                                                const piece &rows, int64_t tile) {
  const moe_gemm_args &a = p.args;
  const reader from_a = a_reader(a, rows);
  int64_t column[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    column[i] = column_at<EPILOGUE>(p, tile, a.b_kn ? (int)threadIdx.x % 16 * 4 + i : from_a.line);
  const int64_t b_first = column[0] >= 0 ? (rows.expert * a.n + column[0]) * a.k : -1;
  const reader from_b = {b_first, from_a.line, from_a.k};
  for (int64_t k0 = 0; k0 < a.k; k0 += DEPTH) {
    read_along_k(s.a, from_a, a.a, a.a_dtype, k0, a.k);
    if (a.b_kn)
      read_across_k(s.b, column, a, rows.expert, k0);
    else
      read_along_k(s.b, from_b, a.b, a.b_dtype, k0, a.k);
    __syncthreads();
    multiply_slice(acc, s, threadIdx.x / 16, threadIdx.x % 16);
    __syncthreads();
  }
}

/* Four results of one row: their columns, the row's weight, the expert. */
struct quad {
  int64_t row, expert;
  const int64_t *column;
  float weight;
};

__device__ __forceinline__ float biased(const moe_gemm_args &a, const quad &q, float acc, int j) {
  const float bias = a.bias != nullptr ? moe_load(a.bias, a.bias_dtype, q.expert * a.n + q.column[j]) : 0.0f;
  return acc * q.weight + bias;
}

__device__ __forceinline__ void store_quad(const simt_gemm_params &p, const quad &q, const float *acc) {
  const moe_gemm_args &a = p.args;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    if (q.column[j] < 0) continue;
    const int64_t at = q.row * a.n + q.column[j];
    const float value = biased(a, q, acc[j], j);
    moe_store(a.d, a.d_dtype, at, a.accumulate ? static_cast<const float *>(a.d)[at] + value : value);
  }
}

/* Gated: j is a gate and j + 2 its up; the element of a follows from the tile. */
__device__ __forceinline__ void act_quad(const simt_gemm_params &p, const quad &q, const float *acc,
                                         int64_t tile) {
  const moe_gemm_args &a = p.args;
  float h[4];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    if (q.column[j] < 0) continue;
    h[j] = moe_round_to(a.d_dtype, biased(a, q, acc[j], j));
    if (a.h != nullptr) moe_store(a.h, a.d_dtype, q.row * a.n + q.column[j], h[j]);
  }
  const int tx = threadIdx.x % 16;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    if (q.column[j] < 0 || (p.gated && j >= 2)) continue;
    float value = moe_act_gate(&p.act, h[j]);
    if (p.gated) value *= moe_act_up(&p.act, h[(j + 2) % 4]);
    const int64_t f = p.gated ? tile * (TILE / 2) + 2 * tx + j : q.column[j];
    moe_store(a.d, a.d_dtype, q.row * p.inter + f, value);
  }
}

/* Returns the sum of acc * a over the four, of acc as rounded. */
__device__ __forceinline__ float dact_quad(const simt_gemm_params &p, const quad &q, const float *acc) {
  const moe_gemm_args &a = p.args;
  const int64_t h_row = q.row * p.inter * (p.gated ? 2 : 1),
                distance = p.gated ? moe_up_distance(&p.act, p.inter) : 0;
  float sum = 0;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const int64_t f = q.column[j];
    if (f < 0) continue;
    const int64_t at = h_row + (p.gated ? moe_gate_column(&p.act, p.inter, f) : f);
    const float gate = moe_load(a.h, a.d_dtype, at),
                up = p.gated ? moe_load(a.h, a.d_dtype, at + distance) : 0.0f;
    const float value = moe_act_gate(&p.act, gate), slope = moe_act_dgate(&p.act, gate),
                rounded = moe_round_to(a.d_dtype, acc[j]), da = q.weight * rounded;
    const float v = p.gated ? moe_act_up(&p.act, up) : 1.0f;
    moe_store(a.dh, a.d_dtype, at, slope * (da * v));
    if (p.gated) moe_store(a.dh, a.d_dtype, at + distance, value * (da * moe_act_dup(&p.act, up)));
    if (a.d != nullptr) moe_store(a.d, a.d_dtype, q.row * p.inter + f, q.weight * (value * v));
    sum = fmaf(rounded, value * v, sum);
  }
  return sum;
}

/* A tile of one piece of the rows. */
template <int EPILOGUE>
__device__ __forceinline__ void multiply_tile(slices &s, const simt_gemm_params &p, int64_t number,
                                              int64_t tile) {
  const moe_gemm_args &a = p.args;
  const piece rows = piece_at(groups_of(a), number, TILE);
  if (rows.begin >= rows.end) return;
  float acc[4][4] = {};
  accumulate_tile<EPILOGUE>(acc, s, p, rows, tile);
  int64_t column[4];
#pragma unroll
  for (int j = 0; j < 4; j++) column[j] = column_at<EPILOGUE>(p, tile, (int)threadIdx.x % 16 * 4 + j);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int64_t row = rows.begin + threadIdx.x / 16 * 4 + i;
    const bool inside = row < rows.end;
    const float weight = inside && a.weights != nullptr ? a.weights[slot_of(a, row)] : 1.0f;
    const quad q = {row, rows.expert, column, weight};
    if (EPILOGUE == MOE_EPILOGUE_STORE && inside) store_quad(p, q, acc[i]);
    if (EPILOGUE == MOE_EPILOGUE_ACT && inside) act_quad(p, q, acc[i], tile);
    if (EPILOGUE != MOE_EPILOGUE_DACT) continue;
    float sum = inside ? dact_quad(p, q, acc[i]) : 0.0f;
#pragma unroll
    for (int d = 8; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if (inside && p.partial != nullptr && threadIdx.x % 16 == 0) p.partial[row * p.column_tiles + tile] = sum;
  }
}

template <int EPILOGUE>
static __global__ void __launch_bounds__(THREADS, 2)
    simt_gemm_kernel(const __grid_constant__ simt_gemm_params p) {
  __shared__ __align__(16) slices s;
  for (int64_t i = blockIdx.x; i < p.tiles; i += gridDim.x)
    multiply_tile<EPILOGUE>(s, p, i % p.pieces, i / p.pieces);
}

/* ---- dweights ----------------------------------------------------------------------------------------------------- */

struct dweights_params {
  moe_gemm_args args;
  const float *partial;
  int64_t column_tiles;
  int warp_rows; /* rows of a warp at a time, lane l has the l-th: 1 where the warp reads the row, else 32 */
};

/* <A row, dot_bias[e]>: what this lane adds. */
__device__ __forceinline__ float lane_dot(const moe_gemm_args &a, int64_t row, int64_t expert) {
  const int64_t source = (a.gather_topk > 0 ? slot_of(a, row) / a.gather_topk : row) * a.k,
                bias = expert * a.k;
  const bool a_vector = aligned_rows(a.a, a.a_dtype, a.k),
             bias_vector = aligned_rows(a.dot_bias, a.bias_dtype, a.k);
  float sum = 0, x[EIGHT], y[EIGHT];
  for (int64_t k = threadIdx.x % 32 * EIGHT; k < a.k; k += 32 * EIGHT) {
    load_eight(x, a.a, a.a_dtype, source + k, a.k - k, a_vector);
    load_eight(y, a.dot_bias, a.bias_dtype, bias + k, a.k - k, bias_vector);
#pragma unroll
    for (int j = 0; j < EIGHT; j++) sum = fmaf(x[j], y[j], sum);
  }
  return sum;
}

static __global__ void __launch_bounds__(THREADS)
    dweights_kernel(const __grid_constant__ dweights_params p) {
  const moe_gemm_args &a = p.args;
  const row_groups groups = groups_of(a);
  const int lane = threadIdx.x % 32;
  for (int64_t first = grid_thread() / 32 * p.warp_rows; first < a.rows;
       first += grid_threads() / 32 * p.warp_rows) {
    const int64_t row = first + (lane < p.warp_rows ? lane : 0), e = expert_of_row(groups, row);
    const bool inside = row < a.rows && row >= offset_at(groups, e) && row < offset_at(groups, e + 1);
    float sum = 0;
#pragma unroll 4
    for (int64_t c = 0; inside && c < p.column_tiles; c++) sum += p.partial[row * p.column_tiles + c];
    if (a.dot_bias != nullptr && inside) { /* the one row of the warp */
      float dot = lane_dot(a, row, e);
#pragma unroll
      for (int d = 16; d > 0; d /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, d);
      sum += dot;
    }
    if (inside && lane < p.warp_rows) a.dweights[slot_of(a, row)] = sum;
  }
}

/* Blocks for so many tiles: one each, or as many as the limit allows. */
static int64_t blocks_for(int64_t tiles, int64_t sm_limit) {
  return sm_limit > 0 && sm_limit < tiles ? sm_limit : tiles;
}

moe_status moe_cuda_finish_dweights(const moe_gemm_args *args, const float *partial, int64_t column_tiles,
                                    moe_stream stream) {
  const dweights_params p = {*args, partial, column_tiles, args->dot_bias != NULL ? 1 : 32};
  const int64_t blocks = CEIL_DIV(args->rows, THREADS / 32 * p.warp_rows);
  return launch("gemm", dweights_kernel, {blocks_for(blocks, args->sm_limit), 1, 1, THREADS, 0}, p, stream);
}

/* ---- wgrad -------------------------------------------------------------------------------------------------------- */

__device__ __forceinline__ int64_t source_row(const moe_wgrad_args &a, int64_t row, int64_t topk) {
  return topk == 0 ? row : (a.row_slot != nullptr ? a.row_slot[row] : row) / topk;
}

/* A thread has one row of the slice and four columns of A and of B. */
__device__ __forceinline__ void read_rows(slices &s, const moe_wgrad_args &a, int64_t row, int64_t end,
                                          int64_t m0, int64_t n0) {
  const int line = threadIdx.x / 16, j = threadIdx.x % 16 * 4;
  const bool inside = row + line < end;
  float weight = 1;
  int64_t from_a = 0, from_b = 0;
  if (inside) {
    from_a = source_row(a, row + line, a.a_gather_topk) * a.m;
    from_b = source_row(a, row + line, a.b_gather_topk) * a.n;
    if (a.weights != nullptr) weight = a.weights[a.row_slot != nullptr ? a.row_slot[row + line] : row + line];
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int64_t m = m0 + j + i, n = n0 + j + i;
    s.a[line][j + i] = inside && m < a.m ? moe_load(a.a, a.a_dtype, from_a + m) * weight : 0.0f;
    s.b[line][j + i] = inside && n < a.n ? moe_load(a.b, a.b_dtype, from_b + n) : 0.0f;
  }
}

__device__ __forceinline__ void wgrad_tile(slices &s, const moe_wgrad_args &a, int64_t expert, int64_t tile) {
  const row_groups groups = {a.row_offset, a.rows, a.experts};
  const int64_t begin = offset_at(groups, expert), end = offset_at(groups, expert + 1);
  const int64_t across = CEIL_DIV(a.n, TILE), m0 = tile / across * TILE, n0 = tile % across * TILE;
  const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
  if (end <= begin && a.accumulate) return;
  float acc[4][4] = {};
  for (int64_t row = begin; row < end; row += DEPTH) {
    read_rows(s, a, row, end, m0, n0);
    __syncthreads();
    multiply_slice(acc, s, ty, tx);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int64_t m = m0 + 4 * ty + i, n = n0 + 4 * tx + j, at = (expert * a.m + m) * a.n + n;
      if (m >= a.m || n >= a.n) continue;
      moe_store(a.d, a.d_dtype, at, a.accumulate ? acc[i][j] + moe_load(a.d, a.d_dtype, at) : acc[i][j]);
    }
}

static __global__ void __launch_bounds__(THREADS, 2)
    simt_wgrad_kernel(const __grid_constant__ moe_wgrad_args a) {
  __shared__ __align__(16) slices s;
  const int64_t tiles = CEIL_DIV(a.m, TILE) * CEIL_DIV(a.n, TILE);
  for (int64_t i = blockIdx.x; i < tiles * a.experts; i += gridDim.x) wgrad_tile(s, a, i / tiles, i % tiles);
}

/* ---- host --------------------------------------------------------------------------------------------------------- */

static int64_t column_tiles_of(const moe_gemm_args *args) { return CEIL_DIV(args->n, TILE); }

/* Whether dweights are wanted shows in a pointer only, so every DACT has room for their parts. */
size_t moe_cuda_simt_gemm_scratch(const moe_gemm_args *args) {
  if (args->epilogue != MOE_EPILOGUE_DACT) return 0;
  return (size_t)args->rows * (size_t)column_tiles_of(args) * sizeof(float);
}

moe_status moe_cuda_simt_gemm(moe_context *ctx, const moe_gemm_args *args, moe_stream stream) {
  (void)ctx;
  const bool dact = args->epilogue == MOE_EPILOGUE_DACT, act = args->epilogue == MOE_EPILOGUE_ACT;
  simt_gemm_params p = {};
  p.args = *args;
  if (act || dact) p.act = *args->act;
  p.gated = (act || dact) && args->act->gated;
  p.inter = act && p.gated ? args->n / 2 : args->n;
  p.pieces = piece_count(args->rows, args->experts, TILE);
  p.column_tiles = column_tiles_of(args);
  p.partial = dact && args->dweights != NULL ? static_cast<float *>(args->scratch) : NULL;
  p.tiles = p.pieces * (act && p.gated ? CEIL_DIV(p.inter, TILE / 2) : p.column_tiles);
  const struct cuda_grid grid = {blocks_for(p.tiles, args->sm_limit), 1, 1, THREADS, 0};
  if (args->rows == 0) return MOE_OK;
  if (act) return launch("gemm", simt_gemm_kernel<MOE_EPILOGUE_ACT>, grid, p, stream);
  if (!dact) return launch("gemm", simt_gemm_kernel<MOE_EPILOGUE_STORE>, grid, p, stream);
  TRY(launch("gemm", simt_gemm_kernel<MOE_EPILOGUE_DACT>, grid, p, stream));
  return p.partial != NULL ? moe_cuda_finish_dweights(args, p.partial, p.column_tiles, stream) : MOE_OK;
}

size_t moe_cuda_simt_wgrad_scratch(const moe_wgrad_args *args) {
  (void)args;
  return 0;
}

moe_status moe_cuda_simt_wgrad(moe_context *ctx, const moe_wgrad_args *args, moe_stream stream) {
  (void)ctx;
  const int64_t tiles = CEIL_DIV(args->m, TILE) * CEIL_DIV(args->n, TILE);
  return launch("wgrad", simt_wgrad_kernel,
                {blocks_for(tiles * args->experts, args->sm_limit), 1, 1, THREADS, 0}, *args, stream);
}

KERNELS(simt, (const void *)simt_gemm_kernel<MOE_EPILOGUE_STORE>,
        (const void *)simt_gemm_kernel<MOE_EPILOGUE_ACT>, (const void *)simt_gemm_kernel<MOE_EPILOGUE_DACT>,
        (const void *)dweights_kernel, (const void *)simt_wgrad_kernel)
