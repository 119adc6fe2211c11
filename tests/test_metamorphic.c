/* SPDX-License-Identifier: Apache-2.0
 *
 * What must not change a bit: the number of threads, what memory held before, other callers, the order of
 * tokens, the cut into batches, the names of experts. What must change exactly: a power of two on the input. */
#include "test.h"

#include <pthread.h>

#include "../src/backend.h"
#include "support.h"

/* A case wide and long enough for several tiles and blocks in every direction. */
static struct layer_case widened(const struct layer_case *c) {
  struct layer_case wide = *c;
  wide.config.hidden *= 9;
  wide.config.inter *= 7;
  wide.config.shared_inter *= 7;
  wide.config.latent *= 9;
  return wide;
}

static void check_threads(const struct layer_case *narrow) {
  const struct layer_case wide = widened(narrow), *c = &wide;
  struct layer one, many;
  OPEN(&one, c, o.tokens = 150, o.threads = 1);
  RAN(layer_run(&one), c);
  for (int threads = 2; threads <= 4; threads++) {
    OPEN(&many, c, o.tokens = 150, o.threads = threads);
    EXPECT(moe_context_units(many.ctx) == threads, "%s: %d threads", c->name, moe_context_units(many.ctx));
    RAN(layer_run(&many), c);
    SAME(&one, &many, 0, c, "threads");
    layer_close(&many);
  }
  layer_close(&one);
}
TEST(threads_do_not_change_a_bit) { EACH_CASE(check_threads, 1); }

/* A limit of threads gives a plan the memory, and so the threads, of a context that has no more. */
static void check_limit(const struct layer_case *c) {
  struct layer_case limited = *c;
  limited.config.sm_limit = 1, limited.config.schedule = MOE_SCHEDULE_DYNAMIC;
  struct layer one, all, limit;
  OPEN(&one, c, o.tokens = 150, o.threads = 1);
  OPEN(&all, c, o.tokens = 150, o.threads = 3);
  OPEN(&limit, &limited, o.tokens = 150, o.threads = 3);
  EXPECT(limit.array[WORKSPACE].bytes == one.array[WORKSPACE].bytes &&
             limit.array[WORKSPACE].bytes < all.array[WORKSPACE].bytes,
         "%s: workspace of %zu bytes, wanted %zu, less than %zu", c->name, limit.array[WORKSPACE].bytes,
         one.array[WORKSPACE].bytes, all.array[WORKSPACE].bytes);
  RAN(layer_run(&one), c);
  RAN(layer_run(&limit), c);
  SAME(&one, &limit, 0, c, "a limit of threads");
  layer_close(&one), layer_close(&all), layer_close(&limit);
}
TEST(a_limit_of_threads_is_kept) { EACH_CASE(check_limit, 1); }

static void check_old_contents(const struct layer_case *c) {
  struct layer ones, zeros;
  OPEN(&ones, c, o.fill = 0xff);
  OPEN(&zeros, c, o.fill = 0);
  RAN(layer_run(&ones), c);
  RAN(layer_run(&zeros), c);
  SAME(&ones, &zeros, 0, c, "what memory held before");
  layer_close(&ones), layer_close(&zeros);
}
TEST(old_contents_do_not_matter) { EACH_CASE(check_old_contents, 1); }

static void check_repeat(const struct layer_case *c) {
  struct layer once, again;
  OPEN(&once, c, o.seed = 11);
  OPEN(&again, c, o.seed = 12);
  RAN(layer_run(&again), c); /* leaves the traces of another problem */
  for (int id = 0; id < FIRST_OUTPUT; id++)
    if (again.array[id].data != NULL) memcpy(again.array[id].data, once.array[id].data, once.array[id].bytes);
  RAN(layer_run(&once), c);
  RAN(layer_run(&again), c);
  SAME(&once, &again, 0, c, "a second run");
  layer_close(&once), layer_close(&again);
}
TEST(runs_leave_no_traces) { EACH_CASE(check_repeat, 1); }

/* ---- rows by gathering, or from a copy in order */

static int64_t ordered; /* operands */
static moe_status count_ordered(moe_context *ctx, const moe_combine_backward_args *args, moe_stream stream) {
  ordered += args->dy != NULL;
  return moe_cpu_backend.combine_backward(ctx, args, stream);
}
static bool always(const moe_config *config, int64_t inter, bool sums) {
  (void)config, (void)inter, (void)sums;
  return true;
}

/* Few tokens, whose rows fit into dW1, and more of them; set and added. */
static void check_ordering(const struct layer_case *c) {
  struct backend ordering = moe_cpu_backend;
  ordering.orders_rows = always, ordering.combine_backward = count_ordered;
  for (int64_t tokens = 33; tokens <= 33 * 33; tokens *= 33) {
    struct layer gathers, orders;
    OPEN(&gathers, c, o.seed = 17, o.tokens = tokens);
    OPEN(&orders, c, o.seed = 17, o.tokens = tokens);
    EXPECT(gathers.array[WORKSPACE].bytes == orders.array[WORKSPACE].bytes, "%s: workspace", c->name);
    orders.ctx->backend = &ordering;
    ordered = 0;
    for (int accumulate = 0; accumulate < 2; accumulate++) {
      gathers.backward.accumulate = orders.backward.accumulate = accumulate;
      RAN(layer_run(&gathers), c);
      RAN(layer_run(&orders), c);
      SAME(&gathers, &orders, 0, c, "rows in order");
    }
    /* up, perhaps once more, dW1; twice */
    const int64_t wanted = c->config.recompute == MOE_RECOMPUTE_H ? 6 : 4;
    EXPECT(c->config.entry == MOE_ENTRY_ROWS ? ordered == 0 : ordered >= wanted, "%s: %d operands in order",
           c->name, (int)ordered);
    layer_close(&gathers), layer_close(&orders);
  }
}
TEST(rows_in_order_change_no_bit) { EACH_CASE(check_ordering, 1); }

/* ---- callers side by side */

static void *run_often(void *layer) {
  for (int i = 0; i < 10; i++)
    if (layer_run(layer) != MOE_OK) return layer;
  return NULL;
}

static void check_two_callers(const struct layer_case *c) {
  struct layer alone, first, second;
  OPEN(&alone, c, o.seed = 13);
  OPEN(&second, c, o.seed = 13);
  OPEN(&first, c, o.seed = 14);
  RAN(layer_run(&alone), c);
  moe_plan *const own = second.plan;
  second.plan = first.plan;
  pthread_t thread;
  void *failed = NULL;
  REQUIRE(pthread_create(&thread, NULL, run_often, &first) == 0, "no thread");
  EXPECT(run_often(&second) == NULL, "%s: %s", c->name, moe_last_error());
  pthread_join(thread, &failed);
  EXPECT(failed == NULL, "%s: the other caller failed", c->name);
  SAME(&alone, &second, 0, c, "a plan used by two threads");
  second.plan = own;
  layer_close(&alone), layer_close(&first), layer_close(&second);
}
/* Counts that are accumulated over calls would tell the ten runs from one. */
TEST(two_threads_may_use_one_plan) { EACH_CASE(check_two_callers, c->router.balance != MOE_BALANCE_GLOBAL); }

/* Forward and backward of two plans by turns, on the workspace of the larger. */
TEST(plans_may_share_a_workspace) {
  for (int i = 0; i < layer_case_count; i++) {
    const struct layer_case *c = &layer_cases[i], *other = &layer_cases[(i + 1) % layer_case_count];
    struct layer alone, a, b;
    OPEN(&alone, c, o.seed = 15);
    OPEN(&a, c, o.seed = 15);
    OPEN(&b, other, o.seed = 16);
    struct layer *const larger = a.array[WORKSPACE].bytes > b.array[WORKSPACE].bytes ? &a : &b;
    a.array[WORKSPACE].data = b.array[WORKSPACE].data = larger->array[WORKSPACE].data;
    RAN(layer_run(&alone), c);
    RAN(layer_forward(&a), c);
    RAN(layer_forward(&b), other);
    RAN(layer_backward(&a), c);
    RAN(layer_backward(&b), other);
    SAME(&alone, &a, 0, c, "a shared workspace");
    layer_close(&alone), layer_close(&a), layer_close(&b);
  }
}

/* ---- tokens and experts by other names */

enum {
  MOST = 64
}; /* tokens, experts */

/* Row i of an array of `to` becomes row from[i] of that of `l`. */
static void take_rows(struct layer *to, const struct layer *l, int id, const int64_t *from, int64_t rows,
                      int64_t rows_of_l) {
  if (l->array[id].data == NULL) return;
  const size_t each = l->array[id].bytes / (size_t)rows_of_l;
  for (int64_t i = 0; i < rows; i++)
    memcpy((char *)to->array[id].data + (size_t)i * each, (char *)l->array[id].data + (size_t)from[i] * each,
           each);
}

/* The same with arrays that ought to be so already. */
static void expect_rows(const struct layer *to, const struct layer *l, int id, const int64_t *from,
                        int64_t rows, int64_t rows_of_l, const char *name) {
  if (l->array[id].data == NULL) return;
  const size_t each = l->array[id].bytes / (size_t)rows_of_l;
  for (int64_t i = 0; i < rows; i++)
    EXPECT(memcmp((char *)to->array[id].data + (size_t)i * each,
                  (char *)l->array[id].data + (size_t)from[i] * each, each) == 0,
           "%s: %s: row %d is not row %d", name, l->array[id].name, (int)i, (int)from[i]);
}

static const int token_inputs[] = {X, LOGITS, GIVEN_IDS, GIVEN_WEIGHTS, MASK, DOUT};
static const int token_outputs[] = {OUT, DX, DLOGITS, DTOPK_WEIGHTS, TOPK_IDS, TOPK_WEIGHTS};

/* The tokens from[0 .. tokens-1] of `all`, as a problem of their own, give the same rows. */
static void check_tokens(const struct layer_case *c, const struct layer *all, const int64_t *from,
                         int64_t tokens) {
  struct layer some;
  OPEN(&some, c, o.tokens = tokens);
  for (int i = 0; i < 6; i++) take_rows(&some, all, token_inputs[i], from, tokens, all->tokens);
  RAN(layer_run(&some), c);
  for (int i = 0; i < 6; i++) expect_rows(&some, all, token_outputs[i], from, tokens, all->tokens, c->name);
  layer_close(&some);
}

static void check_order(const struct layer_case *c) {
  struct layer all;
  OPEN(&all, c, o.seed = 7);
  RAN(layer_run(&all), c);
  int64_t from[MOST];
  for (int64_t t = 0; t < all.tokens; t++) from[t] = (t * 10 + 3) % all.tokens;
  check_tokens(c, &all, from, all.tokens);
  layer_close(&all);
}
TEST(tokens_in_another_order) {
  EACH_CASE(check_order, c->entry != MOE_ENTRY_ROWS && c->capacity_factor == 0 &&
                             c->router.balance != MOE_BALANCE_SEQUENCE);
}

static void check_split(const struct layer_case *c) {
  struct layer all;
  OPEN(&all, c, o.seed = 7);
  RAN(layer_run(&all), c);
  int64_t from[MOST];
  for (int64_t t = 0; t < MOST; t++) from[t] = t;
  check_tokens(c, &all, from, 20);
  check_tokens(c, &all, from + 20, 12);
  check_tokens(c, &all, from + 32, 1);
  layer_close(&all);
}
TEST(a_batch_in_parts) {
  EACH_CASE(check_split, c->entry != MOE_ENTRY_ROWS && c->capacity_factor == 0 &&
                             c->router.balance == MOE_BALANCE_NONE && c->router.z_coeff == 0);
}

/* Expert e of `b` is expert from[e] of `a`. */
static void rename_experts(struct layer *b, const struct layer *a, const int64_t *from,
                           const int64_t *name_of) {
  static const int weights[] = {W1, B1, W2, B2, ROUTER_BIAS, CORRECTION_BIAS};
  const int64_t experts = a->config.experts;
  for (int i = 0; i < 6; i++) take_rows(b, a, weights[i], from, experts, experts);
  for (int64_t s = 0; s < a->array[GIVEN_IDS].count; s++) {
    const int32_t e = layer_ints(a, GIVEN_IDS)[s];
    layer_ints(b, GIVEN_IDS)[s] = e >= 0 && e < experts ? (int32_t)name_of[e] : e;
  }
  for (int64_t i = 0; i < a->array[LOGITS].count; i++)
    layer_set(b, LOGITS, i, layer_get(a, LOGITS, i / experts * experts + from[i % experts]));
}

static void check_names(const struct layer_case *c) {
  static const int grads[] = {DW1, DB1, DW2, DB2, COUNTS, DROUTER_BIAS};
  const int64_t experts = c->config.experts;
  int64_t from[MOST], name_of[MOST];
  for (int64_t e = 0; e < experts; e++) {
    from[e] = (e + 2) % experts;
    name_of[from[e]] = e;
  }
  struct layer a, b;
  OPEN(&a, c, o.seed = 7);
  OPEN(&b, c, o.seed = 7);
  rename_experts(&b, &a, from, name_of);
  RAN(layer_run(&a), c);
  RAN(layer_run(&b), c);
  const int same[] = {OUT, DX, DTOPK_WEIGHTS, TOPK_WEIGHTS};
  for (int i = 0; i < 4; i++)
    EXPECT(layer_difference(&a, &b, same[i]) < 0, "%s: %s differs at %d", c->name, a.array[same[i]].name,
           (int)layer_difference(&a, &b, same[i]));
  for (int i = 0; i < 6; i++) expect_rows(&b, &a, grads[i], from, experts, experts, c->name);
  for (int64_t i = 0; i < a.array[DLOGITS].count; i++)
    EXPECT(layer_get(&b, DLOGITS, i) == layer_get(&a, DLOGITS, i / experts * experts + from[i % experts]),
           "%s: dlogits differs at %d", c->name, (int)i);
  layer_close(&a), layer_close(&b);
}
/* Where a score is summed over all experts, their order may show in the last bit. */
TEST(experts_by_other_names) {
  EACH_CASE(check_names, c->entry == MOE_ENTRY_IDS ||
                             (c->entry == MOE_ENTRY_LOGITS && c->router.score == MOE_SCORE_TOPK_SOFTMAX));
}

/* ---- weights and scales */

static void check_zero_weight(const struct layer_case *given) {
  struct layer_case without_capacity = *given, *c = &without_capacity;
  c->config.capacity_factor = 0;
  c->config.drop = MOE_DROP_WEIGHT;
  struct layer zero, absent;
  OPEN(&zero, c, o.seed = 7);
  OPEN(&absent, c, o.seed = 7);
  for (int64_t s = 0; s < zero.array[GIVEN_IDS].count; s += 2) {
    layer_set(&zero, GIVEN_WEIGHTS, s, 0);
    layer_ints(&absent, GIVEN_IDS)[s] = -1;
  }
  RAN(layer_run(&zero), c);
  RAN(layer_run(&absent), c);
  SAME(&zero, &absent, BIT(GIVEN_IDS) | BIT(GIVEN_WEIGHTS) | BIT(COUNTS) | BIT(SLOT_ROW) | BIT(DTOPK_WEIGHTS),
       c, "weight 0");
  layer_close(&zero), layer_close(&absent);
}
/* A weight of 0 on the input leaves the biases. */
TEST(weight_zero_is_no_slot) {
  EACH_CASE(check_zero_weight, c->entry == MOE_ENTRY_IDS && !c->weight_on_input);
}

/* With relu and no bias the layer is linear in a power of two, bit by bit. */
TEST(powers_of_two_pass_through) {
  static const struct {
    int id;
    double factor;
  } scaled[] = {{OUT, 8}, {DX, 1}, {DTOPK_WEIGHTS, 8}, {DW1, 8}, {DW2, 8}};
  for (int dtype = MOE_FP32; dtype <= MOE_FP16; dtype++) {
    struct layer_case relu = {.name = "relu", .without = BIT(B1) | BIT(B2) | BIT(DB1) | BIT(DB2)}, *c = &relu;
    c->config = (moe_config){.size = sizeof(moe_config),
                             .hidden = 40,
                             .inter = 24,
                             .experts = 5,
                             .topk = 2,
                             .dtype = (moe_dtype)dtype,
                             .grad_dtype = MOE_FP32,
                             .entry = MOE_ENTRY_IDS,
                             .act.kind = MOE_ACT_RELU};
    struct layer a, b;
    OPEN(&a, c, o.seed = 7);
    OPEN(&b, c, o.seed = 7);
    for (int64_t i = 0; i < a.array[X].count; i++) layer_set(&b, X, i, 8 * layer_get(&a, X, i));
    RAN(layer_run(&a), c);
    RAN(layer_run(&b), c);
    for (size_t k = 0; k < sizeof scaled / sizeof *scaled; k++)
      for (int64_t i = 0; i < a.array[scaled[k].id].count; i++)
        EXPECT(layer_get(&b, scaled[k].id, i) == scaled[k].factor * layer_get(&a, scaled[k].id, i),
               "%s: %s[%d] is %g, wanted %g times %g", moe_dtype_name((moe_dtype)dtype),
               a.array[scaled[k].id].name, (int)i, layer_get(&b, scaled[k].id, i), scaled[k].factor,
               layer_get(&a, scaled[k].id, i));
    layer_close(&a), layer_close(&b);
  }
}

TEST_MAIN()
