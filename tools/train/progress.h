/* SPDX-License-Identifier: Apache-2.0
 *
 * One line of progress that rewrites itself on a terminal and is an ordinary line in a file or pipe. */
#pragma once

#include <stdio.h>

int progress_is_live(FILE *f); /* a terminal that can move its cursor */
void progress_line(FILE *f, int live, const char *text);
void progress_end(FILE *f, int live); /* leaves the last line standing */
