/* SPDX-License-Identifier: Apache-2.0
 *
 * Presets and the command line of `moeblas train`. */
#include "settings.h"

#include <stdio.h>
#include <string.h>

#include "../cli.h"
#include "text.h"

struct preset {
  const char *name;
  struct model_config model;
  int64_t sequences;
  int64_t steps;
  double rate;
};

/* The first is the default: 4 minutes on two cores. */
static const struct preset presets[] = {
    {.name = "tiny",
     .model = {.layers = 4, .dim = 128, .heads = 4, .experts = 8, .topk = 2, .inter = 128, .sequence = 256},
     .sequences = 8,
     .steps = 2000,
     .rate = 3e-3},
    {.name = "small",
     .model = {.layers = 8, .dim = 256, .heads = 8, .experts = 16, .topk = 2, .inter = 256, .sequence = 512},
     .sequences = 8,
     .steps = 6000,
     .rate = 1.5e-3},
};

static void more(void) {
  printf("\nAn interrupt (Ctrl-C) finishes the step, saves, and exits with status 130; --resume goes on from "
         "there.\n");
}

int settings_parse(struct settings *s, int argc, char **argv) {
  *s = (struct settings){.out = "run", .steps = -1, .stop = -1, .seed = -1, .sample_bytes = 200};
  bool data = false;
  const struct option options[] = {
      {"--data", "FILE...", "text to train on (default: the source tree of moeblas)", OPTION_FLAG, &data, 0,
       0},
      {"--out", "DIR", "where checkpoint, log and report go (default run)", OPTION_TEXT, &s->out, 0, 0},
      {"--preset", "NAME", "tiny (default, about 4 minutes on two cores) or small", OPTION_TEXT, &s->preset,
       0, 0},
      {"--balance", "HOW", "even load by: loss (default) or bias", OPTION_TEXT, &s->balance, 0, 0},
      {"--steps", "N", "steps of the whole schedule (default: the preset's)", OPTION_INTEGER, &s->steps, 1,
       1e9},
      {"--stop", "N", "save and stop after step N of them", OPTION_INTEGER, &s->stop, 1, 1e9},
      {"--minutes", "M", "save and stop after M minutes (default: never)", OPTION_REAL, &s->minutes, 0, 1e6},
      {"--resume", NULL, "go on from DIR/checkpoint.safetensors, on the same back end to the same bits",
       OPTION_FLAG, &s->resume, 0, 0},
      {"--seed", "N", "of first values, order of the data, sampling (default 1)", OPTION_INTEGER, &s->seed, 0,
       1e15},
      {"--threads", "N", "0: as many as there are (default); changes no bit", OPTION_INTEGER, &s->threads, 0,
       1024},
      {"--backend", "NAME", "of the MoE layers: auto (default: cuda where there is a GPU), cpu or cuda",
       OPTION_TEXT, &s->backend, 0, 0},
      {"--dtype", "NAME", "of the MoE layers: fp32 (default) or bf16", OPTION_TEXT, &s->dtype, 0, 0},
      {"--json", NULL, "last line of stdout: one JSON object; the rest to stderr", OPTION_FLAG, &s->json, 0,
       0},
      {"--sample", "TEXT", "do not train: continue TEXT by the checkpoint in DIR", OPTION_TEXT, &s->sample, 0,
       0},
      {"--tokens", "N", "bytes that --sample adds (default 200)", OPTION_INTEGER, &s->sample_bytes, 1, 1e6},
  };
  const struct command command = {
      .name = "train",
      .arguments = "[--data FILE...]",
      .about = "Trains a small byte-level MoE transformer and compares it with n-gram models.",
      .more = more,
      .options = options,
      .option_count = sizeof options / sizeof *options};
  const int code = cli_parse(&command, argc, argv, &s->file_count);
  if (code != CLI_GO_ON) return code;
  if (data && s->file_count == 0) return cli_fail("train", CLI_USAGE, "--data wants files after it");
  if (!data && s->file_count) return cli_fail("train", CLI_USAGE, "'%s': files come after --data", argv[1]);
  s->files = argv + 1;
  return CLI_GO_ON;
}

static const struct preset *find_preset(const char *name) {
  for (size_t i = 0; i < sizeof presets / sizeof *presets; i++)
    if (name == NULL || strcmp(name, presets[i].name) == 0) return presets + i;
  return NULL;
}

bool settings_resolve(struct settings *s, char *error, size_t error_bytes) {
  const struct preset *p = find_preset(s->preset);
  if (p == NULL) return text_fail(0, error, error_bytes, "--preset '%s': wants tiny or small", s->preset);
  const bool bias = s->balance && strcmp(s->balance, "bias") == 0;
  if (s->balance && !bias && strcmp(s->balance, "loss"))
    return text_fail(0, error, error_bytes, "--balance '%s': wants loss or bias", s->balance);
  const bool rounded = s->dtype && strcmp(s->dtype, "bf16") == 0;
  if (s->dtype && !rounded && strcmp(s->dtype, "fp32"))
    return text_fail(0, error, error_bytes, "--dtype '%s': wants fp32 or bf16", s->dtype);
  s->preset = p->name;
  s->balance = bias ? "bias" : "loss";
  s->model = p->model;
  s->model.balance = bias ? BALANCE_BIAS : BALANCE_LOSS;
  s->model.dtype = rounded ? MOE_BF16 : MOE_FP32;
  s->sequences = p->sequences;
  s->rate = p->rate;
  if (s->steps < 0) s->steps = p->steps;
  if (s->seed < 0) s->seed = 1;
  return true;
}

void settings_describe(const struct settings *s, char *text, size_t bytes) {
  const struct model_config *c = &s->model;
  snprintf(text, bytes, "layers=%d dim=%d heads=%d experts=%d topk=%d inter=%d sequence=%d batch=%d rate=%g",
           (int)c->layers, (int)c->dim, (int)c->heads, (int)c->experts, (int)c->topk, (int)c->inter,
           (int)c->sequence, (int)s->sequences, s->rate);
}
