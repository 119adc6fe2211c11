/* SPDX-License-Identifier: Apache-2.0
 *
 * Grouped product, rows grouped by expert:  D[r,:] = epilogue(A[src(r),:] B[e(r)]^T),  r in row_offset[e] .. row_offset[e+1].
 *
 *            B[e]: N x K        one block = one 128 x BN tile of one expert after the other, walked persistently (schedule.cuh)
 *          ┌────┬────┐         producer   B by TMA (expert = third coordinate), A by TMA, or by 16-byte cp.async from the rows that
 *   A  ┌──┐│    │    │                    row_slot names; both arrive on full[stage]
 *   BM │  ││ BK │ …  │         consumers  two warpgroups of 64 rows each, wgmma 64 x BN x 16; they leave their results in shared
 *      └──┘└────┴────┘                    memory (result.cuh) and begin the next tile
 *                              epilogue   from there to device memory, while the next tile is multiplied
 * Invariants   a tile never spans two experts; columns past K are loaded as zero; rows and columns outside are never
 *              stored (what is loaded for rows past the expert's end stays in accumulators of its own). One chain of
 *              accumulation over ascending k whatever the batch.
 * Ordering     full and empty go round the stages, ready and taken hand over the one tile of results. A stage is released when the
 *              wgmma that read it have retired (one group stays in flight).
 * Layouts      A and B (K contiguous): rows of 64 elements, 128-byte swizzle. B (N contiguous, B_KN): boxes of 64 k x 64 n.
 * Resources    up to 128 accumulators a thread; one block a multiprocessor, all of its registers and nearly all of its shared
 *              memory.
 * Limits       K and N multiples of 8; 16-byte aligned arrays. */
#pragma once

#include "params.h"

#include "../ptx/wgmma.cuh"
#include "../tile/act.cuh"
#include "../tile/dact.cuh"
#include "../tile/schedule.cuh"
#include "../tile/store.cuh"

enum {
  BK = 64
};

/* Of what is done with results: the public epilogues, of which STORE rounds to bf16, and the one that does not. */
enum {
  STORE = MOE_EPILOGUE_STORE,
  ACT = MOE_EPILOGUE_ACT,
  DACT = MOE_EPILOGUE_DACT,
  STORE_NUMBERS
};

template <bool FP32> struct result_type { typedef bf16 of; };
template <> struct result_type<true> { typedef float of; };
template <int EPILOGUE> constexpr bool delivers_fp32 = EPILOGUE == STORE_NUMBERS;

/* Who is who in a block: threads 0 .. loaders load, warps 4 to 11 are the consumers, the others store. An instruction of 256 columns needs
 * more registers than each thread has where there are 512 of them: few threads, then, of whose first warpgroup what does not load stores. Else
 * there is a warpgroup for each, registers go where they are needed, and a tile of 256 columns takes two instructions. */
template <int THREADS, int LOADERS> struct roles {
  static constexpr bool few = THREADS == 384;
  static constexpr int threads = THREADS, loaders = LOADERS;
  static constexpr int first_storer = few ? LOADERS / 32 : 12,
                       storers = few ? 4 - LOADERS / 32 : 4; /* warps */
  static __device__ __forceinline__ bool loads() { return threadIdx.x < loaders; }
  static __device__ __forceinline__ bool consumes() { return threadIdx.x >= 128 && threadIdx.x < 384; }
};
/* dact has more to do for an element than two warps can do meanwhile. */
template <int BN, int EPILOGUE>
using gemm_roles = roles<BN == 256 && EPILOGUE != DACT ? 384 : 512, BN == 256 && EPILOGUE != DACT ? 64 : 128>;

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
};

template <int BN, int STAGES, int EPILOGUE> struct gemm_shared {
  bf16 a[STAGES][BM * BK];
  bf16 b[STAGES][BN * BK];
  result_tile<typename result_type<delivers_fp32<EPILOGUE>>::of, BN> result;
  bf16 bias[EPILOGUE == DACT ? 1 : CONSUMERS * GROUP_WARPS][EPILOGUE == DACT ? 8 : BN];
  uint64_t full[STAGES];
  uint64_t empty[STAGES];
  handover over;
  int warp_total[gemm_roles<BN, EPILOGUE>::threads / 32]; /* of schedule_prepare */
  int first[1];                                           /* experts + 1 of them */
};

template <int BN, int STAGES, int EPILOGUE>
__device__ __forceinline__ int tile_count(const gemm_shared<BN, STAGES, EPILOGUE> &s, const gemm_params &p) {
  return s.first[p.experts] * p.column_tiles;
}
template <int BN, int STAGES, int EPILOGUE>
__device__ __forceinline__ tile_place place_of(const gemm_shared<BN, STAGES, EPILOGUE> &s,
                                               const gemm_params &p, int tile) {
  return schedule_place<BM>(s.first, p.row_offset, p.experts, p.rows, p.column_tiles, tile);
}

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

/* Where A lies as it is wanted: one thread, two bulk copies a stage. */
template <int BN, int STAGES, int EPILOGUE, bool B_KN>
__device__ __forceinline__ void producer(gemm_shared<BN, STAGES, EPILOGUE> &s, const gemm_params &p) {
  if (threadIdx.x != 0) return;
  const int blocks = (p.k + BK - 1) / BK;
  ring at = {0, 1};
  for (int tile = blockIdx.x; tile < tile_count(s, p); tile += gridDim.x) {
    const tile_place place = place_of(s, p, tile);
    for (int pair = 0; pair < 4 * p.pairs.count; pair += 4) {
      const int a0 = (p.pairs.a >> pair & 15) * blocks, b0 = (p.pairs.b >> pair & 15) * blocks;
      for (int block = 0; block < blocks; block++, at.advance<STAGES>()) {
        mbarrier_wait(&s.empty[at.stage], at.phase);
        mbarrier_arrive_expect(&s.full[at.stage], (BM + BN) * BK * 2);
        tma_load_2d(s.a[at.stage], &p.a_map, &s.full[at.stage], (a0 + block) * BK, place.row0);
        load_b<BN, B_KN>(s.b[at.stage], p, &s.full[at.stage], place.column, (b0 + block) * BK, place.expert);
      }
    }
  }
}

/* Where A is gathered: thread t loads 16-byte chunk t % 8 of rows t / 8 + LINES j, and thread 0 the weights as well.
 * A source is kept as a count of 16-byte pieces, made once a tile: the loop has one instruction to spare for each address. */
template <int BN, int STAGES, int EPILOGUE, bool B_KN>
__device__ __forceinline__ void gather_producer(gemm_shared<BN, STAGES, EPILOGUE> &s, const gemm_params &p) {
  constexpr int LINES = gemm_roles<BN, EPILOGUE>::loaders / 8, ROWS = BM / LINES;
  const int thread = threadIdx.x, chunk = thread % 8, line = thread / 8;
  const uint32_t offset = line * 128 + ((chunk ^ (line % 8)) * 16);
  const int blocks = (p.k + BK - 1) / BK;
  ring at = {0, 1};
  for (int tile = blockIdx.x; tile < tile_count(s, p); tile += gridDim.x) {
    const tile_place place = place_of(s, p, tile);
    uint32_t source[ROWS];
#pragma unroll
    for (int j = 0; j < ROWS; j++) {
      const int row = min(place.row0 + line + LINES * j, place.row1 - 1);
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
      for (int j = 0; j < ROWS; j++) cp_async_16(to + j * LINES * 128, a + source[j], in_k);
      mbarrier_arrive_cp_async(&s.full[at.stage]);
    }
  }
}

/* acc += a b for one stage, by instructions of N columns; a: 64 lines, b: BN of them. A_MN, B_MN: the contiguous dimension is that of the
 * lines, in boxes of 64. */
template <int BN, int N, bool A_MN, bool B_MN>
__device__ __forceinline__ void multiply(float *acc, const bf16 *a, const bf16 *b, bool add) {
  const uint64_t da = wgmma_descriptor(smem_address(a), 1024, A_MN ? 8192 : 0),
                 db = wgmma_descriptor(smem_address(b), 1024, B_MN ? 8192 : 0);
#pragma unroll
  for (int kk = 0; kk < 4; kk++)
#pragma unroll
    for (int n = 0; n < BN; n += N)
      wgmma<N, A_MN, B_MN>::run(acc + n / 2, da + kk * (A_MN ? 128 : 2),
                                db + n * (BK * 2 >> 4) + kk * (B_MN ? 128 : 2), add || kk > 0);
}

/* A warpgroup of the consumers: the product of one tile, from the `blocks` stages that `at` runs over; of A, its 64 lines. N, A_MN, B_MN as in
 * multiply. */
template <int BN, int N, bool A_MN, bool B_MN, typename SHARED>
__device__ __forceinline__ void mainloop(SHARED &s, int blocks, ring &at, float *acc) {
  constexpr int STAGES = sizeof s.full / sizeof *s.full;
  const int first_line = (threadIdx.x / 128 - 1) * 64;
  int held = -1;
  for (int block = 0; block < blocks; block++, at.advance<STAGES>()) {
    if (held >= 0 && !mbarrier_test(&s.full[at.stage], at.phase)) {
      wgmma_wait<0>(); /* rather than hold a stage while waiting for one */
      if (threadIdx.x % 32 == 0) mbarrier_arrive(&s.empty[held]);
      held = -1;
    }
    mbarrier_wait(&s.full[at.stage], at.phase);
    fence_async_shared(); /* a gathered operand was written by ordinary (cp.async) accesses */
    wgmma_fence();
    multiply<BN, N, A_MN, B_MN>(acc, s.a[at.stage] + first_line * BK, s.b[at.stage], block > 0);
    wgmma_commit();
    wgmma_wait<1>();
    if (held >= 0 && threadIdx.x % 32 == 0) mbarrier_arrive(&s.empty[held]);
    held = at.stage;
  }
  wgmma_wait<0>();
  if (held >= 0 && threadIdx.x % 32 == 0) mbarrier_arrive(&s.empty[held]);
}

/* Columns of bias that a lane fetches: 8 of the tile's BN, which for a gated pair in halves lie in two places. */
template <int BN> __device__ __forceinline__ int bias_column(const gemm_params &p, int column, int inside) {
  const int width = BN / p.halves;
  return inside < width ? p.half_row[0] + column * width + inside
                        : p.half_row[1] + column * width + inside - width;
}

/* Factors of a lane's two rows, and the bias of the tile's columns in shared memory of the warp's own. */
template <int BN>
__device__ __forceinline__ finish finish_of(const gemm_params &p, const tile_place &place, bf16 *bias) {
  const int lane = threadIdx.x % 32, row = place.row0 + (threadIdx.x / 32 - GROUP_WARPS) * 16 + lane / 4;
  finish f = {{1, 1}, bias + lane % 4 * 2};
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (p.weights != nullptr && row + 8 * i < place.row1)
      f.weight[i] = p.weights[p.row_slot ? p.row_slot[row + 8 * i] : row + 8 * i];
  if (lane < BN / 8) {
    const int column = bias_column<BN>(p, place.column, lane * 8);
    const bool there = p.bias != nullptr && column < p.n;
    const bf16 *from = p.bias + (int64_t)place.expert * p.n + column;
    reinterpret_cast<uint4 *>(bias)[lane] =
        there ? *reinterpret_cast<const uint4 *>(from) : make_uint4(0, 0, 0, 0);
  }
  __syncwarp();
  return f;
}

template <int BN, int STAGES, int EPILOGUE, bool B_KN>
__device__ __forceinline__ void consumer(gemm_shared<BN, STAGES, EPILOGUE> &s, const gemm_params &p) {
  const int warp = threadIdx.x / 32 - GROUP_WARPS;
  constexpr int N = BN == 256 && !gemm_roles<BN, EPILOGUE>::few ? 128 : BN; /* columns of an instruction */
  const bool finished = EPILOGUE != DACT && (p.weights != nullptr || p.bias != nullptr);
  float acc[BN / 2];
  ring at = {0, 0};
  uint32_t round = 1;
  for (int tile = blockIdx.x; tile < tile_count(s, p); tile += gridDim.x, round ^= 1) {
    finish f = {};
    if (finished) f = finish_of<BN>(p, place_of(s, p, tile), s.bias[EPILOGUE == DACT ? 0 : warp]);
    mainloop<BN, N, false, B_KN>(s, p.pairs.count * ((p.k + BK - 1) / BK), at, acc);
    mbarrier_wait(&s.over.taken, round);
    if (finished)
      deliver<true>(acc, s.result, warp * 16, f);
    else
      deliver<false>(acc, s.result, warp * 16, f);
    mbarrier_arrive(&s.over.ready);
  }
}

template <int BN, int STAGES, int EPILOGUE>
__device__ __forceinline__ void epilogue(gemm_shared<BN, STAGES, EPILOGUE> &s, const gemm_params &p) {
  uint32_t round = 0;
  for (int tile = blockIdx.x; tile < tile_count(s, p); tile += gridDim.x, round ^= 1) {
    const tile_place place = place_of(s, p, tile);
#pragma unroll 1
    for (int band = threadIdx.x / 32 - gemm_roles<BN, EPILOGUE>::first_storer; band < BANDS;
         band += gemm_roles<BN, EPILOGUE>::storers) {
      if constexpr (EPILOGUE == DACT) {
        dact_result(s.result, &s.over.ready, round, p, place, band);
        continue;
      }
      mbarrier_wait(&s.over.ready, round);
      if constexpr (EPILOGUE == ACT)
        act_result(s.result, p, place, band);
      else if constexpr (EPILOGUE != DACT)
        store_result(s.result,
                     {p.d, p.n, p.d_fp32 != 0, p.accumulate != 0, place.row0, place.row1 - place.row0,
                      place.column * BN},
                     band);
    }
    mbarrier_arrive(&s.over.taken);
  }
}

template <int BN, int STAGES, int EPILOGUE, bool B_KN>
__global__ void __launch_bounds__(gemm_roles<BN, EPILOGUE>::threads, 1)
    gemm_kernel(const __grid_constant__ gemm_params p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  auto &s = *reinterpret_cast<gemm_shared<BN, STAGES, EPILOGUE> *>(raw);
  if (threadIdx.x == 0) {
    if (smem_address(raw) % 1024 != 0) __trap(); /* the swizzle counts from there */
    tma_prefetch(&p.b_map);
    if (p.gather_topk == 0) tma_prefetch(&p.a_map);
    for (int i = 0; i < STAGES; i++) {
      mbarrier_init(&s.full[i], p.gather_topk > 0 ? gemm_roles<BN, EPILOGUE>::loaders + 1 : 1);
      mbarrier_init(&s.empty[i], CONSUMERS * GROUP_WARPS);
    }
    handover_init(s.over, gemm_roles<BN, EPILOGUE>::storers);
    fence_barrier_init();
  }
  schedule_prepare<BM>(s.first, s.warp_total, p.row_offset, p.experts, p.rows);
  if (gemm_roles<BN, EPILOGUE>::loads()) {
    if constexpr (!gemm_roles<BN, EPILOGUE>::few) registers_shrink<40>();
    if (p.gather_topk > 0)
      gather_producer<BN, STAGES, EPILOGUE, B_KN>(s, p);
    else
      producer<BN, STAGES, EPILOGUE, B_KN>(s, p);
  } else if (gemm_roles<BN, EPILOGUE>::consumes()) {
    if constexpr (!gemm_roles<BN, EPILOGUE>::few) registers_grow<BN == 256 ? 160 : 144>();
    consumer<BN, STAGES, EPILOGUE, B_KN>(s, p);
  } else {
    if constexpr (!gemm_roles<BN, EPILOGUE>::few) registers_grow<BN == 256 ? 152 : 184>();
    epilogue(s, p);
  }
}
