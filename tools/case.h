/* SPDX-License-Identifier: Apache-2.0
 *
 * A problem made real: random data (a sample), and the buffers of one call of the library on it (a run).
 *
 * All arrays of both are found by a tensor id, so that filling, guarding, comparing and mutating are loops and not lists.
 * A sample depends on nothing but the problem: the n-th number of a tensor is a function of seed, tensor and n.
 *
 * The library works on blocks, the tool on their images in host memory. On the CPU a block is its image; where the back
 * end has memory of its own, run_open copies each image into its block, bands and filling included, and run_fetch copies
 * it back. */
#pragma once

#include "moeblas_ops.h"
#include "problem.h"

enum tensor {
  /* inputs */
  T_X,
  T_LOGITS,
  T_GIVEN_IDS,
  T_GIVEN_WEIGHTS,
  T_ROW_OFFSET,
  T_MASK,
  T_GLOBAL_COUNTS,
  T_DOUT,
  T_ROUTER_WEIGHT,
  T_ROUTER_BIAS,
  T_CORRECTION_BIAS,
  T_W1,
  T_B1,
  T_W2,
  T_B2,
  T_SHARED_W1,
  T_SHARED_W2,
  T_SHARED_GATE,
  T_LATENT_DOWN,
  T_LATENT_UP,
  /* outputs of forward */
  T_OUT,
  T_TOPK_IDS,
  T_TOPK_WEIGHTS,
  T_COUNTS,
  T_SLOT_ROW,
  T_LOSSES,
  /* outputs of backward */
  T_DX,
  T_DLOGITS,
  T_DTOPK_WEIGHTS,
  T_DROUTER_WEIGHT, /* the first parameter gradient */
  T_DROUTER_BIAS,
  T_DW1,
  T_DB1,
  T_DW2,
  T_DB2,
  T_DSHARED_W1,
  T_DSHARED_W2,
  T_DSHARED_GATE,
  T_DLATENT_DOWN,
  T_DLATENT_UP,
  /* memory of the library */
  T_SAVED,
  T_WORKSPACE,
  T_COUNT,
  T_INPUTS = T_OUT,   /* inputs are below */
  T_RESULTS = T_SAVED /* results are from T_INPUTS to below here */
};

enum element {
  ELEMENT_FP32 = MOE_FP32,
  ELEMENT_BF16,
  ELEMENT_FP16,
  ELEMENT_INT32,
  ELEMENT_INT64,
  ELEMENT_BYTE
};

struct shape {
  bool present;
  int element;
  int64_t rows;
  int64_t columns;
};

const char *tensor_name(enum tensor id);
struct shape tensor_shape(const struct problem *problem,
                          enum tensor id); /* not for T_SAVED and T_WORKSPACE */
int64_t shape_count(const struct shape *shape);
size_t shape_bytes(const struct shape *shape);
size_t element_bytes(int element);

/* Element i of an array, exactly; and rounded to its type. The tool's own: it must not trust the library's. */
double element_load(const void *array, int element, int64_t i);
void element_store(void *array, int element, int64_t i, double value);

/* ---- the data of a problem ------------------------------------------------------------------------------------- */

struct sample {
  struct problem problem;
  int64_t period; /* normal numbers repeat after so many */
  struct shape shape[T_COUNT];
  void *
      data[T_COUNT]; /* inputs; with `accumulate` also what the parameter gradients are added to. Else NULL */
};

/* False with a sentence if memory is short or the skew file is bad; sample_free is due in either case. */
bool sample_make(struct sample *sample, const struct problem *problem, char *error, size_t bytes);
/* The same, but normal numbers repeat after some four millions, a prime so that no two rows are alike: for timing, where
 * drawing the weights of a large layer would take longer than the measurement. */
bool sample_make_repeating(struct sample *sample, const struct problem *problem, char *error, size_t bytes);
void sample_free(struct sample *sample);

/* ---- one call -------------------------------------------------------------------------------------------------- */

/* Memory that the library works on. apart: it is not the host's, blocks and images are two. */
struct memory {
  moe_context *ctx;
  bool apart;
};
struct memory memory_of(moe_context *ctx);

/* Where an image lies: between its guard band and an unreadable page, before or behind it; or plainly, for timing. Apart,
 * nothing is unreadable, and there is a band on both sides. */
enum placement {
  PLACE_PLAIN,
  PLACE_END,
  PLACE_START
};

struct span {
  void *map; /* NULL: the image is the sample's */
  size_t map_bytes;
  unsigned char *inner; /* the image, the readable part of the map: bands and data */
  size_t inner_bytes;
  unsigned char *data;
  size_t bytes;
  void *block; /* what the library has: inner itself, unless apart */
};

struct run {
  const struct sample *sample;
  struct memory memory;
  moe_plan *plan; /* of the caller */
  struct span span[T_COUNT];
  size_t saved_bytes; /* as told to the library; the caller may lie about them */
  size_t workspace_bytes;
  bool keep;         /* forward leaves `saved` for backward */
  bool bare;         /* forward is asked for out, and for losses where there can be any: no reports */
  moe_stream stream; /* of the two calls; NULL after run_open */
};

/* Makes the buffers: inputs copied (plain: borrowed), results, saved and workspace filled with `poison`. NULL, or why they
 * could not be had; run_close is due in either case. */
const char *run_open(struct run *run, const struct sample *sample, struct memory memory, moe_plan *plan,
                     enum placement placement, int poison);
void run_close(struct run *run);
/* NULL if the problem has no such tensor. The image is what the tool reads, the block's data are what the library gets. */
void *run_data(const struct run *run, enum tensor id);
void *run_block(const struct run *run, enum tensor id);
moe_status run_forward(struct run *run); /* may still be at work when it returns, until run_fetch */
moe_status run_backward(struct run *run);
/* Fills the workspace with `poison` anew: backward may not count on what forward left there. */
moe_status run_poison_workspace(struct run *run, int poison);
/* Brings the image of one tensor, or of all, up to date. */
moe_status run_fetch_tensor(struct run *run, enum tensor id);
moe_status run_fetch(struct run *run);
/* The tensor whose surroundings, or whose data as an input, were written to; T_COUNT if none. */
enum tensor run_damaged(const struct run *run);
