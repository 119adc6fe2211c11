/* SPDX-License-Identifier: Apache-2.0
 *
 * out[t,:] = addend[t,:] + sum over ascending j of weights[t,j] y[slot_row[t,j],:]
 * and its gradient: dy[r,:] = weight dout[token,:], dweights[t,j] = <dout[t,:], y[r,:]>.
 *
 * Forward      gather, never scatter. A warp has a segment of SPAN x 256 columns of one token: a lane knows one of its slots,
 *              looked up a segment before; SLOTS rows are asked for before the first is used, and the lanes sum eight columns
 *              each, in the order of j:
 *
 *                  token t   | segment 0 | segment 1 | ...     neighbouring warps have neighbouring segments, so that
 *                  warp         w           w + 1              together they read whole rows
 *
 *              SLOTS x SPAN loads of 16 bytes a lane are under way: 50 to 100 KiB a multiprocessor, twice to four times what
 *              4.2 TB/s at 0.8 us ask for. Rows that are no multiple of eight columns, or not aligned, go one load at a time.
 * Backward     a warp has one slot; its lanes walk over the columns, eight at a time, and the 32 sums of the dot product
 *              are added by a fixed tree. Where dy is a mere copy, a warp reads a segment of a token and writes it to all of
 *              the token's rows.
 * Invariant    results depend on a token and its slots alone. Products are rounded before they are added, as on the CPU.
 * Floor        R H elements read and T H written, or the other way round, at the bandwidth of a copy. */
#include "launch.h"
#include "rows.cuh"
#include "vector.cuh"

enum {
  WARPS = 20, /* 96 registers a thread */
  SPAN_COLUMNS = 32 * EIGHT
};

/* Rows from here on are skipped. */
__device__ __forceinline__ int64_t row_limit(const int32_t *row_end, int64_t rows) {
  return row_end != nullptr && *row_end < rows ? *row_end : rows;
}

/* The row of slot s, or -1 when it is not below `limit`. */
__device__ __forceinline__ int64_t row_of(const int32_t *slot_row, int64_t s, int64_t limit) {
  const int64_t row = slot_row != nullptr ? slot_row[s] : s;
  return row >= 0 && row < limit ? row : -1;
}

/* How many times 256 columns a warp has: 4 or 8 loads of 16 bytes a lane, of which the larger number needs fewer sums. */
__host__ __device__ constexpr int span_of(int dtype, int slots) {
  return (slots < 4 ? 4 : 8) / slots / (dtype == MOE_FP32 ? 2 : 1);
}

/* What lane l knows of a token: its slot first + l. The row is as found, not yet held against the limit. */
struct known_slot {
  int row;
  float weight;
};

__device__ __forceinline__ known_slot slot_at(const moe_combine_args &p, int64_t token, int first) {
  const int j = first + threadIdx.x % 32;
  if (token >= p.tokens || j >= (int)p.topk) return {-1, 0};
  const int64_t s = token * p.topk + j;
  return {p.slot_row != nullptr ? p.slot_row[s] : (int)s, p.weights != nullptr ? p.weights[s] : 1.0f};
}

template <int DTYPE, int SLOTS>
static __global__ void __launch_bounds__(WARPS * 32, 1)
    combine_kernel(const __grid_constant__ moe_combine_args p) {
  constexpr int SPAN = span_of(DTYPE, SLOTS), BYTES = DTYPE == MOE_FP32 ? 4 : 2;
  const int64_t limit = row_limit(p.row_end, p.rows);
  const int hidden = (int)p.hidden, topk = (int)p.topk;
  walk w = walk_from(grid_thread() / 32, grid_threads() / 32, CEIL_DIV(hidden, SPAN * SPAN_COLUMNS));
  known_slot next = slot_at(p, w.row, 0);
  while (w.row < p.tokens) {
    const int64_t token = w.row;
    const int column = w.piece * (SPAN * SPAN_COLUMNS) + threadIdx.x % 32 * EIGHT;
    const int64_t at = token * hidden + column;
    known_slot now = next;
    walk_on(&w);
    next = slot_at(p, w.row, 0);
    float sum[SPAN][EIGHT] = {};
#pragma unroll
    for (int c = 0; c < SPAN; c++)
      if (p.addend != nullptr && column + c * SPAN_COLUMNS < hidden)
        load_eight(sum[c], p.addend, MOE_FP32, at + c * SPAN_COLUMNS, EIGHT, true);
    const row_source y = {static_cast<const char *>(p.y) + column * BYTES, (uint32_t)(hidden * BYTES),
                          hidden - column};
    for (int j = 0; j < topk; j += SLOTS) {
      if (j > 0 && j % 32 == 0) now = slot_at(p, token, j);
      add_rows<DTYPE, SLOTS, SPAN>(sum, y, now.row < limit ? now.row : -1, now.weight, j % 32);
    }
#pragma unroll
    for (int c = 0; c < SPAN; c++)
      if (column + c * SPAN_COLUMNS < hidden)
        store_eight(p.out, p.out_dtype, at + c * SPAN_COLUMNS, sum[c], EIGHT, true);
  }
}

/* Any width and alignment: a thread has eight columns of one token. */
static __global__ void combine_any_kernel(const __grid_constant__ moe_combine_args p) {
  const int64_t limit = row_limit(p.row_end, p.rows);
  const bool in_vector = aligned_rows(p.y, p.y_dtype, p.hidden);
  const bool out_vector = aligned_rows(p.out, p.out_dtype, p.hidden);
  const bool add_vector = aligned_rows(p.addend, MOE_FP32, p.hidden);
  walk w = walk_from(grid_thread(), grid_threads(), (int)CEIL_DIV(p.hidden, EIGHT));
  for (; w.row < p.tokens; walk_on(&w)) {
    const int64_t column = (int64_t)w.piece * EIGHT, count = p.hidden - column,
                  at = w.row * p.hidden + column;
    float sum[EIGHT] = {0}, v[EIGHT];
    if (p.addend != nullptr) load_eight(sum, p.addend, MOE_FP32, at, count, add_vector);
    for (int64_t s = w.row * p.topk; s < (w.row + 1) * p.topk; s++) {
      const int64_t r = row_of(p.slot_row, s, limit);
      if (r < 0) continue;
      const float weight = p.weights != nullptr ? p.weights[s] : 1.0f;
      load_eight(v, p.y, p.y_dtype, r * p.hidden + column, count, in_vector);
#pragma unroll
      for (int j = 0; j < EIGHT; j++) sum[j] += weight * v[j];
    }
    store_eight(p.out, p.out_dtype, at, sum, count, out_vector);
  }
}

/* ---- backward ----------------------------------------------------------------------------------------------------- */

/* Slot s with row r: dy and what this lane adds up of the dot product. */
__device__ __forceinline__ float backward_slot(const moe_combine_backward_args &p, int64_t s, int64_t r) {
  const float weight = p.weights != nullptr ? p.weights[s] : 1.0f;
  const int64_t from = s / p.topk * p.hidden, to = r * p.hidden;
  const bool dout_vector = aligned_rows(p.dout, p.dout_dtype, p.hidden);
  const bool y_vector = aligned_rows(p.y, p.y_dtype, p.hidden),
             dy_vector = aligned_rows(p.dy, p.y_dtype, p.hidden);
  float dot = 0;
  for (int64_t column = threadIdx.x % 32 * EIGHT; column < p.hidden; column += SPAN_COLUMNS) {
    const int64_t count = p.hidden - column;
    float dout[EIGHT], v[EIGHT];
    load_eight(dout, p.dout, p.dout_dtype, from + column, count, dout_vector);
    if (p.dweights != nullptr) {
      load_eight(v, p.y, p.y_dtype, to + column, count, y_vector);
#pragma unroll
      for (int j = 0; j < EIGHT; j++) dot += dout[j] * v[j];
    }
    if (p.dy != nullptr) {
#pragma unroll
      for (int j = 0; j < EIGHT; j++) v[j] = weight * dout[j];
      store_eight(p.dy, p.y_dtype, to + column, v, count, dy_vector);
    }
  }
  return dot;
}

static __global__ void __launch_bounds__(1024, 1)
    combine_backward_kernel(const __grid_constant__ moe_combine_backward_args p) {
  const int64_t limit = row_limit(p.row_end, p.rows);
  for (int64_t s = grid_thread() / 32; s < p.tokens * p.topk; s += grid_threads() / 32) {
    const int64_t r = row_of(p.slot_row, s, limit);
    float dot = r >= 0 ? backward_slot(p, s, r) : 0;
    for (int d = 16; d > 0; d /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, d);
    if (p.dweights != nullptr && threadIdx.x % 32 == 0) p.dweights[s] = dot;
  }
}

enum {
  COPY_SPAN = 4 /* times 32 words of 16 bytes */
};

/* Words of 16 bytes in a row of dy. */
__host__ __device__ __forceinline__ int words_of(const moe_combine_backward_args &p) {
  return (int)(p.hidden * (p.y_dtype == MOE_FP32 ? 4 : 2) / 16);
}

/* dy without weights, in the type of dout; rows are whole words. */
static __global__ void __launch_bounds__(1024, 1)
    spread_kernel(const __grid_constant__ moe_combine_backward_args p) {
  const int64_t limit = row_limit(p.row_end, p.rows);
  const int lane = threadIdx.x % 32, topk = (int)p.topk, words = words_of(p);
  walk w = walk_from(grid_thread() / 32, grid_threads() / 32, CEIL_DIV(words, COPY_SPAN * 32));
  for (; w.row < p.tokens; walk_on(&w)) {
    const int first = w.piece * COPY_SPAN * 32 + lane;
    const uint4 *from = static_cast<const uint4 *>(p.dout) + w.row * words + first;
    uint4 word[COPY_SPAN];
#pragma unroll
    for (int c = 0; c < COPY_SPAN; c++)
      if (first + c * 32 < words) word[c] = __ldcs(from + c * 32);
    for (int base = 0; base < topk; base += 32) {
      const int own = base + lane < topk ? (int)row_of(p.slot_row, w.row * topk + base + lane, limit) : -1;
      for (int j = 0; j < min(32, topk - base); j++) {
        const int row = __shfl_sync(0xffffffffu, own, j);
        uint4 *to = static_cast<uint4 *>(p.dy) + (int64_t)row * words + first;
#pragma unroll
        for (int c = 0; c < COPY_SPAN; c++)
          if (row >= 0 && first + c * 32 < words) to[c * 32] = word[c];
      }
    }
  }
}

/* ---- host --------------------------------------------------------------------------------------------------------- */

template <int DTYPE, int SLOTS>
static moe_status launch_combine(int64_t units, const moe_combine_args *args, moe_stream stream) {
  const int64_t segments = CEIL_DIV(args->hidden, span_of(DTYPE, SLOTS) * SPAN_COLUMNS);
  return launch("combine", combine_kernel<DTYPE, SLOTS>, grid_of_warps(units, args->tokens * segments, WARPS),
                *args, stream);
}

/* Where topk is none of the sizes, rows that are not there stand in; past the largest a token takes several turns. */
template <int DTYPE>
static moe_status launch_combine_of(int64_t units, const moe_combine_args *args, moe_stream stream) {
  if (args->topk == 1) return launch_combine<DTYPE, 1>(units, args, stream);
  if (args->topk == 2) return launch_combine<DTYPE, 2>(units, args, stream);
  if (args->topk <= 4 || DTYPE == MOE_FP32) return launch_combine<DTYPE, 4>(units, args, stream);
  return launch_combine < DTYPE, DTYPE == MOE_FP32 ? 4 : 8 > (units, args, stream);
}

size_t moe_cuda_combine_scratch(const moe_context *ctx, const moe_combine_args *args) {
  (void)ctx, (void)args;
  return 0;
}

moe_status moe_cuda_combine(moe_context *ctx, const moe_combine_args *args, moe_stream stream) {
  const int64_t units = moe_cuda_units(ctx, args->sm_limit);
  const bool eights =
      args->hidden % EIGHT == 0 && aligned_16(args->y) && aligned_16(args->addend) && aligned_16(args->out);
  if (args->topk == 0 || !eights)
    return launch("combine", combine_any_kernel,
                  grid_of_warps(units, CEIL_DIV(args->tokens * CEIL_DIV(args->hidden, EIGHT), 32), 32), *args,
                  stream);
  if (args->y_dtype == MOE_FP32) return launch_combine_of<MOE_FP32>(units, args, stream);
  if (args->y_dtype == MOE_BF16) return launch_combine_of<MOE_BF16>(units, args, stream);
  return launch_combine_of<MOE_FP16>(units, args, stream);
}

size_t moe_cuda_combine_backward_scratch(const moe_context *ctx, const moe_combine_backward_args *args) {
  (void)ctx, (void)args;
  return 0;
}

moe_status moe_cuda_combine_backward(moe_context *ctx, const moe_combine_backward_args *args,
                                     moe_stream stream) {
  const int64_t units = moe_cuda_units(ctx, args->sm_limit);
  const bool copies = args->dy != NULL && args->dweights == NULL && args->weights == NULL &&
                      args->dout_dtype == args->y_dtype && args->hidden % EIGHT == 0 &&
                      aligned_16(args->dout) && aligned_16(args->dy);
  if (copies)
    return launch("combine_backward", spread_kernel,
                  grid_of_warps(units, args->tokens * CEIL_DIV(words_of(*args), COPY_SPAN * 32), 32), *args,
                  stream);
  return launch("combine_backward", combine_backward_kernel,
                grid_of_warps(units, args->tokens * args->topk, 32), *args, stream);
}

#define COMBINES(DTYPE)                                                           \
  (const void *)combine_kernel<DTYPE, 1>, (const void *)combine_kernel<DTYPE, 2>, \
      (const void *)combine_kernel<DTYPE, 4>, (const void *)combine_kernel<DTYPE, DTYPE == MOE_FP32 ? 4 : 8>
KERNELS(combine, COMBINES(MOE_FP32), COMBINES(MOE_BF16), COMBINES(MOE_FP16), (const void *)combine_any_kernel,
        (const void *)combine_backward_kernel, (const void *)spread_kernel)
