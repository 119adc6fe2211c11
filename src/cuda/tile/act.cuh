/* SPDX-License-Identifier: Apache-2.0
 *
 * The epilogue of the up projection: h comes rounded in the tile; writes it, where it is wanted, and a. */
#pragma once

#include "activation.cuh"
#include "schedule.cuh"

template <int BN>
__device__ __forceinline__ void act_result(const result_tile<bf16, BN> &tile, const gemm_params &p,
                                           const tile_place &place, int band) {
  const epilogue_lane own = lane_of_band(band);
  const h_place at = place_of_h(p, own.piece);
  const int width = p.act.gated ? BN / 2 : BN, first = place.column * width;
  const int steps =
      min(width, p.inter - first) - at.element; /* of a lane's own first element and those after */
  const int64_t row = place.row0 + own.line;
  bf16 *const h = p.h ? p.h + row * p.h_width + (first << p.h_shift) : nullptr;
  bf16 *const d = static_cast<bf16 *>(p.d) + row * p.inter + first + at.element;
  const bf16 *const from = tile.line[own.line];
#pragma unroll 1
  for (int i = 0; i < EPILOGUE_ROWS; i += ACT_ROWS) {
    const int rows = place.row1 - place.row0 - own.line - 4 * i;
#pragma unroll 1
    for (int f = 0; f < steps && rows > 0; f += 64) {
      const int column = f << p.h_shift;
      h_pieces pieces;
      uint4 a[ACT_ROWS];
#pragma unroll
      for (int j = 0; j < ACT_ROWS; j++) {
        const bf16 *line = from + 4 * (i + j) * (BN + 8) + column;
        pieces.gate[j] = *reinterpret_cast<const uint4 *>(line + at.tile_gate);
        pieces.up[j] = p.act.gated ? *reinterpret_cast<const uint4 *>(line + at.tile_up) : ones();
      }
      act_switch(p, pieces, a);
#pragma unroll
      for (int j = 0; j < ACT_ROWS; j++) {
        if (4 * j >= rows) continue;
        const int64_t line = 4 * (i + j);
        store_16(d + line * p.inter + f, a[j]);
        if (h == nullptr) continue;
        store_16(h + line * p.h_width + column + at.gate, pieces.gate[j]);
        if (p.act.gated) store_16(h + line * p.h_width + column + at.up, pieces.up[j]);
      }
    }
  }
}
