/* SPDX-License-Identifier: Apache-2.0
 *
 * What: the command line of the tool and what it prints: options, sentences, colour, JSON.
 * Idea: a command of this file with an option of each kind; stdout and stderr are kept by streams in memory.
 * Invariant: what is refused leaves its target as it was and names option and value. */
#include "test.h"

#include <math.h>
#include <unistd.h>

#include "../tools/cli.h"

static int is_terminal; /* what isatty says */
int __wrap_isatty(int fd);
int __wrap_isatty(int fd) { return fd >= 0 && is_terminal; }

static char said[1024], printed[4096];
static FILE *kept_out, *kept_err;

static void keep_output(void) {
  fflush(stdout);
  kept_out = stdout, kept_err = stderr;
  stdout = fmemopen(printed, sizeof printed, "w");
  stderr = fmemopen(said, sizeof said, "w");
}
static void give_back_output(void) {
  fclose(stdout);
  fclose(stderr);
  stdout = kept_out, stderr = kept_err;
}

/* ---- options --------------------------------------------------------------------------------------------------- */

static bool flag;
static int64_t integer;
static double real;
static const char *text;

static void say_more(void) { puts("more"); }

static const struct option options[] = {{"--flag", NULL, "a flag", OPTION_FLAG, &flag, 0, 0},
                                        {"--count", "N", "a number", OPTION_INTEGER, &integer, 1, 9},
                                        {"--ratio", "X", "a ratio", OPTION_REAL, &real, 0, 2},
                                        {"--name", "TEXT", "a name", OPTION_TEXT, &text, 0, 0}};

/* Parses up to four arguments, NULL being the end. */
static int parse(const char *arguments, char *argv[5], int argc, int *positional) {
  const struct command command = {"test", arguments, "Tests.", arguments ? say_more : NULL, options, 4};
  flag = false, integer = 5, real = 0.5, text = "usual";
  keep_output();
  const int code = cli_parse(&command, argc, argv, positional);
  give_back_output();
  return code;
}

static void expect_refused(char *argument, char *value, const char *sentence) {
  char *argv[] = {"test", argument, value, NULL, NULL};
  int positional;
  EXPECT(parse(NULL, argv, value ? 3 : 2, &positional) == CLI_USAGE, "%s is taken", argument);
  EXPECT(strncmp(said, "moeblas test: ", 14) == 0 && strstr(said, sentence), "%s: %s", argument, said);
  EXPECT(!flag && integer == 5 && !(real < 0.5 || real > 0.5) && strcmp(text, "usual") == 0, "%s is stored",
         argument);
}

TEST(what_options_do_not_take) {
  static char *const integers[] = {"", "x", "7x", "0", "10", "99999999999999999999", "1.5"};
  static char *const reals[] = {"", "x", "1x", "-1", "3", "nan", "inf"};
  char sentence[128];
  for (size_t i = 0; i < sizeof integers / sizeof *integers; i++) {
    snprintf(sentence, sizeof sentence, "--count '%s': wants a whole number from 1 to 9", integers[i]);
    expect_refused("--count", integers[i], sentence);
  }
  for (size_t i = 0; i < sizeof reals / sizeof *reals; i++) {
    snprintf(sentence, sizeof sentence, "--ratio '%s': wants a number from 0 to 2", reals[i]);
    expect_refused("--ratio", reals[i], sentence);
  }
  expect_refused("--count=x", NULL, "--count 'x': wants");
  expect_refused("--count", NULL, "--count: wants a value (N)");
  expect_refused("--flag=1", NULL, "--flag takes no value, found '1'");
  expect_refused("--counts", "5", "--counts is not an option");
  expect_refused("-", NULL, "- is not an option");
  expect_refused("word", NULL, "takes no argument, found 'word'");
  char wide[400] = "--";
  memset(wide + 2, 'w', sizeof wide - 3);
  wide[200] = '|';
  expect_refused(wide, NULL, "www is not an option");
  EXPECT(strchr(said, '|') == NULL, "%s", said);
}

TEST(what_options_take) {
  char *argv[] = {"test", "--count=9", "--ratio=2", "--", "--flag"};
  int positional;
  EXPECT(parse("[WORD...]", argv, 5, &positional) == CLI_GO_ON && positional == 1, "%s", said);
  EXPECT(integer == 9 && real > 1.5 && !flag && strcmp(argv[1], "--flag") == 0, "%s", argv[1]);
  char *words[] = {"test", "word", "--name", "--flag", "--flag"};
  EXPECT(parse("[WORD...]", words, 5, &positional) == CLI_GO_ON && positional == 1, "%s", said);
  EXPECT(flag && strcmp(text, "--flag") == 0 && strcmp(words[1], "word") == 0, "%s", text);
}

TEST(help_is_printed) {
  static char *const asked[] = {"--help", "-h"};
  for (int i = 0; i < 2; i++) {
    char *argv[] = {"test", asked[i], NULL, NULL, NULL};
    int positional;
    EXPECT(parse(i ? NULL : "[WORD...]", argv, 2, &positional) == CLI_OK, "%s", said);
    EXPECT(strstr(printed, i ? "[OPTION...]\n" : "[OPTION...] [WORD...]\n"), "%s", printed);
    EXPECT(strstr(printed, "  --count N            a number\n"), "%s", printed);
    EXPECT((strstr(printed, "\nmore\n") != NULL) == (i == 0), "%s", printed);
  }
}

/* ---- ends ------------------------------------------------------------------------------------------------------ */

/* Finishes after one byte went to this file; `lost`: the stream met the failure before it is flushed. */
static int finish(const char *path, bool lost) {
  keep_output();
  FILE *const memory = stdout, *const file = fopen(path, "w");
  if (file == NULL) return give_back_output(), -1;
  setvbuf(file, NULL, lost ? _IONBF : _IOFBF, lost ? 0 : 64);
  stdout = file;
  putchar('x');
  const int code = cli_finish("test", CLI_FAILED);
  stdout = memory;
  fclose(file);
  give_back_output();
  return code;
}

TEST(output_that_is_lost) {
  EXPECT(finish("/dev/null", false) == CLI_FAILED, "%s", said);
  for (int lost = 0; lost < 2; lost++) {
    EXPECT(finish("/dev/full", lost) == CLI_IO, "%d: nothing is noticed", lost);
    EXPECT(strstr(said, "moeblas test: stdout could not be written: "), "%s", said);
  }
}

TEST(failures_of_the_library) {
  moe_context *ctx = NULL;
  keep_output();
  const int refused = cli_fail_status("test", MOE_ERROR_ARGUMENT),
            unsupported = cli_fail_status("test", MOE_ERROR_UNSUPPORTED),
            memory = cli_fail_status("test", MOE_ERROR_MEMORY), named = cli_context("test", "tpu", 0, &ctx),
            threads = cli_context("test", "cpu", -1, &ctx);
  give_back_output();
  EXPECT(refused == CLI_USAGE && unsupported == CLI_USAGE && memory == CLI_IO, "%d %d %d", refused,
         unsupported, memory);
  EXPECT(named == CLI_USAGE && strstr(said, "--backend tpu: wants auto, cpu or cuda"), "%s", said);
  EXPECT(threads == CLI_USAGE && ctx == NULL, "%d threads status", threads);
}

TEST(back_ends_have_names) {
  moe_backend backend = MOE_BACKEND_CUDA;
  EXPECT(cli_backend(NULL, &backend) && backend == MOE_BACKEND_AUTO, "no name");
  EXPECT(cli_backend("cuda", &backend) && backend == MOE_BACKEND_CUDA, "cuda");
  EXPECT(!cli_backend("tpu", &backend) && backend == MOE_BACKEND_CUDA, "tpu");
  EXPECT(strcmp(cli_backend_name(MOE_BACKEND_CPU), "cpu") == 0, "cpu");
  EXPECT(strcmp(cli_backend_name((moe_backend)3), "unknown") == 0, "3");
}

/* A number of threads implies the CPU, and does not undo it. */
TEST(threads_choose_the_cpu) {
  static const char *const names[] = {NULL, "auto", "cpu"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    moe_context *ctx = NULL;
    REQUIRE(cli_context("test", names[i], 1, &ctx) == CLI_GO_ON, "%s", moe_last_error());
    EXPECT(moe_context_backend(ctx) == MOE_BACKEND_CPU, "%zu", i);
    moe_context_destroy(ctx);
  }
}

/* ---- colour ---------------------------------------------------------------------------------------------------- */

static void expect_colour(bool terminal, const char *term, const char *off, bool wanted) {
  is_terminal = terminal;
  term ? setenv("TERM", term, 1) : unsetenv("TERM");
  off ? setenv("NO_COLOR", off, 1) : unsetenv("NO_COLOR");
  const bool green = cli_green(stderr)[0], red = cli_red(stderr)[0], reset = cli_reset(stderr)[0];
  is_terminal = 0;
  EXPECT(green == wanted && red == wanted && reset == wanted, "TERM %s, NO_COLOR %s, terminal %d",
         term ? term : "-", off ? off : "-", terminal);
}

TEST(colour_is_for_terminals) {
  expect_colour(true, "xterm", NULL, true);
  expect_colour(true, "xterm", "", true);
  expect_colour(true, "xterm", "1", false);
  expect_colour(true, "dumb", NULL, false);
  expect_colour(true, NULL, NULL, false);
  expect_colour(false, "xterm", NULL, false);
}

/* ---- JSON ------------------------------------------------------------------------------------------------------ */

/* One document with a value of every kind; nothing when there is no stream. */
static void write_json(struct json *json) {
  json_open(json, NULL, '{');
  json_text(json, "a \"b\"", "\\ \x01\n\xc3\xa9");
  json_text(json, "none", NULL);
  json_integer(json, "whole", INT64_MIN);
  json_real(json, "real", 0.5);
  json_real(json, "nan", NAN);
  json_real(json, "infinite", -INFINITY);
  json_bool(json, "yes", true);
  json_open(json, "list", '[');
  json_bool(json, NULL, false);
  json_integer(json, NULL, 7);
  json_close(json, ']');
  json_open(json, "empty", '[');
  json_close(json, ']');
  json_close(json, '}');
}

TEST(json_is_escaped) {
  static const char wanted[] =
      "\n{\n  \"a \\\"b\\\"\": \"\\\\ \\u0001\\u000a\xc3\xa9\",\n  \"none\": null,\n"
      "  \"whole\": -9223372036854775808,\n  \"real\": 0.5,\n  \"nan\": null,\n"
      "  \"infinite\": null,\n  \"yes\": true,\n  \"list\": [\n    false,\n    7\n  ],\n"
      "  \"empty\": []\n}\n";
  char document[1024] = "\n";
  FILE *const file = fmemopen(document + 1, sizeof document - 1, "w");
  struct json json = {.stream = file}, none = {0};
  write_json(&json);
  fclose(file);
  write_json(&none);
  EXPECT(strcmp(document, wanted) == 0, "%s", document);
  EXPECT(none.depth == 0 && !none.comma, "something was written to no stream");
}

TEST_MAIN()
