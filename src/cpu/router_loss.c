/* SPDX-License-Identifier: Apache-2.0
 *
 * What: the balancing loss, the z-loss, and the slopes from which route_backward takes their gradients.
 * Idea: sequences one after the other (the whole call is one, unless MOE_BALANCE_SEQUENCE); the tokens of
 * a sequence are cut into chunks, which add up on their own in double and are then added in order.
 * Invariant: the cut depends on the number of tokens only, so the result does not depend on the number of
 * threads. */
#include "cpu.h"

#include <string.h>

#include "score.h"

enum {
  MAX_CHUNKS = 32,
  MIN_CHUNK_TOKENS = 32
};

/* What one chunk adds up, followed by its two rows of scratch. */
struct chunk {
  double *share;   /* [E] sum over tokens of the normalised scores */
  double *squares; /* [1] sum of logsumexp^2 */
  int32_t *count;  /* [E] slots that chose the expert */
  float *z, *score;
};

static size_t chunk_bytes(int64_t experts) {
  return (size_t)ALIGN_UP(8 * (experts + 1) + 3 * 4 * experts, MOE_ALIGN);
}

static struct chunk chunk_at(const moe_router_loss_args *args, int64_t i) {
  const int64_t experts = args->experts;
  char *base = (char *)args->scratch + chunk_bytes(experts) * (size_t)i;
  double *share = (double *)base;
  int32_t *count = (int32_t *)(share + experts + 1);
  float *z = (float *)(count + experts);
  return (struct chunk){share, share + experts, count, z, z + experts};
}

size_t moe_cpu_router_loss_scratch(const moe_context *ctx, const moe_router_loss_args *args) {
  (void)ctx;
  return MAX_CHUNKS * chunk_bytes(args->experts);
}

static bool is_valid(const moe_router_loss_args *args, int64_t t) {
  return args->padding_mask == NULL || args->padding_mask[t] == 0;
}

static int64_t count_valid(const moe_router_loss_args *args, int64_t first, int64_t last) {
  int64_t valid = 0;
  for (int64_t t = first; t < last; t++) valid += is_valid(args, t);
  return valid;
}

static void add_token(const moe_router_loss_args *args, const struct chunk *c, int64_t t) {
  const moe_router_desc *router = args->router;
  const int64_t experts = args->experts;
  const bool elementwise = score_is_elementwise(router->score);
  score_logits(c->z, args->logits, args->logits_dtype, args->router_bias, t, experts);
  if (router->z_coeff != 0 || !elementwise) {
    const double logsumexp = score_softmax(c->score, c->z, experts);
    if (logsumexp != -INFINITY) *c->squares += logsumexp * logsumexp;
  }
  if (router->balance == MOE_BALANCE_NONE) return;
  double sum = 1;
  if (elementwise) {
    score_elementwise(router->score, c->score, c->z, experts);
    sum = score_sum(c->score, experts) + SCORE_FLOOR;
  }
  for (int64_t e = 0; e < experts; e++) c->share[e] += c->score[e] / sum;
  for (int64_t s = t * args->topk; s < (t + 1) * args->topk; s++)
    if (args->ids[s] >= 0 && args->ids[s] < experts) c->count[args->ids[s]]++;
}

static void add_chunk(const moe_router_loss_args *args, const struct chunk *sum, const struct chunk *c) {
  for (int64_t e = 0; e < args->experts; e++) {
    sum->share[e] += c->share[e];
    sum->count[e] += c->count[e];
  }
  *sum->squares += *c->squares;
}

/* The sums over tokens first .. last-1, in chunk 0. */
static struct chunk add_sequence(const moe_context *ctx, const moe_router_loss_args *args, int64_t first,
                                 int64_t last) {
  const int64_t least = CEIL_DIV(last - first, MAX_CHUNKS);
  const int64_t size = least > MIN_CHUNK_TOKENS ? least : MIN_CHUNK_TOKENS;
  const int64_t chunks = last > first ? CEIL_DIV(last - first, size) : 1;
#pragma omp parallel for schedule(static) num_threads(ctx->units) if (chunks > 1)
  for (int64_t i = 0; i < chunks; i++) {
    const struct chunk c = chunk_at(args, i);
    const int64_t begin = first + i * size, end = begin + size < last ? begin + size : last;
    memset(c.share, 0, chunk_bytes(args->experts));
    for (int64_t t = begin; t < end; t++)
      if (is_valid(args, t)) add_token(args, &c, t);
  }
  const struct chunk sum = chunk_at(args, 0);
  for (int64_t i = 1; i < chunks; i++) {
    const struct chunk c = chunk_at(args, i);
    add_chunk(args, &sum, &c);
  }
  return sum;
}

static void add_to_global(const moe_router_loss_args *args, const struct chunk *sum, int64_t valid) {
  for (int64_t e = 0; e < args->experts; e++) args->global_counts[e] += sum->count[e];
  args->global_counts[args->experts] += valid;
}

/* Share of the slots that chose e, in this sequence or, for MOE_BALANCE_GLOBAL, in all calls so far. */
static double fraction(const moe_router_loss_args *args, const struct chunk *sum, int64_t valid, int64_t e) {
  const bool global = args->router->balance == MOE_BALANCE_GLOBAL;
  const int64_t chosen = global ? args->global_counts[e] : sum->count[e];
  const int64_t tokens = global ? args->global_counts[args->experts] : valid;
  return tokens > 0 ? (double)chosen / ((double)tokens * (double)args->topk) : 0;
}

/* Balancing loss of a sequence that has `valid` > 0 tokens and the given weight; writes its slopes. */
static double balance_sequence(const moe_router_loss_args *args, const struct chunk *sum, int64_t valid,
                               double weight, float *slopes) {
  const double scale = weight * args->router->balance_coeff * (double)args->experts / (double)valid;
  double loss = 0;
  for (int64_t e = 0; e < args->experts; e++) {
    const double slope = scale * fraction(args, sum, valid, e);
    loss += slope * sum->share[e];
    if (slopes != NULL) slopes[e] = (float)slope;
  }
  return loss;
}

moe_status moe_cpu_router_loss(moe_context *ctx, const moe_router_loss_args *args, moe_stream stream) {
  (void)stream;
  const int64_t tokens = args->tokens, row = args->experts + 1;
  const moe_router_desc *router = args->router;
  const int64_t length = router->balance == MOE_BALANCE_SEQUENCE ? router->sequence_tokens : tokens;
  const int64_t sequences = tokens > length ? CEIL_DIV(tokens, length) : 1;
  const int64_t total = count_valid(args, 0, tokens);
  double occupied = 0, balance = 0, squares = 0;
  for (int64_t q = 0; q < sequences; q++) {
    const int64_t first = q * length, last = first + length < tokens ? first + length : tokens;
    occupied += count_valid(args, first, last) > 0;
  }
  for (int64_t q = 0; q < sequences; q++) {
    const int64_t first = q * length, last = first + length < tokens ? first + length : tokens;
    const int64_t valid = count_valid(args, first, last);
    float *slopes = args->slopes != NULL ? args->slopes + q * row : NULL;
    if (slopes != NULL) memset(slopes, 0, (size_t)row * sizeof *slopes);
    if (valid == 0) continue;
    const struct chunk sum = add_sequence(ctx, args, first, last);
    if (router->balance == MOE_BALANCE_GLOBAL) add_to_global(args, &sum, valid);
    balance += balance_sequence(args, &sum, valid, 1 / occupied, slopes);
    squares += *sum.squares;
    if (slopes != NULL) slopes[args->experts] = (float)(2.0 * router->z_coeff / (double)total);
  }
  if (args->losses != NULL) {
    args->losses[0] = (float)balance;
    args->losses[1] = total > 0 ? (float)(router->z_coeff * squares / (double)total) : 0;
  }
  return MOE_OK;
}
