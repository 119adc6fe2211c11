/* SPDX-License-Identifier: Apache-2.0
 *
 * Eight threads of the host with four streams each, on four plans that all share, with arrays and a workspace of their
 * own: every stream gets the bits that it gets alone. Each thread makes its streams and records its graphs while the others
 * run, and half the rounds are graphs. A thread only notes what went wrong; the test that started it reports. */
#include <pthread.h>

#include "soak.h"

enum {
  THREADS = 8,
  STREAMS = 4,
  RUNS = 3 /* in a stream; the last is looked at */
};

struct worker {
  pthread_t id;
  int index;
  double end;
  struct layer want[STREAMS], got[STREAMS];
  moe_stream stream[STREAMS];
  moe_graph *graph[STREAMS];
  void *poison; /* NaN bytes for any array */
  int64_t rounds;
  int wrong;
  char sentence[512]; /* of the first thing that went wrong */
};

static const struct layer_case *case_of(int stream) {
  return stream == 0 ? &tiled_ids : stream == 1 ? &tiled_router : &layer_cases[stream - 2];
}

static void note(struct worker *w, const char *what) {
  if (w->wrong++ == 0)
    snprintf(w->sentence, sizeof w->sentence, "round %lld: %s", (long long)w->rounds, what);
}

static int fine(struct worker *w, moe_status status) {
  if (status != MOE_OK) note(w, moe_last_error());
  return status == MOE_OK;
}

static int run(struct worker *w, int i, moe_stream stream) {
  struct layer *const g = &w->got[i];
  return fine(w, moe_forward(g->plan, &g->forward, stream)) &&
         fine(w, moe_backward(g->plan, &g->backward, stream));
}

/* NaN bytes on the device, as many as the largest array of any worker has. */
static void *new_poison(const struct worker *workers) {
  size_t bytes = 0;
  for (int t = 0; t < THREADS; t++)
    for (int i = 0; i < STREAMS; i++)
      for (int id = FIRST_OUTPUT; id < LAYER_ARRAY_COUNT; id++)
        if (workers[t].got[i].array[id].bytes > bytes) bytes = workers[t].got[i].array[id].bytes;
  void *const poison = on_gpu(bytes);
  OK(moe_memory_fill(gpu, poison, 0xff, bytes));
  return poison;
}

static int make_streams(struct worker *w) {
  for (int i = 0; i < STREAMS; i++) {
    if (!fine(w, moe_stream_create(gpu, &w->stream[i])) || !fine(w, moe_graph_begin(gpu, w->stream[i])))
      return 0;
    const int ran = run(w, i, w->stream[i]);
    if (!fine(w, moe_graph_end(gpu, w->stream[i], &w->graph[i])) || !ran) return 0;
  }
  return 1;
}

static void destroy_streams(struct worker *w) {
  for (int i = 0; i < STREAMS; i++) {
    moe_graph_destroy(w->graph[i]), w->graph[i] = NULL;
    moe_stream_destroy(gpu, w->stream[i]), w->stream[i] = NULL;
  }
}

/* In the order of the stream, so that every run must write all of its results again. */
static void queue_poison(struct worker *w, int i) {
  for (int id = FIRST_OUTPUT; id < LAYER_ARRAY_COUNT; id++) {
    const struct layer_array *const a = &w->got[i].array[id];
    const moe_copy_args args = {.size = sizeof args, .dst = a->data, .src = w->poison, .bytes = a->bytes};
    if (a->data != NULL) fine(w, moe_copy(gpu, &args, w->stream[i]));
  }
}

static void one_round(struct worker *w) {
  const int graphs = (w->rounds + w->index) % 2 == 0;
  for (int n = 0; n < RUNS; n++)
    for (int i = 0; i < STREAMS; i++) {
      queue_poison(w, i);
      if (graphs) fine(w, moe_graph_launch(w->graph[i], w->stream[i]));
      if (!graphs) run(w, i, w->stream[i]);
    }
  for (int i = 0; i < STREAMS; i++) fine(w, moe_synchronize(gpu, w->stream[i]));
  for (int i = 0; i < STREAMS; i++) {
    const char *const differs = first_difference(&w->got[i], &w->want[i]);
    if (differs != NULL) note(w, differs);
  }
}

static void *work(void *argument) {
  struct worker *const w = argument;
  while (seconds_now() < w->end && w->wrong == 0) {
    if (w->rounds % 64 == 0) {
      destroy_streams(w);
      if (!make_streams(w)) break;
    }
    one_round(w);
    w->rounds++;
  }
  destroy_streams(w);
  return NULL;
}

/* All at once; the memory they leave behind is that of the first time. */
static int64_t run_workers(struct worker *workers, double seconds) {
  int started = 0;
  int64_t rounds = 0;
  watchdog((unsigned)seconds + 60);
  for (int i = 0; i < THREADS; i++) workers[i].end = seconds_now() + seconds, workers[i].rounds = 0;
  while (started < THREADS && pthread_create(&workers[started].id, NULL, work, &workers[started]) == 0)
    started++;
  for (int i = 0; i < started; i++) pthread_join(workers[i].id, NULL);
  EXPECT(started == THREADS, "only %d threads", started);
  for (int i = 0; i < THREADS; i++) {
    rounds += workers[i].rounds;
    EXPECT(workers[i].rounds > 0, "thread %d has no finished round", i);
    EXPECT(workers[i].wrong == 0, "thread %d, %d times: %s", i, workers[i].wrong, workers[i].sentence);
  }
  watchdog(0);
  return rounds;
}

/* Every thread's layers on the plans of the first; its own come back for closing. */
static void share_plans(struct worker *workers, moe_plan *own[THREADS][STREAMS], int back) {
  for (int t = 0; t < THREADS; t++)
    for (int i = 0; i < STREAMS; i++) {
      if (!back) own[t][i] = workers[t].got[i].plan;
      workers[t].got[i].plan = own[back ? t : 0][i];
    }
}

TEST(eight_threads_of_four_streams) {
  static struct worker workers[THREADS];
  moe_plan *own[THREADS][STREAMS];
  watchdog(120);
  for (int t = 0; t < THREADS; t++) {
    workers[t].index = t;
    for (int i = 0; i < STREAMS; i++)
      REQUIRE(open_alone(case_of(i), 60 + 37 * t, (uint64_t)(t * STREAMS + i), &workers[t].want[i],
                         &workers[t].got[i]),
              "thread %d, stream %d cannot be opened", t, i);
  }
  share_plans(workers, own, 0);
  void *const poison = new_poison(workers);
  for (int t = 0; t < THREADS; t++) workers[t].poison = poison;
  const double seconds = seconds_each(1);
  int64_t rounds = run_workers(workers, seconds / 3);
  const struct level before = level_now();
  rounds += run_workers(workers, seconds * 2 / 3);
  expect_flat(before, "threads");
  printf("  %lld rounds of %d forward and backward passes\n", (long long)rounds, STREAMS * RUNS);
  share_plans(workers, own, 1);
  moe_memory_free(gpu, poison);
  for (int t = 0; t < THREADS; t++)
    for (int i = 0; i < STREAMS; i++) gpu_layer_close(&workers[t].got[i]), layer_close(&workers[t].want[i]);
}

TEST_MAIN()
