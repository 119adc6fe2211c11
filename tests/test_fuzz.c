/* SPDX-License-Identifier: Apache-2.0
 *
 * What fuzzing has left in the tree, without a fuzzer: every input of the corpora keeps the promises of its target, and
 * every malformed file of tests/fuzz/malformed gets the sentence that lies beside it. */
#include "fuzz/replay.h"

/* The targets are compiled in, so that this is one program like any other test; fuzz_api.c has its own. */
#include "fuzz/fuzz_checkpoint.c"
#include "fuzz/fuzz_cli.c"
#include "fuzz/fuzz_presets.c"
#include "fuzz/fuzz_problem.c"
#include "fuzz/fuzz_safetensors.c"

/* The tests link no BLAS; bench ends before it multiplies. */
void sgemm_(void);
void sgemm_(void) { abort(); }

REPLAY(checkpoint)
REPLAY(cli)
REPLAY(presets)
REPLAY(problem)
REPLAY(safetensors)

/* -- malformed files ------------------------------------------------------------------------------------------------ */

/* The sentence beside a file is a part of the one that it gets; "accepted" stands for none. */
static void expect_sentence(const char *path, int failed, const char *error) {
  char beside[600], wanted[256] = "";
  snprintf(beside, sizeof beside, "%s.says", path);
  const struct bytes sentence = files_read(beside);
  snprintf(wanted, sizeof wanted, "%.*s", sentence.data ? (int)strcspn(sentence.data, "\n") : 0,
           sentence.data);
  free(sentence.data);
  REQUIRE(wanted[0] != '\0', "%s: has no sentence beside it", path);
  if (strcmp(wanted, "accepted") == 0)
    EXPECT(failed == 0, "%s: status %d, \"%s\", wanted it accepted", path, failed, error);
  else
    EXPECT((failed == EXIT_INPUT || failed == EXIT_SYSTEM) && strstr(error, wanted) != NULL,
           "%s: status %d, \"%s\", wanted \"%s\"", path, failed, error, wanted);
}

static void open_malformed(const char *path, struct bytes content) {
  struct safetensors s;
  char error[512] = "";
  (void)content;
  const int failed = safetensors_open(&s, path, error, sizeof error);
  expect_sentence(path, failed, error);
  if (!failed) safetensors_close(&s);
}

static void load_malformed(const char *path, struct bytes content) {
  char dir[128], file[256], error[512] = "";
  REQUIRE(content.count > 0, "%s: is empty", path);
  files_make(dir);
  write_checkpoint(dir, (const uint8_t *)content.data + 1, content.count - 1, content.data[0]);
  const struct bytes before = files_read(files_path(file, dir, "checkpoint.safetensors"));
  expect_sentence(path, load(dir, 1, error, sizeof error), error);
  const struct bytes after = files_read(file);
  EXPECT(before.count == after.count && memcmp(before.data, after.data, after.count) == 0,
         "%s: was written to", path);
  free(before.data);
  free(after.data);
  files_remove(dir);
}

TEST(a_malformed_file_has_its_sentence) {
  const int count = each_file("tests/fuzz/malformed", ".safetensors", open_malformed);
  EXPECT(count >= 50, "%d files", count);
}

TEST(a_malformed_checkpoint_has_its_sentence) {
  const int count = each_file("tests/fuzz/malformed", ".checkpoint", load_malformed);
  EXPECT(count >= 15, "%d files", count);
}

TEST_MAIN()
