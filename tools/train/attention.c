/* SPDX-License-Identifier: Apache-2.0
 *
 * Causal attention. One iteration of the parallel loop is one (sequence, head): it copies its q, k, v into contiguous
 * scratch, then walks blocks of QUERIES queries; a block sees the keys before its end. Everything heavy is the one
 * small matrix product below. The backward keeps no probabilities: they come back from q, k and the log-sum-exp.
 *
 *     forward     S = q k^T / sqrt(width)   P = softmax(S)   out = P v
 *     backward    dP = dout v^T   dS = P (dP - <dout, out>) / sqrt(width)   dq = dS k   dk += dS^T q   dv += P^T dout */
#include <math.h>
#include <omp.h>
#include <string.h>

#include "vector.h"
#include "ops.h"

#define QUERIES 32 /* of a block: the score tile (32 x length) stays in the second-level cache */
#define TILE_M  4  /* rows and columns of c that live in registers */
#define TILE_N  32

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* c[m,n] (+)= a b with a[i,p] at a[i row + p col], b[p,j] at b[p ldb + j]; m, n at most a tile. Inlined with constant
 * m and n it becomes vector code. */
__attribute__((always_inline)) static inline void tile(float *c, int64_t ldc, const float *a, int64_t row,
                                                       int64_t col, const float *b, int64_t ldb, int64_t m,
                                                       int64_t n, int64_t k, int accumulate) {
  float sum[TILE_M][TILE_N] = {{0}};
  for (int64_t p = 0; p < k; p++)
    for (int64_t i = 0; i < m; i++)
      for (int64_t j = 0; j < n; j++) sum[i][j] += a[i * row + p * col] * b[p * ldb + j];
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < n; j++) c[i * ldc + j] = accumulate ? c[i * ldc + j] + sum[i][j] : sum[i][j];
}

CLONES static void product(float *c, int64_t ldc, const float *a, int64_t row, int64_t col, const float *b,
                           int64_t ldb, int64_t m, int64_t n, int64_t k, int accumulate) {
  for (int64_t j = 0; j < n; j += TILE_N)
    for (int64_t i = 0; i < m; i += TILE_M) {
      float *to = c + i * ldc + j;
      if (m - i >= TILE_M && n - j >= TILE_N)
        tile(to, ldc, a + i * row, row, col, b + j, ldb, TILE_M, TILE_N, k, accumulate);
      else
        tile(to, ldc, a + i * row, row, col, b + j, ldb, least(m - i, TILE_M), least(n - j, TILE_N), k,
             accumulate);
    }
}

/* The scratch of one thread. Names: [length, width] unless told otherwise. */
struct head {
  float *q, *k, *v, *out, *dout, *dq, *dk, *dv;
  float *kt, *vt;        /* [width, length] */
  float *score, *dscore; /* [QUERIES, length] */
};

static int64_t head_floats(const struct attention *shape) {
  return shape->length * (10 * shape->width + 2 * QUERIES);
}

int64_t attention_scratch(const struct attention *shape) {
  return head_floats(shape) * omp_get_max_threads();
}

static struct head head_scratch(const struct attention *shape) {
  const int64_t n = shape->length * shape->width;
  float *p = shape->scratch + head_floats(shape) * omp_get_thread_num();
  return (struct head){.q = p,
                       .k = p + n,
                       .v = p + 2 * n,
                       .out = p + 3 * n,
                       .dout = p + 4 * n,
                       .dq = p + 5 * n,
                       .dk = p + 6 * n,
                       .dv = p + 7 * n,
                       .kt = p + 8 * n,
                       .vt = p + 9 * n,
                       .score = p + 10 * n,
                       .dscore = p + 10 * n + shape->length * QUERIES};
}

/* [length, width] between contiguous scratch and rows that lie `stride` apart. */
static void take(float *to, const float *from, int64_t stride, const struct attention *shape, float scale) {
  for (int64_t t = 0; t < shape->length; t++)
    for (int64_t i = 0; i < shape->width; i++) to[t * shape->width + i] = scale * from[t * stride + i];
}

static void put(float *to, const float *from, int64_t stride, const struct attention *shape) {
  for (int64_t t = 0; t < shape->length; t++)
    memcpy(to + t * stride, from + t * shape->width, (size_t)shape->width * sizeof *to);
}

static void transpose(float *to, const float *from, const struct attention *shape) {
  for (int64_t i = 0; i < shape->width; i++)
    for (int64_t t = 0; t < shape->length; t++) to[i * shape->length + t] = from[t * shape->width + i];
}

/* Copies q (times 1/sqrt(width)), k, v of head h of sequence s, and makes k^T. */
static void load_head(const struct head *x, const struct attention *shape, const float *qkv, int64_t job) {
  const int64_t heads = shape->heads, width = shape->width, stride = 3 * heads * width;
  const float *from = qkv + job / heads * shape->length * stride + job % heads * width;
  take(x->q, from, stride, shape, 1.0f / sqrtf((float)width));
  take(x->k, from + heads * width, stride, shape, 1);
  take(x->v, from + 2 * heads * width, stride, shape, 1);
  transpose(x->kt, x->k, shape);
}

/* score[0..used) becomes probabilities, the rest up to `end` 0. Returns the log-sum-exp. */
CLONES static float softmax_row(float *score, int64_t used, int64_t end) {
  float max = score[0], sum = 0;
#pragma omp simd reduction(max : max)
  for (int64_t j = 0; j < used; j++) max = score[j] > max ? score[j] : max;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < used; j++) {
    score[j] = fast_exp(score[j] - max);
    sum += score[j];
  }
  const float scale = 1.0f / sum;
  for (int64_t j = 0; j < used; j++) score[j] *= scale;
  memset(score + used, 0, (size_t)(end - used) * sizeof *score);
  return max + logf(sum);
}

static void attend_head(const struct attention *shape, float *out, float *lse, const float *qkv,
                        int64_t job) {
  const struct head x = head_scratch(shape);
  const int64_t length = shape->length, width = shape->width, heads = shape->heads;
  const int64_t token = job / heads * length, h = job % heads;
  load_head(&x, shape, qkv, job);
  for (int64_t first = 0; first < length; first += QUERIES) {
    const int64_t end = least(first + QUERIES, length), m = end - first;
    product(x.score, length, x.q + first * width, width, 1, x.kt, length, m, end, width, 0);
    for (int64_t i = 0; i < m; i++)
      lse[(token + first + i) * heads + h] = softmax_row(x.score + i * length, first + i + 1, end);
    product(x.out + first * width, width, x.score, length, 1, x.v, width, m, width, end, 0);
  }
  put(out + (token * heads + h) * width, x.out, heads * width, shape);
}

void attention(const struct attention *shape, float *out, float *lse, const float *qkv) {
#pragma omp parallel for schedule(static)
  for (int64_t job = 0; job < shape->sequences * shape->heads; job++) attend_head(shape, out, lse, qkv, job);
}

/* One query of one head against `tokens` keys and values, in rows that lie `stride` apart. */
static void attend_query(float *out, float *score, const float *q, const float *k, const float *v,
                         int64_t stride, int64_t width, int64_t tokens) {
  const float scale = 1.0f / sqrtf((float)width);
  for (int64_t j = 0; j < tokens; j++) {
    float dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t i = 0; i < width; i++) dot += q[i] * k[j * stride + i];
    score[j] = scale * dot;
  }
  softmax_row(score, tokens, tokens);
  memset(out, 0, (size_t)width * sizeof *out);
  for (int64_t j = 0; j < tokens; j++)
    for (int64_t i = 0; i < width; i++) out[i] += score[j] * v[j * stride + i];
}

void attention_step(const struct attention *shape, float *out, const float *qkv, int64_t tokens) {
  const int64_t width = shape->width, plane = shape->heads * width, stride = 3 * plane;
  for (int64_t h = 0; h < shape->heads; h++)
    attend_query(out + h * width, shape->scratch, qkv + (tokens - 1) * stride + h * width,
                 qkv + plane + h * width, qkv + 2 * plane + h * width, stride, width, tokens);
}

/* One query: score becomes P, dscore (holding dP) becomes dS without the factor of q and k. */
CLONES static void dsoftmax_row(float *score, float *dscore, float lse, const float *dout, const float *out,
                                int64_t width, int64_t used, int64_t end) {
  float delta = 0;
#pragma omp simd reduction(+ : delta)
  for (int64_t i = 0; i < width; i++) delta += dout[i] * out[i];
  for (int64_t j = 0; j < used; j++) {
    score[j] = fast_exp(score[j] - lse);
    dscore[j] = score[j] * (dscore[j] - delta);
  }
  memset(score + used, 0, (size_t)(end - used) * sizeof *score);
  memset(dscore + used, 0, (size_t)(end - used) * sizeof *dscore);
}

static void attend_head_backward(const struct attention *shape, float *dqkv, const float *dout,
                                 const float *out, const float *lse, const float *qkv, int64_t job) {
  const struct head x = head_scratch(shape);
  const int64_t length = shape->length, width = shape->width, heads = shape->heads;
  const int64_t token = job / heads * length, h = job % heads;
  load_head(&x, shape, qkv, job);
  transpose(x.vt, x.v, shape);
  take(x.out, out + (token * heads + h) * width, heads * width, shape, 1);
  take(x.dout, dout + (token * heads + h) * width, heads * width, shape, 1);
  memset(x.dk, 0, (size_t)(length * width) * sizeof *x.dk);
  memset(x.dv, 0, (size_t)(length * width) * sizeof *x.dv);
  for (int64_t first = 0; first < length; first += QUERIES) {
    const int64_t end = least(first + QUERIES, length), m = end - first, at = first * width;
    product(x.score, length, x.q + at, width, 1, x.kt, length, m, end, width, 0);
    product(x.dscore, length, x.dout + at, width, 1, x.vt, length, m, end, width, 0);
    for (int64_t i = 0; i < m; i++)
      dsoftmax_row(x.score + i * length, x.dscore + i * length, lse[(token + first + i) * heads + h],
                   x.dout + at + i * width, x.out + at + i * width, width, first + i + 1, end);
    product(x.dq + at, width, x.dscore, length, 1, x.k, width, m, width, end, 0);
    product(x.dk, width, x.dscore, 1, length, x.q + at, width, end, width, m, 1);
    product(x.dv, width, x.score, 1, length, x.dout + at, width, end, width, m, 1);
  }
  /* q was scaled when it was loaded, so dk is whole and dq lacks the factor */
  const int64_t stride = 3 * heads * width;
  take(x.q, x.dq, width, shape, 1.0f / sqrtf((float)width));
  put(dqkv + token * stride + h * width, x.q, stride, shape);
  put(dqkv + token * stride + (heads + h) * width, x.dk, stride, shape);
  put(dqkv + token * stride + (2 * heads + h) * width, x.dv, stride, shape);
}

void attention_backward(const struct attention *shape, float *dqkv, const float *dout, const float *out,
                        const float *lse, const float *qkv) {
#pragma omp parallel for schedule(static)
  for (int64_t job = 0; job < shape->sequences * shape->heads; job++)
    attend_head_backward(shape, dqkv, dout, out, lse, qkv, job);
}
