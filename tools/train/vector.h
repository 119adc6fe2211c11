/* SPDX-License-Identifier: Apache-2.0
 *
 * What makes the loops of training vector code on every x86-64: CLONES compiles a function once an instruction set, and
 * the loader picks. fast_exp is e^x for x <= 0 within 2 units in the last place, without the call that keeps a loop over
 * expf scalar (attention takes one exponential a pair of query and key). Below -87 it stays at e^-87. */
#pragma once

#include <stdint.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED
#elif defined(__has_feature) /* clang says it so */
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED
#endif
#endif

#if defined(__x86_64__) && !defined(SANITIZED) /* the resolvers run before a sanitizer is ready */
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

static inline float fast_exp(float x) {
  union {
    float f;
    uint32_t u;
  } shifted, power;
  x = x < -87.0f ? -87.0f : x;
  shifted.f = x * 0x1.715476p0f + 0x1.8p23f; /* the low mantissa bits are now round(x / ln 2) */
  const float n = shifted.f - 0x1.8p23f;
  const float r =
      (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f; /* ln 2 in two parts: the first product is exact */
  power.u = (shifted.u << 23) + 0x3f800000u;        /* 2^n */
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return p * power.f;
}
