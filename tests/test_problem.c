/* SPDX-License-Identifier: Apache-2.0
 * Problem strings and presets: what is read, what is refused and how, and that printing reads back to the same. The parser
 * belongs to the tool and not to the library, so it is compiled in here. */
#include "test.h"

#include <unistd.h>

#include "../tools/cli.c"
#include "../tools/presets.c"
#include "../tools/problem.c"
#include "../tools/problem_fields.c"
#include "../tools/problem_list.c"

static struct problem parsed(const char *text) {
  struct problem problem;
  char error[PROBLEM_ERROR] = "";
  EXPECT(problem_parse(text, &problem, error, sizeof error), "'%s': %s", text, error);
  return problem;
}

/* Refused, with a sentence that names what is wrong. */
static void expect_refused(const char *text, const char *named) {
  struct problem problem;
  char error[PROBLEM_ERROR] = "";
  EXPECT(!problem_parse(text, &problem, error, sizeof error), "'%s' was taken", text);
  EXPECT(strstr(error, named) != NULL, "'%s' gave '%s', which does not name '%s'", text, error, named);
}

TEST(defaults_are_small) {
  const struct problem p = parsed("");
  EXPECT(p.tokens == 64 && p.config.hidden == 64 && p.config.inter == 48, "t %lld", (long long)p.tokens);
  EXPECT(p.config.experts == 8 && p.config.topk == 2 && p.config.dtype == MOE_FP32, "e k dtype");
  EXPECT(p.config.act.gated == 1 && p.config.act.kind == MOE_ACT_SILU && !p.backward, "act");
}

TEST(fields_are_read_in_any_order) {
  const struct problem a = parsed("t4096 h2880 f2880 e32 k4 bf16 swiglu bwd skew=zipf");
  const struct problem b = parsed("  skew=zipf bwd\tk4 swiglu e32 f2880 h2880 bf16 t4096 ");
  EXPECT(memcmp(&a, &b, sizeof a) == 0, "order matters");
  EXPECT(a.tokens == 4096 && a.config.topk == 4 && a.config.dtype == MOE_BF16 && a.backward, "fields");
  EXPECT(a.skew == SKEW_ZIPF, "skew %d", (int)a.skew);
}

TEST(activation_aliases) {
  const moe_act_desc oai = parsed("swigluoai").config.act;
  EXPECT(oai.alpha == 1.702f && oai.gate_max == 7 && oai.up_min == -7 && oai.up_max == 7 &&
             oai.up_offset == 1,
         "oai");
  EXPECT(parsed("situ").config.act.up_beta == 25, "situ");
  const moe_act_desc plain = parsed("limit=3 relu2").config.act;
  EXPECT(plain.gate_max == 3 && plain.up_max == 0 && !plain.gated, "a plain activation has no up half");
}

TEST(values_of_fields) {
  const struct problem p =
      parsed("score=sigmoid renorm scale=2.5 groups=4/2 group_score=top2 balance=sequence:16 z_loss "
             "correction_bias router_bias layout=interleaved:16 seed=18446744073709551615");
  const moe_router_desc *r = &p.config.router;
  EXPECT(r->score == MOE_SCORE_SIGMOID && r->renormalize && r->scale == 2.5f, "score");
  EXPECT(r->groups == 4 && r->topk_groups == 2 && r->group_score == MOE_GROUP_TOP2_SUM, "groups");
  EXPECT(r->balance == MOE_BALANCE_SEQUENCE && r->sequence_tokens == 16 && r->balance_coeff > 0, "balance");
  EXPECT(r->z_coeff > 0 && p.router_bias && p.correction_bias, "biases");
  EXPECT(p.config.act.layout == MOE_LAYOUT_INTERLEAVED && p.config.act.interleave == 16, "layout");
  EXPECT(p.seed == UINT64_MAX, "seed");
  EXPECT(parsed("bwd accumulate bf16").config.grad_dtype == MOE_FP32, "accumulating is done in fp32");
  EXPECT(parsed("logits").config.logits_dtype == MOE_FP32, "logits");
  EXPECT(parsed("logits=fp16").config.logits_dtype == MOE_FP16, "logits");
  EXPECT(parsed("rows").config.topk == 1, "rows have one expert");
  EXPECT(strcmp(parsed("skew=./a.txt").skew_file, "./a.txt") == 0, "skew file");
}

TEST(what_is_no_field_is_refused_by_name) {
  expect_refused("t64 wobble", "wobble");
  expect_refused("wobble=3", "wobble");
  expect_refused("bf17", "bf17");
  expect_refused("t", "t ''");
  expect_refused("t=", "'t='");
  expect_refused("t64 t32", "field t");
  expect_refused("bf16 fp16", "field dtype");
  expect_refused("swiglu geglu", "field act");
  expect_refused("given rows", "given");
  expect_refused("score=hardmax", "score 'hardmax'");
  expect_refused("groups=8", "groups '8'");
  expect_refused("groups=4/8", "groups '4/8'");
  expect_refused("layout=interleaved:0", "layout");
  expect_refused("balance=sequence", "balance");
  expect_refused("balance=batch:3", "balance");
  expect_refused("skew=zifp", "zifp");
  expect_refused("renorm=2", "renorm '2'");
  expect_refused("act=swish", "swish");
}

TEST(absurd_sizes_are_refused) {
  expect_refused("t16777217", "t '16777217'");
  expect_refused("h0", "h '0'");
  expect_refused("h-1", "h-1");
  expect_refused("h1048577", "h '1048577'");
  expect_refused("e4097", "e '4097'");
  expect_refused("k65 e128", "k '65'");
  expect_refused("k9", "k = 9");
  expect_refused("t99999999999999999999999999", "t '9999");
  expect_refused("t16777216 h1048576 f1048576 e4096 k64", "2^40");
  expect_refused("shared=1048577", "shared");
  expect_refused("seed=18446744073709551616", "seed");
  expect_refused("seed=-1", "seed");
  EXPECT(parsed("t16777216 h1 f1 e1 k1").tokens == 1 << 24, "the largest t");
}

TEST(numbers_are_plain_decimals) {
  expect_refused("limit=nan", "limit");
  expect_refused("alpha=inf", "alpha");
  expect_refused("alpha=0x1p3", "alpha");
  expect_refused("beta=-1", "beta");
  expect_refused("capacity=1e30", "capacity");
  expect_refused("scale=1..2", "scale");
  expect_refused("scale=1e", "scale");
  EXPECT(parsed("scale=25e-1").config.router.scale == 2.5f, "an exponent is fine");
}

TEST(fields_that_contradict_each_other_are_refused) {
  expect_refused("given score=sigmoid", "given");
  expect_refused("rows z_loss", "rows");
  expect_refused("rows k2", "k = 2");
  expect_refused("rows mask", "mask");
  expect_refused("replay given", "replay");
  expect_refused("invalid", "invalid");
  expect_refused("shared_gate", "shared_gate");
  expect_refused("relu2 layout=up_first", "relu2");
  expect_refused("accumulate", "bwd");
}

TEST(long_and_odd_input_is_survived) {
  char text[2 * PROBLEM_TEXT];
  memset(text, 'x', sizeof text);
  text[sizeof text - 1] = '\0';
  expect_refused(text, "longer");
  text[PROBLEM_TEXT - 1] = '\0';
  expect_refused(text, "too long");
  expect_refused("\x01\x80\xff", "byte 0x01");
  expect_refused("t1 \x1b[2J", "byte 0x1b in the problem: wants text");
  expect_refused("t1 \x80\xff", "\x80\xff");
  expect_refused("=", "=");
  expect_refused("%s%n", "%s%n");
  expect_refused("groups=1234567890123456789012345678901234567890/1", "groups");
}

static void expect_round_trip(const struct problem *problem, const char *what) {
  char text[PROBLEM_TEXT], again[PROBLEM_TEXT], error[PROBLEM_ERROR] = "";
  struct problem back;
  problem_print(problem, text);
  REQUIRE(problem_parse(text, &back, error, sizeof error), "%s: '%s': %s", what, text, error);
  problem_print(&back, again);
  EXPECT(strcmp(text, again) == 0, "%s: '%s' became '%s'", what, text, again);
  EXPECT(memcmp(&back, problem, sizeof back) == 0, "%s: '%s' is another problem", what, text);
}

TEST(printing_reads_back) {
  static const char *const texts[] = {"",
                                      "swigluoai",
                                      "situ up_beta=0",
                                      "rows",
                                      "logits=bf16",
                                      "k64 given",
                                      "bwd accumulate",
                                      "alpha=0.1 scale=1e-3 limit=1000000",
                                      "skew=a/b.txt",
                                      "layout=interleaved:2"};
  for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
    const struct problem problem = parsed(texts[i]);
    expect_round_trip(&problem, texts[i]);
  }
  for (uint64_t n = 0; n < 5000; n++) {
    struct problem problem;
    problem_random(&problem, 3, n);
    expect_round_trip(&problem, "random");
  }
}

TEST(random_problems_are_problems_and_differ) {
  struct problem usual;
  int fallen_back = 0, backward = 0, given = 0;
  problem_default(&usual);
  for (uint64_t n = 0; n < 5000; n++) {
    struct problem problem;
    problem_random(&problem, 1, n);
    fallen_back += memcmp(&problem, &usual, sizeof usual) == 0;
    backward += problem.backward;
    given += problem.config.entry == MOE_ENTRY_IDS;
  }
  EXPECT(fallen_back == 0, "%d of 5000 could not be parsed", fallen_back);
  EXPECT(backward > 1000 && given > 500, "%d backward, %d given", backward, given);
}

/* Random bytes and random pieces of fields: whatever comes, the answer is yes or a sentence. */
TEST(noise_is_survived) {
  static const char *const pieces[] = {"t",
                                       "h64",
                                       "=",
                                       "groups=",
                                       "/",
                                       " ",
                                       "bf16",
                                       "limit=",
                                       "9999999999",
                                       "skew",
                                       "interleaved:",
                                       "balance=sequence:",
                                       "-1",
                                       ".",
                                       "\t",
                                       "layout=",
                                       "preset",
                                       "k",
                                       "\xc3"};
  uint64_t state = 5;
  for (int n = 0; n < 20000; n++) {
    char text[256] = "", error[PROBLEM_ERROR] = "";
    struct problem problem;
    const int count = (int)(test_random(&state) % 9);
    for (int i = 0; i < count; i++)
      strcat(text, pieces[test_random(&state) % (sizeof pieces / sizeof *pieces)]);
    if (problem_parse(text, &problem, error, sizeof error))
      expect_round_trip(&problem, text);
    else
      EXPECT(error[0] != '\0', "'%s' was refused without a word", text);
  }
}

/* ---- presets --------------------------------------------------------------------------------------------------- */

static char preset_path[64];

static void write_presets(const char *content) {
  strcpy(preset_path, "/tmp/moeblas_presets_XXXXXX");
  const int fd = mkstemp(preset_path);
  FILE *file = fd >= 0 ? fdopen(fd, "w") : NULL;
  REQUIRE(file != NULL, "%s could not be made", preset_path);
  fputs(content, file);
  fclose(file);
  setenv("MOEBLAS_PRESETS", preset_path, 1);
}

static void expect_malformed(const char *content, const char *named) {
  write_presets(content);
  expect_refused("preset=a", named);
  unlink(preset_path);
}

TEST(presets_are_overridden_by_fields) {
  write_presets("name,h,f,e,k,act,limit,score,notes\na,100,200,64,8,swiglu,7,sigmoid,words; more\n");
  const struct problem p = parsed("f32 preset=a t33 silu");
  EXPECT(p.config.hidden == 100 && p.config.inter == 32 && p.config.experts == 64 && p.tokens == 33, "sizes");
  EXPECT(p.config.router.score == MOE_SCORE_SIGMOID, "score");
  EXPECT(!p.config.act.gated && p.config.act.gate_max == 0, "an activation brings its own limits");
  EXPECT(parsed("preset=a given").config.router.score == 0, "given ids leave nothing of the router");
  EXPECT(parsed("preset=a rows").config.topk == 1, "rows have one expert");
  unlink(preset_path);
}

TEST(malformed_presets_are_refused_by_line_and_column) {
  expect_malformed("", "line 1");
  expect_malformed("nome,h,notes\na,1,\n", "line 1, column 1");
  expect_malformed("name,h\na,1\n", "line 1, column 2");
  expect_malformed("name,h,h,notes\na,1,1,\n", "line 1, column 3");
  expect_malformed("name,h,wobble,notes\na,1,1,\n", "line 2, column 3");
  expect_malformed("name,h,notes\na,1,\nb,zero,\n", "line 3, column 2");
  expect_malformed("name,h,notes\na,1\n", "line 2, column 2");
  expect_malformed("name,h,notes\n,1,\n", "line 2, column 1");
  expect_malformed("name,h,notes\na,\"1\",\n", "line 2");
  expect_malformed("name,h,notes\na,1,a \"word\"\n", "quotes and control characters are not taken");
  expect_malformed("name,h,notes\na,1,\x1b[2J\n", "quotes and control characters are not taken");
  expect_malformed("name,h,notes\na,1,", "line 2");
  expect_malformed("name,h,notes\na,1,\na,2,\n", "2 times");
  setenv("MOEBLAS_PRESETS", "/nonexistent/presets.csv", 1);
  expect_refused("preset=a", "/nonexistent/presets.csv");
}

static void expect_preset(void *context, const char *name, const struct problem *problem, const char *notes) {
  char text[64];
  (void)notes;
  ++*(int *)context;
  snprintf(text, sizeof text, "preset=%s", name);
  const struct problem found = parsed(text);
  EXPECT(memcmp(&found, problem, sizeof found) == 0, "%s", name);
  expect_round_trip(problem, name);
}

TEST(the_presets_of_the_project_are_read) {
  char error[PROBLEM_ERROR] = "";
  int count = 0;
  setenv("MOEBLAS_PRESETS", "data/presets.csv", 1); /* tests run in the root of the project */
  REQUIRE(presets_walk(expect_preset, &count, error, sizeof error), "%s", error);
  EXPECT(count >= 38, "%d presets", count);
  expect_refused("preset=no-such-model", "no-such-model");
  const struct problem super = parsed("preset=nemotron3-super");
  EXPECT(super.config.hidden == 4096 && super.config.latent == 1024 && !super.config.act.gated,
         "nemotron3-super");
  EXPECT(parsed("preset=gpt-oss-20b").config.act.layout == MOE_LAYOUT_INTERLEAVED, "gpt-oss-20b");
}

TEST_MAIN()
