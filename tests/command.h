/* SPDX-License-Identifier: Apache-2.0
 * Runs a command of the tool inside a test and keeps what it printed. */
#pragma once

#include <stdarg.h>

#include "capture.h"
#include "test.h"

#include "../tools/commands.h"

struct command_run {
  int code;
  struct capture said;
};

/* The arguments end with NULL; the first is the command's name. */
static inline struct command_run command_run(int (*command)(int, char **), const char *first, ...) {
  struct command_run r;
  char *argv[24] = {NULL};
  int argc = 0;
  va_list list;
  va_start(list, first);
  for (const char *a = first; a; a = va_arg(list, const char *)) argv[argc++] = (char *)(uintptr_t)a;
  va_end(list);
  capture_begin(&r.said);
  r.code = command(argc, argv);
  capture_end(&r.said);
  return r;
}
