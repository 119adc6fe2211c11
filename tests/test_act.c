/* SPDX-License-Identifier: Apache-2.0
 *
 * What: every row of moeblas_act.def: src/act.h and the ops act and act_backward against the double
 * expressions of the row, and the row's DF against finite differences of its F.
 * Idea: one error model for all rows. A float evaluation may lose A ulps of the result and as much as
 * moving its argument by B ulps would: |error| <= 2^-24 (A |f| + B |x f'|), and for the slope, whose terms
 * cancel where it is small, 2^-24 (A (|f'| + |f/x|) + B |x f''|). The worst ratio found is within a factor
 * of two of each row's A.
 * Invariant: no expression here is taken from src/act.h. */
#include "act.h"
#include "ops_call.h"

#define SIG(v) (1 / (1 + exp(-(v))))

static double f_of(int kind, double x, double alpha, double beta) {
  (void)alpha, (void)beta;
  switch (kind) {
#define MOE_ACT(ENUM, value, fn, plain, gated, a0, b0, F, DF) \
  case value:                                                 \
    return (F);
#include "moeblas_act.def"
#undef MOE_ACT
  default: return NAN;
  }
}

static double df_of(int kind, double x, double alpha, double beta) {
  (void)alpha, (void)beta;
  switch (kind) {
#define MOE_ACT(ENUM, value, fn, plain, gated, a0, b0, F, DF) \
  case value:                                                 \
    return (DF);
#include "moeblas_act.def"
#undef MOE_ACT
  default: return NAN;
  }
}

struct row {
  const char *name;
  double alpha, beta;
};
static const struct row ROWS[MOE_ACT_COUNT] = {
#define MOE_ACT(ENUM, value, fn, plain, gated, a0, b0, F, DF) [value] = {plain, a0, b0},
#include "moeblas_act.def"
#undef MOE_ACT
};

/* A of the error model, value and slope; what a row is held to that is not listed here is in ulps_of. The tanh forms lose
 * 1 - t^2 where t is near 1. */
static const double ULPS[][2] = {
    [MOE_ACT_SILU] = {4, 12},       [MOE_ACT_GELU] = {4, 4}, [MOE_ACT_GELU_TANH] = {4, 24},
    [MOE_ACT_QUICK_GELU] = {4, 12}, [MOE_ACT_RELU] = {0, 0}, [MOE_ACT_RELU2] = {1, 1},
    [MOE_ACT_RELU2_TANH] = {6, 32}, [MOE_ACT_SITU] = {8, 32}};
enum {
  ARGUMENT_ULPS = 4
};
static double ulps_of(int kind, int slope) {
  if ((size_t)kind < sizeof ULPS / sizeof *ULPS) return ULPS[kind][slope];
  return slope ? 32 : 8;
}
/* What the double expressions themselves lose (1 + erf far out), and where floats underflow. */
static double floor_of(double x) { return 0x1p-51 * fabs(x) + 1e-35; }

static void check_point(int kind, float x, float alpha, float beta) {
  const double f = f_of(kind, x, alpha, beta), df = df_of(kind, x, alpha, beta), step = 1e-4 * (1 + fabs(x));
  const double ddf = (df_of(kind, x + step, alpha, beta) - df_of(kind, x - step, alpha, beta)) / (2 * step);
  const double error = fabs(moe_act_f(kind, x, alpha, beta) - f);
  const double derror = fabs(moe_act_df(kind, x, alpha, beta) - df);
  const double slack = ARGUMENT_ULPS * fabs(x * df), dslack = ARGUMENT_ULPS * fabs(x * ddf);
  const double size = fabs(f), dsize = fabs(df) + (x != 0 ? fabs(f / x) : 0);
  EXPECT(error <= 0x1p-24 * (ulps_of(kind, 0) * size + slack) + floor_of(x), "%s(%a) misses %a by %a",
         ROWS[kind].name, x, f, error);
  EXPECT(derror <= 0x1p-24 * (ulps_of(kind, 1) * dsize + dslack) + floor_of(x), "%s'(%a) misses %a by %a",
         ROWS[kind].name, x, df, derror);
}

/* x over all binades from 2^-100 to 100, and densely in the middle. */
TEST(floats_follow_the_rows) {
  uint64_t seed = 5;
  for (int kind = 0; kind < MOE_ACT_COUNT; kind++) {
    const float alpha = (float)ROWS[kind].alpha, beta = (float)ROWS[kind].beta;
    for (int i = -60000; i <= 60000; i++) check_point(kind, (float)i * 0x1p-11f, alpha, beta);
    for (int i = 0; i < 100000; i++) {
      const float x = ldexpf(test_uniform(&seed), (int)(test_random(&seed) % 107) - 100);
      check_point(kind, x, alpha, beta);
      if (alpha != 0) check_point(kind, x, 0.5f + fabsf(test_uniform(&seed)), beta);
      if (beta != 0) check_point(kind, x, alpha, 3 + 5 * fabsf(test_uniform(&seed)));
    }
  }
}

TEST(slopes_of_the_rows_are_the_derivatives) {
  for (int kind = 0; kind < MOE_ACT_COUNT; kind++)
    for (int i = -4000; i <= 4000; i++) {
      const double x = i * 0.005 + 0.001, alpha = ROWS[kind].alpha, beta = ROWS[kind].beta,
                   step = 1e-5 * (1 + fabs(x));
      const double df = df_of(kind, x, alpha, beta);
      const double slope =
          (f_of(kind, x + step, alpha, beta) - f_of(kind, x - step, alpha, beta)) / (2 * step);
      EXPECT(fabs(df - slope) <= 1e-7 * (fabs(df) + 1e-2), "%s'(%g) = %g, slope %g", ROWS[kind].name, x, df,
             slope);
    }
}

TEST(infinities_zero_and_nan) {
  for (int kind = 0; kind < MOE_ACT_COUNT; kind++) {
    const float alpha = (float)ROWS[kind].alpha, beta = (float)ROWS[kind].beta;
    const float high = moe_act_f(kind, 1e30f, alpha, beta), low = moe_act_f(kind, -1e30f, alpha, beta);
    const int bounded = kind == MOE_ACT_RELU2_TANH || kind == MOE_ACT_SITU;
    EXPECT(bounded ? high > 1 && high <= beta * beta : high >= 1e30f, "%s(1e30) = %g", ROWS[kind].name, high);
    EXPECT(fabsf(low) <= 1e-5f, "%s(-1e30) = %g", ROWS[kind].name, low);
    EXPECT(moe_act_f(kind, 0.0f, alpha, beta) == 0, "%s(0)", ROWS[kind].name);
    EXPECT(isnan(moe_act_f(kind, NAN, alpha, beta)), "%s(NaN)", ROWS[kind].name);
    EXPECT(isnan(moe_act_df(kind, NAN, alpha, beta)), "%s'(NaN)", ROWS[kind].name);
  }
}

/* ---- the ops ----------------------------------------------------------------------------------------- */

static double up_of(const moe_act_desc *act, double u) {
  const double c = fmin(fmax(u, act->up_min), act->up_max);
  return (act->up_beta > 0 ? act->up_beta * tanh(c / act->up_beta) : c) + act->up_offset;
}
static double dup_of(const moe_act_desc *act, double u) {
  if (u < act->up_min || u > act->up_max) return 0;
  return act->up_beta > 0 ? 1 - pow(tanh(u / act->up_beta), 2) : 1;
}
static double gate_of(const moe_act_desc *act, double g) {
  return f_of(act->kind, fmin(g, act->gate_max), act->alpha, act->beta);
}
static double dgate_of(const moe_act_desc *act, double g) {
  return g > act->gate_max ? 0 : df_of(act->kind, g, act->alpha, act->beta);
}

/* Column of half `up` (0 or 1) of element f in a row of h, by walking the definition of the layout. */
static int64_t column_of(const moe_act_desc *act, int64_t inter, int64_t f, int up) {
  if (!act->gated) return f;
  if (act->layout == MOE_LAYOUT_INTERLEAVED)
    return (f / act->interleave) * 2 * act->interleave + (up ? act->interleave : 0) + f % act->interleave;
  return (act->layout == MOE_LAYOUT_CONCAT_UP_FIRST) == up ? f : inter + f;
}

static void check_near(double got, double want, double size, moe_dtype dtype, const char *what, int64_t r,
                       int64_t f) {
  const double bound = half_ulp(dtype) * fabs(want) + 0x1p-19 * size + (dtype == MOE_FP16 ? 0x1p-25 : 1e-35);
  EXPECT(fabs(got - want) <= bound, "%s row %d column %d: %.9g, want %.9g", what, (int)r, (int)f, got, want);
}

static void check_forward(const moe_act_desc *act, int64_t rows, int64_t inter, moe_dtype dtype,
                          const void *h, int threads) {
  void *a = guarded((size_t)(rows * inter) * element_bytes(dtype));
  moe_act_args args = {.rows = rows, .inter = inter, .act = act, .h = h, .a = a, .dtype = dtype};
  EXPECT(call_act(&args, threads) == MOE_OK, "status");
  for (int64_t r = 0; r < rows; r++)
    for (int64_t f = 0; f < inter; f++) {
      const int64_t row = r * inter * (act->gated + 1);
      const double g = at(h, dtype, row + column_of(act, inter, f, 0));
      const double v = act->gated ? up_of(act, at(h, dtype, row + column_of(act, inter, f, 1))) : 1;
      const double size = fabs(gate_of(act, g)) * (fabs(v) + fabs(act->up_offset));
      check_near(at(a, dtype, r * inter + f), gate_of(act, g) * v, size, dtype, "a", r, f);
    }
  guarded_free(a);
}

static void check_backward(const moe_act_desc *act, int64_t rows, int64_t inter, moe_dtype dtype, void *h,
                           int threads, uint64_t *seed) {
  const int64_t width = inter * (act->gated + 1);
  const size_t bytes = (size_t)(rows * width) * element_bytes(dtype);
  void *da = random_array(dtype, rows * inter, 2, seed), *dh = guarded(bytes);
  moe_act_backward_args args = {
      .rows = rows, .inter = inter, .act = act, .h = h, .da = da, .dh = dh, .dtype = dtype};
  EXPECT(call_act_backward(&args, threads) == MOE_OK, "status");
  for (int64_t r = 0; r < rows; r++)
    for (int64_t f = 0; f < inter; f++) {
      const int64_t ig = r * width + column_of(act, inter, f, 0),
                    iu = r * width + column_of(act, inter, f, 1);
      const double g = at(h, dtype, ig), d = at(da, dtype, r * inter + f), size = fabs(d) * (1 + fabs(g));
      const double v = act->gated ? up_of(act, at(h, dtype, iu)) : 1;
      check_near(at(dh, dtype, ig), d * v * dgate_of(act, g), size * (fabs(v) + fabs(act->up_offset)), dtype,
                 "dgate", r, f);
      if (!act->gated) continue;
      const double u = at(h, dtype, iu);
      check_near(at(dh, dtype, iu), d * gate_of(act, g) * dup_of(act, u), size * (1 + fabs(g)), dtype, "dup",
                 r, f);
    }
  args.dh = h;
  EXPECT(call_act_backward(&args, threads) == MOE_OK, "status");
  EXPECT(memcmp(h, dh, bytes) == 0, "in place, %s", ROWS[act->kind].name);
  guarded_free(da), guarded_free(dh);
}

/* Every form of the gate: bare, clamped and offset as GPT-OSS has it, soft bound as Kimi K3. */
static moe_act_desc form(int kind, int gated, int variant) {
  moe_act_desc act = {.kind = (moe_activation)kind, .gated = gated, .interleave = 1};
  act.alpha = (float)ROWS[kind].alpha, act.beta = (float)ROWS[kind].beta;
  act.gate_max = variant == 1 ? 1.5f : INFINITY;
  act.up_min = variant == 1 ? -0.75f : -INFINITY;
  act.up_max = variant == 1 ? 1.25f : INFINITY;
  act.up_offset = variant == 1 ? 1 : 0;
  act.up_beta = variant == 2 ? 2.5f : 0;
  return act;
}

TEST(ops_follow_the_gated_form_in_every_layout) {
  static const struct {
    moe_layout layout;
    int64_t inter, interleave;
  } SHAPES[] = {{MOE_LAYOUT_CONCAT_GATE_FIRST, 1, 1}, {MOE_LAYOUT_CONCAT_GATE_FIRST, 33, 1},
                {MOE_LAYOUT_CONCAT_UP_FIRST, 1, 1},   {MOE_LAYOUT_CONCAT_UP_FIRST, 520, 1},
                {MOE_LAYOUT_INTERLEAVED, 7, 1},       {MOE_LAYOUT_INTERLEAVED, 1030, 1},
                {MOE_LAYOUT_INTERLEAVED, 96, 8},      {MOE_LAYOUT_INTERLEAVED, 1200, 600},
                {MOE_LAYOUT_INTERLEAVED, 64, 64},     {MOE_LAYOUT_INTERLEAVED, 1533, 7}};
  uint64_t seed = 6;
  int count = 0;
  for (int kind = 0; kind < MOE_ACT_COUNT; kind++)
    for (int shape = 0; shape < 10; shape++)
      for (int variant = -1; variant < 3; variant++)
        for (moe_dtype dtype = MOE_FP32; dtype <= MOE_FP16; dtype++) {
          moe_act_desc act = form(kind, variant >= 0, variant);
          act.layout = SHAPES[shape].layout, act.interleave = SHAPES[shape].interleave;
          const int64_t inter = SHAPES[shape].inter, rows = count % 4;
          void *h = random_array(dtype, rows * inter * (act.gated + 1), 4, &seed);
          check_forward(&act, rows, inter, dtype, h, 1 + count % 4);
          check_backward(&act, rows, inter, dtype, h, 1 + count % 4, &seed);
          guarded_free(h);
          count++;
        }
}

/* The masks look at the unclamped value and include the bound itself. */
TEST(gradient_masks_are_inclusive) {
  const moe_act_desc act = form(MOE_ACT_SILU, 1, 1);
  float da[1] = {1}, dh[2], h[2];
  moe_act_backward_args args = {
      .rows = 1, .inter = 1, .act = &act, .h = h, .da = da, .dh = dh, .dtype = MOE_FP32};
  static const float GATES[] = {1.5f, 1.5000001f}, UPS[] = {1.25f, -0.75f, 1.2500001f, -0.75000006f};
  for (int g = 0; g < 2; g++)
    for (int u = 0; u < 4; u++) {
      h[0] = GATES[g], h[1] = UPS[u];
      EXPECT(call_act_backward(&args, 1) == MOE_OK, "status");
      EXPECT((dh[0] != 0) == (g == 0), "gate %.9g: %g", h[0], dh[0]);
      EXPECT((dh[1] != 0) == (u < 2), "up %.9g: %g", h[1], dh[1]);
    }
}

/* The reference itself: its gradients against finite differences of its value. */
TEST(the_gated_reference_differentiates) {
  uint64_t seed = 7;
  const double step = 1e-6;
  for (int i = 0; i < 3000; i++) {
    const moe_act_desc act = form(i % MOE_ACT_COUNT, 1, i / MOE_ACT_COUNT % 3);
    const double g = 4 * test_uniform(&seed), u = 4 * test_uniform(&seed);
    if (fabs(g) < 1e-3 || fabs(g - act.gate_max) < 1e-3) continue;
    if (fabs(u - act.up_min) < 1e-3 || fabs(u - act.up_max) < 1e-3) continue;
    const double dg = (gate_of(&act, g + step) - gate_of(&act, g - step)) / (2 * step);
    const double du = (up_of(&act, u + step) - up_of(&act, u - step)) / (2 * step);
    EXPECT(fabs(dg - dgate_of(&act, g)) < 1e-6 * (1 + fabs(dg)), "gate %g of %s", g, ROWS[act.kind].name);
    EXPECT(fabs(du - dup_of(&act, u)) < 1e-6, "up %g", u);
  }
}

TEST_MAIN()
