/* SPDX-License-Identifier: Apache-2.0
 *
 * What: permute, combine and combine_backward against plain double loops.
 * Idea: rows come from a random partial map, with rows out of range among them; everything that may be
 * NULL is, in turn. Sums of k products differ from the double sum by less than (k+1) 2^-24 of the sum of
 * magnitudes.
 * Invariant: results are the same bits for 1 to 4 threads. */
#include "ops_call.h"

#include <limits.h>

static const int64_t TOKENS[] = {0, 1, 5, 37}, HIDDEN[] = {1, 15, 16, 17, 100, 1024, 1041, 2880},
                     TOPK[] = {1, 2, 6, 22};
static const moe_dtype DTYPES[] = {MOE_FP32, MOE_BF16, MOE_FP16};

static double smallest(moe_dtype dtype) { return dtype == MOE_FP16 ? 0x1p-25 : 1e-38; }

static void check_near(double got, double want, double size, moe_dtype dtype, const char *what, int64_t i) {
  const double bound = half_ulp(dtype) * (fabs(want) + size) + size + smallest(dtype);
  EXPECT(fabs(got - want) <= bound, "%s %d: %.9g, want %.9g", what, (int)i, got, want);
}

/* A random one-to-one map of slots to rows, with some slots that have none. */
static int32_t *random_map(int64_t slots, uint64_t *seed) {
  static const int32_t BAD[] = {-1, INT_MIN, INT_MAX};
  int32_t *map = guarded((size_t)slots * 4);
  for (int64_t s = 0; s < slots; s++) map[s] = (int32_t)s;
  for (int64_t s = slots - 1; s > 0; s--) {
    const int64_t other = (int64_t)(test_random(seed) % (uint64_t)(s + 1));
    const int32_t row = map[s];
    map[s] = map[other], map[other] = row;
  }
  for (int64_t s = 0; s < slots; s++)
    if (test_random(seed) % 6 == 0) map[s] = BAD[test_random(seed) % 3];
  return map;
}

/* One shape with all its arrays; `bits` says which optional ones are left out. */
struct shape {
  int64_t tokens, hidden, topk, rows, limit;
  int32_t *map, *end;
  float *weights, *addend;
  void *y, *dout;
  moe_dtype y_dtype, out_dtype;
  int32_t end_value;
};

static struct shape make_shape(int64_t tokens, int64_t hidden, int64_t topk, unsigned bits, uint64_t *seed) {
  struct shape s = {.tokens = tokens, .hidden = hidden, .topk = topk, .rows = tokens * topk};
  s.y_dtype = DTYPES[bits % 3], s.out_dtype = DTYPES[bits / 3 % 3];
  s.map = random_map(s.rows, seed);
  s.weights = random_array(MOE_FP32, s.rows, 2, seed);
  s.addend = random_array(MOE_FP32, tokens * hidden, 2, seed);
  s.y = random_array(s.y_dtype, s.rows * hidden, 2, seed);
  s.dout = random_array(s.out_dtype, tokens * hidden, 2, seed);
  s.end_value = (int32_t)(bits % 4 == 0 ? s.rows + 100 : s.rows * (bits % 4) / 4);
  return s;
}

static void free_shape(struct shape *s) {
  guarded_free(s->map), guarded_free(s->weights), guarded_free(s->addend), guarded_free(s->y),
      guarded_free(s->dout);
}

static int64_t row_of(const struct shape *s, const int32_t *map, const int32_t *end, int64_t slot) {
  const int64_t row = map ? map[slot] : slot, limit = end && *end < s->rows ? *end : s->rows;
  return row >= 0 && row < limit ? row : -1;
}

static void check_combine(const struct shape *s, unsigned bits, int threads) {
  const int64_t elements = s->tokens * s->hidden;
  void *out = guarded((size_t)elements * element_bytes(s->out_dtype));
  moe_combine_args args = {.tokens = s->tokens, .hidden = s->hidden, .topk = s->topk, .rows = s->rows};
  args.slot_row = bits & 1 ? s->map : NULL, args.row_end = bits & 2 ? &s->end_value : NULL;
  args.weights = bits & 4 ? s->weights : NULL, args.addend = bits & 8 ? s->addend : NULL;
  args.y = s->y, args.y_dtype = s->y_dtype, args.out = out, args.out_dtype = s->out_dtype;
  EXPECT(call_combine(&args, threads) == MOE_OK, "status");
  for (int64_t i = 0; i < elements; i++) {
    double sum = args.addend ? args.addend[i] : 0, size = fabs(sum);
    for (int64_t slot = i / s->hidden * s->topk; slot < (i / s->hidden + 1) * s->topk; slot++) {
      const int64_t row = row_of(s, args.slot_row, args.row_end, slot);
      if (row < 0) continue;
      const double term =
          (args.weights ? args.weights[slot] : 1) * at(s->y, s->y_dtype, row * s->hidden + i % s->hidden);
      sum += term, size += fabs(term);
    }
    check_near(at(out, s->out_dtype, i), sum, size * (double)(s->topk + 1) * 0x1p-24, s->out_dtype, "out", i);
  }
  guarded_free(out);
}

static void check_dweights(const struct shape *s, const moe_combine_backward_args *args) {
  for (int64_t slot = 0; slot < s->rows; slot++) {
    const int64_t row = row_of(s, args->slot_row, args->row_end, slot);
    double sum = 0, size = 0;
    for (int64_t i = 0; i < s->hidden && row >= 0; i++) {
      const double term = at(s->dout, s->out_dtype, slot / s->topk * s->hidden + i) *
                          at(s->y, s->y_dtype, row * s->hidden + i);
      sum += term, size += fabs(term);
    }
    const double steps = (double)s->hidden / 16 + 6; /* 16 partial sums, then a tree of 4 levels */
    check_near(args->dweights[slot], sum, size * steps * 0x1p-24, MOE_FP32, "dweight", slot);
    if (row < 0) EXPECT(args->dweights[slot] == 0, "skipped slot %d: %g", (int)slot, args->dweights[slot]);
  }
}

/* Rows that have a slot hold weight times dout; all others are as they were. */
static void check_dy(const struct shape *s, const moe_combine_backward_args *args) {
  int64_t *slot_of = malloc((size_t)(s->rows + 1) * sizeof *slot_of);
  for (int64_t r = 0; r < s->rows; r++) slot_of[r] = -1;
  for (int64_t slot = 0; slot < s->rows; slot++) {
    const int64_t row = row_of(s, args->slot_row, args->row_end, slot);
    if (row >= 0) slot_of[row] = slot;
  }
  for (int64_t i = 0; i < s->rows * s->hidden; i++) {
    const int64_t slot = slot_of[i / s->hidden];
    const double got = at(args->dy, s->y_dtype, i);
    if (slot < 0) {
      EXPECT(isnan(got), "row %d has no slot but was written", (int)(i / s->hidden));
      continue;
    }
    const double dout = at(s->dout, s->out_dtype, slot / s->topk * s->hidden + i % s->hidden);
    const double want = (args->weights ? args->weights[slot] : 1) * dout;
    check_near(got, want, fabs(want) * 0x1p-24, s->y_dtype, "dy", i);
  }
  free(slot_of);
}

static void check_backward(const struct shape *s, unsigned bits, int threads) {
  void *dy = guarded((size_t)(s->rows * s->hidden) * element_bytes(s->y_dtype));
  float *dweights = guarded((size_t)s->rows * 4);
  moe_combine_backward_args args = {
      .tokens = s->tokens, .hidden = s->hidden, .topk = s->topk, .rows = s->rows};
  args.slot_row = bits & 1 ? s->map : NULL, args.row_end = bits & 2 ? &s->end_value : NULL;
  args.weights = bits & 4 ? s->weights : NULL, args.y = s->y, args.y_dtype = s->y_dtype;
  args.dout = s->dout, args.dout_dtype = s->out_dtype;
  args.dy = bits & 8 ? NULL : dy, args.dweights = bits & 16 ? NULL : dweights;
  EXPECT(call_combine_backward(&args, threads) == MOE_OK, "status");
  if (args.dweights) check_dweights(s, &args);
  if (args.dy) check_dy(s, &args);
  guarded_free(dy), guarded_free(dweights);
}

TEST(combine_and_its_gradient_follow_the_sums) {
  uint64_t seed = 8;
  unsigned bits = 0;
  for (int t = 0; t < 4; t++)
    for (int h = 0; h < 8; h++)
      for (int k = 0; k < 4; k++)
        for (int repeat = 0; repeat < 2; repeat++, bits += 7) {
          struct shape s = make_shape(TOKENS[t], HIDDEN[h], TOPK[k], bits, &seed);
          check_combine(&s, bits, 1 + (int)(bits % 4));
          check_backward(&s, bits, 1 + (int)(bits % 4));
          free_shape(&s);
        }
}

TEST(combine_without_slots_converts_the_addend_even_in_place) {
  uint64_t seed = 9;
  const int64_t tokens = 3, hidden = 1500;
  float *addend = random_array(MOE_FP32, tokens * hidden, 3, &seed),
        *copy = guarded((size_t)(tokens * hidden) * 4);
  memcpy(copy, addend, (size_t)(tokens * hidden) * 4);
  uint16_t *half = guarded((size_t)(tokens * hidden) * 2);
  moe_combine_args args = {.tokens = tokens, .hidden = hidden, .addend = addend, .y_dtype = MOE_BF16};
  args.out = half, args.out_dtype = MOE_BF16;
  EXPECT(call_combine(&args, 3) == MOE_OK, "status");
  for (int64_t i = 0; i < tokens * hidden; i++)
    EXPECT(half[i] == moe_encode_bf16(addend[i]), "element %d", (int)i);
  args.out = addend, args.out_dtype = MOE_FP32;
  EXPECT(call_combine(&args, 3) == MOE_OK, "status");
  EXPECT(memcmp(addend, copy, (size_t)(tokens * hidden) * 4) == 0, "out = addend changed it");
  guarded_free(addend), guarded_free(copy), guarded_free(half);
}

TEST(threads_change_no_bit) {
  uint64_t seed = 10;
  struct shape s = make_shape(19, 1041, 6, 1, &seed);
  const size_t out_bytes = (size_t)(19 * 1041) * 4;
  float *out[2] = {guarded(out_bytes), guarded(out_bytes)},
        *dweights[2] = {guarded(19 * 6 * 4), guarded(19 * 6 * 4)};
  for (int threads = 1; threads <= 4; threads++) {
    const int i = threads > 1;
    moe_combine_args args = {.tokens = 19, .hidden = 1041, .topk = 6, .rows = s.rows, .slot_row = s.map};
    args.weights = s.weights, args.y = s.y, args.y_dtype = s.y_dtype, args.out = out[i],
    args.out_dtype = MOE_FP32;
    EXPECT(call_combine(&args, threads) == MOE_OK, "status");
    moe_combine_backward_args back = {
        .tokens = 19, .hidden = 1041, .topk = 6, .rows = s.rows, .slot_row = s.map};
    back.y = s.y, back.y_dtype = s.y_dtype, back.dout = s.dout, back.dout_dtype = s.out_dtype;
    back.dweights = dweights[i];
    EXPECT(call_combine_backward(&back, threads) == MOE_OK, "status");
    EXPECT(memcmp(out[0], out[i], out_bytes) == 0, "out with %d threads", threads);
    EXPECT(memcmp(dweights[0], dweights[i], 19 * 6 * 4) == 0, "dweights with %d threads", threads);
  }
  for (int i = 0; i < 2; i++) guarded_free(out[i]), guarded_free(dweights[i]);
  free_shape(&s);
}

/* Offsets beyond the rows are cut; rows past the end stay as they are; a row without a slot is 0. */
TEST(permute_copies_the_rows_of_the_slots) {
  uint64_t seed = 11;
  for (int c = 0; c < 4 * 8 * 4 * 3; c++) {
    const int64_t tokens = TOKENS[c % 4], hidden = HIDDEN[c / 4 % 8], topk = TOPK[c / 32 % 4],
                  rows = tokens * topk;
    const moe_dtype dtype = DTYPES[c / 128];
    void *x = random_array(dtype, tokens * hidden, 2, &seed);
    void *y = guarded((size_t)(rows * hidden) * element_bytes(dtype));
    float *weights = random_array(MOE_FP32, rows, 2, &seed);
    int32_t *map = random_map(rows, &seed),
            offsets[3] = {0, (int32_t)(rows / 2), (int32_t)(rows * (c % 3) / 2)};
    for (int64_t r = 0; r < rows; r++) map[r] = map[r] == INT_MAX ? -1 : map[r];
    const int64_t end = offsets[2] < rows ? offsets[2] : rows;
    moe_permute_args args = {
        .rows = rows, .hidden = hidden, .topk = topk, .experts = 2, .row_offset = offsets};
    args.row_slot = map, args.weights = c & 1 ? weights : NULL, args.x = x, args.y = y, args.dtype = dtype;
    if (c % 3 == 2) offsets[2] = INT_MAX;
    EXPECT(call_permute(&args, 1 + c % 4) == MOE_OK, "status");
    for (int64_t i = 0; i < rows * hidden; i++) {
      const int64_t r = i / hidden, slot = map[r];
      if (r >= end) {
        EXPECT(isnan(at(y, dtype, i)), "row %d is past the end", (int)r);
        continue;
      }
      const double weight = args.weights && slot >= 0 ? weights[slot] : 1;
      const double want = slot < 0 ? 0 : weight * at(x, dtype, slot / topk * hidden + i % hidden);
      check_near(at(y, dtype, i), want, fabs(want) * 0x1p-24, dtype, "y", i);
    }
    guarded_free(x), guarded_free(y), guarded_free(weights), guarded_free(map);
  }
}

TEST_MAIN()
