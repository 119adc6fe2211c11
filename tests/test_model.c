/* SPDX-License-Identifier: Apache-2.0
 *
 * The model of `moeblas train`: its ops against plain double versions, the gradient of the whole against differences of
 * the loss, the optimizer against values worked out by hand, and equal bits for any number of threads. */
#include <math.h>
#include <omp.h>

#include "../tools/train/batch.h"
#include "../tools/train/model.h"
#include "../tools/train/optim.h"
#include "../tools/train/sample.h"
#include "../tools/train/vector.h"
#include "test.h"

static float *random_floats(uint64_t *state, int64_t count, float scale) {
  float *v = malloc((size_t)count * sizeof *v);
  for (int64_t i = 0; i < count; i++) v[i] = scale * test_uniform(state);
  return v;
}

/* Largest difference over the largest value. */
static double worst(const float *got, const double *want, int64_t count) {
  double difference = 0, size = 0;
  for (int64_t i = 0; i < count; i++) {
    difference = fmax(difference, fabs((double)got[i] - want[i]));
    size = fmax(size, fabs(want[i]));
    if (isnan(got[i])) return INFINITY;
  }
  return size > 0 ? difference / size : difference;
}

/* ---- ops ------------------------------------------------------------------------------------------------------- */

TEST(fast_exp) {
  double error = 0;
  for (double x = -87; x <= 0; x += 1e-3) {
    const float f = (float)x;
    error = fmax(error, fabs((double)fast_exp(f) / exp((double)f) - 1));
  }
  EXPECT(error < 3 * 0x1p-24, "relative error %g", error);
  EXPECT(fast_exp(0) == 1 && fast_exp(-1e30f) > 0 && fast_exp(-INFINITY) < 1e-37f, "the ends");
}

TEST(embedding) {
  enum {
    T = 70,
    D = 20
  };
  uint64_t state = 1;
  float *table = random_floats(&state, 256 * D, 1), *dout = random_floats(&state, T * D, 1);
  float *dtable = random_floats(&state, 256 * D, 1), out[T * D];
  uint8_t byte[T];
  static double want[256 * D];
  for (int t = 0; t < T; t++) {
    byte[t] = (uint8_t)(test_random(&state) % 5 * 63); /* repeats, and 252 */
    for (int i = 0; i < D; i++) want[byte[t] * D + i] += (double)dout[t * D + i];
  }
  embed(out, table, byte, T, D);
  embed_backward(dtable, dout, byte, T, D);
  for (int t = 0; t < T; t++)
    EXPECT(memcmp(out + t * D, table + byte[t] * D, D * sizeof *out) == 0, "row %d", t);
  EXPECT(worst(dtable, want, 256 * D) < 1e-6, "%g", worst(dtable, want, 256 * D));
  free(table), free(dout), free(dtable);
}

/* dx and dgain of one token by the quotient rule, without the shortcut of the code under test. */
static void rmsnorm_reference(double *out, double *dx, double *dgain, const float *x, const float *gain,
                              const float *dout, int dim) {
  double square = 0;
  for (int i = 0; i < dim; i++) square += (double)x[i] * (double)x[i];
  const double r = 1 / sqrt(square / dim + 1e-5);
  for (int i = 0; i < dim; i++) {
    out[i] = (double)x[i] * r * (double)gain[i];
    dgain[i] += (double)dout[i] * (double)x[i] * r;
    dx[i] = (double)dout[i] * (double)gain[i] * r;
    for (int j = 0; j < dim; j++)
      dx[i] -= (double)dout[j] * (double)gain[j] * (double)x[j] * r * r * r * (double)x[i] / dim;
  }
}

TEST(rmsnorm) {
  enum {
    T = 33,
    D = 40
  };
  uint64_t state = 2;
  float *x = random_floats(&state, T * D, 3), *gain = random_floats(&state, D, 2);
  float *dout = random_floats(&state, T * D, 1);
  float out[T * D], dx[T * D], dx2[T * D], dgain[D], rstd[T];
  double want[T * D], want_dx[T * D], want_dgain[D] = {0};
  for (int t = 0; t < T; t++)
    rmsnorm_reference(want + t * D, want_dx + t * D, want_dgain, x + t * D, gain, dout + t * D, D);
  rmsnorm_rstd(rstd, x, T, D);
  rmsnorm_apply(out, x, rstd, gain, T, D);
  rmsnorm_backward(dx, dgain, dout, x, rstd, gain, T, D, 0);
  memcpy(dx2, x, sizeof dx2);
  rmsnorm_backward(dx2, dgain, dout, x, rstd, gain, T, D, 1);
  EXPECT(worst(out, want, T * D) < 1e-6, "out %g", worst(out, want, T * D));
  EXPECT(worst(dx, want_dx, T * D) < 1e-5, "dx %g", worst(dx, want_dx, T * D));
  EXPECT(worst(dgain, want_dgain, D) < 1e-5, "dgain %g", worst(dgain, want_dgain, D));
  for (int i = 0; i < T * D; i++) EXPECT(dx2[i] == x[i] + dx[i], "accumulated %d", i);
  free(x), free(gain), free(dout);
}

TEST(rope) {
  enum {
    S = 2,
    L = 7,
    H = 2,
    W = 6,
    ROW = 3 * H * W
  };
  uint64_t state = 3;
  const struct attention shape = {.sequences = S, .length = L, .heads = H, .width = W};
  float *qkv = random_floats(&state, S * L * ROW, 1), got[S * L * ROW], table[L * W];
  double want[S * L * ROW], before[S * L * ROW];
  for (int i = 0; i < S * L * ROW; i++) want[i] = before[i] = (double)(got[i] = qkv[i]);
  for (int t = 0; t < S * L; t++)
    for (int h = 0; h < 2 * H; h++)
      for (int i = 0; i < W / 2; i++) {
        const double angle = t % L * pow(10000, -2.0 * i / W);
        double *a = want + t * ROW + h * W + i, x = a[0], y = a[W / 2];
        a[0] = x * cos(angle) - y * sin(angle);
        a[W / 2] = x * sin(angle) + y * cos(angle);
      }
  rope_table(table, L, W);
  rope(&shape, got, table, 0);
  EXPECT(worst(got, want, S * L * ROW) < 1e-6, "turned %g", worst(got, want, S * L * ROW));
  rope(&shape, got, table, 1);
  EXPECT(worst(got, before, S * L * ROW) < 1e-6, "and back %g", worst(got, before, S * L * ROW));
  free(qkv);
}

/* One head of one sequence, query by query. q, k, v and their gradients have rows of 3 heads width. */
static void attend_reference(const struct attention *a, double *out, double *dqkv, const float *qkv,
                             const float *dout) {
  const int64_t w = a->width, plane = a->heads * w, row = 3 * plane;
  double p[128], dp[128];
  for (int64_t t = 0; t < a->length; t++) {
    double sum = 0, mean = 0;
    for (int64_t j = 0; j <= t; j++) {
      double dot = 0;
      for (int64_t i = 0; i < w; i++) dot += (double)qkv[t * row + i] * (double)qkv[j * row + plane + i];
      sum += p[j] = exp(dot / sqrt((double)w));
    }
    for (int64_t j = 0; j <= t; j++) {
      p[j] /= sum;
      dp[j] = 0;
      for (int64_t i = 0; i < w; i++) {
        const double v = (double)qkv[j * row + 2 * plane + i], g = (double)dout[t * plane + i];
        out[t * plane + i] += p[j] * v;
        dqkv[j * row + 2 * plane + i] += p[j] * g;
        dp[j] += g * v;
      }
      mean += p[j] * dp[j];
    }
    for (int64_t j = 0; j <= t; j++)
      for (int64_t i = 0; i < w; i++) {
        const double d = p[j] * (dp[j] - mean) / sqrt((double)w);
        dqkv[t * row + i] += d * (double)qkv[j * row + plane + i];
        dqkv[j * row + plane + i] += d * (double)qkv[t * row + i];
      }
  }
}

static void check_attention(int64_t length, int64_t heads, int64_t width) {
  uint64_t state = (uint64_t)(length * 100 + width);
  struct attention a = {.sequences = 2, .length = length, .heads = heads, .width = width};
  const int64_t plane = heads * width, tokens = 2 * length, n = tokens * 3 * plane;
  float *qkv = random_floats(&state, n, 2), *dout = random_floats(&state, tokens * plane, 1);
  float *out = random_floats(&state, tokens * plane, 1), *dqkv = random_floats(&state, n, 1);
  float *lse = random_floats(&state, tokens * heads, 1);
  double *want = calloc((size_t)(tokens * plane), sizeof *want), *dwant = calloc((size_t)n, sizeof *dwant);
  a.scratch = random_floats(&state, attention_scratch(&a), 1);
  for (int64_t s = 0; s < 2; s++)
    for (int64_t h = 0; h < heads; h++) {
      const int64_t at = s * length * plane + h * width, at3 = s * length * 3 * plane + h * width;
      attend_reference(&a, want + at, dwant + at3, qkv + at3, dout + at);
    }
  attention(&a, out, lse, qkv);
  attention_backward(&a, dqkv, dout, out, lse, qkv);
  EXPECT(worst(out, want, tokens * plane) < 2e-6, "length %d: out %g", (int)length,
         worst(out, want, tokens * plane));
  EXPECT(worst(dqkv, dwant, n) < 1e-5, "length %d: dqkv %g", (int)length, worst(dqkv, dwant, n));
  free(qkv), free(dout), free(out), free(dqkv), free(lse), free(want), free(dwant), free(a.scratch);
}

TEST(attention) { /* below, at and above the blocks of 32 queries and 32 columns */
  check_attention(1, 1, 2);
  check_attention(31, 2, 6);
  check_attention(32, 1, 32);
  check_attention(33, 2, 32);
  check_attention(100, 3, 34);
}

TEST(cross_entropy) {
  enum {
    T = 9,
    C = 256
  };
  uint64_t state = 5;
  float *logits = random_floats(&state, T * C, 20), copy[T * C];
  uint8_t target[T];
  double row[T], want = 0, dwant[T * C];
  for (int t = 0; t < T; t++) {
    double sum = 0;
    target[t] = (uint8_t)test_random(&state);
    for (int i = 0; i < C; i++) sum += exp((double)logits[t * C + i]);
    for (int i = 0; i < C; i++)
      dwant[t * C + i] = (exp((double)logits[t * C + i]) / sum - (i == target[t])) / T;
    want += (log(sum) - (double)logits[t * C + target[t]]) / T;
  }
  memcpy(copy, logits, sizeof copy);
  const double plain = cross_entropy(logits, row, target, T, C, 0);
  EXPECT(fabs(plain - want) < 1e-6 * want, "%.9g, wanted %.9g", plain, want);
  EXPECT(memcmp(copy, logits, sizeof copy) == 0, "without a gradient the logits stay");
  EXPECT(cross_entropy(logits, row, target, T, C, 1) == plain, "the loss with the gradient is another");
  EXPECT(worst(logits, dwant, T * C) < 1e-6, "gradient %g", worst(logits, dwant, T * C));
  free(logits);
}

/* ---- optimizer ------------------------------------------------------------------------------------------------- */

TEST(adamw) {
  /* From rest the first step is rate * sign(gradient), whatever its size; decay works on the old value. */
  struct adamw o = {0.9f, 0.95f, 1e-8f, 0.5f, 0.01f, 2, 1};
  float value[3] = {1, -2, 3}, grad[3] = {4, -0.25f, 0}, first[3] = {0}, second[3] = {0};
  adamw_update(&o, value, grad, first, second, 3);
  EXPECT(fabsf(value[0] - (0.995f - 0.01f)) < 1e-6f, "%.8g", (double)value[0]);
  EXPECT(fabsf(value[1] - (-1.99f + 0.01f)) < 1e-6f, "%.8g", (double)value[1]);
  EXPECT(value[2] == 0.995f * 3, "%.8g", (double)value[2]);
  EXPECT(fabsf(first[0] - 0.8f) < 1e-6f && fabsf(second[0] - 3.2f) < 1e-6f, "moments of 2 * 4: %g %g",
         (double)first[0], (double)second[0]);
  /* Second step, gradient 0: m = 0.72 / 0.19, v = 3.04 / 0.0975, so the step is 0.01 * 3.789474 / 5.583830. */
  o.step = 2;
  o.decay = 0;
  memset(grad, 0, sizeof grad);
  const float old = value[0];
  adamw_update(&o, value, grad, first, second, 3);
  EXPECT(fabsf(old - value[0] - 0.00678651f) < 1e-7f, "%.8g", (double)(old - value[0]));
}

TEST(clipping_and_schedule) {
  float v[10000];
  for (int i = 0; i < 10000; i++) v[i] = i % 2 ? 3 : -4;
  EXPECT(fabs(gradient_norm(v, 10000) - sqrt(125000)) < 1e-9, "%.12g", gradient_norm(v, 10000));
  EXPECT(clip_scale(4, 1) == 0.25f && clip_scale(0.5, 1) == 1 && clip_scale(0, 1) == 1, "clip");
  EXPECT(learning_rate(0, 100, 10, 1, 0.1) == 0.1 && learning_rate(9, 100, 10, 1, 0.1) == 1, "warm-up");
  EXPECT(learning_rate(10, 100, 10, 1, 0.1) == 1, "peak");
  EXPECT(fabs(learning_rate(55, 100, 10, 1, 0.1) - 0.55) < 1e-12, "half way");
  EXPECT(fabs(learning_rate(100, 100, 10, 1, 0.1) - 0.1) < 1e-12, "end");
  EXPECT(learning_rate(0, 1, 0, 1, 0.1) == 1, "a single step");
}

/* ---- data ------------------------------------------------------------------------------------------------------ */

TEST(windows_cover_an_epoch_once) {
  enum {
    L = 8,
    WINDOWS = 29
  };
  uint8_t text[(WINDOWS + 1) * L + 1], input[L], target[L];
  const struct corpus c = {.train = text, .train_bytes = sizeof text};
  for (size_t i = 0; i < sizeof text; i++) text[i] = (uint8_t)i;
  for (int epoch = 0; epoch < 3; epoch++) {
    int seen[256] = {0}, in_order = 0, last = -1;
    for (int i = 0; i < WINDOWS; i++) {
      batch_train(&c, 7, epoch * WINDOWS + i, 1, L, input, target);
      for (int j = 0; j < L; j++) {
        EXPECT(input[j] == input[0] + j && target[j] == input[j] + 1, "window %d is not a piece of the text",
               i);
        seen[input[j]]++;
      }
      in_order += input[0] > last;
      last = input[0];
    }
    int once = 0, more = 0;
    for (int i = 0; i < 256; i++) once += seen[i] == 1, more += seen[i] > 1;
    EXPECT(once == WINDOWS * L && more == 0, "epoch %d: %d bytes once, %d more often", epoch, once, more);
    EXPECT(in_order < WINDOWS, "epoch %d is not shuffled", epoch);
  }
}

/* ---- the whole model ------------------------------------------------------------------------------------------- */

struct bench {
  moe_context *ctx;
  struct model *m;
  uint8_t input[48], target[48];
};

static const struct model_config small = {
    .layers = 2, .dim = 24, .heads = 2, .experts = 4, .topk = 2, .inter = 12, .sequence = 24};

static int open_bench(struct bench *b, const struct model_config *config, int threads, int training) {
  char error[256] = "";
  uint64_t state = 125;
  *b = (struct bench){NULL};
  omp_set_num_threads(threads);
  EXPECT(moe_context_create(&b->ctx, MOE_BACKEND_CPU, threads) == MOE_OK, "%s", moe_last_error());
  b->m = b->ctx ? model_create(b->ctx, b->ctx, config, 48, training, error, sizeof error) : NULL;
  EXPECT(b->m, "%s", error);
  if (!b->m) return 0;
  model_init(b->m, 5);
  for (int i = 0; i < 48; i++) {
    b->input[i] = (uint8_t)test_random(&state);
    b->target[i] = (uint8_t)test_random(&state);
  }
  return 1;
}

static void close_bench(struct bench *b) {
  model_destroy(b->m);
  moe_context_destroy(b->ctx);
}

/* The loss whose gradient model_gradient gives: the router's terms belong to it. */
static double full_loss(struct bench *b) {
  double loss = 0;
  EXPECT(model_loss(b->m, b->input, b->target, 2, 24, &loss) == MOE_OK, "%s", moe_last_error());
  for (int64_t l = 0; l < b->m->config.layers; l++)
    loss += (double)b->m->layer[l].losses[0] + (double)b->m->layer[l].losses[1];
  return loss;
}

/* One parameter: central difference along a random direction, against its product with the gradient, both relative to
 * the length of the gradient. The loss jumps where a step changes the choice of an expert, so the router is made
 * decided (below), and the seeds are such that no token is left on an edge. */
static void check_param(struct bench *b, const struct param *p, const float *grad, uint64_t *state) {
  float *value = b->m->value + p->offset, *old = malloc((size_t)p->count * sizeof *old);
  float *direction = random_floats(state, p->count, 1);
  double slope = 0, length = 0, loss[2];
  const float step = p->rank == 1 ? 4e-3f : 1e-3f;
  memcpy(old, value, (size_t)p->count * sizeof *old);
  for (int side = 0; side < 2; side++) {
    for (int64_t i = 0; i < p->count; i++) value[i] = old[i] + (side ? -step : step) * direction[i];
    loss[side] = full_loss(b);
  }
  for (int64_t i = 0; i < p->count; i++) {
    slope += (double)direction[i] * (double)grad[p->offset + i];
    length += (double)grad[p->offset + i] * (double)grad[p->offset + i];
  }
  memcpy(value, old, (size_t)p->count * sizeof *old);
  const double difference = (loss[0] - loss[1]) / (2 * (double)step), scale = sqrt(length / 3);
  EXPECT(scale > 1e-4, "%s: the gradient is %g, too small to check", p->name, scale);
  EXPECT(fabs(difference - slope) < 0.02 * scale, "%s: difference %g, gradient %g, scale %g", p->name,
         difference, slope, scale);
  free(direction), free(old);
}

static void check_gradient(const struct model_config *config) {
  struct bench b;
  uint64_t state = 25;
  if (!open_bench(&b, config, 2, 1)) return;
  struct model *m = b.m;
  for (int i = 0; i < m->params; i++) /* away from the flat start, so that every gradient is seen */
    for (int64_t j = 0; j < m->param[i].count; j++)
      m->value[m->param[i].offset + j] *= m->param[i].rank == 1 ? 1 + 0.3f * test_uniform(&state)
                                          : strstr(m->param[i].name, "router") ? 6
                                                                               : 1.5f;
  double loss = 0;
  EXPECT(model_gradient(m, b.input, b.target, 2, 24, &loss) == MOE_OK, "%s", moe_last_error());
  EXPECT(loss > 4 && loss < 9, "loss %g", loss);
  float *grad = malloc((size_t)m->count * sizeof *grad);
  memcpy(grad, m->grad, (size_t)m->count * sizeof *grad);
  for (int i = 0; i < m->params; i++) check_param(&b, m->param + i, grad, &state);
  free(grad);
  close_bench(&b);
}

TEST(gradient_all_experts) { /* every expert is chosen, so that no step can change the choice */
  struct model_config config = small;
  config.topk = config.experts;
  check_gradient(&config);
}

TEST(gradient_topk) { check_gradient(&small); }

TEST(gradient_bias_balance) {
  struct model_config config = small;
  config.balance = BALANCE_BIAS;
  check_gradient(&config);
}

/* Three steps of training; the bytes that result. */
static float *train_a_little(int threads, const struct model_config *config, int64_t *count) {
  struct bench b;
  if (!open_bench(&b, config, threads, 1)) return NULL;
  struct model *m = b.m;
  float *moments = calloc((size_t)(2 * m->count), sizeof *moments),
        *result = malloc((size_t)m->count * 4 + 256);
  for (int step = 1; step <= 3; step++) {
    double loss;
    EXPECT(model_gradient(m, b.input, b.target, 2, 24, &loss) == MOE_OK, "%s", moe_last_error());
    const struct adamw o = {0.9f, 0.95f, 1e-8f, 0.1f, 1e-2f, clip_scale(gradient_norm(m->grad, m->count), 1),
                            step};
    adamw_update(&o, m->value, m->grad, moments, moments + m->count, m->count);
    EXPECT(model_rebalance(m, 0.01f) == MOE_OK, "%s", moe_last_error());
  }
  memcpy(result, m->value, (size_t)m->count * sizeof *result);
  memcpy(result + m->count, m->correction_bias, 8 * sizeof *result);
  *count = m->count + 8;
  free(moments);
  close_bench(&b);
  return result;
}

static void check_threads(const struct model_config *config) {
  int64_t count = 0;
  float *one = train_a_little(1, config, &count);
  REQUIRE(one, "no result");
  for (int threads = 2; threads <= 4; threads++) {
    float *many = train_a_little(threads, config, &count);
    REQUIRE(many, "no result");
    EXPECT(memcmp(one, many, (size_t)count * sizeof *one) == 0, "%d threads give other bits than 1", threads);
    free(many);
  }
  free(one);
}

TEST(same_bits_for_any_threads) {
  struct model_config config = small;
  check_threads(&config);
  config.balance = BALANCE_BIAS;
  check_threads(&config);
}

TEST(bias_moves_against_the_load) {
  struct model_config config = small;
  struct bench b;
  double loss;
  config.balance = BALANCE_BIAS;
  if (!open_bench(&b, &config, 2, 1)) return;
  EXPECT(model_gradient(b.m, b.input, b.target, 2, 24, &loss) == MOE_OK, "%s", moe_last_error());
  EXPECT(model_rebalance(b.m, 0.5f) == MOE_OK, "%s", moe_last_error());
  for (int i = 0; i < 8; i++) {
    const int count = b.m->layer[i / 4].counts[i % 4];
    const float want = count < 24 ? 0.5f : count > 24 ? -0.5f : 0;
    EXPECT(b.m->correction_bias[i] == want, "expert %d with %d slots: %g", i, count,
           (double)b.m->correction_bias[i]);
  }
  close_bench(&b);
}

TEST(parameters_are_counted) {
  struct bench b;
  if (!open_bench(&b, &small, 1, 0)) return;
  int64_t all = 0, unused = 0;
  for (int i = 0; i < b.m->params; i++) {
    const struct param *p = b.m->param + i;
    all += p->count;
    if (p->rank == 3) unused += p->count / 2; /* 2 of 4 experts */
  }
  EXPECT(model_params(&small) == all, "%d, wanted %d", (int)model_params(&small), (int)all);
  EXPECT(model_active_params(&small) == all - unused - 255 * 24, "%d", (int)model_active_params(&small));
  close_bench(&b);
}

/* Inference shares one set of activations between layers; a later byte must not reach an earlier one. */
TEST(inference_is_causal_and_equal) {
  struct bench b, c;
  if (!open_bench(&b, &small, 2, 1)) return;
  REQUIRE(open_bench(&c, &small, 2, 0), "no model for inference");
  EXPECT(model_forward(b.m, b.input, 2, 24) == MOE_OK, "%s", moe_last_error());
  EXPECT(model_forward(c.m, b.input, 1, 17) == MOE_OK, "%s", moe_last_error());
  EXPECT(memcmp(b.m->logits, c.m->logits, 17 * MODEL_BYTES * sizeof(float)) == 0,
         "the first 17 of 24 bytes give other logits alone");
  float whole[MODEL_BYTES];
  memcpy(whole, b.m->logits + 23 * MODEL_BYTES, sizeof whole);
  for (int i = 17; i < 24; i++) EXPECT(model_step(c.m, b.input[i], i) == MOE_OK, "%s", moe_last_error());
  for (int i = 0; i < MODEL_BYTES; i++)
    EXPECT(fabsf(whole[i] - c.m->logits[i]) < 1e-5f, "logit %d: %g step by step, %g at once", i,
           (double)c.m->logits[i], (double)whole[i]);
  uint8_t text[2][64] = {"seed", "seed"};
  EXPECT(sample_text(c.m, text[0], 4, 60, 3) == MOE_OK && sample_text(c.m, text[1], 4, 60, 3) == MOE_OK, "%s",
         moe_last_error());
  EXPECT(memcmp(text[0], text[1], 64) == 0, "two samples of one seed differ");
  EXPECT(sample_text(c.m, text[1], 4, 60, 4) == MOE_OK && memcmp(text[0], text[1], 64), "seeds do nothing");
  close_bench(&b);
  close_bench(&c);
}

TEST(bad_shapes_are_refused) {
  struct model_config config = small;
  moe_context *ctx = NULL;
  char error[256] = "";
  EXPECT(moe_context_create(&ctx, MOE_BACKEND_CPU, 1) == MOE_OK, "%s", moe_last_error());
  config.heads = 5;
  EXPECT(!model_create(ctx, ctx, &config, 48, 1, error, sizeof error) && strstr(error, "heads"), "'%s'",
         error);
  config = small;
  config.inter = 0;
  EXPECT(!model_create(ctx, ctx, &config, 48, 1, error, sizeof error) && strstr(error, "inter"), "'%s'",
         error);
  moe_context_destroy(ctx);
}

TEST_MAIN()
