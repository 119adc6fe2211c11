/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs a command of the tool inside a test and keeps what it printed. The streams are libc's own: they are exchanged, so
 * that a command needs no knowledge of it. */
#pragma once

#include <stdarg.h>

#include "test.h"

#include "../tools/commands.h"

struct command_run {
  int code;
  char *out, *err; /* what went to stdout and stderr */
};

/* The arguments end with NULL; the first is the command's name. */
static inline struct command_run command_run(int (*command)(int, char **), const char *first, ...) {
  struct command_run r = {0};
  char *argv[24] = {NULL};
  size_t out_bytes = 0, err_bytes = 0;
  FILE *const out = stdout, *const err = stderr;
  int argc = 0;
  va_list list;
  va_start(list, first);
  for (const char *a = first; a; a = va_arg(list, const char *)) argv[argc++] = (char *)(uintptr_t)a;
  va_end(list);
  stdout = open_memstream(&r.out, &out_bytes);
  stderr = open_memstream(&r.err, &err_bytes);
  r.code = command(argc, argv);
  fclose(stdout);
  fclose(stderr);
  stdout = out;
  stderr = err;
  return r;
}

static inline void command_free(struct command_run *r) {
  free(r->out);
  free(r->err);
}
