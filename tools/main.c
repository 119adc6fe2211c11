/* SPDX-License-Identifier: Apache-2.0
 *
 * The command line of moeblas: finds the subcommand and hands it what follows. */
#include <stdio.h>
#include <string.h>

#include "cli.h"
#include "commands.h"

static int cmd_version(int argc, char **argv) {
  bool as_json = false;
  const struct option options[] = {
      {"--json", NULL, "one JSON document on stdout", OPTION_FLAG, &as_json, 0, 0}};
  const struct command command = {"version", NULL, "Prints the version of the library.", NULL, options, 1};
  int count;
  const int code = cli_parse(&command, argc, argv, &count);
  if (code != CLI_GO_ON) return code;
  struct json json = {.stream = as_json ? stdout : NULL};
  json_open(&json, NULL, '{');
  json_text(&json, "version", moe_version());
  json_close(&json, '}');
  if (!as_json) printf("moeblas %s\n", moe_version());
  return cli_finish("version", CLI_OK);
}

static int cmd_help(int argc, char **argv);

static const struct subcommand {
  const char *name;
  const char *about;
  int (*run)(int argc, char **argv);
} subcommands[] = {
    {"info", "what this build and this machine can do; the presets", cmd_info},
    {"check", "compare the library with the oracle on problems", cmd_check},
    {"bench", "time problems against the limits of the machine", cmd_bench},
    {"train", "train a small language model of mixture-of-experts layers", cmd_train},
    {"version", "print the version", cmd_version},
    {"help", "explain a command: moeblas help check", cmd_help},
};
enum {
  SUBCOMMANDS = sizeof subcommands / sizeof *subcommands
};

static const struct subcommand *find_subcommand(const char *name) {
  if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0) name = "help";
  if (strcmp(name, "--version") == 0) name = "version";
  for (int i = 0; i < SUBCOMMANDS; i++)
    if (strcmp(name, subcommands[i].name) == 0) return &subcommands[i];
  return NULL;
}

static void print_overview(FILE *stream) {
  fprintf(stream, "usage: moeblas COMMAND [ARGUMENT...]\n\n");
  for (int i = 0; i < SUBCOMMANDS; i++)
    fprintf(stream, "  %-10s %s\n", subcommands[i].name, subcommands[i].about);
  fprintf(
      stream,
      "\nexit status: 0 ok, 1 a check failed, 2 wrong usage or refused input, 3 input, output or memory\n");
}

static void list_subcommands(void) {
  printf("\ncommands:\n");
  for (int i = 0; i < SUBCOMMANDS; i++) printf("  %-20s %s\n", subcommands[i].name, subcommands[i].about);
}

static int help_as_json(void) {
  struct json json = {.stream = stdout};
  json_open(&json, NULL, '{');
  for (int i = 0; i < SUBCOMMANDS; i++) json_text(&json, subcommands[i].name, subcommands[i].about);
  json_close(&json, '}');
  return cli_finish("help", CLI_OK);
}

static int cmd_help(int argc, char **argv) {
  bool as_json = false;
  const struct option options[] = {
      {"--json", NULL, "the list of commands as JSON", OPTION_FLAG, &as_json, 0, 0}};
  const struct command command = {"help", "[COMMAND]", "Explains a command.", list_subcommands, options, 1};
  int count;
  const int code = cli_parse(&command, argc, argv, &count);
  if (code != CLI_GO_ON) return code;
  if (count > 1) return cli_fail("help", CLI_USAGE, "wants one command, found %d", count);
  if (as_json && count) return cli_fail("help", CLI_USAGE, "--json lists the commands, and takes none");
  if (as_json) return help_as_json();
  if (count == 0) {
    print_overview(stdout);
    return cli_finish("help", CLI_OK);
  }
  const struct subcommand *found = find_subcommand(argv[1]);
  if (found == NULL) return cli_fail("help", CLI_USAGE, "'%.64s' is not a command", argv[1]);
  char help[] = "--help";
  char *arguments[] = {argv[1], help, NULL};
  return found->run(2, arguments);
}

int main(int argc, char **argv) {
  if (argc < 2) {
    print_overview(stderr);
    return CLI_USAGE;
  }
  const struct subcommand *found = find_subcommand(argv[1]);
  if (found) return found->run(argc - 1, argv + 1);
  fprintf(stderr, "moeblas: '%.64s' is not a command; moeblas help lists them\n", argv[1]);
  return CLI_USAGE;
}
