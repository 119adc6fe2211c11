/* SPDX-License-Identifier: Apache-2.0
 *
 * moeblas info: what this build and this machine can do, the presets, and what a plan would need. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "commands.h"
#include "presets.h"

/* ---- presets --------------------------------------------------------------------------------------------------- */

static void print_preset(void *context, const char *name, const struct problem *problem, const char *notes) {
  struct json *json = context;
  char text[PROBLEM_TEXT];
  problem_print(problem, text);
  json_open(json, NULL, '{');
  json_text(json, "name", name);
  json_text(json, "problem", text);
  json_text(json, "notes", notes);
  json_close(json, '}');
  if (json->stream == NULL) printf("%-20s %s%s%s\n", name, text, *notes ? "  # " : "", notes);
}

static void skip_preset(void *context, const char *name, const struct problem *problem, const char *notes) {
  (void)context, (void)name, (void)problem, (void)notes;
}

static int info_presets(struct json *json) {
  char error[PROBLEM_ERROR];
  /* The whole file is checked first, so that a malformed one leaves nothing on stdout. */
  if (!presets_walk(skip_preset, NULL, error, sizeof error)) return cli_fail("info", CLI_IO, "%s", error);
  json_open(json, NULL, '{');
  json_open(json, "presets", '[');
  if (!presets_walk(print_preset, json, error, sizeof error)) return cli_fail("info", CLI_IO, "%s", error);
  json_close(json, ']');
  json_close(json, '}');
  return cli_finish("info", CLI_OK);
}

/* ---- the build and the machine --------------------------------------------------------------------------------- */

static void info_backend(struct json *json, moe_backend backend) {
  moe_context *ctx = NULL;
  const bool available =
      moe_backend_available(backend) == MOE_OK && moe_context_create(&ctx, backend, 0) == MOE_OK;
  const int units = moe_context_units(ctx);
  json_open(json, NULL, '{');
  json_text(json, "name", cli_backend_name(backend));
  json_bool(json, "available", available);
  json_integer(json, "units", units);
  json_text(json, "why_not", available ? NULL : moe_last_error());
  json_close(json, '}');
  if (json->stream == NULL && available)
    printf("back end    %s: %d %s\n", cli_backend_name(backend), units,
           backend == MOE_BACKEND_CPU ? "threads" : "multiprocessors");
  if (json->stream == NULL && !available)
    printf("back end    %s: %s\n", cli_backend_name(backend), moe_last_error());
  moe_context_destroy(ctx);
}

/* What Linux says after "key :" for the first processor, a blank behind; "" where it says nothing. */
static void processor_line(const char *key, char *value, size_t bytes) {
  FILE *file = fopen("/proc/cpuinfo", "r");
  char line[8192];
  value[0] = '\0';
  while (file && fgets(line, sizeof line, file)) {
    const char *colon = strchr(line, ':');
    if (colon == NULL || strncmp(line, key, strlen(key))) continue;
    snprintf(value, bytes, "%s ", colon + 1 + strspn(colon + 1, " "));
    value[strcspn(value, "\n")] = ' ';
    break;
  }
  if (file) fclose(file);
}

/* Goes with every number that is measured here. */
static void info_processor(struct json *json) {
  static const char *const sets[] = {" avx2 ", " avx512bw "};
  const char *chosen = getenv("MOE_CPU_ISA");
  char name[256], flags[8192];
  processor_line("model name", name, sizeof name);
  for (size_t end = strlen(name); end && name[end - 1] == ' '; end--) name[end - 1] = '\0';
  processor_line("flags", flags, sizeof flags);
  json_text(json, "processor", name);
  json_bool(json, "avx2", strstr(flags, sets[0]) != NULL);
  json_bool(json, "avx512", strstr(flags, sets[1]) != NULL);
  json_text(json, "MOE_CPU_ISA", chosen);
  if (json->stream) return;
  printf("processor   %s\n", name);
  printf("has         base%s%s\n", strstr(flags, sets[0]) ? " avx2" : "",
         strstr(flags, sets[1]) ? " avx512" : "");
  if (chosen) printf("MOE_CPU_ISA %s\n", chosen);
}

static void info_formats(struct json *json) {
  json_open(json, "dtypes", '[');
  if (json->stream == NULL) printf("dtypes     ");
  for (int dtype = MOE_FP32; moe_dtype_name((moe_dtype)dtype); dtype++) {
    json_text(json, NULL, moe_dtype_name((moe_dtype)dtype));
    if (json->stream == NULL) printf(" %s", moe_dtype_name((moe_dtype)dtype));
  }
  json_close(json, ']');
}

static void info_activations(struct json *json) {
  json_open(json, "activations", '[');
  for (int gated = 0; gated < 2; gated++) {
    if (json->stream == NULL) printf("\n%s", gated ? "gated      " : "not gated  ");
    for (int kind = 0; kind < MOE_ACT_COUNT; kind++) {
      const char *name = moe_activation_name((moe_activation)kind, gated);
      json_text(json, NULL, name);
      if (json->stream == NULL) printf(" %s", name);
    }
  }
  if (json->stream == NULL) printf("\n");
  json_close(json, ']');
}

static int info_build(struct json *json) {
  json_open(json, NULL, '{');
  json_text(json, "version", moe_version());
  if (json->stream == NULL) printf("moeblas     %s\n", moe_version());
  info_processor(json);
  json_open(json, "backends", '[');
  info_backend(json, MOE_BACKEND_CPU);
  info_backend(json, MOE_BACKEND_CUDA);
  json_close(json, ']');
  info_formats(json);
  info_activations(json);
  json_close(json, '}');
  return cli_finish("info", CLI_OK);
}

/* ---- the plan of a problem ------------------------------------------------------------------------------------- */

/* max(R H, 3 R F) elements: what the transient workspace is meant to need beside the maps. */
static int64_t workspace_aim(const struct problem *p) {
  const moe_config *c = &p->config;
  const int64_t rows = p->tokens * c->topk, width = problem_width(p);
  return rows * (width > 3 * c->inter ? width : 3 * c->inter) * (int64_t)moe_dtype_bytes(c->dtype);
}

static int print_plan(struct json *json, const struct problem *p, const moe_plan *plan) {
  char text[2048], problem[PROBLEM_TEXT];
  const size_t length = moe_plan_describe(plan, p->tokens, text, sizeof text);
  if (length >= sizeof text) return cli_fail("info", CLI_IO, "the description takes %zu bytes", length);
  problem_print(p, problem);
  json_open(json, NULL, '{');
  json_text(json, "problem", problem);
  json_text(json, "plan", text);
  json_integer(json, "workspace_bytes", (int64_t)moe_plan_workspace(plan, p->tokens));
  json_integer(json, "saved_bytes", (int64_t)moe_plan_saved(plan, p->tokens));
  json_integer(json, "workspace_aim_bytes", workspace_aim(p));
  json_close(json, '}');
  if (json->stream == NULL)
    printf("problem    %s\n%saim        %lld bytes of workspace, max(R H, 3 R F) elements, and the maps\n",
           problem, text, (long long)workspace_aim(p));
  return cli_finish("info", CLI_OK);
}

static int info_plan(struct json *json, const char *text, const char *backend) {
  struct problem problem;
  moe_context *ctx = NULL;
  moe_plan *plan = NULL;
  char error[PROBLEM_ERROR];
  if (!problem_parse(text, &problem, error, sizeof error)) return cli_fail("info", CLI_USAGE, "%s", error);
  int code = cli_context("info", backend, 0, &ctx);
  if (code != CLI_GO_ON) return code;
  const moe_status status = moe_plan_create(&plan, ctx, &problem.config);
  code = status == MOE_OK ? print_plan(json, &problem, plan) : cli_fail_status("info", status);
  moe_plan_destroy(plan);
  moe_context_destroy(ctx);
  return code;
}

int cmd_info(int argc, char **argv) {
  bool as_json = false, presets = false;
  const char *plan = NULL, *backend = "auto";
  const struct option options[] = {
      {"--presets", NULL, "the layers of published models, as problems", OPTION_FLAG, &presets, 0, 0},
      {"--plan", "PROBLEM", "what a layer would do: its choices and its memory", OPTION_TEXT, &plan, 0, 0},
      {"--backend", "NAME", "of --plan: auto, cpu or cuda", OPTION_TEXT, &backend, 0, 0},
      {"--json", NULL, "one JSON document on stdout", OPTION_FLAG, &as_json, 0, 0}};
  const struct command command = {"info", NULL,    "Says what this build and this machine can do.",
                                  NULL,   options, sizeof options / sizeof *options};
  int count;
  const int code = cli_parse(&command, argc, argv, &count);
  if (code != CLI_GO_ON) return code;
  struct json json = {.stream = as_json ? stdout : NULL};
  if (plan && presets) return cli_fail("info", CLI_USAGE, "--plan and --presets exclude each other");
  if (plan) return info_plan(&json, plan, backend);
  return presets ? info_presets(&json) : info_build(&json);
}
