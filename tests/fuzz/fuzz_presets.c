/* SPDX-License-Identifier: Apache-2.0
 *
 * The file of presets: refused with a sentence that names the place, or every line is a problem that can be printed. */
#include "fuzz.h"

#include "../../tools/presets.h"

static void print_preset(void *context, const char *name, const struct problem *problem, const char *notes) {
  char text[PROBLEM_TEXT];
  (void)notes;
  PROMISE(name[0] != '\0', "a preset without a name");
  problem_print(problem, text);
  ++*(int *)context;
}

int fuzz_presets(const uint8_t *data, size_t size) {
  struct fuzz_file file = fuzz_file(data, size);
  const char *const before = getenv("MOEBLAS_PRESETS");
  char error[PROBLEM_ERROR] = "", *kept = before ? strdup(before) : NULL;
  struct problem problem;
  int count = 0;
  setenv("MOEBLAS_PRESETS", file.path, 1);
  if (!presets_walk(print_preset, &count, error, sizeof error)) fuzz_sentence(error, sizeof error);
  error[0] = '\0';
  if (!presets_find("a", &problem, error, sizeof error)) fuzz_sentence(error, sizeof error);
  if (kept)
    setenv("MOEBLAS_PRESETS", kept, 1);
  else
    unsetenv("MOEBLAS_PRESETS");
  free(kept);
  close(file.fd);
  return 0;
}
