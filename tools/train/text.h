/* SPDX-License-Identifier: Apache-2.0
 *
 * Bytes and sentences: what the files of this folder share. */
#pragma once

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum {
  EXIT_INPUT = 2,
  EXIT_SYSTEM = 3
}; /* bad input; input/output or memory */

/* Writes the sentence and returns `code`. */
int text_fail(int code, char *error, size_t error_bytes, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* Length of the valid UTF-8 sequence at p, 0 if there is none (overlong forms and surrogates are not valid). */
size_t text_utf8(const uint8_t *p, size_t bytes);

/* A name from a file made safe to print: anything but printable ASCII as \xNN, long ones cut with "...". Returns out. */
const char *text_escape(char *out, size_t out_bytes, const char *name);

/* As the text of an HTML element or attribute; bytes that HTML cannot hold become U+FFFD. */
void text_html(FILE *f, const char *text);
