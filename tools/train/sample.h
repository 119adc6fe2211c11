/* SPDX-License-Identifier: Apache-2.0
 *
 * Text from a model: each byte is drawn from the distribution that the model gives after the bytes before it. */
#pragma once

#include <stdio.h>

#include "model.h"

/* Appends `more` bytes to the `have` >= 1 bytes of text, the same for equal seeds. When the context is full the
 * model starts over from its last half. */
moe_status sample_text(struct model *m, uint8_t *text, int64_t have, int64_t more, uint64_t seed);

/* Prints it so that a terminal stays whole: what is not UTF-8 text, tab or newline as \xNN. */
void sample_print(FILE *file, const uint8_t *text, int64_t bytes);
