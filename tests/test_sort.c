/* SPDX-License-Identifier: Apache-2.0
 *
 * What: moe_cpu_sort against the definition: which slots are kept (by comparing each with each), and where
 * they go.
 * Idea: the reference never sorts. A slot's row is the number of kept slots of lower experts, plus the
 * kept slots of its own expert before it; a slot is dropped when `capacity` others of its expert go before
 * it. */
#include "ops_call.h"

#include <limits.h>

struct problem {
  int64_t tokens, experts, topk, capacity;
  moe_drop drop;
  int32_t *ids;
  float *weights;
  uint8_t *mask;
};

static int64_t expert_of(const struct problem *p, int64_t slot) {
  if (p->mask != NULL && p->mask[slot / p->topk] != 0) return -1;
  const int64_t e = p->ids == NULL ? 0 : p->ids[slot];
  return e < 0 || e >= p->experts ? -1 : e;
}

/* Does slot a go before slot b of the same expert when there is not enough room? */
static int goes_before(const struct problem *p, int64_t a, int64_t b) {
  if (p->drop == MOE_DROP_POSITION) return a < b;
  const double wa = p->weights[a], wb = p->weights[b];
  if (isnan(wa) || isnan(wb)) return isnan(wa) && isnan(wb) ? a < b : isnan(wb);
  return wa > wb || (wa == wb && a < b);
}

static int is_kept(const struct problem *p, int64_t slot) {
  if (expert_of(p, slot) < 0) return 0;
  if (p->capacity == 0) return 1;
  int64_t before = 0;
  for (int64_t s = 0; s < p->tokens * p->topk; s++)
    before += expert_of(p, s) == expert_of(p, slot) && goes_before(p, s, slot);
  return before < p->capacity;
}

static void check_rows(const struct problem *p, const moe_sort_args *got) {
  const int64_t slots = p->tokens * p->topk;
  int64_t *kept = calloc((size_t)p->experts + 1, sizeof *kept),
          *seen = calloc((size_t)p->experts + 1, sizeof *seen);
  int64_t *chosen = calloc((size_t)p->experts + 1, sizeof *chosen), total = 0;
  uint8_t *keep = malloc((size_t)slots + 1);
  for (int64_t s = 0; s < slots; s++) {
    keep[s] = (uint8_t)is_kept(p, s);
    if (keep[s]) kept[expert_of(p, s)]++;
    if (expert_of(p, s) >= 0) chosen[expert_of(p, s)]++;
  }
  for (int64_t e = 0; e <= p->experts; e++) {
    EXPECT(got->row_offset[e] == total, "offset of expert %d: %d, want %d", (int)e, got->row_offset[e],
           (int)total);
    if (e < p->experts) EXPECT(got->counts[e] == chosen[e], "count of expert %d: %d", (int)e, got->counts[e]);
    total += kept[e];
  }
  for (int64_t s = 0; s < slots; s++) {
    const int64_t e = expert_of(p, s), want = keep[s] ? got->row_offset[e] + seen[e]++ : -1;
    EXPECT(got->slot_row[s] == want, "slot %d: row %d, want %d", (int)s, got->slot_row[s], (int)want);
    if (want >= 0 && want < slots)
      EXPECT(got->row_slot[want] == s, "row %d: %d", (int)want, got->row_slot[want]);
  }
  for (int64_t r = got->row_offset[p->experts]; r < slots; r++)
    EXPECT(got->row_slot[r] == -1, "row %d past the end: %d", (int)r, got->row_slot[r]);
  free(kept), free(seen), free(chosen), free(keep);
}

static void check(const struct problem *p) {
  const size_t slots = (size_t)(p->tokens * p->topk), experts = (size_t)p->experts;
  int32_t *row_offset = guarded((experts + 1) * 4), *row_slot = guarded(slots * 4),
          *slot_row = guarded(slots * 4);
  int32_t *counts = guarded(experts * 4);
  memset(row_slot, 0x55, slots * 4), memset(slot_row, 0x55, slots * 4); /* guarded() fills with -1 */
  moe_sort_args args = {.tokens = p->tokens,
                        .experts = p->experts,
                        .topk = p->topk,
                        .ids = p->ids,
                        .padding_mask = p->mask,
                        .weights = p->weights,
                        .capacity = p->capacity,
                        .drop = p->drop,
                        .row_offset = row_offset,
                        .row_slot = row_slot,
                        .slot_row = slot_row,
                        .counts = counts};
  EXPECT(call_sort(&args, 2) == MOE_OK, "status");
  check_rows(p, &args);
  guarded_free(row_offset), guarded_free(row_slot), guarded_free(slot_row), guarded_free(counts);
}

/* Ids of which some are no expert; skewed towards the low ones when skew is set. */
static int32_t random_id(int64_t experts, int skew, uint64_t *seed) {
  static const int32_t BAD[] = {-1, INT_MIN, INT_MAX};
  const uint64_t r = test_random(seed);
  if (r % 16 == 0) return r >> 8 & 3 ? BAD[(r >> 8 & 3) - 1] : (int32_t)experts;
  const int64_t a = (int64_t)(r >> 20) % experts;
  return (int32_t)(skew ? a * (int64_t)(r >> 50) % experts % (1 + experts / 4) : a);
}

/* Few different values, so that ties are common, with both zeros, infinities and NaN among them. */
static float random_weight(uint64_t *seed) {
  static const float VALUES[] = {0.0f,  -0.0f,    0.25f,     0.5f, 0.50000006f, 1.0f,
                                 -1.0f, INFINITY, -INFINITY, NAN,  1e-40f};
  const uint64_t r = test_random(seed);
  return r & 1 ? VALUES[(r >> 1) % 11] : test_uniform(seed);
}

static void fill(struct problem *p, int skew, uint64_t *seed) {
  const int64_t slots = p->tokens * p->topk;
  p->ids = guarded((size_t)slots * 4);
  p->weights = guarded((size_t)slots * 4);
  for (int64_t s = 0; s < slots; s++) {
    p->ids[s] = random_id(p->experts, skew, seed);
    p->weights[s] = random_weight(seed);
  }
  p->mask = guarded((size_t)p->tokens);
  for (int64_t t = 0; t < p->tokens; t++) p->mask[t] = test_random(seed) % 5 == 0 ? 2 : 0;
}

TEST(rows_are_the_kept_slots_in_order) {
  static const int64_t TOKENS[] = {0, 1, 2, 7, 64, 150}, EXPERTS[] = {1, 2, 3, 31, 128, 1000},
                       TOPK[] = {1, 2, 8};
  static const int64_t CAPACITY[] = {0, 1, 2, 5, 17, 1000};
  uint64_t seed = 3;
  for (int a = 0; a < 6; a++)
    for (int b = 0; b < 6; b++)
      for (int c = 0; c < 3; c++)
        for (int d = 0; d < 6; d++) {
          struct problem p = {TOKENS[a],         EXPERTS[b], TOPK[c], CAPACITY[d],
                              (moe_drop)(d & 1), NULL,       NULL,    NULL};
          fill(&p, d % 3 == 0, &seed);
          uint8_t *const mask = p.mask;
          for (int drop = 0; drop < 2; drop++) {
            p.drop = (moe_drop)drop;
            p.mask = drop == (d & 1) ? mask : NULL;
            check(&p);
          }
          guarded_free(p.ids), guarded_free(p.weights), guarded_free(mask);
        }
}

TEST(all_slots_at_one_expert_and_none_at_any) {
  for (int64_t capacity = 0; capacity < 40; capacity += 13)
    for (int32_t id = -1; id < 4; id++) {
      struct problem p = {100, 4, 1, capacity, MOE_DROP_WEIGHT, guarded(400), guarded(400), NULL};
      uint64_t seed = 4;
      for (int i = 0; i < 100; i++) p.ids[i] = id, p.weights[i] = random_weight(&seed);
      check(&p);
      guarded_free(p.ids), guarded_free(p.weights);
    }
}

TEST(no_ids_means_one_expert_for_every_token_that_is_not_masked) {
  uint8_t mask[50];
  for (int t = 0; t < 50; t++) mask[t] = t % 3 == 1;
  struct problem p = {50, 1, 1, 0, MOE_DROP_WEIGHT, NULL, NULL, NULL};
  check(&p);
  p.mask = mask;
  check(&p);
}

TEST_MAIN()
