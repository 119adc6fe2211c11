/* SPDX-License-Identifier: Apache-2.0
 *
 * Number formats: exact decoding to fp32 and encoding with round to nearest, ties to even. Compiled alike by gcc and
 * nvcc. Overflow becomes infinity; NaN stays NaN (made quiet, sign kept). */
#pragma once

#include <stdint.h>
#include <string.h>

#include "moeblas.h"

#ifdef __CUDACC__
#define MOE_FN static inline __host__ __device__
#else
#define MOE_FN static inline
#endif

MOE_FN uint32_t moe_bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

MOE_FN float moe_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

MOE_FN float moe_decode_fp32(float v) { return v; }
MOE_FN float moe_encode_fp32(float v) { return v; }

MOE_FN float moe_decode_bf16(uint16_t code) { return moe_of_bits((uint32_t)code << 16); }

MOE_FN uint16_t moe_encode_bf16(float v) {
  const uint32_t bits = moe_bits_of(v);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;
  return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}

/* A normal number gets the exponent bias of fp32, infinity and NaN its largest exponent. A subnormal m 2^-24 is the
 * difference of 2^-14 (1 + m/1024) and 2^-14: exact, and without a subnormal fp32, which a thread may be set to flush. */
MOE_FN float moe_decode_fp16(uint16_t code) {
  const uint32_t sign = (uint32_t)(code & 0x8000u) << 16;
  const uint32_t magnitude = (uint32_t)(code & 0x7fffu) << 13;
  const uint32_t exponent = code & 0x7c00u;
  const float subnormal = moe_of_bits(magnitude + 0x38800000u) - 0x1p-14f;
  const uint32_t rest = magnitude + (exponent == 0x7c00u ? 0x70000000u : 0x38000000u);
  return moe_of_bits(sign | (exponent == 0 ? moe_bits_of(subnormal) : rest));
}

/* Adding and subtracting a power of two whose last place is the fp16 one rounds to it, in the subnormal range; in the
 * normal range the rounding is done on the bits, as for bf16. */
MOE_FN uint16_t moe_encode_fp16(float v) {
  const uint32_t bits = moe_bits_of(v);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude < 0x38800000u) { /* below 2^-14: subnormal or zero */
    const float shifted = moe_of_bits(magnitude) + 0.5f;
    return (uint16_t)(sign | (moe_bits_of(shifted) - 0x3f000000u));
  }
  if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520 and more round to infinity */
  return (uint16_t)(sign | ((magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13));
}

/* Element i of an array of `dtype`. An unknown dtype reads as 0 and stores nothing. */
MOE_FN float moe_load(const void *array, moe_dtype dtype, int64_t i) {
  switch ((int)dtype) {
#define MOE_FORMAT(ENUM, name, type, codec) \
  case ENUM:                                \
    return moe_decode_##codec(((const type *)array)[i]);
#include "format.def"
#undef MOE_FORMAT
  default: return 0;
  }
}

MOE_FN void moe_store(void *array, moe_dtype dtype, int64_t i, float v) {
  switch ((int)dtype) {
#define MOE_FORMAT(ENUM, name, type, codec)     \
  case ENUM:                                    \
    ((type *)array)[i] = moe_encode_##codec(v); \
    break;
#include "format.def"
#undef MOE_FORMAT
  default: break;
  }
}

/* v as it reads back after being stored. */
MOE_FN float moe_round_to(moe_dtype dtype, float v) {
  switch ((int)dtype) {
#define MOE_FORMAT(ENUM, name, type, codec) \
  case ENUM:                                \
    return moe_decode_##codec(moe_encode_##codec(v));
#include "format.def"
#undef MOE_FORMAT
  default: return v;
  }
}
