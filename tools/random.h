/* SPDX-License-Identifier: Apache-2.0
 *
 * Random numbers without a state: the i-th number of a stream is a function of the stream and i. So any thread can take
 * any number, in any order, and a resumed run needs nothing from the checkpoint but the seed. Streams are made by random_at,
 * too. */
#pragma once

#include <math.h>
#include <stdint.h>

/* What splitmix64 (Steele, Lea and Flood 2014) makes of its state, and by how much that grows each time. */
#define RANDOM_STEP 0x9e3779b97f4a7c15u
static inline uint64_t random_mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

/* splitmix64, entered at position i. */
static inline uint64_t random_at(uint64_t stream, uint64_t i) {
  return random_mix(stream + (i + 1) * RANDOM_STEP);
}

/* Uniform in (0, 1). */
static inline double random_uniform(uint64_t stream, uint64_t i) {
  return ((double)(random_at(stream, i) >> 11) + 0.5) * 0x1p-53;
}

/* Normal, by Box and Muller. */
static inline float random_normal(uint64_t stream, uint64_t i) {
  const double radius = sqrt(-2 * log(random_uniform(stream, 2 * i)));
  return (float)(radius * cos(6.283185307179586 * random_uniform(stream, 2 * i + 1)));
}
