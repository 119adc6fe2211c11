/* SPDX-License-Identifier: Apache-2.0
 *
 * Training windows are permuted by i -> (a i + b) mod windows with a coprime to windows: a permutation with no table. */
#include "batch.h"

#include <string.h>

#include "../random.h"

static void copy_window(const uint8_t *from, int64_t length, uint8_t *input, uint8_t *target) {
  memcpy(input, from, (size_t)length);
  memcpy(target, from + 1, (size_t)length);
}

static uint64_t common_divisor(uint64_t a, uint64_t b) {
  while (b) {
    const uint64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

/* Where the i-th window of all training starts. One window is given up to make room for the epoch's shift. */
static uint64_t window_start(const struct corpus *c, uint64_t seed, uint64_t i, uint64_t length) {
  const uint64_t windows = (c->train_bytes - 1) / length - 1;
  const uint64_t epoch = random_at(random_at(seed, 0x6461746175u), i / windows);
  uint64_t stride = 1 + random_at(epoch, 0) % windows;
  while (common_divisor(stride, windows) != 1) stride++;
  const uint64_t place = (stride % windows * (i % windows) + random_at(epoch, 1) % windows) % windows;
  return random_at(epoch, 2) % length + place * length;
}

void batch_train(const struct corpus *c, uint64_t seed, int64_t step, int64_t sequences, int64_t length,
                 uint8_t *input, uint8_t *target) {
  for (int64_t s = 0; s < sequences; s++) {
    const uint64_t start = window_start(c, seed, (uint64_t)(step * sequences + s), (uint64_t)length);
    copy_window(c->train + start, length, input + s * length, target + s * length);
  }
}

int64_t batch_windows(const struct corpus *c, int64_t length) { return ((int64_t)c->val_bytes - 1) / length; }

void batch_val(const struct corpus *c, int64_t first, int64_t stride, int64_t sequences, int64_t length,
               uint8_t *input, uint8_t *target) {
  for (int64_t s = 0; s < sequences; s++)
    copy_window(c->val + (first + s) * stride * length, length, input + s * length, target + s * length);
}
