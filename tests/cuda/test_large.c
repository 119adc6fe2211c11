/* SPDX-License-Identifier: Apache-2.0
 *
 * Arrays of more than 2^31 elements, and the ends of the range of routing.
 * Idea: a large array repeats a random pattern whose length divides no power of two, so that an index that was cut to 32
 * bits finds another value, and so that the host knows every element without holding it. Rows and elements are sampled and
 * computed again in double, by plain loops. The small problems are compared with the CPU whole. */
#include "gpu_layer.h"

/* ---- large arrays that repeat a pattern */

enum {
  PERIOD = 16777213 /* elements; a prime */
};

struct pattern {
  moe_dtype dtype;
  float *value; /* in [-1,1), exact in dtype */
  void *device;
};

static struct pattern pattern_open(moe_dtype dtype) {
  struct pattern p = {dtype, must(malloc(PERIOD * sizeof(float))), NULL};
  const size_t bytes = (size_t)bytes_of(dtype, PERIOD);
  void *stored = must(malloc(bytes));
  uint64_t seed = 3;
  fill_random(stored, dtype, PERIOD, 1, &seed);
  for (int64_t i = 0; i < PERIOD; i++) p.value[i] = moe_load(stored, dtype, i);
  p.device = on_gpu(bytes);
  OK(moe_memory_copy(gpu, p.device, stored, bytes));
  free(stored);
  return p;
}

static void pattern_close(struct pattern *p) {
  free(p->value);
  moe_memory_free(gpu, p->device);
}

/* A new array [n]: element i is value[(i + phase) % PERIOD]. */
static void *repeat(const struct pattern *p, int64_t n, int64_t phase) {
  unsigned char *array = on_gpu((size_t)bytes_of(p->dtype, n));
  for (int64_t i = 0; i < n;) {
    const int64_t from = (i + phase) % PERIOD, piece = n - i < PERIOD - from ? n - i : PERIOD - from;
    const moe_copy_args args = {.size = sizeof args,
                                .dst = array + bytes_of(p->dtype, i),
                                .src = (unsigned char *)p->device + bytes_of(p->dtype, from),
                                .bytes = (size_t)bytes_of(p->dtype, piece)};
    OK(moe_copy(gpu, &args, NULL));
    i += piece;
  }
  return array;
}

/* ---- one large layer, swiglu, ids given */

enum array {
  TOKENS,
  GRADIENT,
  UP,
  DOWN,
  SLOT_IDS,
  SLOT_WEIGHTS,
  RESULT,
  DTOKENS,
  DUP,
  DDOWN,
  KEPT,
  SCRATCH,
  ARRAYS
};

struct large {
  int64_t tokens, hidden, inter, experts, topk;
  struct pattern pattern;
  void *at[ARRAYS];
  int32_t *ids;
  float *weights;
};

static double element(const struct large *l, enum array which, int64_t i) {
  return l->pattern.value[(i + 1000003 * which) % PERIOD];
}

/* Row `row` of an array with rows of n, in double. */
static void row_of(const struct large *l, enum array which, int64_t row, int64_t n, double *out) {
  for (int64_t i = 0; i < n; i++) out[i] = element(l, which, row * n + i);
}

/* The last expert gets one slot of every `rare` tokens, expert 1 none, the others what is left. */
static void draw_routing(struct large *l, int64_t rare) {
  const int64_t slots = l->tokens * l->topk;
  uint64_t seed = 11;
  l->ids = must(malloc((size_t)slots * 4)), l->weights = must(malloc((size_t)slots * 4));
  for (int64_t s = 0; s < slots; s++) {
    const int64_t t = s / l->topk, j = s % l->topk;
    const int64_t e = 2 + (int64_t)(test_random(&seed) % (uint64_t)(l->experts - 3));
    l->ids[s] = (int32_t)(t % rare == 0 && j == 0 ? l->experts - 1 : t % 97 == 5 && j == 0 ? -1 : e);
    l->weights[s] = 0.5f + 0.25f * test_uniform(&seed);
  }
}

/* Every array; what is written is NaN bytes before. */
static void large_open(struct large *l, size_t saved, size_t workspace) {
  const size_t slots = (size_t)(l->tokens * l->topk), pairs = (size_t)(l->experts * l->inter * l->hidden),
               x = (size_t)(l->tokens * l->hidden), each = (size_t)bytes_of(l->pattern.dtype, 1);
  const size_t bytes[ARRAYS] = {
      [TOKENS] = x * each,      [GRADIENT] = x * each,      [UP] = 2 * pairs * each, [DOWN] = pairs * each,
      [SLOT_IDS] = slots * 4,   [SLOT_WEIGHTS] = slots * 4, [RESULT] = x * each,     [DTOKENS] = x * each,
      [DUP] = 2 * pairs * each, [DDOWN] = pairs * each,     [KEPT] = saved,          [SCRATCH] = workspace};
  for (int i = 0; i < ARRAYS; i++) {
    l->at[i] = i <= DOWN ? repeat(&l->pattern, (int64_t)(bytes[i] / each), 1000003 * i) : on_gpu(bytes[i]);
    if (i > DOWN) OK(moe_memory_fill(gpu, l->at[i], 0xff, bytes[i]));
  }
  OK(moe_memory_copy(gpu, l->at[SLOT_IDS], l->ids, slots * 4));
  OK(moe_memory_copy(gpu, l->at[SLOT_WEIGHTS], l->weights, slots * 4));
}

static void large_run(struct large *l) {
  moe_config config = MOE_CONFIG_INIT;
  config.hidden = l->hidden, config.inter = l->inter, config.experts = l->experts, config.topk = l->topk;
  config.dtype = l->pattern.dtype, config.entry = MOE_ENTRY_IDS, config.act.gated = 1;
  moe_plan *plan = NULL;
  OK(moe_plan_create(&plan, gpu, &config));
  const size_t saved = moe_plan_saved(plan, l->tokens), workspace = moe_plan_workspace(plan, l->tokens);
  large_open(l, saved, workspace);
  moe_params params = MOE_PARAMS_INIT;
  moe_param_grads grads = MOE_PARAM_GRADS_INIT;
  moe_forward_args forward = MOE_FORWARD_ARGS_INIT;
  moe_backward_args backward = MOE_BACKWARD_ARGS_INIT;
  params.w1 = l->at[UP], params.w2 = l->at[DOWN], grads.w1 = l->at[DUP], grads.w2 = l->at[DDOWN];
  forward.tokens = backward.tokens = l->tokens, forward.x = backward.x = l->at[TOKENS];
  forward.params = backward.params = &params;
  forward.given_ids = l->at[SLOT_IDS], forward.given_weights = backward.given_weights = l->at[SLOT_WEIGHTS];
  forward.saved = l->at[KEPT], backward.saved = l->at[KEPT];
  forward.workspace = backward.workspace = l->at[SCRATCH];
  forward.saved_bytes = backward.saved_bytes = saved;
  forward.workspace_bytes = backward.workspace_bytes = workspace;
  forward.out = l->at[RESULT], backward.dout = l->at[GRADIENT], backward.dx = l->at[DTOKENS];
  backward.grads = &grads;
  OK(moe_forward(plan, &forward, NULL));
  OK(moe_backward(plan, &backward, NULL));
  OK(moe_synchronize(gpu, NULL));
  moe_plan_destroy(plan);
}

static void large_close(struct large *l) {
  for (int i = 0; i < ARRAYS; i++) moe_memory_free(gpu, l->at[i]);
  free(l->ids), free(l->weights);
  pattern_close(&l->pattern);
}

/* ---- the same in double */

/* What one slot does: a [F] and dh [2F], from x [H] and g [H] of its token. */
struct slot {
  double *a, *dh, *wa;
};

static double dot(const struct large *l, enum array which, int64_t first, int64_t step, const double *v,
                  int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; i++) sum += element(l, which, first + i * step) * v[i];
  return sum;
}

static void slot_run(const struct large *l, int64_t e, double weight, const double *x, const double *g,
                     const struct slot *s) {
  const int64_t F = l->inter, H = l->hidden;
#pragma omp parallel for
  for (int64_t f = 0; f < F; f++) {
    const double gate = dot(l, UP, (e * 2 * F + f) * H, 1, x, H);
    const double up = dot(l, UP, (e * 2 * F + F + f) * H, 1, x, H);
    const double da = weight * dot(l, DOWN, e * H * F + f, F, g, H);
    const double sigmoid = 1 / (1 + exp(-gate)), silu = gate * sigmoid;
    s->a[f] = silu * up;
    s->wa[f] = weight * s->a[f];
    s->dh[f] = da * up * sigmoid * (1 + gate * (1 - sigmoid));
    s->dh[F + f] = da * silu;
  }
}

static struct slot slot_open(const struct large *l) {
  const size_t bytes = (size_t)l->inter * sizeof(double);
  return (struct slot){must(malloc(bytes)), must(malloc(2 * bytes)), must(malloc(bytes))};
}
static void slot_close(struct slot *s) { free(s->a), free(s->dh), free(s->wa); }

/* `got` of the device against `want`, relative to the largest of the row. */
static void expect_row(const struct large *l, enum array which, int64_t first, const double *want, int64_t n,
                       const char *name) {
  const moe_dtype dtype = l->pattern.dtype;
  void *got = must(malloc((size_t)bytes_of(dtype, n)));
  OK(moe_memory_copy(gpu, got, (unsigned char *)l->at[which] + bytes_of(dtype, first),
                     (size_t)bytes_of(dtype, n)));
  double largest = 0;
  for (int64_t i = 0; i < n; i++) largest = fmax(largest, fabs(want[i]));
  for (int64_t i = 0; i < n; i++) {
    const double value = moe_load(got, dtype, i), bound = (dtype == MOE_FP32 ? 1e-4 : 0.02) * largest;
    EXPECT(fabs(value - want[i]) <= bound, "%s[%lld]: got %g, want %g (row of %g)", name,
           (long long)(first + i), value, want[i], largest);
  }
  free(got);
}

static void check_token(const struct large *l, int64_t t, struct slot *s) {
  const int64_t F = l->inter, H = l->hidden;
  double *x = must(malloc((size_t)H * sizeof *x)), *g = must(malloc((size_t)H * sizeof *g));
  double *out = must(calloc((size_t)H, sizeof *out)), *dx = must(calloc((size_t)H, sizeof *dx));
  row_of(l, TOKENS, t, H, x), row_of(l, GRADIENT, t, H, g);
  for (int64_t j = 0; j < l->topk; j++) {
    const int64_t e = l->ids[t * l->topk + j];
    if (e < 0) continue;
    slot_run(l, e, l->weights[t * l->topk + j], x, g, s);
#pragma omp parallel for
    for (int64_t h = 0; h < H; h++) {
      out[h] += dot(l, DOWN, (e * H + h) * F, 1, s->wa, F);
      dx[h] += dot(l, UP, e * 2 * F * H + h, H, s->dh, 2 * F);
    }
  }
  expect_row(l, RESULT, t * H, out, H, "out");
  expect_row(l, DTOKENS, t * H, dx, H, "dx");
  free(x), free(g), free(out), free(dx);
}

/* Rows `up` of dW1 and `down` of dW2 of one expert, which few tokens chose: over all of them. */
static void check_expert(const struct large *l, int64_t e, int64_t up, int64_t down, struct slot *s) {
  const int64_t F = l->inter, H = l->hidden, slots = l->tokens * l->topk;
  double *x = must(malloc((size_t)H * sizeof *x)), *g = must(malloc((size_t)H * sizeof *g));
  double *dup = must(calloc((size_t)H, sizeof *dup)), *ddown = must(calloc((size_t)F, sizeof *ddown));
  for (int64_t i = 0; i < slots; i++) {
    if (l->ids[i] != e) continue;
    row_of(l, TOKENS, i / l->topk, H, x), row_of(l, GRADIENT, i / l->topk, H, g);
    slot_run(l, e, l->weights[i], x, g, s);
    for (int64_t h = 0; h < H; h++) dup[h] += s->dh[up] * x[h];
    for (int64_t f = 0; f < F; f++) ddown[f] += g[down] * s->wa[f];
  }
  expect_row(l, DUP, (e * 2 * F + up) * H, dup, H, "dw1");
  expect_row(l, DDOWN, (e * H + down) * F, ddown, F, "dw2");
  free(x), free(g), free(dup), free(ddown);
}

static void check_large(struct large l, moe_dtype dtype, int64_t rare, int samples) {
  l.pattern = pattern_open(dtype);
  draw_routing(&l, rare);
  large_run(&l);
  struct slot s = slot_open(&l);
  uint64_t seed = 17;
  for (int i = 0; i < samples && test_failures == 0; i++) {
    const int64_t any = (int64_t)(test_random(&seed) % (uint64_t)l.tokens);
    check_token(&l, i == 0 ? 0 : i == 1 ? l.tokens - 1 : i == 2 ? 5 : i % 2 ? any / rare * rare : any, &s);
  }
  const int64_t last = l.experts - 1;
  check_expert(&l, last, 0, 0, &s);
  check_expert(&l, last, 2 * l.inter - 1, l.hidden - 1, &s);
  check_expert(&l, 1, l.inter, l.hidden / 2, &s); /* nobody's: 0 */
  slot_close(&s);
  large_close(&l);
}

/* R H = 2.6e9 elements: rows of y and of dx past 2^31, the last expert's among them. */
static const struct large many_rows = {
    .tokens = 40000, .hidden = 8192, .inter = 64, .experts = 16, .topk = 8};
TEST(rows_beyond_31_bits) { check_large(many_rows, MOE_BF16, 1000, 24); }
TEST(rows_beyond_31_bits_in_fp32) { check_large(many_rows, MOE_FP32, 1000, 8); }

/* E 2F H = 2.7e9 elements. */
static const struct large many_weights = {
    .tokens = 600, .hidden = 4160, .inter = 2048, .experts = 160, .topk = 2};
TEST(weights_beyond_31_bits) { check_large(many_weights, MOE_BF16, 75, 6); }

/* ---- the ends of routing, against the CPU */

/* Relative to the largest of the array: what is compared here is where things go. */
static void expect_near(const struct layer *got, const struct layer *want, const char *what) {
  for (int id = FIRST_OUTPUT; id < SAVED; id++) {
    const struct layer_array *a = &want->array[id];
    double largest = 0;
    if (a->data == NULL || a->type < 0) {
      EXPECT(a->data == NULL || memcmp(got->array[id].data, a->data, a->bytes) == 0, "%s: %s differs", what,
             a->name);
      continue;
    }
    for (int64_t i = 0; i < a->count; i++) largest = fmax(largest, fabs(layer_get(want, id, i)));
    for (int64_t i = 0; i < a->count; i++)
      EXPECT(fabs(layer_get(got, id, i) - layer_get(want, id, i)) <= 0.03 * largest,
             "%s: %s[%lld]: got %g, want %g", what, a->name, (long long)i, layer_get(got, id, i),
             layer_get(want, id, i));
  }
}

typedef void change_ids(int32_t *ids, int64_t slots, int32_t experts);

static void to_one(int32_t *ids, int64_t slots, int32_t experts) {
  for (int64_t s = 0; s < slots; s++) ids[s] = experts - 2;
}
static void to_half(int32_t *ids, int64_t slots, int32_t experts) {
  for (int64_t s = 0; s < slots; s++) ids[s] = (int32_t)(s * 2 % experts);
}
static void to_outside(int32_t *ids, int64_t slots, int32_t experts) {
  const int32_t outside[] = {-1, experts, INT32_MAX, INT32_MIN};
  for (int64_t s = 0; s < slots; s += 3) ids[s] = outside[s / 3 % 4];
}
static void to_nobody(int32_t *ids, int64_t slots, int32_t experts) {
  for (int64_t s = 0; s < slots; s++) ids[s] = s % 2 ? -1 : experts;
}

static void check_routing(const char *what, int64_t tokens, change_ids *change) {
  struct layer cpu_layer, gpu_layer, host;
  OPEN(&cpu_layer, &tiled_ids, o.tokens = tokens, o.seed = 9, o.without |= BIT(MASK));
  OPEN(&host, &tiled_ids, o.tokens = tokens, o.seed = 9, o.without |= BIT(MASK));
  change(layer_ints(&cpu_layer, GIVEN_IDS), tokens * tiled_ids.config.topk,
         (int32_t)tiled_ids.config.experts);
  change(layer_ints(&host, GIVEN_IDS), tokens * tiled_ids.config.topk, (int32_t)tiled_ids.config.experts);
  RAN(layer_run(&cpu_layer), &tiled_ids);
  gpu_layer_open(&gpu_layer, &host);
  gpu_layer_run(&gpu_layer, NULL);
  OK(moe_synchronize(gpu, NULL));
  gpu_layer_get(&gpu_layer, &host);
  expect_near(&host, &cpu_layer, what);
  gpu_layer_close(&gpu_layer);
  layer_close(&cpu_layer), layer_close(&host);
}

TEST(one_expert_gets_everything) {
  check_routing("one expert", 700, to_one);
  check_routing("one expert, one token", 1, to_one);
}
TEST(half_of_the_experts_are_empty) { check_routing("half empty", 700, to_half); }
TEST(ids_outside_are_mixed_in) { check_routing("ids outside", 700, to_outside); }
TEST(nobody_is_chosen) { check_routing("nobody", 700, to_nobody); }
TEST(no_tokens) { check_routing("no tokens", 0, to_one); }

/* NaN in one token, which has expert 0 to itself: nothing of another token or expert changes a bit. */
TEST(nan_stays_in_its_token) {
  const int64_t tokens = 500, sick = 77, topk = tiled_ids.config.topk, hidden = tiled_ids.config.hidden;
  struct layer well, ill;
  struct layer *const hosts[] = {&well, &ill};
  for (int i = 0; i < 2; i++) {
    struct layer g;
    OPEN(hosts[i], &tiled_ids, o.tokens = tokens, o.seed = 12, o.without |= BIT(MASK));
    int32_t *ids = layer_ints(hosts[i], GIVEN_IDS);
    for (int64_t s = 0; s < tokens * topk; s++) ids[s] = s / topk == sick ? 0 : ids[s] == 0 ? 1 : ids[s];
    for (int64_t h = 0; h < hidden && i; h++)
      layer_set(hosts[i], X, sick * hidden + h, NAN), layer_set(hosts[i], DOUT, sick * hidden + h, NAN);
    gpu_layer_open(&g, hosts[i]);
    gpu_layer_run(&g, NULL);
    OK(moe_synchronize(gpu, NULL));
    gpu_layer_get(&g, hosts[i]);
    gpu_layer_close(&g);
  }
  static const int by_token[] = {OUT, DX, DTOPK_WEIGHTS}, by_expert[] = {DW1, DB1, DW2, DB2};
  for (int i = 0; i < 3; i++) {
    const int64_t each = well.array[by_token[i]].count / tokens;
    for (int64_t j = 0; j < well.array[by_token[i]].count; j++)
      EXPECT(j / each == sick || layer_get(&well, by_token[i], j) == layer_get(&ill, by_token[i], j),
             "NaN of token %d reaches %s of token %d", (int)sick, well.array[by_token[i]].name,
             (int)(j / each));
  }
  for (int i = 0; i < 4; i++) {
    const int64_t each = well.array[by_expert[i]].count / tiled_ids.config.experts;
    for (int64_t j = each; j < well.array[by_expert[i]].count; j++)
      EXPECT(layer_get(&well, by_expert[i], j) == layer_get(&ill, by_expert[i], j),
             "NaN of expert 0 reaches %s of expert %d", well.array[by_expert[i]].name, (int)(j / each));
  }
  layer_close(&well), layer_close(&ill);
}

TEST_MAIN()
