/* SPDX-License-Identifier: Apache-2.0
 *
 * A tile of results on its way from the consumers to the epilogue. The consumers round their accumulators into it (or, where the
 * epilogue wants fp32, copy them), say so at `ready`, and begin the next product; the warps of the epilogue read it at their leisure and
 * give it back at `taken`. So tensor cores stop only for the copy.
 *
 * Accumulator 4 J + 2 i + c of lane l is row l/4 + 8 i, column 8 J + 2 (l%4) + c of its warp's 16 rows: pair n = 2 J + i of a lane lies
 * where 8x8 matrix n has it, so that four pairs are stored with one instruction. Lines are 8 elements longer than the tile: rows of
 * matrices, and pairs of fp32, then fall into different banks. */
#pragma once

#include <cuda_bf16.h>

#include "../ptx/memory.cuh"

typedef __nv_bfloat16 bf16;
typedef __nv_bfloat162 bf16x2;

enum {
  BM = 128, /* rows of a tile */
  CONSUMERS = 2,
  GROUP_WARPS = 4
};

template <typename T, int BN> struct alignas(16) result_tile { T line[BM][BN + 8]; };

/* Each thread arrives for itself: what it wrote, or has read, is ordered by its own arrival. */
struct handover {
  uint64_t ready; /* a thread of the consumers arrives */
  uint64_t taken; /* a thread of the epilogue arrives */
};

/* One thread, before fence_barrier_init. */
__device__ __forceinline__ void handover_init(handover &over, int storers) {
  mbarrier_init(&over.ready, CONSUMERS * GROUP_WARPS * 32);
  mbarrier_init(&over.taken, storers * 32);
}

__device__ __forceinline__ uint32_t pair_of(float x, float y) {
  const bf16x2 pair = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<const uint32_t *>(&pair);
}
__device__ __forceinline__ float2 floats_of(uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

/* What a lane's results are multiplied by and what is added: by its two rows, and by column from its first on. */
struct finish {
  float weight[2];
  const bf16 *bias; /* in shared memory */
};

/* Results x of pair n of a lane. */
template <bool FINISH> __device__ __forceinline__ float2 finished(const float *x, int n, const finish &f) {
  if (!FINISH) return make_float2(x[0], x[1]);
  const float2 b = __bfloat1622float2(*reinterpret_cast<const bf16x2 *>(f.bias + n / 2 * 8));
  return make_float2(f.weight[n % 2] * x[0] + b.x, f.weight[n % 2] * x[1] + b.y);
}

/* Results of step t of a warp, rounded: of 16 columns. */
template <bool FINISH>
__device__ __forceinline__ void pairs_of(const float *acc, int t, const finish &f, uint32_t (&pairs)[4]) {
#pragma unroll
  for (int n = 0; n < 4; n++) {
    const float2 x = finished<FINISH>(acc + 8 * t + 2 * n, 4 * t + n, f);
    pairs[n] = pair_of(x.x, x.y);
  }
}

/* A warp's 16 rows of the tile, rounded; `line0`: the first. */
template <bool FINISH, int BN>
__device__ __forceinline__ void deliver(const float *acc, result_tile<bf16, BN> &tile, int line0,
                                        const finish &f) {
  const int lane = threadIdx.x % 32;
  const uint32_t row = smem_address(&tile.line[line0 + lane % 16][lane / 16 * 8]);
#pragma unroll
  for (int t = 0; t < BN / 16; t++) {
    uint32_t pairs[4];
    pairs_of<FINISH>(acc, t, f, pairs);
    store_matrices(row + t * 32, pairs);
  }
}

/* The results of a warpgroup as bulk copies take them: boxes of 64 lines x 64 columns, 128-byte swizzle. */
template <int BN> struct alignas(1024) result_boxes { bf16 box[BN / 64][64 * 64]; };

/* A warp's 16 of the 64 lines. */
template <int BN> __device__ __forceinline__ void deliver(const float *acc, result_boxes<BN> &boxes) {
  const int lane = threadIdx.x % 32, line = threadIdx.x / 32 % GROUP_WARPS * 16 + lane % 16;
  const uint32_t row = smem_address(boxes.box[0]) + line * 128;
#pragma unroll
  for (int t = 0; t < BN / 16; t++) {
    uint32_t pairs[4];
    pairs_of<false>(acc, t, {}, pairs);
    store_matrices(row + t / 4 * 8192 + ((t % 4 * 2 + lane / 16) ^ (lane % 8)) * 16, pairs);
  }
}

/* The same, not rounded. */
template <bool FINISH, int BN>
__device__ __forceinline__ void deliver(const float *acc, result_tile<float, BN> &tile, int line0,
                                        const finish &f) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < BN / 4; n++)
    *reinterpret_cast<float2 *>(&tile.line[line0 + lane / 4 + n % 2 * 8][n / 2 * 8 + lane % 4 * 2]) =
        finished<FINISH>(acc + 2 * n, n, f);
}

/* A warp of the epilogue has a band of 32 rows of the tile at a time; a lane of it, of rows line + 4 i (i < 8), the 16-byte piece
 * `piece` of every 8. */
enum {
  BANDS = BM / 32,
  EPILOGUE_ROWS = 8
};
struct epilogue_lane {
  int line, piece;
};
__device__ __forceinline__ epilogue_lane lane_of_band(int band) {
  return {band * 32 + (int)threadIdx.x % 32 / 8, (int)threadIdx.x % 8};
}
