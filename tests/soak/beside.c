/* SPDX-License-Identifier: Apache-2.0
 *
 * Beside a kernel that holds multiprocessors, from one of them to all but one, and then all but each in turn, the layer ends
 * and gives the bits it gives alone: no block of ours waits for another that has no place. Memory is neither had
 * nor freed while they are held, because freeing waits for the holder. */
#include "soak.h"

enum {
  SETUPS = 4,
  TOKENS = 700
};

struct setup {
  struct layer h, whole, g;
  moe_stream stream;
  moe_graph *graph;
};

static int open_setup(struct setup *s, int index) {
  const struct layer_case *const c = index % 2 ? &tiled_router : &tiled_ids;
  if (!open_alone(c, TOKENS, 40 + (uint64_t)index, &s->h, &s->whole)) return 0;
  struct layer like = s->h;
  like.config.schedule = index / 2 ? MOE_SCHEDULE_DYNAMIC : MOE_SCHEDULE_STATIC;
  gpu_layer_open(&s->g, &like);
  s->stream = new_stream();
  s->graph = recorded(&s->g, s->stream);
  return s->graph != NULL;
}

static void close_setup(struct setup *s) {
  moe_graph_destroy(s->graph);
  moe_stream_destroy(gpu, s->stream);
  gpu_layer_close(&s->whole), gpu_layer_close(&s->g), layer_close(&s->h);
}

static void run_setup(struct setup *s, int index, int held, int graph) {
  gpu_layer_put(&s->g, &s->h, 0);
  if (graph) OK(moe_graph_launch(s->graph, s->stream));
  if (!graph) gpu_layer_run(&s->g, s->stream);
  OK(moe_synchronize(gpu, s->stream));
  const char *const differs = first_difference(&s->g, &s->h);
  EXPECT(differs == NULL, "setup %d beside %d held multiprocessors, %s: %s", index, held,
         graph ? "graph" : "eager", differs ? differs : "");
}

static void run_setups(struct setup *setups, int held) {
  for (int i = 0; i < SETUPS; i++)
    for (int graph = 0; graph < 2; graph++) run_setup(&setups[i], i, held, graph);
}

static void run_beside(struct setup *setups, int spare_first, int spare_count) {
  watchdog(30); /* sooner than the holder gives up: a hang must not pass as a delay */
  DONE(device_hold(spare_first, spare_count));
  run_setups(setups, moe_context_units(gpu) - spare_count);
  DONE(device_release());
}

TEST(all_but_some_and_all_but_one) {
  struct setup setups[SETUPS];
  const int units = moe_context_units(gpu), spare[] = {units - 1, units / 2, 7, 2};
  const double end = seconds_now() + seconds_each(1);
  int turns = 0;
  watchdog(120);
  for (int i = 0; i < SETUPS; i++) REQUIRE(open_setup(&setups[i], i), "setup %d cannot be opened", i);
  run_setups(setups, 0); /* also loads what CUDA would load at a first use, for which it waits */
  for (int i = 0; i < 4 && test_failures == 0; i++, turns++) run_beside(setups, 0, spare[i]);
  const struct level before = level_now();
  for (; seconds_now() < end && test_failures == 0; turns++) run_beside(setups, turns % units, 1);
  REQUIRE(test_failures == 0, "turn %d", turns);
  expect_flat(before, "beside");
  printf("  %d turns of %d passes, on %d multiprocessors\n", turns, 2 * SETUPS, units);
  for (int i = 0; i < SETUPS; i++) close_setup(&setups[i]);
  watchdog(0);
}

TEST_MAIN()
