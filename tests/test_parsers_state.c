/* SPDX-License-Identifier: Apache-2.0
 *
 * What: the settings of a training run, from the command line and from a checkpoint.
 * Idea: checkpoints with the metadata of a good one but for one entry, and with no parameter at all.
 * Invariant: what contradicts the command line is bad input, what is missing or no number is a damaged checkpoint; both
 * name what they are about, and neither is half taken. */
#include "files.h"

#include "../tools/train/trainer.h"

static const char model_text[] =
    "layers=4 dim=128 heads=4 experts=8 topk=2 inter=128 sequence=256 batch=8 rate=0.003";

enum {
  ENTRIES = 8
};
static const struct checkpoint_meta good[ENTRIES] = {{"format", "moeblas-train-1"},
                                                     {"preset", "tiny"},
                                                     {"balance", "bias"},
                                                     {"seed", "7"},
                                                     {"steps", "20"},
                                                     {"step", "5"},
                                                     {"text", "0000000000000000"},
                                                     {"model", ""}};

static char dir[128];
static float values[4] = {1, 2, 3, 4}, back[4];
static const struct tensor tensors[] = {
    {"correction_bias", values, {1, 4}, 2}, {"adam.first", values, {4}, 1}, {"adam.second", values, {4}, 1}};

/* Saves `count` tensors and opens the file. The entry `key` has this value, or is left out when it is NULL. */
static int open_saved(struct checkpoint *c, int count, const char *key, const char *value, char error[512]) {
  struct checkpoint_meta meta[ENTRIES];
  int entries = 0;
  error[0] = '\0';
  for (int i = 0; i < ENTRIES; i++) {
    struct checkpoint_meta *m = &meta[entries];
    *m = good[i];
    if (strcmp(m->key, "model") == 0) strcpy(m->value, model_text);
    const bool changed = key && strcmp(m->key, key) == 0;
    if (changed && value) snprintf(m->value, sizeof m->value, "%s", value);
    entries += !changed || value != NULL;
  }
  const int failed = checkpoint_save(dir, tensors, count, meta, entries, error, 512);
  return failed ? failed : checkpoint_open(c, dir, error, 512);
}

static struct settings unset(void) { return (struct settings){.steps = -1, .seed = -1}; }

/* ---- the command line ------------------------------------------------------------------------------------------ */

TEST(settings_that_are_named) {
  struct settings s = unset();
  char error[512] = "", text[128];
  EXPECT(settings_resolve(&s, error, sizeof error), "%s", error);
  settings_describe(&s, text, sizeof text);
  EXPECT(strcmp(text, model_text) == 0 && s.steps == 2000 && s.seed == 1, "%s", text);
  EXPECT(s.model.dtype == MOE_FP32 && s.model.balance == BALANCE_LOSS, "defaults");
  s = (struct settings){.preset = "small", .balance = "bias", .dtype = "bf16", .steps = 3, .seed = 0};
  EXPECT(settings_resolve(&s, error, sizeof error), "%s", error);
  EXPECT(s.model.dtype == MOE_BF16 && s.model.balance == BALANCE_BIAS && s.steps == 3 && s.seed == 0,
         "given");
  s = (struct settings){.balance = "loss", .dtype = "fp32"};
  EXPECT(settings_resolve(&s, error, sizeof error) && s.model.dtype == MOE_FP32, "%s", error);
}

TEST(settings_that_are_none) {
  const struct {
    struct settings settings;
    const char *sentence;
  } cases[] = {{{.preset = "huge"}, "--preset 'huge': wants tiny or small"},
               {{.balance = "luck"}, "--balance 'luck': wants loss or bias"},
               {{.dtype = "fp8"}, "--dtype 'fp8': wants fp32 or bf16"}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct settings s = cases[i].settings;
    char error[512] = "";
    EXPECT(!settings_resolve(&s, error, sizeof error) && strcmp(error, cases[i].sentence) == 0, "%s", error);
  }
}

/* ---- a checkpoint's ------------------------------------------------------------------------------------------- */

/* The status of adopting a checkpoint with one entry changed. */
static int adopt(struct settings given, const char *key, const char *value, char error[512]) {
  struct trainer r = {.settings = given};
  struct checkpoint c;
  files_make(dir);
  int code = open_saved(&c, 0, key, value, error);
  EXPECT(code == 0, "%s", error);
  if (!code) code = trainer_adopt(&r, &c, error, 512);
  if (!code) EXPECT(r.settings.seed == (given.seed < 0 ? 7 : given.seed) && r.settings.steps > 0, "taken");
  checkpoint_close(&c);
  files_remove(dir);
  return code;
}

static void expect_damaged(const char *key, const char *value) {
  char error[512], sentence[64];
  snprintf(sentence, sizeof sentence, "not a checkpoint of moeblas train: '%s' is missing or bad", key);
  const int code = adopt(unset(), key, value, error);
  EXPECT(code == 3 && strstr(error, sentence), "%s = %s: %d \"%s\"", key, value ? value : "-", code, error);
}

TEST(metadata_that_is_missing_or_bad) {
  static const char *const keys[] = {"format", "preset", "balance", "seed", "steps"};
  for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) expect_damaged(keys[i], NULL);
  expect_damaged("format", "moeblas-train-2");
  expect_damaged("seed", "");
  expect_damaged("seed", "x");
  expect_damaged("seed", "7x");
  expect_damaged("steps", "-1");
  expect_damaged("steps", "1000000000000001");
}

TEST(settings_that_a_checkpoint_contradicts) {
  char error[512];
  struct settings s = unset();
  EXPECT(adopt(s, NULL, NULL, error) == 0, "%s", error);
  s = (struct settings){.preset = "tiny", .balance = "bias", .seed = 7, .steps = 30};
  EXPECT(adopt(s, NULL, NULL, error) == 0, "%s", error);
  s.seed = 8;
  EXPECT(adopt(s, NULL, NULL, error) == 2 && strstr(error, "was trained with --seed 7"), "%s", error);
  s.sample = "text";
  EXPECT(adopt(s, NULL, NULL, error) == 0, "a sample may have a seed of its own: %s", error);
  s.preset = "small";
  EXPECT(adopt(s, NULL, NULL, error) == 2 && strstr(error, "was trained with --preset tiny"), "%s", error);
  EXPECT(adopt(unset(), "preset", "\x1b[2J", error) == 2 && strstr(error, "wants tiny or small"), "%s",
         error);
  EXPECT(adopt(unset(), "model", NULL, error) == 2 && strstr(error, "is of the model ''"), "%s", error);
  EXPECT(adopt(unset(), "model", "layers=\x1b", error) == 2 && strstr(error, "model 'layers=\\x1b'"), "%s",
         error);
}

/* ---- tensors --------------------------------------------------------------------------------------------------- */

/* Loads a model without parameters from a checkpoint of `count` tensors with one entry changed. */
static int load(int count, const char *key, const char *value, int training, char error[512]) {
  struct model m = {.config = {.layers = 1, .experts = 4}, .count = 4, .correction_bias = back};
  struct trainer r = {.model = &m, .first = back, .second = back};
  struct checkpoint c;
  char hash[32];
  files_make(dir);
  snprintf(hash, sizeof hash, "%016llx", (unsigned long long)corpus_hash(&r.corpus));
  const bool other = key && strcmp(key, "text") == 0;
  struct checkpoint_meta meta[2] = {{"text", ""}, {"step", "5"}};
  snprintf(meta[0].value, sizeof meta[0].value, "%s", other && value ? value : hash);
  if (key && !other) snprintf(meta[1].value, sizeof meta[1].value, "%s", value);
  const bool left_out = other && value == NULL;
  int code = checkpoint_save(dir, tensors, count, meta + left_out, 2 - left_out, error, 512);
  if (!code) code = checkpoint_open(&c, dir, error, 512);
  EXPECT(code == 0, "%s", error);
  if (code == 0) {
    code = trainer_load(&r, &c, training, error, 512);
    checkpoint_close(&c);
  }
  if (code == 0 && training) EXPECT(r.step == 5, "step %lld", (long long)r.step);
  files_remove(dir);
  return code;
}

TEST(what_a_run_goes_on_from) {
  char error[512] = "";
  EXPECT(load(3, NULL, NULL, 1, error) == 0 && memcmp(back, values, sizeof back) == 0, "%s", error);
  EXPECT(load(1, NULL, NULL, 0, error) == 0, "a sample wants no moments: %s", error);
  EXPECT(load(2, NULL, NULL, 1, error) == 2 && strstr(error, "has no tensor adam.second"), "%s", error);
  EXPECT(load(3, "text", NULL, 1, error) == 3 && strstr(error, "'text' is missing or bad"), "%s", error);
  EXPECT(load(3, "text", "0", 1, error) == 2 && strstr(error, "trained on another text"), "%s", error);
  EXPECT(load(3, "step", "-5", 1, error) == 3 && strstr(error, "'step' is missing or bad"), "%s", error);
}

TEST(a_folder_with_too_long_a_path) {
  static char path[1 << 14];
  char error[512] = "";
  struct checkpoint c;
  memset(path, 'x', sizeof path - 1);
  EXPECT(checkpoint_open(&c, path, error, sizeof error) == 2 && strstr(error, "is too long"), "%s", error);
  checkpoint_close(&c);
}

TEST_MAIN()
