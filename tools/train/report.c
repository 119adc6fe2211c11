/* SPDX-License-Identifier: Apache-2.0
 *
 * The log and the page of a training run. Every row is kept in memory as well: the page is made from all of them, also
 * from those of the runs that this one resumes. Invariant: log.csv holds whole lines only, except for the last one
 * after a crash, which is dropped when the log is opened again. */
#include "report.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "atomic.h"
#include "svg.h"
#include "text.h"

enum {
  DIR_BYTES = 4000,
  PATH_BYTES = 4096
};

struct report {
  char dir[DIR_BYTES];
  int layers, experts;
  int lock; /* the folder, held while the run goes on; the kernel lets go of it when a process dies */
  FILE *log;
  struct report_row *rows; /* each owns its load */
  int count, capacity;
};

/* The columns between step and the loads. */
static const struct {
  const char *name;
  size_t offset;
} columns[] = {
    {"loss", offsetof(struct report_row, loss)},
    {"train_bpb", offsetof(struct report_row, train_bpb)},
    {"val_bpb", offsetof(struct report_row, val_bpb)},
    {"tokens_per_s", offsetof(struct report_row, tokens_per_s)},
    {"grad_norm", offsetof(struct report_row, grad_norm)},
    {"learning_rate", offsetof(struct report_row, learning_rate)},
    {"balance_loss", offsetof(struct report_row, balance_loss)},
};
enum {
  COLUMNS = sizeof columns / sizeof *columns
};

static double *column(struct report_row *row, size_t offset) {
  return (double *)(void *)((char *)row + offset);
}

static size_t loads(const struct report *r) { return (size_t)r->layers * (size_t)r->experts; }

/* The busiest expert of all layers against an even load. */
static double max_over_mean(const struct report *r, const float *load) {
  double max = NAN;
  for (size_t i = 0; i < loads(r); i++) max = fmax(max, load[i]);
  return max * r->experts;
}

/* -- log.csv --------------------------------------------------------------------------------------------------- */

static void write_header(FILE *f, const struct report *r) {
  fputs("step", f);
  for (int i = 0; i < COLUMNS; i++) fprintf(f, ",%s", columns[i].name);
  fputs(",max_over_mean_load", f);
  for (int layer = 0; layer < r->layers; layer++)
    for (int expert = 0; expert < r->experts; expert++) fprintf(f, ",layer%d_expert%d", layer, expert);
  fputc('\n', f);
}

/* Nine digits: what is read back prints the same again. A value that was not measured is an empty field. */
static void write_field(FILE *f, double v) {
  if (isnan(v))
    fputc(',', f);
  else
    fprintf(f, ",%.9g", v);
}

static void write_row(FILE *f, const struct report *r, struct report_row *row) {
  fprintf(f, "%lld", (long long)row->step);
  for (int i = 0; i < COLUMNS; i++) write_field(f, *column(row, columns[i].offset));
  write_field(f, max_over_mean(r, row->load));
  for (size_t i = 0; i < loads(r); i++) write_field(f, row->load[i]);
  fputc('\n', f);
}

/* The number between commas, NAN for nothing; *at moves to the next field, or to NULL when there is no such field. */
static double read_field(const char **at) {
  if (*at == NULL || **at != ',') {
    *at = NULL;
    return NAN;
  }
  const char *start = *at + 1;
  char *end;
  const double v = strtod(start, &end);
  *at = *end == ',' || *end == '\n' ? end : NULL;
  return end == start ? NAN : v;
}

static int read_row(const struct report *r, const char *line, struct report_row *row) {
  char *end;
  row->step = strtoll(line, &end, 10);
  const char *at = end == line ? NULL : end;
  for (int i = 0; i < COLUMNS; i++) *column(row, columns[i].offset) = read_field(&at);
  read_field(&at); /* max_over_mean_load follows from the loads */
  for (size_t i = 0; i < loads(r); i++) row->load[i] = (float)read_field(&at);
  return at && *at == '\n' ? 0 : -1;
}

/* Room for one more row, with a load of its own. */
static struct report_row *new_row(struct report *r) {
  if (r->count == r->capacity) {
    const int capacity = r->capacity ? 2 * r->capacity : 64;
    struct report_row *rows = realloc(r->rows, (size_t)capacity * sizeof *rows);
    if (rows == NULL) return NULL;
    r->rows = rows;
    r->capacity = capacity;
  }
  struct report_row *row = &r->rows[r->count];
  memset(row, 0, sizeof *row);
  row->load = calloc(loads(r) + 1, sizeof *row->load);
  return row->load ? row : NULL;
}

static int is_header(const struct report *r, const char *line) {
  char *wanted = NULL;
  size_t bytes = 0;
  FILE *f = open_memstream(&wanted, &bytes);
  if (f == NULL) return 0;
  write_header(f, r);
  const int same = fclose(f) == 0 && strcmp(line, wanted) == 0;
  free(wanted);
  return same;
}

static int read_lines(struct report *r, FILE *f, int resume, char *error, size_t error_bytes) {
  char *line = NULL;
  size_t room = 0;
  int failed = 0;
  ssize_t length;
  for (int number = 1; !failed && (length = getline(&line, &room, f)) > 0 && line[length - 1] == '\n';
       number++) {
    if (number == 1) {
      if (!is_header(r, line))
        failed = text_fail(EXIT_INPUT, error, error_bytes,
                           "%s/log.csv: its columns are not those of a run with %d layers of %d experts",
                           r->dir, r->layers, r->experts);
      continue;
    }
    struct report_row *row = new_row(r);
    if (row == NULL) {
      failed = text_fail(EXIT_SYSTEM, error, error_bytes, "%s/log.csv: no memory for its rows", r->dir);
    } else if (read_row(r, line, row) != 0) {
      failed = text_fail(EXIT_INPUT, error, error_bytes, "%s/log.csv: line %d is damaged", r->dir, number);
      free(row->load);
    } else if (row->step > resume) {
      free(row->load);
    } else {
      r->count++;
    }
  }
  free(line);
  return failed;
}

static int read_log(struct report *r, int resume, char *error, size_t error_bytes) {
  char path[PATH_BYTES];
  snprintf(path, sizeof path, "%s/log.csv", r->dir);
  FILE *f = fopen(path, "re");
  if (f == NULL && errno == ENOENT) return 0;
  if (f == NULL)
    return text_fail(EXIT_SYSTEM, error, error_bytes, "%s: cannot be read: %s", path, strerror(errno));
  const int failed = read_lines(r, f, resume, error, error_bytes);
  fclose(f);
  return failed;
}

/* Writes what is kept, then stays open at the end. */
static int start_log(struct report *r, char *error, size_t error_bytes) {
  struct atomic_file out;
  char path[PATH_BYTES];
  int failed = atomic_open(&out, r->dir, "log.csv", error, error_bytes);
  if (failed) return failed;
  write_header(out.file, r);
  for (int i = 0; i < r->count; i++) write_row(out.file, r, &r->rows[i]);
  if ((failed = atomic_commit(&out, error, error_bytes)) != 0) return failed;
  snprintf(path, sizeof path, "%s/log.csv", r->dir);
  if ((r->log = fopen(path, "ae")) != NULL) return 0;
  return text_fail(EXIT_SYSTEM, error, error_bytes, "%s: cannot be written: %s", path, strerror(errno));
}

/* DIR and its parents. */
static int make_folder(const char *dir, char *error, size_t error_bytes) {
  char path[DIR_BYTES];
  const size_t length = strlen(dir);
  if (length == 0 || length >= sizeof path)
    return text_fail(EXIT_INPUT, error, error_bytes,
                     "the folder of the run has a path of %zu bytes, wanted 1 to %zu", length,
                     sizeof path - 1);
  memcpy(path, dir, length + 1);
  for (size_t i = 1; i <= length; i++) {
    if (path[i] != '/' && path[i] != '\0') continue;
    const char end = path[i];
    path[i] = '\0';
    if (mkdir(path, 0777) != 0 && errno != EEXIST)
      return text_fail(EXIT_SYSTEM, error, error_bytes, "%s: cannot be made: %s", path, strerror(errno));
    path[i] = end;
  }
  struct stat status;
  if (stat(dir, &status) == 0 && S_ISDIR(status.st_mode)) return 0;
  return text_fail(EXIT_INPUT, error, error_bytes, "%s: is not a folder", dir);
}

/* Two runs in one folder would replace each other's checkpoints. A file system without locks has no such guard. */
static int lock_folder(struct report *r, char *error, size_t error_bytes) {
  r->lock = open(r->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (r->lock < 0)
    return text_fail(EXIT_SYSTEM, error, error_bytes, "%s: cannot be opened: %s", r->dir, strerror(errno));
  if (flock(r->lock, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return 0;
  return text_fail(EXIT_INPUT, error, error_bytes, "%s: another training is running in this folder", r->dir);
}

struct report *report_open(const char *dir, int layers, int experts, int resume, char *error,
                           size_t error_bytes) {
  if (make_folder(dir, error, error_bytes) != 0) return NULL;
  struct report *r = calloc(1, sizeof *r);
  if (r == NULL) {
    text_fail(EXIT_SYSTEM, error, error_bytes, "no memory for the report");
    return NULL;
  }
  memcpy(r->dir, dir, strlen(dir) + 1);
  r->layers = layers;
  r->experts = experts;
  int failed = lock_folder(r, error, error_bytes);
  if (!failed && resume > 0) failed = read_log(r, resume, error, error_bytes);
  if (!failed) failed = start_log(r, error, error_bytes);
  if (!failed) return r;
  report_close(r);
  return NULL;
}

int report_add(struct report *r, const struct report_row *row, char *error, size_t error_bytes) {
  struct report_row *kept = new_row(r);
  if (kept == NULL) return text_fail(EXIT_SYSTEM, error, error_bytes, "no memory for a row of the report");
  float *load = kept->load;
  *kept = *row;
  kept->load = load;
  for (size_t i = 0; i < loads(r); i++) load[i] = row->load[i];
  r->count++;
  write_row(r->log, r, kept);
  if (fflush(r->log) == 0 && !ferror(r->log)) return 0;
  return text_fail(EXIT_SYSTEM, error, error_bytes, "%s/log.csv: cannot be written: %s", r->dir,
                   strerror(errno));
}

void report_close(struct report *r) {
  if (r == NULL) return;
  if (r->log) fclose(r->log);
  if (r->lock >= 0) close(r->lock);
  for (int i = 0; i < r->count; i++) free(r->rows[i].load);
  free(r->rows);
  free(r);
}

/* -- report.html ----------------------------------------------------------------------------------------------- */

static const char page_style[] =
    "*{box-sizing:border-box}\n"
    "body{margin:0 auto;padding:20px 16px 48px;max-width:1080px;background:var(--page);color:var(--ink);"
    "font:15px/1.5 system-ui,sans-serif}\n"
    "h1{font-size:22px;margin:0 0 12px}h2{font-size:17px;margin:32px 0 4px}\n"
    "p{margin:4px 0 12px;color:var(--soft);max-width:75ch}\n"
    ".side-by-side{display:grid;gap:14px;align-items:start;"
    "grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr))}\n"
    "figure{margin:0;padding:10px 8px;background:var(--card);border-radius:8px}\n"
    ".narrow{max-width:480px;margin:10px 0}\n"
    "table{border-collapse:collapse}td{padding:2px 0;vertical-align:top}\n"
    "td+td{padding-left:min(24px,3vw);text-align:right;font-variant-numeric:tabular-nums}\n"
    "td:nth-child(-n+2){white-space:nowrap}td+td+td{text-align:left;color:var(--soft)}\n"
    "pre{margin:0;padding:12px;background:var(--card);border-radius:8px;white-space:pre-wrap;"
    "overflow-wrap:anywhere;font:13px/1.45 ui-monospace,monospace}\n";

static void table_row(FILE *f, const char *name, double v, const char *format, const char *note) {
  fprintf(f, "<tr><td>%s</td><td>", name);
  if (isfinite(v))
    fprintf(f, format, v);
  else
    fputs("not measured", f);
  fprintf(f, "</td><td>%s</td></tr>\n", note);
}

static const char *verdict(const struct report_summary *s) {
  if (!isfinite(s->val_bpb) || !isfinite(s->ngram2_bpb) || !isfinite(s->ngram4_bpb)) return "";
  if (s->val_bpb < s->ngram4_bpb) return "better than the order-4 n-gram";
  return s->val_bpb < s->ngram2_bpb ? "better than the order-2 n-gram only"
                                    : "not yet better than the n-grams";
}

static void summary_table(FILE *f, const struct report_summary *s) {
  fputs("<table><tbody>\n", f);
  table_row(f, "held-out", s->val_bpb, "%.3f", verdict(s));
  table_row(f, "training", s->train_bpb, "%.3f", "bits per byte");
  table_row(f, "order-2 n-gram", s->ngram2_bpb, "%.3f", "held-out bits per byte given 2 bytes");
  table_row(f, "order-4 n-gram", s->ngram4_bpb, "%.3f", "given 4 bytes");
  table_row(f, "steps", (double)s->steps, "%.0f", "");
  table_row(f, "time", s->seconds, "%.1f", "seconds");
  table_row(f, "speed", s->tokens_per_s, "%.0f", "tokens per second");
  table_row(f, "parameters", (double)s->params / 1e6, "%.3f M", "");
  table_row(f, "active", (double)s->active_params / 1e6, "%.3f M", "parameters that one token uses");
  fputs("</tbody></table>\n", f);
}

static void loss_chart(FILE *f, const struct report *r, const struct report_summary *s, const double *step,
                       const double *train, const double *val) {
  const struct svg_series series[] = {{"training", step, train, r->count}, {"held-out", step, val, r->count}};
  const struct svg_level levels[] = {{"order-2 n-gram", s->ngram2_bpb}, {"order-4 n-gram", s->ngram4_bpb}};
  svg_lines(f, &(struct svg_lines){.title = "Bits per byte",
                                   .x_label = "step",
                                   .y_label = "bits per byte",
                                   .series = series,
                                   .series_count = 2,
                                   .levels = levels,
                                   .level_count = 2});
}

static void line_chart(FILE *f, const struct report *r, const char *title, const char *unit,
                       const double *step, const double *values) {
  const struct svg_series series = {unit, step, values, r->count};
  svg_lines(f, &(struct svg_lines){.title = title,
                                   .x_label = "step",
                                   .y_label = unit,
                                   .series = &series,
                                   .series_count = 1,
                                   .from_zero = 1});
}

static void copy_column(const struct report *r, size_t offset, double *out) {
  for (int i = 0; i < r->count; i++) out[i] = *column(&r->rows[i], offset);
}

/* step, a and b: [count] each, room to work in. */
static void charts(FILE *f, const struct report *r, const struct report_summary *s, const double *step,
                   double *a, double *b) {
  fputs("<div class=\"side-by-side\">\n<figure>", f);
  copy_column(r, offsetof(struct report_row, train_bpb), a);
  copy_column(r, offsetof(struct report_row, val_bpb), b);
  loss_chart(f, r, s, step, a, b);
  fputs("</figure>\n<figure>", f);
  copy_column(r, offsetof(struct report_row, tokens_per_s), a);
  line_chart(f, r, "Speed", "tokens per second", step, a);
  fputs("</figure>\n<figure>", f);
  for (int i = 0; i < r->count; i++) a[i] = max_over_mean(r, r->rows[i].load);
  line_chart(f, r, "Busiest expert against an even load", "times the mean", step, a);
  fputs("</figure>\n<figure>", f);
  svg_bars(f, "Time by operation", s->op_name, s->op_seconds, s->ops);
  fputs("</figure>\n</div>\n", f);
}

static void heat_maps(FILE *f, const struct report *r, const double *step, double *ratio) {
  fputs("<h2>Load of the experts</h2>\n<p>Share of the routed tokens that an expert gets, as a multiple of "
        "an even "
        "share: grey is even, blue is idle, orange is crowded.</p>\n<div class=\"narrow\">",
        f);
  svg_heat_legend(f);
  fputs("</div>\n<div class=\"side-by-side\">\n", f);
  for (int layer = 0; layer < r->layers; layer++) {
    char title[32];
    snprintf(title, sizeof title, "Layer %d", layer);
    for (int i = 0; i < r->count; i++)
      for (int e = 0; e < r->experts; e++)
        ratio[(size_t)i * r->experts + e] =
            (double)r->rows[i].load[(size_t)layer * r->experts + e] * r->experts;
    fputs("<figure>", f);
    svg_heat(f, &(struct svg_heat){.title = title,
                                   .x_label = "step",
                                   .y_label = "expert",
                                   .x = step,
                                   .ratio = ratio,
                                   .columns = r->count,
                                   .rows = r->experts});
    fputs("</figure>\n", f);
  }
  fputs("</div>\n", f);
}

static void page(FILE *f, const struct report *r, const struct report_summary *s, double *work) {
  const char *title = s->title ? s->title : "training run";
  double *step = work, *a = step + r->count, *b = a + r->count, *ratio = b + r->count;
  for (int i = 0; i < r->count; i++) step[i] = (double)r->rows[i].step;
  fputs("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" "
        "content=\"width=device-width,initial-scale=1\">\n<meta name=\"color-scheme\" content=\"light "
        "dark\">\n<title>",
        f);
  text_html(f, title);
  fprintf(f, "</title>\n<style>\n%s%s</style>\n</head>\n<body>\n<h1>", svg_style, page_style);
  text_html(f, title);
  fputs("</h1>\n", f);
  summary_table(f, s);
  fputs("<h2>Course</h2>\n", f);
  charts(f, r, s, step, a, b);
  heat_maps(f, r, step, ratio);
  if (s->sample) {
    fputs("<h2>Sample</h2>\n<p>Written by the model at the end.</p>\n<pre>", f);
    text_html(f, s->sample);
    fputs("</pre>\n", f);
  }
  fputs("</body>\n</html>\n", f);
}

int report_finish(struct report *r, const struct report_summary *s, char *error, size_t error_bytes) {
  double *work = malloc(((size_t)r->count * (3 + (size_t)r->experts) + 1) * sizeof *work);
  if (work == NULL) return text_fail(EXIT_SYSTEM, error, error_bytes, "no memory for report.html");
  struct atomic_file out;
  int failed = atomic_open(&out, r->dir, "report.html", error, error_bytes);
  if (!failed) {
    page(out.file, r, s, work);
    failed = atomic_commit(&out, error, error_bytes);
  }
  free(work);
  return failed;
}
