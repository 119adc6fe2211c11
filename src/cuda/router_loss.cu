/* SPDX-License-Identifier: Apache-2.0
 *
 * The balancing loss, the z-loss and their slopes; formulas in moeblas_ops.h, twin of src/cpu/router_loss.c.
 *
 *   chunk      a block has some tokens of one sequence. Each warp scores one token, then every thread adds the tokens'
 *              shares of its experts, in token order. One line of sums a chunk.
 *   sequence   adds the chunks of a sequence in order, into the line of its first chunk.
 *   totals     tokens that take part, and sequences that have any.
 *   slopes     of a sequence, its part of the balancing loss, and the global counts.
 *   losses     adds the parts.
 *
 * Invariant    sums are in double, their order depends on sizes alone; integers are added by atomics in shared memory only.
 * Limits       E <= 4096: 208 KiB of shared memory in `chunk`. */
#include "launch.h"
#include "block.cuh"
#include "score.cuh"
#include "vector.cuh"

static const int64_t CHUNK_TOKENS = 32; /* a chunk has at least so many, if the sequence has */
static const int64_t MAX_CHUNKS = 128;  /* of a sequence */
enum {
  MAX_WARPS = 16
};

struct loss_params {
  moe_router_loss_args args;
  moe_router_desc router;
  int64_t length, sequences, chunks, chunk_tokens; /* chunks of a sequence */
  double *share; /* [sequences, chunks, E+1]: sums of normalised scores; then of logsumexp^2 */
  int *count;    /* [sequences, chunks, E+1]: slots; then tokens that take part */
  double *part;  /* [sequences] of the balancing loss */
  double *total; /* [2] tokens that take part, sequences with any */
};

static loss_params params_of(const moe_router_loss_args *args) {
  const bool by_sequence = args->router->balance == MOE_BALANCE_SEQUENCE;
  const int64_t length = by_sequence ? args->router->sequence_tokens : args->tokens;
  const int64_t tokens = length < args->tokens ? length : args->tokens;
  loss_params p = {};
  p.args = *args;
  p.router = *args->router;
  p.length = length;
  p.sequences = args->tokens > length ? CEIL_DIV(args->tokens, length) : 1;
  p.chunks = CEIL_DIV(tokens, CHUNK_TOKENS);
  p.chunks = p.chunks < 1 ? 1 : p.chunks > MAX_CHUNKS ? MAX_CHUNKS : p.chunks;
  p.chunk_tokens = CEIL_DIV(tokens, p.chunks);
  const int64_t lines = p.sequences * p.chunks * (args->experts + 1);
  p.share = static_cast<double *>(args->scratch);
  p.part = p.share + lines;
  p.total = p.part + p.sequences;
  p.count = reinterpret_cast<int *>(p.total + 2);
  return p;
}

/* ---- chunk -------------------------------------------------------------------------------------------------------- */

/* Shared memory of a block: sums, then two lines a warp. */
struct chunk_memory {
  double *share;    /* [E] */
  int *count;       /* [E] */
  float *z, *score; /* of this warp, [E] each; those of the next warp are 2E further */
};

static size_t chunk_bytes(int64_t experts, int warps) {
  return (size_t)ALIGN_UP(experts, 2) * (12 + (size_t)warps * 8);
}

__device__ __forceinline__ chunk_memory chunk_memory_of(int experts) {
  extern __shared__ double shared[];
  const int width = (experts + 1) / 2 * 2;
  int *count = reinterpret_cast<int *>(shared + width);
  float *z = reinterpret_cast<float *>(count + width) + threadIdx.x / 32 * 2 * width;
  return {shared, count, z, z + width};
}

/* Scores of a token that takes part; returns its logsumexp^2. *divisor normalises the scores. */
__device__ __forceinline__ double score_token(const loss_params &p, int64_t t, const chunk_memory &m,
                                              double *divisor) {
  const moe_router_loss_args &a = p.args;
  const int experts = (int)a.experts, topk = (int)a.topk;
  const bool elementwise = is_elementwise(p.router.score);
  double square = 0;
  *divisor = 1;
  warp_logits(m.z, a.logits, a.logits_dtype, a.router_bias, t, experts);
  if (p.router.z_coeff != 0 || !elementwise) {
    const double logsumexp = warp_softmax(m.score, m.z, experts);
    if (logsumexp != -INFINITY) square = logsumexp * logsumexp;
  }
  if (p.router.balance == MOE_BALANCE_NONE) return square;
  if (elementwise) {
    warp_elementwise(p.router.score, m.score, m.z, experts);
    *divisor = warp_sum(m.score, experts) + SHARE_FLOOR;
  }
  for (int j = lane_id(); j < topk; j += 32) {
    const int id = a.ids[t * topk + j];
    if (id >= 0 && id < experts) atomicAdd(&m.count[id], 1);
  }
  return square;
}

/* share[e] += the scores of the warps' tokens, in order. divisor 0: the warp has no token. `score` is that of warp 0. */
__device__ __forceinline__ void add_shares(const chunk_memory &m, const float *score, const double *divisor,
                                           int experts) {
  const int width = (experts + 1) / 2 * 2;
  for (int e = threadIdx.x; e < experts; e += blockDim.x) {
    double sum = m.share[e];
    for (int w = 0; w < (int)blockDim.x / 32; w++)
      if (divisor[w] != 0) sum += score[w * 2 * width + e] / divisor[w];
    m.share[e] = sum;
  }
}

/* Line `line` of the sums: a chunk of a sequence. */
__device__ __forceinline__ void add_chunk(const loss_params &p, int64_t line) {
  __shared__ double divisor[MAX_WARPS], squares[MAX_WARPS];
  __shared__ int valid[MAX_WARPS];
  const int experts = (int)p.args.experts, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const chunk_memory m = chunk_memory_of(experts);
  const float *first_score = m.score - warp * 2 * ((experts + 1) / 2 * 2);
  const int64_t sequence = line / p.chunks, chunk = line % p.chunks;
  const int64_t sequence_end = min((sequence + 1) * p.length, p.args.tokens);
  const int64_t begin = sequence * p.length + chunk * p.chunk_tokens,
                end = min(begin + p.chunk_tokens, sequence_end);
  double square = 0;
  int tokens = 0;
  for (int e = threadIdx.x; e < experts; e += blockDim.x) m.share[e] = 0, m.count[e] = 0;
  __syncthreads();
  for (int64_t base = begin; base < end; base += warps) {
    double by = 0;
    if (base + warp < end && !is_masked(p.args.padding_mask, base + warp)) {
      square += score_token(p, base + warp, m, &by);
      tokens++;
    }
    if (lane_id() == 0) divisor[warp] = by;
    __syncthreads();
    if (p.router.balance != MOE_BALANCE_NONE) add_shares(m, first_score, divisor, experts);
    __syncthreads();
  }
  if (lane_id() == 0) squares[warp] = square, valid[warp] = tokens;
  __syncthreads();
  double *share = p.share + line * (p.args.experts + 1);
  int *count = p.count + line * (p.args.experts + 1);
  for (int e = threadIdx.x; e < experts; e += blockDim.x) share[e] = m.share[e], count[e] = m.count[e];
  if (threadIdx.x != 0) return;
  for (int w = 1; w < warps; w++) square += squares[w], tokens += valid[w];
  share[experts] = square;
  count[experts] = tokens;
}

static __global__ void chunk_kernel(const __grid_constant__ loss_params p) {
  for (int64_t line = blockIdx.x; line < p.sequences * p.chunks; line += gridDim.x) {
    add_chunk(p, line);
    __syncthreads();
  }
}

/* ---- what follows from the chunks --------------------------------------------------------------------------------- */

static __global__ void sequence_kernel(const __grid_constant__ loss_params p) {
  const int64_t line = p.args.experts + 1;
  walk w = walk_from(grid_thread(), grid_threads(), (int)line);
  for (; w.row < p.sequences; walk_on(&w)) {
    const int64_t first = w.row * p.chunks * line + w.piece;
    double share = 0;
    int count = 0;
#pragma unroll 8
    for (int64_t c = 0; c < p.chunks; c++) {
      share += p.share[first + c * line];
      count += p.count[first + c * line];
    }
    p.share[first] = share;
    p.count[first] = count;
  }
}

__device__ __forceinline__ int64_t line_of(const loss_params &p, int64_t sequence) {
  return sequence * p.chunks * (p.args.experts + 1);
}

static __global__ void totals_kernel(const __grid_constant__ loss_params p) {
  __shared__ double shared[32];
  double tokens = 0, occupied = 0;
  for (int64_t q = threadIdx.x; q < p.sequences; q += blockDim.x) {
    const int valid = p.count[line_of(p, q) + p.args.experts];
    tokens += valid;
    occupied += valid > 0;
  }
  tokens = block_sum(tokens, shared);
  occupied = block_sum(occupied, shared);
  if (threadIdx.x == 0) p.total[0] = tokens, p.total[1] = occupied;
}

/* Sequence q. MOE_BALANCE_GLOBAL has one, hence one block that reads and writes the counts. */
__device__ __forceinline__ void make_slopes(const loss_params &p, int64_t q) {
  __shared__ double shared[32];
  const moe_router_loss_args &a = p.args;
  const int64_t experts = a.experts;
  const double *share = p.share + line_of(p, q);
  const int *count = p.count + line_of(p, q);
  float *slopes = a.slopes != nullptr ? a.slopes + q * (experts + 1) : nullptr;
  const bool global = p.router.balance == MOE_BALANCE_GLOBAL;
  const int valid = count[experts];
  const double scale = 1 / p.total[1] * p.router.balance_coeff * (double)experts / (double)valid;
  const int64_t tokens = global && valid > 0 ? a.global_counts[experts] + valid : valid;
  double loss = 0;
  for (int64_t e = threadIdx.x; e < experts; e += blockDim.x) {
    int64_t chosen = count[e];
    if (global && valid > 0) chosen = a.global_counts[e] += chosen;
    const double fraction = tokens > 0 ? (double)chosen / ((double)tokens * (double)a.topk) : 0;
    const double slope = valid > 0 ? scale * fraction : 0;
    loss += slope * share[e];
    if (slopes != nullptr) slopes[e] = (float)slope;
  }
  loss = block_sum(loss, shared);
  if (threadIdx.x != 0) return;
  p.part[q] = loss;
  if (global && valid > 0) a.global_counts[experts] = tokens;
  if (slopes != nullptr) slopes[experts] = valid > 0 ? (float)(2.0 * p.router.z_coeff / p.total[0]) : 0;
}

static __global__ void slopes_kernel(const __grid_constant__ loss_params p) {
  for (int64_t q = blockIdx.x; q < p.sequences; q += gridDim.x) make_slopes(p, q);
}

static __global__ void losses_kernel(const __grid_constant__ loss_params p) {
  __shared__ double shared[32];
  double balance = 0, squares = 0;
  for (int64_t q = threadIdx.x; q < p.sequences; q += blockDim.x) {
    balance += p.part[q];
    squares += p.share[line_of(p, q) + p.args.experts];
  }
  balance = block_sum(balance, shared);
  squares = block_sum(squares, shared);
  if (threadIdx.x != 0) return;
  p.args.losses[0] = (float)balance;
  p.args.losses[1] = p.total[0] > 0 ? (float)(p.router.z_coeff * squares / p.total[0]) : 0;
}

/* ---- host --------------------------------------------------------------------------------------------------------- */

size_t moe_cuda_router_loss_scratch(const moe_context *ctx, const moe_router_loss_args *args) {
  (void)ctx;
  const loss_params p = params_of(args);
  const size_t lines = (size_t)(p.sequences * p.chunks * (args->experts + 1));
  return lines * (sizeof(double) + sizeof(int)) + (size_t)(p.sequences + 2) * sizeof(double);
}

moe_status moe_cuda_router_loss(moe_context *ctx, const moe_router_loss_args *args, moe_stream stream) {
  const char *const op = "router_loss";
  const loss_params p = params_of(args);
  const int64_t units = moe_cuda_units(ctx, args->sm_limit), lines = p.sequences * p.chunks;
  const int warps = warps_of_block((size_t)ALIGN_UP(args->experts, 2) * 8);
  const struct cuda_grid each_chunk = {lines < units ? lines : units, 1, 1, warps * 32,
                                       chunk_bytes(args->experts, warps)},
                         each_sequence = {p.sequences < units ? p.sequences : units, 1, 1, 256, 0};
  TRY(launch(op, chunk_kernel, each_chunk, p, stream));
  TRY(launch(op, sequence_kernel, grid_of_warps(units, CEIL_DIV(p.sequences * (args->experts + 1), 32), 8), p,
             stream));
  TRY(launch(op, totals_kernel, {1, 1, 1, 1024, 0}, p, stream));
  TRY(launch(op, slopes_kernel, each_sequence, p, stream));
  if (args->losses == NULL) return MOE_OK;
  return launch(op, losses_kernel, {1, 1, 1, 1024, 0}, p, stream);
}

KERNELS(router_loss, (const void *)chunk_kernel, (const void *)sequence_kernel, (const void *)totals_kernel,
        (const void *)slopes_kernel, (const void *)losses_kernel)
