/* SPDX-License-Identifier: Apache-2.0
 *
 * The public edge of a run: every array missing, misplaced or misaligned, every buffer a byte short, every
 * count out of range is answered by a status and a sentence, before anything is written. And a run allocates
 * nothing. */
#include "test.h"

#include <math.h>

#include "support.h"

/* ---- allocations are counted */

static int allocations;
void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);

void *__wrap_malloc(size_t bytes) {
  allocations++;
  return __real_malloc(bytes);
}

void *__wrap_calloc(size_t count, size_t bytes) {
  allocations++;
  return __real_calloc(count, bytes);
}

static void check_allocations(const struct layer_case *c) {
  struct layer l;
  OPEN(&l, c, o.seed = 2);
  const int before = allocations;
  EXPECT(before > 0, "not even a plan allocates");
  RAN(layer_run(&l), c);
  EXPECT(allocations == before, "%s: a run allocates %d times", c->name, allocations - before);
  layer_close(&l);
}
TEST(run_calls_do_not_allocate) { EACH_CASE(check_allocations, 1); }

/* ---- arrays */

/* Without these the plan cannot run. */
static uint64_t required(const moe_config *c) {
  uint64_t bits = BIT(X) | BIT(W1) | BIT(W2) | BIT(DOUT) | BIT(OUT);
  if (c->entry == MOE_ENTRY_HIDDEN) bits |= BIT(ROUTER_WEIGHT);
  if (c->entry == MOE_ENTRY_LOGITS) bits |= BIT(LOGITS);
  if (c->entry == MOE_ENTRY_IDS) bits |= BIT(GIVEN_IDS) | BIT(GIVEN_WEIGHTS);
  if (c->entry == MOE_ENTRY_ROWS) bits |= BIT(ROW_OFFSET);
  if (c->router.balance == MOE_BALANCE_GLOBAL) bits |= BIT(GLOBAL_COUNTS);
  if (c->shared_inter > 0) bits |= BIT(SHARED_W1) | BIT(SHARED_W2);
  if (c->latent > 0) bits |= BIT(LATENT_DOWN) | BIT(LATENT_UP);
  return bits;
}

/* "forward: x = NULL, ..." or "backward: grads.w1 ..." */
static int names_it(const char *name) {
  const char *sentence = moe_last_error();
  if (strncmp(sentence, "forward: ", 9) != 0 && strncmp(sentence, "backward: ", 10) != 0) return 0;
  return strstr(sentence, name) != NULL && strstr(sentence, "wanted") != NULL;
}

static void check_missing(const struct layer_case *c) {
  struct layer l;
  OPEN(&l, c, o.seed = 2);
  for (int id = 0; id < LAYER_ARRAY_COUNT; id++) {
    if (l.array[id].bytes == 0) continue;
    void *const data = l.array[id].data;
    l.array[id].data = NULL;
    if (id == SHARED_GATE) l.array[DSHARED_GATE].data = NULL; /* refused without the gate, see below */
    const moe_status status = layer_run(&l), want = id == SAVED || id == WORKSPACE   ? MOE_ERROR_WORKSPACE
                                                    : required(&c->config) & BIT(id) ? MOE_ERROR_ARGUMENT
                                                                                     : MOE_OK;
    EXPECT(status == want && (status == MOE_OK || names_it(l.array[id].name)),
           "%s: %s = NULL is answered by %s, \"%s\"", c->name, l.array[id].name, moe_status_name(status),
           moe_last_error());
    l.array[id].data = data;
    l.array[DSHARED_GATE].data = l.array[DSHARED_GATE].memory.data;
  }
  layer_close(&l);
}
TEST(missing_arrays) { EACH_CASE(check_missing, 1); }

static void check_misaligned(const struct layer_case *c) {
  struct layer l;
  OPEN(&l, c, o.before = 1); /* so that an accepted one does not fall off its page */
  for (int id = 0; id < LAYER_ARRAY_COUNT; id++)
    for (int shift = 1; shift < 16 && l.array[id].data != NULL; shift += 7) {
      unsigned char *const data = l.array[id].data;
      l.array[id].data = data + shift;
      const moe_status status = layer_run(&l);
      EXPECT(status == MOE_ERROR_ARGUMENT && names_it(l.array[id].name) &&
                 strstr(moe_last_error(), "aligned"),
             "%s: %s off by %d is answered by %s, \"%s\"", c->name, l.array[id].name, shift,
             moe_status_name(status), moe_last_error());
      l.array[id].data = data;
    }
  layer_close(&l);
}
TEST(misaligned_arrays) { EACH_CASE(check_misaligned, 1); }

static void check_useless(const struct layer_case *c) {
  static _Alignas(16) unsigned char anything[16];
  struct layer l;
  OPEN(&l, c, o.without = 0);
  for (int id = 0; id < LAYER_ARRAY_COUNT; id++) {
    if (l.array[id].data != NULL) continue;
    l.array[id].data = anything;
    l.array[id].name = "wanted NULL"; /* an absent array has no name yet */
    const moe_status status = layer_run(&l);
    EXPECT(status == MOE_ERROR_ARGUMENT && names_it("wanted NULL"),
           "%s: array %d of no use is answered by %s, \"%s\"", c->name, id, moe_status_name(status),
           moe_last_error());
    l.array[id].data = NULL;
  }
  layer_close(&l);
}
TEST(arrays_of_no_use) { EACH_CASE(check_useless, 1); }

/* ---- everything else, on one problem; nothing may be written meanwhile */

#define BAD_FORWARD(want, sentence, ...)                            \
  do {                                                              \
    layer_bind(&l);                                                 \
    __VA_ARGS__;                                                    \
    REFUSED(moe_forward(l.plan, &l.forward, NULL), want, sentence); \
  } while (0)
#define BAD_BACKWARD(want, sentence, ...)                             \
  do {                                                                \
    layer_bind(&l);                                                   \
    __VA_ARGS__;                                                      \
    REFUSED(moe_backward(l.plan, &l.backward, NULL), want, sentence); \
  } while (0)

TEST(bad_forward_calls) {
  const struct layer_case *c = &layer_cases[0];
  struct layer l, untouched;
  OPEN(&l, c, o.seed = 2);
  OPEN(&untouched, c, o.seed = 2);
  REFUSED(moe_forward(NULL, &l.forward, NULL), ARGUMENT, "forward: plan = NULL, wanted a plan");
  REFUSED(moe_forward(l.plan, NULL, NULL), ARGUMENT, "forward: args: NULL, wanted a struct");
  REFUSED(moe_forward(l.plan, &l.forward, (moe_stream)(void *)&l), ARGUMENT,
          "forward: stream is given, wanted NULL");
  BAD_FORWARD(ARGUMENT, "forward: params: NULL, wanted a struct", l.forward.params = NULL);
  BAD_FORWARD(ARGUMENT, "forward: args: size = 0, wanted", l.forward.size = 0);
  BAD_FORWARD(ARGUMENT, "forward: params: size = 3, wanted", l.params.size = 3);
  BAD_FORWARD(ARGUMENT, "forward: tokens = -1, wanted 0 .. 1073741823", l.forward.tokens = -1);
  BAD_FORWARD(ARGUMENT, "forward: tokens = 1073741824, wanted", l.forward.tokens = 1 << 30);
  BAD_FORWARD(ARGUMENT, "forward: tokens = 9223372036854775807, wanted", l.forward.tokens = INT64_MAX);
  BAD_FORWARD(WORKSPACE, "forward: workspace_bytes = 0, wanted at least", l.forward.workspace_bytes = 0);
  BAD_FORWARD(WORKSPACE, "forward: workspace_bytes = ", l.forward.workspace_bytes--);
  BAD_FORWARD(WORKSPACE, "forward: workspace = NULL, wanted", l.forward.workspace = NULL);
  BAD_FORWARD(WORKSPACE, "forward: saved_bytes = ", l.forward.saved_bytes--);
  BAD_FORWARD(WORKSPACE, "forward: workspace_bytes = ", l.forward.tokens++);
  BAD_FORWARD(WORKSPACE, "forward: workspace_bytes = 0, wanted",
              l.forward.size = offsetof(moe_forward_args, workspace));
  SAME(&l, &untouched, 0, c, "refused forward calls");
  layer_close(&l), layer_close(&untouched);
}

TEST(bad_backward_calls) {
  const struct layer_case *c = &layer_cases[0];
  struct layer l, untouched;
  OPEN(&l, c, o.seed = 2);
  OPEN(&untouched, c, o.seed = 2);
  RAN(layer_forward(&l), c);
  RAN(layer_forward(&untouched), c);
  REFUSED(moe_backward(NULL, &l.backward, NULL), ARGUMENT, "backward: plan = NULL, wanted a plan");
  REFUSED(moe_backward(l.plan, NULL, NULL), ARGUMENT, "backward: args: NULL, wanted a struct");
  REFUSED(moe_backward(l.plan, &l.backward, (moe_stream)(void *)&l), ARGUMENT,
          "backward: stream is given, wanted NULL");
  BAD_BACKWARD(ARGUMENT, "backward: params: NULL, wanted a struct", l.backward.params = NULL);
  BAD_BACKWARD(ARGUMENT, "backward: args: size = 0, wanted", l.backward.size = 0);
  BAD_BACKWARD(ARGUMENT, "backward: grads: size = 5, wanted", l.grads.size = 5);
  BAD_BACKWARD(ARGUMENT, "backward: tokens = -9223372036854775808, wanted 0 ..",
               l.backward.tokens = INT64_MIN);
  BAD_BACKWARD(ARGUMENT, "backward: accumulate = 2, wanted 0 .. 1", l.backward.accumulate = 2);
  BAD_BACKWARD(ARGUMENT, "backward: skip_losses = -1, wanted 0 .. 1", l.backward.skip_losses = -1);
  BAD_BACKWARD(ARGUMENT, "backward: loss_scale = nan, wanted a finite", l.backward.loss_scale = NAN);
  BAD_BACKWARD(ARGUMENT, "backward: loss_scale = -inf, wanted a finite", l.backward.loss_scale = -INFINITY);
  BAD_BACKWARD(WORKSPACE, "backward: workspace_bytes = ", l.backward.workspace_bytes--);
  BAD_BACKWARD(WORKSPACE, "backward: workspace = NULL, wanted", l.backward.workspace = NULL);
  BAD_BACKWARD(WORKSPACE, "backward: saved_bytes = ", l.backward.saved_bytes--);
  BAD_BACKWARD(WORKSPACE, "backward: saved = NULL, wanted", l.backward.saved = NULL);
  BAD_BACKWARD(WORKSPACE, "backward: workspace_bytes = ", l.backward.tokens++);
  SAME(&l, &untouched, 0, c, "refused backward calls");
  layer_close(&l), layer_close(&untouched);
}

/* The gradient of a gate that the call does not have, and ids that only the caller can give. */
TEST(gradients_of_losses_that_are_not_there) {
  static const _Alignas(16) float dlosses[4] = {1, 1};
  const struct layer_case *c = &layer_cases[0];
  struct layer l;
  OPEN(&l, c, o.seed = 2);
  RAN(layer_forward(&l), c);
  BAD_BACKWARD(ARGUMENT, "backward: dlosses is given, wanted NULL", l.backward.dlosses = dlosses);
  layer_close(&l);
}

TEST(bad_combinations) {
  const struct layer_case *shared = &layer_cases[1];
  struct layer l;
  OPEN(&l, shared, o.seed = 2);
  RAN(layer_forward(&l), shared);
  BAD_BACKWARD(ARGUMENT, "backward: grads.shared_gate is given, wanted NULL", l.params.shared_gate = NULL);
  layer_close(&l);
  struct layer_case many = layer_cases[0];
  many.config.experts = 1;
  OPEN(&l, &many, o.seed = 2);
  RAN(layer_run(&l), &many);
  BAD_FORWARD(ARGUMENT, "forward: given_ids = NULL, wanted an array", l.forward.given_ids = NULL);
  layer_close(&l);
}

/* ---- structs of older and newer headers */

TEST(struct_sizes_of_other_headers) {
  const struct layer_case *c = &layer_cases[0];
  struct layer l, now;
  OPEN(&l, c, o.seed = 2);
  OPEN(&now, c, o.seed = 2);
  RAN(layer_run(&now), c);
  struct {
    moe_forward_args args;
    char tail[32];
  } forward = {.args = l.forward};
  struct {
    moe_params params;
    char tail[32];
  } params = {.params = l.params};
  forward.args.size = sizeof forward;
  forward.args.params = &params.params;
  params.params.size = sizeof params;
  RAN(moe_forward(l.plan, &forward.args, NULL), c);
  l.grads.size = offsetof(moe_param_grads, shared_w1); /* before there were shared experts */
  RAN(moe_backward(l.plan, &l.backward, NULL), c);
  SAME(&l, &now, 0, c, "structs of other sizes");
  forward.tail[31] = 1;
  REFUSED(moe_forward(l.plan, &forward.args, NULL), UNSUPPORTED, "forward: args: size = ");
  forward.tail[31] = 0;
  params.tail[0] = 1;
  REFUSED(moe_forward(l.plan, &forward.args, NULL), UNSUPPORTED, "forward: params: size = ");
  layer_close(&l), layer_close(&now);
}

TEST_MAIN()
