/* SPDX-License-Identifier: Apache-2.0
 *
 * The epilogue of the gradient through the activation: da comes rounded in the tile; reads h, writes dh and weight * a, and for each
 * row the sum of da * a. Rows go by twos, 64 elements a step; the h of a step is asked for in the step before, that of the first before
 * the tile is there. Who has nothing to ask for asks once more for what it has, so that a step is one piece of straight code. */
#pragma once

#include "activation.cuh"
#include "schedule.cuh"

/* What a lane does in one tile. */
struct dact_lane {
  int rows, elements; /* of the tile from the lane's first row and element on */
  int row_step, up;   /* elements of h to the lane's next row, and from gates to ups */
};

/* h of ACT_ROWS rows from `row` on; of what is not there the first again. */
__device__ __forceinline__ void load_h(const dact_lane &lane, const bf16 *from, int row, h_pieces &pieces) {
#pragma unroll
  for (int j = 0; j < ACT_ROWS; j++) {
    const int to_row = row + 4 * j < lane.rows ? j * lane.row_step : 0;
    pieces.gate[j] = *reinterpret_cast<const uint4 *>(from + to_row);
    pieces.up[j] = *reinterpret_cast<const uint4 *>(from + to_row + lane.up);
  }
}

__device__ __forceinline__ void store_dact(const gemm_params &p, const dact_lane &lane, bf16 *dh, bf16 *d,
                                           int row, const h_pieces &pieces, const uint4 (&a)[ACT_ROWS]) {
#pragma unroll
  for (int j = 0; j < ACT_ROWS; j++, dh += lane.row_step, d += 4 * p.inter) {
    if (row + 4 * j >= lane.rows) continue;
    store_16(dh, pieces.gate[j]);
    if (p.act.gated) store_16(dh + lane.up, pieces.up[j]);
    if (p.d != nullptr) store_16(d, a[j]);
  }
}

/* The sums of the rows from `row` on, over the eight lanes of each. */
__device__ __forceinline__ void dact_sums(const gemm_params &p, const dact_lane &lane,
                                          const epilogue_lane &own, const tile_place &place, int row,
                                          const float (&sums)[ACT_ROWS]) {
#pragma unroll
  for (int j = 0; j < ACT_ROWS; j++) {
    float sum = sums[j];
#pragma unroll
    for (int d = 1; d < 8; d *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if (p.partial != nullptr && own.piece == 0 && row + 4 * j < lane.rows)
      p.partial[(place.row0 + own.line + row + 4 * j) * (int64_t)p.column_tiles + place.column] = sum;
  }
}

template <int BN>
__device__ __forceinline__ void dact_result(const result_tile<bf16, BN> &tile, uint64_t *ready,
                                            uint32_t round, const gemm_params &p, const tile_place &place,
                                            int band) {
  const epilogue_lane own = lane_of_band(band);
  const h_place at = place_of_h(p, own.piece);
  const int first = place.column * BN, width = min(BN, p.inter - first), last = place.row1 - 1;
  const dact_lane lane = {place.row1 - place.row0 - own.line, width - at.element, 4 * p.h_width,
                          p.act.gated ? at.up - at.gate : 0};
  const int whose =
      min(place.row0 + band * 32 + (int)threadIdx.x % 32, last); /* this lane fetches its weight */
  const float fetched = p.weights ? p.weights[p.row_slot ? p.row_slot[whose] : whose] : 1.0f;
  const int64_t line = min(place.row0 + own.line, last);
  const bf16 *begin = p.h + line * p.h_width + (first << p.h_shift) +
                      (lane.elements > 0 ? at.gate : p.gate_column); /* of the lane's rows */
  const bf16 *from = begin;                                          /* of what it has asked for */
  const ptrdiff_t to_dh = p.dh - p.h;
  h_pieces next;
  load_h(lane, from, 0, next);
  mbarrier_wait(ready, round);
#pragma unroll 1
  for (int row = 0; row < 4 * EPILOGUE_ROWS; row += 4 * ACT_ROWS) {
    float sums[ACT_ROWS] = {}, weight[ACT_ROWS];
#pragma unroll
    for (int j = 0; j < ACT_ROWS; j++)
      weight[j] = __shfl_sync(0xffffffffu, fetched, own.line % 32 + row + 4 * j);
    const bf16 *da_line = &tile.line[own.line + row][at.element];
    bf16 *const d = static_cast<bf16 *>(p.d) + (line + row) * p.inter + first + at.element;
    begin += ACT_ROWS * lane.row_step;
#pragma unroll 1
    for (int f = 0; f < width; f += 64) {
      h_pieces pieces = next;
      const bf16 *here = from;
      const bool turns = f + 64 >= width;
      const int asked = turns ? row + 4 * ACT_ROWS : row;
      if (asked < min(4 * EPILOGUE_ROWS, lane.rows) && (turns ? 0 : f + 64) < lane.elements)
        from = turns ? begin : here + (64 << p.h_shift);
      load_h(lane, from, asked, next);
      if (f >= lane.elements) continue;
      uint4 a[ACT_ROWS], da[ACT_ROWS];
#pragma unroll
      for (int j = 0; j < ACT_ROWS; j++) {
        da[j] = *reinterpret_cast<const uint4 *>(da_line + f + 4 * j * (BN + 8));
        if (!p.act.gated) pieces.up[j] = ones();
      }
      dact_switch(p, pieces, da, weight, a, sums);
      store_dact(p, lane, const_cast<bf16 *>(here) + to_dh, d + f, row, pieces, a);
    }
    dact_sums(p, lane, own, place, row, sums);
  }
}
