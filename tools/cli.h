/* SPDX-License-Identifier: Apache-2.0
 *
 * What every subcommand of the tool shares: exit codes, options, error sentences, colour, JSON.
 *
 * Options are rows of a table; the parser, the refusals and --help all follow from it. JSON is written as a stream, so
 * that it needs no memory: exactly one document goes to stdout under --json, and everything said to people to stderr. */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "moeblas.h"

enum cli_exit {
  CLI_OK = 0,
  CLI_FAILED = 1, /* a check failed */
  CLI_USAGE = 2,  /* wrong usage, or an input that is refused */
  CLI_IO = 3,     /* a file, the terminal, the device or memory let us down */
  CLI_GO_ON = -1  /* cli_parse only: nothing to exit for */
};

enum option_kind {
  OPTION_FLAG,
  OPTION_INTEGER,
  OPTION_REAL,
  OPTION_TEXT
};

struct option {
  const char *name;  /* "--seed" */
  const char *value; /* what --help calls the value: "N"; NULL for a flag */
  const char *help;
  enum option_kind kind;
  void *target; /* bool, int64_t, double or const char *, as kind says; holds the default before parsing */
  double min;   /* INTEGER and REAL: inclusive bounds */
  double max;
};

struct command {
  const char *name;      /* "check" */
  const char *arguments; /* "[PROBLEM...]"; NULL: takes none */
  const char *about;     /* one line */
  void (*more)(void);    /* prints what else --help says, or NULL */
  const struct option *options;
  int option_count;
};

/* Reads argv[1..argc), where argv[0] is the name of the command. --help is known to every command. What is no option is
 * moved to argv[1..*positional]. Returns CLI_GO_ON, or the code to exit with. */
int cli_parse(const struct command *command, int argc, char **argv, int *positional);

/* Says "moeblas NAME: sentence" on stderr and returns `code`. */
int cli_fail(const char *command, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* The same for a failed call of the library; the code follows from the status. */
int cli_fail_status(const char *command, moe_status status);

/* "auto", "cpu", "cuda" (NULL: auto). False if it is none of them. */
bool cli_backend(const char *name, moe_backend *backend);
const char *cli_backend_name(moe_backend backend);
/* The context that --backend and --threads ask for: with auto, a number of threads implies the CPU. CLI_GO_ON, or the exit
 * code after its sentence. */
int cli_context(const char *command, const char *name, int64_t threads, moe_context **ctx);

/* ESC[...m, or "" where stream is no terminal, NO_COLOR is set, or TERM is dumb. */
const char *cli_green(FILE *stream);
const char *cli_red(FILE *stream);
const char *cli_reset(FILE *stream);

/* Flushes stdout; CLI_IO if what was printed could not be written, else `code`. */
int cli_finish(const char *command, int code);

/* ---- JSON: key NULL inside an array; NaN and infinities become null ------------------------------------------- */

struct json {
  FILE *stream; /* NULL: nothing is written, so that callers need no test */
  int depth;
  bool comma; /* the next value needs one before it */
};
void json_open(struct json *json, const char *key, char bracket);
void json_close(struct json *json, char bracket); /* a newline follows the outermost one */
void json_text(struct json *json, const char *key, const char *value); /* NULL: null */
void json_integer(struct json *json, const char *key, int64_t value);
void json_real(struct json *json, const char *key, double value);
void json_bool(struct json *json, const char *key, bool value);
