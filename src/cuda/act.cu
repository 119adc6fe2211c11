/* SPDX-License-Identifier: Apache-2.0
 *
 * a[r,:] = act(h[r,:]), and dh from da, unfused.
 *
 * A thread has eight elements of a of one row: it reads their gate and up columns of h, and of da, all before it writes
 * anything, and no other thread uses these columns: so dh may be h. In the concatenated layouts the eight are contiguous;
 * interleaved ones are contiguous if the run is a multiple of eight, else they are read one by one.
 * Invariant    same operations in the same order as src/cpu/act.c; the bits differ only where erfcf does.
 * Limits       none. Bound by bandwidth, or by special functions for the costly activations. */
#include "launch.h"
#include "../act.h"
#include "vector.cuh"

struct act_params {
  moe_act_desc act;
  int64_t rows, inter;
  const void *h, *da;
  void *a, *dh;
  moe_dtype dtype;
};

/* Where the eight elements of a thread lie. */
struct eight_place {
  int64_t row;     /* where the row of h begins */
  int64_t element; /* of a, in the row */
  int64_t count;
  bool contiguous, vector;
};

__device__ __forceinline__ eight_place place_at(const act_params &p, const walk &w) {
  const int64_t f = (int64_t)w.piece * EIGHT;
  const bool interleaved = p.act.gated && p.act.layout == MOE_LAYOUT_INTERLEAVED;
  const bool vector = aligned_rows(p.h, p.dtype, p.inter) && (p.dh == nullptr || aligned_16(p.dh));
  return {w.row * p.inter * (p.act.gated ? 2 : 1), f, p.inter - f,
          !interleaved || p.act.interleave % EIGHT == 0, vector};
}

__device__ __forceinline__ int64_t gate_at(const act_params &p, const eight_place &at, int64_t f) {
  return at.row + (p.act.gated ? moe_gate_column(&p.act, p.inter, f) : f);
}

/* Gate (distance 0) or up elements of the place. */
__device__ __forceinline__ void load_half(float *v, const act_params &p, const eight_place &at,
                                          int64_t distance) {
  if (at.contiguous)
    return load_eight(v, p.h, p.dtype, gate_at(p, at, at.element) + distance, at.count, at.vector);
#pragma unroll
  for (int j = 0; j < EIGHT; j++)
    v[j] = j < at.count ? moe_load(p.h, p.dtype, gate_at(p, at, at.element + j) + distance) : 0.0f;
}

__device__ __forceinline__ void store_half(const float *v, const act_params &p, const eight_place &at,
                                           int64_t distance) {
  if (at.contiguous)
    return store_eight(p.dh, p.dtype, gate_at(p, at, at.element) + distance, v, at.count, at.vector);
#pragma unroll
  for (int j = 0; j < EIGHT; j++)
    if (j < at.count) moe_store(p.dh, p.dtype, gate_at(p, at, at.element + j) + distance, v[j]);
}

/* The loop stays a loop, so that the switch over activations is expanded once. */
static __global__ void __launch_bounds__(1024, 1) act_kernel(const __grid_constant__ act_params p) {
  const int64_t distance = p.act.gated ? moe_up_distance(&p.act, p.inter) : 0;
  const bool a_vector = aligned_rows(p.a, p.dtype, p.inter);
  walk w = walk_from(grid_thread(), grid_threads(), (int)CEIL_DIV(p.inter, EIGHT));
  for (; w.row < p.rows; walk_on(&w)) {
    const eight_place at = place_at(p, w);
    float gate[EIGHT], up[EIGHT], a[EIGHT];
    load_half(gate, p, at, 0);
    if (p.act.gated) load_half(up, p, at, distance);
#pragma unroll
    for (int j = 0; j < EIGHT; j++) {
      a[j] = moe_act_gate(&p.act, gate[j]);
      if (p.act.gated) a[j] *= moe_act_up(&p.act, up[j]);
    }
    store_eight(p.a, p.dtype, w.row * p.inter + at.element, a, at.count, a_vector);
  }
}

static __global__ void __launch_bounds__(1024, 1) act_backward_kernel(const __grid_constant__ act_params p) {
  const int64_t distance = p.act.gated ? moe_up_distance(&p.act, p.inter) : 0;
  const bool da_vector = aligned_rows(p.da, p.dtype, p.inter);
  walk w = walk_from(grid_thread(), grid_threads(), (int)CEIL_DIV(p.inter, EIGHT));
  for (; w.row < p.rows; walk_on(&w)) {
    const eight_place at = place_at(p, w);
    float gate[EIGHT], up[EIGHT], da[EIGHT];
    load_half(gate, p, at, 0);
    if (p.act.gated) load_half(up, p, at, distance);
    load_eight(da, p.da, p.dtype, w.row * p.inter + at.element, at.count, da_vector);
#pragma unroll
    for (int j = 0; j < EIGHT; j++) {
      const float slope = moe_act_dgate(&p.act, gate[j]);
      if (p.act.gated) {
        const float value = moe_act_gate(&p.act, gate[j]), v = moe_act_up(&p.act, up[j]);
        gate[j] = slope * (da[j] * v);
        up[j] = value * (da[j] * moe_act_dup(&p.act, up[j]));
      } else {
        gate[j] = slope * da[j];
      }
    }
    store_half(gate, p, at, 0);
    if (p.act.gated) store_half(up, p, at, distance);
  }
}

static struct cuda_grid grid_of(const moe_context *ctx, int64_t sm_limit, int64_t rows, int64_t inter) {
  return grid_of_warps(moe_cuda_units(ctx, sm_limit), CEIL_DIV(rows * CEIL_DIV(inter, EIGHT), 32), 32);
}

size_t moe_cuda_act_scratch(const moe_context *ctx, const moe_act_args *args) {
  (void)ctx, (void)args;
  return 0;
}

moe_status moe_cuda_act(moe_context *ctx, const moe_act_args *args, moe_stream stream) {
  const act_params p = {*args->act, args->rows, args->inter, args->h, nullptr, args->a, nullptr, args->dtype};
  return launch("act", act_kernel, grid_of(ctx, args->sm_limit, args->rows, args->inter), p, stream);
}

size_t moe_cuda_act_backward_scratch(const moe_context *ctx, const moe_act_backward_args *args) {
  (void)ctx, (void)args;
  return 0;
}

moe_status moe_cuda_act_backward(moe_context *ctx, const moe_act_backward_args *args, moe_stream stream) {
  const act_params p = {*args->act, args->rows, args->inter, args->h,
                        args->da,   nullptr,    args->dh,    args->dtype};
  return launch("act_backward", act_backward_kernel, grid_of(ctx, args->sm_limit, args->rows, args->inter), p,
                stream);
}

KERNELS(act, (const void *)act_kernel, (const void *)act_backward_kernel)
