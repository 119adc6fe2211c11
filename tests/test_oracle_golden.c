/* SPDX-License-Identifier: Apache-2.0
 *
 * The oracle against what is not code: values worked out by hand, every rounding of the staged mode written out, and the
 * neighbours of every bf16 and fp16 number. */
#include "test.h"

#include <math.h>

#include "oracle.h"

static int near(double found, double wanted) { return fabs(found - wanted) <= 1e-6 * fabs(wanted) + 1e-12; }

/* One expert with W1 the identity and W2 = (1,0): x holds gate and up, interleaved, and out[0] is the activation. */
TEST(gpt_oss_clamped_swiglu) {
  moe_config c = {.hidden = 2, .inter = 1, .experts = 1, .topk = 1, .entry = MOE_ENTRY_LOGITS};
  c.act = (moe_act_desc){.kind = MOE_ACT_SILU, .gated = 1, .alpha = 1.702f, .gate_max = 7, .up_min = -7};
  c.act.up_max = 7, c.act.up_offset = 1, c.act.layout = MOE_LAYOUT_INTERLEAVED;
  const double x[] = {2, 3, 9, -8, -1, 0.5, 7, 7}, logits[4] = {0}, dout[] = {1, 0, 1, 0, 1, 0, 1, 0};
  const double w1[] = {1, 0, 0, 1}, w2[] = {1, 0};
  const double out[] = {7.74263449, -41.9997188, -0.231306351, 55.9996250};
  struct oracle o = {.config = &c, .tokens = 4, .x = x, .logits = logits, .w1 = w1, .w2 = w2, .dout = dout};
  REQUIRE(oracle_run(&o) == 0, "no memory");
  for (int t = 0; t < 4; t++) EXPECT(near(o.out[2 * t], out[t]), "token %d: %.9g", t, o.out[2 * t]);
  EXPECT(o.dx[2] == 0 && o.dx[3] == 0, "beyond the clamps the gradient is (%g,%g)", o.dx[2], o.dx[3]);
  EXPECT(near(o.dx[6], 8.00058463) && near(o.dx[7], 6.99995313), "on the clamps it is (%.9g,%.9g)", o.dx[6],
         o.dx[7]);
  oracle_free(&o);
}

/* Scores .9 .1 | .6 .5 | .7 .2 | .55 .58, the last one corrected to .88. Four slots of two groups rank groups by two keys. */
TEST(deepseek_group_routing) {
  const double score[8] = {.9, .1, .6, .5, .7, .2, .55, .58}, bias[8] = {0, 0, 0, 0, 0, 0, 0, .3};
  const int32_t ids[3][4] = {{0, 7, 6}, {7, 2, 6}, {7, 2, 6, 3}}; /* groups 0 3, 3 1, 3 1 */
  const double weights[3][4] = {{.9, .58, .55}, {.58, .6, .55}, {.58, .6, .55, .5}};
  double logits[8], one = 1;
  for (int e = 0; e < 8; e++) logits[e] = log(score[e] / (1 - score[e]));
  for (int n = 0; n < 3; n++) {
    moe_config c = {.hidden = 1, .inter = 1, .experts = 8, .topk = n == 2 ? 4 : 3, .entry = MOE_ENTRY_LOGITS};
    c.router = (moe_router_desc){.score = MOE_SCORE_SIGMOID, .renormalize = 1, .scale = 2.5f, .groups = 4};
    c.router.topk_groups = 2, c.router.group_score = (moe_group_score)n;
    const double w[8] = {0};
    struct oracle o = {.config = &c, .tokens = 1, .x = &one, .logits = logits, .correction_bias = bias};
    o.w1 = o.w2 = w;
    REQUIRE(oracle_run(&o) == 0, "no memory");
    const double sum = weights[n][0] + weights[n][1] + weights[n][2] + weights[n][3];
    for (int64_t j = 0; j < c.topk; j++) {
      EXPECT(o.ids[j] == ids[n][j], "group score %d: id %d is %d", n, (int)j, (int)o.ids[j]);
      EXPECT(near(o.weights[j], 2.5 * weights[n][j] / sum), "group score %d: weight %.9g", n, o.weights[j]);
    }
    EXPECT(o.keys[4] == -INFINITY && near(o.keys[7], .88), "keys %g and %g", o.keys[4], o.keys[7]);
    oracle_free(&o);
  }
}

TEST(ties_nan_and_infinities) {
  const double logits[] = {NAN, 1, 1, -INFINITY, INFINITY, 0, INFINITY, NAN, NAN, -INFINITY, NAN, NAN};
  const int32_t ids[] = {1, 2, 0, 0, 2, 1, 0, 1, 2};
  const double weights[] = {.5, .5, 0, .5, .5, 0, 0, 0, 0};
  const double x[3] = {1, 1, 1}, w[4] = {1, 1, 1, 1};
  for (int score = 0; score < 4; score++) {
    moe_config c = {.hidden = 1, .inter = 1, .experts = 4, .topk = 3, .entry = MOE_ENTRY_LOGITS};
    c.router = (moe_router_desc){.score = (moe_score)score, .balance = MOE_BALANCE_BATCH, .balance_coeff = 1};
    struct oracle o = {.config = &c, .tokens = 3, .x = x, .logits = logits, .w1 = w, .w2 = w, .dout = x};
    REQUIRE(oracle_run(&o) == 0, "no memory");
    for (int i = 0; i < 9; i++) {
      EXPECT(o.ids[i] == ids[i], "score %d: id %d is %d", score, i, (int)o.ids[i]);
      if (score < 2) EXPECT(near(o.weights[i], weights[i]), "score %d: weight %g", score, o.weights[i]);
    }
    EXPECT(o.keys[0] == -INFINITY && o.keys[3] == -INFINITY, "score %d: keys %g and %g", score, o.keys[0],
           o.keys[3]);
    EXPECT(isfinite(o.losses[0]), "score %d: balancing loss %g", score, o.losses[0]);
    for (int i = 0; i < 12; i++)
      EXPECT(isfinite(o.dlogits[i]) && (o.dlogits[i] == 0 || isfinite(logits[i]) || logits[i] > 0),
             "score %d: dlogits[%d] = %g", score, i, o.dlogits[i]);
    oracle_free(&o);
  }
}

/* Scores (.75,.25) and (.4,.6) of two tokens, and a masked one between them. */
TEST(losses_by_hand) {
  const double logits[] = {log(3), 0, NAN, NAN, log(2), log(3)}, x[3] = {0}, w[2] = {0};
  const double wanted[] = {0, 1, (2 * .75 + 2 * .6) / 2, 2 * (5. / 8 * .575 + 3. / 8 * .425)};
  const int64_t counts[] = {4, 2, 6};
  const uint8_t mask[] = {0, 1, 0};
  for (int balance = 0; balance < 4; balance++) {
    moe_config c = {.hidden = 1, .inter = 1, .experts = 2, .topk = 1, .entry = MOE_ENTRY_LOGITS};
    c.router = (moe_router_desc){.balance = (moe_balance)balance, .balance_coeff = .5f, .z_coeff = 2};
    c.router.sequence_tokens = balance == MOE_BALANCE_SEQUENCE ? 2 : 0;
    struct oracle o = {.config = &c, .tokens = 3, .x = x, .logits = logits, .w1 = w, .w2 = w};
    o.padding_mask = mask, o.global_counts = counts;
    REQUIRE(oracle_run(&o) == 0, "no memory");
    EXPECT(near(o.losses[0], .5 * wanted[balance]), "balance %d: %.9g", balance, o.losses[0]);
    EXPECT(near(o.losses[1], pow(log(4), 2) + pow(log(5), 2)), "z-loss %.9g", o.losses[1]);
    EXPECT(o.ids[1] == -1 && o.weights[1] == 0 && o.out[1] == 0, "a masked token has id %d", (int)o.ids[1]);
    EXPECT(o.counts[0] == 1 && o.counts[1] == 1, "counts %d %d", (int)o.counts[0], (int)o.counts[1]);
    oracle_free(&o);
  }
}

TEST(drops_by_hand) {
  const double weights[3][4] = {{.1, .9, .5, .9}, {.5, .5, .5, .1}, {NAN, .1, .2, NAN}};
  const int32_t rows[3][2][4] = {
      {{-1, 0, -1, 1}, {0, 1, -1, -1}}, {{0, 1, -1, -1}, {0, 1, -1, -1}}, {{-1, 0, 1, -1}, {0, 1, -1, -1}}};
  const int32_t ids[4] = {0};
  const double x[4] = {0}, w[2] = {0};
  for (int n = 0; n < 6; n++) {
    moe_config c = {.hidden = 1, .inter = 1, .experts = 2, .topk = 1, .entry = MOE_ENTRY_IDS};
    c.capacity_factor = .9f, c.drop = (moe_drop)(n % 2); /* ceil(4 / 2 * .9) = 2 */
    struct oracle o = {.config = &c, .tokens = 4, .x = x, .given_ids = ids, .given_weights = weights[n / 2]};
    o.w1 = o.w2 = w;
    REQUIRE(oracle_run(&o) == 0, "no memory");
    for (int s = 0; s < 4; s++)
      EXPECT(o.row_of_slot[s] == rows[n / 2][n % 2][s], "case %d: row %d", n, (int)o.row_of_slot[s]);
    EXPECT(o.counts[0] == 4 && o.offsets[1] == 2 && o.offsets[2] == 2, "counts before drops %d",
           (int)o.counts[0]);
    oracle_free(&o);
    o.tokens = 0;
    EXPECT(oracle_run(&o) == 0 && o.offsets[2] == 0, "no tokens");
    oracle_free(&o);
  }
}

/* A slot without an expert weighs 0 and is no part of the sum; a row behind the last expert has no expert. */
TEST(skipped_slots_weigh_nothing) {
  const double x[2] = {1, 1}, logits[] = {0, 1, 0, 1}, given_weights[] = {3, 4, 5, 6}, w[2] = {1, 1};
  const int32_t ids[] = {-1, 1, 2, 0}, row_offset[] = {0, 0, 1};
  for (int entry = 1; entry < 4; entry++) {
    moe_config c = {
        .hidden = 1, .inter = 1, .experts = 2, .topk = entry == 3 ? 1 : 2, .entry = (moe_entry)entry};
    if (entry == 1) c.router.score = MOE_SCORE_SIGMOID, c.router.renormalize = 1;
    struct oracle o = {.config = &c, .tokens = 2, .x = x, .logits = logits, .w1 = w, .w2 = w, .dout = x};
    o.given_ids = ids, o.given_weights = given_weights, o.row_offset = row_offset;
    const double wanted[4][4] = {{0}, {0, 1, 0, 1}, {0, 4, 0, 6}, {3, 0}};
    REQUIRE(oracle_run(&o) == 0, "no memory");
    for (int s = 0; s < 2 * c.topk; s++) {
      const int skipped = entry == 3 ? s == 1 : s % 2 == 0;
      EXPECT(near(o.weights[s], wanted[entry][s]), "entry %d: weight %d is %g", entry, s, o.weights[s]);
      EXPECT((o.row_of_slot[s] < 0) == skipped, "entry %d: slot %d has row %d", entry, s,
             (int)o.row_of_slot[s]);
      EXPECT(!skipped || o.dtopk_weights[s] == 0, "entry %d: gradient %g", entry, o.dtopk_weights[s]);
    }
    EXPECT(entry != 3 || (o.ids[0] == 1 && o.ids[1] == -1 && o.out[1] == 0 && o.dx[1] == 0), "tail row %g",
           o.out[1]);
    oracle_free(&o);
  }
}

/* Scores .5 .3 .2, the last one corrected to .4: not the order of the corrected logits. */
TEST(softmax_keys_with_a_correction_are_scores) {
  const double logits[] = {log(.5), log(.3), log(.2)}, bias[] = {0, 0, .2}, x = 0, w[3] = {0};
  moe_config c = {.hidden = 1, .inter = 1, .experts = 3, .topk = 2, .entry = MOE_ENTRY_LOGITS};
  struct oracle o = {
      .config = &c, .tokens = 1, .x = &x, .logits = logits, .correction_bias = bias, .w1 = w, .w2 = w};
  REQUIRE(oracle_run(&o) == 0, "no memory");
  EXPECT(o.ids[0] == 0 && o.ids[1] == 2, "ids %d %d", (int)o.ids[0], (int)o.ids[1]);
  EXPECT(near(o.weights[0], .5) && near(o.weights[1], .2), "weights %g %g", o.weights[0], o.weights[1]);
  oracle_free(&o);
}

/* SITU has beta 4 unless told otherwise. */
TEST(default_parameters) {
  const double x = 1, w1[] = {3, 2}, one = 1, row[] = {0.5};
  const int32_t id = 0;
  moe_config c = {.hidden = 1, .inter = 1, .experts = 1, .topk = 1, .entry = MOE_ENTRY_IDS};
  c.act.kind = MOE_ACT_SITU, c.act.gated = 1, c.act.up_beta = 25;
  struct oracle o = {
      .config = &c, .tokens = 1, .x = &x, .given_ids = &id, .given_weights = row, .w1 = w1, .w2 = &one};
  REQUIRE(oracle_run(&o) == 0, "no memory");
  const double wanted = 0.5 * (4 * tanh(3. / 4) / (1 + exp(-3))) * (25 * tanh(2. / 25));
  EXPECT(near(o.out[0], wanted), "%.9g, wanted %.9g", o.out[0], wanted);
  oracle_free(&o);
}

/* ---- rounding */

/* Every rounding of the staged mode, written out for a layer whose every dimension is 1. */
static void staged_chain(const double *v, int on_input, moe_dtype dtype, moe_dtype grad) {
#define D(value)  oracle_round(value, dtype)
#define G(value)  oracle_round(value, grad)
#define F(value)  oracle_act(MOE_ACT_SILU, value, 1, 0)
#define DF(value) oracle_dact(MOE_ACT_SILU, value, 1, 0)
  moe_config c = {.hidden = 1, .inter = 1, .experts = 1, .topk = 1, .entry = MOE_ENTRY_IDS, .dtype = dtype};
  c.grad_dtype = grad, c.weight_on_input = on_input, c.shared_inter = 1, c.latent = 1;
  const int32_t id = 0;
  struct oracle o = {
      .config = &c, .staged = dtype, .tokens = 1, .given_ids = &id, .x = v, .given_weights = v + 1};
  o.w1 = v + 2, o.b1 = v + 3, o.w2 = v + 4, o.b2 = v + 5, o.shared_w1 = v + 6, o.shared_w2 = v + 7;
  o.shared_gate = v + 8, o.latent_down = v + 9, o.latent_up = v + 10, o.dout = v + 11;
  const double in = on_input ? v[1] : 1, by = on_input ? 1 : v[1];
  const double xl = D(v[0] * v[9]), h = D(in * (xl * v[2]) + v[3]), y = D(D(F(h)) * v[4] + v[5]),
               cl = D(by * y);
  const double hs = D(v[0] * v[6]), gate = 1 / (1 + exp(-v[0] * v[8])), ys = D(D(F(hs)) * v[7]);
  const double g = D(v[11] * v[10]), da = D(g * v[4]), dh = D(DF(h) * (by * da)), row = D(dh * v[2]);
  const double dxl = D(in * row), dp = on_input ? row * xl : g * v[5] + da * F(h);
  const double das = D(v[11] * v[7]), dhs = D(DF(hs) * (gate * das)), dgate = das * F(hs) * gate * (1 - gate);
  REQUIRE(oracle_run(&o) == 0, "no memory");
  const double pairs[][2] = {{o.h[0], h},
                             {o.out[0], D(cl * v[10] + gate * ys)},
                             {o.dx[0], D(D(dhs * v[6]) + dgate * v[8] + dxl * v[9])},
                             {o.dtopk_weights[0], dp},
                             {o.dw1[0], G(in * dh * xl)},
                             {o.db1[0], G(dh)},
                             {o.dw2[0], G(g * D(by * F(h)))},
                             {o.db2[0], G(by * g)},
                             {o.dshared_w1[0], G(dhs * v[0])},
                             {o.dshared_w2[0], G(v[11] * D(gate * F(hs)))},
                             {o.dshared_gate[0], G(dgate * v[0])},
                             {o.dlatent_down[0], G(dxl * v[0])},
                             {o.dlatent_up[0], G(v[11] * cl)}};
  for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
    EXPECT(fabs(pairs[i][0] - pairs[i][1]) <= 1e-13 * fabs(pairs[i][1]),
           "dtype %d grad %d value %d: %.17g, wanted %.17g", (int)dtype, (int)grad, (int)i, pairs[i][0],
           pairs[i][1]);
  oracle_free(&o);
}

TEST(staged_rounds_where_documented) {
  uint64_t seed = 5;
  for (int n = 0; n < 600; n++) {
    const moe_dtype dtype = (moe_dtype)(MOE_FP32 + n % 3);
    double v[12];
    for (int i = 0; i < 12; i++)
      v[i] = oracle_round(2 * (double)test_uniform(&seed), i == 1 ? MOE_FP32 : dtype);
    staged_chain(v, n / 3 % 2, dtype, n / 6 % 2 ? MOE_FP32 : dtype);
  }
}

/* The number with this code: `mantissa` bits below an exponent whose least normal value is 2^lowest. */
static double decode(int code, int mantissa, int lowest) {
  const int exponent = code >> mantissa, fraction = code & ((1 << mantissa) - 1);
  return exponent == 0 ? ldexp(fraction, lowest - mantissa)
                       : ldexp(fraction + (1 << mantissa), lowest - mantissa + exponent - 1);
}

static void check_rounding(moe_dtype dtype, int mantissa, int lowest, int infinity) {
  for (int code = 0; code < infinity; code++) {
    const double low = decode(code, mantissa, lowest), high = decode(code + 1, mantissa, lowest);
    const double above = code + 1 == infinity ? INFINITY : high, middle = (low + high) / 2;
    for (int sign = -1; sign < 2; sign += 2) {
      EXPECT(oracle_round(sign * low, dtype) == sign * low, "dtype %d code %d", (int)dtype, code);
      EXPECT(oracle_round(sign * middle, dtype) == sign * (code % 2 ? above : low), "tie above %d", code);
      EXPECT(oracle_round(sign * nextafter(middle, 0), dtype) == sign * low, "below the tie of %d", code);
      EXPECT(oracle_round(sign * nextafter(middle, INFINITY), dtype) == sign * above, "above it, %d", code);
    }
  }
}

TEST(rounding_to_every_neighbour) {
  check_rounding(MOE_BF16, 7, -126, 0x7f80);
  check_rounding(MOE_FP16, 10, -14, 0x7c00);
  for (int dtype = 0; dtype <= (int)MOE_FP16; dtype++) {
    EXPECT(isnan(oracle_round(NAN, (moe_dtype)dtype)), "NaN in dtype %d", dtype);
    EXPECT(oracle_round(-INFINITY, (moe_dtype)dtype) == -INFINITY, "-inf in dtype %d", dtype);
    EXPECT(signbit(oracle_round(-0.0, (moe_dtype)dtype)), "-0 in dtype %d", dtype);
  }
  EXPECT(oracle_round(0x1.000001p0, MOE_FP32) == 1 && oracle_round(0x1.000003p0, MOE_FP32) == 0x1.000004p0,
         "fp32");
  EXPECT(oracle_round(0x1.0000010000001p0, MOE_FP32) == 0x1.000002p0, "fp32 above a tie");
  EXPECT(oracle_round(0.1, MOE_DTYPE_DEFAULT) == 0.1, "ideal values are not rounded");
}

TEST_MAIN()
