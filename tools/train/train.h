/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* `moeblas train`: argv[0] is "train". Returns the exit code; 130 after an interrupt. */
int cmd_train(int argc, char **argv);
