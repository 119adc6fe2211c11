/* SPDX-License-Identifier: Apache-2.0
 *
 * The public edge of the ops: a valid call of each runs with exactly the scratch it asks for, and every size,
 * enum, array and byte of scratch that is wrong is refused with a sentence. No rows and no tokens need no
 * arrays. */
#include "test.h"

#include <limits.h>
#include <math.h>

#include "moeblas_ops.h"
#include "support.h"

/* What the valid calls point to: 4 tokens, 2 experts, topk 2, 8 rows, widths of 8. Zeros will do. */
static _Alignas(16) float in[256], more_in[256];
static _Alignas(16) float out[256], more_out[256];
static _Alignas(16) int32_t ids[8], offsets[3], row_slot[8], slot_row[8], counts[2];
static _Alignas(16) unsigned char scratch[1 << 22];
static const moe_router_desc router = {.balance = MOE_BALANCE_BATCH, .balance_coeff = 1};
static const moe_act_desc act = {.gated = 1};

#define HEAD(op)       .size = sizeof(moe_##op##_args), .scratch = scratch, .scratch_bytes = sizeof scratch
#define VALID(op, ...) static const moe_##op##_args valid_##op = {HEAD(op), __VA_ARGS__};

VALID(route, .tokens = 4, .experts = 2, .topk = 2, .router = &router, .logits = in, .logits_dtype = MOE_FP32,
      .ids = ids, .weights = out, .counts = counts)
VALID(router_loss, .tokens = 4, .experts = 2, .topk = 2, .router = &router, .logits = in,
      .logits_dtype = MOE_FP32, .ids = ids, .losses = out, .slopes = more_out)
VALID(route_backward, .tokens = 4, .experts = 2, .topk = 2, .router = &router, .logits = in,
      .logits_dtype = MOE_FP32, .ids = ids, .dlogits = out, .dlogits_dtype = MOE_FP32)
VALID(token_mask, .tokens = 4, .token_count = counts, .mask = (uint8_t *)(void *)out)
VALID(sort, .tokens = 4, .experts = 2, .topk = 2, .ids = ids, .weights = in, .capacity = 3,
      .row_offset = offsets, .row_slot = row_slot, .slot_row = slot_row, .counts = counts)
VALID(bias_update, .experts = 2, .counts = counts, .rate = 0.5f, .bias = out)
VALID(load_stats, .experts = 2, .counts = counts, .load = (moe_load_summary *)(void *)out)
VALID(gemm, .rows = 8, .n = 8, .k = 8, .experts = 2, .row_offset = offsets, .row_slot = row_slot,
      .gather_topk = 2, .a = in, .a_dtype = MOE_FP32, .b = more_in, .b_dtype = MOE_FP32,
      .bias_dtype = MOE_FP32, .d = out, .d_dtype = MOE_FP32, .h = more_out, .dh = more_out)
VALID(wgrad, .rows = 8, .m = 8, .n = 8, .experts = 2, .row_offset = offsets, .row_slot = row_slot, .a = in,
      .a_dtype = MOE_FP32, .b = more_in, .b_dtype = MOE_FP32, .d = out, .d_dtype = MOE_FP32)
VALID(bias_grad, .rows = 8, .n = 8, .experts = 2, .row_offset = offsets, .row_slot = row_slot, .v = in,
      .v_dtype = MOE_FP32, .d = out, .d_dtype = MOE_FP32)
VALID(permute, .rows = 8, .hidden = 8, .topk = 2, .experts = 2, .row_offset = offsets, .row_slot = row_slot,
      .x = in, .y = out, .dtype = MOE_FP32)
VALID(combine, .tokens = 4, .hidden = 8, .topk = 2, .rows = 8, .slot_row = slot_row, .y = in,
      .y_dtype = MOE_FP32, .out = out, .out_dtype = MOE_FP32)
VALID(combine_backward, .tokens = 4, .hidden = 8, .topk = 2, .rows = 8, .slot_row = slot_row, .y = in,
      .y_dtype = MOE_FP32, .dout = more_in, .dout_dtype = MOE_FP32, .dy = out, .dweights = more_out)
VALID(act, .rows = 8, .inter = 8, .act = &act, .h = in, .a = out, .dtype = MOE_FP32)
VALID(act_backward, .rows = 8, .inter = 8, .act = &act, .h = in, .da = more_in, .dh = out, .dtype = MOE_FP32)
VALID(convert, .count = 64, .x = in, .x_dtype = MOE_FP32, .y = out, .y_dtype = MOE_BF16)
VALID(copy, .dst = out, .src = in, .bytes = 100)
VALID(zero, .data = out, .bytes = 100)

static moe_context *open_cpu(void) {
  moe_context *ctx;
  if (moe_context_create(&ctx, MOE_BACKEND_CPU, 2) != MOE_OK) exit(2);
  return ctx;
}

/* ---- what is the same for every op */

#define MOE_OP(op)                                                                                      \
  static void check_##op(moe_context *ctx) {                                                            \
    moe_##op##_args a = valid_##op;                                                                     \
    const size_t bytes = moe_##op##_scratch(ctx, &a);                                                   \
    REQUIRE(bytes <= sizeof scratch, #op ": scratch of %zu bytes: %s", bytes, moe_last_error());        \
    struct guarded exact;                                                                               \
    REQUIRE(guarded_open(&exact, bytes, 0, 0xff), "no memory");                                         \
    a.scratch = bytes ? exact.data : NULL;                                                              \
    a.scratch_bytes = bytes;                                                                            \
    EXPECT(moe_##op(ctx, &a, NULL) == MOE_OK, "%s", moe_last_error());                                  \
    EXPECT(guarded_intact(&exact), #op ": wrote next to its scratch");                                  \
    guarded_close(&exact);                                                                              \
    if (bytes > 0) {                                                                                    \
      a.scratch = scratch;                                                                              \
      a.scratch_bytes = bytes - 1;                                                                      \
      REFUSED(moe_##op(ctx, &a, NULL), WORKSPACE, #op ": scratch_bytes = ");                            \
      a.scratch_bytes = bytes, a.scratch = NULL;                                                        \
      REFUSED(moe_##op(ctx, &a, NULL), WORKSPACE, #op ": scratch = NULL, wanted ");                     \
      a.scratch_bytes = sizeof scratch - 16, a.scratch = scratch + 8;                                   \
      REFUSED(moe_##op(ctx, &a, NULL), ARGUMENT, #op ": scratch = 0x");                                 \
    }                                                                                                   \
    a = valid_##op;                                                                                     \
    REFUSED(moe_##op(NULL, &a, NULL), ARGUMENT, #op ": ctx = NULL, wanted a context");                  \
    REFUSED(moe_##op(ctx, NULL, NULL), ARGUMENT, #op ": args: NULL, wanted a struct");                  \
    REFUSED(moe_##op(ctx, &a, (moe_stream)(void *)in), ARGUMENT, #op ": stream is given, wanted NULL"); \
    EXPECT(moe_##op##_scratch(NULL, &a) == SIZE_MAX && moe_##op##_scratch(ctx, NULL) == SIZE_MAX,       \
           #op ": NULL has a scratch size");                                                            \
    a.sm_limit = 3;                                                                                     \
    REFUSED(moe_##op(ctx, &a, NULL), ARGUMENT, #op ": sm_limit = 3, wanted 0 .. 2");                    \
    a.sm_limit = 2, a.schedule = (moe_schedule)2;                                                       \
    REFUSED(moe_##op(ctx, &a, NULL), ARGUMENT, #op ": schedule = 2, wanted 0 .. 1");                    \
    EXPECT(moe_##op##_scratch(ctx, &a) == SIZE_MAX, #op ": a bad schedule has a scratch size");         \
    a.size = 0;                                                                                         \
    REFUSED(moe_##op(ctx, &a, NULL), ARGUMENT, #op ": args: size = 0, wanted ");                        \
    EXPECT(moe_##op##_scratch(ctx, &a) == SIZE_MAX, #op ": size 0 has a scratch size");                 \
    struct {                                                                                            \
      moe_##op##_args args;                                                                             \
      char tail[24];                                                                                    \
    } longer = {.args = valid_##op};                                                                    \
    longer.args.size = sizeof longer;                                                                   \
    EXPECT(moe_##op(ctx, &longer.args, NULL) == MOE_OK, "%s", moe_last_error());                        \
    longer.tail[23] = 1;                                                                                \
    REFUSED(moe_##op(ctx, &longer.args, NULL), UNSUPPORTED, #op ": args: size = ");                     \
  }
#include "ops.def"
#undef MOE_OP

TEST(every_op) {
  moe_context *ctx = open_cpu();
#define MOE_OP(op) check_##op(ctx);
#include "ops.def"
#undef MOE_OP
  moe_context_destroy(ctx);
}

/* ---- what is wrong with one field */

/* A valid call is refused after these assignments to its fields a.x. */
#define BAD(op, sentence, ...)                                     \
  do {                                                             \
    moe_##op##_args a = valid_##op;                                \
    __VA_ARGS__;                                                   \
    REFUSED(moe_##op(ctx, &a, NULL), ARGUMENT, #op ": " sentence); \
  } while (0)
/* ... and so is its scratch query: sizes, flags and descriptors. */
#define BAD_SIZE(op, sentence, ...)                                                        \
  do {                                                                                     \
    BAD(op, sentence, __VA_ARGS__);                                                        \
    moe_##op##_args a = valid_##op;                                                        \
    __VA_ARGS__;                                                                           \
    EXPECT(moe_##op##_scratch(ctx, &a) == SIZE_MAX, #op " has a scratch size: " sentence); \
  } while (0)
/* An array is missed by a call with as little work as there can be, too. */
#define MISSING(op, array)                                                  \
  do {                                                                      \
    BAD(op, #array " = NULL, wanted an array", a.array = NULL);             \
    BAD(op, #array " = NULL, wanted an array", LEAST_##op, a.array = NULL); \
  } while (0)
#define LEAST_route            a.tokens = 1
#define LEAST_router_loss      a.tokens = 1
#define LEAST_route_backward   a.tokens = 1
#define LEAST_sort             a.tokens = 1
#define LEAST_bias_update      a.experts = 1
#define LEAST_load_stats       a.experts = 1
#define LEAST_gemm             a.rows = 1
#define LEAST_wgrad            a.rows = 1
#define LEAST_bias_grad        a.rows = 1
#define LEAST_permute          a.rows = 1
#define LEAST_combine          a.tokens = 1
#define LEAST_combine_backward a.tokens = 1
#define LEAST_act              a.rows = 1
#define LEAST_act_backward     a.rows = 1
#define LEAST_convert          a.count = 1
#define ODD(op, array)         BAD(op, #array " = 0x", a.array = (void *)((char *)out + 1))

/* Fields that the three ops of the router share. */
#define BAD_ROUTER(op)                                                                     \
  do {                                                                                     \
    moe_router_desc bad = router;                                                          \
    bad.score = (moe_score)7;                                                              \
    BAD_SIZE(op, "router.score = 7, wanted", a.router = &bad);                             \
    BAD_SIZE(op, "router = NULL, wanted", a.router = NULL);                                \
    BAD_SIZE(op, "tokens = -1, wanted 0 .. 1073741823", a.tokens = -1);                    \
    BAD_SIZE(op, "tokens = 1073741824, wanted", a.tokens = 1 << 30);                       \
    BAD_SIZE(op, "experts = 0, wanted 1 .. 4096", a.experts = 0);                          \
    BAD_SIZE(op, "experts = 4097, wanted", a.experts = MOE_MAX_EXPERTS + 1);               \
    BAD_SIZE(op, "topk = 0, wanted 1 .. 64", a.topk = 0);                                  \
    BAD_SIZE(op, "topk = 65, wanted", a.topk = MOE_MAX_TOPK + 1);                          \
    BAD_SIZE(op, "logits_dtype = 0, wanted MOE_FP32", a.logits_dtype = MOE_DTYPE_DEFAULT); \
    MISSING(op, logits);                                                                   \
    MISSING(op, ids);                                                                      \
    ODD(op, logits);                                                                       \
  } while (0)

TEST(bad_routing) {
  moe_context *ctx = open_cpu();
  moe_router_desc global = {.balance = MOE_BALANCE_GLOBAL};
  BAD_ROUTER(route);
  BAD_ROUTER(router_loss);
  BAD_ROUTER(route_backward);
  MISSING(route, weights);
  BAD(route, "topk = 3, wanted at most experts = 2", a.topk = 3);
  BAD(router_loss, "global_counts = NULL, wanted", a.router = &global);
  BAD_SIZE(route_backward, "dlogits_dtype = 4, wanted", a.dlogits_dtype = (moe_dtype)4);
  MISSING(route_backward, dlogits);
  BAD_SIZE(sort, "tokens = -1, wanted", a.tokens = -1);
  BAD_SIZE(sort, "tokens = 9223372036854775807, wanted", a.tokens = INT64_MAX);
  BAD_SIZE(sort, "experts = 0, wanted", a.experts = 0);
  BAD_SIZE(sort, "topk = 0, wanted", a.topk = 0);
  BAD_SIZE(sort, "capacity = -1, wanted", a.capacity = -1);
  BAD_SIZE(sort, "drop = 2, wanted 0 .. 1", a.drop = (moe_drop)2);
  MISSING(sort, ids);
  MISSING(sort, weights);
  MISSING(sort, row_offset);
  MISSING(sort, row_slot);
  MISSING(sort, slot_row);
  BAD_SIZE(bias_update, "experts = 0, wanted 1", a.experts = 0);
  BAD_SIZE(bias_update, "rate = nan, wanted a finite", a.rate = NAN);
  MISSING(bias_update, counts);
  MISSING(bias_update, bias);
  BAD_SIZE(load_stats, "experts = 0, wanted", a.experts = 0);
  MISSING(load_stats, counts);
  MISSING(load_stats, load);
  moe_context_destroy(ctx);
}

TEST(bad_products) {
  moe_context *ctx = open_cpu();
  const moe_act_desc bad_act = {.kind = MOE_ACT_COUNT};
  BAD_SIZE(gemm, "rows = -1, wanted 0", a.rows = -1);
  BAD_SIZE(gemm, "rows = 2147483648, wanted", a.rows = (int64_t)1 << 31);
  BAD_SIZE(gemm, "n = 0, wanted 1", a.n = 0);
  BAD_SIZE(gemm, "k = 0, wanted 1", a.k = 0);
  BAD_SIZE(gemm, "k = 9223372036854775807, wanted", a.k = INT64_MAX);
  BAD_SIZE(gemm, "experts = 0, wanted", a.experts = 0);
  BAD_SIZE(gemm, "gather_topk = -1, wanted 0 .. 64", a.gather_topk = -1);
  BAD_SIZE(gemm, "epilogue = 3, wanted 0 .. 2", a.epilogue = (moe_epilogue)3);
  BAD_SIZE(gemm, "b_kn = 2, wanted 0 .. 1", a.b_kn = 2);
  BAD_SIZE(gemm, "accumulate = 2, wanted 0 .. 1", a.accumulate = 2);
  BAD_SIZE(gemm, "accumulate = 1, wanted", a.accumulate = 1, a.d_dtype = MOE_BF16);
  BAD_SIZE(gemm, "accumulate = 1, wanted", a.accumulate = 1, a.epilogue = MOE_EPILOGUE_ACT, a.act = &act);
  BAD_SIZE(gemm, "a_dtype = 0, wanted", a.a_dtype = MOE_DTYPE_DEFAULT);
  BAD_SIZE(gemm, "b_dtype = 5, wanted", a.b_dtype = (moe_dtype)5);
  BAD_SIZE(gemm, "d_dtype = 5, wanted", a.d_dtype = (moe_dtype)5);
  BAD_SIZE(gemm, "bias_dtype = 0, wanted", a.bias = in, a.bias_dtype = MOE_DTYPE_DEFAULT);
  BAD_SIZE(gemm, "act = NULL, wanted", a.epilogue = MOE_EPILOGUE_ACT);
  BAD_SIZE(gemm, "act.kind = ", a.epilogue = MOE_EPILOGUE_DACT, a.act = &bad_act);
  BAD_SIZE(gemm, "n = 7, wanted an even number", a.epilogue = MOE_EPILOGUE_ACT, a.act = &act, a.n = 7);
  BAD(gemm, "row_offset = NULL, wanted an array for experts = 2", a.row_offset = NULL);
  MISSING(gemm, a);
  MISSING(gemm, b);
  MISSING(gemm, d);
  ODD(gemm, d);
  BAD(gemm, "h = NULL, wanted", a.epilogue = MOE_EPILOGUE_DACT, a.act = &act, a.h = NULL);
  BAD(gemm, "dh = NULL, wanted", a.epilogue = MOE_EPILOGUE_DACT, a.act = &act, a.dh = NULL);
  BAD_SIZE(wgrad, "rows = -1, wanted", a.rows = -1);
  BAD_SIZE(wgrad, "m = 0, wanted", a.m = 0);
  BAD_SIZE(wgrad, "n = 0, wanted", a.n = 0);
  BAD_SIZE(wgrad, "experts = 0, wanted", a.experts = 0);
  BAD_SIZE(wgrad, "a_gather_topk = 65, wanted", a.a_gather_topk = 65);
  BAD_SIZE(wgrad, "b_gather_topk = -1, wanted", a.b_gather_topk = -1);
  BAD_SIZE(wgrad, "accumulate = -1, wanted", a.accumulate = -1);
  BAD_SIZE(wgrad, "d_dtype = 0, wanted", a.d_dtype = MOE_DTYPE_DEFAULT);
  BAD(wgrad, "row_offset = NULL, wanted", a.row_offset = NULL);
  MISSING(wgrad, a);
  MISSING(wgrad, b);
  MISSING(wgrad, d);
  BAD_SIZE(bias_grad, "rows = -1, wanted", a.rows = -1);
  BAD_SIZE(bias_grad, "n = 0, wanted", a.n = 0);
  BAD_SIZE(bias_grad, "experts = 0, wanted 1", a.experts = 0);
  BAD_SIZE(bias_grad, "gather_topk = -1, wanted", a.gather_topk = -1);
  BAD_SIZE(bias_grad, "v_dtype = 0, wanted", a.v_dtype = MOE_DTYPE_DEFAULT);
  BAD_SIZE(bias_grad, "accumulate = 3, wanted", a.accumulate = 3);
  BAD(bias_grad, "row_offset = NULL, wanted", a.row_offset = NULL);
  MISSING(bias_grad, v);
  MISSING(bias_grad, d);
  moe_context_destroy(ctx);
}

TEST(bad_rows) {
  moe_context *ctx = open_cpu();
  const moe_act_desc uneven = {.gated = 1, .layout = MOE_LAYOUT_INTERLEAVED, .interleave = 3};
  BAD_SIZE(permute, "rows = -1, wanted", a.rows = -1);
  BAD_SIZE(permute, "hidden = 0, wanted", a.hidden = 0);
  BAD_SIZE(permute, "topk = 0, wanted", a.topk = 0);
  BAD_SIZE(permute, "experts = 0, wanted", a.experts = 0);
  BAD_SIZE(permute, "dtype = 0, wanted", a.dtype = MOE_DTYPE_DEFAULT);
  MISSING(permute, row_offset);
  MISSING(permute, row_slot);
  MISSING(permute, x);
  MISSING(permute, y);
  BAD_SIZE(combine, "tokens = -1, wanted", a.tokens = -1);
  BAD_SIZE(combine, "topk = -1, wanted 0 .. 64", a.topk = -1);
  BAD_SIZE(combine, "hidden = 0, wanted", a.hidden = 0);
  BAD_SIZE(combine, "rows = -1, wanted", a.rows = -1);
  BAD_SIZE(combine, "y_dtype = 0, wanted", a.y_dtype = MOE_DTYPE_DEFAULT);
  BAD_SIZE(combine, "out_dtype = 0, wanted", a.out_dtype = MOE_DTYPE_DEFAULT);
  MISSING(combine, y);
  MISSING(combine, out);
  BAD_SIZE(combine_backward, "topk = 0, wanted", a.topk = 0);
  BAD_SIZE(combine_backward, "hidden = 0, wanted 1", a.hidden = 0);
  BAD_SIZE(combine_backward, "rows = -1, wanted", a.rows = -1);
  BAD_SIZE(combine_backward, "y_dtype = 9, wanted", a.y_dtype = (moe_dtype)9);
  BAD_SIZE(combine_backward, "dout_dtype = 0, wanted", a.dout_dtype = MOE_DTYPE_DEFAULT);
  MISSING(combine_backward, dout);
  MISSING(combine_backward, y);
  BAD_SIZE(act, "rows = -1, wanted", a.rows = -1);
  BAD_SIZE(act, "inter = 0, wanted", a.inter = 0);
  BAD_SIZE(act, "act = NULL, wanted", a.act = NULL);
  BAD_SIZE(act, "act.interleave = 3, wanted a divisor of inter = 8", a.act = &uneven);
  BAD_SIZE(act, "dtype = 0, wanted", a.dtype = MOE_DTYPE_DEFAULT);
  MISSING(act, h);
  MISSING(act, a);
  BAD_SIZE(act_backward, "inter = 0, wanted 1", a.inter = 0);
  BAD_SIZE(act_backward, "rows = -1, wanted", a.rows = -1);
  BAD_SIZE(act_backward, "act = NULL, wanted", a.act = NULL);
  MISSING(act_backward, h);
  MISSING(act_backward, da);
  MISSING(act_backward, dh);
  BAD_SIZE(convert, "count = -1, wanted", a.count = -1);
  BAD_SIZE(convert, "x_dtype = 0, wanted", a.x_dtype = MOE_DTYPE_DEFAULT);
  BAD_SIZE(convert, "y_dtype = 4, wanted", a.y_dtype = (moe_dtype)4);
  MISSING(convert, x);
  MISSING(convert, y);
  BAD(copy, "dst or src = NULL, wanted both for 100 bytes", a.dst = NULL);
  BAD(copy, "dst or src = NULL, wanted both for 100 bytes", a.src = NULL);
  BAD_SIZE(copy, "bytes = 18446744073709551615, wanted at most", a.bytes = SIZE_MAX);
  BAD(zero, "data = NULL, wanted 100 bytes", a.data = NULL);
  BAD_SIZE(zero, "bytes = 18446744073709551615, wanted at most", a.bytes = SIZE_MAX);
  moe_context_destroy(ctx);
}

/* ---- nothing to do */

/* An op succeeds without the arrays that would have no elements. */
#define EMPTY(op, ...)                                                                  \
  do {                                                                                  \
    const moe_##op##_args a = {HEAD(op), __VA_ARGS__};                                  \
    EXPECT(moe_##op(ctx, &a, NULL) == MOE_OK, #op " of nothing: %s", moe_last_error()); \
  } while (0)

TEST(nothing_is_done_without_arrays) {
  moe_context *ctx = open_cpu();
  int32_t ends[3] = {7, 7, 7}, zeros[3] = {0};
  for (int i = 0; i < 64; i++) out[i] = 3;
  EMPTY(route, .experts = 2, .topk = 2, .router = &router, .logits_dtype = MOE_FP32);
  EMPTY(router_loss, .experts = 2, .topk = 2, .router = &router, .logits_dtype = MOE_FP32);
  EMPTY(route_backward, .experts = 2, .topk = 2, .router = &router, .logits_dtype = MOE_FP32,
        .dlogits_dtype = MOE_FP32);
  EMPTY(sort, .experts = 2, .topk = 2, .row_offset = ends);
  EXPECT(memcmp(ends, zeros, sizeof ends) == 0, "offsets of nothing are %d %d %d", ends[0], ends[1], ends[2]);
  EMPTY(gemm, .n = 8, .k = 8, .experts = 2, .row_offset = zeros, .a_dtype = MOE_FP32, .b_dtype = MOE_FP32,
        .d_dtype = MOE_FP32);
  EMPTY(wgrad, .m = 4, .n = 4, .experts = 2, .row_offset = zeros, .a_dtype = MOE_FP32, .b_dtype = MOE_FP32,
        .d = out, .d_dtype = MOE_FP32, .accumulate = 1);
  for (int i = 0; i < 32; i++)
    EXPECT(out[i] == 3, "accumulating nothing changes %d to %g", i, (double)out[i]);
  EMPTY(wgrad, .m = 4, .n = 4, .experts = 2, .row_offset = zeros, .a_dtype = MOE_FP32, .b_dtype = MOE_FP32,
        .d = out, .d_dtype = MOE_FP32);
  EMPTY(bias_grad, .n = 8, .experts = 2, .row_offset = zeros, .v_dtype = MOE_FP32, .d = out + 32,
        .d_dtype = MOE_FP32);
  for (int i = 0; i < 48; i++) EXPECT(out[i] == 0, "the gradient %d of nothing is %g", i, (double)out[i]);
  EMPTY(permute, .hidden = 8, .topk = 2, .experts = 2, .row_offset = zeros, .dtype = MOE_FP32);
  EMPTY(combine, .hidden = 8, .topk = 2, .y_dtype = MOE_FP32, .out_dtype = MOE_FP32);
  EMPTY(combine, .tokens = 4, .hidden = 8, .topk = 2, .y_dtype = MOE_FP32, .out = out + 48,
        .out_dtype = MOE_FP32);
  for (int i = 48; i < 80; i++) EXPECT(out[i] == 0, "combining no rows gives %g", (double)out[i]);
  EMPTY(combine_backward, .hidden = 8, .topk = 2, .y_dtype = MOE_FP32, .dout_dtype = MOE_FP32);
  EMPTY(act, .inter = 8, .act = &act, .dtype = MOE_FP32);
  EMPTY(act_backward, .inter = 8, .act = &act, .dtype = MOE_FP32);
  EMPTY(convert, .x_dtype = MOE_FP32, .y_dtype = MOE_BF16);
  EMPTY(copy, .bytes = 0);
  EMPTY(zero, .bytes = 0);
  moe_context_destroy(ctx);
}

TEST_MAIN()
