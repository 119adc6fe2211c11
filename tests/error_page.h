/* SPDX-License-Identifier: Apache-2.0
 *
 * docs/errors.md, and which of its rows a test has met.
 * Invariant: a sentence counts for the row with the most fixed characters that it fits; of equal rows, which are one
 * sentence in several files, for the first that is still open. */
#pragma once

#include "test.h"

#include <stdarg.h>

#include "moeblas_ops.h"

enum {
  ROWS = 400
};
static struct row {
  char status[24], sentence[256], shown_by[64], file[64];
  int seen;
} page[ROWS];
static int page_rows;

static int read_page(void) {
  char line[600];
  FILE *const file = fopen("docs/errors.md", "r");
  if (file == NULL) return 0;
  while (fgets(line, sizeof line, file) != NULL && page_rows < ROWS) {
    struct row *r = &page[page_rows];
    page_rows += sscanf(line, "| %23s | `%255[^`]` | %63[^|] | %63[^ |] |", r->status, r->sentence,
                        r->shown_by, r->file) == 4;
  }
  fclose(file);
  return page_rows < ROWS;
}

/* How many characters of the pattern are fixed, if the text fits; -1 if not. <...> stands for anything. */
static int fit(const char *pattern, const char *text) {
  int fixed = 0;
  for (; *pattern != '<'; pattern++, text++, fixed++) {
    if (*pattern != *text) return -1;
    if (*text == '\0') return fixed;
  }
  pattern = strchr(pattern, '>') + 1;
  for (;; text++) {
    const int rest = fit(pattern, text);
    if (rest >= 0) return fixed + rest;
    if (*text == '\0') return -1;
  }
}

static void look_up(const char *status, const char *sentence) {
  struct row *best = NULL;
  int most = -1;
  for (struct row *r = page; r < page + page_rows; r++) {
    const int fixed = strstr(r->status, status) != NULL ? fit(r->sentence, sentence) : -1;
    if (fixed < 0 || fixed < most || (fixed == most && best->seen == 0)) continue;
    best = r;
    most = fixed;
  }
  EXPECT(best != NULL, "%s \"%s\" is not on the page", status, sentence);
  if (best != NULL) best->seen++;
}

__attribute__((format(printf, 4, 5))) static void check(moe_status got, moe_status want, const char *status,
                                                        const char *format, ...) {
  char sentence[512];
  va_list list;
  va_start(list, format);
  vsnprintf(sentence, sizeof sentence, format, list);
  va_end(list);
  EXPECT(got == want && strcmp(moe_last_error(), sentence) == 0, "%s \"%s\", wanted %s \"%s\"",
         moe_status_name(got), moe_last_error(), status, sentence);
  look_up(status, moe_last_error());
}
/* The call is refused with MOE_ERROR_<status> and exactly this sentence. */
#define SAYS(call, status, ...) check((call), MOE_ERROR_##status, #status, __VA_ARGS__)
