/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of one expert with an fp32 operand, on tensor cores that take bf16. An fp32 number is the sum of three of bf16,
 *     x = high + middle + low,    high = rn(x), middle = rn(x - high), low = rn(x - high - middle),
 * to the last bit. Products of bf16 are exact in fp32, so these are as well:
 *
 *     gemm    the contraction runs over pairs of parts, the smallest first: what sums cut off is then that of one pass, the last.
 *             One fp32 operand: 3 pairs, the other operand read three times.    A' [rows, 3 k]    B' [n, 3 k] or [3 k, n]
 *             Two: 6 pairs. Those left out (middle low, low low) are 2^-24 of a product.
 *     wgrad   the parts are lines (or columns) of their own, and the rows are split into pieces, as if those were experts:
 *             [rows, 3 m]  ->  partial [splits, 3 m, n]  ->  d = the sum of the lows, the middles, the highs, in this order
 *
 * Invariants   parts of a row lie in the order of rows: what is gathered is gathered here. Rows outside of the offsets are neither read nor
 *              written. Each part is padded with zeros, k to whole stages of gemm.cuh and m to 16-byte pieces. The splits follow from
 *              sizes alone, not from the device, and so do bits.
 * Range        an infinity has no other parts, so that it stays one where what it meets is finite and bf16; parts of other signs, or of 0, make NaN
 *              of it. Numbers under 2^-126 may count as 0, and so may parts: an operand is good to that, or to its last bit.
 * Floor        bandwidth: 4 bytes read and 6 written an element of fp32, 12 m n a split of wgrad written and read; and 3 (6) times the
 *              2 rows n k of a product at the rate of bf16. */
#include "../launch.h"
#include "../rows.cuh"
#include "../vector.cuh"
#include "gemm.cuh"
#include "host.h"

enum {
  PARTS = 3,
  THREADS = 1024,
  WAVE = 132,       /* tiles that run at once; a constant, as the bits of wgrad depend on it */
  SPLIT_ROWS = 256, /* at least, of a split of wgrad */
  BOTH_DEPTH = 512  /* of k where both operands are fp32 */
};

/* Nibbles from the last: 2 is the low part, 1 the middle, 0 the high one. */
static const gemm_pairs LEFT = {3, PARTS, 1, 0x012, 0x000}, RIGHT = {3, 1, PARTS, 0x000, 0x012},
                        BOTH = {6, PARTS, PARTS, 0x001102, 0x010120};

/* ---- parts -------------------------------------------------------------------------------------------------------- */

struct parts_params {
  row_groups rows; /* of one expert */
  const int32_t *row_slot;
  int topk; /* 0: row r is row r of x */
  const float *x;
  int64_t columns;
  int64_t zeros_to; /* rows from the last on up to here are zeros */
  bf16 *parts;
  int pieces; /* of 8 columns, padding included */
  int64_t row_stride, part_stride;
  int32_t *split_offset; /* [splits + 1], or NULL */
  int splits;
};

/* The nearest bf16 that is finite if x is. */
__device__ __forceinline__ float high_of(float x) {
  const uint32_t bits = __float_as_uint(x);
  const bool rounds = (bits & 0x7fffffffu) < 0x7f7f8000u;
  return __uint_as_float((bits + (rounds ? 0x7fffu + (bits >> 16 & 1) : 0)) & 0xffff0000u);
}

/* Eight numbers that are bf16. */
__device__ __forceinline__ uint4 packed(const float *v) {
  uint32_t word[EIGHT / 2];
#pragma unroll
  for (int i = 0; i < EIGHT / 2; i++)
    word[i] = __float_as_uint(v[2 * i]) >> 16 | __float_as_uint(v[2 * i + 1]);
  return make_uint4(word[0], word[1], word[2], word[3]);
}

/* Where the splits begin and end: all as long, in whole stages, the last ones shorter or empty. */
__device__ __forceinline__ void write_splits(const parts_params &p, int64_t begin, int64_t end) {
  const int64_t split = grid_thread(), count = end > begin ? end - begin : 0;
  const int64_t each = (count + (int64_t)p.splits * BK - 1) / ((int64_t)p.splits * BK) * BK;
  if (split <= p.splits) p.split_offset[split] = (int32_t)(begin + min(split * each, count));
}

static __global__ void __launch_bounds__(THREADS, 1) parts_kernel(const __grid_constant__ parts_params p) {
  const int64_t begin = offset_at(p.rows, 0), end = offset_at(p.rows, 1), last = max(end, p.zeros_to);
  const bool vector = aligned_rows(p.x, MOE_FP32, p.columns);
  if (p.split_offset != nullptr) write_splits(p, begin, end);
  for (walk w = walk_from(grid_thread(), grid_threads(), p.pieces); begin + w.row < last; walk_on(&w)) {
    const int64_t row = begin + w.row, column = (int64_t)w.piece * EIGHT;
    float rest[EIGHT] = {}, high[EIGHT];
    if (row < end) {
      const int64_t from = p.topk == 0 ? row : (p.row_slot != nullptr ? p.row_slot[row] : (int)row) / p.topk;
      load_eight(rest, p.x, MOE_FP32, from * p.columns + column, p.columns - column, vector);
    }
    bf16 *to = p.parts + row * p.row_stride + column;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
#pragma unroll
      for (int i = 0; i < EIGHT; i++) {
        high[i] = high_of(rest[i]);
        rest[i] = rest[i] == high[i] ? 0 : rest[i] - high[i];
      }
      *reinterpret_cast<uint4 *>(to + part * p.part_stride) = packed(high);
    }
  }
}

static moe_status write_parts(const moe_context *ctx, const char *op, int64_t sm_limit, const parts_params &p,
                              moe_stream stream) {
  const int64_t lines = p.rows.rows > p.zeros_to ? p.rows.rows : p.zeros_to,
                warps = CEIL_DIV(lines * p.pieces + p.splits + 1, 32);
  return launch(op, parts_kernel, grid_of_warps(moe_cuda_units(ctx, sm_limit), warps, THREADS / 32), p,
                stream);
}

/* ---- gemm --------------------------------------------------------------------------------------------------------- */

/* An operand that is not made of parts must have whole 16-byte pieces. Where both are fp32 so is all around them, and what tensor cores cut
 * off shows: it grows like k, and at 512 is about the noise of a chain of fp32 (docs/numerics.md). */
static bool gemm_has_parts(const moe_gemm_args *args) {
  const bool a = args->a_dtype == MOE_FP32, b = args->b_dtype == MOE_FP32;
  if (args->experts != 1 || args->epilogue != MOE_EPILOGUE_STORE || args->n % 8 != 0) return false;
  if (args->d_dtype == MOE_FP16) return false;
  if (a && b) return args->k <= BOTH_DEPTH;
  if (a) return args->b_dtype == MOE_BF16 && (args->b_kn || args->k % 8 == 0);
  return b && args->a_dtype == MOE_BF16 && args->gather_topk == 0 && args->k % 8 == 0;
}

static int64_t padded_k(const moe_gemm_args *args) { return ALIGN_UP(args->k, BK); }
static size_t a_parts_bytes(const moe_gemm_args *args) {
  if (args->a_dtype != MOE_FP32) return 0;
  return ALIGN_UP((size_t)args->rows * PARTS * padded_k(args) * sizeof(bf16), MOE_ALIGN);
}
static size_t b_parts_bytes(const moe_gemm_args *args) {
  if (args->b_dtype != MOE_FP32) return 0;
  return ALIGN_UP((size_t)args->n * PARTS * padded_k(args) * sizeof(bf16), MOE_ALIGN);
}

extern "C" bool moe_cuda_parts_gemm_fits(const moe_gemm_args *args) {
  if (!gemm_has_parts(args)) return false;
  moe_gemm_args whole = *args;
  whole.a_dtype = whole.b_dtype = MOE_BF16;
  whole.k = PARTS * padded_k(args);
  return moe_cuda_wgmma_gemm_fits(&whole);
}

extern "C" size_t moe_cuda_parts_gemm_scratch(const moe_gemm_args *args) {
  return gemm_has_parts(args) ? a_parts_bytes(args) + b_parts_bytes(args) : 0;
}

static parts_params a_parts(const moe_gemm_args *args) {
  parts_params p = {};
  p.rows = {args->row_offset, args->rows, 1};
  p.row_slot = args->row_slot;
  p.topk = (int)args->gather_topk;
  p.x = static_cast<const float *>(args->a);
  p.columns = args->k;
  p.parts = static_cast<bf16 *>(args->scratch);
  p.part_stride = padded_k(args);
  p.row_stride = PARTS * p.part_stride;
  p.pieces = (int)(p.part_stride / EIGHT);
  return p;
}

static parts_params b_parts(const moe_gemm_args *args) {
  parts_params p = {};
  const int64_t k = padded_k(args);
  p.rows = {nullptr, args->b_kn ? args->k : args->n, 1};
  p.x = static_cast<const float *>(args->b);
  p.columns = args->b_kn ? args->n : args->k;
  p.zeros_to = args->b_kn ? k : 0;
  p.parts = reinterpret_cast<bf16 *>(static_cast<char *>(args->scratch) + a_parts_bytes(args));
  p.part_stride = args->b_kn ? k * args->n : k;
  p.row_stride = args->b_kn ? args->n : PARTS * k;
  p.pieces = (int)((args->b_kn ? args->n : k) / EIGHT);
  return p;
}

extern "C" moe_status moe_cuda_parts_gemm(moe_context *ctx, const moe_gemm_args *args, moe_stream stream) {
  const bool left = args->a_dtype == MOE_FP32, right = args->b_dtype == MOE_FP32;
  moe_gemm_args product = *args;
  if (args->rows == 0) return MOE_OK;
  if (left) {
    const parts_params p = a_parts(args);
    TRY(write_parts(ctx, "gemm", args->sm_limit, p, stream));
    product.a = p.parts;
    product.gather_topk = 0;
  }
  if (right) {
    const parts_params p = b_parts(args);
    TRY(write_parts(ctx, "gemm", args->sm_limit, p, stream));
    product.b = p.parts;
  }
  return moe_cuda_wgmma_gemm_pairs(ctx, &product, left && right ? BOTH : left ? LEFT : RIGHT, stream);
}

/* ---- wgrad -------------------------------------------------------------------------------------------------------- */

/* Where things are in the scratch, and the product that is made of them. */
struct wgrad_plan {
  moe_wgrad_args product;
  bool left;     /* A is fp32, else B */
  int64_t width; /* of a part: that of the fp32 operand in whole pieces */
  bf16 *parts;
  int32_t *split_offset;
  float *partial;
  size_t bytes;
};

static wgrad_plan plan_of(const moe_wgrad_args *args) {
  wgrad_plan w = {};
  moe_wgrad_args *product = &w.product;
  char *scratch = static_cast<char *>(args->scratch);
  *product = *args;
  w.left = args->a_dtype == MOE_FP32;
  w.width = ALIGN_UP(w.left ? args->m : args->n, EIGHT);
  (w.left ? product->m : product->n) = PARTS * w.width;
  const int64_t tiles = CEIL_DIV(product->m, BM) * CEIL_DIV(product->n, 192), most = args->rows / SPLIT_ROWS;
  product->experts = WAVE / tiles < most ? WAVE / tiles : most;
  if (product->experts < 1) product->experts = 1;
  const size_t parts = ALIGN_UP((size_t)args->rows * PARTS * w.width * sizeof(bf16), MOE_ALIGN),
               offsets = ALIGN_UP((size_t)(product->experts + 1) * sizeof(int32_t), MOE_ALIGN);
  w.parts = reinterpret_cast<bf16 *>(scratch);
  w.split_offset = reinterpret_cast<int32_t *>(scratch + parts);
  w.partial = reinterpret_cast<float *>(scratch + parts + offsets);
  w.bytes = parts + offsets + (size_t)(product->experts * product->m * product->n) * sizeof(float);
  product->a_dtype = product->b_dtype = MOE_BF16;
  (w.left ? product->a : product->b) = w.parts;
  (w.left ? product->a_gather_topk : product->b_gather_topk) = 0;
  product->row_offset = w.split_offset;
  product->d = w.partial;
  product->d_dtype = MOE_FP32;
  product->accumulate = 0;
  return w;
}

static bool wgrad_has_parts(const moe_wgrad_args *args) {
  if (args->experts != 1) return false;
  if (args->a_dtype == MOE_FP32) return args->b_dtype == MOE_BF16 && args->n % 8 == 0;
  return args->b_dtype == MOE_FP32 && args->a_dtype == MOE_BF16 && args->m % 8 == 0;
}

extern "C" bool moe_cuda_parts_wgrad_fits(const moe_wgrad_args *args) {
  if (!wgrad_has_parts(args)) return false;
  const wgrad_plan w = plan_of(args);
  return moe_cuda_wgmma_wgrad_fits(&w.product);
}

/* With weights it does not fit, but those are a pointer. */
extern "C" size_t moe_cuda_parts_wgrad_scratch(const moe_wgrad_args *args) {
  return wgrad_has_parts(args) ? plan_of(args).bytes : 0;
}

struct sum_params {
  row_groups rows;
  const float *partial;
  int64_t row_stride, part_stride, split_stride;
  int splits;
  void *d;
  moe_dtype d_dtype;
  int accumulate;
  int64_t m, n;
};

/* A thread has eight columns of a line of d. */
static __global__ void __launch_bounds__(THREADS, 1) sum_kernel(const __grid_constant__ sum_params p) {
  if (p.accumulate && offset_at(p.rows, 0) >= offset_at(p.rows, 1)) return;
  const bool vector = aligned_rows(p.d, p.d_dtype, p.n);
  const int pieces = (int)((p.n + EIGHT - 1) / EIGHT);
  for (walk w = walk_from(grid_thread(), grid_threads(), pieces); w.row < p.m; walk_on(&w)) {
    const int64_t column = (int64_t)w.piece * EIGHT, at = w.row * p.n + column;
    float sum[EIGHT] = {}, v[EIGHT];
    for (int part = PARTS - 1; part >= 0; part--)
      for (int split = 0; split < p.splits; split++) {
        load_eight(v, p.partial, MOE_FP32,
                   split * p.split_stride + part * p.part_stride + w.row * p.row_stride + column, EIGHT,
                   true);
#pragma unroll
        for (int i = 0; i < EIGHT; i++) sum[i] += v[i];
      }
    if (p.accumulate) {
      load_eight(v, p.d, p.d_dtype, at, p.n - column, vector);
#pragma unroll
      for (int i = 0; i < EIGHT; i++) sum[i] += v[i];
    }
    store_eight(p.d, p.d_dtype, at, sum, p.n - column, vector);
  }
}

static moe_status add_partial(const moe_context *ctx, const moe_wgrad_args *args, const wgrad_plan &w,
                              moe_stream stream) {
  const moe_wgrad_args &product = w.product;
  sum_params p = {};
  p.rows = {args->row_offset, args->rows, 1};
  p.partial = w.partial;
  p.row_stride = product.n;
  p.part_stride = w.left ? w.width * product.n : w.width;
  p.split_stride = product.m * product.n;
  p.splits = (int)product.experts;
  p.d = args->d;
  p.d_dtype = args->d_dtype;
  p.accumulate = args->accumulate;
  p.m = args->m;
  p.n = args->n;
  const int64_t warps = CEIL_DIV(args->m * CEIL_DIV(args->n, EIGHT), 32);
  return launch("wgrad", sum_kernel, grid_of_warps(moe_cuda_units(ctx, args->sm_limit), warps, THREADS / 32),
                p, stream);
}

extern "C" moe_status moe_cuda_parts_wgrad(moe_context *ctx, const moe_wgrad_args *args, moe_stream stream) {
  const wgrad_plan w = plan_of(args);
  parts_params p = {};
  p.rows = {args->row_offset, args->rows, 1};
  p.row_slot = args->row_slot;
  p.topk = (int)(w.left ? args->a_gather_topk : args->b_gather_topk);
  p.x = static_cast<const float *>(w.left ? args->a : args->b);
  p.columns = w.left ? args->m : args->n;
  p.parts = w.parts;
  p.part_stride = w.width;
  p.row_stride = PARTS * w.width;
  p.pieces = (int)(w.width / EIGHT);
  p.split_offset = w.split_offset;
  p.splits = (int)w.product.experts;
  TRY(write_parts(ctx, "wgrad", args->sm_limit, p, stream));
  TRY(moe_cuda_wgmma_wgrad(ctx, &w.product, stream));
  return add_partial(ctx, args, w, stream);
}

KERNELS(parts, (const void *)parts_kernel, (const void *)sum_kernel)
