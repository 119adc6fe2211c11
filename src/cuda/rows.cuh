/* SPDX-License-Identifier: Apache-2.0
 *
 * Rows grouped by expert, cut into pieces without asking the device how many rows each expert has.
 *
 * All rows are cut into chunks of PIECE; a piece is what an expert has of a chunk. Walking down the rows, either the chunk
 * or the expert goes up by one or more, so chunk + expert numbers the pieces without a collision:
 *
 *     chunks   |   0   |   1   |   2   |       piece    0+0  0+1  1+1  1+3  2+3
 *     experts  | 0  |    1   |    3    |       number    0    1    2    4    5      (expert 2 is empty)
 *
 * There are at most chunks + experts numbers, and expert e has those from offset[e]/PIECE + e on, which ascend with e: a
 * piece is found by bisection. Offsets are clamped into 0 .. rows; with offsets that descend pieces may be left out, but no
 * row outside is touched. */
#pragma once

#include "../format.h"

struct row_groups {
  const int32_t *offset; /* [E+1] or NULL: one expert with all rows */
  int64_t rows;
  int64_t experts;
};

struct piece {
  int64_t expert;
  int64_t begin, end; /* rows; begin >= end: no such piece */
};

__device__ __forceinline__ int64_t offset_at(const row_groups &g, int64_t e) {
  if (g.offset == nullptr) return e == 0 ? 0 : g.rows;
  const int64_t offset = g.offset[e];
  return offset < 0 ? 0 : offset > g.rows ? g.rows : offset;
}

/* The last expert whose rows begin at or before `row`. */
__device__ __forceinline__ int64_t expert_of_row(const row_groups &g, int64_t row) {
  int64_t low = 0, high = g.experts;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (offset_at(g, middle) <= row)
      low = middle;
    else
      high = middle;
  }
  return low;
}

/* Host: how many numbers there are. */
static inline int64_t piece_count(int64_t rows, int64_t experts, int64_t size) {
  return CEIL_DIV(rows, size) + experts;
}

__device__ __forceinline__ int64_t first_piece(const row_groups &g, int64_t e, int size) {
  return offset_at(g, e) / size + e;
}

__device__ __forceinline__ piece piece_at(const row_groups &g, int64_t number, int size) {
  int64_t low = 0, high = g.experts;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (first_piece(g, middle, size) <= number)
      low = middle;
    else
      high = middle;
  }
  const int64_t chunk = (number - low) * size, begin = offset_at(g, low), end = offset_at(g, low + 1);
  return {low, begin > chunk ? begin : chunk, end < chunk + size ? end : chunk + size};
}
