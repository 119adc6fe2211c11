/* SPDX-License-Identifier: Apache-2.0
 *
 * What: the number formats, by exhaustion: every code decodes to the value that the format's definition
 * gives, and comes back; every tie and its neighbours round as they must. Scalar codecs, array loops, and
 * the convert op.
 * Idea: the reference builds values with ldexp from sign, exponent and fraction, in double. */
#include "ops_call.h"

#ifdef __SSE__
#include <xmmintrin.h>
#endif

static const moe_dtype HALVES[] = {MOE_BF16, MOE_FP16};

/* The value of a code that is no NaN, from the definition of the format. */
static double value_of(moe_dtype dtype, unsigned code) {
  const int fraction_bits = dtype == MOE_BF16 ? 7 : 10, bias = dtype == MOE_BF16 ? 127 : 15;
  const unsigned exponent = (code & 0x7fff) >> fraction_bits, fraction = code & ((1u << fraction_bits) - 1);
  const unsigned special = dtype == MOE_BF16 ? 255 : 31;
  const double unit = ldexp(1, 1 - bias - fraction_bits);
  const double size = exponent == special ? INFINITY
                      : exponent == 0     ? fraction * unit
                                          : ldexp((1u << fraction_bits) + fraction, (int)exponent - 1) * unit;
  return code & 0x8000 ? -size : size;
}

static unsigned infinity_of(moe_dtype dtype) { return dtype == MOE_BF16 ? 0x7f80 : 0x7c00; }

static unsigned encode(moe_dtype dtype, float v) {
  return dtype == MOE_BF16 ? moe_encode_bf16(v) : moe_encode_fp16(v);
}

static float decode(moe_dtype dtype, unsigned code) {
  return dtype == MOE_BF16 ? moe_decode_bf16((uint16_t)code) : moe_decode_fp16((uint16_t)code);
}

TEST(every_code_decodes_to_its_value_and_back) {
  for (int d = 0; d < 2; d++)
    for (unsigned code = 0; code < 0x10000; code++) {
      const float v = decode(HALVES[d], code);
      if ((code & 0x7fff) > infinity_of(HALVES[d])) {
        EXPECT(v != v, "%s %04x: %g", moe_dtype_name(HALVES[d]), code, v);
        const unsigned quiet = code | (HALVES[d] == MOE_BF16 ? 0x40 : 0x200);
        EXPECT(encode(HALVES[d], v) == quiet, "%s %04x: %04x", moe_dtype_name(HALVES[d]), code,
               encode(HALVES[d], v));
        continue;
      }
      EXPECT(v == value_of(HALVES[d], code), "%s %04x: %g", moe_dtype_name(HALVES[d]), code, v);
      EXPECT(encode(HALVES[d], v) == code, "%s %04x: %04x", moe_dtype_name(HALVES[d]), code,
             encode(HALVES[d], v));
    }
}

#ifdef __SSE__
/* Programs may have the processor take subnormals for 0, in some of their threads: that must not reach fp16. */
TEST(fp16_is_the_same_where_subnormals_are_flushed) {
  static float before[0x10000];
  for (unsigned code = 0; code < 0x10000; code++) before[code] = decode(MOE_FP16, code);
  const unsigned csr = _mm_getcsr();
  _mm_setcsr(csr | 0x8040); /* flush to zero, denormals are zero */
  unsigned decoded = 0, encoded = 0;
  for (volatile unsigned code = 0; code <= infinity_of(MOE_FP16); code++) {
    const float now = decode(MOE_FP16, code);
    decoded += moe_bits_of(now) != moe_bits_of(before[code]);
    encoded += encode(MOE_FP16, now) != code;
  }
  _mm_setcsr(csr);
  EXPECT(decoded == 0 && encoded == 0, "%u codes decode and %u encode otherwise", decoded, encoded);
}
#endif

/* Between each two neighbours: the tie goes to the even code, and the floats on either side of it to the
 * nearer one. */
TEST(ties_go_to_even_and_the_rest_to_the_nearest) {
  for (int d = 0; d < 2; d++)
    for (unsigned low = 0; low < infinity_of(HALVES[d]); low++)
      for (unsigned sign = 0; sign < 0x10000; sign += 0x8000) {
        const unsigned high = low + 1;
        const double next = high == infinity_of(HALVES[d])
                                ? 2 * value_of(HALVES[d], low) - value_of(HALVES[d], low - 1)
                                : value_of(HALVES[d], high);
        const double tie = (value_of(HALVES[d], low) + next) / 2;
        if ((double)(float)tie != tie) continue; /* below the smallest fp32 */
        const float v = sign ? -(float)tie : (float)tie;
        const unsigned even = low & 1 ? high : low;
        EXPECT(encode(HALVES[d], v) == (sign | even), "tie %a: %04x", v, encode(HALVES[d], v));
        EXPECT(encode(HALVES[d], nextafterf(v, 0)) == (sign | low), "below tie %a", v);
        EXPECT(encode(HALVES[d], nextafterf(v, v * INFINITY)) == (sign | high), "above tie %a", v);
      }
}

TEST(overflow_becomes_infinity_and_nan_stays_nan) {
  EXPECT(encode(MOE_FP16, 65519.996f) == 0x7bff && encode(MOE_FP16, 65520.0f) == 0x7c00, "fp16 limit");
  EXPECT(encode(MOE_FP16, -3e38f) == 0xfc00 && encode(MOE_FP16, INFINITY) == 0x7c00, "fp16 infinities");
  EXPECT(encode(MOE_BF16, 3.4028235e38f) == 0x7f80 && encode(MOE_BF16, -INFINITY) == 0xff80,
         "bf16 infinities");
  for (uint32_t payload = 1; payload < 0x800000; payload += 4099)
    for (int d = 0; d < 2; d++) {
      const unsigned plus = encode(HALVES[d], moe_of_bits(0x7f800000u | payload));
      const unsigned minus = encode(HALVES[d], moe_of_bits(0xff800000u | payload));
      EXPECT(plus > infinity_of(HALVES[d]) && plus < 0x8000, "NaN %06x: %04x", payload, plus);
      EXPECT(minus == (plus | 0x8000), "NaN %06x: the sign is lost", payload);
    }
}

/* The vectorised loops against the scalar codecs, at every offset and tail length. */
TEST(rows_read_and_write_like_single_elements) {
  enum {
    N = 0x10000
  };
  uint16_t *codes = guarded(N * 2), *back = guarded(N * 2);
  float *values = guarded(N * 4);
  for (unsigned i = 0; i < N; i++) codes[i] = (uint16_t)i;
  for (int d = 0; d < 2; d++) {
    moe_cpu_read(values, codes, HALVES[d], 0, N);
    for (unsigned i = 0; i < N; i++)
      EXPECT(moe_bits_of(values[i]) == moe_bits_of(decode(HALVES[d], i)), "%04x reads as %g", i, values[i]);
    moe_cpu_write(back, HALVES[d], 0, values, N);
    for (unsigned i = 0; i < N; i++)
      EXPECT(back[i] == encode(HALVES[d], values[i]), "%04x became %04x", i, back[i]);
    for (int64_t first = 0; first < 20; first++)
      for (int64_t n = 0; n < 20; n++) {
        memset(back, 0, 100);
        memset(values, 0, 200);
        moe_cpu_read(values, codes + 0x3000, HALVES[d], first, n);
        moe_cpu_write(back, HALVES[d], first, values, n);
        for (int64_t i = 0; i < 50; i++) {
          const int inside = i >= first && i < first + n;
          EXPECT(back[i] == (inside ? codes[0x3000 + i] : 0), "first %d n %d element %d", (int)first, (int)n,
                 (int)i);
        }
      }
  }
  guarded_free(codes), guarded_free(back), guarded_free(values);
}

TEST(convert_rounds_once_between_any_two_formats) {
  static const int64_t COUNTS[] = {0, 1, 17, 2047, 2048, 2049, 10000};
  uint64_t seed = 1;
  for (moe_dtype from = MOE_FP32; from <= MOE_FP16; from++)
    for (moe_dtype to = MOE_FP32; to <= MOE_FP16; to++)
      for (int c = 0; c < 7; c++)
        for (int threads = 1; threads <= 4; threads++) {
          const int64_t count = COUNTS[c];
          void *x = random_array(from, count, 1e5f, &seed), *y = guarded((size_t)count * element_bytes(to));
          moe_convert_args args = {.count = count, .x = x, .x_dtype = from, .y = y, .y_dtype = to};
          EXPECT(call_convert(&args, threads) == MOE_OK, "status");
          for (int64_t i = 0; i < count; i++)
            EXPECT(at(y, to, i) == (double)moe_round_to(to, moe_load(x, from, i)), "element %d", (int)i);
          guarded_free(x), guarded_free(y);
        }
}

TEST(copy_and_zero_touch_every_byte_and_no_other) {
  static const size_t SIZES[] = {0, 1, 3, 1000, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (3 << 20) + 5};
  uint64_t seed = 2;
  for (int i = 0; i < 8; i++)
    for (int threads = 1; threads <= 4; threads++) {
      unsigned char *data = guarded(SIZES[i]), *copy = guarded(SIZES[i]);
      for (size_t b = 0; b < SIZES[i]; b++) data[b] = (unsigned char)(test_random(&seed) | 1);
      moe_copy_args copy_args = {.dst = copy, .src = data, .bytes = SIZES[i]};
      EXPECT(call_copy(&copy_args, threads) == MOE_OK, "status");
      EXPECT(memcmp(data, copy, SIZES[i]) == 0, "%zu bytes", SIZES[i]);
      moe_zero_args zero_args = {.data = data, .bytes = SIZES[i]};
      EXPECT(call_zero(&zero_args, threads) == MOE_OK, "status");
      size_t left = 0;
      for (size_t b = 0; b < SIZES[i]; b++) left += data[b] != 0;
      EXPECT(left == 0, "%zu of %zu bytes are not 0", left, SIZES[i]);
      guarded_free(data), guarded_free(copy);
    }
}

TEST_MAIN()
