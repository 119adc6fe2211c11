/* SPDX-License-Identifier: Apache-2.0
 *
 * One step of training, validation, and the memory of a run. */
#include "trainer.h"

#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "../cli.h"
#include "optim.h"
#include "sample.h"
#include "text.h"

#define CLIP      1.0
#define DECAY     0.1f
#define WARMUP    20 /* 1/20 of the steps */
#define FLOOR     0.05
#define BIAS_RATE 1e-3f

static int status_code(moe_status status, char *error, size_t error_bytes) {
  if (status == MOE_OK) return 0;
  const int bad = status == MOE_ERROR_ARGUMENT || status == MOE_ERROR_UNSUPPORTED;
  return text_fail(bad ? EXIT_INPUT : EXIT_SYSTEM, error, error_bytes, "%s", moe_last_error());
}

/* The MoE layers go to the GPU where there is one; everything else is the CPU's, which is what --threads is about. */
static int open_contexts(struct trainer *r, char *error, size_t error_bytes) {
  moe_backend backend;
  if (!cli_backend(r->settings.backend, &backend))
    return text_fail(EXIT_INPUT, error, error_bytes, "--backend '%s': wants auto, cpu or cuda",
                     r->settings.backend);
  if (backend == MOE_BACKEND_AUTO && moe_backend_available(MOE_BACKEND_CUDA) == MOE_OK)
    backend = MOE_BACKEND_CUDA;
  moe_status status = moe_context_create(&r->ctx, MOE_BACKEND_CPU, (int)r->settings.threads);
  if (status == MOE_OK) omp_set_num_threads(moe_context_units(r->ctx));
  if (status == MOE_OK && backend == MOE_BACKEND_CUDA) status = moe_context_create(&r->device, backend, 0);
  return status_code(status, error, error_bytes);
}

const char *trainer_backend(const struct trainer *r) {
  return cli_backend_name(moe_context_backend(r->device ? r->device : r->ctx));
}

const char *trainer_dtype(const struct trainer *r) {
  return r->settings.model.dtype == MOE_BF16 ? "bf16" : "fp32";
}

int trainer_open(struct trainer *r, int training, char *error, size_t error_bytes) {
  const struct settings *s = &r->settings;
  const int64_t tokens = (training ? s->sequences : 1) * s->model.sequence;
  const int code = open_contexts(r, error, error_bytes);
  if (code) return code;
  r->model =
      model_create(r->ctx, r->device ? r->device : r->ctx, &s->model, tokens, training, error, error_bytes);
  if (!r->model) return EXIT_SYSTEM;
  if (!training) return 0;
  r->first = calloc((size_t)r->model->count, sizeof *r->first);
  r->second = calloc((size_t)r->model->count, sizeof *r->second);
  r->load = calloc((size_t)(s->model.layers * s->model.experts), sizeof *r->load);
  r->input = malloc((size_t)tokens);
  r->target = malloc((size_t)tokens);
  if (r->first && r->second && r->load && r->input && r->target) return 0;
  return text_fail(EXIT_SYSTEM, error, error_bytes, "not enough memory for the optimizer");
}

void trainer_close(struct trainer *r) {
  model_destroy(r->model);
  moe_context_destroy(r->device);
  moe_context_destroy(r->ctx);
  corpus_free(&r->corpus);
  free(r->first);
  free(r->second);
  free(r->load);
  free(r->input);
  free(r->target);
}

static void update(struct trainer *r) {
  struct model *m = r->model;
  struct adamw o = {.beta1 = 0.9f, .beta2 = 0.95f, .epsilon = 1e-8f, .rate = (float)r->rate};
  o.grad_scale = clip_scale(r->grad_norm, CLIP);
  o.step = r->step + 1;
  for (int i = 0; i < m->params; i++) {
    const struct param *p = m->param + i;
    o.decay = p->decay ? DECAY : 0;
    adamw_update(&o, m->value + p->offset, m->grad + p->offset, r->first + p->offset, r->second + p->offset,
                 p->count);
  }
}

int trainer_step(struct trainer *r, char *error, size_t error_bytes) {
  const struct settings *s = &r->settings;
  struct model *m = r->model;
  batch_train(&r->corpus, (uint64_t)s->seed, r->step, s->sequences, s->model.sequence, r->input, r->target);
  const moe_status status = model_gradient(m, r->input, r->target, s->sequences, s->model.sequence, &r->loss);
  if (status != MOE_OK) return status_code(status, error, error_bytes);
  const double began = omp_get_wtime();
  r->grad_norm = gradient_norm(m->grad, m->count);
  if (!isfinite(r->loss) || !isfinite(r->grad_norm))
    return text_fail(
        EXIT_SYSTEM, error, error_bytes,
        "step %lld: the loss is %g and its gradient %g, so training cannot go on; the last checkpoint stays",
        (long long)r->step + 1, r->loss, r->grad_norm);
  r->rate = learning_rate(r->step, s->steps, s->steps / WARMUP, s->rate, FLOOR * s->rate);
  update(r);
  for (int64_t l = 0; l < s->model.layers; l++)
    for (int64_t e = 0; e < s->model.experts; e++)
      r->load[l * s->model.experts + e] += (float)m->layer[l].counts[e];
  r->optimizer_seconds += omp_get_wtime() - began;
  r->step++;
  return status_code(model_rebalance(m, BIAS_RATE), error, error_bytes);
}

int trainer_validate(struct trainer *r, int64_t windows, double *bits, char *error, size_t error_bytes) {
  struct model *m = r->model;
  const int64_t length = r->settings.model.sequence, batch = r->settings.sequences;
  const int64_t stride =
      batch_windows(&r->corpus, length) / windows; /* a slice is spread over all of the text */
  double seconds[TIME_COUNT], sum = 0;
  memcpy(seconds, m->seconds, sizeof seconds);
  for (int64_t first = 0; first < windows; first += batch) {
    const int64_t sequences = windows - first < batch ? windows - first : batch;
    double loss = 0;
    batch_val(&r->corpus, first, stride, sequences, length, r->input, r->target);
    const moe_status status = model_loss(m, r->input, r->target, sequences, length, &loss);
    if (status != MOE_OK) return status_code(status, error, error_bytes);
    sum += loss * (double)sequences;
  }
  memcpy(m->seconds, seconds, sizeof seconds);
  *bits = sum / (double)windows / log(2);
  return 0;
}

int trainer_sample(struct trainer *r, uint8_t *text, int64_t have, int64_t more, char *error,
                   size_t error_bytes) {
  double seconds[TIME_COUNT];
  memcpy(seconds, r->model->seconds, sizeof seconds);
  const moe_status status = sample_text(r->model, text, have, more, (uint64_t)r->settings.seed);
  memcpy(r->model->seconds, seconds, sizeof seconds);
  return status_code(status, error, error_bytes);
}
