/* SPDX-License-Identifier: Apache-2.0
 *
 * What: products of one expert with an fp32 operand, which CUDA multiplies by bf16 parts of it, against the CPU.
 * Idea: whole numbers of so few bits that any order of summation gives the same number: then a part or a pair of parts that is
 * missing, or is one element off, is an error of at least 1, and nothing is allowed. Numbers of 24 bits, with a low part as large as one
 * can be, show that the sums of parts are as good as fp32; and infinities, NaN and the ends of the range what becomes of those.
 * Invariant: scratch tells that a product is one of parts: those of any other kind need none for these problems. */
#include "twin.h"

enum {
  DENSE = 19, /* bits of the dense operand: three parts; of the four numbers that meet it in a sum: one */
  HALF = 10,  /* of both, where both have parts: two each */
  FEW = 4
};
static const double EXACT = 0x1p-40; /* as bits, but -0 is 0 */

struct problem {
  int64_t rows, m, n, k; /* gemm has k, wgrad m */
  moe_dtype a, b, d;
  int kn, accumulate, limit;
  int64_t a_topk, b_topk;
  int64_t first, last; /* rows that count; 0, 0: all, without a map */
};

/* ---- numbers */

/* A whole number of at most so many bits, not 0. */
static float whole(int bits, uint64_t *seed) {
  const float v = (float)(1 + test_random(seed) % ((1u << bits) - 1));
  return chance(seed, 50) ? v : -v;
}

/* An operand as the lines that a result is a sum over: element i of line l is at l * line + i * step. */
struct lines {
  void *data;
  moe_dtype dtype;
  int64_t count, length, line, step;
};

static void fill_lines(struct lines o, int bits, int few, uint64_t *seed) {
  for (int64_t l = 0; l < o.count; l++) {
    for (int64_t i = 0; i < o.length; i++)
      moe_store(o.data, o.dtype, l * o.line + i * o.step, few ? 0 : whole(bits, seed));
    for (int j = 0; few && j < FEW && o.length > 0; j++) {
      const int64_t i = (int64_t)(test_random(seed) % (uint64_t)o.length);
      moe_store(o.data, o.dtype, l * o.line + i * o.step, whole(bits, seed));
    }
  }
}

/* Between 1 and 2.1 times 2^exponent; as fp32 with a low part of 2^-17.03. */
static void fill_positive(void *array, moe_dtype dtype, int64_t count, int exponent, uint64_t *seed) {
  for (int64_t i = 0; i < count; i++) {
    const uint64_t r = test_random(seed);
    double v = (double)(128 + r % 128) * 0x1p-7;
    if (dtype == MOE_FP32) v += (double)(128 + r / 128 % 128) * 0x1p-16 + 0x1.fp-18;
    moe_store(array, dtype, i, (float)ldexp(v, exponent));
  }
}

/* Which operand has the bits: 0 A, 1 B, 2 both of them half. */
static void fill_exact(const struct lines *a, const struct lines *b, int kind, uint64_t *seed) {
  fill_lines(*a, kind == 0 ? DENSE : kind == 1 ? 1 : HALF, kind == 1, seed);
  fill_lines(*b, kind == 1 ? DENSE : kind == 0 ? 1 : HALF, kind != 1, seed);
}

/* Of a sum of `length` positive terms, relative to it. A step of 16 is cut by up to 2 x 2^-23 of what has been summed, and parts that
 * come before the last, as those that are left out, have no more than four of that; a chain of fp32 is off by about sqrt(length) 2^-24. */
static double rounding_of(int64_t length) {
  return (2 * ((double)length / 16 + 1) + 4 + sqrt((double)length)) * 0x1p-23;
}

/* Rows in an order of their own; those that do not count have none. */
static void fill_map(int32_t *row_slot, int32_t *row_offset, const struct problem *q) {
  for (int64_t r = 0; r < q->rows; r++)
    row_slot[r] =
        r >= q->first && r < q->last ? (int32_t)(q->rows - 1 - r / 2 - (r % 2) * (q->rows / 2)) : -1;
  row_offset[0] = (int32_t)q->first;
  row_offset[1] = (int32_t)q->last;
}

#define MAP(t, c, g, q)                                                                                 \
  do {                                                                                                  \
    int32_t *slot_ = ARRAY(t, c, g, row_slot, (q)->rows * 4), *offset_ = ARRAY(t, c, g, row_offset, 8); \
    fill_map(slot_, offset_, q);                                                                        \
  } while (0)

/* ---- gemm */

static moe_gemm_args gemm_args(const struct problem *q) {
  moe_gemm_args c = {.rows = q->rows, .n = q->n, .k = q->k, .experts = 1, .a_dtype = q->a, .b_dtype = q->b};
  c.d_dtype = q->d, c.b_kn = q->kn, c.accumulate = q->accumulate, c.gather_topk = q->a_topk;
  return c;
}

/* kind: as in fill_exact, or -1 - i: numbers of 24 bits, A times 2^exponents[i]. */
static const int exponents[] = {0, 100, -100, 60, -60, -118, -135};

static void gemm(const struct problem *q, int kind) {
  uint64_t seed = (uint64_t)(q->rows * 31 + q->n * 7 + q->k + kind + 17);
  struct twin t;
  moe_gemm_args c = gemm_args(q), g = c;
  g.sm_limit = q->limit, g.schedule = q->limit == 0 ? MOE_SCHEDULE_DYNAMIC : MOE_SCHEDULE_STATIC;
  twin_open(&t, "gemm: rows %d n%d k%d, %d x %d to %d, kn %d acc %d gather %d rows %d..%d limit %d kind %d",
            (int)q->rows, (int)q->n, (int)q->k, q->a, q->b, q->d, q->kn, q->accumulate, (int)q->a_topk,
            (int)q->first, (int)q->last, q->limit, kind);
  if (q->last > 0) MAP(&t, c, g, q);
  const struct lines a = {ARRAY(&t, c, g, a, bytes_of(q->a, q->rows * q->k)), q->a, q->rows, q->k, q->k, 1};
  const struct lines b = {
      ARRAY(&t, c, g, b, bytes_of(q->b, q->n * q->k)), q->b, q->n, q->k, q->kn ? 1 : q->k, q->kn ? q->n : 1};
  double bound = EXACT;
  if (kind >= 0) {
    fill_exact(&a, &b, kind, &seed);
  } else {
    const int up = exponents[-1 - kind];
    bound = rounding_of(q->k) + ldexp(1, -125 - up); /* subnormals may count as 0 */
    fill_positive(a.data, q->a, q->rows * q->k, up, &seed);
    fill_positive(b.data, q->b, q->n * q->k, -up < 120 ? -up : 120, &seed);
  }
  void *d = ARRAY(&t, c, g, d, bytes_of(q->d, q->rows * q->n));
  if (q->accumulate) fill_lines((struct lines){d, q->d, q->rows, q->n, q->n, 1}, DENSE, 0, &seed);
  twin_floats(&t, q->d, q->n, kind < 0 && q->d == MOE_BF16 ? fmax(step_of(MOE_BF16), bound) : bound);
  RUN_TWIN(&t, gemm, c, g);
  EXPECT(g.scratch_bytes > 0, "gemm: rows %d n%d k%d, %d x %d: not by parts", (int)q->rows, (int)q->n,
         (int)q->k, q->a, q->b);
}

/* Every kind of data that the formats allow. */
static void gemm_kinds(const struct problem *q) {
  if (q->a == MOE_FP32) gemm(q, 0);
  if (q->b == MOE_FP32) gemm(q, 1);
  if (q->a == q->b) gemm(q, 2);
  for (int i = 0; !q->accumulate && i < (int)(sizeof exponents / sizeof *exponents); i++)
    if (q->a == MOE_FP32 || exponents[i] >= -60) gemm(q, -1 - i);
}

static const moe_dtype formats[][2] = {{MOE_FP32, MOE_BF16}, {MOE_BF16, MOE_FP32}, {MOE_FP32, MOE_FP32}};

TEST(gemm_of_every_format_and_layout) {
  static const int64_t sizes[][3] = {{77, 136, 72}, {1, 8, 8}, {129, 264, 64}, {300, 128, 136}};
  for (int f = 0; f < 3; f++)
    for (int s = 0; s < 4; s++)
      for (int i = 0; i < 6; i++) { /* three ways to store, two layouts */
        const struct problem q = {.rows = sizes[s][0],
                                  .n = sizes[s][1],
                                  .k = sizes[s][2],
                                  .a = formats[f][0],
                                  .b = formats[f][1],
                                  .d = i / 2 == 0 ? MOE_BF16 : MOE_FP32,
                                  .kn = i % 2,
                                  .accumulate = i / 2 == 2,
                                  .limit = i % 4 == 3 ? 3 : 0};
        gemm_kinds(&q);
      }
}

TEST(gemm_of_mapped_rows) {
  for (int f = 0; f < 3; f++)
    for (int64_t topk = 0; topk <= (f == 1 ? 0 : 2); topk++) { /* bf16 rows are not gathered */
      const struct problem q = {.rows = 150,
                                .n = 72,
                                .k = 40,
                                .a = formats[f][0],
                                .b = formats[f][1],
                                .d = MOE_FP32,
                                .a_topk = topk,
                                .first = 5,
                                .last = 139};
      gemm_kinds(&q);
    }
}

/* A gate of one logit: nothing along k that the tensor cores need whole. */
TEST(gemm_of_any_depth) {
  for (int64_t k = 1; k < 80; k += 13)
    for (int f = 0; f < 3; f += 2) {
      const struct problem q = {
          .rows = 90, .n = 136, .k = k, .a = MOE_FP32, .b = formats[f][1], .d = MOE_FP32, .kn = 1};
      gemm_kinds(&q);
    }
}

/* Those that the general kernels keep. */
TEST(gemm_of_others_needs_no_scratch) {
  static const struct problem others[] = {
      {.n = 64, .k = 64, .a = MOE_BF16, .b = MOE_BF16, .d = MOE_FP32},
      {.n = 64, .k = 64, .a = MOE_FP32, .b = MOE_FP16, .d = MOE_FP32},
      {.n = 64, .k = 64, .a = MOE_FP32, .b = MOE_FP32, .d = MOE_FP16},
      {.n = 64, .k = 1024, .a = MOE_FP32, .b = MOE_FP32, .d = MOE_FP32}, /* would show what is cut off */
      {.n = 60, .k = 64, .a = MOE_FP32, .b = MOE_BF16, .d = MOE_FP32},
      {.n = 64, .k = 60, .a = MOE_FP32, .b = MOE_BF16, .d = MOE_FP32},
      {.n = 64, .k = 60, .a = MOE_BF16, .b = MOE_FP32, .d = MOE_FP32, .kn = 1},
      {.n = 64, .k = 64, .a = MOE_BF16, .b = MOE_FP32, .d = MOE_FP32, .a_topk = 1},
  };
  for (int i = 0; i < (int)(sizeof others / sizeof *others); i++) {
    struct problem q = others[i];
    q.rows = 40;
    moe_gemm_args c = gemm_args(&q);
    c.size = sizeof c;
    EXPECT(moe_gemm_scratch(gpu, &c) == 0, "problem %d: %zu bytes", i, moe_gemm_scratch(gpu, &c));
  }
}

/* ---- wgrad */

static void wgrad(const struct problem *q, int kind) {
  uint64_t seed = (uint64_t)(q->rows * 31 + q->n * 7 + q->m + kind + 71);
  struct twin t;
  moe_wgrad_args c = {.rows = q->rows, .m = q->m, .n = q->n, .experts = 1, .a_dtype = q->a, .b_dtype = q->b};
  c.d_dtype = q->d, c.accumulate = q->accumulate, c.a_gather_topk = q->a_topk, c.b_gather_topk = q->b_topk;
  moe_wgrad_args g = c;
  g.sm_limit = q->limit, g.schedule = q->limit == 0 ? MOE_SCHEDULE_DYNAMIC : MOE_SCHEDULE_STATIC;
  twin_open(&t, "wgrad: rows %d m%d n%d, %d x %d to %d, acc %d gather %d %d rows %d..%d limit %d kind %d",
            (int)q->rows, (int)q->m, (int)q->n, q->a, q->b, q->d, q->accumulate, (int)q->a_topk,
            (int)q->b_topk, (int)q->first, (int)q->last, q->limit, kind);
  if (q->last > 0) MAP(&t, c, g, q);
  const struct lines a = {ARRAY(&t, c, g, a, bytes_of(q->a, q->rows * q->m)), q->a, q->m, q->rows, 1, q->m};
  const struct lines b = {ARRAY(&t, c, g, b, bytes_of(q->b, q->rows * q->n)), q->b, q->n, q->rows, 1, q->n};
  if (kind >= 0) {
    fill_exact(&a, &b, kind, &seed);
  } else {
    fill_positive(a.data, q->a, q->rows * q->m, exponents[-1 - kind], &seed);
    fill_positive(b.data, q->b, q->rows * q->n, -exponents[-1 - kind], &seed);
  }
  if (q->last > 0 && q->a_topk == 0 && q->b_topk == 0) /* of rows that do not count: NaN */
    for (int64_t r = q->last; r < q->rows; r++) {
      for (int64_t i = 0; i < q->m; i++) moe_store(a.data, q->a, r * q->m + i, NAN);
      for (int64_t i = 0; i < q->n; i++) moe_store(b.data, q->b, r * q->n + i, NAN);
    }
  void *d = ARRAY(&t, c, g, d, bytes_of(q->d, q->m * q->n));
  if (q->accumulate) fill_lines((struct lines){d, q->d, q->m, q->n, q->n, 1}, 7, 0, &seed);
  twin_floats(&t, q->d, q->n,
              kind >= 0          ? EXACT
              : q->d == MOE_BF16 ? step_of(MOE_BF16)
                                 : rounding_of(q->rows));
  RUN_TWIN(&t, wgrad, c, g);
  EXPECT(g.scratch_bytes > 0, "wgrad: rows %d m%d n%d, %d x %d: not by parts", (int)q->rows, (int)q->m,
         (int)q->n, q->a, q->b);
}

static void wgrad_kinds(const struct problem *q) {
  wgrad(q, q->a == MOE_FP32 ? 0 : 1);
  for (int i = 0; !q->accumulate && i < 5; i++) wgrad(q, -1 - i);
}

/* One split, several whole ones, and some of which the last is short or empty. */
TEST(wgrad_of_either_operand) {
  static const int64_t sizes[][3] = {{77, 16, 136}, {1, 8, 8}, {600, 40, 200}, {1111, 136, 72}, {513, 1, 64}};
  for (int f = 0; f < 2; f++)
    for (int s = 0; s < 5; s++)
      for (int i = 0; i < 4; i++) {
        const int64_t m = sizes[s][1], n = sizes[s][2];
        const struct problem q = {.rows = sizes[s][0],
                                  .m = f == 0 ? m : n,
                                  .n = f == 0 ? n : m,
                                  .a = formats[f][0],
                                  .b = formats[f][1],
                                  .d = i < 2 ? MOE_BF16 : MOE_FP32,
                                  .accumulate = i % 2,
                                  .limit = i == 2 ? 3 : 0};
        wgrad_kinds(&q);
      }
}

TEST(wgrad_of_mapped_rows) {
  static const int64_t ends[][2] = {{0, 700}, {3, 690}, {100, 130}, {64, 192}, {300, 300}};
  for (int f = 0; f < 2; f++)
    for (int e = 0; e < 5; e++)
      for (int i = 0; i < 8; i++) {
        const struct problem q = {.rows = 700,
                                  .m = 24,
                                  .n = 40,
                                  .a = formats[f][0],
                                  .b = formats[f][1],
                                  .d = MOE_FP32,
                                  .accumulate = i / 4,
                                  .a_topk = i % 2,
                                  .b_topk = i / 2 % 2,
                                  .first = ends[e][0],
                                  .last = ends[e][1]};
        wgrad_kinds(&q);
      }
}

TEST(wgrad_of_no_rows) {
  for (int f = 0; f < 2; f++)
    for (int i = 0; i < 2; i++) {
      const struct problem q = {
          .m = 24, .n = 40, .a = formats[f][0], .b = formats[f][1], .d = MOE_FP32, .accumulate = i};
      uint64_t seed = 3;
      struct twin t;
      moe_wgrad_args c = {.m = q.m, .n = q.n, .experts = 1, .a_dtype = q.a, .b_dtype = q.b, .d_dtype = q.d};
      c.accumulate = q.accumulate;
      moe_wgrad_args g = c;
      twin_open(&t, "wgrad: no rows, acc %d", i);
      float *d = ARRAY(&t, c, g, d, q.m * q.n * 4);
      fill_random(d, MOE_FP32, q.m * q.n, 1, &seed);
      d[7] = -0.0f;              /* which adding 0 would change */
      RUN_TWIN(&t, wgrad, c, g); /* bits */
    }
}

/* ---- what is not a number, or hardly one */

/* The first rows of A: infinity, minus infinity, NaN, NaN of the lowest bit, the largest number, its neighbour above the largest bf16. */
TEST(infinities_and_nan_stay) {
  static const float odd[] = {INFINITY,        -INFINITY,       NAN, 0, 0x1.fffffep127f,
                              0x1.ff0002p127f, -0x1.fffffep127f};
  const uint32_t quiet = 0x7f800001u;
  enum {
    ROWS = 20,
    N = 16,
    K = 24
  };
  uint64_t seed = 5;
  struct twin t;
  moe_gemm_args c = {.rows = ROWS, .n = N, .k = K, .experts = 1, .a_dtype = MOE_FP32, .b_dtype = MOE_BF16};
  c.d_dtype = MOE_FP32;
  moe_gemm_args g = c;
  twin_open(&t, "gemm: infinities and NaN");
  float *a = ARRAY(&t, c, g, a, ROWS * K * 4);
  fill_positive(a, MOE_FP32, ROWS * K, 0, &seed);
  for (int i = 0; i < 7; i++) a[i * K + i] = odd[i];
  memcpy(&a[3 * K + 3], &quiet, 4);
  fill_positive(ARRAY(&t, c, g, b, N * K * 2), MOE_BF16, N * K, -2, &seed);
  ARRAY(&t, c, g, d, ROWS * N * 4);
  twin_floats(&t, MOE_FP32, N, rounding_of(K));
  RUN_TWIN(&t, gemm, c, g);
}

TEST_MAIN()
