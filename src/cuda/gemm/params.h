/* SPDX-License-Identifier: Apache-2.0
 * What a grouped product needs on the device, as plain numbers and pointers; filled in by launch.cu, read by gemm.cuh. */
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <stdint.h>

#include "moeblas_ops.h"

/* The contraction runs over `count` pairs of parts: pair j is nibble j of `a` and of `b`. An operand of several parts has them along k, each
 * padded with zeros to whole stages; one of a single part is itself, read again for every pair. */
struct gemm_pairs {
  int count, a_parts, b_parts;
  uint32_t a, b;
};

struct gemm_params {
  CUtensorMap b_map;         /* of the weights, the expert as third coordinate */
  CUtensorMap a_map;         /* of A, used where its rows are not gathered */
  const int32_t *row_offset; /* NULL: one expert with all rows */
  const int32_t *row_slot;   /* NULL: slot(r) = r */
  const __nv_bfloat16 *a;
  int rows, n, k, experts;
  gemm_pairs pairs; /* where A is not gathered; else one pair */
  int gather_topk;
  int column_tiles;
  int halves; /* 2: a tile is BN/2 columns of gate and the BN/2 of up that belong to them; 1: BN columns in a row */
  int half_row[2]; /* where the rows of B of the halves begin */
  const float *weights;
  const __nv_bfloat16 *bias;
  void *d;
  int d_fp32, accumulate;
  moe_act_desc act;
  int act_level; /* PLAIN, CLAMPED or SOFT of activation.cuh */
  int inter;
  int h_width;     /* of h and dh */
  int in_pairs;    /* gate and up of an element are beside each other */
  int gate_column; /* of h, of element 0 where gates are all before or after ups */
  int h_shift;     /* element f is 2 f columns from there, and of a tile of h, or f */
  int h_up;        /* the piece with 8 ups is that many columns after the one with their gates, */
  int tile_up;     /* and so many in a tile of h */
  __nv_bfloat16 *h;
  __nv_bfloat16 *dh;
  float *partial; /* DACT: [rows, column_tiles] sums of acc * a, or NULL */
};
