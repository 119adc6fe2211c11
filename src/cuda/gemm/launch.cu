/* SPDX-License-Identifier: Apache-2.0
 *
 * From public arguments to a launch of the grouped products: which problems fit wgmma, which instance takes them, the
 * tensor map of the weights. Host code only; nothing here looks at device memory. */
#include <cuda.h>
#include <math.h>

#include "../launch.h"
#include "host.h"
#include "wgrad.cuh"

static const size_t SHARED_LIMIT = 227 * 1024;

static int64_t tiles_of(int64_t rows, int64_t experts) {
  return rows / BM + (rows < experts ? rows : experts);
}

/* Blocks of a persistent kernel: one for each multiprocessor it may have, or, dynamic, four of a quarter of the tiles each, which the
 * hardware hands out as multiprocessors come free. A limit is kept by blocks that stay, so it leaves nothing to hand out. */
static int64_t blocks_of(const moe_context *ctx, int64_t sm_limit, moe_schedule schedule, int64_t tiles) {
  const int64_t units = moe_cuda_units(ctx, sm_limit);
  const int64_t blocks = schedule == MOE_SCHEDULE_DYNAMIC && sm_limit == 0 ? 4 * units : units;
  return tiles < blocks ? tiles : blocks;
}

static bool gated_halves(const moe_act_desc *act) {
  return act->gated && act->layout != MOE_LAYOUT_INTERLEAVED;
}

/* Microseconds of a tile of bn columns: of a stage, and what passes beside them. Of plain products from docs/log/gemm.md, 8; of dact from 15,
 * the row of 128 columns by reckoning. */
struct tile_cost {
  int bn;
  double stage, beside;
};
static const tile_cost plain_costs[] = {{256, 0.68, 0.35}, {192, 0.53, 0.35}, {128, 0.37, 0.35}};
static const tile_cost dact_costs[] = {{256, 0.97, 8}, {192, 0.75, 5}, {128, 0.57, 10}};

static double tile_time(const gemm_instance &row, int64_t k) {
  const tile_cost *cost = row.epilogue == DACT ? dact_costs : plain_costs;
  while (cost->bn != row.bn) cost++;
  return CEIL_DIV(k, BK) * cost->stage + cost->beside;
}

/* The instance that takes the least time for the columns. A gated pair in halves has N-contiguous boxes 64 wide, which a tile of
 * 192 would not allow; there is none. */
static const gemm_instance *instance_of(const moe_gemm_args *args) {
  const gemm_table tables[] = {moe_cuda_gemm_store(), moe_cuda_gemm_act(), moe_cuda_gemm_dact()};
  const bool rounded = args->d_dtype == MOE_BF16 && !args->accumulate;
  const int epilogue = args->epilogue == MOE_EPILOGUE_STORE && !rounded ? STORE_NUMBERS : (int)args->epilogue;
  const gemm_instance *best = nullptr;
  double least = INFINITY;
  for (const gemm_table &table : tables)
    for (int i = 0; i < table.count; i++) {
      const gemm_instance &row = table.rows[i];
      if (row.epilogue != epilogue || row.kn != args->b_kn) continue;
      const double time = CEIL_DIV(args->n, row.bn) * tile_time(row, args->k);
      if (time >= least) continue;
      best = &row;
      least = time;
    }
  return best;
}

/* bf16 operands, rows of whole 16-byte pieces, gate and up within a thread's reach. */
extern "C" bool moe_cuda_wgmma_gemm_fits(const moe_gemm_args *args) {
  if (args->a_dtype != MOE_BF16 || args->b_dtype != MOE_BF16) return false;
  if (args->k % 8 != 0 || args->n % 8 != 0 || args->k >= 1 << 30) return false;
  const bool plain = args->epilogue == MOE_EPILOGUE_STORE;
  if (args->d_dtype != MOE_BF16 && !(plain && args->d_dtype == MOE_FP32)) return false;
  if (args->bias_dtype != MOE_BF16 && args->bias_dtype != MOE_DTYPE_DEFAULT) return false;
  if (tiles_of(args->rows, args->experts) * CEIL_DIV(args->n, 128) > INT32_MAX / 2) return false;
  if (instance_of(args)->shared_bytes + (size_t)args->experts * 4 > SHARED_LIMIT) return false;
  if (plain) return true;
  const moe_act_desc *act = args->act;
  const int64_t inter = args->epilogue == MOE_EPILOGUE_ACT && act->gated ? args->n / 2 : args->n;
  if (inter % 8 != 0) return false;
  return !act->gated || act->layout != MOE_LAYOUT_INTERLEAVED || act->interleave == 1 ||
         act->interleave == 32;
}

extern "C" size_t moe_cuda_wgmma_gemm_scratch(const moe_gemm_args *args) {
  if (args->epilogue != MOE_EPILOGUE_DACT) return 0;
  return (size_t)args->rows * CEIL_DIV(args->n, 128) * sizeof(float);
}

typedef CUresult (*encode_function)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                    const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                    const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                    CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* A row-major array [d2, d1, d0] of bf16 as a map of boxes 64 wide; of boxes past an edge zeros are read, and nothing is written there. */
static moe_status make_map(const moe_context *ctx, const char *op, const void *base, cuuint64_t d0,
                           cuuint64_t d1, cuuint64_t d2, cuuint32_t box_rows, CUtensorMap *map) {
  const encode_function encode = (encode_function)((const struct cuda_device *)ctx->state)->encode_tensor_map;
  const cuuint64_t size[3] = {d0, d1, d2}, stride_bytes[2] = {d0 * 2, d0 * d1 * 2};
  const cuuint32_t box[3] = {BK, box_rows, 1}, step[3] = {1, 1, 1};
  CHECK(encode != NULL, MOE_ERROR_DEVICE,
        "%s: the driver has no tensor maps, wanted one for CUDA 12.0 or later", op);
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, d2 > 0 ? 3 : 2, (void *)base, size, stride_bytes, box,
             step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  CHECK(result == CUDA_SUCCESS, MOE_ERROR_DEVICE, "%s: %p: the driver made no tensor map of it (CUresult %d)",
        op, base, (int)result);
  return MOE_OK;
}

/* How long an operand of so many parts is along k. */
static cuuint64_t extent_of(int parts, int64_t k) { return parts > 1 ? parts * ALIGN_UP(k, BK) : k; }

static moe_status gemm_maps(const moe_context *ctx, const moe_gemm_args *args, int box_rows, gemm_params *p) {
  const cuuint64_t n = args->n, a_k = extent_of(p->pairs.a_parts, args->k),
                   b_k = extent_of(p->pairs.b_parts, args->k);
  if (p->gather_topk == 0) TRY(make_map(ctx, "gemm", args->a, a_k, args->rows, 0, BM, &p->a_map));
  if (args->b_kn) return make_map(ctx, "gemm", args->b, n, b_k, args->experts, BK, &p->b_map);
  return make_map(ctx, "gemm", args->b, b_k, n, args->experts, box_rows, &p->b_map);
}

/* The cheapest level that does all that the description says. */
static int level_of(const moe_act_desc *act) {
  if (act->up_beta > 0) return SOFT;
  const bool free = act->gate_max == INFINITY && act->up_min == -INFINITY && act->up_max == INFINITY;
  return free && act->up_offset == 0 ? PLAIN : CLAMPED;
}

static gemm_params params_of(const moe_gemm_args *args, int bn) {
  gemm_params p = {};
  p.row_offset = args->row_offset;
  p.row_slot = args->row_slot;
  p.a = static_cast<const bf16 *>(args->a);
  p.rows = (int)args->rows;
  p.n = (int)args->n;
  p.k = (int)args->k;
  p.experts = (int)args->experts;
  p.gather_topk = args->gather_topk > 1 || args->row_slot != NULL ? (int)args->gather_topk : 0;
  p.weights = args->weights;
  p.bias = static_cast<const bf16 *>(args->bias);
  p.d = args->d;
  p.d_fp32 = args->d_dtype == MOE_FP32;
  p.accumulate = args->accumulate;
  p.h = static_cast<bf16 *>(args->h);
  p.dh = static_cast<bf16 *>(args->dh);
  p.halves = 1;
  p.column_tiles = (int)CEIL_DIV(args->n, bn);
  if (args->epilogue == MOE_EPILOGUE_STORE) return p;
  p.act = *args->act;
  p.act_level = level_of(args->act);
  const bool pair = args->epilogue == MOE_EPILOGUE_ACT && args->act->gated;
  p.inter = (int)(pair ? args->n / 2 : args->n);
  if (!args->act->gated) {
    p.h_width = p.inter;
    return p;
  }
  const bool halves = gated_halves(args->act);
  p.h_width = 2 * p.inter;
  p.in_pairs = !halves && args->act->interleave == 1;
  p.h_shift = !halves;
  p.gate_column = (int)moe_gate_column(args->act, p.inter, 0);
  p.h_up = p.in_pairs ? 8 : (int)moe_up_distance(args->act, p.inter);
  p.tile_up = halves ? bn / 2 : p.h_up;
  if (pair && halves) {
    p.halves = 2;
    p.half_row[0] = p.gate_column;
    p.half_row[1] = p.gate_column + p.h_up;
    p.column_tiles = (int)CEIL_DIV(p.inter, bn / 2);
  }
  return p;
}

moe_status moe_cuda_wgmma_gemm_pairs(moe_context *ctx, const moe_gemm_args *args, const gemm_pairs &pairs,
                                     moe_stream stream) {
  if (args->rows == 0) return MOE_OK;
  const gemm_instance *instance = instance_of(args);
  gemm_params p = params_of(args, instance->bn);
  p.pairs = pairs;
  const bool partial = args->epilogue == MOE_EPILOGUE_DACT && args->dweights != NULL;
  if (partial) p.partial = static_cast<float *>(args->scratch);
  TRY(gemm_maps(ctx, args, instance->bn / p.halves, &p));
  const int64_t tiles = tiles_of(args->rows, args->experts) * p.column_tiles;
  const struct cuda_grid grid = {blocks_of(ctx, args->sm_limit, args->schedule, tiles), 1, 1,
                                 instance->threads, instance->shared_bytes + (size_t)args->experts * 4};
  TRY(moe_cuda_launch("gemm", instance->kernel, grid, &p, stream));
  return partial ? moe_cuda_finish_dweights(args, p.partial, p.column_tiles, stream) : MOE_OK;
}

extern "C" moe_status moe_cuda_wgmma_gemm(moe_context *ctx, const moe_gemm_args *args, moe_stream stream) {
  return moe_cuda_wgmma_gemm_pairs(ctx, args, {1, 1, 1, 0, 0}, stream);
}

/* ---- contraction over rows */

extern "C" bool moe_cuda_wgmma_wgrad_fits(const moe_wgrad_args *args) {
  if (args->a_dtype != MOE_BF16 || args->b_dtype != MOE_BF16) return false;
  if (args->d_dtype != MOE_BF16 && args->d_dtype != MOE_FP32) return false;
  if (args->weights != NULL || args->m % 8 != 0 || args->n % 8 != 0) return false;
  if (args->a_gather_topk > 0 && args->b_gather_topk > 0 && args->a_gather_topk != args->b_gather_topk)
    return false;
  return args->experts * CEIL_DIV(args->m, BM) * CEIL_DIV(args->n, 128) < INT32_MAX / 2;
}

extern "C" size_t moe_cuda_wgmma_wgrad_scratch(const moe_wgrad_args *args) {
  (void)args;
  return 0;
}

struct wgrad_instance {
  const void *kernel;
  int bn, threads;
  bool rounds;
  size_t shared_bytes;
};
#define WGRAD(BN, STAGES, FP32)                                                            \
  {                                                                                        \
    (const void *)wgrad_kernel<BN, STAGES, FP32>, BN, wgrad_roles<FP32>::threads, !(FP32), \
        sizeof(wgrad_shared<BN, STAGES, FP32>)                                             \
  }
static const wgrad_instance wgrad_instances[2][2] = {/* results are just rounded or not, N > 128 or not */
                                                     {WGRAD(256, 3, false), WGRAD(128, 5, false)},
                                                     {WGRAD(192, 3, true), WGRAD(128, 4, true)}};
#undef WGRAD

static const wgrad_instance *wgrad_instance_of(const moe_wgrad_args *args) {
  return &wgrad_instances[args->d_dtype == MOE_FP32 || args->accumulate][args->n <= 128];
}

static moe_status operand(const moe_context *ctx, const moe_wgrad_args *args, const void *data,
                          int64_t columns, int64_t topk, wgrad_operand *o) {
  o->data = static_cast<const bf16 *>(data);
  o->columns = (int)columns;
  o->gathered = topk > 1 || (topk == 1 && args->row_slot != NULL);
  if (o->gathered || args->rows == 0) return MOE_OK;
  return make_map(ctx, "wgrad", data, columns, args->rows, 0, BK, &o->map);
}

extern "C" moe_status moe_cuda_wgmma_wgrad(moe_context *ctx, const moe_wgrad_args *args, moe_stream stream) {
  wgrad_params p = {};
  TRY(operand(ctx, args, args->a, args->m, args->a_gather_topk, &p.a));
  TRY(operand(ctx, args, args->b, args->n, args->b_gather_topk, &p.b));
  const int64_t topk = args->a_gather_topk > 0 ? args->a_gather_topk : args->b_gather_topk;
  if (topk > 1) { /* n / topk = umulhi(n, magic) >> shift for n < 2^31, with 2^shift < topk <= 2^(shift+1) */
    while ((2 << p.shift) < topk) p.shift++;
    p.magic = (uint32_t)((((uint64_t)1 << (32 + p.shift)) + topk - 1) / topk);
  }
  p.row_offset = args->row_offset;
  p.row_slot = args->row_slot;
  p.rows = (int)args->rows;
  p.experts = (int)args->experts;
  p.d = args->d;
  p.d_fp32 = args->d_dtype == MOE_FP32;
  p.accumulate = args->accumulate;
  const wgrad_instance *instance = wgrad_instance_of(args);
  if (instance->rounds) TRY(make_map(ctx, "wgrad", args->d, args->n, args->m, args->experts, 64, &p.d_map));
  const int64_t tiles = args->experts * CEIL_DIV(args->m, BM) * CEIL_DIV(args->n, instance->bn);
  const struct cuda_grid grid = {blocks_of(ctx, args->sm_limit, args->schedule, tiles), 1, 1,
                                 instance->threads, instance->shared_bytes};
  return moe_cuda_launch("wgrad", instance->kernel, grid, &p, stream);
}

extern "C" moe_status moe_cuda_load_wgmma(void) {
  const gemm_table tables[] = {moe_cuda_gemm_store(), moe_cuda_gemm_act(), moe_cuda_gemm_dact()};
  for (const gemm_table &table : tables)
    for (int i = 0; i < table.count; i++) TRY(moe_cuda_load(&table.rows[i].kernel, 1));
  for (int i = 0; i < 4; i++) TRY(moe_cuda_load(&wgrad_instances[i / 2][i % 2].kernel, 1));
  return MOE_OK;
}
