/* SPDX-License-Identifier: Apache-2.0
 *
 * The choice of k experts a token and their weights, and the gradient of the logits. The formulas are in moeblas.h, their
 * order of operations in src/cpu/route.c.
 *
 * Up to 512 experts a warp has one token in its registers to choose (route_small.cuh; 32 slots, no groups, no given ids), and
 * some tokens at once for their gradients (route_small_backward.cuh). Else it has one token, whose logits, scores and keys lie
 * in shared memory, element e with lane e % 32. The k best keys come one by one: a lane remembers the best of its own elements
 * that is not taken, the warp takes the best of those, and the lane that had it looks through its elements again. Keys are
 * compared as integers, key above id, so that equal keys go to the lower id; a key that is NaN is below all.
 * Invariant    ids and counts are those of the CPU to the bit, given equal keys (log1pf of MOE_SCORE_SQRT_SOFTPLUS may differ
 *              in the last place).
 * Floor        reading the logits once; for E = 256, k = 8 the k rounds of about 100 cycles dominate.
 * Limits       E <= 4096: 64 KiB of shared memory a warp. */
#include "launch.h"
#include "route_small.cuh"
#include "route_small_backward.cuh"
#include "vector.cuh"

/* A warp's part of shared memory. */
struct warp_memory {
  double *dslot; /* [MOE_MAX_TOPK] */
  float *slot;   /* [MOE_MAX_TOPK] */
  int *id;       /* [MOE_MAX_TOPK] */
  float *z, *score, *key,
      *group_key; /* [E] each; backward has its gradient in key; group_key only with groups */
};

static const size_t BLOCK_BYTES = 200 * 1024; /* of shared memory */

static size_t warp_bytes(int64_t experts, int rows) {
  return MOE_MAX_TOPK * 16 + (size_t)ALIGN_UP(experts, 2) * (size_t)rows * sizeof(float);
}

__device__ __forceinline__ warp_memory memory_of(int experts, int rows) {
  extern __shared__ double shared[];
  const int width = (experts + 1) / 2 * 2, warp_doubles = MOE_MAX_TOPK * 2 + width * rows / 2;
  double *base = shared + threadIdx.x / 32 * warp_doubles;
  float *slot = reinterpret_cast<float *>(base + MOE_MAX_TOPK);
  float *z = slot + 2 * MOE_MAX_TOPK;
  return {base,          slot,         reinterpret_cast<int *>(slot + MOE_MAX_TOPK), z, z + width,
          z + 2 * width, z + 3 * width};
}

/* ---- the best keys ------------------------------------------------------------------------------------------------ */

/* Orders as (key, lower id first); 0 for NaN, which is below all. -0 and +0 are equal. */
__device__ __forceinline__ uint64_t ranked(float key, int id) {
  if (key != key) return 0;
  const uint32_t bits = moe_bits_of(key + 0.0f), ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
  return (uint64_t)ordered << 32 | (0xffffffffu - (uint32_t)id);
}

/* The best below `bound` of elements first, first + step, ... */
__device__ __forceinline__ uint64_t best_below(const float *key, int first, int last, int step,
                                               uint64_t bound) {
  uint64_t best = 0;
  for (int e = first; e < last; e += step) {
    const uint64_t rank = ranked(key[e], e);
    if (rank < bound && rank > best) best = rank;
  }
  return best;
}

/* ids[0..count) = the best of n keys, best first; returns the rank of the last. `ids` may be NULL. */
__device__ __forceinline__ uint64_t warp_select(const float *key, int n, int count, int *ids) {
  uint64_t mine = best_below(key, lane_id(), n, 32, ~0ull), taken = 0;
  for (int j = 0; j < count; j++) {
    const uint32_t high = __reduce_max_sync(WARP, (uint32_t)(mine >> 32));
    const uint32_t low = __reduce_max_sync(WARP, (uint32_t)(mine >> 32) == high ? (uint32_t)mine : 0u);
    taken = (uint64_t)high << 32 | low;
    if (ids != nullptr && lane_id() == 0) ids[j] = (int)(0xffffffffu - low);
    if (mine == taken) mine = best_below(key, lane_id(), n, 32, taken);
  }
  __syncwarp();
  return taken;
}

/* ---- route -------------------------------------------------------------------------------------------------------- */

/* A key that is NaN (an infinite bias on an infinite score) ranks as -inf, like an expert whose logit is -inf. */
__device__ __forceinline__ void make_keys(const route_params &p, const warp_memory &w) {
  const float *bias = p.args.correction_bias;
  const bool by_logit = p.router.score == MOE_SCORE_TOPK_SOFTMAX ||
                        (p.router.score == MOE_SCORE_SOFTMAX && p.router.groups <= 1 && bias == nullptr);
  const float *value = by_logit ? w.z : w.score;
  for (int e = lane_id(); e < (int)p.args.experts; e += 32) {
    const float key = bias != nullptr ? value[e] + bias[e] : value[e];
    w.key[e] = key != key || w.z[e] == -INFINITY ? -INFINITY : key;
  }
  __syncwarp();
}

/* How many experts of a group make its key. */
__device__ __forceinline__ int64_t experts_of_group_key(const route_params &p, int64_t size) {
  int64_t wanted = 1;
  if (p.router.group_score == MOE_GROUP_TOP2_SUM) wanted = 2;
  if (p.router.group_score == MOE_GROUP_TOPK_SUM) wanted = p.args.topk / p.router.topk_groups;
  return wanted < 1 ? 1 : wanted > size ? size : wanted;
}

/* A lane has whole groups. Experts of the groups that are not chosen get the key NaN. */
__device__ __forceinline__ void drop_groups(const route_params &p, const warp_memory &w) {
  const int groups = (int)p.router.groups, size = (int)p.args.experts / groups;
  const int64_t wanted = experts_of_group_key(p, size);
  for (int g = lane_id(); g < groups; g += 32) {
    float sum = 0;
    uint64_t bound = ~0ull;
    for (int64_t i = 0; i < wanted; i++) {
      bound = best_below(w.key, g * size, (g + 1) * size, 1, bound);
      sum += w.key[0xffffffffu - (uint32_t)bound];
    }
    w.group_key[g] = sum != sum ? -INFINITY : sum;
  }
  __syncwarp();
  const uint64_t last = warp_select(w.group_key, groups, (int)p.router.topk_groups, nullptr);
  for (int e = lane_id(); e < groups * size; e += 32)
    if (ranked(w.group_key[e / size], e / size) < last) w.key[e] = NAN;
  __syncwarp();
}

__device__ __forceinline__ void choose(const route_params &p, const warp_memory &w) {
  make_keys(p, w);
  if (p.router.groups > 1) drop_groups(p, w);
  warp_select(w.key, (int)p.args.experts, (int)p.args.topk, w.id);
}

__device__ __forceinline__ void route_token(const route_params &p, int64_t t, const warp_memory &w) {
  const moe_route_args &a = p.args;
  const int experts = (int)a.experts, topk = (int)a.topk;
  warp_logits(w.z, a.logits, a.logits_dtype, a.router_bias, t, experts);
  if (p.router.score == MOE_SCORE_SOFTMAX) warp_softmax(w.score, w.z, experts);
  if (is_elementwise(p.router.score)) warp_elementwise(p.router.score, w.score, w.z, experts);
  if (a.given_ids == nullptr) {
    choose(p, w);
  } else {
    for (int j = lane_id(); j < topk; j += 32) w.id[j] = a.given_ids[t * topk + j];
    __syncwarp();
  }
  const double sum = warp_slot_scores(p.router, w.id, topk, experts, w.z, w.score, w.slot);
  const double factor = p.router.scale / (p.router.renormalize ? sum + p.router.renorm_epsilon : 1.0);
  for (int j = lane_id(); j < topk; j += 32) {
    const int id = w.id[j];
    a.ids[t * topk + j] = id;
    a.weights[t * topk + j] = (float)(w.slot[j] * factor);
    if (a.counts != nullptr && id >= 0 && id < experts) atomicAdd(&a.counts[id], 1);
  }
  __syncwarp();
}

static __global__ void __launch_bounds__(1024, 1) route_kernel(const __grid_constant__ route_params p) {
  const moe_route_args &a = p.args;
  const warp_memory w = memory_of((int)a.experts, p.router.groups > 1 ? 4 : 3);
  const int warps = blockDim.x / 32;
  for (int64_t t = (int64_t)blockIdx.x * warps + threadIdx.x / 32; t < a.tokens;
       t += (int64_t)gridDim.x * warps) {
    if (!is_masked(a.padding_mask, t)) {
      route_token(p, t, w);
      continue;
    }
    for (int64_t j = lane_id(); j < a.topk; j += 32)
      a.ids[t * a.topk + j] = -1, a.weights[t * a.topk + j] = 0;
  }
}

/* ---- host --------------------------------------------------------------------------------------------------------- */

/* One block a multiprocessor, with as many warps as its shared memory holds, `bytes` each. */
static struct cuda_grid warp_grid(int64_t units, int64_t work, size_t bytes) {
  const size_t fit = BLOCK_BYTES / bytes;
  struct cuda_grid grid = grid_of_warps(units, work, fit < 32 ? (int)fit : 32);
  grid.shared = bytes * (size_t)(grid.threads / 32);
  return grid;
}

size_t moe_cuda_route_scratch(const moe_context *ctx, const moe_route_args *args) {
  (void)ctx, (void)args;
  return 0;
}

moe_status moe_cuda_route(moe_context *ctx, const moe_route_args *args, moe_stream stream) {
  const int64_t units = moe_cuda_units(ctx, args->sm_limit), experts = args->experts;
  moe_zero_args zero = {};
  zero.sm_limit = args->sm_limit, zero.data = args->counts, zero.bytes = (size_t)experts * sizeof(int32_t);
  const route_params p = {*args, *args->router};
  const bool groups = args->router->groups > 1;
  if (args->counts != NULL) TRY(moe_cuda_zero(ctx, &zero, stream));
  if (experts > 512 || args->topk > 32 || groups || args->given_ids != NULL)
    return launch("route", route_kernel, warp_grid(units, args->tokens, warp_bytes(experts, groups ? 4 : 3)),
                  p, stream);
  static void (*const small[][5])(route_params) = {{ROUTE_SMALL(void (*)(route_params), MOE_SCORE_SOFTMAX)},
                                                   {ROUTE_SMALL(void (*)(route_params), MOE_SCORE_TOPK_SOFTMAX)},
                                                   {ROUTE_SMALL(void (*)(route_params), MOE_SCORE_SIGMOID)},
                                                   {ROUTE_SMALL(void (*)(route_params), MOE_SCORE_SQRT_SOFTPLUS)}};
  int size = 0;
  while (experts > 32 << size) size++;
  return launch("route", small[args->router->score][size],
                grid_of_warps(units, args->tokens, route_small_warps(1 << size)), p, stream);
}

/* ---- backward ----------------------------------------------------------------------------------------------------- */

/* dslot[j], the gradient of the slots' scores from that of their weights, through scale and renormalisation. */
__device__ __forceinline__ void slot_gradients(const route_backward_params &p, int64_t t,
                                               const warp_memory &w, double sum) {
  const moe_route_backward_args &a = p.args;
  const int topk = (int)a.topk;
  const double divisor = p.router.renormalize ? sum + p.router.renorm_epsilon : 1.0;
  for (int j = lane_id(); j < topk; j += 32) {
    const int64_t s = t * topk + j;
    const bool valid = w.id[j] >= 0 && w.id[j] < (int)a.experts;
    const bool kept = valid && (a.slot_row == nullptr || a.slot_row[s] >= 0);
    w.dslot[j] = kept ? (double)a.dweights[s] * p.router.scale : 0;
  }
  __syncwarp();
  double mean = 0;
  for (int j = 0; j < topk; j++) mean += w.dslot[j] * w.slot[j] / divisor;
  __syncwarp();
  for (int j = lane_id(); j < topk; j += 32)
    w.dslot[j] = (w.dslot[j] - (p.router.renormalize ? mean : 0)) / divisor;
  __syncwarp();
}

/* d += gradient of all scores from the balancing loss; slope[e] is its derivative by the normalised score. */
__device__ __forceinline__ void add_balance(const route_backward_params &p, const float *slope,
                                            const warp_memory &w) {
  const int experts = (int)p.args.experts;
  const double scale = loss_gradient(p.args, 0);
  double mean = 0, divisor = 1;
  if (is_elementwise(p.router.score)) {
    divisor = warp_sum(w.score, experts) + SHARE_FLOOR;
    mean = warp_dot(slope, w.score, experts) / divisor;
  }
  for (int e = lane_id(); e < experts; e += 32) w.key[e] += (float)(scale * (slope[e] - mean) / divisor);
  __syncwarp();
}

/* From the gradient of the scores to that of the logits, in place. */
__device__ __forceinline__ void through_score(const route_backward_params &p, const warp_memory &w) {
  const int experts = (int)p.args.experts;
  const bool elementwise = is_elementwise(p.router.score);
  const double mean = elementwise ? 0 : warp_dot(w.key, w.score, experts);
  __syncwarp();
  for (int e = lane_id(); e < experts; e += 32)
    w.key[e] = elementwise ? w.key[e] * slope_of_score(p.router.score, w.z[e], w.score[e])
                           : (float)(w.score[e] * (w.key[e] - mean));
  __syncwarp();
}

/* One lane adds to the experts of the slots, as ids may be equal. `mean` 0 and `factors` NULL: dslot itself. */
__device__ __forceinline__ void add_slots(const warp_memory &w, int topk, int experts, const float *factors,
                                          double mean, float *d) {
  for (int j = 0; j < topk && lane_id() == 0; j++) {
    if (w.id[j] < 0 || w.id[j] >= experts) continue;
    if (factors == nullptr)
      d[w.id[j]] += (float)w.dslot[j];
    else if (factors[j] > 0)
      d[w.id[j]] += (float)(factors[j] * (w.dslot[j] - mean));
  }
  __syncwarp();
}

/* d += the gradient of the logits of the slots, whose softmax w.slot is. */
__device__ __forceinline__ void through_slot_softmax(const warp_memory &w, int topk, int experts) {
  double mean = 0;
  for (int j = 0; j < topk; j++) mean += w.slot[j] * w.dslot[j];
  add_slots(w, topk, experts, w.slot, mean, w.key);
}

/* Leaves the gradient in w.key. */
__device__ __forceinline__ void backward_token(const route_backward_params &p, int64_t t,
                                               const warp_memory &w) {
  const moe_route_backward_args &a = p.args;
  const int experts = (int)a.experts, topk = (int)a.topk;
  const bool over_slots = p.router.score == MOE_SCORE_TOPK_SOFTMAX,
             elementwise = is_elementwise(p.router.score);
  const int64_t sequence = p.router.balance == MOE_BALANCE_SEQUENCE ? t / p.router.sequence_tokens : 0;
  const float *slopes = a.slopes != nullptr ? a.slopes + sequence * (experts + 1) : nullptr;
  double logsumexp = -INFINITY;

  for (int e = lane_id(); e < experts; e += 32) w.key[e] = 0;
  for (int j = lane_id(); j < topk; j += 32) w.id[j] = a.ids[t * topk + j];
  warp_logits(w.z, a.logits, a.logits_dtype, a.router_bias, t, experts);
  if (elementwise)
    warp_elementwise(p.router.score, w.score, w.z, experts);
  else
    logsumexp = warp_softmax(w.score, w.z, experts);
  if (a.dweights != nullptr) {
    const double sum = warp_slot_scores(p.router, w.id, topk, experts, w.z, w.score, w.slot);
    slot_gradients(p, t, w, sum);
    if (!over_slots) add_slots(w, topk, experts, nullptr, 0, w.key);
  }
  if (slopes != nullptr) add_balance(p, slopes, w);
  through_score(p, w);
  if (a.dweights != nullptr && over_slots) through_slot_softmax(w, topk, experts);
  if (slopes != nullptr && slopes[experts] != 0) {
    if (elementwise) logsumexp = warp_softmax(w.score, w.z, experts);
    const double slope = logsumexp == -INFINITY ? 0 : loss_gradient(a, 1) * slopes[experts] * logsumexp;
    for (int e = lane_id(); e < experts; e += 32) w.key[e] += (float)(slope * w.score[e]);
  }
}

static __global__ void __launch_bounds__(1024, 1)
    route_backward_kernel(const __grid_constant__ route_backward_params p) {
  const moe_route_backward_args &a = p.args;
  const int experts = (int)a.experts, warps = blockDim.x / 32;
  const warp_memory w = memory_of(experts, 3);
  for (int64_t t = (int64_t)blockIdx.x * warps + threadIdx.x / 32; t < a.tokens;
       t += (int64_t)gridDim.x * warps) {
    const bool masked = is_masked(a.padding_mask, t);
    if (!masked) backward_token(p, t, w);
    for (int e = lane_id(); e < experts; e += 32)
      moe_store(a.dlogits, a.dlogits_dtype, t * experts + e, masked || w.z[e] == -INFINITY ? 0 : w.key[e]);
    __syncwarp();
  }
}

template <int LANES>
static __global__ void __launch_bounds__(1024, 1)
    route_small_backward_kernel(const __grid_constant__ route_backward_params p) {
  const gradient_memory memory = gradient_memory_of<LANES>((int)p.args.topk);
  const int64_t tokens = 32 / LANES; /* of a warp */
  for (int64_t t = grid_thread() / 32 * tokens; t < p.args.tokens; t += grid_threads() / 32 * tokens) {
    token_gradients<LANES>(p, t + lane_id() / LANES, memory);
    write_lines<LANES>(p.args, t, memory);
  }
}

template <int LANES>
static moe_status route_small_backward(int64_t units, const route_backward_params &p, moe_stream stream) {
  const size_t bytes = (size_t)gradient_warp_words(LANES, (int)p.args.topk) * sizeof(float);
  const struct cuda_grid grid = warp_grid(units, CEIL_DIV(p.args.tokens, 32 / LANES), bytes);
  return launch("route_backward", route_small_backward_kernel<LANES>, grid, p, stream);
}

size_t moe_cuda_route_backward_scratch(const moe_context *ctx, const moe_route_backward_args *args) {
  (void)ctx, (void)args;
  return 0;
}

moe_status moe_cuda_route_backward(moe_context *ctx, const moe_route_backward_args *args, moe_stream stream) {
  route_backward_params p = {*args, *args->router};
  if (p.args.loss_scale == 0) p.args.loss_scale = 1;
  const int64_t units = moe_cuda_units(ctx, args->sm_limit), experts = args->experts;
  if (experts <= 4 * LINE) return route_small_backward<4>(units, p, stream);
  if (experts <= 8 * LINE) return route_small_backward<8>(units, p, stream);
  if (experts <= 16 * LINE) return route_small_backward<16>(units, p, stream);
  if (experts <= 32 * LINE) return route_small_backward<32>(units, p, stream);
  return launch("route_backward", route_backward_kernel,
                warp_grid(units, args->tokens, warp_bytes(experts, 3)), p, stream);
}

KERNELS(route, ROUTE_SMALL(const void *, MOE_SCORE_SOFTMAX), ROUTE_SMALL(const void *, MOE_SCORE_TOPK_SOFTMAX),
        ROUTE_SMALL(const void *, MOE_SCORE_SIGMOID), ROUTE_SMALL(const void *, MOE_SCORE_SQRT_SOFTPLUS),
        (const void *)route_kernel,
        (const void *)route_small_backward_kernel<4>, (const void *)route_small_backward_kernel<8>,
        (const void *)route_small_backward_kernel<16>, (const void *)route_small_backward_kernel<32>,
        (const void *)route_backward_kernel)
