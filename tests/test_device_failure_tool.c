/* SPDX-License-Identifier: Apache-2.0
 *
 * What: training and the commands of the tool on a device that fails.
 * Invariant: the sentence is passed on, with a status of the manual, and nothing stays allocated. */
#include "command.h"
#include "failing_device.h"

#include "../tools/bench.h"
#include "../tools/train/model.h"

moe_status __real_moe_context_create(moe_context **out, moe_backend backend, int number);
moe_status __wrap_moe_context_create(moe_context **out, moe_backend backend, int number);
moe_status __wrap_moe_context_create(moe_context **out, moe_backend backend, int number) {
  if (backend != MOE_BACKEND_CUDA) return __real_moe_context_create(out, backend, number);
  TRY(had("context"));
  TRY(__real_moe_context_create(out, MOE_BACKEND_CPU, 1));
  (*out)->backend = &failing_backend;
  return MOE_OK;
}

/* ---- a model ------------------------------------------------------------------------------------------------------ */

static const struct model_config small = {.layers = 2,
                                          .dim = 24,
                                          .heads = 2,
                                          .experts = 4,
                                          .topk = 2,
                                          .inter = 12,
                                          .sequence = 24,
                                          .balance = BALANCE_BIAS};

struct training {
  struct model_config config;
  bool everything; /* the dense products as well run on the device */
};

static moe_status step(struct model *m, double *loss) {
  uint8_t input[48], target[48];
  for (int i = 0; i < 48; i++) input[i] = (uint8_t)(7 * i), target[i] = (uint8_t)(7 * i + 7);
  TRY(model_gradient(m, input, target, 2, 24, loss));
  TRY(model_rebalance(m, 1e-3f));
  TRY(model_forward(m, input, 1, 23));
  return model_step(m, input[23], 23);
}

static int train(void *context) {
  const struct training *t = context;
  moe_context *cpu = NULL, *ctx = NULL;
  struct model *m = NULL;
  double loss;
  moe_status status = moe_context_create(&cpu, MOE_BACKEND_CPU, 1);
  if (status == MOE_OK) status = moe_context_create(&ctx, MOE_BACKEND_CUDA, 0);
  if (status == MOE_OK)
    m = model_create(t->everything ? ctx : cpu, ctx, &t->config, 48, 1, said, sizeof said);
  if (m != NULL) {
    model_init(m, 5);
    status = step(m, &loss);
  }
  if (status != MOE_OK) snprintf(said, sizeof said, "%s", moe_last_error());
  const bool good = status == MOE_OK && m != NULL;
  model_destroy(m);
  moe_context_destroy(ctx);
  moe_context_destroy(cpu);
  return !good;
}

TEST(a_step_of_training_fails) {
  struct training apart = {small, false}, half = {small, false}, together = {small, true};
  half.config.dtype = MOE_BF16;
  fail_in_turn(&(struct scene){"training, experts on the device", train, &apart});
  fail_in_turn(&(struct scene){"training, experts on the device in bf16", train, &half});
  fail_in_turn(&(struct scene){"training, all on the device", train, &together});
}

/* ---- the tool ----------------------------------------------------------------------------------------------------- */

/* Large products and copies: they take seconds. */
const char *__wrap_bench_ceilings(const struct bench *bench, struct ceilings *ceilings);
const char *__wrap_bench_ceilings(const struct bench *bench, struct ceilings *ceilings) {
  (void)bench;
  *ceilings = (struct ceilings){1e12, "nothing", 1e11, "nothing"};
  return NULL;
}

/* The commit that a table is of: a process each time. */
FILE *__wrap_popen(const char *command, const char *mode);
FILE *__wrap_popen(const char *command, const char *mode) {
  (void)command, (void)mode;
  return NULL;
}

/* A failed check says so on stdout, everything else on stderr. */
static int answer(struct command_run r) {
  snprintf(said, sizeof said, "%.2000s%.2000s", r.said.err, r.code == CLI_FAILED ? r.said.out : "");
  EXPECT(r.code == CLI_OK || r.code == CLI_IO || r.code == CLI_FAILED, "status %d: %s", r.code, said);
  capture_free(&r.said);
  return r.code;
}

#define DEVICE "--backend", "cuda"

static int info(void *problem) {
  return answer(command_run(cmd_info, "info", DEVICE, "--plan", problem, NULL));
}
static int check(void *problem) { return answer(command_run(cmd_check, "check", DEVICE, problem, NULL)); }
static int bitwise(void *problem) {
  return answer(command_run(cmd_check, "check", DEVICE, "--bitwise", problem, NULL));
}
static int mutate(void *problem) {
  return answer(command_run(cmd_check, "check", DEVICE, "--mutate", problem, NULL));
}
static int bench(void *problem) {
  return answer(command_run(cmd_bench, "bench", DEVICE, "--repeat", "3", "--unfused", problem, NULL));
}
static int bench_json(void *problem) {
  return answer(command_run(cmd_bench, "bench", DEVICE, "--repeat", "3", "--json", problem, NULL));
}
static int sweep(void *problem) {
  return answer(
      command_run(cmd_bench, "bench", DEVICE, "--repeat", "3", "--csv", "--sweep", "t=1..3", problem, NULL));
}

TEST(the_tool_meets_a_device_that_fails) {
  static char tiny[] = "t3 h4 f4 e2 k1 fp32",
              wide[] = "t5 h8 f8 e4 k2 bf16 swiglu shared=4 latent=4 mask bwd";
  static char timed[] = "t5 h8 f8 e4 k2 fp32 swiglu bias bwd", rows[] = "t6 h8 f8 e4 k1 rows";
  static char given[] = "t5 h8 f8 e4 k2 given transposed bwd";
  const struct scene scenes[] = {
      {"info", info, tiny},
      {"check", check, wide},
      {"check --bitwise", bitwise, given},
      {"check --mutate", mutate, tiny},
      {"bench", bench, timed},
      {"bench of rows", bench, rows},
      {"bench --json", bench_json, given},
      {"bench --sweep", sweep, given},
  };
  for (size_t i = 0; i < sizeof scenes / sizeof *scenes; i++) fail_in_turn(&scenes[i]);
}

TEST_MAIN()
