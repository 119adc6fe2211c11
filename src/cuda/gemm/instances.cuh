/* SPDX-License-Identifier: Apache-2.0
 * A table of the rows of gemm.def that the including file selects. */
#pragma once

#include "gemm.cuh"
#include "host.h"

static const gemm_instance instances[] = {
#define GEMM(EPILOGUE, BN, STAGES, KN)                  \
  {(const void *)gemm_kernel<BN, STAGES, EPILOGUE, KN>, \
   EPILOGUE,                                            \
   BN,                                                  \
   gemm_roles<BN, EPILOGUE>::threads,                   \
   KN,                                                  \
   sizeof(gemm_shared<BN, STAGES, EPILOGUE>)},
#include "gemm.def"
#undef GEMM
};

static gemm_table table() { return {instances, (int)(sizeof instances / sizeof *instances)}; }
