/* SPDX-License-Identifier: Apache-2.0
 *
 * What the matrix products of the CPU back end promise besides their values: the same bits for any number of threads, batch
 * and position of a row, no NaN in the row next door, no access outside whatever the offsets say. */
#include <math.h>

#include "products.h"

/* ---- bits ------------------------------------------------------------------------------------------------------- */

enum {
  ROWS = 203,
  INTER = 210,
  DEPTH = 137
}; /* more than a tile, a block and a slice; nothing even */

struct outputs {
  float d[ROWS * 2 * INTER], h[ROWS * 2 * INTER], dweights[ROWS];
};

/* A gated product of one expert; rows begin .. begin+count-1 of it, written to their places in `out`. */
static void run_rows(moe_context *ctx, moe_epilogue epilogue, int b_kn, const float *a, const float *b,
                     int64_t begin, int64_t count, struct outputs *out) {
  static const moe_act_desc act = {.kind = MOE_ACT_SILU,
                                   .gated = 1,
                                   .alpha = 1,
                                   .gate_max = 7,
                                   .up_min = -7,
                                   .up_max = 7,
                                   .layout = MOE_LAYOUT_INTERLEAVED,
                                   .interleave = 1};
  const int64_t n = epilogue == MOE_EPILOGUE_ACT ? 2 * INTER : INTER;
  moe_gemm_args args = {
      .rows = count, .n = n, .k = DEPTH, .experts = 1, .b_kn = b_kn, .epilogue = epilogue, .act = &act};
  args.a_dtype = args.b_dtype = args.d_dtype = args.bias_dtype = MOE_FP32;
  args.a = a + begin * DEPTH, args.b = b, args.d = out->d + begin * INTER;
  args.dot_bias = epilogue == MOE_EPILOGUE_DACT ? b : NULL;
  args.h = args.dh = out->h + begin * 2 * INTER;
  args.dweights = out->dweights + begin;
  if (epilogue == MOE_EPILOGUE_DACT)
    for (int64_t i = 0; i < count * 2 * INTER; i++)
      ((float *)args.h)[i] = a[(begin * 2 * INTER + i) % (ROWS * DEPTH)];
  RUN(gemm, ctx, &args);
}

static bool same_row(const struct outputs *x, const struct outputs *y, int64_t row) {
  const size_t wide = 2 * INTER * sizeof(float);
  return memcmp(x->d + row * INTER, y->d + row * INTER, wide / 2) == 0 &&
         memcmp(x->h + row * 2 * INTER, y->h + row * 2 * INTER, wide) == 0 &&
         x->dweights[row] == y->dweights[row];
}

/* The whole batch, against: other numbers of threads, batches cut in pieces, and NaN in another row. */
static void check_bits(const char *isa, moe_epilogue epilogue, int b_kn) {
  static const int64_t cuts[] = {0, 1, 3, 20, 67, 131, 132, ROWS};
  uint64_t seed = 7;
  float *a = random_array(&seed, MOE_FP32, ROWS * DEPTH),
        *b = random_array(&seed, MOE_FP32, 2 * INTER * DEPTH);
  struct outputs *whole = calloc(1, sizeof *whole), *other = calloc(1, sizeof *other);
  moe_context ctx;
  open_isa(isa, &ctx, 1);
  run_rows(&ctx, epilogue, b_kn, a, b, 0, ROWS, whole);
  for (ctx.units = 2; ctx.units <= 4; ctx.units++) {
    run_rows(&ctx, epilogue, b_kn, a, b, 0, ROWS, other);
    EXPECT(memcmp(whole, other, sizeof *whole) == 0, "%s epilogue %d kn %d: %d threads", isa, (int)epilogue,
           b_kn, ctx.units);
  }
  for (size_t i = 0; i + 1 < sizeof cuts / sizeof *cuts; i++)
    run_rows(&ctx, epilogue, b_kn, a, b, cuts[i], cuts[i + 1] - cuts[i], other);
  for (int64_t r = 0; r < ROWS; r++)
    EXPECT(same_row(whole, other, r), "%s epilogue %d kn %d: row %d of a smaller batch", isa, (int)epilogue,
           b_kn, (int)r);
  float *poison = a + 70 * DEPTH;
  for (int64_t k = 0; k < DEPTH; k++) poison[k] = NAN;
  run_rows(&ctx, epilogue, b_kn, a, b, 0, ROWS, other);
  EXPECT(isnan(other->d[70 * INTER]) || epilogue == MOE_EPILOGUE_DACT, "the NaN is seen");
  for (int64_t r = 0; r < ROWS && epilogue != MOE_EPILOGUE_DACT;
       r++) /* there h is made from a, so NaN spreads */
    EXPECT(r == 70 || same_row(whole, other, r), "%s epilogue %d kn %d: NaN reached row %d", isa,
           (int)epilogue, b_kn, (int)r);
  free(a), free(b), free(whole), free(other);
}

TEST(gemm_bits_depend_on_the_row_alone) {
  FOR_EACH_ISA(ctx, 1)
  for (int epilogue = 0; epilogue < 3; epilogue++)
    for (int b_kn = 0; b_kn < 2; b_kn++) check_bits(isa_names[isa], (moe_epilogue)epilogue, b_kn);
}

/* The bits of an element of a weight gradient come from its rows in order: not from threads, nor from its place. */
TEST(wgrad_bits_depend_on_the_rows_alone) {
  enum {
    M = 200,
    N = 544 /* whole vectors: the kernel writes d; the single column below goes by way of scratch */
  };
  uint64_t seed = 9;
  float *a = random_array(&seed, MOE_FP32, ROWS * M), *b = random_array(&seed, MOE_FP32, ROWS * N);
  float *d = malloc(M * N * sizeof *d), *other = malloc(M * N * sizeof *other),
        *part = malloc(ROWS * sizeof *part);
  for (int64_t r = 0; r < ROWS; r++) part[r] = b[r * N + 517];
  FOR_EACH_ISA(ctx, 1) {
    moe_wgrad_args args = {.rows = ROWS, .m = M, .n = N, .experts = 1, .a = a, .b = b, .d = d};
    args.a_dtype = args.b_dtype = args.d_dtype = MOE_FP32;
    RUN(wgrad, &ctx, &args);
    args.d = other;
    for (ctx.units = 2; ctx.units <= 4; ctx.units++) {
      RUN(wgrad, &ctx, &args);
      EXPECT(memcmp(d, other, M * N * sizeof *d) == 0, "%s: %d threads", isa_names[isa], ctx.units);
    }
    args.b = part, args.n = 1;
    RUN(wgrad, &ctx, &args);
    for (int64_t m = 0; m < M; m++)
      EXPECT(d[m * N + 517] == other[m], "%s: column 517 alone, row %d", isa_names[isa], (int)m);
  }
  free(a), free(b), free(d), free(other), free(part);
}

/* ---- hostile and empty ---------------------------------------------------------------------------------------- */

TEST(bad_offsets_stay_inside) {
  enum {
    R = 37,
    E = 5,
    N = 21,
    K = 9
  };
  static const int32_t offsets[][E + 1] = {{-5, -1, 3, 90, 2147483647, -2147483647},
                                           {37, 30, 20, 10, 5, 0},
                                           {0, 37, 0, 37, 0, 37},
                                           {9, 9, 9, 9, 9, 9}};
  uint64_t seed = 5;
  float *a = random_array(&seed, MOE_FP32, R * K), *b = random_array(&seed, MOE_FP32, E * R * K * N);
  FOR_EACH_ISA(ctx, 2)
  for (size_t i = 0; i < sizeof offsets / sizeof *offsets; i++) {
    const struct guarded d = guarded_new(R * N * 4), dw = guarded_new(E * K * N * 4),
                         db = guarded_new(E * N * 4);
    moe_gemm_args gemm = {.rows = R, .n = N, .k = K, .experts = E, .row_offset = offsets[i], .a = a, .b = b};
    gemm.a_dtype = gemm.b_dtype = gemm.d_dtype = MOE_FP32, gemm.d = guarded_data(d);
    moe_wgrad_args wgrad = {
        .rows = R, .m = K, .n = N, .experts = E, .row_offset = offsets[i], .a = a, .b = b};
    wgrad.a_dtype = wgrad.b_dtype = wgrad.d_dtype = MOE_FP32, wgrad.d = guarded_data(dw);
    moe_bias_grad_args bias = {.rows = R, .n = N, .experts = E, .row_offset = offsets[i], .v = b};
    bias.v_dtype = bias.d_dtype = MOE_FP32, bias.d = guarded_data(db);
    RUN(gemm, &ctx, &gemm);
    RUN(wgrad, &ctx, &wgrad);
    RUN(bias_grad, &ctx, &bias);
    EXPECT(i != 3 || poisoned(guarded_data(d), d.bytes), "no expert has rows, yet d is written");
    for (int64_t j = 0; j < E * N; j++)
      EXPECT(i != 3 || ((float *)bias.d)[j] == 0, "empty experts have gradient 0");
    guarded_free(d, d.bytes, "d"), guarded_free(dw, dw.bytes, "dw"), guarded_free(db, db.bytes, "db");
  }
  free(a), free(b);
}

/* Offsets that name every row three times: the experts begin where the one before ended, so each is added once. */
TEST(no_row_has_two_experts) {
  enum {
    R = 37,
    E = 5,
    N = 21,
    K = 9
  };
  static const int32_t offsets[E + 1] = {0, R, 0, R, 0, R};
  uint64_t seed = 6;
  float *a = random_array(&seed, MOE_FP32, R * K), *b = random_array(&seed, MOE_FP32, E * K * N);
  FOR_EACH_ISA(ctx, 1) {
    float once[R * N], d[R * N] = {0};
    moe_gemm_args args = {.rows = R, .n = N, .k = K, .experts = 1, .a = a, .b = b, .d = once};
    args.a_dtype = args.b_dtype = args.d_dtype = MOE_FP32;
    RUN(gemm, &ctx, &args);
    args.experts = E, args.row_offset = offsets, args.accumulate = 1, args.d = d;
    RUN(gemm, &ctx, &args);
    for (int64_t i = 0; i < R * N; i++) EXPECT(d[i] == once[i], "%s: element %d", isa_names[isa], (int)i);
  }
  free(a), free(b);
}

TEST(an_unknown_isa_is_refused_by_name) {
  const struct moe_cpu_kernel *kernel;
  setenv("MOE_CPU_ISA", "avx1024", 1);
  const moe_status status = moe_cpu_kernel_select(&kernel);
  unsetenv("MOE_CPU_ISA");
  EXPECT(status == MOE_ERROR_UNSUPPORTED && strstr(moe_last_error(), "avx1024"), "%d: %s", (int)status,
         moe_last_error());
  EXPECT(moe_cpu_kernel_select(&kernel) == MOE_OK && kernel == moe_cpu_kernel_best(), "unset: the best");
}

TEST_MAIN()
