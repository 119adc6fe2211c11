/* SPDX-License-Identifier: Apache-2.0
 *
 * One line of progress. On a terminal it is cut to the width, since a wrapped line cannot be rewritten. */
#include "progress.h"

#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

int progress_is_live(FILE *f) {
  const char *terminal = getenv("TERM");
  return isatty(fileno(f)) && terminal != NULL && terminal[0] != '\0' && strcmp(terminal, "dumb") != 0;
}

static size_t columns(FILE *f) {
  struct winsize size;
  return ioctl(fileno(f), TIOCGWINSZ, &size) == 0 && size.ws_col > 1 ? size.ws_col - 1u : 79u;
}

/* Bytes of text that fit: a UTF-8 continuation byte takes no column. */
static size_t cut(const char *text, size_t width) {
  size_t i = 0;
  for (; text[i]; i++)
    if (((unsigned char)text[i] & 0xc0) != 0x80 && width-- == 0) break;
  return i;
}

void progress_line(FILE *f, int live, const char *text) {
  if (live)
    fprintf(f, "\r%.*s\033[K", (int)cut(text, columns(f)), text);
  else
    fprintf(f, "%s\n", text);
  fflush(f);
}

void progress_end(FILE *f, int live) {
  if (live) fputc('\n', f);
  fflush(f);
}
