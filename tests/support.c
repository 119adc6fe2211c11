/* SPDX-License-Identifier: Apache-2.0
 * See support.h. */
#include "support.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "format.h"

/* ---- plans on the CPU */

moe_context *cpu_context(int threads) {
  moe_context *ctx = NULL;
  if (moe_context_create(&ctx, MOE_BACKEND_CPU, threads) != MOE_OK) exit(2);
  return ctx;
}

moe_status plan_status(const moe_config *config) {
  moe_context *ctx = cpu_context(1);
  moe_plan *plan = NULL;
  const moe_status status = moe_plan_create(&plan, ctx, config);
  moe_plan_destroy(plan);
  moe_context_destroy(ctx);
  return status;
}

/* ---- guard pages */

#define PATTERN 0xa5

static size_t page_bytes(void) { return (size_t)sysconf(_SC_PAGESIZE); }

int guarded_open(struct guarded *g, size_t bytes, int before, int fill) {
  const size_t page = page_bytes(), room = (bytes / page + 1) * page;
  *g = (struct guarded){.bytes = bytes, .room_bytes = room};
  void *map = mmap(NULL, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) return 0;
  g->map = map;
  g->room = before ? (unsigned char *)map + page : map;
  g->data = before ? g->room : g->room + (room - bytes) / 16 * 16;
  memset(g->room, PATTERN, room);
  memset(g->data, fill, bytes);
  if (mprotect(before ? map : g->room + room, page, PROT_NONE) == 0) return 1;
  guarded_close(g);
  return 0;
}

int guarded_intact(const struct guarded *g) {
  for (size_t i = 0; i < g->room_bytes; i++) {
    const int own = g->room + i >= g->data && g->room + i < g->data + g->bytes;
    if (!own && g->room[i] != PATTERN) return 0;
  }
  return 1;
}

void guarded_close(struct guarded *g) {
  if (g->map != NULL) munmap(g->map, g->room_bytes + page_bytes());
  *g = (struct guarded){0};
}

/* ---- the layer's arrays */

static size_t type_bytes(int type) { return type < 0 ? (size_t)-type : moe_dtype_bytes((moe_dtype)type); }

/* What the library does with 0; the arrays need the types. */
static moe_config with_dtypes(const moe_config *given) {
  moe_config c = *given;
  if (c.dtype == MOE_DTYPE_DEFAULT) c.dtype = MOE_BF16;
  if (c.logits_dtype == MOE_DTYPE_DEFAULT) c.logits_dtype = MOE_FP32;
  if (c.router_dtype == MOE_DTYPE_DEFAULT) c.router_dtype = c.dtype;
  if (c.grad_dtype == MOE_DTYPE_DEFAULT) c.grad_dtype = c.dtype;
  return c;
}

/* The letters that the rows of LAYER_ARRAYS are written in. */
#define LETTERS                                                                                            \
  const moe_config *c = &l->config;                                                                        \
  const int64_t T = l->tokens, H = c->hidden, F = c->inter, E = c->experts, K = c->topk, L = c->latent;    \
  const int64_t S = c->shared_inter, D = L > 0 ? L : H, F2 = c->act.gated ? 2 * F : F,                     \
                S2 = c->act.gated ? 2 * S : S;                                                             \
  const int hidden = c->entry == MOE_ENTRY_HIDDEN, logits = c->entry == MOE_ENTRY_LOGITS,                  \
            ids = c->entry == MOE_ENTRY_IDS, rows = c->entry == MOE_ENTRY_ROWS, router = hidden || logits, \
            shared = S > 0, latent = L > 0;

static int open_array(struct layer_array *a, const char *name, int type, int64_t count, int fill,
                      const struct layer_options *o) {
  *a = (struct layer_array){.name = name, .type = type, .count = count};
  a->bytes = (size_t)count * type_bytes(type);
  if (!guarded_open(&a->memory, a->bytes, o->before, fill)) return 0;
  a->data = a->memory.data;
  return 1;
}

static int open_arrays(struct layer *l, const struct layer_options *o) {
  LETTERS
#define ROW(id, name, type, count, present, scale, bind)                                        \
  if ((present) && (o->without & BIT(id)) == 0 &&                                               \
      !open_array(&l->array[id], name, (int)(type), count, id < FIRST_OUTPUT ? 0 : o->fill, o)) \
    return 0;
  LAYER_ARRAYS(ROW)
#undef ROW
  (void)router;
  return 1;
}

void layer_bind(struct layer *l) {
  l->params = (moe_params)MOE_PARAMS_INIT;
  l->grads = (moe_param_grads)MOE_PARAM_GRADS_INIT;
  l->forward = (moe_forward_args)MOE_FORWARD_ARGS_INIT;
  l->backward = (moe_backward_args)MOE_BACKWARD_ARGS_INIT;
#define ROW(id, name, type, count, present, scale, bind) \
  {                                                      \
    void *data = l->array[id].data;                      \
    bind;                                                \
  }
  LAYER_ARRAYS(ROW)
#undef ROW
  l->forward.size = sizeof l->forward;
  l->forward.tokens = l->backward.tokens = l->tokens;
  l->forward.params = l->backward.params = &l->params;
  l->forward.saved_bytes = l->backward.saved_bytes = l->array[SAVED].bytes;
  l->forward.workspace_bytes = l->backward.workspace_bytes = l->array[WORKSPACE].bytes;
  l->backward.grads = &l->grads;
}

/* ---- contents */

static uint32_t next_random(uint64_t *state) {
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(*state >> 32);
}

static void fill_floats(struct layer *l, uint64_t seed) {
  static const double scales[] = {
#define ROW(id, name, type, count, present, scale, bind) [id] = (scale),
      LAYER_ARRAYS(ROW)
#undef ROW
  };
  for (int id = 0; id < FIRST_OUTPUT; id++) {
    uint64_t state = seed * LAYER_ARRAY_COUNT + (uint64_t)id; /* its own, whichever are absent */
    if (scales[id] == 0) continue;
    for (int64_t i = 0; i < l->array[id].count; i++)
      layer_set(l, id, i, scales[id] * ((double)next_random(&state) * 0x1p-31 - 1));
  }
}

/* Ids with some to be skipped; some tokens masked; offsets with empty experts and idle rows at the end. */
static void fill_integers(struct layer *l, uint64_t seed) {
  const int64_t experts = l->config.experts;
  uint64_t state = ~seed;
  for (int64_t i = 0; i < l->array[GIVEN_IDS].count; i++)
    layer_ints(l, GIVEN_IDS)[i] = (int32_t)(next_random(&state) % (uint64_t)(experts + 2)) - 1;
  for (int64_t i = 0; i < l->array[MASK].count; i++)
    ((uint8_t *)l->array[MASK].data)[i] = next_random(&state) % 3 == 0;
  for (int64_t e = 0; e < l->array[GLOBAL_COUNTS].count; e++)
    ((int64_t *)l->array[GLOBAL_COUNTS].data)[e] = (int64_t)(next_random(&state) % 50);
  for (int64_t e = 1; e < l->array[ROW_OFFSET].count; e++) {
    const int64_t most = l->tokens * (e + 1) / (experts + 2);
    const int32_t last = layer_ints(l, ROW_OFFSET)[e - 1];
    layer_ints(l, ROW_OFFSET)[e] = e % 3 == 2 || most < last ? last : (int32_t)most;
  }
}

/* ---- life */

moe_status layer_open(struct layer *l, const moe_config *config, const struct layer_options *options) {
  *l = (struct layer){.config = with_dtypes(config), .tokens = options->tokens};
  moe_status status = moe_context_create(&l->ctx, MOE_BACKEND_CPU, options->threads);
  if (status == MOE_OK) status = moe_plan_create(&l->plan, l->ctx, config);
  if (status == MOE_OK && !open_arrays(l, options)) status = MOE_ERROR_MEMORY;
  if (status != MOE_OK) {
    layer_close(l);
    return status;
  }
  fill_floats(l, options->seed);
  fill_integers(l, options->seed);
  layer_bind(l);
  return MOE_OK;
}

void layer_close(struct layer *l) {
  for (int id = 0; id < LAYER_ARRAY_COUNT; id++) guarded_close(&l->array[id].memory);
  moe_plan_destroy(l->plan);
  moe_context_destroy(l->ctx);
  *l = (struct layer){0};
}

moe_status layer_forward(struct layer *l) {
  layer_bind(l);
  return moe_forward(l->plan, &l->forward, NULL);
}

moe_status layer_backward(struct layer *l) {
  layer_bind(l);
  return moe_backward(l->plan, &l->backward, NULL);
}

moe_status layer_run(struct layer *l) {
  const moe_status status = layer_forward(l);
  return status == MOE_OK ? layer_backward(l) : status;
}

/* ---- looking and comparing */

int32_t *layer_ints(const struct layer *l, int id) { return l->array[id].data; }

double layer_get(const struct layer *l, int id, int64_t i) {
  const struct layer_array *a = &l->array[id];
  switch (a->type) {
  case TYPE_BYTE: return ((const uint8_t *)a->data)[i];
  case TYPE_INT32: return ((const int32_t *)a->data)[i];
  case TYPE_INT64: return (double)((const int64_t *)a->data)[i];
  default: return (double)moe_load(a->data, (moe_dtype)a->type, i);
  }
}

void layer_set(struct layer *l, int id, int64_t i, double value) {
  moe_store(l->array[id].data, (moe_dtype)l->array[id].type, i, (float)value);
}

void layer_fill(struct layer *l, int id, double value) {
  for (int64_t i = 0; i < l->array[id].count; i++) layer_set(l, id, i, value);
}

void layer_fill_byte(struct layer *l, int id, int byte) {
  if (l->array[id].data != NULL) memset(l->array[id].data, byte, l->array[id].bytes);
}

int64_t layer_difference(const struct layer *a, const struct layer *b, int id) {
  const size_t step = type_bytes(a->array[id].type);
  const unsigned char *p = a->array[id].data, *q = b->array[id].data;
  for (int64_t i = 0; i < a->array[id].count; i++)
    if (memcmp(p + (size_t)i * step, q + (size_t)i * step, step) != 0) return i;
  return -1;
}

int layer_differs(const struct layer *a, const struct layer *b, uint64_t except) {
  except |= BIT(SAVED) | BIT(WORKSPACE);
  for (int id = 0; id < LAYER_ARRAY_COUNT; id++) {
    if (except & BIT(id) || a->array[id].data == NULL || b->array[id].data == NULL) continue;
    if (a->array[id].count != b->array[id].count || layer_difference(a, b, id) >= 0) return id;
  }
  return -1;
}

int layer_overrun(const struct layer *l) {
  for (int id = 0; id < LAYER_ARRAY_COUNT; id++)
    if (l->array[id].memory.map != NULL && !guarded_intact(&l->array[id].memory)) return id;
  return -1;
}

int64_t layer_not_finite(const struct layer *l, int id) {
  for (int64_t i = 0; i < l->array[id].count; i++)
    if (!isfinite(layer_get(l, id, i))) return i;
  return -1;
}

/* ---- the configurations */

#define SIZES(h, f, e, k) .size = sizeof(moe_config), .hidden = (h), .inter = (f), .experts = (e), .topk = (k)
#define SWIGLU            .act = {.gated = 1}

const struct layer_case layer_cases[] = {
    {"softmax", {SIZES(40, 24, 6, 2), SWIGLU, .router.renormalize = 1}, 0},
    {"sigmoid_groups",
     {SIZES(24, 16, 8, 3), .dtype = MOE_FP32, SWIGLU, .shared_inter = 12,
      .router = {.score = MOE_SCORE_SIGMOID,
                 .renormalize = 1,
                 .scale = 2.5f,
                 .groups = 4,
                 .topk_groups = 2,
                 .group_score = MOE_GROUP_TOP2_SUM,
                 .balance = MOE_BALANCE_SEQUENCE,
                 .balance_coeff = 0.1f,
                 .z_coeff = 0.01f,
                 .sequence_tokens = 8}},
     BIT(GIVEN_IDS)},
    {"latent_transposed",
     {SIZES(40, 24, 5, 2), .dtype = MOE_FP16, .act.kind = MOE_ACT_GELU, .latent = 16, .shared_inter = 20,
      .transposed = 1},
     BIT(GIVEN_IDS)},
    {"latent_recompute",
     {SIZES(24, 20, 4, 1), .act = {.gated = 1, .layout = MOE_LAYOUT_CONCAT_UP_FIRST}, .latent = 12,
      .recompute = MOE_RECOMPUTE_H, .grad_dtype = MOE_FP32, .router_dtype = MOE_FP32},
     BIT(GIVEN_IDS) | BIT(MASK)},
    {"shared_recompute",
     {SIZES(32, 16, 4, 2), .dtype = MOE_FP32, .act = {.kind = MOE_ACT_SITU, .gated = 1, .up_beta = 25},
      .shared_inter = 24, .latent = 8, .recompute = MOE_RECOMPUTE_H},
     BIT(GIVEN_IDS) | BIT(SHARED_GATE) | BIT(DSHARED_GATE)},
    {"logits",
     {SIZES(24, 16, 6, 2), .dtype = MOE_FP32, .entry = MOE_ENTRY_LOGITS, SWIGLU, .recompute = MOE_RECOMPUTE_H,
      .router.score = MOE_SCORE_TOPK_SOFTMAX},
     BIT(GIVEN_IDS)},
    {"logits_balanced",
     {SIZES(24, 16, 6, 2), .logits_dtype = MOE_BF16, .entry = MOE_ENTRY_LOGITS, SWIGLU,
      .grad_dtype = MOE_FP32, .weight_on_input = 1,
      .router = {.balance = MOE_BALANCE_BATCH, .balance_coeff = 0.05f, .z_coeff = 0.001f}},
     BIT(GIVEN_IDS)},
    {"capacity",
     {SIZES(24, 16, 4, 2), .dtype = MOE_FP32, .capacity_factor = 0.75f, .act.kind = MOE_ACT_RELU2,
      .router = {.score = MOE_SCORE_SQRT_SOFTPLUS, .balance = MOE_BALANCE_GLOBAL, .balance_coeff = 0.1f}},
     BIT(GIVEN_IDS)},
    {"ids",
     {SIZES(24, 24, 5, 3), .entry = MOE_ENTRY_IDS, .capacity_factor = 1.25f, .drop = MOE_DROP_POSITION,
      .act = {.gated = 1, .alpha = 1.702f, .gate_max = 1, .up_min = -1, .up_max = 1, .up_offset = 1}},
     0},
    {"ids_on_input",
     {SIZES(20, 24, 5, 2), .dtype = MOE_FP32, .entry = MOE_ENTRY_IDS, .weight_on_input = 1, .transposed = 1,
      .act = {.gated = 1, .layout = MOE_LAYOUT_INTERLEAVED, .interleave = 4}},
     0},
    {"rows", {SIZES(24, 16, 5, 1), .entry = MOE_ENTRY_ROWS, SWIGLU, .recompute = MOE_RECOMPUTE_H}, 0},
    {"rows_on_input",
     {SIZES(24, 16, 5, 1), .dtype = MOE_FP32, .entry = MOE_ENTRY_ROWS, .act.kind = MOE_ACT_GELU_TANH,
      .weight_on_input = 1},
     0},
};
const int layer_case_count = (int)(sizeof layer_cases / sizeof *layer_cases);
