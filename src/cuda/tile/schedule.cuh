/* SPDX-License-Identifier: Apache-2.0
 *
 * Which tile comes when. Experts' row counts are known only on the device, so each block first makes the prefix sum of
 * their tile counts in shared memory, then walks the tiles blockIdx.x, blockIdx.x + gridDim.x, ... without talking to others.
 *
 * Order inside an expert: groups of 8 row tiles; in a group all its row tiles of one column tile, then the next column:
 * blocks that run at the same time share a column tile of the weights and 8 row tiles, both in L2. */
#pragma once

struct alignas(16) tile_place {
  int expert;
  int column;     /* column tile */
  int row0, row1; /* rows of this tile: row0 .. row1-1 */
};

__device__ __forceinline__ int clamped_offset(const int *row_offset, int e, int rows) {
  if (row_offset == nullptr) return e == 0 ? 0 : rows;
  return max(0, min(row_offset[e], rows));
}

/* first[e] = row tiles of experts before e, for e = 0 .. experts; warp_total is scratch, one number a warp. All threads of the
 * block; ends with a barrier. */
template <int BM>
__device__ void schedule_prepare(int *first, int *warp_total, const int *row_offset, int experts, int rows) {
  const int threads = blockDim.x, thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int chunk = (experts + threads - 1) / threads;
  const int begin = min(thread * chunk, experts), end = min(begin + chunk, experts);
  int count = 0;
  for (int e = begin; e < end; e++) {
    const int n = clamped_offset(row_offset, e + 1, rows) - clamped_offset(row_offset, e, rows);
    count += n > 0 ? (n + BM - 1) / BM : 0;
  }
  int sum = count;
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, d);
    if (lane >= d) sum += other;
  }
  if (lane == 31) warp_total[warp] = sum;
  __syncthreads();
  int before = sum - count;
  for (int w = 0; w < warp; w++) before += warp_total[w];
  for (int e = begin; e < end; e++) {
    const int n = clamped_offset(row_offset, e + 1, rows) - clamped_offset(row_offset, e, rows);
    first[e] = before;
    before += n > 0 ? (n + BM - 1) / BM : 0;
  }
  if (end == experts && begin < end) first[experts] = before;
  __syncthreads();
}

template <int BM>
__device__ __forceinline__ tile_place schedule_place(const int *first, const int *row_offset, int experts,
                                                     int rows, int column_tiles, int tile) {
  int low = 0, high = experts; /* the last expert whose first tile is at or before this one */
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (first[middle] * column_tiles <= tile)
      low = middle;
    else
      high = middle;
  }
  const int row_tiles = first[low + 1] - first[low], local = tile - first[low] * column_tiles;
  const int group = local / (8 * column_tiles), inside = local % (8 * column_tiles);
  const int width = min(8, row_tiles - 8 * group);
  tile_place place;
  place.expert = low;
  place.column = inside / width;
  place.row0 = clamped_offset(row_offset, low, rows) + (8 * group + inside % width) * BM;
  place.row1 = min(place.row0 + BM, clamped_offset(row_offset, low + 1, rows));
  return place;
}
