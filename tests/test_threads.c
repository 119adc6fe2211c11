/* SPDX-License-Identifier: Apache-2.0
 *
 * What: many threads and processes at once.
 * Idea: every thread has a problem of its own, whose answer was computed before by one thread alone; whatever
 * the threads share, a plan, a context, weights, or nothing, each must get its own answer back, bit by bit.
 * Invariant: a thread only counts what went wrong; the test that started it reports. */
#include "test.h"

#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support.h"

enum {
  THREADS = 16
};

/* Of each configuration; MOE_THREADS_ROUNDS says how many. */
static int rounds(void) {
  const char *const given = getenv("MOE_THREADS_ROUNDS");
  return given ? atoi(given) : 3;
}

/* One thread's problem: `want` holds the answer, `got` is run again and again. */
struct worker {
  pthread_t id;
  const struct layer_case *c;
  struct layer want, got;
  int index;
  int wrong;
  char sentence[512]; /* of the first thing that went wrong */
};

static void complain(struct worker *w, const char *what) {
  if (w->wrong++ == 0) snprintf(w->sentence, sizeof w->sentence, "%s: %s", what, moe_last_error());
}

/* Runs body(worker) on all threads at the same time. */
static void run_workers(struct worker *workers, void *(*body)(void *)) {
  int started = 0;
  while (started < THREADS && pthread_create(&workers[started].id, NULL, body, &workers[started]) == 0)
    started++;
  for (int i = 0; i < started; i++) pthread_join(workers[i].id, NULL);
  EXPECT(started == THREADS, "only %d threads", started);
  for (int i = 0; i < THREADS; i++)
    EXPECT(workers[i].wrong == 0, "thread %d, %d times: %s", i, workers[i].wrong, workers[i].sentence);
}

/* ---- one plan, sixteen threads */

static int open_worker(struct worker *w, const struct layer_case *c, int index) {
  struct layer_options o = {
      .tokens = 9 + 4 * index, .seed = (uint64_t)index, .without = c->without, .threads = 2, .fill = 0xff};
  *w = (struct worker){.c = c, .index = index};
  return layer_open(&w->want, &c->config, &o) == MOE_OK && layer_open(&w->got, &c->config, &o) == MOE_OK &&
         layer_run(&w->want) == MOE_OK;
}

static void *run_often(void *argument) {
  struct worker *w = argument;
  struct layer_array *const counts = &w->got.array[GLOBAL_COUNTS]; /* the one input that a call adds to */
  int64_t before[16] = {0};
  if (counts->data != NULL) memcpy(before, counts->data, counts->bytes);
  for (int round = 0, last = rounds(); round < last; round++) {
    if (counts->data != NULL) memcpy(counts->data, before, counts->bytes);
    for (int id = FIRST_OUTPUT; id < LAYER_ARRAY_COUNT; id++) layer_fill_byte(&w->got, id, 0xff - round);
    if (layer_run(&w->got) != MOE_OK) complain(w, "refused");
    const int id = layer_differs(&w->got, &w->want, 0);
    if (id >= 0) complain(w, w->got.array[id].name);
    if (layer_overrun(&w->got) >= 0) complain(w, "wrote outside of an array");
  }
  return NULL;
}

static void check_shared_plan(const struct layer_case *c) {
  struct worker workers[THREADS];
  moe_plan *own[THREADS];
  int opened = 1;
  for (int i = 0; i < THREADS; i++) opened &= open_worker(&workers[i], c, i);
  EXPECT(opened, "%s: %s", c->name, moe_last_error());
  for (int i = 0; i < THREADS; i++) {
    own[i] = workers[i].got.plan;
    workers[i].got.plan = workers[0].got.plan;
  }
  if (opened) run_workers(workers, run_often);
  for (int i = 0; i < THREADS; i++) {
    workers[i].got.plan = own[i];
    layer_close(&workers[i].want), layer_close(&workers[i].got);
  }
}
TEST(one_plan_serves_sixteen_threads) { EACH_CASE(check_shared_plan, 1); }

/* ---- contexts and plans come and go */

static void *live_shortly(void *argument) {
  struct worker *w = argument;
  moe_plan *const plan = w->got.plan;
  for (int round = 0; round < 25; round++) {
    moe_context *ctx = NULL;
    w->got.plan = NULL;
    if (moe_context_create(&ctx, MOE_BACKEND_CPU, 1 + round % 3) != MOE_OK) complain(w, "context");
    if (ctx != NULL && moe_plan_create(&w->got.plan, ctx, &w->c->config) != MOE_OK) complain(w, "plan");
    if (w->got.plan != NULL &&
        moe_plan_workspace(w->got.plan, w->got.tokens) <= w->got.array[WORKSPACE].bytes) {
      if (layer_run(&w->got) != MOE_OK) complain(w, "refused");
      if (layer_differs(&w->got, &w->want, 0) >= 0) complain(w, "differs");
    }
    moe_plan_destroy(w->got.plan);
    moe_context_destroy(ctx);
  }
  w->got.plan = plan;
  return NULL;
}

TEST(contexts_are_made_and_destroyed_in_parallel) {
  struct worker workers[THREADS];
  int opened = 1;
  for (int i = 0; i < THREADS; i++) opened &= open_worker(&workers[i], &layer_cases[i % 3], i);
  EXPECT(opened, "%s", moe_last_error());
  if (opened) run_workers(workers, live_shortly);
  for (int i = 0; i < THREADS; i++) layer_close(&workers[i].want), layer_close(&workers[i].got);
}

/* ---- sentences do not mix */

static void *fail_often(void *argument) {
  struct worker *w = argument;
  char want[64];
  snprintf(want, sizeof want, "context: backend = %d, wanted", 100 + w->index);
  for (int round = 0; round < 1000; round++)
    if (moe_backend_available((moe_backend)(100 + w->index)) != MOE_ERROR_ARGUMENT ||
        strncmp(moe_last_error(), want, strlen(want)) != 0)
      complain(w, "another thread's sentence");
  return NULL;
}

TEST(every_thread_reads_its_own_sentence) {
  struct worker workers[THREADS] = {0};
  for (int i = 0; i < THREADS; i++) workers[i].index = i;
  run_workers(workers, fail_often);
}

/* ---- threads that end */

static int threads_alive(void) {
  DIR *const folder = opendir("/proc/self/task");
  int count = 0;
  if (folder == NULL) return -1;
  while (readdir(folder) != NULL) count++;
  closedir(folder);
  return count - 2;
}

static void *run_once(void *argument) {
  struct worker *w = argument;
  if (layer_run(&w->got) != MOE_OK) complain(w, "refused");
  if (layer_differs(&w->got, &w->want, 0) >= 0) complain(w, "differs");
  return NULL;
}

/* What the library needs by thread goes with it. */
TEST(threads_end_and_leave_nothing) {
  struct worker w;
  REQUIRE(open_worker(&w, &layer_cases[1], 3), "%s", moe_last_error());
  int before = 0;
  for (int round = 0; round < 40; round++) {
    REQUIRE(pthread_create(&w.id, NULL, run_once, &w) == 0, "no thread");
    pthread_join(w.id, NULL);
    if (round == 0) before = threads_alive();
  }
  int after = threads_alive();
  for (int wait = 0; after > before && wait < 500; wait++) { /* OpenMP's own threads end a little later */
    usleep(10000);
    after = threads_alive();
  }
  EXPECT(before > 0 && after <= before, "%d threads are alive, %d were", after, before);
  EXPECT(w.wrong == 0, "%d times: %s", w.wrong, w.sentence);
  layer_close(&w.want), layer_close(&w.got);
}

/* A plan may outlive the thread that made it. */
static void *make_plan(void *argument) {
  struct worker *w = argument;
  if (moe_plan_create(&w->got.plan, w->got.ctx, &w->c->config) != MOE_OK) complain(w, "plan");
  return NULL;
}

TEST(a_plan_outlives_its_thread) {
  struct worker w;
  REQUIRE(open_worker(&w, &layer_cases[0], 5), "%s", moe_last_error());
  moe_plan_destroy(w.got.plan);
  REQUIRE(pthread_create(&w.id, NULL, make_plan, &w) == 0, "no thread");
  pthread_join(w.id, NULL);
  run_once(&w);
  EXPECT(w.wrong == 0, "%s", w.sentence);
  layer_close(&w.want), layer_close(&w.got);
}

/* ---- processes */

/* The status of a child that ran body(w), or -1 if it had to be killed. */
static int in_child(struct worker *w, void *(*body)(void *)) {
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    body(w);
    _exit(w->wrong != 0);
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
  return WEXITSTATUS(status);
}

static void *run_on_new_thread(void *argument) {
  struct worker *w = argument;
  if (pthread_create(&w->id, NULL, run_once, w) != 0)
    complain(w, "no thread");
  else
    pthread_join(w->id, NULL);
  return NULL;
}

static void *run_alone(void *argument) {
  struct worker *w = argument;
  moe_context *ctx;
  moe_plan *const plan = w->got.plan;
  if (moe_context_create(&ctx, MOE_BACKEND_CPU, 1) != MOE_OK ||
      moe_plan_create(&w->got.plan, ctx, &w->c->config) != MOE_OK)
    complain(w, "context");
  else
    run_once(w);
  w->got.plan = plan;
  return NULL;
}

/* libgomp's threads do not follow a fork, and a team of the forking thread would wait for them for ever: the child
 * uses a context of one thread, or starts from a thread of its own. */
TEST(a_child_computes_the_same_after_fork) {
  struct worker w;
  REQUIRE(open_worker(&w, &layer_cases[1], 4), "%s", moe_last_error());
  EXPECT(in_child(&w, run_alone) == 0, "a child with a context of one thread");
  EXPECT(in_child(&w, run_on_new_thread) == 0, "a child's new thread");
  run_once(&w);
  EXPECT(w.wrong == 0, "the parent afterwards: %s", w.sentence);
  layer_close(&w.want), layer_close(&w.got);
}

TEST_MAIN()
