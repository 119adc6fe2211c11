/* SPDX-License-Identifier: Apache-2.0
 *
 * `moeblas train`: trains, reports, saves; or continues a text. The learning that happens depends on the settings alone:
 * clocks decide only when a run stops early, and such a run goes on with --resume to the same bits on the same back end. */
#include "train.h"

#include <math.h>
#include <omp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "../cli.h"
#include "ngram.h"
#include "progress.h"
#include "trainer.h"
#include "sample.h"
#include "text.h"

#define ERROR_BYTES 512

enum {
  REPORTS = 30, /* rows in log.csv of a whole run */
  REPORTS_PER_SAVE = 5,
  VAL_BATCHES = 2, /* held-out batches measured at each report; the end measures all */
  SAMPLE_BYTES = 200,
  EXIT_INTERRUPTED = 130
};

/* A handler can only set a flag, and a flag it sets has to be static. The handler is gone after one signal, so that a
 * second Ctrl-C ends a run that cannot finish its step. */
static volatile sig_atomic_t interrupted;

static void on_signal(int number) {
  (void)number;
  interrupted = 1;
}

static void catch_signals(void) {
  struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESETHAND | SA_RESTART};
  interrupted = 0;
  sigaction(SIGINT, &action, NULL);
  sigaction(SIGTERM, &action, NULL);
}

/* What is seen of a run. */
struct watch {
  struct trainer *trainer;
  struct report *report;
  FILE *file; /* for people */
  int live;
  double began;
  int64_t first_step;
  double step_seconds; /* in steps, since first_step */
  double window_loss;  /* of the steps since the last row, and their time */
  double window_seconds;
  int64_t window_steps;
  double train_bpb; /* of the last row */
  double val_bpb;
  double ngram2, ngram4;
  char error[ERROR_BYTES];
};

static double bits(double nats) { return nats / log(2); }

static double tokens_per_step(const struct trainer *r) {
  return (double)(r->settings.sequences * r->settings.model.sequence);
}

static double speed(const struct watch *w) {
  return w->step_seconds > 0
             ? (double)(w->trainer->step - w->first_step) * tokens_per_step(w->trainer) / w->step_seconds
             : 0;
}

/* The busiest expert's load over the mean, the worst of all layers, since the last row. */
static double worst_load(const struct trainer *r) {
  const int64_t experts = r->settings.model.experts;
  double worst = 0;
  for (int64_t l = 0; l < r->settings.model.layers; l++) {
    double sum = 0, max = 0;
    for (int64_t e = 0; e < experts; e++) {
      sum += (double)r->load[l * experts + e];
      max = fmax(max, (double)r->load[l * experts + e]);
    }
    if (sum > 0) worst = fmax(worst, max * (double)experts / sum);
  }
  return worst;
}

static void show(struct watch *w) {
  const struct trainer *r = w->trainer;
  const double loss = w->window_loss / (double)w->window_steps, rate = speed(w);
  const double left = (double)(r->settings.steps - r->step) * tokens_per_step(r) / (rate > 0 ? rate : 1);
  char text[256], val[32] = "";
  if (!isnan(w->val_bpb)) snprintf(val, sizeof val, " (held out %.3f)", w->val_bpb);
  snprintf(text, sizeof text,
           "step %lld/%lld  loss %.3f  %.3f bits/byte%s  %.0f tokens/s  load %.2f  ETA %d:%02d",
           (long long)r->step, (long long)r->settings.steps, loss, bits(loss), val, rate, worst_load(r),
           (int)left / 60, (int)left % 60);
  progress_line(w->file, w->live, text);
}

/* ---- the loop -------------------------------------------------------------------------------------------------- */

static double balance_loss(const struct trainer *r) {
  double sum = 0;
  for (int64_t l = 0; l < r->settings.model.layers; l++) sum += (double)r->model->layer[l].losses[0];
  return sum;
}

/* One row: the steps since the last, and the held-out slice. */
static int add_row(struct watch *w) {
  struct trainer *r = w->trainer;
  const int64_t layers = r->settings.model.layers, experts = r->settings.model.experts;
  const int64_t windows = batch_windows(&r->corpus, r->settings.model.sequence);
  const int64_t slice = VAL_BATCHES * r->settings.sequences;
  struct report_row row = {
      .step = r->step, .grad_norm = r->grad_norm, .learning_rate = r->rate, .load = r->load};
  row.balance_loss = balance_loss(r);
  const int code =
      trainer_validate(r, windows < slice ? windows : slice, &w->val_bpb, w->error, sizeof w->error);
  if (code) return code;
  row.loss = w->window_loss / (double)w->window_steps;
  row.train_bpb = w->train_bpb = bits(row.loss);
  row.val_bpb = w->val_bpb;
  row.tokens_per_s = (double)w->window_steps * tokens_per_step(r) / w->window_seconds;
  show(w);
  for (int64_t i = 0; i < layers * experts; i++)
    r->load[i] /= (float)(w->window_steps * r->settings.model.topk) * (float)tokens_per_step(r);
  w->window_loss = w->window_seconds = 0;
  w->window_steps = 0;
  const int failed = report_add(w->report, &row, w->error, sizeof w->error);
  memset(r->load, 0, (size_t)(layers * experts) * sizeof *r->load);
  return failed;
}

static int step(struct watch *w) {
  const double began = omp_get_wtime();
  const int code = trainer_step(w->trainer, w->error, sizeof w->error);
  const double seconds = omp_get_wtime() - began;
  w->step_seconds += seconds;
  w->window_seconds += seconds;
  w->window_loss += w->trainer->loss;
  w->window_steps++;
  return code;
}

static int out_of_time(const struct watch *w) {
  const double minutes = w->trainer->settings.minutes;
  return minutes > 0 && omp_get_wtime() - w->began > 60 * minutes;
}

/* Runs to the end or to the first reason to stop; then everything is saved. */
static int loop(struct watch *w) {
  struct trainer *r = w->trainer;
  const struct settings *s = &r->settings;
  const int64_t end = s->stop > 0 && s->stop < s->steps ? s->stop : s->steps;
  const int64_t every = (s->steps + REPORTS - 1) / REPORTS;
  while (r->step < end && !interrupted && !out_of_time(w)) {
    int code = step(w);
    if (!code && r->step % every == 0)
      code = add_row(w);
    else if (!code && w->live)
      show(w);
    if (!code && r->step % (every * REPORTS_PER_SAVE) == 0) code = trainer_save(r, w->error, sizeof w->error);
    if (code) return code;
  }
  const int code = w->window_steps ? add_row(w) : 0;
  return code ? code : trainer_save(r, w->error, sizeof w->error);
}

/* ---- the end --------------------------------------------------------------------------------------------------- */

static void print_number(FILE *f, const char *name, double value, const char *unit) {
  if (isnan(value))
    fprintf(f, "  %-28s not measured\n", name);
  else
    fprintf(f, "  %-28s %.*f %s\n", name, value < 100 ? 3 : 0, value, unit);
}

static void print_summary(const struct watch *w, const struct report_summary *s) {
  FILE *f = w->file;
  fprintf(f, "\n");
  print_number(f, "held-out text", s->val_bpb, "bits/byte");
  print_number(f, "  byte n-gram, order 2", s->ngram2_bpb, "bits/byte");
  print_number(f, "  byte n-gram, order 4", s->ngram4_bpb, "bits/byte");
  print_number(f, "training text", s->train_bpb, "bits/byte");
  print_number(f, "speed", s->tokens_per_s, "tokens/s");
  fprintf(f, "  %-28s %s, in %s\n", "experts on", trainer_backend(w->trainer), trainer_dtype(w->trainer));
  fprintf(f, "  %-28s %lld, of which a token uses %lld\n", "parameters", (long long)s->params,
          (long long)s->active_params);
  const char *out = w->trainer->settings.out;
  fprintf(f, "  %-28s %s/checkpoint.safetensors %s/log.csv %s/report.html\n", "files", out, out, out);
  if (!s->sample) return;
  fprintf(f, "\n");
  sample_print(f, (const uint8_t *)s->sample, (int64_t)strlen(s->sample));
  fprintf(f, "\n");
}

static void json_number(const char *key, double value) {
  if (isfinite(value))
    printf(", \"%s\": %.6g", key, value);
  else
    printf(", \"%s\": null", key);
}

static void print_json(const struct trainer *r, const struct report_summary *s) {
  printf("{\"steps\": %lld, \"backend\": \"%s\", \"dtype\": \"%s\"", (long long)s->steps, trainer_backend(r),
         trainer_dtype(r));
  json_number("train_bpb", s->train_bpb);
  json_number("val_bpb", s->val_bpb);
  json_number("ngram2_bpb", s->ngram2_bpb);
  json_number("ngram4_bpb", s->ngram4_bpb);
  json_number("tokens_per_s", s->tokens_per_s);
  json_number("seconds", s->seconds);
  printf(", \"params\": %lld, \"active_params\": %lld}\n", (long long)s->params, (long long)s->active_params);
}

/* The whole held-out text and a sample, but for an interrupt, which wants out. */
static int last_words(struct watch *w, char *sample) {
  struct trainer *r = w->trainer;
  if (interrupted) return 0;
  const int64_t windows = batch_windows(&r->corpus, r->settings.model.sequence);
  const int code = trainer_validate(r, windows, &w->val_bpb, w->error, sizeof w->error);
  if (code) return code;
  const int64_t prompt = 20;
  memcpy(sample, r->corpus.val, (size_t)prompt);
  return trainer_sample(r, (uint8_t *)sample, prompt, SAMPLE_BYTES, w->error, sizeof w->error);
}

static int finish(struct watch *w) {
  static const char *const name[TRAINER_TIME_COUNT] = {"dense products", "attention", "experts",
                                                       "norms and loss", "optimizer"};
  struct trainer *r = w->trainer;
  char sample[SAMPLE_BYTES + 32] = "", title[128];
  double seconds[TRAINER_TIME_COUNT];
  const int code = last_words(w, sample);
  if (code) return code;
  memcpy(seconds, r->model->seconds, sizeof r->model->seconds);
  seconds[TRAINER_TIME_OPTIMIZER] = r->optimizer_seconds;
  snprintf(title, sizeof title, "moeblas train, preset %s, seed %lld, experts on %s in %s",
           r->settings.preset, (long long)r->settings.seed, trainer_backend(r), trainer_dtype(r));
  const struct report_summary s = {.ngram2_bpb = w->ngram2,
                                   .ngram4_bpb = w->ngram4,
                                   .train_bpb = w->train_bpb,
                                   .val_bpb = w->val_bpb,
                                   .tokens_per_s = speed(w),
                                   .seconds = omp_get_wtime() - w->began,
                                   .steps = r->step,
                                   .params = model_params(&r->settings.model),
                                   .active_params = model_active_params(&r->settings.model),
                                   .sample = sample[0] ? sample : NULL,
                                   .op_name = name,
                                   .op_seconds = seconds,
                                   .ops = TRAINER_TIME_COUNT,
                                   .title = title};
  const int failed = report_finish(w->report, &s, w->error, sizeof w->error);
  if (failed) return failed;
  print_summary(w, &s);
  if (r->step < r->settings.steps)
    fprintf(w->file, "\nstopped after step %lld of %lld; --resume goes on from there\n", (long long)r->step,
            (long long)r->settings.steps);
  if (r->settings.json) print_json(r, &s);
  return interrupted ? EXIT_INTERRUPTED : 0;
}

/* ---- the start ------------------------------------------------------------------------------------------------- */

static int check_text(const struct trainer *r, char *error, size_t error_bytes) {
  const int64_t length = r->settings.model.sequence;
  if ((int64_t)r->corpus.train_bytes > 2 * length && batch_windows(&r->corpus, length) > 0) return 0;
  return text_fail(EXIT_INPUT, error, error_bytes,
                   "the text has %zu bytes to train on and %zu held out; wanted more than %lld and %lld",
                   r->corpus.train_bytes, r->corpus.val_bytes, (long long)(2 * length), (long long)length);
}

/* Settings, text, model, and the state to start from. */
static int prepare(struct trainer *r, char *error, size_t error_bytes) {
  struct settings *s = &r->settings;
  struct checkpoint c;
  int code = corpus_load(&r->corpus, s->files, s->file_count, error, error_bytes);
  if (code) return code;
  if (s->resume) {
    code = checkpoint_open(&c, s->out, error, error_bytes);
    if (code) return code;
    code = trainer_adopt(r, &c, error, error_bytes);
  } else if (!settings_resolve(s, error, error_bytes)) {
    return EXIT_INPUT;
  }
  if (!code) code = check_text(r, error, error_bytes);
  if (!code) code = trainer_open(r, 1, error, error_bytes);
  if (!code && s->resume) code = trainer_load(r, &c, 1, error, error_bytes);
  if (!code && !s->resume) model_init(r->model, (uint64_t)s->seed);
  if (s->resume) checkpoint_close(&c);
  return code;
}

static int train(struct trainer *r, char *error, size_t error_bytes) {
  struct watch w = {.trainer = r, .began = omp_get_wtime(), .train_bpb = NAN, .val_bpb = NAN};
  int code = prepare(r, error, error_bytes);
  if (code) return code;
  const struct settings *s = &r->settings;
  w.report =
      report_open(s->out, (int)s->model.layers, (int)s->model.experts, (int)r->step, error, error_bytes);
  if (!w.report) return EXIT_SYSTEM;
  w.file = s->json ? stderr : stdout;
  w.live = progress_is_live(w.file);
  w.first_step = r->step;
  catch_signals();
  w.ngram2 = ngram_bits_per_byte(&r->corpus, 2);
  w.ngram4 = ngram_bits_per_byte(&r->corpus, 4);
  fprintf(w.file, "%.2f MB of text, %lld parameters; n-gram of order 2: %.3f, of order 4: %.3f bits/byte\n",
          (double)(r->corpus.train_bytes + r->corpus.val_bytes) / 1e6, (long long)model_params(&s->model),
          w.ngram2, w.ngram4);
  code = loop(&w);
  progress_end(w.file, w.live);
  if (!code) code = finish(&w);
  report_close(w.report);
  if (code) snprintf(error, error_bytes, "%s", w.error);
  return code;
}

/* ---- --sample -------------------------------------------------------------------------------------------------- */

static int restore(struct trainer *r, char *error, size_t error_bytes) {
  struct checkpoint c;
  int code = checkpoint_open(&c, r->settings.out, error, error_bytes);
  if (code) return code;
  code = trainer_adopt(r, &c, error, error_bytes);
  if (!code) code = trainer_open(r, 0, error, error_bytes);
  if (!code) code = trainer_load(r, &c, 0, error, error_bytes);
  checkpoint_close(&c);
  return code;
}

static int continue_text(struct trainer *r, char *error, size_t error_bytes) {
  const struct settings *s = &r->settings;
  const int64_t have = (int64_t)strlen(s->sample), more = s->sample_bytes;
  if (have == 0) return text_fail(EXIT_INPUT, error, error_bytes, "--sample: the text to continue is empty");
  int code = restore(r, error, error_bytes);
  if (code) return code;
  uint8_t *text = malloc((size_t)(have + more));
  if (!text)
    return text_fail(EXIT_SYSTEM, error, error_bytes, "not enough memory for %lld bytes", (long long)more);
  memcpy(text, s->sample, (size_t)have);
  code = trainer_sample(r, text, have, more, error, error_bytes);
  if (!code) {
    sample_print(stdout, text, have + more);
    putchar('\n');
  }
  free(text);
  return code;
}

int cmd_train(int argc, char **argv) {
  struct trainer r = {.step = 0};
  char error[ERROR_BYTES] = "";
  int code = settings_parse(&r.settings, argc, argv);
  if (code != CLI_GO_ON) return code;
  code = r.settings.sample ? continue_text(&r, error, sizeof error) : train(&r, error, sizeof error);
  trainer_close(&r);
  if (code && code != EXIT_INTERRUPTED) return cli_fail("train", code, "%s", error);
  return cli_finish("train", code);
}
