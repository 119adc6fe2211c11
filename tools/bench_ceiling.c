/* SPDX-License-Identifier: Apache-2.0
 *
 * The ceilings that times are set against. On the CPU: a dense fp32 product by OpenBLAS where the build has it (a serial
 * library, so each thread multiplies a slice of its own), else by moe_gemm with one expert; memcpy of a slice on each
 * thread. On a device: a dense bf16 product by moe_gemm, and moe_copy from device memory to device memory. A copy is far
 * larger than any cache; it reads and writes, so it counts twice. */
#include <stdlib.h>
#include <string.h>

#include "bench.h"

enum {
  SIDE = 2048,
  DEVICE_SIDE = 8192,
  COPY_BYTES = 1 << 28,
  DEVICE_COPY_BYTES = 1 << 30
};

/* ---- by the library -------------------------------------------------------------------------------------------- */

/* Memory of the back end, in it random numbers of size 1/2 to 1, of either sign: neither zeros nor subnormals. */
static void *random_block(moe_context *ctx, moe_dtype dtype, size_t bytes) {
  const uint32_t keep = dtype == MOE_FP32 ? 0x807fffff : 0x807f807f;
  const uint32_t set = dtype == MOE_FP32 ? 0x3f000000 : 0x3f003f00;
  uint32_t *words = malloc(bytes), state = 1;
  void *block = NULL;
  bool good = words != NULL && moe_memory_alloc(ctx, bytes, &block) == MOE_OK;
  for (size_t i = 0; good && i < bytes / sizeof *words; i++) {
    state ^= state << 13, state ^= state >> 17, state ^= state << 5; /* Marsaglia's xorshift32 */
    words[i] = (state & keep) | set;
  }
  good = good && moe_memory_copy(ctx, block, words, bytes) == MOE_OK;
  free(words);
  if (good) return block;
  moe_memory_free(ctx, block);
  return NULL;
}

struct dense {
  moe_context *ctx;
  moe_gemm_args args;
};

static moe_status multiply_dense(void *context) {
  const struct dense *d = context;
  return moe_gemm(d->ctx, &d->args, NULL);
}

static bool measure_dense(const struct bench *bench, struct ceilings *ceilings, int64_t side, moe_dtype dtype,
                          const char *name) {
  const size_t bytes = (size_t)(side * side) * moe_dtype_bytes(dtype);
  struct dense d = {bench->ctx, {.size = sizeof d.args, .rows = side, .n = side, .k = side, .experts = 1}};
  struct timing time;
  void *a = random_block(bench->ctx, dtype, bytes), *b = random_block(bench->ctx, dtype, bytes);
  d.args.a = a;
  d.args.b = b;
  d.args.a_dtype = d.args.b_dtype = d.args.d_dtype = dtype;
  bool good = a && b && moe_memory_alloc(bench->ctx, bytes, &d.args.d) == MOE_OK;
  d.args.scratch_bytes = good ? moe_gemm_scratch(bench->ctx, &d.args) : 0;
  good = good && moe_memory_alloc(bench->ctx, d.args.scratch_bytes, &d.args.scratch) == MOE_OK;
  good = good && bench_time(bench, multiply_dense, &d, &time) == MOE_OK;
  const double s = (double)side;
  if (good) ceilings->flops = 2 * s * s * s / time.median_us * 1e6;
  ceilings->flops_by = name;
  void *blocks[] = {a, b, d.args.d, d.args.scratch};
  for (int i = 0; i < 4; i++) moe_memory_free(bench->ctx, blocks[i]);
  return good;
}

struct block_copy {
  moe_context *ctx;
  moe_copy_args args;
};

static moe_status copy_block(void *context) {
  const struct block_copy *c = context;
  return moe_copy(c->ctx, &c->args, NULL);
}

static bool measure_block_copy(const struct bench *bench, struct ceilings *ceilings) {
  struct block_copy c = {bench->ctx, {.size = sizeof c.args, .bytes = DEVICE_COPY_BYTES}};
  struct timing time;
  void *from = random_block(bench->ctx, MOE_FP32, DEVICE_COPY_BYTES);
  c.args.src = from;
  const bool good = from && moe_memory_alloc(bench->ctx, DEVICE_COPY_BYTES, &c.args.dst) == MOE_OK &&
                    bench_time(bench, copy_block, &c, &time) == MOE_OK;
  if (good) ceilings->bytes = 2.0 * DEVICE_COPY_BYTES / time.median_us * 1e6;
  ceilings->bytes_by = "moe_copy within the device";
  moe_memory_free(bench->ctx, from);
  moe_memory_free(bench->ctx, c.args.dst);
  return good;
}

/* ---- by the host ----------------------------------------------------------------------------------------------- */

#ifdef MOE_HAVE_OPENBLAS
struct product {
  int threads;
  float *a, *b, *c;
};

extern void sgemm_(const char *transa, const char *transb, const int *m, const int *n, const int *k,
                   const float *alpha, const float *a, const int *lda, const float *b, const int *ldb,
                   const float *beta, float *c, const int *ldc);

/* Columns of a column-major product are independent: each thread takes a range of them. */
static moe_status multiply(void *context) {
  const struct product *p = context;
  const int side = SIDE;
  const float one = 1, zero = 0;
#pragma omp parallel for schedule(static, 1) num_threads(p->threads)
  for (int i = 0; i < p->threads; i++) {
    const int first = (int)((int64_t)side * i / p->threads),
              end = (int)((int64_t)side * (i + 1) / p->threads);
    const int columns = end - first;
    if (columns > 0)
      sgemm_("T", "N", &side, &columns, &side, &one, p->a, &side, p->b + (int64_t)first * side, &side, &zero,
             p->c + (int64_t)first * side, &side);
  }
  return MOE_OK;
}
static bool measure_product(const struct bench *bench, struct ceilings *ceilings) {
  struct product product = {.threads = moe_context_units(bench->ctx)}, *p = &product;
  const size_t count = (size_t)SIDE * SIDE;
  struct timing time;
  p->a = malloc(count * sizeof *p->a);
  p->b = malloc(count * sizeof *p->b);
  p->c = malloc(count * sizeof *p->c);
  bool good = p->a && p->b && p->c;
  for (size_t i = 0; good && i < count; i++) { /* ordinary numbers: neither zeros nor subnormals */
    p->a[i] = (float)(i % 1021) / 1021 - 0.5f;
    p->b[i] = (float)(i % 1019) / 1019 - 0.5f;
  }
  good = good && bench_time(bench, multiply, p, &time) == MOE_OK;
  if (good) ceilings->flops = 2.0 * SIDE * SIDE * SIDE / time.median_us * 1e6;
  ceilings->flops_by = "OpenBLAS sgemm";
  free(p->a);
  free(p->b);
  free(p->c);
  return good;
}
#else
static bool measure_product(const struct bench *bench, struct ceilings *ceilings) {
  return measure_dense(bench, ceilings, SIDE, MOE_FP32, "dense fp32 moe_gemm 2048^3");
}
#endif

struct copy {
  int threads;
  char *from, *to;
};

static moe_status copy_slices(void *context) {
  const struct copy *c = context;
  const size_t slice = (size_t)COPY_BYTES / (size_t)c->threads;
#pragma omp parallel for schedule(static, 1) num_threads(c->threads)
  for (int i = 0; i < c->threads; i++) memcpy(c->to + (size_t)i * slice, c->from + (size_t)i * slice, slice);
  return MOE_OK;
}

static bool measure_copy(const struct bench *bench, struct ceilings *ceilings) {
  struct copy copy = {.threads = moe_context_units(bench->ctx)}, *c = &copy;
  struct timing time;
  c->from = malloc(COPY_BYTES);
  c->to = malloc(COPY_BYTES);
  bool good = c->from && c->to;
  if (good) memset(c->from, 1, COPY_BYTES); /* untouched pages all map to one of zeros */
  good = good && bench_time(bench, copy_slices, c, &time) == MOE_OK;
  if (good) ceilings->bytes = 2.0 * COPY_BYTES / time.median_us * 1e6;
  ceilings->bytes_by = "memcpy";
  free(c->from);
  free(c->to);
  return good;
}

const char *bench_ceilings(const struct bench *bench, struct ceilings *ceilings) {
  if (moe_context_backend(bench->ctx) == MOE_BACKEND_CPU)
    return measure_product(bench, ceilings) && measure_copy(bench, ceilings) ? NULL : "memory was short";
  return measure_dense(bench, ceilings, DEVICE_SIDE, MOE_BF16, "dense bf16 moe_gemm 8192^3") &&
                 measure_block_copy(bench, ceilings)
             ? NULL
             : moe_last_error();
}
