/* SPDX-License-Identifier: Apache-2.0
 *
 * Bytes and sentences. */
#include "text.h"

#include <string.h>

int text_fail(int code, char *error, size_t error_bytes, const char *format, ...) {
  va_list args;
  va_start(args, format);
  if (error_bytes > 0) vsnprintf(error, error_bytes, format, args);
  va_end(args);
  return code;
}

size_t text_utf8(const uint8_t *p, size_t bytes) {
  /* The second byte's range is what excludes overlong forms, surrogates and code points above 10FFFF (RFC 3629, 4). */
  if (bytes == 0) return 0;
  if (p[0] < 0x80) return 1;
  const size_t length = p[0] >= 0xf0 ? 4 : p[0] >= 0xe0 ? 3 : 2;
  if (p[0] < 0xc2 || p[0] > 0xf4 || bytes < length) return 0;
  const uint8_t low = p[0] == 0xe0 ? 0xa0 : p[0] == 0xf0 ? 0x90 : 0x80;
  const uint8_t high = p[0] == 0xed ? 0x9f : p[0] == 0xf4 ? 0x8f : 0xbf;
  if (p[1] < low || p[1] > high) return 0;
  for (size_t i = 2; i < length; i++)
    if ((p[i] & 0xc0) != 0x80) return 0;
  return length;
}

const char *text_escape(char *out, size_t out_bytes, const char *name) {
  const size_t room = sizeof "\\xNN..."; /* the longest that one byte and the cut can need, with the NUL */
  size_t used = 0;
  for (const uint8_t *p = (const uint8_t *)name; *p; p++) {
    if (out_bytes - used < room) {
      strcpy(out + used, "...");
      return out;
    }
    if (*p >= 0x20 && *p < 0x7f && *p != '\\')
      out[used++] = (char)*p;
    else
      used += (size_t)sprintf(out + used, "\\x%02x", *p);
  }
  out[used] = '\0';
  return out;
}

void text_html(FILE *f, const char *text) {
  const uint8_t *p = (const uint8_t *)text, *end = p + strlen(text);
  for (size_t length; p < end; p += length) {
    length = text_utf8(p, (size_t)(end - p));
    const char *entity = *p == '&'   ? "&amp;"
                         : *p == '<' ? "&lt;"
                         : *p == '>' ? "&gt;"
                         : *p == '"' ? "&quot;"
                                     : NULL;
    if (length == 0 || *p == 0x7f || (*p < 0x20 && *p != '\n' && *p != '\t')) {
      fputs("\xef\xbf\xbd", f);
      length = 1;
    } else if (entity) {
      fputs(entity, f);
    } else {
      fwrite(p, 1, length, f);
    }
  }
}
