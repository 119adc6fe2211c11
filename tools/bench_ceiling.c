/* SPDX-License-Identifier: Apache-2.0
 *
 * The ceilings that times are set against. Dense product: OpenBLAS where the build has it (a serial library, so each thread
 * multiplies a slice of its own), else moe_gemm with one expert. Copy: memcpy of a slice on each thread, far larger than
 * any cache; it reads and writes, so it counts twice. */
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "moeblas_ops.h"

enum {
  SIDE = 2048,
  COPY_BYTES = 1 << 28
};

struct product {
  moe_context *ctx;
  int threads;
  float *a, *b, *c;
};

#ifdef MOE_HAVE_OPENBLAS
static const char product_name[] = "OpenBLAS sgemm";

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
#else
static const char product_name[] = "moe_gemm, dense fp32";

static moe_status multiply(void *context) {
  const struct product *p = context;
  moe_gemm_args args = {.size = sizeof args, .rows = SIDE, .n = SIDE, .k = SIDE, .experts = 1};
  args.a = p->a;
  args.b = p->b;
  args.d = p->c;
  args.a_dtype = args.b_dtype = args.d_dtype = MOE_FP32;
  args.scratch_bytes = moe_gemm_scratch(p->ctx, &args);
  args.scratch = malloc(args.scratch_bytes + 1);
  if (args.scratch == NULL) return MOE_ERROR_MEMORY;
  const moe_status status = moe_gemm(p->ctx, &args, NULL);
  free(args.scratch);
  return status;
}
#endif

static bool measure_product(struct bench *bench, struct product *p) {
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
  if (good) bench->ceilings.flops = 2.0 * SIDE * SIDE * SIDE / time.median_us * 1e6;
  free(p->a);
  free(p->b);
  free(p->c);
  return good;
}

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

static bool measure_copy(struct bench *bench, struct copy *c) {
  struct timing time;
  c->from = malloc(COPY_BYTES);
  c->to = malloc(COPY_BYTES);
  bool good = c->from && c->to;
  if (good) memset(c->from, 1, COPY_BYTES); /* untouched pages all map to one of zeros */
  good = good && bench_time(bench, copy_slices, c, &time) == MOE_OK;
  if (good) bench->ceilings.bytes = 2.0 * COPY_BYTES / time.median_us * 1e6;
  free(c->from);
  free(c->to);
  return good;
}

bool bench_ceilings(struct bench *bench) {
  const int threads = moe_context_units(bench->ctx);
  struct product product = {.ctx = bench->ctx, .threads = threads};
  struct copy copy = {.threads = threads};
  bench->ceilings.flops_by = product_name;
  return measure_product(bench, &product) && measure_copy(bench, &copy);
}
