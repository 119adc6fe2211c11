/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory with guard pages, and one problem of the layer that owns every array it needs. What arrays there
 * are, how long, of what type and where the library is told of them stands in one table, so that a test over
 * "every array" or "every gradient" is a loop. Two problems opened from one seed have the same bits in every
 * input: most tests open two, disturb one and compare. */
#pragma once

#include "moeblas.h"

moe_context *cpu_context(int threads);            /* ends the program if there is none */
moe_status plan_status(const moe_config *config); /* of a plan with it, on the CPU */

/* Bytes that end (or, if `before`, start) at a page that may not be touched. What is left over on the other
 * pages is filled with a pattern of its own. */
struct guarded {
  unsigned char *data; /* aligned to 16 */
  size_t bytes;
  unsigned char *room; /* the pages that data lies in */
  size_t room_bytes;
  void *map; /* room and the guard page */
};
int guarded_open(struct guarded *g, size_t bytes, int before, int fill); /* 0 if memory is short */
int guarded_intact(const struct guarded *g);                             /* 0 if the left-over was written */
void guarded_close(struct guarded *g);

/* Types of elements that are no moe_dtype: minus their bytes. */
enum {
  TYPE_BYTE = -1,
  TYPE_INT32 = -4,
  TYPE_INT64 = -8
};

/* ROW(id, name, type, elements, the plan has a use for it, scale of random values, where the library gets it)
 * c is the config; T H F E K L S as in moeblas.h; F2 and S2 are the columns of h; D is L or H. */
#define LAYER_ARRAYS(ROW)                                                                                   \
  ROW(X, "x", c->dtype, T *H, 1, 1, l->forward.x = l->backward.x = data)                                    \
  ROW(LOGITS, "logits", c->logits_dtype, T *E, logits, 2, l->forward.logits = l->backward.logits = data)    \
  ROW(GIVEN_IDS, "given_ids", TYPE_INT32, T *K, !rows, 0, l->forward.given_ids = data)                      \
  ROW(GIVEN_WEIGHTS, "given_weights", MOE_FP32, T *K, ids || rows, 1,                                       \
      l->forward.given_weights = l->backward.given_weights = data)                                          \
  ROW(ROW_OFFSET, "row_offset", TYPE_INT32, E + 1, rows, 0,                                                 \
      l->forward.row_offset = l->backward.row_offset = data)                                                \
  ROW(MASK, "padding_mask", TYPE_BYTE, T, !rows, 0,                                                         \
      l->forward.padding_mask = l->backward.padding_mask = data)                                            \
  ROW(GLOBAL_COUNTS, "global_counts", TYPE_INT64, E + 1, c->router.balance == MOE_BALANCE_GLOBAL, 0,        \
      l->forward.global_counts = data)                                                                      \
  ROW(ROUTER_WEIGHT, "router_weight", c->router_dtype, E *H, hidden, 1, l->params.router_weight = data)     \
  ROW(ROUTER_BIAS, "router_bias", MOE_FP32, E, router, 1, l->params.router_bias = data)                     \
  ROW(CORRECTION_BIAS, "correction_bias", MOE_FP32, E, router, 0.25, l->params.correction_bias = data)      \
  ROW(W1, "w1", c->dtype, E *F2 *D, 1, 0.4, l->params.w1 = data)                                            \
  ROW(B1, "b1", c->dtype, E *F2, 1, 0.5, l->params.b1 = data)                                               \
  ROW(W2, "w2", c->dtype, E *D *F, 1, 0.4, l->params.w2 = data)                                             \
  ROW(B2, "b2", c->dtype, E *D, 1, 0.5, l->params.b2 = data)                                                \
  ROW(SHARED_W1, "shared_w1", c->dtype, S2 *H, shared, 0.4, l->params.shared_w1 = data)                     \
  ROW(SHARED_W2, "shared_w2", c->dtype, H *S, shared, 0.4, l->params.shared_w2 = data)                      \
  ROW(SHARED_GATE, "shared_gate", c->dtype, H, shared, 0.4, l->params.shared_gate = data)                   \
  ROW(LATENT_DOWN, "latent_down", c->dtype, L *H, latent, 0.4, l->params.latent_down = data)                \
  ROW(LATENT_UP, "latent_up", c->dtype, H *L, latent, 0.4, l->params.latent_up = data)                      \
  ROW(DOUT, "dout", c->dtype, T *H, 1, 1, l->backward.dout = data)                                          \
  ROW(OUT, "out", c->dtype, T *H, 1, 0, l->forward.out = data)                                              \
  ROW(TOPK_IDS, "topk_ids", TYPE_INT32, T *K, router, 0, l->forward.topk_ids = data)                        \
  ROW(TOPK_WEIGHTS, "topk_weights", MOE_FP32, T *K, router, 0, l->forward.topk_weights = data)              \
  ROW(COUNTS, "counts", TYPE_INT32, E, !rows, 0, l->forward.counts = data)                                  \
  ROW(SLOT_ROW, "slot_row", TYPE_INT32, T *K, !rows, 0, l->forward.slot_row = data)                         \
  ROW(LOSSES, "losses", MOE_FP32, 2, router, 0, l->forward.losses = data)                                   \
  ROW(DX, "dx", c->dtype, T *H, 1, 0, l->backward.dx = data)                                                \
  ROW(DLOGITS, "dlogits", c->logits_dtype, T *E, logits, 0, l->backward.dlogits = data)                     \
  ROW(DTOPK_WEIGHTS, "dtopk_weights", MOE_FP32, T *K, ids || rows, 0, l->backward.dtopk_weights = data)     \
  ROW(DROUTER_WEIGHT, "grads.router_weight", c->grad_dtype, E *H, hidden, 0, l->grads.router_weight = data) \
  ROW(DROUTER_BIAS, "grads.router_bias", MOE_FP32, E, router, 0, l->grads.router_bias = data)               \
  ROW(DW1, "grads.w1", c->grad_dtype, E *F2 *D, 1, 0, l->grads.w1 = data)                                   \
  ROW(DB1, "grads.b1", c->grad_dtype, E *F2, 1, 0, l->grads.b1 = data)                                      \
  ROW(DW2, "grads.w2", c->grad_dtype, E *D *F, 1, 0, l->grads.w2 = data)                                    \
  ROW(DB2, "grads.b2", c->grad_dtype, E *D, 1, 0, l->grads.b2 = data)                                       \
  ROW(DSHARED_W1, "grads.shared_w1", c->grad_dtype, S2 *H, shared, 0, l->grads.shared_w1 = data)            \
  ROW(DSHARED_W2, "grads.shared_w2", c->grad_dtype, H *S, shared, 0, l->grads.shared_w2 = data)             \
  ROW(DSHARED_GATE, "grads.shared_gate", c->grad_dtype, H, shared, 0, l->grads.shared_gate = data)          \
  ROW(DLATENT_DOWN, "grads.latent_down", c->grad_dtype, L *H, latent, 0, l->grads.latent_down = data)       \
  ROW(DLATENT_UP, "grads.latent_up", c->grad_dtype, H *L, latent, 0, l->grads.latent_up = data)             \
  ROW(SAVED, "saved", TYPE_BYTE, (int64_t)moe_plan_saved(l->plan, T), 1, 0, l->forward.saved = data;        \
      l->backward.saved = data)                                                                             \
  ROW(WORKSPACE, "workspace", TYPE_BYTE, (int64_t)moe_plan_workspace(l->plan, T), 1, 0,                     \
      l->forward.workspace = l->backward.workspace = data)

enum layer_array_id {
#define ROW(id, name, type, count, present, scale, bind) id,
  LAYER_ARRAYS(ROW)
#undef ROW
  LAYER_ARRAY_COUNT,
  FIRST_OUTPUT = OUT,
  FIRST_GRAD = DROUTER_WEIGHT, /* gradients of parameters, */
  AFTER_GRADS = SAVED          /* up to here */
};
#define BIT(id) ((uint64_t)1 << (id))

struct layer_array {
  const char *name;
  int type; /* a moe_dtype, or a TYPE_ */
  int64_t count;
  size_t bytes;
  void *data; /* NULL: absent; a test may take an array away by setting this to NULL */
  struct guarded memory;
};

struct layer_options {
  int64_t tokens;
  uint64_t seed;
  uint64_t without; /* BIT of each array to leave away */
  int threads;      /* 0: all */
  int before;       /* guard page in front instead of behind */
  int fill;         /* byte that outputs, saved and workspace are filled with */
};

struct layer {
  moe_config config; /* with the dtypes filled in */
  int64_t tokens;
  moe_context *ctx;
  moe_plan *plan;
  moe_params params;
  moe_param_grads grads;
  moe_forward_args forward;
  moe_backward_args backward;
  struct layer_array array[LAYER_ARRAY_COUNT];
};

/* Makes context, plan and arrays, and fills the inputs. On failure the status and nothing to close. */
moe_status layer_open(struct layer *l, const moe_config *config, const struct layer_options *options);
void layer_close(struct layer *l);

/* Puts the addresses of the arrays into the argument structs; the run functions do it first. */
void layer_bind(struct layer *l);
moe_status layer_forward(struct layer *l);
moe_status layer_backward(struct layer *l);
moe_status layer_run(struct layer *l); /* both */

double layer_get(const struct layer *l, int id, int64_t i);
void layer_set(struct layer *l, int id, int64_t i, double value);
/* Fills a whole array with one value, or with one byte. */
void layer_fill(struct layer *l, int id, double value);
void layer_fill_byte(struct layer *l, int id, int byte);
int32_t *layer_ints(const struct layer *l, int id);

/* The first element in which two arrays of one shape differ, bit by bit; -1: none. */
int64_t layer_difference(const struct layer *a, const struct layer *b, int id);
/* The id of the first array that both have and that differs, except these, saved and workspace; -1: none. */
int layer_differs(const struct layer *a, const struct layer *b, uint64_t except);
/* The id of an array whose surroundings were written, -1: none. */
int layer_overrun(const struct layer *l);
/* The first element that is NaN or infinite, -1: none. */
int64_t layer_not_finite(const struct layer *l, int id);

/* Configurations that together reach every op and every branch of the layer. */
struct layer_case {
  const char *name;
  moe_config config;
  uint64_t without;
};
extern const struct layer_case layer_cases[];
extern const int layer_case_count;

/* ---- for tests, on top of test.h */

/* Opens a problem; the last arguments set fields of the options o, which start as below. */
#define OPEN(l, c, ...)                                                                                      \
  do {                                                                                                       \
    struct layer_options o = {.tokens = 33, .seed = 7, .without = (c)->without, .threads = 2, .fill = 0xff}; \
    (void)(__VA_ARGS__);                                                                                     \
    const moe_status opened_ = layer_open((l), &(c)->config, &o);                                            \
    REQUIRE(opened_ == MOE_OK, "%s: %s", (c)->name, moe_last_error());                                       \
  } while (0)
#define RAN(call, c) EXPECT((call) == MOE_OK, "%s: %s", (c)->name, moe_last_error())
#define SAME(a, b, except, c, what)                                                    \
  do {                                                                                 \
    const int id_ = layer_differs((a), (b), (except));                                 \
    EXPECT(id_ < 0, "%s: %s: %s differs at %d", (c)->name, what, (a)->array[id_].name, \
           (int)layer_difference((a), (b), id_));                                      \
  } while (0)
/* The call fails with MOE_ERROR_<want>, and the sentence has this in it. */
#define REFUSED(call, want, sentence)                                                \
  do {                                                                               \
    const moe_status got_ = (call);                                                  \
    EXPECT(got_ == MOE_ERROR_##want && strstr(moe_last_error(), sentence) != NULL,   \
           "%s, \"%s\", wanted %s, \"%s\"", moe_status_name(got_), moe_last_error(), \
           moe_status_name(MOE_ERROR_##want), sentence);                             \
  } while (0)
/* Runs `check` on every case that the condition on its config c holds for. */
#define EACH_CASE(check, condition)                        \
  do {                                                     \
    int ran_ = 0;                                          \
    for (int i_ = 0; i_ < layer_case_count; i_++) {        \
      const moe_config *const c = &layer_cases[i_].config; \
      if (c->hidden == 0 || !(condition)) continue;        \
      (check)(&layer_cases[i_]);                           \
      ran_++;                                              \
    }                                                      \
    EXPECT(ran_ > 0, "no case meets %s", #condition);      \
  } while (0)
