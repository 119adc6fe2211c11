/* SPDX-License-Identifier: Apache-2.0
 *
 * The epilogue of the gradient through the activation: da comes in the tile, fp32; reads h, writes dh and weight * a, and for each
 * row the sum of da * a. Rows go by twos, 64 elements a step; the h of a step is asked for in the step before, that of the first before
 * the tile is there. */
#pragma once

#include "activation.cuh"
#include "schedule.cuh"

/* What a lane does in one tile. */
struct dact_lane {
  epilogue_lane own;
  h_place at;
  int rows, elements; /* of the tile from its first row, element on */
  int64_t h, a;       /* where in h, and in a, its row and the tile's first element begin */
};

template <int BN>
__device__ __forceinline__ dact_lane dact_lane_of(const gemm_params &p, const tile_place &place, int band) {
  const epilogue_lane own = lane_of_band(band);
  const h_place at = place_of_h(p, own.piece);
  const int first = place.column * BN;
  const int64_t row = place.row0 + own.line;
  return {own,
          at,
          place.row1 - place.row0 - own.line,
          min(BN, p.inter - first),
          row * p.h_width + (first << p.h_shift),
          row * p.inter + first + at.element};
}

/* h of rows 4 i, 4 (i + 1) and elements f .. of a lane; what does not exist stays as it was. */
__device__ __forceinline__ void ask_for_h(const gemm_params &p, const dact_lane &lane, int i, int f,
                                          h_pieces &pieces) {
  if (f + lane.at.element >= lane.elements) return;
#pragma unroll
  for (int j = 0; j < ACT_ROWS; j++) {
    const bf16 *from = p.h + lane.h + 4 * (i + j) * (int64_t)p.h_width + (f << p.h_shift);
    if (4 * (i + j) >= lane.rows) continue;
    pieces.gate[j] = *reinterpret_cast<const uint4 *>(from + lane.at.gate);
    if (p.act.gated) pieces.up[j] = *reinterpret_cast<const uint4 *>(from + lane.at.up);
  }
}

__device__ __forceinline__ void dact_out(const gemm_params &p, const dact_lane &lane, int i, int f,
                                         const h_pieces &dh, const uint4 (&a)[ACT_ROWS]) {
#pragma unroll
  for (int j = 0; j < ACT_ROWS; j++) {
    if (4 * (i + j) >= lane.rows) continue;
    bf16 *to = p.dh + lane.h + 4 * (i + j) * (int64_t)p.h_width + (f << p.h_shift);
    store_16(to + lane.at.gate, dh.gate[j]);
    if (p.act.gated) store_16(to + lane.at.up, dh.up[j]);
    if (p.d != nullptr)
      store_16(static_cast<bf16 *>(p.d) + lane.a + 4 * (i + j) * (int64_t)p.inter + f, a[j]);
  }
}

/* The sums of rows 4 i and 4 (i + 1), over the eight lanes of each. */
__device__ __forceinline__ void dact_sums(const gemm_params &p, const dact_lane &lane,
                                          const tile_place &place, int i, const float (&sums)[ACT_ROWS]) {
#pragma unroll
  for (int j = 0; j < ACT_ROWS; j++) {
    float sum = sums[j];
#pragma unroll
    for (int d = 1; d < 8; d *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if (p.partial != nullptr && lane.own.piece == 0 && 4 * (i + j) < lane.rows)
      p.partial[(place.row0 + lane.own.line + 4 * (i + j)) * (int64_t)p.column_tiles + place.column] = sum;
  }
}

template <int BN>
__device__ __forceinline__ void dact_result(const result_tile<bf16, BN> &tile, uint64_t *ready,
                                            uint32_t round, const gemm_params &p, const tile_place &place,
                                            int band) {
  const dact_lane lane = dact_lane_of<BN>(p, place, band);
  const int row = min(place.row0 + band * 32 + (int)threadIdx.x % 32,
                      place.row1 - 1); /* whose weight this lane fetches */
  const float fetched = p.weights ? p.weights[p.row_slot ? p.row_slot[row] : row] : 1.0f;
  h_pieces next = {{ones(), ones()}, {ones(), ones()}};
  ask_for_h(p, lane, 0, 0, next);
  mbarrier_wait(ready, round);
#pragma unroll 1
  for (int i = 0; i < EPILOGUE_ROWS; i += ACT_ROWS) {
    float sums[ACT_ROWS] = {}, weight[ACT_ROWS];
#pragma unroll
    for (int j = 0; j < ACT_ROWS; j++)
      weight[j] = __shfl_sync(0xffffffffu, fetched, lane.own.line % 32 + 4 * (i + j));
#pragma unroll 1
    for (int f = 0; f < lane.elements; f += 64) {
      h_pieces pieces = next;
      if (f + 64 < lane.elements)
        ask_for_h(p, lane, i, f + 64, next);
      else if (i + ACT_ROWS < EPILOGUE_ROWS)
        ask_for_h(p, lane, i + ACT_ROWS, 0, next);
      uint4 da[ACT_ROWS];
#pragma unroll
      for (int j = 0; j < ACT_ROWS; j++)
        da[j] =
            *reinterpret_cast<const uint4 *>(&tile.line[lane.own.line + 4 * (i + j)][f + lane.at.element]);
      if (f + lane.at.element >= lane.elements) continue;
      uint4 a[ACT_ROWS];
      dact_switch(p, pieces, da, weight, a, sums);
      dact_out(p, lane, i, f, pieces, a);
    }
    dact_sums(p, lane, place, i, sums);
  }
}
