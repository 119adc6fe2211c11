/* SPDX-License-Identifier: Apache-2.0
 *
 * Keeps what is printed between capture_begin and capture_end. The streams are libc's own: they are exchanged, so that what
 * prints needs no knowledge of it. */
#pragma once

#include <stdio.h>
#include <stdlib.h>

struct capture {
  char *out, *err; /* what went to stdout and stderr */
  size_t out_bytes, err_bytes;
  FILE *streams[2]; /* those of before */
};

static inline void capture_begin(struct capture *c) {
  *c = (struct capture){.streams = {stdout, stderr}};
  stdout = open_memstream(&c->out, &c->out_bytes);
  stderr = open_memstream(&c->err, &c->err_bytes);
}

static inline void capture_end(struct capture *c) {
  fclose(stdout);
  fclose(stderr);
  stdout = c->streams[0];
  stderr = c->streams[1];
}

static inline void capture_free(struct capture *c) {
  free(c->out);
  free(c->err);
}
