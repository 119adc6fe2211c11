/* SPDX-License-Identifier: Apache-2.0
 *
 * Everything that moeblas makes, made, used and destroyed again and again, leaves device and host memory as they were:
 * contexts, plans, memory, streams, graphs, timers; and refused calls too. */
#include "soak.h"

static void use(struct layer *g) {
  moe_timer *from = NULL, *to = NULL;
  double us = -1;
  const moe_stream stream = new_stream();
  moe_graph *graph = recorded(g, stream);
  OK(moe_timer_create(gpu, &from));
  OK(moe_timer_create(gpu, &to));
  OK(moe_timer_record(from, stream));
  OK(moe_graph_launch(graph, stream));
  gpu_layer_run(g, stream);
  OK(moe_timer_record(to, stream));
  OK(moe_timer_elapsed_us(from, to, &us));
  EXPECT(us > 0, "%g us", us);
  moe_timer_destroy(from), moe_timer_destroy(to);
  moe_graph_destroy(graph);
  moe_stream_destroy(gpu, stream);
}

static void be_refused(struct layer *g) {
  void *memory = NULL;
  g->forward.workspace_bytes--;
  EXPECT(moe_forward(g->plan, &g->forward, NULL) == MOE_ERROR_WORKSPACE, "less workspace will do");
  g->forward.workspace_bytes++;
  EXPECT(moe_memory_alloc(gpu, (size_t)1 << 60, &memory) == MOE_ERROR_MEMORY, "2^60 bytes were granted");
}

/* One life of a context of its own. */
static void live(const struct layer_case *c) {
  struct layer h, g;
  moe_context *const kept = gpu;
  watchdog(60);
  OK(moe_context_create(&gpu, MOE_BACKEND_CUDA, 0));
  if (gpu != NULL && open_alone(c, 100, 3, &h, &g)) {
    use(&g);
    be_refused(&g);
    gpu_layer_close(&g), layer_close(&h);
  }
  moe_context_destroy(gpu);
  gpu = kept;
}

static int64_t live_until(int64_t lives, double end) {
  int64_t n = 0;
  for (; test_failures == 0 && (n < lives || seconds_now() < end); n++)
    live(n % 2 ? &tiled_router : &layer_cases[n / 2 % layer_case_count]);
  return n;
}

TEST(what_is_destroyed_is_gone) {
  const double end = seconds_now() + seconds_each(1);
  const int every = 2 * layer_case_count;
  live_until(every, 0);
  const struct level before = level_now();
  const int64_t lives = live_until(every, end);
  expect_flat(before, "lives");
  printf("  %lld lives of a context\n", (long long)lives);
  watchdog(0);
}

TEST_MAIN()
