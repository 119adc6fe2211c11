/* SPDX-License-Identifier: Apache-2.0
 *
 * Options from a table, error sentences, colour and a JSON stream. See cli.h. */
#include "cli.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int cli_fail(const char *command, int code, const char *format, ...) {
  va_list list;
  fprintf(stderr, "moeblas %s: ", command);
  va_start(list, format);
  vfprintf(stderr, format, list);
  va_end(list);
  fputc('\n', stderr);
  return code;
}

int cli_fail_status(const char *command, moe_status status) {
  const bool refused = status == MOE_ERROR_ARGUMENT || status == MOE_ERROR_UNSUPPORTED;
  return cli_fail(command, refused ? CLI_USAGE : CLI_IO, "%s", moe_last_error());
}

int cli_finish(const char *command, int code) {
  if (fflush(stdout) == 0 && !ferror(stdout)) return code;
  return cli_fail(command, CLI_IO, "stdout could not be written: %s", strerror(errno));
}

/* ---- options --------------------------------------------------------------------------------------------------- */

static int print_help(const struct command *command) {
  printf("usage: moeblas %s [OPTION...]%s%s\n\n%s\n", command->name, command->arguments ? " " : "",
         command->arguments ? command->arguments : "", command->about);
  printf("\noptions:\n");
  for (int i = 0; i < command->option_count; i++) {
    const struct option *o = &command->options[i];
    char left[64];
    snprintf(left, sizeof left, "%s %s", o->name, o->value ? o->value : "");
    printf("  %-20s %s\n", left, o->help);
  }
  printf("  %-20s %s\n", "--help", "this text");
  if (command->more) command->more();
  printf(
      "\nexit status: 0 ok, 1 a check failed, 2 wrong usage or refused input, 3 input, output or memory\n");
  return cli_finish(command->name, CLI_OK);
}

static const struct option *find_option(const struct command *command, const char *name, size_t length) {
  for (int i = 0; i < command->option_count; i++) {
    const struct option *o = &command->options[i];
    if (strlen(o->name) == length && memcmp(o->name, name, length) == 0) return o;
  }
  return NULL;
}

static bool store_integer(const struct option *o, const char *text) {
  char *end;
  errno = 0;
  const long long value = strtoll(text, &end, 10);
  if (errno || end == text || *end || (double)value < o->min || (double)value > o->max) return false;
  *(int64_t *)o->target = value;
  return true;
}

static bool store_real(const struct option *o, const char *text) {
  char *end;
  const double value = strtod(text, &end);
  if (end == text || *end || !(value >= o->min && value <= o->max)) return false;
  *(double *)o->target = value;
  return true;
}

static int store(const struct command *command, const struct option *o, const char *text) {
  if (o->kind == OPTION_TEXT) {
    *(const char **)o->target = text;
    return CLI_GO_ON;
  }
  if (o->kind == OPTION_INTEGER ? store_integer(o, text) : store_real(o, text)) return CLI_GO_ON;
  return cli_fail(command->name, CLI_USAGE, "%s '%s': wants %s from %.10g to %.10g", o->name, text,
                  o->kind == OPTION_INTEGER ? "a whole number" : "a number", o->min, o->max);
}

/* One option at argv[*i]; its value is what follows '=', or the next argument. */
static int take_option(const struct command *command, int argc, char **argv, int *i) {
  const char *argument = argv[*i];
  const size_t length = strcspn(argument, "=");
  const struct option *o = find_option(command, argument, length);
  if (o == NULL)
    return cli_fail(command->name, CLI_USAGE, "%.*s is not an option; moeblas %s --help lists them",
                    (int)(length < 200 ? length : 200), argument, command->name);
  if (o->kind == OPTION_FLAG) {
    if (argument[length])
      return cli_fail(command->name, CLI_USAGE, "%s takes no value, found '%s'", o->name,
                      argument + length + 1);
    *(bool *)o->target = true;
    return CLI_GO_ON;
  }
  if (argument[length]) return store(command, o, argument + length + 1);
  if (*i + 1 >= argc) return cli_fail(command->name, CLI_USAGE, "%s: wants a value (%s)", o->name, o->value);
  return store(command, o, argv[++*i]);
}

int cli_parse(const struct command *command, int argc, char **argv, int *positional) {
  bool options_end = false;
  *positional = 0;
  for (int i = 1; i < argc; i++) {
    if (options_end || argv[i][0] != '-') {
      if (command->arguments == NULL)
        return cli_fail(command->name, CLI_USAGE, "takes no argument, found '%s'", argv[i]);
      argv[++*positional] = argv[i];
    } else if (strcmp(argv[i], "--") == 0) {
      options_end = true;
    } else if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
      return print_help(command);
    } else {
      const int code = take_option(command, argc, argv, &i);
      if (code != CLI_GO_ON) return code;
    }
  }
  return CLI_GO_ON;
}

/* ---- names and colour ------------------------------------------------------------------------------------------ */

static const char *const backend_names[] = {
    [MOE_BACKEND_AUTO] = "auto", [MOE_BACKEND_CPU] = "cpu", [MOE_BACKEND_CUDA] = "cuda"};

bool cli_backend(const char *name, moe_backend *backend) {
  for (int i = 0; i < 3; i++) {
    if (name && strcmp(name, backend_names[i])) continue;
    *backend = (moe_backend)i;
    return true;
  }
  return false;
}

const char *cli_backend_name(moe_backend backend) {
  return (unsigned)backend < 3 ? backend_names[backend] : "unknown";
}

int cli_context(const char *command, const char *name, int64_t threads, moe_context **ctx) {
  moe_backend backend;
  if (!cli_backend(name, &backend))
    return cli_fail(command, CLI_USAGE, "--backend %s: wants auto, cpu or cuda", name);
  if (threads && backend == MOE_BACKEND_AUTO) backend = MOE_BACKEND_CPU;
  const moe_status status = moe_context_create(ctx, backend, (int)threads);
  return status == MOE_OK ? CLI_GO_ON : cli_fail_status(command, status);
}

/* https://no-color.org: set and not empty means no. */
static bool colour(FILE *stream) {
  const char *off = getenv("NO_COLOR");
  const char *terminal = getenv("TERM");
  if (off && *off) return false;
  return terminal && strcmp(terminal, "dumb") && isatty(fileno(stream));
}

const char *cli_green(FILE *stream) { return colour(stream) ? "\033[32m" : ""; }
const char *cli_red(FILE *stream) { return colour(stream) ? "\033[31m" : ""; }
const char *cli_reset(FILE *stream) { return colour(stream) ? "\033[0m" : ""; }

/* ---- JSON ------------------------------------------------------------------------------------------------------ */

/* Bytes from 0x80 on pass as they are: the tool only ever prints text that came in as UTF-8 or is its own. */
static void json_quoted(FILE *stream, const char *text) {
  fputc('"', stream);
  for (const unsigned char *c = (const unsigned char *)text; *c; c++) {
    if (*c == '"' || *c == '\\')
      fprintf(stream, "\\%c", *c);
    else if (*c < 0x20)
      fprintf(stream, "\\u%04x", *c);
    else
      fputc(*c, stream);
  }
  fputc('"', stream);
}

static void json_lead(struct json *json, const char *key) {
  if (json->comma) fputc(',', json->stream);
  if (json->depth) fprintf(json->stream, "\n%*s", 2 * json->depth, "");
  if (key) {
    json_quoted(json->stream, key);
    fputs(": ", json->stream);
  }
  json->comma = true;
}

void json_open(struct json *json, const char *key, char bracket) {
  if (json->stream == NULL) return;
  json_lead(json, key);
  fputc(bracket, json->stream);
  json->depth++;
  json->comma = false;
}

void json_close(struct json *json, char bracket) {
  if (json->stream == NULL) return;
  json->depth--;
  if (json->comma) fprintf(json->stream, "\n%*s", 2 * json->depth, "");
  fputc(bracket, json->stream);
  json->comma = true;
  if (json->depth == 0) fputc('\n', json->stream);
}

void json_text(struct json *json, const char *key, const char *value) {
  if (json->stream == NULL) return;
  json_lead(json, key);
  if (value)
    json_quoted(json->stream, value);
  else
    fputs("null", json->stream);
}

void json_integer(struct json *json, const char *key, int64_t value) {
  if (json->stream == NULL) return;
  json_lead(json, key);
  fprintf(json->stream, "%lld", (long long)value);
}

void json_real(struct json *json, const char *key, double value) {
  if (json->stream == NULL) return;
  json_lead(json, key);
  if (isfinite(value))
    fprintf(json->stream, "%.9g", value);
  else
    fputs("null", json->stream);
}

void json_bool(struct json *json, const char *key, bool value) {
  if (json->stream == NULL) return;
  json_lead(json, key);
  fputs(value ? "true" : "false", json->stream);
}
