/* SPDX-License-Identifier: Apache-2.0
 *
 * Rows from expert ids: a stable counting sort, after which experts over capacity drop slots. Twin of src/cpu/sort.c, the
 * same integers.
 *
 *   count     a warp counts the experts of a chunk of slots, in shared memory:  histogram[E, chunks]
 *   scan      a warp an expert: histogram becomes the slots of that expert in earlier chunks, and their total
 *   offsets   one block: where each expert's slots begin, before and after drops
 *   place     a warp a chunk, 32 slots at a time: lanes with one expert find each other, the lower lane goes first
 *   drop      with a capacity only: a block an expert finds the rank of its last kept slot byte by byte, then moves the kept
 *             slots, in order, to their rows
 *
 * Invariant    inside an expert rows are in slot order. Atomics are on integers in shared memory; their order shows nowhere.
 * Limits       chunks <= 2048, so that the histogram stays below 32 MiB; 16 KiB of shared memory a warp. */
#include "launch.h"
#include "../format.h"
#include "block.cuh"

static const int64_t CHUNK_SLOTS = 512; /* at least */
static const int64_t MAX_CHUNKS = 2048;
enum {
  DROP_THREADS = 256 /* one a byte value */
};

struct sort_params {
  moe_sort_args args;
  int64_t slots, chunk_slots, chunks;
  int *histogram; /* [E, chunks] */
  int *total;     /* [E] slots before drops */
  int *first;     /* [E] where they begin, before drops */
  int *sorted;    /* [slots] by expert before drops; row_slot itself without a capacity */
};

/* As many as the scratch has room for: grows with the slots, unlike the chunks themselves. */
static int64_t chunk_bound(int64_t slots) {
  const int64_t chunks = CEIL_DIV(slots, CHUNK_SLOTS);
  return chunks < MAX_CHUNKS ? chunks : MAX_CHUNKS;
}

static sort_params params_of(const moe_sort_args *args) {
  sort_params p = {};
  p.args = *args;
  p.slots = args->tokens * args->topk;
  const int64_t least = ALIGN_UP(CEIL_DIV(p.slots, MAX_CHUNKS), 32);
  p.chunk_slots = least > CHUNK_SLOTS ? least : CHUNK_SLOTS;
  p.chunks = CEIL_DIV(p.slots, p.chunk_slots);
  p.total = static_cast<int *>(args->scratch);
  p.first = p.total + args->experts;
  p.histogram = p.first + args->experts;
  p.sorted = args->capacity > 0 ? p.histogram + args->experts * chunk_bound(p.slots) : args->row_slot;
  return p;
}

/* The expert of slot s, -1 when skipped or past `end`. */
__device__ __forceinline__ int expert_of(const sort_params &p, int64_t s, int64_t end) {
  if (s >= end) return -1;
  if (p.args.padding_mask != nullptr && p.args.padding_mask[s / p.args.topk] != 0) return -1;
  const int e = p.args.ids != nullptr ? p.args.ids[s] : 0;
  return e >= 0 && e < p.args.experts ? e : -1;
}

static __global__ void count_kernel(const __grid_constant__ sort_params p) {
  extern __shared__ int count[];
  const int experts = (int)p.args.experts, lane = threadIdx.x;
  const int64_t begin = blockIdx.x * p.chunk_slots, end = min(begin + p.chunk_slots, p.slots);
  for (int e = lane; e < experts; e += 32) count[e] = 0;
  __syncwarp();
  for (int64_t s = begin + lane; s < end; s += 32) {
    const int e = expert_of(p, s, end);
    if (e >= 0) atomicAdd(&count[e], 1);
  }
  __syncwarp();
  for (int e = lane; e < experts; e += 32) p.histogram[e * p.chunks + blockIdx.x] = count[e];
}

static __global__ void scan_kernel(const __grid_constant__ sort_params p) {
  const int64_t e = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (e >= p.args.experts) return;
  int before = 0;
  for (int64_t base = 0; base < p.chunks; base += 32) {
    const int64_t c = base + lane;
    const int count = c < p.chunks ? p.histogram[e * p.chunks + c] : 0;
    int sum = count;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, d);
      if (lane >= d) sum += other;
    }
    if (c < p.chunks) p.histogram[e * p.chunks + c] = before + sum - count;
    before += __shfl_sync(0xffffffffu, sum, 31);
  }
  if (lane == 0) p.total[e] = before;
}

static __global__ void offsets_kernel(const __grid_constant__ sort_params p) {
  __shared__ int shared[32];
  const moe_sort_args &a = p.args;
  int first = 0, row = 0, all, all_kept;
  for (int64_t base = 0; base < a.experts; base += blockDim.x) {
    const int64_t e = base + threadIdx.x;
    const int count = e < a.experts ? p.total[e] : 0;
    const int kept = a.capacity > 0 && count > a.capacity ? (int)a.capacity : count;
    const int to = block_scan(count, shared, &all), kept_to = block_scan(kept, shared, &all_kept);
    if (e < a.experts) {
      p.first[e] = first + to - count;
      a.row_offset[e] = row + kept_to - kept;
      if (a.counts != nullptr) a.counts[e] = count;
    }
    first += all;
    row += all_kept;
  }
  if (threadIdx.x == 0) a.row_offset[a.experts] = row;
}

static __global__ void place_kernel(const __grid_constant__ sort_params p) {
  extern __shared__ int cursor[];
  const int experts = (int)p.args.experts, lane = threadIdx.x;
  const int64_t begin = blockIdx.x * p.chunk_slots, end = min(begin + p.chunk_slots, p.slots);
  const bool last_step = p.args.capacity == 0;
  for (int e = lane; e < experts; e += 32) cursor[e] = p.first[e] + p.histogram[e * p.chunks + blockIdx.x];
  __syncwarp();
  for (int64_t base = begin; base < end; base += 32) {
    const int64_t s = base + lane;
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

static __global__ void drop_kernel(const __grid_constant__ sort_params p) {
  __shared__ int shared[32];
  const moe_sort_args &a = p.args;
  const int64_t e = blockIdx.x;
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

/* ---- host --------------------------------------------------------------------------------------------------------- */

size_t moe_cuda_sort_scratch(const moe_context *ctx, const moe_sort_args *args) {
  (void)ctx;
  const int64_t slots = args->tokens * args->topk, sorted = args->capacity > 0 ? slots : 0;
  return (size_t)(args->experts * (2 + chunk_bound(slots)) + sorted) * sizeof(int);
}

moe_status moe_cuda_sort(moe_context *ctx, const moe_sort_args *args, moe_stream stream) {
  (void)ctx;
  const char *const op = "sort";
  const sort_params p = params_of(args);
  const size_t shared = (size_t)args->experts * sizeof(int);
  if (p.slots > 0) CUDA_TRY(op, cudaMemsetAsync(args->row_slot, 0xff, (size_t)p.slots * sizeof(int), stream));
  TRY(launch(op, count_kernel, {p.chunks, 1, 1, 32, shared}, p, stream));
  TRY(launch(op, scan_kernel, {CEIL_DIV(args->experts, 8), 1, 1, 256, 0}, p, stream));
  TRY(launch(op, offsets_kernel, {1, 1, 1, 1024, 0}, p, stream));
  TRY(launch(op, place_kernel, {p.chunks, 1, 1, 32, shared}, p, stream));
  if (args->capacity == 0) return MOE_OK;
  return launch(op, drop_kernel, {args->experts, 1, 1, DROP_THREADS, 0}, p, stream);
}

KERNELS(sort, (const void *)count_kernel, (const void *)scan_kernel, (const void *)offsets_kernel,
        (const void *)place_kernel, (const void *)drop_kernel)
