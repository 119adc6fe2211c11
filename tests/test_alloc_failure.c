/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory that runs out: every allocation of library and tool fails in turn, first alone, then with all that follow. Each
 * time the call answers with a status and a sentence, or does without; nothing leaks, no file is left half written, and the
 * same call succeeds once there is memory again. Allocations inside libc and BLAS are not made to fail. */
#include <cjson/cJSON.h>
#include <errno.h>
#include <pthread.h>

#include "command.h"
#include "files.h"

#include "../tools/cli.h"
#include "../tools/train/trainer.h"
#include "moeblas_ops.h"

/* ---- memory ------------------------------------------------------------------------------------------------------- */

enum {
  BLOCKS = 4096
};

static struct {
  pthread_mutex_t lock;
  void *block[BLOCKS]; /* those that are held; what libc gave out by itself is in none */
  int held;
  int64_t calls;
  int64_t fail_at; /* the number of the first call that fails; -1: none */
  int persistent;
} memory = {.lock = PTHREAD_MUTEX_INITIALIZER, .fail_at = -1};

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_realloc(void *block, size_t bytes);
void *__real_aligned_alloc(size_t alignment, size_t bytes);
void __real_free(void *block);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_realloc(void *block, size_t bytes);
void *__wrap_aligned_alloc(size_t alignment, size_t bytes);
void __wrap_free(void *block);
FILE *__real_fopen(const char *path, const char *mode);
FILE *__wrap_fopen(const char *path, const char *mode);
FILE *__real_fdopen(int fd, const char *mode);
FILE *__wrap_fdopen(int fd, const char *mode);

static int fails(void) {
  pthread_mutex_lock(&memory.lock);
  const int64_t call = memory.calls++;
  const int failing =
      memory.fail_at >= 0 && (call == memory.fail_at || (memory.persistent && call > memory.fail_at));
  pthread_mutex_unlock(&memory.lock);
  if (failing) errno = ENOMEM;
  return failing;
}

static int find(const void *block) {
  int i = memory.held - 1;
  while (i >= 0 && memory.block[i] != block) i--;
  return i;
}

static void *keep(void *block) {
  if (block == NULL) return NULL;
  pthread_mutex_lock(&memory.lock);
  if (memory.held == BLOCKS) abort();
  memory.block[memory.held++] = block;
  pthread_mutex_unlock(&memory.lock);
  return block;
}

static void forget(const void *block) {
  pthread_mutex_lock(&memory.lock);
  const int i = find(block);
  if (i >= 0) memory.block[i] = memory.block[--memory.held];
  pthread_mutex_unlock(&memory.lock);
}

void *__wrap_malloc(size_t bytes) { return fails() ? NULL : keep(__real_malloc(bytes)); }
void *__wrap_calloc(size_t count, size_t bytes) { return fails() ? NULL : keep(__real_calloc(count, bytes)); }
void *__wrap_aligned_alloc(size_t alignment, size_t bytes) {
  return fails() ? NULL : keep(__real_aligned_alloc(alignment, bytes));
}
void *__wrap_realloc(void *block, size_t bytes) {
  if (fails()) return NULL;
  forget(block);
  return keep(__real_realloc(block, bytes));
}
void __wrap_free(void *block) {
  forget(block);
  __real_free(block);
}
FILE *__wrap_fopen(const char *path, const char *mode) { return fails() ? NULL : __real_fopen(path, mode); }
FILE *__wrap_fdopen(int fd, const char *mode) { return fails() ? NULL : __real_fdopen(fd, mode); }

/* ---- the loop ----------------------------------------------------------------------------------------------------- */

struct scene {
  const char *name;
  int (*run)(char *error, size_t bytes);        /* 0, or a status and a sentence */
  void (*look)(const char *name, int64_t call); /* at what is left behind, or NULL */
};

/* One call with the memory running out at allocation n. */
static int attempt(const struct scene *scene, int64_t n, int persistent, int64_t *calls) {
  char error[1024] = "";
  const int held = memory.held;
  memory.fail_at = n;
  memory.persistent = persistent;
  memory.calls = 0;
  const int status = scene->run(error, sizeof error);
  *calls = memory.calls;
  memory.fail_at = -1;
  const char *way = persistent ? "from there on" : "once";
  EXPECT(memory.held == held, "%s, allocation %lld fails %s: %d blocks leak", scene->name, (long long)n, way,
         memory.held - held);
  EXPECT(status == 0 || error[0] != '\0', "%s, allocation %lld fails %s: status %d without a sentence",
         scene->name, (long long)n, way, status);
  if (scene->look) scene->look(scene->name, n);
  return status;
}

static void run_out(const struct scene *scene) {
  int64_t calls, ignored;
  REQUIRE(attempt(scene, -1, 0, &calls) == 0, "%s fails with all memory there is", scene->name);
  REQUIRE(calls > 0, "%s allocates nothing", scene->name);
  int refused = 0;
  for (int persistent = 0; persistent < 2; persistent++)
    for (int64_t n = 0; n < calls; n++) refused += attempt(scene, n, persistent, &ignored) != 0;
  EXPECT(refused > 0, "%s never met a failure in %lld allocations", scene->name, (long long)calls);
  EXPECT(attempt(scene, -1, 0, &ignored) == 0, "%s fails afterwards", scene->name);
  printf("     %s: %lld allocations, %d refusals\n", scene->name, (long long)calls, refused);
}

/* ---- the library -------------------------------------------------------------------------------------------------- */

static moe_status use_library(moe_context **ctx, moe_plan **plan, void **block, moe_timer **timer) {
  moe_config config = MOE_CONFIG_INIT;
  config.hidden = config.inter = 16, config.experts = 4, config.topk = 2;
  moe_status status = moe_context_create(ctx, MOE_BACKEND_CPU, 2);
  if (status == MOE_OK) status = moe_plan_create(plan, *ctx, &config);
  if (status == MOE_OK) status = moe_warmup(*plan, NULL);
  if (status == MOE_OK) status = moe_memory_alloc(*ctx, 1000, block);
  if (status == MOE_OK) status = moe_timer_create(*ctx, timer);
  return status;
}

static int library(char *error, size_t bytes) {
  moe_context *ctx = NULL;
  moe_plan *plan = NULL;
  moe_timer *timer = NULL;
  void *block = NULL;
  const moe_status status = use_library(&ctx, &plan, &block, &timer);
  if (status != MOE_OK) snprintf(error, bytes, "%s", moe_last_error());
  EXPECT(status == MOE_OK || status == MOE_ERROR_MEMORY, "status %s", moe_status_name(status));
  moe_timer_destroy(timer);
  moe_memory_free(ctx, block);
  moe_plan_destroy(plan);
  moe_context_destroy(ctx);
  return (int)status;
}

TEST(the_library_runs_out_of_memory) {
  run_out(&(struct scene){"context, plan, memory, timer", library, NULL});
}

/* ---- checkpoints -------------------------------------------------------------------------------------------------- */

static char dir[128];

/* What is in the folder is a whole checkpoint and nothing else, or nothing. */
static void look_at_checkpoint(const char *name, int64_t call) {
  struct checkpoint c;
  char path[256], error[512];
  const int count = files_count(dir);
  EXPECT(access(files_path(path, dir, "checkpoint.safetensors.tmp"), F_OK) != 0,
         "%s, %lld: a file is left half written", name, (long long)call);
  if (access(files_path(path, dir, "checkpoint.safetensors"), F_OK) != 0) return;
  EXPECT(count >= 1 && checkpoint_open(&c, dir, error, sizeof error) == 0, "%s, %lld: %s", name,
         (long long)call, error);
  checkpoint_close(&c);
}

static int checkpoints(char *error, size_t bytes) {
  float one[6] = {1, 2, 3, 4, 5, 6}, two[6];
  const struct tensor tensors[] = {{"a", one, {2, 3}, 2}, {"b", one, {1}, 1}};
  const struct tensor back = {"a", two, {2, 3}, 2};
  const struct checkpoint_meta meta[] = {{"step", "7"}};
  struct checkpoint c;
  int status = checkpoint_save(dir, tensors, 2, meta, 1, error, bytes);
  if (status == 0) status = checkpoint_open(&c, dir, error, bytes);
  if (status != 0) return status;
  status = checkpoint_read(&c, &back, error, bytes);
  checkpoint_close(&c);
  return status;
}

TEST(a_checkpoint_runs_out_of_memory) {
  files_make(dir);
  cJSON_InitHooks(&(cJSON_Hooks){__wrap_malloc, __wrap_free});
  run_out(&(struct scene){"checkpoint", checkpoints, look_at_checkpoint});
  cJSON_InitHooks(NULL);
  files_remove(dir);
}

/* ---- commands ----------------------------------------------------------------------------------------------------- */

/* What a command says on stderr is the sentence. */
static int answer(struct command_run r, char *error, size_t bytes) {
  snprintf(error, bytes, "%s", r.said.err);
  EXPECT(r.code == CLI_OK || r.code == CLI_IO || r.code == CLI_USAGE, "status %d", r.code);
  capture_free(&r.said);
  return r.code;
}
#define ANSWER(...) answer(command_run(__VA_ARGS__, NULL), error, bytes)

static char list_path[256], text_path[256];

static int info(char *error, size_t bytes) {
  return ANSWER(cmd_info, "info", "--backend", "cpu", "--plan", "t9 h16 f8 e4 k2");
}
static int presets(char *error, size_t bytes) { return ANSWER(cmd_info, "info", "--presets", "--json"); }
static int check(char *error, size_t bytes) {
  return ANSWER(cmd_check, "check", "--threads", "2", "t5 h8 f8 e4 k2 bwd", list_path);
}
static int bitwise(char *error, size_t bytes) {
  return ANSWER(cmd_check, "check", "--threads", "2", "--bitwise", "t5 h8 f8 e4 k2 bwd");
}
static int mutate(char *error, size_t bytes) {
  return ANSWER(cmd_check, "check", "--threads", "2", "--mutate", "t3 h4 f4 e2 k1 fp32");
}

/* A problem a line, more than the list has room for at first; the last one is run. */
static void write_list(void) {
  FILE *f = __real_fopen(files_path(list_path, dir, "list"), "w");
  for (int i = 0; i < 3; i++) fputs("t2 h4 f4 e2 k1\n", f);
  fclose(f);
  memmove(list_path + 1, list_path, sizeof list_path - 1);
  list_path[0] = '@';
}

TEST(the_tool_runs_out_of_memory) {
  files_make(dir);
  setenv("MOEBLAS_PRESETS", "data/presets.csv", 0); /* the build may lie elsewhere; tests run in the root */
  write_list();
  run_out(&(struct scene){"info --plan", info, NULL});
  run_out(&(struct scene){"info --presets", presets, NULL});
  run_out(&(struct scene){"check", check, NULL});
  run_out(&(struct scene){"check --bitwise", bitwise, NULL});
  run_out(&(struct scene){"check --mutate", mutate, NULL});
  files_remove(dir);
}

/* ---- training ----------------------------------------------------------------------------------------------------- */

/* Arithmetic allocates nothing and takes the time; so do disks. */
int __wrap_trainer_step(struct trainer *r, char *error, size_t bytes);
int __wrap_trainer_validate(struct trainer *r, int64_t windows, double *bits, char *error, size_t bytes);
int __wrap_trainer_sample(struct trainer *r, uint8_t *text, int64_t have, int64_t more, char *error,
                          size_t bytes);
void __wrap_model_init(struct model *m, uint64_t seed);
int __wrap_fsync(int fd);
void __wrap_model_init(struct model *m, uint64_t seed) { (void)m, (void)seed; }
int __wrap_trainer_step(struct trainer *r, char *error, size_t bytes) {
  (void)error, (void)bytes;
  r->loss = r->grad_norm = r->rate = 1;
  r->step++;
  return 0;
}
int __wrap_trainer_validate(struct trainer *r, int64_t windows, double *bits, char *error, size_t bytes) {
  (void)r, (void)windows, (void)error, (void)bytes;
  *bits = 1;
  return 0;
}
int __wrap_trainer_sample(struct trainer *r, uint8_t *text, int64_t have, int64_t more, char *error,
                          size_t bytes) {
  (void)r, (void)error, (void)bytes;
  memset(text + have, 'x', (size_t)more);
  return 0;
}
int __wrap_fsync(int fd) { return fd < 0; }

static int train(char *error, size_t bytes) {
  return ANSWER(cmd_train, "train", "--backend", "cpu", "--json", "--out", dir, "--steps", "1", "--data",
                text_path);
}
static int resume(char *error, size_t bytes) {
  return ANSWER(cmd_train, "train", "--backend", "cpu", "--json", "--resume", "--out", dir, "--data",
                text_path);
}
static int sample(char *error, size_t bytes) {
  return ANSWER(cmd_train, "train", "--backend", "cpu", "--out", dir, "--sample", "x", "--tokens", "1");
}

/* What the JSON library allocates for a checkpoint has had its turn above. */
TEST(training_runs_out_of_memory) {
  char text[8192];
  files_make(dir);
  for (size_t i = 0; i < sizeof text; i++) text[i] = (char)('a' + i * i / 7 % 20);
  files_write(files_path(text_path, dir, "text"), text, sizeof text);
  run_out(&(struct scene){"train", train, look_at_checkpoint});
  run_out(&(struct scene){"train --resume", resume, look_at_checkpoint});
  run_out(&(struct scene){"train --sample", sample, look_at_checkpoint});
  files_remove(dir);
}

TEST_MAIN()
