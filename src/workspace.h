/* SPDX-License-Identifier: Apache-2.0
 *
 * A bump allocator on memory of the caller. A size query runs the very code that will later run for real, on an arena
 * without memory, and reads the high-water mark: so the query cannot disagree with the use. */
#pragma once

#include "util.h"

struct arena {
  uintptr_t base; /* 0: measuring */
  size_t used;
  size_t peak;
};

/* Memory for `bytes`, aligned to MOE_ALIGN from the base on. Never NULL; while measuring, an address not to be touched. */
static inline void *arena_take(struct arena *arena, size_t bytes) {
  const uintptr_t address = (arena->base ? arena->base : MOE_ALIGN) + arena->used;
  arena->used += ALIGN_UP(bytes, (size_t)MOE_ALIGN);
  if (arena->used > arena->peak) arena->peak = arena->used;
  return (void *)address; /* NOLINT(performance-no-int-to-ptr) */
}
