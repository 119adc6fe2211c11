/* SPDX-License-Identifier: Apache-2.0
 *
 * What: the buffers of a case where the back end has memory of its own, blocks apart from their images.
 * Idea: the CPU is given blocks of its own as if it were a device. The results must be those without, and a write outside
 * an array or into an input must be seen through the copies. */
#include "../tools/case.h"
#include "../tools/problem_list.h"
#include "test.h"

static const char *const problems[] = {
    "t17 h40 f24 e4 k2 bwd bias", "t33 h64 f48 e8 k2 bf16 given bwd accumulate",
    "t64 h64 f48 e8 k2 logits=bf16 bwd balance=global z_loss mask", "t0 h33 f17 e4 k2 bwd"};

struct fixture {
  moe_context *ctx;
  moe_plan *plan;
  struct sample sample;
};

static struct fixture fixture(const char *text) {
  struct fixture f = {0};
  struct problem problem;
  char error[PROBLEM_ERROR] = "";
  if (!problem_parse(text, &problem, error, sizeof error) ||
      moe_context_create(&f.ctx, MOE_BACKEND_CPU, 1) != MOE_OK ||
      moe_plan_create(&f.plan, f.ctx, &problem.config) != MOE_OK ||
      !sample_make(&f.sample, &problem, error, sizeof error)) {
    printf("%s: %s%s\n", text, error, moe_last_error());
    exit(2);
  }
  return f;
}

static void fixture_free(struct fixture *f) {
  sample_free(&f->sample);
  moe_plan_destroy(f->plan);
  moe_context_destroy(f->ctx);
}

/* Opens, runs both passes and fetches. */
static struct run finished(const struct fixture *f, bool apart, enum placement placement, int poison) {
  struct run run;
  const char *failure =
      run_open(&run, &f->sample, (struct memory){f->ctx, apart}, f->plan, placement, poison);
  EXPECT(failure == NULL, "%s", failure);
  EXPECT(run_forward(&run) == MOE_OK, "%s", moe_last_error());
  EXPECT(run_poison_workspace(&run, poison) == MOE_OK, "%s", moe_last_error());
  EXPECT(run_backward(&run) == MOE_OK, "%s", moe_last_error());
  EXPECT(run_fetch(&run) == MOE_OK, "%s", moe_last_error());
  return run;
}

static void expect_equal(const struct run *a, const struct run *b, const char *text) {
  for (int i = T_INPUTS; i < T_RESULTS; i++) {
    const enum tensor id = (enum tensor)i;
    EXPECT(a->span[id].bytes == b->span[id].bytes &&
               (a->span[id].bytes == 0 || memcmp(run_data(a, id), run_data(b, id), a->span[id].bytes) == 0),
           "%s: %s has other bits", text, tensor_name(id));
  }
}

TEST(blocks_apart_give_the_same_bits) {
  for (size_t i = 0; i < sizeof problems / sizeof *problems; i++) {
    struct fixture f = fixture(problems[i]);
    struct run host = finished(&f, false, PLACE_END, 0xff);
    const enum placement placements[] = {PLACE_PLAIN, PLACE_END, PLACE_START};
    for (int j = 0; j < 3; j++) {
      struct run apart = finished(&f, true, placements[j], 0xff);
      EXPECT(run_block(&apart, T_OUT) != run_data(&apart, T_OUT), "%s: the block is its image", problems[i]);
      expect_equal(&apart, &host, problems[i]);
      const enum tensor damaged = run_damaged(&apart);
      EXPECT(damaged == T_COUNT, "%s: %s is damaged", problems[i], tensor_name(damaged));
      run_close(&apart);
    }
    run_close(&host);
    fixture_free(&f);
  }
}

/* What the benchmark times: the reports keep their poison, all else has the bits of a full run; losses only where there are any. */
TEST(a_bare_run_reports_nothing) {
  static const char *const two[] = {"t24 h64 f96 e8 k2 fp32 swiglu bwd",
                                    "t24 h64 f96 e8 k2 fp32 swiglu bwd balance=batch z_loss"};
  for (int i = 0; i < 2; i++) {
    struct fixture f = fixture(two[i]);
    struct run full = finished(&f, true, PLACE_END, 0xff), bare;
    const char *failure = run_open(&bare, &f.sample, (struct memory){f.ctx, true}, f.plan, PLACE_END, 0xff);
    EXPECT(failure == NULL, "%s", failure);
    bare.bare = true;
    EXPECT(run_forward(&bare) == MOE_OK && run_backward(&bare) == MOE_OK && run_fetch(&bare) == MOE_OK, "%s",
           moe_last_error());
    for (int id = T_OUT; id < T_RESULTS; id++) {
      const bool report = id == T_TOPK_IDS || id == T_TOPK_WEIGHTS || id == T_COUNTS || id == T_SLOT_ROW ||
                          (id == T_LOSSES && i == 0);
      const size_t bytes = bare.span[id].bytes;
      const unsigned char *found = run_data(&bare, (enum tensor)id);
      size_t poisoned = 0;
      for (size_t at = 0; report && at < bytes; at++) poisoned += found[at] == 0xff;
      if (report)
        EXPECT(poisoned == bytes, "%s: %s is written", two[i], tensor_name((enum tensor)id));
      else if (found != NULL)
        EXPECT(memcmp(found, run_data(&full, (enum tensor)id), bytes) == 0, "%s: %s differs", two[i],
               tensor_name((enum tensor)id));
    }
    run_close(&bare), run_close(&full);
    fixture_free(&f);
  }
}

/* Every byte around the data counts, at either end of either placement. */
TEST(damage_to_a_block_is_seen) {
  struct fixture f = fixture(problems[0]);
  for (int placement = PLACE_END; placement <= (int)PLACE_START; placement++) {
    struct run run = finished(&f, true, (enum placement)placement, 0);
    for (int id = 0; id < T_COUNT; id++) {
      unsigned char *data = run_block(&run, (enum tensor)id);
      if (data == NULL) continue;
      const ptrdiff_t end = (ptrdiff_t)run.span[id].bytes, at[] = {-4096, -1, end, end + 4095, 0};
      for (int i = 0; i < (id < T_INPUTS ? 5 : 4); i++) { /* the last one spoils an input */
        data[at[i]] ^= 1;
        EXPECT(run_fetch(&run) == MOE_OK, "%s", moe_last_error());
        EXPECT((int)run_damaged(&run) == id, "%s, byte %td: not seen", tensor_name((enum tensor)id), at[i]);
        data[at[i]] ^= 1;
      }
    }
    EXPECT(run_fetch(&run) == MOE_OK && run_damaged(&run) == T_COUNT, "all is well again");
    run_close(&run);
  }
  fixture_free(&f);
}

TEST(poison_reaches_the_block) {
  struct fixture f = fixture(problems[1]);
  for (int placement = PLACE_PLAIN; placement <= (int)PLACE_START; placement++) {
    struct run run = finished(&f, true, (enum placement)placement, 0);
    EXPECT(run_poison_workspace(&run, 0xab) == MOE_OK, "%s", moe_last_error());
    const unsigned char *workspace = run_block(&run, T_WORKSPACE);
    for (size_t i = 0; i < run.workspace_bytes; i++) REQUIRE(workspace[i] == 0xab, "byte %zu", i);
    run_close(&run);
    const char *failure =
        run_open(&run, &f.sample, (struct memory){f.ctx, true}, f.plan, (enum placement)placement, 0xcd);
    EXPECT(failure == NULL, "%s", failure);
    const unsigned char *out = run_block(&run, T_OUT);
    for (size_t i = 0; i < run.span[T_OUT].bytes; i++) REQUIRE(out[i] == 0xcd, "byte %zu of out", i);
    run_close(&run);
  }
  fixture_free(&f);
}

/* Every reason not to be exact is said; and what the generator makes has none. */
TEST(exact_problems_can_be_exact) {
  static const char *const refused[][2] = {{"situ_plain exact", "tanh"},
                                           {"relu2_tanh exact", "tanh"},
                                           {"reglu up_beta=2 exact", "tanh"},
                                           {"swiglu limit=7 exact", "clamped"},
                                           {"swiglu alpha=2 exact", "clamped"},
                                           {"reglu balance=batch exact", "losses"},
                                           {"reglu z_loss exact", "losses"},
                                           {"reglu k3 exact", "power of two"},
                                           {"reglu renorm replay exact", "divided"},
                                           {"reglu renorm groups=4/2 exact", "divided"},
                                           {"reglu renorm correction_bias exact", "divided"},
                                           {"reglu score=topk_softmax replay exact", "divided"}};
  static const char *const taken[] = {"reglu limit=2 exact",
                                      "reglu2 score=topk_softmax correction_bias exact",
                                      "swiglu k3 score=sigmoid exact", "gelu k3 given exact"};
  struct problem problem;
  char error[PROBLEM_ERROR] = "";
  for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
    EXPECT(!problem_parse(refused[i][0], &problem, error, sizeof error), "'%s' was taken", refused[i][0]);
    EXPECT(strstr(error, refused[i][1]) != NULL, "'%s' gave '%s'", refused[i][0], error);
  }
  for (size_t i = 0; i < sizeof taken / sizeof *taken; i++)
    EXPECT(problem_parse(taken[i], &problem, error, sizeof error), "'%s': %s", taken[i], error);
  for (uint64_t n = 0; n < 3000; n++) {
    problem_random_exact(&problem, 4, n);
    EXPECT(problem.exact, "number %d fell back", (int)n);
  }
}

/* Numbers of an exact sample are few bits long, whatever its format. */
TEST(exact_data_are_small_integers) {
  struct fixture f = fixture("t33 h40 f24 e8 k4 bf16 swiglu bwd bias router_bias exact");
  for (int i = 0; i < T_INPUTS; i++) {
    const struct shape *shape = &f.sample.shape[i];
    for (int64_t n = 0; f.sample.data[i] && shape->element <= ELEMENT_FP16 && n < shape_count(shape); n++) {
      const double value = 64 * element_load(f.sample.data[i], shape->element, n);
      EXPECT(value == (double)(int64_t)value && value >= -300 * 64 && value <= 300 * 64, "%s[%d] = %g",
             tensor_name((enum tensor)i), (int)n, value / 64);
    }
  }
  fixture_free(&f);
}

TEST_MAIN()
