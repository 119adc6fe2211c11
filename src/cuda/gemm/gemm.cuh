/* SPDX-License-Identifier: Apache-2.0
 *
 * Grouped product, rows grouped by expert:  D[r,:] = epilogue(A[src(r),:] B[e(r)]^T),  r in row_offset[e] .. row_offset[e+1].
 *
 *            B[e]: N x K        one block = one BM x BN tile of one expert at a time, walked persistently (schedule.cuh)
 *          ┌────┬────┐         warpgroup 0     producer: B by TMA (expert = third coordinate), A by TMA, or by 16-byte cp.async
 *   A  ┌──┐│    │    │                         from the rows that row_slot names; both arrive on full[stage]
 *   BM │  ││ BK │ …  │         warpgroup 1, 2  consumers: 64 rows each, wgmma 64 x BN x 16, then the epilogue
 *      └──┘└────┴────┘
 * Invariants   a tile never spans two experts; columns past K are loaded as zero; rows and columns outside are never
 *              stored (what is loaded for rows past the expert's end stays in accumulators of its own). One chain of accumulation over ascending k whatever the batch.
 * Ordering     a stage is released when the wgmma that read it have retired (one group stays in flight).
 * Layouts      A and B (K contiguous): rows of 64 elements, 128-byte swizzle. B (N contiguous, B_KN): boxes of 64 k x 64 n.
 * Limits       K and N multiples of 8; 16-byte aligned arrays. */
#pragma once

#include <cuda_bf16.h>

#include "../ptx/memory.cuh"
#include "../ptx/wgmma.cuh"
#include "../tile/schedule.cuh"
#include "params.h"

enum { BM = 128, BK = 64, CONSUMER_WARPS = 8, STAGING_COLUMNS = 64 + 8 };

template <int BN, int STAGES, int EPILOGUE> struct gemm_shared {
  static constexpr int line = EPILOGUE == MOE_EPILOGUE_DACT ? 2 * BN + 8 : STAGING_COLUMNS;
  __nv_bfloat16 a[STAGES][BM * BK];
  __nv_bfloat16 b[STAGES][BN * BK];
  __nv_bfloat16 h[CONSUMER_WARPS][16 * line];
  float da[EPILOGUE == MOE_EPILOGUE_DACT ? CONSUMER_WARPS * 16 * 40 : 1];
  uint64_t full[STAGES];
  uint64_t empty[STAGES];
  int warp_total[12]; /* of schedule_prepare */
  int first[1]; /* experts + 1 of them */
};

template <int STAGES> struct ring {
  int stage;
  uint32_t phase;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};

#include "../tile/epilogue.cuh"

/* The B boxes of one stage: BN rows of weights; for a gated pair in halves, BN/2 gate rows and BN/2 up rows. */
template <int BN, bool B_KN>
__device__ __forceinline__ void load_b(__nv_bfloat16 *b, const gemm_params &p, uint64_t *barrier, int column,
                                       int k0, int expert) {
  const int width = BN / p.halves;
  for (int half = 0; half < p.halves; half++) {
    const int n0 = column * width + p.half_row[half];
    if (!B_KN) {
      tma_load_3d(b + half * width * BK, &p.b_map, barrier, k0, n0, expert);
    } else {
      for (int block = 0; block < width; block += 64)
        tma_load_3d(b + (half * width + block) * BK, &p.b_map, barrier, n0 + block, k0, expert);
    }
  }
}

/* Warpgroup 0 where A lies as it is wanted: one thread, two bulk copies a stage. */
template <int BN, int STAGES, int EPILOGUE, bool B_KN>
__device__ __forceinline__ void producer(gemm_shared<BN, STAGES, EPILOGUE> &s, const gemm_params &p, int tiles) {
  if (threadIdx.x != 0) return;
  const int blocks = (p.k + BK - 1) / BK;
  ring<STAGES> at = {0, 1};
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const tile_place place = schedule_place<BM>(s.first, p.row_offset, p.experts, p.rows, p.column_tiles, tile);
    for (int block = 0; block < blocks; block++, at.advance()) {
      mbarrier_wait(&s.empty[at.stage], at.phase);
      mbarrier_arrive_expect(&s.full[at.stage], (BM + BN) * BK * 2);
      tma_load_2d(s.a[at.stage], &p.a_map, &s.full[at.stage], block * BK, place.row0);
      load_b<BN, B_KN>(s.b[at.stage], p, &s.full[at.stage], place.column, block * BK, place.expert);
    }
  }
}

/* Warpgroup 0 where A is gathered: thread t loads 16-byte chunk t % 8 of rows t / 8 + 16 j, and thread 0 the weights as well. */
template <int BN, int STAGES, int EPILOGUE, bool B_KN>
__device__ __forceinline__ void gather_producer(gemm_shared<BN, STAGES, EPILOGUE> &s, const gemm_params &p, int tiles) {
  const int thread = threadIdx.x, chunk = thread % 8, line = thread / 8;
  const uint32_t offset = line * 128 + ((chunk ^ (line % 8)) * 16);
  const int blocks = (p.k + BK - 1) / BK;
  ring<STAGES> at = {0, 1};
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const tile_place place = schedule_place<BM>(s.first, p.row_offset, p.experts, p.rows, p.column_tiles, tile);
    const char *source[8]; /* addresses are made once a tile: the loop below has one instruction to spare for each */
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const int row = min(place.row0 + line + 16 * j, place.row1 - 1);
      const int from = (p.row_slot ? p.row_slot[row] : row) / p.gather_topk;
      source[j] = reinterpret_cast<const char *>(p.a + (int64_t)from * p.k + chunk * 8);
    }
    for (int block = 0; block < blocks; block++, at.advance()) {
      mbarrier_wait(&s.empty[at.stage], at.phase);
      if (thread == 0) {
        mbarrier_arrive_expect(&s.full[at.stage], BN * BK * 2);
        load_b<BN, B_KN>(s.b[at.stage], p, &s.full[at.stage], place.column, block * BK, place.expert);
      }
      const bool in_k = block * BK + chunk * 8 < p.k;
      const uint32_t a = smem_address(s.a[at.stage]) + offset;
#pragma unroll
      for (int j = 0; j < 8; j++) {
        cp_async_16(a + j * 2048, source[j], in_k);
        source[j] += BK * 2;
      }
      mbarrier_arrive_cp_async(&s.full[at.stage]);
    }
  }
}

/* One k-block of 64: four wgmma of 16. */
template <int BN, bool B_KN>
__device__ __forceinline__ void multiply(float *acc, const __nv_bfloat16 *a, const __nv_bfloat16 *b, bool add) {
  const uint64_t da = wgmma_descriptor(smem_address(a), 1024, 0);
  const uint64_t db = wgmma_descriptor(smem_address(b), 1024, B_KN ? 8192 : 0);
#pragma unroll
  for (int kk = 0; kk < 4; kk++)
    wgmma<BN, 0, B_KN>::run(acc, da + kk * 2, db + kk * (B_KN ? 128 : 2), add || kk > 0);
}

/* Warpgroups 1 and 2. */
template <int BN, int STAGES, int EPILOGUE, bool B_KN>
__device__ __forceinline__ void consumer(gemm_shared<BN, STAGES, EPILOGUE> &s, const gemm_params &p, int tiles) {
  const int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 - 4;
  const int blocks = (p.k + BK - 1) / BK;
  ring<STAGES> at = {0, 0};
  float acc[BN / 2];
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const tile_place place = schedule_place<BM>(s.first, p.row_offset, p.experts, p.rows, p.column_tiles, tile);
    const warp_tile w = {s.h[warp], s.line, s.da + (EPILOGUE == DACT ? warp * 16 * DA_LINE : 0), (int)threadIdx.x % 32,
                         place.row0 + warp * 16, place.row1};
    float line_weight = 1;
    if constexpr (EPILOGUE == DACT) line_weight = dact_begin<BN>(w, p, place.column);
    int held = 0;
    for (int block = 0; block < blocks; block++, at.advance()) {
      mbarrier_wait(&s.full[at.stage], at.phase);
      fence_async_shared(); /* a gathered operand was written by ordinary (cp.async) accesses */
      wgmma_fence();
      multiply<BN, B_KN>(acc, s.a[at.stage] + group * 64 * BK, s.b[at.stage], block > 0);
      wgmma_commit();
      wgmma_wait<1>();
      if (block > 0 && threadIdx.x % 32 == 0) mbarrier_arrive(&s.empty[held]);
      held = at.stage;
    }
    wgmma_wait<0>();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&s.empty[held]);
    epilogue<BN, EPILOGUE>(acc, w, p, place, line_weight);
  }
}

template <int BN, int STAGES, int EPILOGUE, bool B_KN>
__global__ void __launch_bounds__(384, 1)
    gemm_kernel(const __grid_constant__ gemm_params p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  auto &s = *reinterpret_cast<gemm_shared<BN, STAGES, EPILOGUE> *>(raw);
  if (threadIdx.x == 0) {
    if (smem_address(raw) % 1024 != 0) __trap(); /* the swizzle counts from there */
    tma_prefetch(&p.b_map);
    if (p.gather_topk == 0) tma_prefetch(&p.a_map);
    for (int i = 0; i < STAGES; i++) {
      mbarrier_init(&s.full[i], p.gather_topk > 0 ? 128 + 1 : 1);
      mbarrier_init(&s.empty[i], CONSUMER_WARPS);
    }
    fence_barrier_init();
  }
  schedule_prepare<BM>(s.first, s.warp_total, p.row_offset, p.experts, p.rows);
  const int tiles = s.first[p.experts] * p.column_tiles;
  if (threadIdx.x < 128) {
    registers_shrink<72>();
    if (p.gather_topk > 0)
      gather_producer<BN, STAGES, EPILOGUE, B_KN>(s, p, tiles);
    else
      producer<BN, STAGES, EPILOGUE, B_KN>(s, p, tiles);
  } else {
    registers_grow<216>();
    consumer<BN, STAGES, EPILOGUE, B_KN>(s, p, tiles);
  }
}
