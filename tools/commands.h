/* SPDX-License-Identifier: Apache-2.0
 * The subcommands. Each gets its name as argv[0] and returns the exit status of the tool. */
#pragma once

int cmd_info(int argc, char **argv);
int cmd_check(int argc, char **argv);
int cmd_bench(int argc, char **argv);
int cmd_train(int argc, char **argv);
