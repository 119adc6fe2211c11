/* SPDX-License-Identifier: Apache-2.0
 *
 * Rows from expert ids: a stable counting sort, after which experts over capacity drop slots. Twin of src/cpu/sort.c, the
 * same integers.
 *
 *   count     a block has a chunk of the slots and counts their experts:  histogram[chunks, E]; few slots are one chunk, which
 *             needs none
 *   place     a block a chunk once more, cut again among its warps:
 *               1  every warp counts its part in shared memory
 *               2  every block adds up all of the histogram, and what the chunks before its own have of each expert
 *               3  a scan over the experts says where each begins; then where each warp goes on
 *               4  warps place 32 slots at a time: lanes with one expert find each other, the lower lane goes first
 *   drop      with a capacity only: a block an expert finds the rank of its last kept slot byte by byte, then moves the kept
 *             slots, in order, to their rows
 *
 * Step 2 reads 4 chunks E bytes a block, 64 KiB at E = 128, from the second-level cache: a microsecond, where a scan between
 * the two would be one more launch.
 * Invariant    inside an expert rows are in slot order. Atomics are on integers in shared memory; their order shows nowhere.
 * Limits       chunks E <= 65536, so that step 2 stays short; 96 KiB of shared memory at E = 4096. */
#include "launch.h"
#include "../format.h"
#include "block.cuh"

static const int64_t ONE_CHUNK = 4096; /* slots that one block places faster than two launches do */
static const int64_t CHUNK_SLOTS = 1024;
static const int64_t MAX_CHUNKS = 128;
static const int64_t MAX_HISTOGRAM = 65536;
enum {
  MAX_WARPS = 32,
  ADDENDS = 16,
  DROP_THREADS = 256 /* one a byte value */
};

struct sort_params {
  moe_sort_args args;
  uint32_t slots, chunk_slots, warp_slots, chunks;
  int *histogram; /* [chunks, E] */
  int *total;     /* [E] slots before drops; with a capacity */
  int *first;     /* [E] where they begin, before drops; with a capacity */
  int *sorted;    /* [slots] by expert before drops; row_slot itself without a capacity */
};

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* As many as the scratch has room for; grows with the slots. */
static int64_t chunk_bound(int64_t slots, int64_t experts) {
  if (slots <= ONE_CHUNK) return 1;
  return smaller(CEIL_DIV(slots, CHUNK_SLOTS), smaller(MAX_CHUNKS, MAX_HISTOGRAM / experts));
}

/* A multiple of 4. */
static int64_t warps_for(int64_t experts) { return smaller(MAX_WARPS, 16384 / experts / 4 * 4); }

static sort_params params_of(int64_t units, const moe_sort_args *args) {
  sort_params p = {};
  p.args = *args;
  const int64_t slots = args->tokens * args->topk, warps = warps_for(args->experts),
                chunks = smaller(units, chunk_bound(slots, args->experts));
  p.slots = (uint32_t)slots;
  p.warp_slots = (uint32_t)ALIGN_UP(CEIL_DIV(slots, chunks * warps), 32);
  p.chunk_slots = p.warp_slots * (uint32_t)warps;
  p.chunks = slots > 0 ? CEIL_DIV(p.slots, p.chunk_slots) : 1;
  p.histogram = static_cast<int *>(args->scratch);
  p.total = p.histogram + args->experts * chunk_bound(slots, args->experts);
  p.first = p.total + args->experts;
  p.sorted = args->capacity > 0 ? p.first + args->experts : args->row_slot;
  return p;
}

/* The expert of slot s, -1 when skipped or past `end`. */
__device__ __forceinline__ int expert_of(const sort_params &p, uint32_t s, uint32_t end) {
  if (s >= end) return -1;
  if (p.args.padding_mask != nullptr && p.args.padding_mask[s / (uint32_t)p.args.topk] != 0) return -1;
  const int e = p.args.ids != nullptr ? p.args.ids[s] : 0;
  return e >= 0 && e < (int)p.args.experts ? e : -1;
}

static __global__ void count_kernel(const __grid_constant__ sort_params p) {
  extern __shared__ int count[];
  const int experts = (int)p.args.experts;
  const uint32_t begin = blockIdx.x * p.chunk_slots, end = min(p.slots - begin, p.chunk_slots) + begin;
  for (int e = threadIdx.x; e < experts; e += blockDim.x) count[e] = 0;
  __syncthreads();
#pragma unroll 1
  for (uint32_t s = begin + threadIdx.x; s < end; s += blockDim.x) {
    const int e = expert_of(p, s, end);
    if (e >= 0) atomicAdd(&count[e], 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += blockDim.x) p.histogram[blockIdx.x * experts + e] = count[e];
}

/* ---- place -------------------------------------------------------------------------------------------------------- */

/* Shared memory of a block of place_kernel. */
struct place_memory {
  int *all;     /* [E] slots of each expert */
  int *before;  /* [E] of those, in earlier chunks */
  int *cursors; /* [warps, E] slots of each warp, then its next rows */
};

__device__ __forceinline__ place_memory place_memory_of(int experts) {
  extern __shared__ int shared[];
  return {shared, shared + experts, shared + 2 * experts};
}

/* The threads are groups of a thread an expert, and the groups share the chunks. */
__device__ __forceinline__ void add_chunks(const sort_params &p, const place_memory &m) {
  const int experts = (int)p.args.experts, width = min(experts, (int)blockDim.x);
  const int groups = blockDim.x / width, group = threadIdx.x / width;
  for (int e = threadIdx.x % width; group < groups && e < experts; e += width) {
    int all = 0, before = 0;
#pragma unroll 1
    for (int c = group; c < (int)p.chunks; c += ADDENDS * groups) { /* all loads, then all sums */
      int count[ADDENDS];
#pragma unroll
      for (int i = 0; i < ADDENDS; i++)
        count[i] = c + i * groups < (int)p.chunks ? p.histogram[(c + i * groups) * experts + e] : 0;
#pragma unroll
      for (int i = 0; i < ADDENDS; i++) {
        all += count[i];
        before += c + i * groups < (int)blockIdx.x ? count[i] : 0;
      }
    }
    atomicAdd(&m.all[e], all);
    atomicAdd(&m.before[e], before);
  }
}

/* The counts of an expert by warp become the first row of each, from `row` on. */
__device__ __forceinline__ void number_warps(int *cursor, int experts, int row) {
#pragma unroll 1
  for (int w = 0; w < (int)blockDim.x / 32; w += 4, cursor += 4 * experts) {
    int count[4];
#pragma unroll
    for (int i = 0; i < 4; i++) count[i] = cursor[i * experts];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      cursor[i * experts] = row;
      row += count[i];
    }
  }
}

/* Says where everything begins; returns how many rows are left after drops. */
__device__ __forceinline__ int number_experts(const sort_params &p, const place_memory &m) {
  __shared__ int shared[32];
  const moe_sort_args &a = p.args;
  const int experts = (int)a.experts;
  int first = 0, row = 0, sum, sum_kept;
#pragma unroll 1
  for (int base = 0; base < experts; base += blockDim.x) {
    const int e = base + threadIdx.x, count = e < experts ? m.all[e] : 0;
    const int kept = a.capacity > 0 && count > a.capacity ? (int)a.capacity : count;
    const int begin = first + block_scan(count, shared, &sum) - count;
    int row_begin = begin;
    sum_kept = sum;
    if (a.capacity > 0) row_begin = row + block_scan(kept, shared, &sum_kept) - kept;
    if (e < experts) number_warps(m.cursors + e, experts, begin + m.before[e]);
    if (e < experts && blockIdx.x == 0) {
      a.row_offset[e] = row_begin;
      if (a.counts != nullptr) a.counts[e] = count;
      if (a.capacity > 0) p.total[e] = count, p.first[e] = begin;
    }
    first += sum;
    row += sum_kept;
  }
  if (threadIdx.x == 0 && blockIdx.x == 0) a.row_offset[experts] = row;
  __syncthreads();
  return row;
}

/* Slots begin .. end - 1, in order, by one warp. */
__device__ __forceinline__ void place_slots(const sort_params &p, int *cursor, uint32_t begin, uint32_t end) {
  const int lane = threadIdx.x % 32;
  const bool last_step = p.args.capacity == 0;
#pragma unroll 1
  for (uint32_t base = begin; base < end; base += 32) {
    const uint32_t s = base + lane;
    const int e = expert_of(p, s, end);
    const unsigned same = __match_any_sync(0xffffffffu, e);
    const int rank = __popc(same & ((1u << lane) - 1));
    const int row = e >= 0 ? cursor[e] + rank : -1;
    __syncwarp();
    if (e >= 0 && rank == 0) cursor[e] = row + __popc(same);
    __syncwarp();
    if (row >= 0) p.sorted[row] = (int)s;
    if (s < end && (last_step || row < 0)) p.args.slot_row[s] = row;
  }
}

static __global__ void __launch_bounds__(MAX_WARPS * 32, 1)
    place_kernel(const __grid_constant__ sort_params p) {
  const int experts = (int)p.args.experts, warp = threadIdx.x / 32;
  const place_memory m = place_memory_of(experts);
  int *const cursor = m.cursors + warp * experts;
  const int64_t from = (int64_t)blockIdx.x * p.chunk_slots + warp * (int64_t)p.warp_slots, slots = p.slots;
  const uint32_t begin = (uint32_t)min(from, slots), end = (uint32_t)min(from + p.warp_slots, slots);
#pragma unroll 1
  for (int i = threadIdx.x; i < (2 + (int)blockDim.x / 32) * experts; i += blockDim.x) m.all[i] = 0;
  __syncthreads();
#pragma unroll 1
  for (uint32_t s = begin + threadIdx.x % 32; s < end; s += 32) {
    const int e = expert_of(p, s, end);
    if (e < 0) continue;
    atomicAdd(&cursor[e], 1);
    if (p.chunks == 1) atomicAdd(&m.all[e], 1);
  }
  if (p.chunks > 1) add_chunks(p, m);
  __syncthreads();
  const int rows = number_experts(p, m);
  place_slots(p, cursor, begin, end);
#pragma unroll 1
  for (int64_t r = rows + (int64_t)blockIdx.x * blockDim.x + threadIdx.x; r < slots;
       r += (int64_t)gridDim.x * blockDim.x)
    p.args.row_slot[r] = -1;
}

/* ---- drops -------------------------------------------------------------------------------------------------------- */

/* A number that orders as the slot's claim to a place: by weight, -0 as +0, NaN below all; by position, all alike. */
__device__ __forceinline__ uint32_t rank_of(const moe_sort_args &a, int slot) {
  if (a.drop == MOE_DROP_POSITION) return 0;
  const float weight = a.weights[slot] + 0.0f;
  if (weight != weight) return 0;
  const uint32_t bits = moe_bits_of(weight);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* The keep-th largest rank of the slots. *ties: how many slots of that very rank are kept. */
__device__ __forceinline__ uint32_t last_rank(const moe_sort_args &a, const int *slots, int count, int keep,
                                              int *ties) {
  __shared__ int histogram[DROP_THREADS], shared[32], found_byte, found_keep;
  const int thread = threadIdx.x;
  uint32_t rank = 0, known = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    histogram[thread] = 0;
    __syncthreads();
    for (int64_t i = thread; i < count; i += DROP_THREADS) {
      const uint32_t r = rank_of(a, slots[i]);
      if ((r & known) == rank) atomicAdd(&histogram[r >> shift & 255], 1);
    }
    __syncthreads();
    const int byte = 255 - thread, here = histogram[byte];
    int all;
    const int down_to = block_scan(here, shared, &all); /* ranks of this byte or a higher one */
    if (down_to >= keep && down_to - here < keep) found_byte = byte, found_keep = keep - (down_to - here);
    __syncthreads();
    rank |= (uint32_t)found_byte << shift;
    known |= 255u << shift;
    keep = found_keep;
    __syncthreads();
  }
  *ties = keep;
  return rank;
}

/* Expert e: the slots that it keeps move to their rows. */
__device__ __forceinline__ void drop_slots(const sort_params &p, int64_t e) {
  __shared__ int shared[32];
  const moe_sort_args &a = p.args;
  const int count = p.total[e], *slots = p.sorted + p.first[e];
  const bool over = count > a.capacity;
  int row = a.row_offset[e], ties = over ? (int)a.capacity : count, all;
  uint32_t last = 0;
  if (over && a.drop == MOE_DROP_WEIGHT) last = last_rank(a, slots, count, (int)a.capacity, &ties);
  for (int64_t base = 0; base < count; base += DROP_THREADS) {
    const bool inside = base + threadIdx.x < count;
    const int slot = inside ? slots[base + threadIdx.x] : 0;
    const uint32_t rank = inside && over ? rank_of(a, slot) : 0;
    const bool tie = inside && rank == last;
    const int tie_number = block_scan(tie, shared, &all);
    const bool kept = inside && (rank > last || (tie && tie_number <= ties));
    ties -= all;
    const int number = block_scan(kept, shared, &all);
    if (inside) a.slot_row[slot] = kept ? row + number - 1 : -1;
    if (kept) a.row_slot[row + number - 1] = slot;
    row += all;
  }
}

static __global__ void drop_kernel(const __grid_constant__ sort_params p) {
  const moe_sort_args &a = p.args;
  for (int64_t e = blockIdx.x; e < a.experts; e += gridDim.x) drop_slots(p, e);
}

/* ---- host --------------------------------------------------------------------------------------------------------- */

size_t moe_cuda_sort_scratch(const moe_context *ctx, const moe_sort_args *args) {
  (void)ctx;
  const int64_t slots = args->tokens * args->topk, sorted = args->capacity > 0 ? slots : 0;
  return (size_t)(args->experts * (2 + chunk_bound(slots, args->experts)) + sorted) * sizeof(int);
}

moe_status moe_cuda_sort(moe_context *ctx, const moe_sort_args *args, moe_stream stream) {
  const char *const op = "sort";
  const int64_t units = moe_cuda_units(ctx, args->sm_limit);
  const sort_params p = params_of(units, args);
  const int64_t warps = warps_for(args->experts);
  const size_t line = (size_t)args->experts * sizeof(int);
  if (p.chunks > 1) TRY(launch(op, count_kernel, {p.chunks, 1, 1, MAX_WARPS * 32, line}, p, stream));
  TRY(launch(op, place_kernel, {p.chunks, 1, 1, (int)warps * 32, line * (size_t)(2 + warps)}, p, stream));
  if (args->capacity == 0) return MOE_OK;
  return launch(op, drop_kernel, {smaller(args->experts, units), 1, 1, DROP_THREADS, 0}, p, stream);
}

KERNELS(sort, (const void *)count_kernel, (const void *)place_kernel, (const void *)drop_kernel)
