/* SPDX-License-Identifier: Apache-2.0
 *
 * What: another user of the GPU in the same process, with a CUDA runtime of its own.
 * Idea: what moeblas has no function for, because no caller of it needs it: to hold multiprocessors, to break the context,
 * to ask how much memory is left.
 * Invariant: each function returns NULL, or a sentence on what went wrong. One thread at a time. */
#pragma once

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes of the whole device that nobody has allocated. */
const char *device_free_bytes(size_t *bytes);

/* Holds every multiprocessor but `spare_count` of them, until the release: a block with all the shared memory of one lies on
 * each, so that no other block fits beside it. Which are spared depends on `spare_first`, from 0 to the multiprocessors
 * less `spare_count`. Waits until the others are held. */
const char *device_hold(int spare_first, int spare_count);
/* Fails if they were no longer held: the holder gives up after a minute, lest a hang be for ever. */
const char *device_release(void);

/* A kernel that traps: every later call into CUDA of this process fails. */
const char *device_trap(void);
/* An allocation that is refused: the runtime of this file remembers an error, the context is as it was. */
const char *device_refuse(void);
/* 1 where kernels may read any memory of the host, so that a host pointer is no fault. */
const char *device_reads_host(int *answer);

#ifdef __cplusplus
}
#endif
