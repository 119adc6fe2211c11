/* SPDX-License-Identifier: Apache-2.0
 *
 * Sampling by temperature: a byte of probability p is drawn with weight p^(1/TEMPERATURE). */
#include "sample.h"

#include <math.h>

#include "../random.h"
#include "text.h"

#define TEMPERATURE 0.7

/* The first byte at which the running sum of weights passes `where` (0 to 1) of the whole. */
static uint8_t draw(const float *logits, double where) {
  double max = logits[0], sum = 0, passed = 0;
  for (int i = 1; i < MODEL_BYTES; i++) max = fmax(max, logits[i]);
  for (int i = 0; i < MODEL_BYTES; i++) sum += exp((logits[i] - max) / TEMPERATURE);
  for (int i = 0; i < MODEL_BYTES - 1; i++) {
    passed += exp((logits[i] - max) / TEMPERATURE);
    if (passed >= where * sum) return (uint8_t)i;
  }
  return MODEL_BYTES - 1;
}

moe_status sample_text(struct model *m, uint8_t *text, int64_t have, int64_t more, uint64_t seed) {
  const uint64_t stream = random_at(seed, 0x73616d706c65u);
  const int64_t sequence = m->config.sequence;
  int64_t read = sequence; /* bytes that the model has in its context */
  for (int64_t end = have; end < have + more; end++) {
    moe_status status;
    const float *logits = m->logits;
    if (read < sequence) {
      status = model_step(m, text[end - 1], read++);
    } else {
      read = end < sequence ? end : sequence / 2;
      status = model_forward(m, text + end - read, 1, read);
      logits += (read - 1) * MODEL_BYTES;
    }
    if (status != MOE_OK) return status;
    text[end] = draw(logits, random_uniform(stream, (uint64_t)(end - have)));
  }
  return MOE_OK;
}

void sample_print(FILE *file, const uint8_t *text, int64_t bytes) {
  for (int64_t i = 0; i < bytes;) {
    const size_t length = text_utf8(text + i, (size_t)(bytes - i));
    const int plain = length > 1 || (length == 1 && text[i] >= 0x20 && text[i] != 0x7f);
    if (plain || text[i] == '\n' || text[i] == '\t')
      fwrite(text + i, 1, length, file);
    else
      fprintf(file, "\\x%02x", text[i]);
    i += length > 0 ? (int64_t)length : 1;
  }
}
