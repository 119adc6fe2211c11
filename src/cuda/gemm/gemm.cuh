/* SPDX-License-Identifier: Apache-2.0
 *
 * Grouped product, rows grouped by expert:  D[r,:] = epilogue(A[src(r),:] B[e(r)]^T),  r in row_offset[e] .. row_offset[e+1].
 *
 *            B[e]: N x K        one block = one 128 x BN tile of one expert after the other, walked persistently (schedule.cuh)
 *          ┌────┬────┐         warpgroup 0     producer: B by TMA (expert = third coordinate), A by TMA, or by 16-byte cp.async
 *   A  ┌──┐│    │    │                         from the rows that row_slot names; both arrive on full[stage]
 *   BM │  ││ BK │ …  │         warpgroup 1, 2  consumers: wgmma 64 x BN x 16, then the epilogue
 *      └──┘└────┴────┘
 * Two ways for the consumers. In turn (BN <= 192): one multiplies a whole tile while the other is in the epilogue of the tile
 * before, so that the tensor cores do not wait for it. Together (BN = 256): 64 rows each. What limits the product is the way from L2 to
 * shared memory, 70 KB/us for each multiprocessor, and where A is gathered the 16 KB of a stage take 0.7 us whatever
 * its tile; so gathered A gets the widest tile, and A in order the overlap (docs/log/gemm.md).
 * Invariants   a tile never spans two experts; columns past K are loaded as zero; rows and columns outside are never
 *              stored (what is loaded for rows past the expert's end stays in accumulators of its own). One chain of
 *              accumulation over ascending k whatever the batch.
 * Ordering     consumers in turn: one begins a product when the other has seen its last stage arrive (turn), as barriers tell
 *              only even from odd rounds of the ring and nobody may look at one that is rounds ahead. A stage is released when the
 *              wgmma that read it have retired (one group stays in flight).
 * Layouts      A and B (K contiguous): rows of 64 elements, 128-byte swizzle. B (N contiguous, B_KN): boxes of 64 k x 64 n.
 * Resources    up to 192 accumulators a thread: 232 registers for a consumer's, 40 for the producer's; one block a multiprocessor.
 * Limits       K and N multiples of 8; 16-byte aligned arrays. */
#pragma once

#include <cuda_bf16.h>

#include "../ptx/memory.cuh"
#include "../ptx/wgmma.cuh"
#include "../tile/schedule.cuh"
#include "params.h"

enum {
  BM = 128,
  BK = 64,
  CONSUMERS = 2,
  GROUP_WARPS = 4,
  STAGING_LINE = 64 + 8,
  DA_LINE = 32 + 8
};

/* How many consumers a tile has, and what one of them holds of it. */
template <int BN> struct tile_shape {
  static constexpr bool in_turn = BN <= 192;
  static constexpr int halves = in_turn ? 2 : 1; /* 64 rows each */
  static constexpr int accumulators = halves * BN / 2;
  static constexpr int warps = in_turn ? GROUP_WARPS : CONSUMERS * GROUP_WARPS; /* that release a stage */
};

/* Where in the ring of stages, and in which round of it, even or odd. */
struct ring {
  int stage;
  uint32_t phase;
  template <int STAGES> __device__ __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
  template <int STAGES> __device__ __forceinline__ void skip(int steps) {
    const int sum = stage + steps;
    phase ^= sum / STAGES & 1;
    stage = sum % STAGES;
  }
};

/* Of a thread of the consumers; read anew each time rather than kept. */
__device__ __forceinline__ int group_index() { return thread_index() / 128 - 1; }
__device__ __forceinline__ int warp_index() { return thread_index() / 32 - GROUP_WARPS; }

/* What a consumer knows besides its accumulators. Between its product and the next one it lies in shared memory, because the
 * epilogue has no register to spare for it. */
struct alignas(16) consumer_state {
  int tile;
  uint32_t round; /* parity of turn */
  ring at;
};

/* What a warp of an epilogue needs: factors of its rows, a piece of h or of the result, and for DACT a second one, and a piece of da. */
template <int EPILOGUE> struct warp_staging {
  tile_place place;
  consumer_state state;
  float weight[2 * 16];
  __nv_bfloat16 h[EPILOGUE == MOE_EPILOGUE_DACT ? 2 : 1][16 * STAGING_LINE];
  float da[EPILOGUE == MOE_EPILOGUE_DACT ? 16 * DA_LINE : 4];
};

template <int BN, int STAGES, int EPILOGUE> struct gemm_shared {
  __nv_bfloat16 a[STAGES][BM * BK];
  __nv_bfloat16 b[STAGES][BN * BK];
  warp_staging<EPILOGUE> staging[CONSUMERS * GROUP_WARPS];
  uint64_t full[STAGES];
  uint64_t empty[STAGES];
  uint64_t turn[CONSUMERS];
  int warp_total[12]; /* of schedule_prepare */
  int first[1];       /* experts + 1 of them */
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
__device__ __forceinline__ void producer(gemm_shared<BN, STAGES, EPILOGUE> &s, const gemm_params &p,
                                         int tiles) {
  if (threadIdx.x != 0) return;
  const int blocks = (p.k + BK - 1) / BK;
  ring at = {0, 1};
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const tile_place place =
        schedule_place<BM>(s.first, p.row_offset, p.experts, p.rows, p.column_tiles, tile);
    for (int block = 0; block < blocks; block++, at.advance<STAGES>()) {
      mbarrier_wait(&s.empty[at.stage], at.phase);
      mbarrier_arrive_expect(&s.full[at.stage], (BM + BN) * BK * 2);
      tma_load_2d(s.a[at.stage], &p.a_map, &s.full[at.stage], block * BK, place.row0);
      load_b<BN, B_KN>(s.b[at.stage], p, &s.full[at.stage], place.column, block * BK, place.expert);
    }
  }
}

/* Warpgroup 0 where A is gathered: thread t loads 16-byte chunk t % 8 of rows t / 8 + 16 j, and thread 0 the weights as well.
 * A source is kept as a count of 16-byte pieces, made once a tile: the loop has one instruction to spare for each address. */
template <int BN, int STAGES, int EPILOGUE, bool B_KN>
__device__ __forceinline__ void gather_producer(gemm_shared<BN, STAGES, EPILOGUE> &s, const gemm_params &p,
                                                int tiles) {
  const int thread = threadIdx.x, chunk = thread % 8, line = thread / 8;
  const uint32_t offset = line * 128 + ((chunk ^ (line % 8)) * 16);
  const int blocks = (p.k + BK - 1) / BK;
  ring at = {0, 1};
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const tile_place place =
        schedule_place<BM>(s.first, p.row_offset, p.experts, p.rows, p.column_tiles, tile);
    uint32_t source[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const int row = min(place.row0 + line + 16 * j, place.row1 - 1);
      const uint32_t from = (p.row_slot ? p.row_slot[row] : row) / p.gather_topk;
      source[j] = from * (uint32_t)(p.k / 8) + chunk;
    }
    const uint4 *a = reinterpret_cast<const uint4 *>(p.a);
    for (int block = 0; block < blocks; block++, at.advance<STAGES>(), a += 8) {
      mbarrier_wait(&s.empty[at.stage], at.phase);
      if (thread == 0) {
        mbarrier_arrive_expect(&s.full[at.stage], BN * BK * 2);
        load_b<BN, B_KN>(s.b[at.stage], p, &s.full[at.stage], place.column, block * BK, place.expert);
      }
      const bool in_k = block * BK + chunk * 8 < p.k;
      const uint32_t to = smem_address(s.a[at.stage]) + offset;
#pragma unroll
      for (int j = 0; j < 8; j++) cp_async_16(to + j * 2048, a + source[j], in_k);
      mbarrier_arrive_cp_async(&s.full[at.stage]);
    }
  }
}

#ifdef ROW_TMA
template <int BN, int STAGES, int EPILOGUE, bool B_KN>
__device__ __forceinline__ void row_producer(gemm_shared<BN, STAGES, EPILOGUE> &s, const gemm_params &p,
                                             int tiles) {
  const int thread = threadIdx.x;
  const int blocks = (p.k + BK - 1) / BK;
  ring at = {0, 1};
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const tile_place place =
        schedule_place<BM>(s.first, p.row_offset, p.experts, p.rows, p.column_tiles, tile);
    const int row = min(place.row0 + thread, place.row1 - 1);
    const int from = (p.row_slot ? p.row_slot[row] : row) / p.gather_topk;
    for (int block = 0; block < blocks; block++, at.advance<STAGES>()) {
      mbarrier_wait(&s.empty[at.stage], at.phase);
      if (thread == 0) {
        mbarrier_arrive_expect(&s.full[at.stage], (BM + BN) * BK * 2);
        load_b<BN, B_KN>(s.b[at.stage], p, &s.full[at.stage], place.column, block * BK, place.expert);
      }
      tma_load_2d(s.a[at.stage] + thread * BK, &p.a_map, &s.full[at.stage], block * BK, from);
    }
  }
}
#endif

/* One step of 64 k: four wgmma of 16 for each 64 rows. */
template <int BN, bool B_KN>
__device__ __forceinline__ void multiply(float *acc, const __nv_bfloat16 *a, const __nv_bfloat16 *b,
                                         bool add) {
  const uint64_t db = wgmma_descriptor(smem_address(b), 1024, B_KN ? 8192 : 0);
#pragma unroll
  for (int half = 0; half < tile_shape<BN>::halves; half++) {
    const uint64_t da = wgmma_descriptor(smem_address(a + half * 64 * BK), 1024, 0);
#pragma unroll
    for (int kk = 0; kk < 4; kk++)
      wgmma<BN, 0, B_KN>::run(acc + half * (BN / 2), da + kk * 2, db + kk * (B_KN ? 128 : 2), add || kk > 0);
  }
}

/* The product of one tile, from the stages that c.at runs over. */
template <int BN, int STAGES, int EPILOGUE, bool B_KN>
__device__ __forceinline__ void mainloop(gemm_shared<BN, STAGES, EPILOGUE> &s, const gemm_params &p,
                                         consumer_state &c, float *acc) {
  constexpr bool in_turn = tile_shape<BN>::in_turn;
  const int blocks = (p.k + BK - 1) / BK, first_row = in_turn ? 0 : group_index() * 64;
  int held = 0;
  if (in_turn) mbarrier_wait(&s.turn[group_index()], c.round);
  for (int block = 0; block < blocks; block++, c.at.advance<STAGES>()) {
    mbarrier_wait(&s.full[c.at.stage], c.at.phase);
    if (in_turn && block == blocks - 1 && threadIdx.x % 32 == 0) mbarrier_arrive(&s.turn[group_index() ^ 1]);
    fence_async_shared(); /* a gathered operand was written by ordinary (cp.async) accesses */
    wgmma_fence();
    multiply<BN, B_KN>(acc, s.a[c.at.stage] + first_row * BK, s.b[c.at.stage], block > 0);
    wgmma_commit();
    wgmma_wait<1>();
    if (block > 0 && threadIdx.x % 32 == 0) mbarrier_arrive(&s.empty[held]);
    held = c.at.stage;
  }
  wgmma_wait<0>();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(&s.empty[held]);
}

/* Warpgroups 1 and 2. */
template <int BN, int STAGES, int EPILOGUE, bool B_KN>
__device__ __forceinline__ void consumer(gemm_shared<BN, STAGES, EPILOGUE> &s, const gemm_params &p,
                                         int tiles) {
  constexpr bool in_turn = tile_shape<BN>::in_turn;
  float acc[tile_shape<BN>::accumulators];
  consumer_state c = {(int)blockIdx.x, 1, {0, 0}};
  if (in_turn && group_index() == 1) {
    c = {(int)(blockIdx.x + gridDim.x), 0, {0, 0}};
    c.at.skip<STAGES>((p.k + BK - 1) / BK);
  }
  while (c.tile < tiles) {
    const tile_place place =
        schedule_place<BM>(s.first, p.row_offset, p.experts, p.rows, p.column_tiles, c.tile);
    begin_epilogue<BN>(s.staging, p, place);
    if constexpr (EPILOGUE == DACT) dact_ask<BN>(s.staging, p, 0);
    mainloop<BN, STAGES, EPILOGUE, B_KN>(s, p, c, acc);
    s.staging[warp_index()].state = c;
    __syncwarp();
    epilogue<BN>(acc, s.staging, p);
    __syncwarp();
    c = s.staging[warp_index()].state;
    c.tile += (in_turn ? 2 : 1) * gridDim.x;
    c.round ^= 1;
    if (in_turn) c.at.skip<STAGES>((p.k + BK - 1) / BK);
  }
}

template <int BN, int STAGES, int EPILOGUE, bool B_KN>
__global__ void __launch_bounds__(384, 1) gemm_kernel(const __grid_constant__ gemm_params p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  auto &s = *reinterpret_cast<gemm_shared<BN, STAGES, EPILOGUE> *>(raw);
  if (threadIdx.x == 0) {
    if (smem_address(raw) % 1024 != 0) __trap(); /* the swizzle counts from there */
    tma_prefetch(&p.b_map);
    if (p.gather_topk == 0) tma_prefetch(&p.a_map);
    for (int i = 0; i < STAGES; i++) {
#ifdef ROW_TMA
      mbarrier_init(&s.full[i], 1);
#else
      mbarrier_init(&s.full[i], p.gather_topk > 0 ? 128 + 1 : 1);
#endif
      mbarrier_init(&s.empty[i], tile_shape<BN>::warps);
    }
    for (int i = 0; i < CONSUMERS; i++) mbarrier_init(&s.turn[i], GROUP_WARPS);
    fence_barrier_init();
  }
  schedule_prepare<BM>(s.first, s.warp_total, p.row_offset, p.experts, p.rows);
  const int tiles = s.first[p.experts] * p.column_tiles;
  if (threadIdx.x < 128) {
    registers_shrink<40>();
    if (p.gather_topk > 0)
#ifdef ROW_TMA
      row_producer<BN, STAGES, EPILOGUE, B_KN>(s, p, tiles);
#else
      gather_producer<BN, STAGES, EPILOGUE, B_KN>(s, p, tiles);
#endif
    else
      producer<BN, STAGES, EPILOGUE, B_KN>(s, p, tiles);
  } else {
    registers_grow<232>();
    consumer<BN, STAGES, EPILOGUE, B_KN>(s, p, tiles);
  }
}
