/* SPDX-License-Identifier: Apache-2.0
 *
 * The text to train on: the bytes of some files, split into a training and a held-out part.
 * The files are joined in the order given and cut into blocks of 8 KiB (a tenth of the whole when that is less); every
 * tenth block is held out, so both parts are the same kind of text. Invariant: each byte is in exactly one part. */
#pragma once

#include <stddef.h>
#include <stdint.h>

struct corpus {
  uint8_t *train;
  size_t train_bytes;
  uint8_t *val;
  size_t val_bytes;
};

/* count 0: the text files of the source tree that holds the executable or else the current folder, sorted by name.
 * Returns 0, 2 (a file that is no text, or too little of it) or 3 (read error, memory), with one sentence in error. */
int corpus_load(struct corpus *c, char *const *files, int count, char *error, size_t error_bytes);
void corpus_free(struct corpus *c);

/* Of both parts and their lengths: equal for the same text wherever it is loaded. */
uint64_t corpus_hash(const struct corpus *c);
