/* SPDX-License-Identifier: Apache-2.0
 *
 * The matrix products of the CPU back end against naive loops in double, for every instruction set of this machine.
 *
 * The error allowed is that of a chain of k fp32 multiply-adds, whose roundings walk at random: 2^-24 (4 + 2 sqrt k) times
 * the sum of the magnitudes of the terms; a dropped term is 1/k of that sum. Outputs stand between guard bands. */
#include <math.h>

#include "products.h"

static const moe_dtype dtypes[] = {MOE_FP32, MOE_BF16, MOE_FP16};

static int64_t below(uint64_t *seed, int64_t n) { return (int64_t)(test_random(seed) % (uint64_t)n); }
static size_t dtype_bytes(moe_dtype dtype) { return dtype == MOE_FP32 ? 4 : 2; }

/* Half a unit in the last place of v. */
static double rounding(moe_dtype dtype, double v) {
  const double unit = dtype == MOE_FP32 ? 0x1p-24 : dtype == MOE_BF16 ? 0x1p-9 : 0x1p-12;
  return fabs(v) * unit * 2 + (dtype == MOE_FP16 ? 0x1p-25 : 0);
}
static double chain(double magnitude, int64_t k) { return 0x1p-24 * (4 + 2 * sqrt((double)k)) * magnitude; }

/* ---- random row maps ------------------------------------------------------------------------------------------ */

struct map {
  int64_t rows, used, experts, topk;
  int32_t *offset, *slot;
};

/* Rows spread at random, all on one expert, or with experts left out; some rows of the bound left over. */
static struct map map_new(uint64_t *seed, int64_t rows, int64_t experts, int64_t topk) {
  struct map m = {rows, rows - (rows > 2 ? below(seed, 3) : 0), experts, topk, NULL, NULL};
  m.offset = calloc((size_t)experts + 1, sizeof *m.offset);
  m.slot = calloc((size_t)rows + 1, sizeof *m.slot);
  const int64_t kind = below(seed, 3), one = below(seed, experts);
  for (int64_t r = 0; r < m.used; r++) {
    const int64_t e = kind == 1 ? one : kind == 2 ? below(seed, experts) / 2 * 2 : below(seed, experts);
    m.offset[e + 1]++;
  }
  for (int64_t e = 0; e < experts; e++) m.offset[e + 1] += m.offset[e];
  for (int64_t r = 0; r < rows; r++) m.slot[r] = (int32_t)r;
  for (int64_t r = rows - 1; r > 0; r--) {
    const int64_t other = below(seed, r + 1);
    const int32_t t = m.slot[r];
    m.slot[r] = m.slot[other];
    m.slot[other] = t;
  }
  return m;
}
static void map_free(struct map m) {
  free(m.offset);
  free(m.slot);
}
static int64_t expert_of(const struct map *m, int64_t row) {
  int64_t e = 0;
  while (row >= m->offset[e + 1]) e++;
  return e;
}

/* ---- gemm against the naive loops ----------------------------------------------------------------------------- */

static double act_value(const moe_act_desc *act, double x, int slope) {
  const double alpha = act->alpha, beta = act->beta;
  (void)alpha, (void)beta;
#define SIG(v) (1 / (1 + exp(-(v))))
  switch ((int)act->kind) {
#define MOE_ACT(ENUM, value, fn, plain, gated, a0, b0, f, df) \
  case value:                                                 \
    return slope ? (df) : (f);
#include "moeblas_act.def"
#undef MOE_ACT
  default: return NAN;
  }
}

static moe_act_desc random_act(uint64_t *seed, int64_t inter) {
  static const float alphas[] = {
#define MOE_ACT(ENUM, value, fn, plain, gated, a0, b0, f, df) a0,
#include "moeblas_act.def"
#undef MOE_ACT
  };
  static const float betas[] = {
#define MOE_ACT(ENUM, value, fn, plain, gated, a0, b0, f, df) b0,
#include "moeblas_act.def"
#undef MOE_ACT
  };
  moe_act_desc act = {.kind = (moe_activation)below(seed, MOE_ACT_COUNT), .gated = below(seed, 4) > 0};
  act.alpha = alphas[act.kind], act.beta = betas[act.kind];
  const bool clamped = below(seed, 2);
  act.gate_max = clamped ? 0.7f : INFINITY;
  act.up_max = clamped ? 0.6f : INFINITY;
  act.up_min = clamped ? -0.5f : -INFINITY;
  act.up_offset = (float)below(seed, 2);
  act.up_beta = below(seed, 3) == 0 ? 3.0f : 0.0f;
  act.layout = (moe_layout)below(seed, 3);
  act.interleave = 1 + below(seed, inter);
  while (inter % act.interleave) act.interleave--;
  return act;
}

/* Columns of gate and up in a row of h, a, and its derivatives with respect to both. */
struct act_result {
  int64_t gate, up;
  double a, dgate, dup;
};
static struct act_result act_reference(const moe_act_desc *act, const void *h, moe_dtype dtype, int64_t row,
                                       int64_t inter, int64_t f) {
  const int64_t run = act->interleave, pair = f / run * 2 * run + f % run;
  struct act_result r = {f, inter + f, 0, 0, 0};
  if (act->layout == MOE_LAYOUT_CONCAT_UP_FIRST) r.gate = inter + f, r.up = f;
  if (act->layout == MOE_LAYOUT_INTERLEAVED) r.gate = pair, r.up = pair + run;
  if (!act->gated) r.gate = f;
  const int64_t first = row * (act->gated ? 2 * inter : inter);
  const double g = moe_load(h, dtype, first + r.gate);
  r.a = act_value(act, fmin(g, act->gate_max), 0);
  r.dgate = g > act->gate_max ? 0 : act_value(act, g, 1);
  if (!act->gated) return r;
  const double u = moe_load(h, dtype, first + r.up), b = act->up_beta;
  const double c = fmin(fmax(u, act->up_min), act->up_max);
  const double v = (b > 0 ? b * tanh(c / b) : c) + act->up_offset;
  const double slope = u < act->up_min || u > act->up_max ? 0 : b > 0 ? 1 - pow(tanh(u / b), 2) : 1;
  r.dup = r.a * slope;
  r.a *= v;
  r.dgate *= v;
  return r;
}

/* acc[r,n] and the sum of the magnitudes of its terms. */
static double product(const moe_gemm_args *args, const struct map *m, int64_t row, int64_t n,
                      double *magnitude) {
  const int64_t e = expert_of(m, row), source = args->gather_topk ? m->slot[row] / args->gather_topk : row;
  double sum = 0;
  *magnitude = 0;
  for (int64_t k = 0; k < args->k; k++) {
    const int64_t at = args->b_kn ? (e * args->k + k) * args->n + n : (e * args->n + n) * args->k + k;
    const double a = moe_load(args->a, args->a_dtype, source * args->k + k);
    const double term = a * (double)moe_load(args->b, args->b_dtype, at);
    sum += term;
    *magnitude += fabs(term);
  }
  return sum;
}

static double weight_of(const float *weights, const struct map *m, int64_t row) {
  return weights ? (double)weights[m->slot[row]] : 1;
}

static void near(const char *what, double got, double want, double allowed, int64_t row, int64_t n) {
  EXPECT(fabs(got - want) <= allowed, "%s[%lld,%lld]: got %.9g, want %.9g within %.2g", what, (long long)row,
         (long long)n, got, want, allowed);
}

/* weight acc + bias (+ before) in `out`, which is d or h. */
static void check_sums(const moe_gemm_args *args, const struct map *m, const void *out, double before) {
  for (int64_t r = 0; r < m->used; r++)
    for (int64_t n = 0; n < args->n; n++) {
      double magnitude;
      const double w = weight_of(args->weights, m, r), acc = product(args, m, r, n, &magnitude);
      const double bias =
          args->bias ? (double)moe_load(args->bias, args->bias_dtype, expert_of(m, r) * args->n + n) : 0;
      const double want = w * acc + bias + before;
      near("sum", moe_load(out, args->d_dtype, r * args->n + n), want,
           chain(magnitude * fabs(w) + fabs(bias) + fabs(before), args->k) + rounding(args->d_dtype, want), r,
           n);
    }
}

static void check_act(const moe_gemm_args *args, const struct map *m, int64_t inter) {
  for (int64_t r = 0; r < m->used; r++)
    for (int64_t f = 0; f < inter; f++) {
      const double want = act_reference(args->act, args->h, args->d_dtype, r, inter, f).a;
      near("act", moe_load(args->d, args->d_dtype, r * inter + f), want,
           2e-6 * fabs(want) + 1e-7 + rounding(args->d_dtype, want), r, f);
    }
}

static double dot_bias_product(const moe_gemm_args *args, const struct map *m, int64_t row,
                               double *magnitude) {
  moe_gemm_args dot = *args;
  dot.b = args->dot_bias, dot.b_dtype = args->bias_dtype, dot.n = 1, dot.b_kn = 0;
  return product(&dot, m, row, 0, magnitude);
}

static void check_dact(const moe_gemm_args *args, const struct map *m, const void *h) {
  const int64_t inter = args->n, width = args->act->gated ? 2 * inter : inter;
  for (int64_t r = 0; r < m->used; r++) {
    const double w = weight_of(args->weights, m, r);
    double magnitude = 0, allowed = 0, dot = args->dot_bias ? dot_bias_product(args, m, r, &allowed) : 0;
    allowed = chain(allowed, args->k);
    for (int64_t f = 0; f < inter; f++) {
      const double sum = product(args, m, r, f, &magnitude);
      const struct act_result ref = act_reference(args->act, h, args->d_dtype, r, inter, f);
      const double off = chain(magnitude, args->k);
      const double low = moe_round_to(args->d_dtype, (float)(sum - off)),
                   high = moe_round_to(args->d_dtype, (float)(sum + off));
      const double acc = (low + high) / 2; /* rounded; near a tie either way */
      const double error = (high - low) / 2 + 2e-6 * fabs(acc) + 1e-7, da = w * acc;
      near("dgate", moe_load(args->dh, args->d_dtype, r * width + ref.gate), da * ref.dgate,
           fabs(w) * error * (1 + fabs(ref.dgate)) + rounding(args->d_dtype, da * ref.dgate), r, f);
      if (args->act->gated)
        near("dup", moe_load(args->dh, args->d_dtype, r * width + ref.up), da * ref.dup,
             fabs(w) * error * (1 + fabs(ref.dup)) + rounding(args->d_dtype, da * ref.dup), r, f);
      if (args->d)
        near("weighted act", moe_load(args->d, args->d_dtype, r * inter + f), w * ref.a,
             2e-6 * fabs(w * ref.a) + 1e-7 + rounding(args->d_dtype, w * ref.a), r, f);
      dot += acc * ref.a;
      allowed += error * (fabs(ref.a) + 1e-6) + 0x1p-22 * fabs(acc * ref.a);
    }
    if (args->dweights)
      near("dweights", args->dweights[m->slot[r]], dot, allowed + 0x1p-22 * fabs(dot), r, 0);
  }
}

static int64_t random_size(uint64_t *seed) {
  static const int64_t sizes[] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  11, 12,  13,  15,  16,  17,  24,
                                  31, 33, 47, 48, 49, 63, 64, 65, 95, 97, 127, 129, 191, 192, 193, 260};
  return sizes[below(seed, sizeof sizes / sizeof *sizes)];
}

/* One random product: everything that moe_gemm_args can say. */
static void check_gemm(uint64_t seed, moe_context *ctx) {
  const int64_t rows = random_size(&seed), inter = random_size(&seed) + (below(&seed, 4) > 0),
                topk = 1 + below(&seed, 3);
  const struct map m = map_new(&seed, rows, 1 + below(&seed, 5), topk);
  const moe_act_desc act = random_act(&seed, inter > 0 ? inter : 1);
  moe_gemm_args args = {.rows = rows, .n = inter, .k = random_size(&seed), .experts = m.experts, .act = &act};
  args.epilogue = (moe_epilogue)below(&seed, 3);
  if (args.epilogue == MOE_EPILOGUE_ACT && act.gated) args.n = 2 * inter;
  args.row_offset = m.offset, args.row_slot = m.slot;
  args.gather_topk = below(&seed, 2) ? topk : 0;
  args.b_kn = (int)below(&seed, 2);
  args.a_dtype = dtypes[below(&seed, 3)], args.b_dtype = dtypes[below(&seed, 3)];
  args.d_dtype = dtypes[below(&seed, 3)], args.bias_dtype = dtypes[below(&seed, 3)];
  args.accumulate = args.epilogue == MOE_EPILOGUE_STORE && args.d_dtype == MOE_FP32 && below(&seed, 2);
  const int64_t h_columns = act.gated ? 2 * inter : inter;
  const size_t size = dtype_bytes(args.d_dtype);
  void *a = random_array(&seed, args.a_dtype, rows * args.k),
       *b = random_array(&seed, args.b_dtype, m.experts * args.n * args.k);
  void *bias = random_array(&seed, args.bias_dtype, m.experts * args.n),
       *dot_bias = random_array(&seed, args.bias_dtype, m.experts * args.k);
  float *weights = random_array(&seed, MOE_FP32, rows);
  void *h_in = random_array(&seed, args.d_dtype, rows * h_columns);
  struct guarded d =
      guarded_new((size_t)(rows * (args.epilogue == MOE_EPILOGUE_STORE ? args.n : inter)) * size);
  struct guarded h = guarded_new((size_t)(rows * h_columns) * size), dweights = guarded_new((size_t)rows * 4);
  args.a = a, args.b = b, args.d = guarded_data(d);
  args.weights = below(&seed, 2) ? weights : NULL;
  args.bias = args.epilogue != MOE_EPILOGUE_DACT && below(&seed, 2) ? bias : NULL;
  const size_t d_used = d.bytes / (size_t)(rows ? rows : 1) * (size_t)m.used;
  size_t h_used = 0;
  if (args.accumulate)
    for (int64_t i = 0; i < m.used * args.n; i++) ((float *)args.d)[i] = 0.25f;
  if (args.epilogue != MOE_EPILOGUE_STORE) {
    args.h = guarded_data(h);
    h_used = h.bytes / (size_t)(rows ? rows : 1) * (size_t)m.used;
  }
  if (args.epilogue == MOE_EPILOGUE_DACT) {
    memcpy(args.h, h_in, h_used);
    args.dh = args.h; /* in place */
    args.dweights = guarded_data(dweights);
    args.dot_bias = below(&seed, 2) ? dot_bias : NULL;
    if (below(&seed, 4) == 0) args.d = NULL;
  }
  RUN(gemm, ctx, &args);
  switch (args.epilogue) {
  case MOE_EPILOGUE_STORE: check_sums(&args, &m, args.d, args.accumulate ? 0.25 : 0); break;
  case MOE_EPILOGUE_ACT: check_sums(&args, &m, args.h, 0), check_act(&args, &m, inter); break;
  case MOE_EPILOGUE_DACT: check_dact(&args, &m, h_in); break;
  }
  for (int64_t r = m.used; r < rows; r++) /* slots without a row are not written */
    EXPECT(poisoned((unsigned char *)guarded_data(dweights) + 4 * m.slot[r], 4), "dweights of slot %d",
           m.slot[r]);
  guarded_free(d, args.d ? d_used : 0, "d");
  guarded_free(h, h_used, "h");
  guarded_free(dweights, dweights.bytes, "dweights");
  free(a), free(b), free(bias), free(dot_bias), free(weights), free(h_in);
  map_free(m);
}

/* ---- wgrad and bias_grad ---------------------------------------------------------------------------------------- */

/* Sum over the rows of e of weight a[m] b[n]; b is 1 for bias gradients (b NULL). */
static double contraction(const moe_wgrad_args *args, const struct map *map, int64_t e, int64_t m, int64_t n,
                          double *magnitude) {
  double sum = 0;
  *magnitude = 0;
  for (int64_t r = map->offset[e]; r < map->offset[e + 1]; r++) {
    const int64_t ra = args->a_gather_topk ? map->slot[r] / args->a_gather_topk : r;
    const int64_t rb = args->b_gather_topk ? map->slot[r] / args->b_gather_topk : r;
    const double b = args->b ? (double)moe_load(args->b, args->b_dtype, rb * args->n + n) : 1;
    const double term =
        weight_of(args->weights, map, r) * b * (double)moe_load(args->a, args->a_dtype, ra * args->m + m);
    sum += term;
    *magnitude += fabs(term);
  }
  return sum;
}

static void check_contraction(const moe_wgrad_args *args, const struct map *map, const void *d,
                              const void *before) {
  for (int64_t e = 0; e < map->experts; e++)
    for (int64_t m = 0; m < args->m; m++)
      for (int64_t n = 0; n < args->n; n++) {
        double magnitude;
        const int64_t at = (e * args->m + m) * args->n + n, rows = map->offset[e + 1] - map->offset[e];
        const double old = before ? (double)moe_load(before, args->d_dtype, at) : 0;
        const double want = contraction(args, map, e, m, n, &magnitude) + old;
        near("gradient", moe_load(d, args->d_dtype, at), want,
             chain(magnitude + fabs(old), rows) + rounding(args->d_dtype, want), e * args->m + m, n);
      }
}

/* Draws a wgrad, or with `bias` a bias_grad, runs and checks it. */
static void check_grad(uint64_t seed, moe_context *ctx, bool bias) {
  const int64_t rows = random_size(&seed), topk = 1 + below(&seed, 3);
  const struct map map = map_new(&seed, rows, 1 + below(&seed, 4), topk);
  moe_wgrad_args args = {
      .rows = rows, .m = random_size(&seed), .n = random_size(&seed), .experts = map.experts};
  if (bias) args.m = below(&seed, 4) ? args.m : 1030, args.n = 1;
  args.row_offset = map.offset, args.row_slot = map.slot;
  args.a_gather_topk = below(&seed, 2) ? topk : 0, args.b_gather_topk = below(&seed, 2) ? topk : 0;
  args.a_dtype = dtypes[below(&seed, 3)], args.b_dtype = dtypes[below(&seed, 3)],
  args.d_dtype = dtypes[below(&seed, 3)];
  args.accumulate = (int)below(&seed, 2);
  const int64_t count = map.experts * args.m * args.n;
  void *a = random_array(&seed, args.a_dtype, rows * args.m),
       *b = random_array(&seed, args.b_dtype, rows * args.n);
  void *before = random_array(&seed, args.d_dtype, count);
  float *weights = random_array(&seed, MOE_FP32, rows);
  struct guarded d = guarded_new((size_t)count * dtype_bytes(args.d_dtype));
  if (args.accumulate) memcpy(guarded_data(d), before, d.bytes);
  args.a = a, args.b = bias ? NULL : b, args.d = guarded_data(d);
  args.weights = below(&seed, 2) ? weights : NULL;
  if (bias) {
    moe_bias_grad_args v = {.rows = rows,
                            .n = args.m,
                            .experts = map.experts,
                            .row_offset = map.offset,
                            .row_slot = map.slot,
                            .gather_topk = args.a_gather_topk,
                            .v = a,
                            .v_dtype = args.a_dtype,
                            .weights = args.weights,
                            .d = args.d,
                            .d_dtype = args.d_dtype,
                            .accumulate = args.accumulate};
    RUN(bias_grad, ctx, &v);
  } else {
    RUN(wgrad, ctx, &args);
  }
  check_contraction(&args, &map, args.d, args.accumulate ? before : NULL);
  guarded_free(d, d.bytes, "gradient");
  free(a), free(b), free(before), free(weights);
  map_free(map);
}

TEST(gemm_is_the_naive_product) {
  FOR_EACH_ISA(ctx, 2)
  for (uint64_t seed = 1; seed <= 250 && test_failures == 0; seed++) {
    check_gemm(seed, &ctx);
    EXPECT(test_failures == 0, "on %s with seed %llu", isa_names[isa], (unsigned long long)seed);
  }
}
TEST(wgrad_is_the_naive_contraction) {
  FOR_EACH_ISA(ctx, 2)
  for (uint64_t seed = 1; seed <= 100 && test_failures == 0; seed++) {
    check_grad(seed, &ctx, false);
    EXPECT(test_failures == 0, "on %s with seed %llu", isa_names[isa], (unsigned long long)seed);
  }
}
TEST(bias_grad_is_the_naive_sum) {
  FOR_EACH_ISA(ctx, 2)
  for (uint64_t seed = 1; seed <= 100 && test_failures == 0; seed++) {
    check_grad(seed, &ctx, true);
    EXPECT(test_failures == 0, "on %s with seed %llu", isa_names[isa], (unsigned long long)seed);
  }
}
/* ---- sizes that fill what is set aside --------------------------------------------------------------------------- */

/* Every expert has as many rows; slots in order. */
static struct map map_even(int64_t experts, int64_t each) {
  struct map m = {experts * each, experts * each, experts, 1, NULL, NULL};
  m.offset = malloc((size_t)(experts + 1) * sizeof *m.offset);
  m.slot = malloc((size_t)m.rows * sizeof *m.slot);
  for (int64_t e = 0; e <= experts; e++) m.offset[e] = (int32_t)(e * each);
  for (int64_t r = 0; r < m.rows; r++) m.slot[r] = (int32_t)r;
  return m;
}

/* One empty tile an expert too many would not fit. One thread, whose memory lies behind the tiles. */
TEST(experts_of_one_whole_tile) {
  enum {
    EXPERTS = 64,
    EACH = 16,
    SIZE = 16
  };
  uint64_t seed = 1;
  const struct map m = map_even(EXPERTS, EACH);
  float *a = random_array(&seed, MOE_FP32, m.rows * SIZE),
        *b = random_array(&seed, MOE_FP32, EXPERTS * SIZE * SIZE);
  FOR_EACH_ISA(ctx, 1) {
    const struct guarded d = guarded_new((size_t)(m.rows * SIZE) * sizeof(float));
    moe_gemm_args args = {.rows = m.rows, .n = SIZE, .k = SIZE, .experts = EXPERTS, .row_offset = m.offset};
    args.a = a, args.b = b, args.d = guarded_data(d);
    args.a_dtype = args.b_dtype = args.d_dtype = MOE_FP32;
    RUN(gemm, &ctx, &args);
    check_sums(&args, &m, args.d, 0);
    guarded_free(d, d.bytes, isa_names[isa]);
  }
  free(a), free(b);
  map_free(m);
}

/* Two whole chunks of rows: reading one row too many would write into the sums of the first. */
TEST(a_gradient_over_whole_chunks) {
  enum {
    ROWS = 256,
    M = 3,
    N = 512
  };
  uint64_t seed = 1;
  const struct map map = map_even(1, ROWS);
  float *a = random_array(&seed, MOE_FP32, ROWS * M), *b = random_array(&seed, MOE_FP32, ROWS * N);
  FOR_EACH_ISA(ctx, 1) {
    const struct guarded d = guarded_new((size_t)M * N * dtype_bytes(MOE_BF16));
    moe_wgrad_args args = {.rows = ROWS, .m = M, .n = N, .experts = 1, .row_offset = map.offset};
    args.a = a, args.b = b, args.d = guarded_data(d);
    args.a_dtype = args.b_dtype = MOE_FP32, args.d_dtype = MOE_BF16;
    RUN(wgrad, &ctx, &args);
    check_contraction(&args, &map, args.d, NULL);
    guarded_free(d, d.bytes, isa_names[isa]);
  }
  free(a), free(b);
  map_free(map);
}

TEST_MAIN()
