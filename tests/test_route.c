/* SPDX-License-Identifier: Apache-2.0
 *
 * What: moe_cpu_route: the choice, the weights, the counts.
 * Idea: the choice is not recomputed but judged. Keys are computed in double; chosen experts must be
 * distinct, in descending order, from groups that may be chosen, and none left out may beat the last. fp32
 * may swap keys that differ by less than `slack`; with slack 0 (logits far apart or equal) ties must go to
 * the lower id.
 * Invariant: every case also runs on 2 to 4 threads and must give the same bits. */
#include "router_reference.h"

#include <limits.h>

struct judge {
  const struct routing *p;
  double *z, *score, *key, *group_key;
  int *verdict; /* of each group, see group_verdict */
  double slack; /* relative to the key, plus the same absolute once a bias is added */
};

static double slack_of(const struct judge *j, double key) {
  if (j->slack == 0) return 0; /* also where the key is infinite */
  return j->slack * (fabs(key) + (j->p->correction_bias ? 1 : 0));
}

static int descending(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return x < y ? 1 : x > y ? -1 : 0;
}

static void make_keys(struct judge *j, int64_t t) {
  const struct routing *p = j->p;
  const int by_logit = p->router.score == MOE_SCORE_TOPK_SOFTMAX ||
                       (p->router.score == MOE_SCORE_SOFTMAX && p->router.groups <= 1 && !p->correction_bias);
  for (int64_t e = 0; e < p->experts; e++) j->z[e] = ref_logit(p, t, e);
  ref_scores(p, j->z, j->score);
  for (int64_t e = 0; e < p->experts; e++) {
    const double key = (by_logit ? j->z[e] : j->score[e]) + (p->correction_bias ? p->correction_bias[e] : 0);
    j->key[e] = j->z[e] == -INFINITY ? -INFINITY : key;
  }
}

static void make_group_keys(struct judge *j) {
  const struct routing *p = j->p;
  const int64_t size = p->experts / p->router.groups, part = p->topk / p->router.topk_groups;
  int64_t n = p->router.group_score == MOE_GROUP_MAX        ? 1
              : p->router.group_score == MOE_GROUP_TOP2_SUM ? 2
                                                            : part;
  n = n < 1 ? 1 : n > size ? size : n;
  double *sorted = malloc((size_t)size * sizeof *sorted);
  for (int64_t g = 0; g < p->router.groups; g++) {
    memcpy(sorted, j->key + g * size, (size_t)size * sizeof *sorted);
    qsort(sorted, (size_t)size, sizeof *sorted, descending);
    j->group_key[g] = 0;
    for (int64_t i = 0; i < n; i++) j->group_key[g] += sorted[i];
    if (fabs(j->group_key[g]) > (double)FLT_MAX)
      j->group_key[g] = copysign(INFINITY, j->group_key[g]); /* in fp32 */
  }
  free(sorted);
}

/* 1: group g is surely among the best, -1: surely not, 0: too close to say. */
static int group_verdict(const struct judge *j, int64_t g) {
  const struct routing *p = j->p;
  if (p->router.groups <= 1) return 1;
  int64_t above = 0, close = 0;
  const double slack = 64 * slack_of(j, j->group_key[g]);
  for (int64_t other = 0; other < p->router.groups; other++) {
    const double difference =
        j->group_key[other] == j->group_key[g] ? 0 : j->group_key[other] - j->group_key[g];
    if (difference > slack || (difference == 0 && slack == 0 && other < g))
      above++;
    else if (other != g && fabs(difference) <= slack && slack > 0)
      close++;
  }
  return above >= p->router.topk_groups ? -1 : above + close < p->router.topk_groups ? 1 : 0;
}

static void judge_choice(struct judge *j, int64_t t, const int32_t *ids) {
  const struct routing *p = j->p;
  const int64_t size = p->experts / p->router.groups;
  make_keys(j, t);
  if (p->router.groups > 1) make_group_keys(j);
  for (int64_t g = 0; g < p->router.groups; g++) j->verdict[g] = group_verdict(j, g);
  for (int64_t i = 0; i < p->topk; i++) {
    REQUIRE(ref_valid(p, ids[i]), "token %d slot %d: id %d", (int)t, (int)i, ids[i]);
    EXPECT(j->verdict[ids[i] / size] >= 0, "token %d: expert %d is of a bad group", (int)t, ids[i]);
    for (int64_t other = 0; other < i; other++)
      EXPECT(ids[other] != ids[i], "token %d: expert %d twice", (int)t, ids[i]);
    if (i == 0) continue;
    const double before = j->key[ids[i - 1]], key = j->key[ids[i]];
    EXPECT(before >= key || key - before <= slack_of(j, key), "token %d slot %d: %.9g after %.9g", (int)t,
           (int)i, key, before);
    EXPECT(before != key || j->slack > 0 || ids[i - 1] < ids[i], "token %d: tie %d, %d", (int)t, ids[i - 1],
           ids[i]);
  }
  const int32_t last = ids[p->topk - 1];
  for (int64_t e = 0; e < p->experts; e++) {
    if (j->verdict[e / size] < 1) continue;
    const double key = j->key[e], worst = j->key[last];
    if (key < worst || (key == worst && e >= last)) continue;
    int chosen = 0;
    for (int64_t i = 0; i < p->topk; i++) chosen |= ids[i] == e;
    if (chosen) continue;
    EXPECT(key == worst || key - worst <= slack_of(j, key), "token %d: %d (%.9g) beats %d", (int)t, (int)e,
           key, last);
    EXPECT(key != worst || j->slack > 0, "token %d: tie of %d left out for %d", (int)t, (int)e, last);
  }
}

/* A weight is off by the rounding of z - max, which the exponential turns into a relative error, and a few
 * ulps. */
static void judge_weights(struct judge *j, int64_t t, const int32_t *ids, const float *weights) {
  const struct routing *p = j->p;
  double want[MOE_MAX_TOPK], top = -INFINITY;
  ref_weights(p, j->z, j->score, ids, want);
  for (int64_t e = 0; e < p->experts; e++) top = fmax(top, j->z[e]);
  for (int64_t i = 0; i < p->topk; i++) {
    const double distance =
        ref_valid(p, ids[i]) && isfinite(j->z[ids[i]]) ? fmin(top - j->z[ids[i]], 100) : 0;
    const double bound =
        0x1p-23 * (6 + distance) * fabs(want[i]) + 1e-36 * (1 + fabs((double)p->router.scale));
    EXPECT(fabs(weights[i] - want[i]) <= bound, "token %d slot %d: weight %.9g, want %.9g", (int)t, (int)i,
           weights[i], want[i]);
  }
}

static void judge_token(struct judge *j, int64_t t, const int32_t *ids, const float *weights) {
  const struct routing *p = j->p;
  if (p->mask && p->mask[t]) {
    for (int64_t i = 0; i < p->topk; i++) EXPECT(ids[i] == -1 && weights[i] == 0, "masked token %d", (int)t);
    return;
  }
  if (p->given_ids == NULL)
    judge_choice(j, t, ids);
  else
    make_keys(j, t);
  for (int64_t i = 0; i < p->topk && p->given_ids; i++)
    EXPECT(ids[i] == p->given_ids[t * p->topk + i], "token %d: id %d is not the given one", (int)t, ids[i]);
  judge_weights(j, t, ids, weights);
}

static void judge_counts(const struct routing *p, const struct routed *r) {
  int64_t *count = calloc((size_t)p->experts, sizeof *count);
  for (int64_t s = 0; s < p->tokens * p->topk; s++)
    if (ref_valid(p, r->ids[s])) count[r->ids[s]]++;
  for (int64_t e = 0; e < p->experts; e++)
    EXPECT(r->counts[e] == count[e], "expert %d: %d, want %d", (int)e, r->counts[e], (int)count[e]);
  free(count);
}

static void check(const struct routing *p, double slack) {
  struct routed one = call_routing(p, 1);
  struct judge j = {.p = p, .slack = slack};
  const size_t bytes = (size_t)p->experts * sizeof(double);
  j.z = malloc(bytes), j.score = malloc(bytes), j.key = malloc(bytes), j.group_key = malloc(bytes),
  j.verdict = malloc(bytes);
  for (int64_t t = 0; t < p->tokens; t++)
    judge_token(&j, t, one.ids + t * p->topk, one.weights + t * p->topk);
  free(j.z), free(j.score), free(j.key), free(j.group_key), free(j.verdict);
  judge_counts(p, &one);
  const int threads = 2 + (int)((p->experts + p->topk) % 3);
  struct routed many = call_routing(p, threads);
  EXPECT(memcmp(one.ids, many.ids, (size_t)(p->tokens * p->topk) * 4) == 0, "ids differ on %d threads",
         threads);
  EXPECT(memcmp(one.weights, many.weights, (size_t)(p->tokens * p->topk) * 4) == 0,
         "weights differ on %d threads", threads);
  EXPECT(memcmp(one.counts, many.counts, (size_t)p->experts * 4) == 0, "counts differ on %d threads",
         threads);
  free_routed(&one), free_routed(&many);
}

static const int64_t EXPERTS[] = {1, 2, 3, 8, 31, 60, 72, 127, 128, 129, 160, 257, 512, 896, 1000, 4096};
static const int64_t TOPK[] = {1, 2, 4, 6, 8, 22, 32, 64};
#define SLACK 2e-6 /* of keys that are scores: a few ulps of exp, twice */

/* Groups that divide E and hold k experts in the chosen ones; 0 if that number of groups does not. */
static int set_groups(struct routing *p, int64_t groups, uint64_t *seed) {
  if (p->experts % groups != 0) return 0;
  const int64_t size = p->experts / groups, least = (p->topk + size - 1) / size;
  p->router.groups = groups;
  p->router.topk_groups = least + (int64_t)(test_random(seed) % (uint64_t)(groups - least + 1));
  p->router.group_score = (moe_group_score)(test_random(seed) % 3);
  return 1;
}

/* Logits that are equal or far apart, so that fp32 and double agree on every order. The step is no round
 * number, lest sums over groups tie in double but not in fp32. */
static void coarsen(struct routing *p, uint64_t *seed) {
  for (int64_t i = 0; i < p->tokens * p->experts; i++)
    moe_store(p->logits, p->dtype, i, 0.3671f * (float)(test_random(seed) % 9) - 1.2345f);
}

TEST(choice_and_weights_for_every_size_and_score) {
  uint64_t seed = 20;
  for (int e = 0; e < 16; e++)
    for (int k = 0; k < 8; k++)
      for (int c = 0; c < 12 && TOPK[k] <= EXPERTS[e]; c++) {
        const float range = c % 3 == 0 ? 60.0f : 4.0f;
        struct routing p = make_routing(EXPERTS[e] > 512 ? 2 : 4, EXPERTS[e], TOPK[k], (moe_score)(c % 4),
                                        (moe_dtype)(1 + c / 4), range, &seed);
        p.router.renormalize = c % 5 == 0;
        if (c % 7 == 0) p.router.scale = 2.5f, p.router.renorm_epsilon = 0.01f;
        if (c % 2) p.router_bias = random_array(MOE_FP32, p.experts, 1, &seed);
        if ((c + e + k) % 5 == 1) p.correction_bias = random_array(MOE_FP32, p.experts, 1, &seed);
        check(&p, SLACK);
        if (!p.correction_bias && !p.router_bias) coarsen(&p, &seed), check(&p, 0);
        free_routing(&p);
      }
}

TEST(groups_limit_the_choice) {
  static const int64_t GROUPS[] = {2, 3, 4, 8, 16, 64};
  uint64_t seed = 21;
  for (int e = 0; e < 16; e++)
    for (int k = 0; k < 8; k++)
      for (int g = 0; g < 6; g++)
        for (int score = 0; score < 4 && TOPK[k] <= EXPERTS[e]; score++) {
          struct routing p = make_routing(2, EXPERTS[e], TOPK[k], (moe_score)score, MOE_FP32, 4, &seed);
          if (set_groups(&p, GROUPS[g], &seed)) {
            coarsen(&p, &seed);
            check(&p, p.router.group_score == MOE_GROUP_MAX ? 0 : SLACK);
            for (int64_t i = 0; i < 2 * p.experts; i++)
              moe_store(p.logits, MOE_FP32, i, 3 * test_uniform(&seed));
            p.correction_bias = random_array(MOE_FP32, p.experts, 1, &seed);
            for (int64_t i = 0; i < p.experts; i++) p.correction_bias[i] -= 3; /* all keys negative */
            check(&p, SLACK);
          }
          free_routing(&p);
        }
}

TEST(strange_logits) {
  static const float VALUES[] = {NAN,      INFINITY, -INFINITY, 1e30f, -1e30f, FLT_MAX,
                                 -FLT_MAX, 1e-40f,   -1e-42f,   0.0f,  -0.0f,  1.0f};
  uint64_t seed = 22;
  for (int e = 2; e < 12; e++)
    for (int score = 0; score < 4; score++)
      for (int variant = 0; variant < 16; variant++) {
        const int64_t topk = EXPERTS[e] < 6 ? 2 : 6;
        struct routing p = make_routing(3, EXPERTS[e], topk, (moe_score)score, MOE_FP32, 4, &seed);
        float *z = p.logits;
        p.router.renormalize = variant & 1;
        for (int64_t i = 0; i < 3 * p.experts; i++) {
          if (variant < 12)
            z[i] = VALUES[variant]; /* all equal */
          else if (variant == 12)
            z[i] = VALUES[test_random(&seed) % 12]; /* everything at once */
          else if (variant == 13)
            z[i] = i % p.experts == p.experts - 1 ? 9 : z[i]; /* the last one wins */
          else if (variant == 14)
            z[i] = i % p.experts == p.experts / 2 ? NAN : z[i]; /* one NaN */
          else
            z[i] = i % p.experts < topk - 1 ? z[i] : NAN; /* one number short of k */
        }
        check(&p, variant < 12 ? 0 : SLACK);
        free_routing(&p);
      }
}

TEST(zeros_of_both_signs_tie) {
  uint64_t seed = 23;
  struct routing p = make_routing(1, 40, 8, MOE_SCORE_TOPK_SOFTMAX, MOE_FP32, 1, &seed);
  for (int i = 0; i < 40; i++) ((float *)p.logits)[i] = i % 2 ? 0.0f : -0.0f;
  struct routed r = call_routing(&p, 1);
  for (int i = 0; i < 8; i++) EXPECT(r.ids[i] == i, "slot %d: %d", i, r.ids[i]);
  free_routed(&r), free_routing(&p);
}

TEST(given_ids_masks_and_no_tokens) {
  static const int32_t BAD[] = {-1, INT_MIN, INT_MAX};
  uint64_t seed = 24;
  for (int64_t tokens = 0; tokens < 12; tokens++)
    for (int score = 0; score < 4; score++)
      for (int variant = 0; variant < 4; variant++) {
        struct routing p = make_routing(tokens, 31, 8, (moe_score)score, MOE_BF16, 4, &seed);
        p.router.renormalize = variant & 1;
        p.mask = guarded((size_t)tokens);
        for (int64_t t = 0; t < tokens; t++) p.mask[t] = test_random(&seed) % 3 == 0;
        if (variant & 2) p.given_ids = guarded((size_t)tokens * 8 * 4);
        for (int64_t s = 0; s < tokens * 8 && p.given_ids; s++) {
          const uint64_t r = test_random(&seed);
          p.given_ids[s] = r % 4 ? (int32_t)(r >> 8) & 7 : r & 16 ? 31 : BAD[(r >> 8) % 3];
          if (s / 8 == 3) p.given_ids[s] = -1;
        }
        check(&p, SLACK);
        free_routing(&p);
      }
}

/* The n-th kind of batch: sizes, scores and dtypes, half of them with logits that tie often, some with groups, some with a
 * bias of the choice. One logit in eight is strange. */
static struct routing batch(int n, uint64_t *seed, double *slack) {
  static const float STRANGE[] = {NAN, INFINITY, -INFINITY, -0.0f, 0.0f, 1e-40f};
  static const int64_t SIZES[] = {8, 16, 64, 33, 160, 8, 256, 12};
  const int variant = n / 64 % 4;
  struct routing p = make_routing(1024, SIZES[n / 8 % 8], 1 + n % 8, (moe_score)(n % 4),
                                  variant == 3 ? (moe_dtype)(2 + n / 256 % 2) : MOE_FP32, 4, seed);
  const int coarse = n / 4 % 2, grouped = variant == 1 && set_groups(&p, 4, seed);
  if (coarse) coarsen(&p, seed);
  if (variant == 2) p.correction_bias = random_array(MOE_FP32, p.experts, 1, seed);
  p.router.renormalize = n / 32 % 2;
  for (int64_t i = 0; i < p.tokens * p.experts; i++)
    if (test_random(seed) % 8 == 0) moe_store(p.logits, p.dtype, i, STRANGE[test_random(seed) % 6]);
  const int exact = coarse && variant != 2 && (!grouped || p.router.group_score == MOE_GROUP_MAX);
  *slack = exact ? 0 : SLACK;
  return p;
}

/* MOE_ROUTE_TOKENS says how many, MOE_ROUTE_SEED which. */
TEST(many_random_tokens) {
  const char *const given = getenv("MOE_ROUTE_TOKENS"), *const seeded = getenv("MOE_ROUTE_SEED");
  const long long wanted = given ? atoll(given) : 65536;
  uint64_t seed = seeded ? (uint64_t)atoll(seeded) : 25;
  long long tokens = 0;
  double slack;
  for (int n = 0; tokens < wanted && test_failures == 0; n++, tokens += 1024) {
    struct routing p = batch(n, &seed, &slack);
    check(&p, slack);
    free_routing(&p);
    EXPECT(test_failures == 0, "batch %d", n);
  }
  printf("%lld tokens\n", tokens);
}

TEST_MAIN()
