/* SPDX-License-Identifier: Apache-2.0
 *
 * What: the two router losses with their slopes, the bias update and the load figures, against double
 * references.
 * Idea: the reference works in the order of the definition, one loop over all tokens a quantity, and has
 * no chunks; its slopes are the coefficient times fractions counted anew. Losses must be the same bits on
 * any number of threads. */
#include "router_reference.h"

#include <limits.h>

static int is_valid(const struct routing *p, int64_t t) { return p->mask == NULL || p->mask[t] == 0; }

static int64_t length_of(const struct routing *p) {
  return p->router.balance == MOE_BALANCE_SEQUENCE ? p->router.sequence_tokens : p->tokens;
}

static int64_t sequences_of(const struct routing *p) {
  return p->tokens > length_of(p) ? (p->tokens + length_of(p) - 1) / length_of(p) : 1;
}

struct reference {
  double losses[2], *slopes; /* [S,E+1] */
  int64_t *global;           /* [E+1], before the call and then after */
};

/* Adds the loss of tokens first .. last-1 as one sequence of `occupied`; 0 if none of them is valid. */
static void add_sequence(const struct routing *p, const int32_t *ids, int64_t q, double occupied,
                         struct reference *ref) {
  const int64_t experts = p->experts, first = q * length_of(p);
  const int64_t last = first + length_of(p) < p->tokens ? first + length_of(p) : p->tokens;
  double *share = calloc((size_t)experts, sizeof *share), *mean = calloc((size_t)experts, sizeof *mean);
  double *z = malloc((size_t)experts * sizeof *z), *count = calloc((size_t)experts + 1, sizeof *count);
  for (int64_t t = first; t < last; t++) {
    if (!is_valid(p, t)) continue;
    count[experts]++;
    for (int64_t s = t * p->topk; s < (t + 1) * p->topk; s++)
      if (ref_valid(p, ids[s])) count[ids[s]]++;
    for (int64_t e = 0; e < experts; e++) z[e] = ref_logit(p, t, e);
    ref_shares(p, z, share);
    for (int64_t e = 0; e < experts; e++) mean[e] += share[e];
  }
  const double valid = count[experts];
  if (p->router.balance == MOE_BALANCE_GLOBAL)
    for (int64_t e = 0; e <= experts; e++) count[e] = (double)(ref->global[e] += (int64_t)count[e]);
  for (int64_t e = 0; e < experts && valid > 0 && p->router.balance; e++) {
    const double f = count[e] / ((double)p->topk * count[experts]);
    ref->losses[0] += p->router.balance_coeff * (double)experts * f * mean[e] / valid / occupied;
    ref->slopes[q * (experts + 1) + e] = p->router.balance_coeff * (double)experts * f / valid / occupied;
  }
  free(share), free(mean), free(z), free(count);
}

static struct reference make_reference(const struct routing *p, const int32_t *ids, const int64_t *global) {
  const int64_t sequences = sequences_of(p), row = p->experts + 1;
  struct reference ref = {.slopes = calloc((size_t)(sequences * row), sizeof(double))};
  ref.global = malloc((size_t)row * sizeof *ref.global);
  memcpy(ref.global, global, (size_t)row * sizeof *ref.global);
  double valid = 0, occupied = 0, *z = malloc((size_t)p->experts * sizeof *z);
  uint8_t *has_valid = calloc((size_t)sequences, 1);
  for (int64_t t = 0; t < p->tokens; t++)
    if (is_valid(p, t)) valid++, has_valid[t / length_of(p)] = 1;
  for (int64_t q = 0; q < sequences; q++) occupied += has_valid[q];
  for (int64_t q = 0; q < sequences; q++) add_sequence(p, ids, q, occupied, &ref);
  for (int64_t q = 0; q < sequences; q++)
    if (has_valid[q]) ref.slopes[q * row + p->experts] = 2 * (double)p->router.z_coeff / valid;
  for (int64_t t = 0; t < p->tokens; t++) {
    if (!is_valid(p, t)) continue;
    for (int64_t e = 0; e < p->experts; e++) z[e] = ref_logit(p, t, e);
    const double logsumexp = ref_softmax(z, z, p->experts);
    if (logsumexp != -INFINITY) ref.losses[1] += p->router.z_coeff * logsumexp * logsumexp / valid;
  }
  free(z), free(has_valid);
  return ref;
}

static int near(double got, double want) { return fabs(got - want) <= 1e-6 * fabs(want) + 1e-35; }

static void check_results(const struct routing *p, const struct reference *ref,
                          const moe_router_loss_args *args) {
  EXPECT(near(args->losses[0], ref->losses[0]), "balance %d: %.9g, want %.9g", (int)p->router.balance,
         args->losses[0], ref->losses[0]);
  EXPECT(fabs(args->losses[1] - ref->losses[1]) <= 1e-6 * ref->losses[1] + 1e-8, "z-loss: %.9g, want %.9g",
         args->losses[1], ref->losses[1]);
  for (int64_t i = 0; i < sequences_of(p) * (p->experts + 1); i++)
    EXPECT(near(args->slopes[i], ref->slopes[i]), "slope %d: %.9g, want %.9g", (int)i, args->slopes[i],
           ref->slopes[i]);
  for (int64_t e = 0; e <= p->experts; e++)
    EXPECT(args->global_counts[e] == ref->global[e], "global count %d: %d", (int)e,
           (int)args->global_counts[e]);
}

/* Runs on 1 thread and on several, with and without optional outputs. */
static void check(const struct routing *p, const int32_t *ids, uint64_t *seed) {
  const size_t row = (size_t)p->experts + 1, slope_bytes = (size_t)sequences_of(p) * row * 4;
  float *losses = guarded(8), *slopes = guarded(slope_bytes), first[2], *first_slopes = malloc(slope_bytes);
  int64_t *global = guarded(row * 8), *before = malloc(row * 8);
  for (size_t e = 0; e < row; e++) before[e] = (int64_t)(test_random(seed) % 1000);
  struct reference ref = make_reference(p, ids, before);
  for (int threads = 1; threads <= 4; threads++) {
    memcpy(global, before, row * 8);
    moe_router_loss_args args = {
        .tokens = p->tokens, .experts = p->experts, .topk = p->topk, .router = &p->router};
    args.logits = p->logits, args.logits_dtype = p->dtype, args.router_bias = p->router_bias, args.ids = ids;
    args.padding_mask = p->mask, args.global_counts = global, args.losses = losses, args.slopes = slopes;
    EXPECT(call_router_loss(&args, threads) == MOE_OK, "status");
    if (threads == 1)
      check_results(p, &ref, &args), memcpy(first, losses, 8), memcpy(first_slopes, slopes, slope_bytes);
    EXPECT(memcmp(first, losses, 8) == 0, "losses differ on %d threads", threads);
    EXPECT(memcmp(first_slopes, slopes, slope_bytes) == 0, "slopes differ on %d threads", threads);
    args.losses = NULL, args.slopes = NULL;
    EXPECT(call_router_loss(&args, threads) == MOE_OK, "status");
  }
  guarded_free(losses), guarded_free(slopes), guarded_free(global);
  free(before), free(first_slopes), free(ref.slopes), free(ref.global);
}

TEST(losses_and_slopes_follow_their_definitions) {
  static const int64_t EXPERTS[] = {1, 2, 8, 31, 160}, TOKENS[] = {0, 1, 7, 33, 200, 1100},
                       LENGTHS[] = {1, 5, 64, 5000};
  uint64_t seed = 40;
  int count = 0;
  for (int e = 0; e < 5; e++)
    for (int t = 0; t < 6; t++)
      for (int balance = 0; balance < 4; balance++)
        for (int score = 0; score < 4; score++, count++) {
          struct routing p = make_routing(TOKENS[t], EXPERTS[e], EXPERTS[e] < 4 ? 1 : 4, (moe_score)score,
                                          (moe_dtype)(1 + count % 3), 3, &seed);
          p.router.balance = (moe_balance)balance;
          p.router.balance_coeff = balance ? 0.01f : 0;
          p.router.z_coeff = count % 3 ? 0.001f : 0;
          p.router.sequence_tokens = balance == MOE_BALANCE_SEQUENCE ? LENGTHS[(count / 16 + score) % 4] : 0;
          if (count & 1) p.router_bias = random_array(MOE_FP32, p.experts, 1, &seed);
          if (count % 5) p.mask = guarded((size_t)p.tokens);
          for (int64_t i = 0; i < p.tokens && p.mask;
               i++) /* whole runs, so that sequences without a token occur */
            p.mask[i] = count % 5 == 4 || (i / 7 + count) % 3 == 0;
          struct routed r = call_routing(&p, 1);
          for (int64_t s = 0; s < p.tokens * p.topk; s++)
            if (test_random(&seed) % 10 == 0)
              r.ids[s] = test_random(&seed) & 1 ? INT_MIN : (int32_t)p.experts;
          check(&p, r.ids, &seed);
          free_routed(&r), free_routing(&p);
        }
}

TEST(tokens_without_a_logit_count_but_add_nothing) {
  uint64_t seed = 41;
  for (int score = 0; score < 4; score++)
    for (int balance = 1; balance < 4; balance++) {
      struct routing p = make_routing(40, 8, 2, (moe_score)score, MOE_FP32, 3, &seed);
      p.router.balance = (moe_balance)balance, p.router.balance_coeff = 1, p.router.z_coeff = 1;
      p.router.sequence_tokens = balance == MOE_BALANCE_SEQUENCE ? 10 : 0;
      for (int i = 0; i < 40 * 8; i++)
        if (i / 8 % 3 == 0 || i / 8 >= 30) ((float *)p.logits)[i] = i & 1 ? NAN : -INFINITY;
      struct routed r = call_routing(&p, 1);
      check(&p, r.ids, &seed);
      free_routed(&r), free_routing(&p);
    }
}

/* Even routing of even scores gives a balancing loss of exactly the coefficient, Switch Transformer's
 * minimum. */
TEST(perfect_balance_costs_the_coefficient) {
  uint64_t seed = 42;
  struct routing p = make_routing(16, 16, 1, MOE_SCORE_SOFTMAX, MOE_FP32, 0, &seed);
  p.router.balance = MOE_BALANCE_BATCH, p.router.balance_coeff = 0.5f;
  int32_t ids[16];
  float losses[2];
  for (int t = 0; t < 16; t++) ids[t] = t;
  moe_router_loss_args args = {
      .tokens = 16, .experts = 16, .topk = 1, .router = &p.router, .logits = p.logits};
  args.logits_dtype = MOE_FP32, args.ids = ids, args.losses = losses;
  EXPECT(call_router_loss(&args, 1) == MOE_OK, "status");
  EXPECT(losses[0] == 0.5f && losses[1] == 0, "losses %g %g", losses[0], losses[1]);
  free_routing(&p);
}

TEST(bias_moves_against_the_load) {
  uint64_t seed = 43;
  for (int64_t experts = 1; experts < 300; experts = experts * 2 + 1) {
    int32_t *counts = guarded((size_t)experts * 4);
    float *bias = random_array(MOE_FP32, experts, 1, &seed), *before = malloc((size_t)experts * 4);
    memcpy(before, bias, (size_t)experts * 4);
    double mean = 0;
    for (int64_t e = 0; e < experts; e++) {
      counts[e] = (int32_t)(test_random(&seed) % (e % 2 ? 3 : 2000000000));
      mean += (double)counts[e] / (double)experts;
    }
    if (experts == 3) counts[0] = 1, counts[1] = 2, counts[2] = 3, mean = 2;
    moe_bias_update_args args = {.experts = experts, .counts = counts, .rate = 0.001f, .bias = bias};
    EXPECT(call_bias_update(&args, 1) == MOE_OK, "status");
    for (int64_t e = 0; e < experts; e++) {
      const int sign = fabs(mean - counts[e]) < 1e-6 * mean ? 0 : mean > counts[e] ? 1 : -1;
      EXPECT(bias[e] == before[e] + 0.001f * (float)sign, "expert %d: %.9g from %.9g", (int)e, bias[e],
             before[e]);
    }
    guarded_free(counts), guarded_free(bias), free(before);
  }
}

static moe_load_summary load_of(const int32_t *counts, int64_t experts) {
  moe_load_summary *load = guarded(sizeof *load);
  moe_load_stats_args args = {.experts = experts, .counts = counts, .load = load};
  EXPECT(call_load_stats(&args, 1) == MOE_OK, "status");
  const moe_load_summary copy = *load;
  guarded_free(load);
  return copy;
}

TEST(load_figures) {
  static const int32_t EVEN[] = {5, 5, 5, 5}, NONE[] = {0, 0, 0}, ONE[] = {0, 12, 0, 0},
                       SOME[] = {1, -7, 3, 2, INT_MIN};
  moe_load_summary load = load_of(EVEN, 4);
  EXPECT(load.total == 20 && load.max == 5 && load.mean == 5 && load.cv == 0 && load.max_over_mean == 1,
         "even");
  EXPECT(near(load.entropy, log(4)), "entropy %g", load.entropy);
  load = load_of(NONE, 3);
  EXPECT(load.total == 0 && load.max == 0 && load.mean == 0 && load.cv == 0 && load.max_over_mean == 0,
         "none");
  EXPECT(load.entropy == 0, "entropy of nothing %g", load.entropy);
  load = load_of(ONE, 4);
  EXPECT(load.total == 12 && load.max == 12 && load.mean == 3 && load.max_over_mean == 4 && load.entropy == 0,
         "one");
  EXPECT(near(load.cv, sqrt(3)), "cv %g", load.cv);
  load = load_of(SOME, 5);
  EXPECT(load.total == 6 && load.max == 3 && near(load.mean, 1.2) && near(load.max_over_mean, 2.5),
         "negative is 0");
  EXPECT(near(load.cv, sqrt((0.04 + 1.44 + 3.24 + 0.64 + 1.44) / 5) / 1.2), "cv %g", load.cv);
  EXPECT(near(load.entropy, log(6) / 6 + log(2) / 2 + log(3) / 3), "entropy %g", load.entropy);
}

TEST_MAIN()
