/* SPDX-License-Identifier: Apache-2.0
 *
 * Grouped product, contraction over the rows of an expert:  D[e][m,n] = sum over r of A[srca(r),m] B[srcb(r),n].
 *
 *   rows of e  ┌ A: 64 x BM ┐      one block = one BM x BN tile of one expert at a time, walked persistently
 *   (K)        └            ┘      warpgroup 0     producer: 64 rows of A and of B a stage, gathered by 16-byte cp.async
 *              ┌ B: 64 x BN ┐      warpgroup 1, 2  consumers: 64 of the BM lines of D each, wgmma 64 x BN x 16 on operands whose
 *              └            ┘                      contiguous dimension is M and N
 * Invariants   rows past the expert's end are zero in both operands, so that what a neighbour holds (NaN too) cannot matter;
 *              one chain of accumulation over ascending rows. An expert without rows gives 0, or leaves D when accumulating.
 * Layout       boxes of 64 rows x 64 columns, 128-byte swizzle.
 * Limits       M and N multiples of 8; 16-byte aligned arrays. */
#pragma once

#include "gemm.cuh"

struct wgrad_params {
  const int32_t *row_offset;
  const int32_t *row_slot;
  const bf16 *a, *b;
  int rows, m, n, experts;
  int a_topk, b_topk; /* > 0: row slot / topk; 0: row itself */
  void *d;
  int d_fp32, accumulate;
};

template <int BN, int STAGES> struct wgrad_shared {
  bf16 a[STAGES][BM * BK];
  bf16 b[STAGES][BN * BK];
  bf16 h[CONSUMER_WARPS][16 * STAGING_COLUMNS];
  uint64_t full[STAGES];
  uint64_t empty[STAGES];
};

struct wgrad_tile {
  int expert, row0, row1, m0, column;
};

template <int BN> __device__ __forceinline__ wgrad_tile wgrad_place(const wgrad_params &p, int tile) {
  const int lines = (p.m + BM - 1) / BM, columns = (p.n + BN - 1) / BN, local = tile % (lines * columns);
  const int expert = tile / (lines * columns);
  const int begin = clamped_offset(p.row_offset, expert, p.rows), end = clamped_offset(p.row_offset, expert + 1, p.rows);
  return {expert, begin, max(begin, end), local % lines * BM, local / lines};
}

/* Thread t loads 16-byte chunk t % 16 (+ 16, ...) of rows t / 16 + 8 j of a stage. */
template <int BN, int STAGES>
__device__ __forceinline__ void wgrad_producer(wgrad_shared<BN, STAGES> &s, const wgrad_params &p, int tiles) {
  const int chunk = threadIdx.x % 16, line = threadIdx.x / 16;
  const uint32_t offset = chunk / 8 * 8192 + line * 128 + ((chunk % 8) ^ line) * 16;
  ring<STAGES> at = {0, 1};
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const wgrad_tile place = wgrad_place<BN>(p, tile);
    const int m = place.m0 + chunk * 8, n = place.column * BN + chunk * 8;
    int slot[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const int row = place.row0 + line + 8 * j;
      slot[j] = row < place.row1 && p.row_slot ? p.row_slot[row] : row;
    }
    for (int row0 = place.row0; row0 < place.row1; row0 += BK, at.advance()) {
      int next[8]; /* the slots of the next stage, asked for before this one is waited for */
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const int row = row0 + BK + line + 8 * j;
        next[j] = row < place.row1 && p.row_slot ? p.row_slot[row] : row;
      }
      mbarrier_wait(&s.empty[at.stage], at.phase);
      const uint32_t a = smem_address(s.a[at.stage]) + offset, b = smem_address(s.b[at.stage]) + offset;
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const int row = row0 + line + 8 * j;
        const bool inside = row < place.row1;
        const int64_t from_a = p.a_topk > 0 ? slot[j] / p.a_topk : row, from_b = p.b_topk > 0 ? slot[j] / p.b_topk : row;
        const bool a_inside = inside && m < p.m;
        cp_async_16(a + j * 1024, a_inside ? p.a + from_a * p.m + m : p.a, a_inside);
#pragma unroll
        for (int half = 0; half < BN / 128; half++) {
          const bool b_inside = inside && n + half * 128 < p.n;
          cp_async_16(b + j * 1024 + half * 16384, b_inside ? p.b + from_b * p.n + n + half * 128 : p.b, b_inside);
        }
      }
      mbarrier_arrive_cp_async(&s.full[at.stage]);
#pragma unroll
      for (int j = 0; j < 8; j++) slot[j] = next[j];
    }
  }
}

template <int BN, int STAGES>
__device__ __forceinline__ void wgrad_consumer(wgrad_shared<BN, STAGES> &s, const wgrad_params &p, int tiles) {
  const int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 - 4;
  ring<STAGES> at = {0, 0};
  float acc[BN / 2];
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const wgrad_tile place = wgrad_place<BN>(p, tile);
    if (place.row0 == place.row1) {
      if (p.accumulate) continue;
#pragma unroll
      for (int i = 0; i < BN / 2; i++) acc[i] = 0;
    }
    int held = 0;
    for (int row0 = place.row0; row0 < place.row1; row0 += BK, at.advance()) {
      mbarrier_wait(&s.full[at.stage], at.phase);
      fence_async_shared();
      const uint64_t da = wgmma_descriptor(smem_address(s.a[at.stage] + group * 64 * BK), 1024, 8192);
      const uint64_t db = wgmma_descriptor(smem_address(s.b[at.stage]), 1024, 8192);
      wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < 4; kk++) wgmma<BN, 1, 1>::run(acc, da + kk * 128, db + kk * 128, row0 > place.row0 || kk > 0);
      wgmma_commit();
      wgmma_wait<1>();
      if (row0 > place.row0 && threadIdx.x % 32 == 0) mbarrier_arrive(&s.empty[held]);
      held = at.stage;
    }
    wgmma_wait<0>();
    if (place.row0 < place.row1 && threadIdx.x % 32 == 0) mbarrier_arrive(&s.empty[held]);
    const warp_tile w = {s.h[warp], nullptr, nullptr, (int)threadIdx.x % 32, place.m0 + warp * 16, p.m};
    const float ones[2] = {1, 1};
    const int64_t base = (int64_t)place.expert * p.m * p.n;
    void *d = p.d_fp32 ? (void *)(static_cast<float *>(p.d) + base) : (void *)(static_cast<bf16 *>(p.d) + base);
    store_steps<BN>(acc, w, {d, p.n, p.d_fp32 != 0, p.accumulate != 0}, place.column, nullptr, ones);
  }
}

template <int BN, int STAGES> __global__ void __launch_bounds__(384, 1) wgrad_kernel(const __grid_constant__ wgrad_params p) {
  extern __shared__ uint8_t raw[];
  auto &s = *reinterpret_cast<wgrad_shared<BN, STAGES> *>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      mbarrier_init(&s.full[i], 128);
      mbarrier_init(&s.empty[i], CONSUMER_WARPS);
    }
    fence_barrier_init();
  }
  __syncthreads();
  const int tiles = p.experts * ((p.m + BM - 1) / BM) * ((p.n + BN - 1) / BN);
  if (threadIdx.x < 128) {
    registers_shrink<72>();
    wgrad_producer<BN, STAGES>(s, p, tiles);
  } else {
    registers_grow<216>();
    wgrad_consumer<BN, STAGES>(s, p, tiles);
  }
}
