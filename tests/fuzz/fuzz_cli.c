/* SPDX-License-Identifier: Apache-2.0
 *
 * The command line. A line of the input is an argument, the first one the command; what follows a line "%%" is a file that
 * an argument "@@" stands for. Nothing is timed or trained: check and bench get a back end that does not exist, so that
 * they end once all else has been read. Every refusal is one sentence on stderr, and then only. */
#include "fuzz.h"

#include "../capture.h"

#include "../../tools/cli.h"
#include "../../tools/commands.h"
#include "../../tools/problem_list.h"
#include "../../tools/train/settings.h"

enum {
  ARGUMENTS = 64
};

struct line {
  char *text;
  char *argv[ARGUMENTS + 2];
  int argc;
  struct fuzz_file file;
};

static void cut(struct line *l, const uint8_t *data, size_t size) {
  *l = (struct line){.text = strndup((const char *)data, size)};
  char *rest = l->text;
  while (rest && l->argc < ARGUMENTS) {
    char *argument = strsep(&rest, "\n");
    if (strcmp(argument, "%%") == 0) break;
    l->argv[l->argc++] = argument;
  }
  l->file = fuzz_file(rest ? rest : "", rest ? strlen(rest) : 0);
}

/* An argument "@@" becomes the path of the input's file, any other @FILE a list that is this file. */
static void name_files(struct line *l, char path[ARGUMENTS][40]) {
  for (int i = 0; i < l->argc; i++) {
    if (l->argv[i][0] != '@') continue;
    snprintf(path[i], 40, "%s%s", strcmp(l->argv[i], "@@") ? "@" : "", l->file.path);
    l->argv[i] = path[i];
  }
}

/* Puts the back end that there is none of in front, and takes away the arguments that would choose another. */
static void disarm(struct line *l) {
  static char none[] = "--backend=none";
  int kept = 1;
  for (int i = 1; i < l->argc; i++)
    if (strncmp(l->argv[i], "--backend", 9)) l->argv[kept++] = l->argv[i];
  for (int i = kept; i > 1; i--) l->argv[i] = l->argv[i - 1];
  l->argv[1] = none;
  l->argc = kept + 1;
}

static int visit_nothing(void *context, const struct problem *problem) {
  (void)context, (void)problem;
  return CLI_GO_ON;
}

static int run(struct line *l) {
  struct settings settings;
  char error[512] = "";
  const char *name = l->argc > 0 ? l->argv[0] : "";
  if (strcmp(name, "info") == 0) return cmd_info(l->argc, l->argv);
  if (strcmp(name, "list") == 0) return problem_list("check", l->argv + 1, l->argc - 1, visit_nothing, NULL);
  if (strcmp(name, "train") == 0) {
    const int code = settings_parse(&settings, l->argc, l->argv);
    if (code != CLI_GO_ON || settings_resolve(&settings, error, sizeof error)) return code;
    return cli_fail("train", CLI_USAGE, "%s", error);
  }
  disarm(l);
  return strcmp(name, "bench") == 0 ? cmd_bench(l->argc, l->argv) : cmd_check(l->argc, l->argv);
}

static void expect_one_sentence(int code, const char *text, size_t bytes) {
  const int refused = code == CLI_USAGE || code == CLI_IO;
  PROMISE(code != CLI_FAILED, "a check failed that was never made");
  PROMISE(refused == (bytes > 0), "status %d, and on stderr: %s", code, text);
  if (!refused) return;
  PROMISE(strncmp(text, "moeblas ", 8) == 0 && text[bytes - 1] == '\n', "stderr: %s", text);
  PROMISE(memchr(text, '\n', bytes) == text + bytes - 1, "more than one line: %s", text);
}

int fuzz_cli(const uint8_t *data, size_t size) {
  struct line l;
  char path[ARGUMENTS][40];
  struct capture said;
  cut(&l, data, size);
  name_files(&l, path);
  capture_begin(&said);
  const int code = run(&l);
  capture_end(&said);
  expect_one_sentence(code, said.err, said.err_bytes);
  capture_free(&said);
  close(l.file.fd);
  free(l.text);
  return 0;
}
