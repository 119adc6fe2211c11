/* SPDX-License-Identifier: Apache-2.0
 *
 * What: the corners of the readers that test_problem and test_files leave out.
 * Idea: UTF-8 against a decoder that knows only code points; every field of a problem with a value that it does not
 * take; files of presets with one thing wrong.
 * Invariant: a refusal is judged by its sentence. */
#include "test.h"

#include <unistd.h>

#include "../tools/cli.h"
#include "../tools/presets.h"
#include "../tools/problem_list.h"
#include "../tools/train/text.h"

/* ---- UTF-8 */

static size_t encode(uint32_t point, uint8_t *p) {
  if (point < 0x80) return p[0] = (uint8_t)point, 1;
  const size_t length = point < 0x800 ? 2 : point < 0x10000 ? 3 : 4;
  for (size_t i = length - 1; i > 0; i--, point >>= 6) p[i] = (uint8_t)(0x80 | (point & 0x3f));
  p[0] = (uint8_t)((0xf00 >> length) | point);
  return length;
}

/* Every code point is read at its length, and at no byte less; surrogates and what lies beyond are refused. */
TEST(every_code_point) {
  for (uint32_t point = 0; point < 0x140000; point++) {
    uint8_t p[4];
    const size_t length = encode(point, p);
    const int good = point < 0x110000 && (point < 0xd800 || point > 0xdfff);
    if (text_utf8(p, length) != (good ? length : 0) || text_utf8(p, length - 1) != 0)
      EXPECT(0, "U+%04X: %zu of %zu bytes", point, text_utf8(p, length), length);
  }
}

/* All pairs of bytes: only what encode makes is taken, so no overlong form and no stray byte is. */
TEST(every_pair_of_bytes) {
  for (int first = 0; first < 256; first++)
    for (int second = 0; second < 256; second++) {
      const uint8_t p[2] = {(uint8_t)first, (uint8_t)second};
      uint8_t again[4] = {0};
      const size_t length = text_utf8(p, 2);
      if (length == 2) encode((uint32_t)((first & 0x1f) << 6 | (second & 0x3f)), again);
      EXPECT(length == 2 ? memcmp(p, again, 2) == 0 : length == (first < 0x80), "%02x %02x: %zu", first,
             second, length);
      const uint8_t torn[4] = {(uint8_t)first, (uint8_t)second, 0x80, 0x20};
      EXPECT(text_utf8(torn, 4) < 4, "%02x %02x 80 20 is taken", first, second);
    }
}

TEST(sentences_without_room) {
  char small[4] = "abc";
  EXPECT(text_fail(EXIT_INPUT, small, 0, "%d", 12345) == EXIT_INPUT && strcmp(small, "abc") == 0, "%s",
         small);
  EXPECT(text_fail(EXIT_SYSTEM, small, 4, "%d", 12345) == EXIT_SYSTEM && strcmp(small, "123") == 0, "%s",
         small);
}

/* What HTML gives a meaning to is escaped, what it cannot hold is replaced, the rest passes. */
TEST(text_in_a_page) {
  char page[256] = "";
  FILE *const file = fmemopen(page, sizeof page, "w");
  text_html(file, "<a href=\"x\">\t&\n\x01\x7f\x1f\xff\xc3\xa9 ~</a>");
  fclose(file);
  EXPECT(strcmp(page, "&lt;a href=&quot;x&quot;&gt;\t&amp;\n"
                      "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xc3\xa9 ~&lt;/a&gt;") == 0,
         "%s", page);
}

/* ---- problems */

static void refused(const char *text, const char *named) {
  struct problem problem;
  char error[PROBLEM_ERROR] = "";
  EXPECT(!problem_parse(text, &problem, error, sizeof error), "'%s' was taken", text);
  EXPECT(strstr(error, named) != NULL, "'%s' gave '%s', which does not name '%s'", text, error, named);
}

TEST(values_that_fields_do_not_take) {
  refused("given=1", "given=1: takes no value");
  refused("rows=3", "rows=3: takes no value");
  refused("logits=int8", "logits 'int8': wants fp32, bf16 or fp16");
  refused("z_loss=maybe", "z_loss 'maybe': wants 0 or 1");
  refused("router=bf16", "router 'bf16': wants fp32");
  refused("grad=fp16", "grad 'fp16': wants fp32");
  refused("balance=sequence:0", "balance 'sequence:0': wants");
  refused("balance=global:4", "balance 'global:4': wants");
  refused("seed=18446744073709551616", "seed '18446744073709551616': wants");
  refused("seed=-1", "seed '-1': wants");
  refused("seed=1x", "seed '1x': wants");
  refused("skew=", "wants a value after '='");
}

TEST(a_skew_file_with_too_long_a_name) {
  char text[PROBLEM_PATH + 8] = "skew=./";
  memset(text + 7, 'x', PROBLEM_PATH - 2);
  refused(text, "skew './xxx");
  text[5 + PROBLEM_PATH - 1] = '\0';
  struct problem problem;
  char error[PROBLEM_ERROR] = "";
  EXPECT(problem_parse(text, &problem, error, sizeof error) && strcmp(problem.skew_file, text + 5) == 0, "%s",
         error);
}

/* What a preset or a default switched on is switched off; names of one letter are no fields of others. */
TEST(fields_that_say_none) {
  struct problem problem;
  char error[PROBLEM_ERROR] = "";
  REQUIRE(problem_parse("balance=none z_loss=0 replay invalid", &problem, error, sizeof error), "%s", error);
  const moe_router_desc *const r = &problem.config.router;
  EXPECT(r->balance == MOE_BALANCE_NONE && !(r->balance_coeff > 0) && !(r->z_coeff > 0), "a loss is left");
  EXPECT(problem.replay && problem.invalid, "ids that are replayed may be invalid");
  refused("t1x", "'t1x' is no field");
  refused("x", "'x' is no field");
}

/* Floats that need all nine digits, and those that one digit less would do for. */
TEST(numbers_are_printed_to_the_last_digit) {
  int nine = 0;
  for (int i = 0; i < 2000; i++) {
    struct problem problem, back;
    char text[PROBLEM_TEXT], error[PROBLEM_ERROR] = "";
    problem_default(&problem);
    problem.config.router.scale = 10000 + (float)i * 0x1p-10f;
    problem_print(&problem, text);
    REQUIRE(problem_parse(text, &back, error, sizeof error), "%s", error);
    EXPECT(memcmp(&back, &problem, sizeof back) == 0, "'%s' is another number", text);
    nine += strcspn(strstr(text, "scale=") + 6, " ") == 10;
  }
  EXPECT(nine > 0 && nine < 2000, "%d numbers of nine digits", nine);
}

TEST(routers_that_are_not_there) {
  static const char *const fields[] = {"score=sigmoid", "renorm",        "scale=2",
                                       "groups=2/1",    "balance=batch", "z_loss",
                                       "router=fp32",   "router_bias",   "correction_bias"};
  for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
    char text[64];
    snprintf(text, sizeof text, "given %s", fields[i]);
    refused(text, "given: leaves no router");
  }
  refused("rows k1 score=sigmoid", "rows: leaves no router");
  refused("relu2 layout=concat_up", "layout");
  refused("relu2 up_beta=2", "is not gated");
  refused("relu2 offset=1", "is not gated");
}

static int count_problems(void *context, const struct problem *problem) {
  *(int *)context += problem->tokens > 0;
  return CLI_GO_ON;
}

/* Reads @FILE; the number of problems in it, or -status. */
static int count_list(const char *path) {
  char argument[32];
  int count = 0;
  snprintf(argument, sizeof argument, "@%s", path);
  char *arguments[] = {argument};
  const int code = problem_list("test", arguments, 1, count_problems, &count);
  EXPECT(code == CLI_GO_ON || count == 0, "%d problems of a list that is refused", count);
  return code == CLI_GO_ON ? count : -code;
}

/* A file of `times` times these words, then the end. */
static int count_words(const char *words, int times, const char *end) {
  char path[] = "/tmp/moeblas_XXXXXX";
  const int fd = mkstemp(path);
  FILE *const file = fd >= 0 ? fdopen(fd, "w") : NULL;
  if (file == NULL) return -CLI_IO;
  for (int i = 0; i < times; i++) fputs(words, file);
  fputs(end, file);
  fclose(file);
  const int count = count_list(path);
  unlink(path);
  return count;
}

TEST(lists_of_problems) {
  EXPECT(count_words("t8 ", 5000, "\nt4\n") == -CLI_USAGE, "a line without end");
  EXPECT(count_words("t8\n", 3, "t4") == 4, "a last line without end");
  EXPECT(count_words("t8 # eight\n\n \t\n", 300, "") == 300, "more than there is room for at first");
  EXPECT(count_words("t8\n", 100, "t8 wobble\n") == -CLI_USAGE, "the last line is wrong");
  EXPECT(count_list("/tmp") == -CLI_IO, "a folder");
  EXPECT(count_list("/nonexistent/x") == -CLI_IO, "no file");
}

/* ---- presets */

static void preset_file(const char *text, const char *named) {
  char path[] = "/tmp/moeblas_XXXXXX", error[512] = "";
  const int fd = mkstemp(path);
  struct problem problem;
  REQUIRE(fd >= 0, "no file");
  REQUIRE(write(fd, text, strlen(text)) == (ssize_t)strlen(text), "no room");
  close(fd);
  setenv("MOEBLAS_PRESETS", path, 1);
  EXPECT(!presets_find("a", &problem, error, sizeof error) && strstr(error, named) != NULL,
         "'%s' gave '%s', which does not name '%s'", text, error, named);
  unlink(path);
}

TEST(files_of_presets) {
  const char *const given = getenv("MOEBLAS_PRESETS");
  char *const before = given ? strdup(given) : NULL;
  char wide[512] = "name";
  for (int i = 0; i < 100; i++) strcat(wide, ",x");
  strcat(wide, "\n");
  preset_file("", "no header");
  preset_file("name,h,notes", "no end");
  preset_file("title,h,notes\n", "wants 'name'");
  preset_file("name,h\n", "wants 'notes'");
  preset_file("name,h,h,notes\n", "the column is there twice");
  preset_file("name,preset,notes\nloop,loop,\n", "a preset is not made of other presets");
  preset_file(wide, "too many cells");
  preset_file("name,h,notes\n,8,\n", "wants a name without blanks");
  preset_file("name,h,notes\na b,8,\n", "wants a name without blanks");
  preset_file("name,h,notes\na,8\n", "not as many cells");
  preset_file("name,h,notes\na,eight,\n", "eight");
  preset_file("name,h,notes\na,\"8\",\n", "quotes");
  preset_file("name,h,notes\nb,8,\n", "preset 'a': found 0 times");
  preset_file("name,h,notes\na,8,\na,9,\n", "preset 'a': found 2 times");
  if (before)
    setenv("MOEBLAS_PRESETS", before, 1);
  else
    unsetenv("MOEBLAS_PRESETS");
  free(before);
}

TEST_MAIN()
