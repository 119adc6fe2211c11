/* SPDX-License-Identifier: Apache-2.0
 *
 * A strict reader of presets.csv. The header names the columns: `name` first, `notes` last, between them fields of a
 * problem string. An empty cell is the default. No quotes, no blanks around cells, no missing cell. Every line is read and
 * checked at each use, so that a malformed file is found at once and not when its line is wanted. */
#include "presets.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
  LINE_BYTES = 1024,
  COLUMNS = 64,
  FILE_NAME = 4096
};

/* The cells of one line; they point into `text`. */
struct line {
  char text[LINE_BYTES];
  char *cells[COLUMNS];
  int count;
  int number;
};

/* ---- where the file is ----------------------------------------------------------------------------------------- */

/* The folder of the running executable, without a slash at the end; "" if the system does not say. */
static void executable_folder(char *folder, size_t bytes) {
  const ssize_t length = readlink("/proc/self/exe", folder, bytes - 1);
  folder[length > 0 ? length : 0] = '\0';
  char *slash = strrchr(folder, '/');
  if (slash) *slash = '\0';
}

static FILE *open_file(char *path, char *error, size_t bytes) {
  const char *chosen = getenv("MOEBLAS_PRESETS");
  char folder[FILE_NAME - 64];
  executable_folder(folder, sizeof folder);
  static const char *const places[] = {"/../share/moeblas/presets.csv", "/../data/presets.csv"};
  for (int i = 0; i < (chosen ? 1 : 2); i++) {
    if (chosen)
      snprintf(path, FILE_NAME, "%s", chosen);
    else
      snprintf(path, FILE_NAME, "%s%s", folder, places[i]);
    FILE *file = fopen(path, "r");
    if (file) return file;
  }
  snprintf(error, bytes, "presets: %.300s: %s; MOEBLAS_PRESETS may name the file", path, strerror(errno));
  return NULL;
}

/* ---- lines ----------------------------------------------------------------------------------------------------- */

static bool complain(const struct line *line, int column, const char *path, const char *what, char *error,
                     size_t bytes) {
  snprintf(error, bytes, "%.200s: line %d, column %d: %.200s", path, line->number, column + 1, what);
  return false;
}

/* Cuts the line at its commas. NULL, or what is wrong. */
static const char *split(struct line *line) {
  const size_t length = strcspn(line->text, "\n");
  line->count = 0;
  if (line->text[length] != '\n') return "the line is too long or has no end";
  line->text[length] = '\0';
  for (const char *c = line->text; *c; c++)
    if (iscntrl((unsigned char)*c) || *c == '"') return "quotes and control characters are not taken";
  for (char *at = line->text;; at++) {
    if (line->count == COLUMNS) return "too many cells";
    line->cells[line->count++] = at;
    at += strcspn(at, ",");
    if (*at == '\0') return NULL;
    *at = '\0';
  }
}

static bool check_header(const struct line *head, const char *path, char *error, size_t bytes) {
  const int last = head->count - 1;
  if (strcmp(head->cells[0], "name")) return complain(head, 0, path, "wants 'name'", error, bytes);
  if (strcmp(head->cells[last], "notes")) return complain(head, last, path, "wants 'notes'", error, bytes);
  for (int i = 1; i < last; i++) {
    if (strcmp(head->cells[i], "preset") == 0)
      return complain(head, i, path, "a preset is not made of other presets", error, bytes);
    for (int j = 1; j < i; j++)
      if (strcmp(head->cells[i], head->cells[j]) == 0)
        return complain(head, i, path, "the column is there twice", error, bytes);
  }
  return true;
}

static bool read_preset(const struct line *head, const struct line *line, const char *path, struct problem *p,
                        char *error, size_t bytes) {
  char what[PROBLEM_ERROR];
  if (line->count != head->count)
    return complain(line, line->count - 1, path, "the line has not as many cells as the header", error,
                    bytes);
  if (line->cells[0][0] == '\0' || strchr(line->cells[0], ' '))
    return complain(line, 0, path, "wants a name without blanks", error, bytes);
  problem_default(p);
  for (int i = 1; i < head->count - 1; i++) {
    const char *value = line->cells[i];
    if (*value && !problem_set(p, head->cells[i], value, what, sizeof what))
      return complain(line, i, path, what, error, bytes);
  }
  return true;
}

static bool walk(FILE *file, const char *path, preset_visit visit, void *context, char *error, size_t bytes) {
  struct line head = {.number = 1}, line;
  if (!fgets(head.text, sizeof head.text, file)) return complain(&head, 0, path, "no header", error, bytes);
  const char *wrong = split(&head);
  if (wrong) return complain(&head, head.count, path, wrong, error, bytes);
  if (!check_header(&head, path, error, bytes)) return false;
  for (line.number = 2; fgets(line.text, sizeof line.text, file); line.number++) {
    struct problem problem;
    wrong = split(&line);
    if (wrong) return complain(&line, line.count, path, wrong, error, bytes);
    if (!read_preset(&head, &line, path, &problem, error, bytes)) return false;
    visit(context, line.cells[0], &problem, line.cells[line.count - 1]);
  }
  if (ferror(file)) return complain(&line, 0, path, strerror(errno), error, bytes);
  return true;
}

bool presets_walk(preset_visit visit, void *context, char *error, size_t bytes) {
  char path[FILE_NAME];
  FILE *file = open_file(path, error, bytes);
  if (file == NULL) return false;
  const bool good = walk(file, path, visit, context, error, bytes);
  fclose(file);
  return good;
}

/* ---- one of them ----------------------------------------------------------------------------------------------- */

struct search {
  const char *name;
  struct problem problem;
  int found;
};

static void compare_name(void *context, const char *name, const struct problem *problem, const char *notes) {
  struct search *search = context;
  (void)notes;
  if (strcmp(name, search->name)) return;
  search->problem = *problem;
  search->found++;
}

bool presets_find(const char *name, struct problem *problem, char *error, size_t bytes) {
  struct search search = {.name = name};
  if (!presets_walk(compare_name, &search, error, bytes)) return false;
  if (search.found != 1) {
    snprintf(error, bytes, "preset '%.64s': found %d times; moeblas info --presets lists them", name,
             search.found);
    return false;
  }
  *problem = search.problem;
  return true;
}
