/* SPDX-License-Identifier: Apache-2.0
 *
 * What `moeblas check` says of a router's decisions: near ties may fall either way, everything else is noticed, and what is
 * wrong with one expert, group or weight suffices. */
#include "test.h"

#include "../tools/check.h"
#include "../tools/check_reference.h"

struct fixture {
  moe_context *ctx;
  struct sample sample;
  struct run run;
};

/* Into a fixture that stays where it is: a run points to its sample. */
static void begin(struct fixture *f, const char *text) {
  struct problem problem;
  struct verdict v = {.row = -1};
  char error[PROBLEM_ERROR] = "";
  *f = (struct fixture){0};
  if (problem_parse(text, &problem, error, sizeof error) &&
      moe_context_create(&f->ctx, MOE_BACKEND_CPU, 1) == MOE_OK &&
      sample_make(&f->sample, &problem, error, sizeof error) && check_run(f->ctx, &f->sample, &f->run, &v))
    return;
  printf("%s: %s%s%s\n", text, error, v.text, moe_last_error());
  exit(2);
}

static void end(struct fixture *f) {
  check_run_close(&f->run);
  sample_free(&f->sample);
  moe_context_destroy(f->ctx);
}

static bool passes(struct fixture *f) {
  struct verdict v = {.row = -1};
  check_compare(&f->sample, &f->run, &v);
  return !v.failed && !v.broken;
}

/* Expert of the best key among the groups of token 0 in which nobody was chosen. */
static int32_t best_of_closed(const struct fixture *f, const double *keys) {
  const moe_config *c = &f->sample.problem.config;
  const int32_t *ids = run_data(&f->run, T_TOPK_IDS);
  const int64_t size = c->experts / c->router.groups;
  int32_t best = -1;
  for (int32_t e = 0; e < c->experts; e++) {
    bool open = false;
    for (int64_t j = 0; j < c->topk; j++) open = open || ids[j] / size == e / size;
    if (!open && (best < 0 || keys[e] > keys[best])) best = e;
  }
  return best;
}

TEST(an_expert_of_a_group_that_lost_is_noticed) {
  struct fixture f;
  begin(&f, "t64 h48 f8 e32 k4 fp32 groups=4/2 group_score=top2 score=sigmoid seed=3");
  struct reference r;
  REQUIRE(reference_make(&r, &f.sample) && reference_run(&r, &f.sample, &f.run, false), "no memory");
  EXPECT(passes(&f), "an honest run fails");
  int32_t *ids = run_data(&f.run, T_TOPK_IDS);
  const int32_t loser = best_of_closed(&f, r.ideal.raw_keys);
  REQUIRE(loser >= 0, "token 0 has no closed group");
  ids[3] = loser;
  struct verdict v = {.row = -1};
  check_keys(&f.sample, &f.run, &r.ideal, &v);
  EXPECT(v.failed, "expert %d was let pass", loser);
  reference_free(&r);
  end(&f);
}

TEST(a_near_tie_of_groups_may_fall_either_way) {
  struct fixture f;
  begin(&f, "t64 h1 f48 e64 k8 bf16 situ limit=0.5 score=sigmoid renorm scale=2.5 groups=4/2 "
            "group_score=top2 seed=795");
  EXPECT(passes(&f), "token 12 has two groups whose keys are equal but for fp32 noise");
  end(&f);
}

/* Small ones too: the check of rows looks at the typical one. */
TEST(one_wrong_weight_is_noticed) {
  struct fixture f;
  begin(&f, "t64 h64 f17 e64 k1 fp32 score=sigmoid correction_bias skew=one seed=965");
  struct reference r;
  REQUIRE(reference_make(&r, &f.sample) && reference_run(&r, &f.sample, &f.run, false), "no memory");
  float *weights = run_data(&f.run, T_TOPK_WEIGHTS);
  for (int64_t t = 0; t < 64; t++) {
    struct verdict honest = {.row = -1}, wrong = {.row = -1};
    check_weights(&f.sample, &f.run, &r.ideal, &honest);
    weights[t] *= 1.001f;
    check_weights(&f.sample, &f.run, &r.ideal, &wrong);
    EXPECT(!honest.failed && wrong.failed, "token %d: %s", (int)t, honest.text);
    weights[t] /= 1.001f;
  }
  reference_free(&r);
  end(&f);
}

TEST_MAIN()
