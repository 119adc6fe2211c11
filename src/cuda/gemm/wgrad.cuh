/* SPDX-License-Identifier: Apache-2.0
 *
 * Grouped product, contraction over the rows of an expert:  D[e][m,n] = sum over r of A[srca(r),m] B[srcb(r),n].
 *
 *   rows of e  ┌ A: 64 x BM ┐      one block = one BM x BN tile of one expert at a time, walked persistently
 *   (K)        └            ┘      producer   64 rows of A and of B a stage; an operand that is gathered by 16-byte cp.async, one
 *              ┌ B: 64 x BN ┐                 that is not by TMA
 *              └            ┘      consumers  two warpgroups of 64 of the BM lines of D each, wgmma on operands whose contiguous
 *                                             dimension is M and N
 *                                  epilogue   rounded results: bulk copies by the consumers; others: as in gemm.cuh
 * Invariants   rows past the expert's end are zero in both operands (the last stage is loaded by cp.async), so that what a
 *              neighbour holds, NaN too, cannot matter; one chain of accumulation over ascending rows. An expert without rows
 *              gives 0, or leaves D when accumulating.
 * Layout       boxes of 64 rows x 64 columns, 128-byte swizzle.
 * Limits       M and N multiples of 8; 16-byte aligned arrays. */
#pragma once

#include "gemm.cuh"

/* Rows are gathered by as many threads as there can be. What is just rounded is stored by bulk copies, so no warp need store and an
 * instruction can have 256 columns. */
template <bool FP32> using wgrad_roles = roles<FP32 ? 512 : 384, 128>;

struct wgrad_operand {
  CUtensorMap map; /* used where the rows are not gathered */
  const bf16 *data;
  int columns;
  bool gathered; /* row row_slot[r] / topk, else row r */
};

struct wgrad_params {
  wgrad_operand a, b;
  const int32_t *row_offset;
  const int32_t *row_slot;
  int rows, experts;
  uint32_t magic; /* slot / topk by multiplication; 0: topk = 1 */
  int shift;
  CUtensorMap d_map; /* where results are just rounded; else d */
  void *d;
  int d_fp32, accumulate;
};

template <int BN, int STAGES, bool FP32> struct wgrad_shared {
  bf16 a[STAGES][BM * BK];
  bf16 b[STAGES][BN * BK];
  result_tile<float, BN> result;
  uint64_t full[STAGES];
  uint64_t empty[STAGES];
  handover over;
};
template <int BN, int STAGES> struct wgrad_shared<BN, STAGES, false> {
  bf16 a[STAGES][BM * BK];
  bf16 b[STAGES][BN * BK];
  result_boxes<BN> result[CONSUMERS];
  uint64_t full[STAGES];
  uint64_t empty[STAGES];
};

struct wgrad_tile {
  int expert, row0, row1, m0, n0;
};

template <int BN> __device__ __forceinline__ wgrad_tile wgrad_place(const wgrad_params &p, int tile) {
  const int lines = (p.a.columns + BM - 1) / BM, columns = (p.b.columns + BN - 1) / BN;
  const int local = tile % (lines * columns), expert = tile / (lines * columns);
  const int begin = clamped_offset(p.row_offset, expert, p.rows),
            end = clamped_offset(p.row_offset, expert + 1, p.rows);
  return {expert, begin, max(begin, end), local % lines * BM, local / lines * BN};
}

/* Rows of one operand for one stage: 16-byte chunk t % 8 of every 64 columns of rows t / 8 + LINES j for thread t of 8 LINES. `whole`:
 * all rows are the expert's. An address is one multiply-add: this loop decides how fast rows can be gathered. */
template <int COLUMNS, int LINES>
__device__ __forceinline__ void copy_rows(bf16 *stage, const wgrad_operand &o, const int *source_row,
                                          int row0, int row1, int column0, bool whole) {
  const int chunk = threadIdx.x % 8, line = threadIdx.x / 8, column = column0 + chunk * 8;
  const uint32_t dst = smem_address(stage) + line * 128 + ((chunk ^ (line % 8)) * 16);
  const uint32_t stride_bytes = (uint32_t)o.columns * 2;
  const char *base = reinterpret_cast<const char *>(o.data + column);
#pragma unroll
  for (int j = 0; j < BK / LINES; j++) {
    const int row = row0 + line + LINES * j;
    const bool mine = whole || row < row1;
    const char *source = base + (uint64_t)(uint32_t)(o.gathered ? source_row[j] : row) * stride_bytes;
#pragma unroll
    for (int box = 0; box < COLUMNS / 64; box++)
      cp_async_16(dst + j * LINES * 128 + box * 8192, source + box * 128,
                  mine && column + box * 64 < o.columns);
  }
}

template <int COLUMNS>
__device__ __forceinline__ void copy_boxes(bf16 *stage, const wgrad_operand &o, uint64_t *barrier, int row0,
                                           int column0) {
#pragma unroll
  for (int block = 0; block < COLUMNS; block += 64)
    tma_load_2d(stage + block * BK, &o.map, barrier, column0 + block, row0);
}

/* Rows of the gathered operand for rows row0 + t / 8 + LINES j. */
template <int LINES>
__device__ __forceinline__ void source_rows(const wgrad_params &p, int row0, int row1, int *source) {
#pragma unroll
  for (int j = 0; j < BK / LINES; j++) {
    const int row = row0 + (int)threadIdx.x / 8 + LINES * j;
    source[j] = row < row1 && p.row_slot ? p.row_slot[row] : row;
    if (p.magic) source[j] = (int)(__umulhi((uint32_t)source[j], p.magic) >> p.shift);
  }
}

template <int BN, int STAGES, bool FP32>
__device__ __forceinline__ void wgrad_producer(wgrad_shared<BN, STAGES, FP32> &s, const wgrad_params &p,
                                               int tiles) {
  constexpr int LINES = wgrad_roles<FP32>::loaders / 8, ROWS = BK / LINES;
  ring at = {0, 1};
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const wgrad_tile place = wgrad_place<BN>(p, tile);
    int source[ROWS];
    source_rows<LINES>(p, place.row0, place.row1, source);
    for (int row0 = place.row0; row0 < place.row1; row0 += BK, at.advance<STAGES>()) {
      int next[ROWS]; /* asked for before this stage is waited for */
      source_rows<LINES>(p, row0 + BK, place.row1, next);
      const bool whole = row0 + BK <= place.row1, bulk_a = whole && !p.a.gathered,
                 bulk_b = whole && !p.b.gathered;
      mbarrier_wait(&s.empty[at.stage], at.phase);
      if (threadIdx.x == 0) {
        mbarrier_arrive_expect(&s.full[at.stage], ((bulk_a ? BM : 0) + (bulk_b ? BN : 0)) * BK * 2);
        if (bulk_a) copy_boxes<BM>(s.a[at.stage], p.a, &s.full[at.stage], row0, place.m0);
        if (bulk_b) copy_boxes<BN>(s.b[at.stage], p.b, &s.full[at.stage], row0, place.n0);
      }
      if (whole) {
        if (!bulk_a) copy_rows<BM, LINES>(s.a[at.stage], p.a, source, row0, place.row1, place.m0, true);
        if (!bulk_b) copy_rows<BN, LINES>(s.b[at.stage], p.b, source, row0, place.row1, place.n0, true);
      } else {
        copy_rows<BM, LINES>(s.a[at.stage], p.a, source, row0, place.row1, place.m0, false);
        copy_rows<BN, LINES>(s.b[at.stage], p.b, source, row0, place.row1, place.n0, false);
      }
      mbarrier_arrive_cp_async(&s.full[at.stage]);
#pragma unroll
      for (int j = 0; j < ROWS; j++) source[j] = next[j];
    }
  }
}

/* Results that are added to others, or stay fp32, are left to the epilogue. */
template <int BN, int STAGES>
__device__ __forceinline__ void wgrad_consumer(wgrad_shared<BN, STAGES, true> &s, const wgrad_params &p,
                                               int tiles) {
  ring at = {0, 0};
  uint32_t round = 1;
  float acc[BN / 2];
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const wgrad_tile place = wgrad_place<BN>(p, tile);
    const int blocks = (place.row1 - place.row0 + BK - 1) / BK;
    if (blocks == 0 && p.accumulate) continue;
    mainloop<BN, BN, true, true>(s, blocks, at, acc);
    mbarrier_wait(&s.over.taken, round);
    const float nothing[BN / 2] = {};
    const int line0 = (threadIdx.x / 32 - GROUP_WARPS) * 16;
    if (blocks > 0)
      deliver<false>(acc, s.result, line0, {});
    else
      deliver<false>(nothing, s.result, line0, {});
    mbarrier_arrive(&s.over.ready);
    round ^= 1;
  }
}

/* Rounded results go straight to memory, 64 lines a warpgroup. */
template <int BN, int STAGES>
__device__ __forceinline__ void wgrad_consumer(wgrad_shared<BN, STAGES, false> &s, const wgrad_params &p,
                                               int tiles) {
  const int group = threadIdx.x / 128 - 1;
  const bool first = threadIdx.x % 128 == 0;
  result_boxes<BN> &result = s.result[group];
  ring at = {0, 0};
  float acc[BN / 2];
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const wgrad_tile place = wgrad_place<BN>(p, tile);
    const int blocks = (place.row1 - place.row0 + BK - 1) / BK;
    mainloop<BN, BN, true, true>(s, blocks, at, acc);
    if (first) bulk_wait_read();
    named_barrier(1 + group, 128);
    const float nothing[BN / 2] = {};
    if (blocks > 0)
      deliver(acc, result);
    else
      deliver(nothing, result);
    fence_async_shared();
    named_barrier(1 + group, 128);
    if (first && place.m0 + 64 * group < p.a.columns)
      for (int box = 0; box < BN / 64 && place.n0 + 64 * box < p.b.columns; box++)
        tma_store_3d(&p.d_map, result.box[box], place.n0 + 64 * box, place.m0 + 64 * group, place.expert);
    if (first) bulk_commit();
  }
  if (first) bulk_wait();
}

template <int BN, int STAGES>
__device__ __forceinline__ void wgrad_epilogue(wgrad_shared<BN, STAGES, true> &s, const wgrad_params &p,
                                               int tiles) {
  const int m = p.a.columns, n = p.b.columns;
  uint32_t round = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const wgrad_tile place = wgrad_place<BN>(p, tile);
    if (p.accumulate && place.row0 == place.row1) continue;
    mbarrier_wait(&s.over.ready, round);
#pragma unroll 1
    for (int band = threadIdx.x / 32 - wgrad_roles<true>::first_storer; band < BANDS;
         band += wgrad_roles<true>::storers)
      store_result(s.result,
                   {p.d, n, p.d_fp32 != 0, p.accumulate != 0, (int64_t)place.expert * m + place.m0,
                    m - place.m0, place.n0},
                   band);
    mbarrier_arrive(&s.over.taken);
    round ^= 1;
  }
}

template <int BN, int STAGES, bool FP32>
__global__ void __launch_bounds__(wgrad_roles<FP32>::threads, 1)
    wgrad_kernel(const __grid_constant__ wgrad_params p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  auto &s = *reinterpret_cast<wgrad_shared<BN, STAGES, FP32> *>(raw);
  if (threadIdx.x == 0) {
    if (smem_address(raw) % 1024 != 0) __trap(); /* the swizzle counts from there */
    for (int i = 0; i < STAGES; i++) {
      mbarrier_init(&s.full[i], wgrad_roles<FP32>::loaders + 1);
      mbarrier_init(&s.empty[i], CONSUMERS * GROUP_WARPS);
    }
    if constexpr (FP32) handover_init(s.over, wgrad_roles<FP32>::storers);
    fence_barrier_init();
  }
  __syncthreads();
  const int tiles = p.experts * ((p.a.columns + BM - 1) / BM) * ((p.b.columns + BN - 1) / BN);
  if (wgrad_roles<FP32>::loads()) {
    if constexpr (FP32) registers_shrink<72>();
    wgrad_producer(s, p, tiles);
  } else if (wgrad_roles<FP32>::consumes()) {
    if constexpr (FP32) registers_grow<168>();
    wgrad_consumer(s, p, tiles);
  } else if constexpr (FP32) {
    registers_shrink<104>();
    wgrad_epilogue(s, p, tiles);
  }
}
