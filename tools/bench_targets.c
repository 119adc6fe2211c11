/* SPDX-License-Identifier: Apache-2.0
 *
 * --targets FILE: what the best peer measured, and what we want to reach, by problem and pass. A row of the file is
 * name,problem,pass,best_peer_tflops,reach_tflops under a first line that names these columns. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"

static const char header[] = "name,problem,pass,best_peer_tflops,reach_tflops";

static bool read_number(const char *text, double *value) {
  char *end;
  *value = strtod(text, &end);
  return end != text && *end == '\0' && *value > 0 && *value < 1e9;
}

/* False with a sentence. The text of the problem becomes the canonical one. */
static bool read_row(char *line, struct target *target, char *error, size_t bytes) {
  const char *field[5];
  int count = 0;
  for (char *rest = line, *one; count < 5 && (one = strsep(&rest, ",")) != NULL;) field[count++] = one;
  struct problem problem;
  *target = (struct target){.tflops = 0};
  if (count < 5) {
    snprintf(error, bytes, "%d fields, wants 5", count);
    return false;
  }
  if (!problem_parse(field[1], &problem, error, bytes)) return false;
  bench_problem(&problem, target->problem);
  snprintf(target->name, sizeof target->name, "%s", field[0]);
  snprintf(target->pass, sizeof target->pass, "%s", field[2]);
  if (read_number(field[3], &target->best_peer_tflops) && read_number(field[4], &target->reach_tflops))
    return true;
  snprintf(error, bytes, "'%.32s' and '%.32s': wants two numbers above 0", field[3], field[4]);
  return false;
}

static int read_rows(struct bench *bench, FILE *file) {
  char line[PROBLEM_TEXT + 256], error[PROBLEM_ERROR];
  for (int number = 1; fgets(line, sizeof line, file); number++) {
    line[strcspn(line, "\r\n")] = '\0';
    if (number == 1 && strcmp(line, header))
      return cli_fail("bench", CLI_USAGE, "%s: line 1 is not '%s'", bench->targets_path, header);
    if (number == 1 || line[0] == '\0') continue;
    struct target *grown =
        realloc(bench->targets, (size_t)(bench->target_count + 1) * sizeof *bench->targets);
    if (grown == NULL) return cli_fail("bench", CLI_IO, "%s: memory was short", bench->targets_path);
    bench->targets = grown;
    if (!read_row(line, &bench->targets[bench->target_count], error, sizeof error))
      return cli_fail("bench", CLI_USAGE, "%s: line %d: %s", bench->targets_path, number, error);
    bench->target_count++;
  }
  return CLI_GO_ON;
}

int bench_targets_read(struct bench *bench) {
  if (bench->targets_path == NULL) return CLI_GO_ON;
  FILE *file = fopen(bench->targets_path, "r");
  if (file == NULL) return cli_fail("bench", CLI_IO, "%s: %s", bench->targets_path, strerror(errno));
  const int code = read_rows(bench, file);
  fclose(file);
  return code;
}

struct target *bench_target(const struct bench *bench, const char *problem, const char *pass) {
  for (int i = 0; i < bench->target_count; i++) {
    struct target *target = &bench->targets[i];
    if (strcmp(target->problem, problem) == 0 && strcmp(target->pass, pass) == 0) return target;
  }
  return NULL;
}

static int compare_targets(const void *a, const void *b) {
  const struct target *x = a, *y = b;
  const double left = x->tflops / x->best_peer_tflops, right = y->tflops / y->best_peer_tflops;
  return (left > right) - (left < right);
}

void bench_targets_report(const struct bench *bench, FILE *out) {
  int timed = 0;
  if (bench->target_count == 0) return;
  qsort(bench->targets, (size_t)bench->target_count, sizeof *bench->targets, compare_targets);
  fprintf(out, "against %s, where we lose first:\n", bench->targets_path);
  for (int i = 0; i < bench->target_count; i++) {
    const struct target *t = &bench->targets[i];
    if (t->tflops <= 0) continue;
    timed++;
    fprintf(out, "  %-20s %s  %7.1f TFLOP/s  %5.2f of the best peer  %5.2f of reach\n", t->name, t->pass,
            t->tflops, t->tflops / t->best_peer_tflops, t->tflops / t->reach_tflops);
  }
  fprintf(out, "  %d of its %d rows were timed\n", timed, bench->target_count);
}
