/* SPDX-License-Identifier: Apache-2.0
 *
 * What: a problem of support.h whose arrays lie on the device.
 * Idea: the same struct layer with device addresses, so that layer_bind and the table of arrays serve both. The host's
 * problem fills the inputs and takes the results.
 * Invariant: before a run every output, `saved` and the workspace are NaN bytes. */
#pragma once

#include "../support.h"
#include "twin.h"

#define OK(call) EXPECT((call) == MOE_OK, "%s", moe_last_error())

static inline void *on_gpu(size_t bytes) {
  void *memory = NULL;
  if (moe_memory_alloc(gpu, bytes, &memory) != MOE_OK) {
    printf("%s\n", moe_last_error());
    exit(2);
  }
  return memory;
}

static inline void gpu_layer_close(struct layer *g) {
  for (int id = 0; id < LAYER_ARRAY_COUNT; id++) moe_memory_free(gpu, g->array[id].data);
  moe_plan_destroy(g->plan);
}

/* Inputs as they are on the host; only what the run both reads and writes if `all` is 0. */
static inline void gpu_layer_put(struct layer *g, const struct layer *h, int all) {
  for (int id = 0; id < FIRST_OUTPUT; id++)
    if (h->array[id].data != NULL && (all || id == GLOBAL_COUNTS))
      OK(moe_memory_copy(gpu, g->array[id].data, h->array[id].data, h->array[id].bytes));
  for (int id = FIRST_OUTPUT; id < LAYER_ARRAY_COUNT; id++)
    if (g->array[id].data != NULL) OK(moe_memory_fill(gpu, g->array[id].data, 0xff, g->array[id].bytes));
}

/* The layer of h on the device. */
static inline void gpu_layer_open(struct layer *g, const struct layer *h) {
  *g = *h;
  g->ctx = gpu, g->plan = NULL;
  OK(moe_plan_create(&g->plan, gpu, &h->config));
  g->array[SAVED].bytes = moe_plan_saved(g->plan, h->tokens);
  g->array[WORKSPACE].bytes = moe_plan_workspace(g->plan, h->tokens);
  for (int id = 0; id < LAYER_ARRAY_COUNT; id++)
    if (h->array[id].data != NULL) g->array[id].data = on_gpu(g->array[id].bytes);
  gpu_layer_put(g, h, 1);
  layer_bind(g);
}

static inline void gpu_layer_run(struct layer *g, moe_stream stream) {
  OK(moe_forward(g->plan, &g->forward, stream));
  OK(moe_backward(g->plan, &g->backward, stream));
}

/* Results into the host's arrays; those that the host has not stay away. */
static inline void gpu_layer_get(const struct layer *g, struct layer *h) {
  for (int id = 0; id < SAVED; id++)
    if (h->array[id].data != NULL && (id >= FIRST_OUTPUT || id == GLOBAL_COUNTS))
      OK(moe_memory_copy(gpu, h->array[id].data, g->array[id].data, h->array[id].bytes));
}

/* Large enough for several tiles, small enough for a thousand runs. */
static const struct layer_case tiled_ids = {"tiled_ids",
                                            {.size = sizeof(moe_config),
                                             .hidden = 264,
                                             .inter = 136,
                                             .experts = 8,
                                             .topk = 3,
                                             .entry = MOE_ENTRY_IDS,
                                             .act = {.gated = 1}},
                                            0};
static const struct layer_case tiled_router = {"tiled_router",
                                               {.size = sizeof(moe_config),
                                                .hidden = 256,
                                                .inter = 64,
                                                .experts = 12,
                                                .topk = 6,
                                                .shared_inter = 72,
                                                .act = {.gated = 1},
                                                .router = {.score = MOE_SCORE_SIGMOID,
                                                           .renormalize = 1,
                                                           .balance = MOE_BALANCE_BATCH,
                                                           .balance_coeff = 0.01f,
                                                           .z_coeff = 0.001f}},
                                               BIT(GIVEN_IDS)};
