/* SPDX-License-Identifier: Apache-2.0
 *
 * The inner loops of kernel.h. Compiled with -DMOE_KERNEL=base, avx2 or avx512 and the -m flags of that instruction set.
 *
 * A tile is `rows` x `vectors` accumulators: enough of them to hide the latency of the multiply-add, few enough to stay
 * in registers (24 of 32 with AVX-512; 12 of 16 otherwise). Each step of k loads `vectors` vectors of q and broadcasts
 * `rows` scalars of p. GCC vector extensions rather than intrinsics: one text serves every instruction set. */
#include "kernel.h"

#include "../act.h"

#if defined __AVX512F__
enum {
  LANES = 16,
  VECTORS = 4
};
#elif defined __AVX2__
enum {
  LANES = 8,
  VECTORS = 2
};
#else
enum {
  LANES = 4,
  VECTORS = 2
};
#endif
enum {
  TALL = 12,
  SHORT = 6
}; /* rows of a tile of at most, of more than VECTORS/2 vectors */

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float vec_memory __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float vec4 __attribute__((vector_size(16)));
typedef float vec4_memory __attribute__((vector_size(16), aligned(4), may_alias));
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else /* which has that one from 12 on only */
typedef int index4 __attribute__((vector_size(16)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (index4){__VA_ARGS__})
#endif

#define INLINE static inline __attribute__((always_inline))

/* rows, vectors and one of the p strides are constants where this is inlined, so that acc becomes registers. */
INLINE void tile(int rows, int vectors, float *c, int64_t ldc, const float *p, int64_t p_row, int64_t p_col,
                 const float *q, int64_t ldq, int64_t k, bool first) {
  vec acc[TALL][VECTORS];
#pragma GCC unroll 12
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++)
      acc[i][v] = first ? (vec){0} : (vec) * (const vec_memory *)(c + i * ldc + v * LANES);
#pragma GCC unroll 2
  for (int64_t kk = 0; kk < k; kk++) {
    vec column[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) column[v] = *(const vec_memory *)(q + kk * ldq + v * LANES);
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
      const float scalar = p[i * p_row + kk * p_col];
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++) acc[i][v] += column[v] * scalar;
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) *(vec_memory *)(c + i * ldc + v * LANES) = acc[i][v];
}

/* All rows of p against one group: full tiles, then 4, 2 and 1 rows. */
INLINE void strip(int vectors, float *c, int64_t ldc, const float *p, int64_t p_row, int64_t p_col, int64_t m,
                  const float *q, int64_t ldq, int64_t k, bool first) {
  int64_t i = 0;
#define TILES(rows)                    \
  for (; i + (rows) <= m; i += (rows)) \
    tile((rows), vectors, c + i * ldc, ldc, p + i * p_row, p_row, p_col, q, ldq, k, first);
  if (vectors <= VECTORS / 2) TILES(TALL)
  TILES(SHORT)
  TILES(4)
  TILES(2)
  TILES(1)
#undef TILES
}

INLINE void strips(float *c, int64_t ldc, const float *p, int64_t p_row, int64_t p_col, int64_t m,
                   const float *q, int64_t ldq, int64_t width, int64_t k, bool first) {
  switch (width / LANES) {
  case 1: strip(1, c, ldc, p, p_row, p_col, m, q, ldq, k, first); break;
  case 2: strip(2, c, ldc, p, p_row, p_col, m, q, ldq, k, first); break;
#if defined __AVX512F__
  case 3: strip(3, c, ldc, p, p_row, p_col, m, q, ldq, k, first); break;
  case 4: strip(4, c, ldc, p, p_row, p_col, m, q, ldq, k, first); break;
#endif
  default: break;
  }
}

static void product(float *c, int64_t ldc, const float *p, int64_t p_row, int64_t p_col, int64_t m,
                    const float *q, int64_t ldq, int64_t width, int64_t k, bool first) {
  if (p_row == 1)
    strips(c, ldc, p, 1, p_col, m, q, ldq, width, k, first);
  else
    strips(c, ldc, p, p_row, 1, m, q, ldq, width, k, first);
}

static void read_rows(float *dst, int64_t ldd, const void *src, moe_dtype dtype, int64_t first, int64_t lds,
                      int64_t m, int64_t n) {
  for (int64_t i = 0; i < m; i++, dst += ldd, first += lds) {
    switch ((int)dtype) {
#define MOE_FORMAT(ENUM, name, type, codec)                                                      \
  case ENUM:                                                                                     \
    for (int64_t j = 0; j < n; j++) dst[j] = moe_decode_##codec(((const type *)src)[first + j]); \
    break;
#include "../format.def"
#undef MOE_FORMAT
    default: break;
    }
    for (int64_t j = n; j < ldd; j++) dst[j] = 0;
  }
}

static void transpose4(float *dst, int64_t ldd, const float *src, int64_t lds) {
  const vec4 r0 = *(const vec4_memory *)src, r1 = *(const vec4_memory *)(src + lds);
  const vec4 r2 = *(const vec4_memory *)(src + 2 * lds), r3 = *(const vec4_memory *)(src + 3 * lds);
  const vec4 low02 = SHUFFLE(r0, r2, 0, 4, 1, 5);
  const vec4 low13 = SHUFFLE(r1, r3, 0, 4, 1, 5);
  const vec4 high02 = SHUFFLE(r0, r2, 2, 6, 3, 7);
  const vec4 high13 = SHUFFLE(r1, r3, 2, 6, 3, 7);
  *(vec4_memory *)dst = SHUFFLE(low02, low13, 0, 4, 1, 5);
  *(vec4_memory *)(dst + ldd) = SHUFFLE(low02, low13, 2, 6, 3, 7);
  *(vec4_memory *)(dst + 2 * ldd) = SHUFFLE(high02, high13, 0, 4, 1, 5);
  *(vec4_memory *)(dst + 3 * ldd) = SHUFFLE(high02, high13, 2, 6, 3, 7);
}

/* The inner loop runs over 4 lines of dst at most, so that each is completed while it is in cache. */
static void transpose(float *dst, int64_t ldd, const float *src, int64_t lds, int64_t m, int64_t n) {
  for (int64_t i0 = 0; i0 < m; i0 += 16) {
    const int64_t i1 = i0 + 16 < m ? i0 + 16 : m;
    int64_t j = 0;
    for (; j + 4 <= n; j += 4)
      for (int64_t i = i0; i < i1; i += 4) transpose4(dst + j * ldd + i, ldd, src + i * lds + j, lds);
    for (; j < n; j++)
      for (int64_t i = i0; i < i1; i++) dst[j * ldd + i] = src[i * lds + j];
  }
}

/* The switch over activations stands outside the loops: inside it would keep them from becoming vector code. */
static void gates(const moe_act_desc *act, int64_t n, const float *restrict gate, float *restrict f) {
  const float alpha = act->alpha, beta = act->beta, max = act->gate_max;
  switch ((int)act->kind) {
#define MOE_ACT(ENUM, value, fn, plain, gated, a0, b0, f_text, df_text)                          \
  case value:                                                                                    \
    for (int64_t i = 0; i < n; i++) f[i] = act_##fn(gate[i] > max ? max : gate[i], alpha, beta); \
    break;
#include "moeblas_act.def"
#undef MOE_ACT
  default: break;
  }
}

static void gate_slopes(const moe_act_desc *act, int64_t n, float *gate) {
  const float alpha = act->alpha, beta = act->beta, max = act->gate_max;
  switch ((int)act->kind) {
#define MOE_ACT(ENUM, value, fn, plain, gated, a0, b0, f_text, df_text) \
  case value:                                                           \
    for (int64_t i = 0; i < n; i++) {                                   \
      const float slope = dact_##fn(gate[i], alpha, beta);              \
      gate[i] = gate[i] > max ? 0.0f : slope;                           \
    }                                                                   \
    break;
#include "moeblas_act.def"
#undef MOE_ACT
  default: break;
  }
}

/* Inlined with up_beta known to be 0 and not, for the same reason. */
INLINE void times_up(const moe_act_desc *act, int64_t n, const float *restrict up, float *restrict a) {
  for (int64_t i = 0; i < n; i++) a[i] *= moe_act_up(act, up[i]);
}

/* With f = f(gate) in a and f' in gate:  dup = da f v'(up),  dgate = da f' v(up),  a = f v(up). */
INLINE void times_up_slopes(const moe_act_desc *act, int64_t n, float *restrict gate, float *restrict up,
                            const float *restrict da, float *restrict a) {
  const float min = act->up_min, max = act->up_max;
  moe_act_desc unmasked = *act;
  unmasked.up_min = -INFINITY, unmasked.up_max = INFINITY;
  for (int64_t i = 0; i < n; i++) {
    const float u = up[i], v = moe_act_up(act, u), slope = moe_act_dup(&unmasked, u);
    const float above = u < min ? 0.0f : slope, inside = u > max ? 0.0f : above;
    up[i] = da[i] * a[i] * inside;
    gate[i] *= da[i] * v;
    a[i] *= v;
  }
}

static void act_row(const moe_act_desc *act, int64_t n, const float *gate, const float *up, float *a) {
  moe_act_desc linear = *act;
  linear.up_beta = 0;
  gates(act, n, gate, a);
  if (up == NULL) return;
  if (act->up_beta > 0)
    times_up(act, n, up, a);
  else
    times_up(&linear, n, up, a);
}

static void dact_row(const moe_act_desc *act, int64_t n, float *gate, float *up, const float *da, float *a) {
  moe_act_desc linear = *act;
  linear.up_beta = 0;
  gates(act, n, gate, a);
  gate_slopes(act, n, gate);
  if (up == NULL)
    for (int64_t i = 0; i < n; i++) gate[i] *= da[i];
  else if (act->up_beta > 0)
    times_up_slopes(act, n, gate, up, da, a);
  else
    times_up_slopes(&linear, n, gate, up, da, a);
}

#define JOIN(a, b)   a##b
#define JOINED(a, b) JOIN(a, b)
#define TEXT(a)      #a
#define QUOTED(a)    TEXT(a)
const struct moe_cpu_kernel JOINED(moe_cpu_kernel_, MOE_KERNEL) = {
    .name = QUOTED(MOE_KERNEL),
    .lanes = LANES,
    .width = LANES * VECTORS,
    .product = product,
    .read = read_rows,
    .transpose = transpose,
    .act = act_row,
    .dact = dact_row,
};
