/* SPDX-License-Identifier: Apache-2.0
 *
 * Which bytes a step reads. A function of (seed, step) alone, so that a resumed run reads on where it would have. */
#pragma once

#include "corpus.h"

/* input [sequences, length] and target, the same one byte later. Windows do not overlap within an epoch; each epoch
 * shifts and permutes them anew. Needs train_bytes > 2 length. */
void batch_train(const struct corpus *c, uint64_t seed, int64_t step, int64_t sequences, int64_t length,
                 uint8_t *input, uint8_t *target);

/* Every stride-th held-out window of batch_windows, from the first-th of these on. */
int64_t batch_windows(const struct corpus *c, int64_t length);
void batch_val(const struct corpus *c, int64_t first, int64_t stride, int64_t sequences, int64_t length,
               uint8_t *input, uint8_t *target);
