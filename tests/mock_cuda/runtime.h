/* SPDX-License-Identifier: Apache-2.0
 *
 * What: a CUDA runtime that computes nothing, in the place of the real one: what the host side of the CUDA back end asks it for can
 * be looked at, and refused, on a machine without a GPU.
 * Idea: it has as many devices of any capability as a test says, hands out addresses that nobody may touch, and keeps the launches.
 * Invariant: it is stricter than the real one: a kernel must have been loaded, and fit, before it is launched; tensor maps keep the
 * rules of cuTensorMapEncodeTiled. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include <cuda_runtime_api.h>

enum {
  MOCK_LAUNCHES = 64,
  MOCK_UNITS = 132,
  MOCK_SHARED = 227 * 1024 /* that a block can have */
};

struct mock_launch {
  const char *kernel; /* mangled */
  int64_t blocks;
  int threads;
  size_t shared; /* dynamic */
  cudaStream_t stream;
};

extern struct mock {
  int devices, capability[4]; /* 90: Hopper */
  bool no_tensor_maps;        /* a driver that is too old */
  int64_t
      waits; /* allocations, frees, copies, fills, synchronisations, events: none of these in a run call */
  int64_t launches; /* since mock_forget; the first MOCK_LAUNCHES are kept */
  struct mock_launch launch[MOCK_LAUNCHES];
  cudaError_t refuse_launch; /* what the next launches answer, */
  int64_t refuse_after;      /* but for so many */
  bool refuse_map;           /* the next tensor maps */
  char broken[256];          /* the first rule that was not kept, or "" */
} mock;

/* Launches, waits and refusals. */
void mock_forget(void);
