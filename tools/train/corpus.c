/* SPDX-License-Identifier: Apache-2.0
 *
 * Reads files into one text, refuses what is not text, and splits it.
 * The default text is the source tree itself: found by include/moeblas.h upwards from the executable or the current
 * folder, walked in the order of names (bytewise, whatever the locale). */
#include "corpus.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "text.h"

enum {
  BLOCK_BYTES = 8192,
  HELD_OUT_EVERY = 10,
  LEAST_BYTES = 4096,
  PATH_BYTES = 4096
};

struct loader { /* the text so far, and where sentences go */
  uint8_t *text;
  size_t bytes, capacity;
  char *error;
  size_t error_bytes;
};

static int make_room(struct loader *l, size_t more) {
  if (more > SIZE_MAX / 2 - l->bytes) return -1;
  if (l->bytes + more <= l->capacity) return 0;
  const size_t capacity = 2 * (l->bytes + more);
  uint8_t *text = realloc(l->text, capacity);
  if (text == NULL) return -1;
  l->text = text;
  l->capacity = capacity;
  return 0;
}

static int append_all(struct loader *l, int fd, const char *path) {
  for (;;) {
    if (make_room(l, 1 << 16) != 0)
      return text_fail(EXIT_SYSTEM, l->error, l->error_bytes, "%s: does not fit into memory", path);
    const ssize_t got = read(fd, l->text + l->bytes, 1 << 16);
    if (got == 0) return 0;
    if (got > 0)
      l->bytes += (size_t)got;
    else if (errno != EINTR)
      return text_fail(EXIT_SYSTEM, l->error, l->error_bytes, "%s: cannot be read: %s", path,
                       strerror(errno));
  }
}

/* NULL for text, else what is wrong with it. */
static const char *junk(const uint8_t *p, size_t bytes) {
  if (bytes == 0) return "is empty";
  if (memchr(p, 0, bytes)) return "is binary: it has NUL bytes";
  size_t odd = 0, length;
  for (size_t i = 0; i < bytes; i += length) {
    length = text_utf8(p + i, bytes - i);
    const int control = p[i] == 0x7f || (p[i] < 0x20 && strchr("\t\n\v\f\r", p[i]) == NULL);
    odd += length == 0 || control;
    if (length == 0) length = 1;
  }
  return odd > bytes / 10 ? "is binary: more than a tenth of it is neither printable nor UTF-8" : NULL;
}

static int append_file(struct loader *l, const char *path) {
  /* O_NONBLOCK: opening a pipe must not wait for its writer before it is refused. */
  const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0)
    return text_fail(EXIT_INPUT, l->error, l->error_bytes, "%s: cannot be opened: %s", path, strerror(errno));
  struct stat status;
  const char *reason = fstat(fd, &status) != 0    ? "cannot be read"
                       : S_ISDIR(status.st_mode)  ? "is a folder, wanted text files"
                       : !S_ISREG(status.st_mode) ? "is not a regular file"
                                                  : NULL;
  const size_t before = l->bytes;
  const int failed = reason == NULL ? append_all(l, fd, path) : 0;
  close(fd);
  if (failed) return failed;
  if (reason == NULL) reason = junk(l->text + before, l->bytes - before);
  return reason ? text_fail(EXIT_INPUT, l->error, l->error_bytes, "%s: %s", path, reason) : 0;
}

static int one_of(const char *name, const char *const *list) {
  while (*list && strcmp(name, *list) != 0) list++;
  return *list != NULL;
}

static int is_source_name(const char *name) {
  static const char *const endings[] = {".c", ".h", ".cu", ".cuh", ".md", ".def", ".txt", ".py", ".sh", NULL};
  const char *dot = strrchr(name, '.');
  return strcmp(name, "Makefile") == 0 || (dot && dot != name && one_of(dot, endings));
}

/* At the root a folder has to be one of ours; below, generated and hidden ones are left out. */
static int is_source_folder(const char *name, int at_root) {
  static const char *const ours[] = {"docs", "examples", "include", "python", "src", "tests", "tools", NULL};
  static const char *const generated[] = {"run", "out", "__pycache__", NULL};
  if (at_root) return one_of(name, ours);
  return name[0] != '.' && strncmp(name, "build", 5) != 0 && !one_of(name, generated);
}

static int by_name(const struct dirent **a, const struct dirent **b) {
  return strcmp((*a)->d_name, (*b)->d_name);
}

static int append_folder(struct loader *l, const char *dir, int at_root);

/* One entry of a folder. Empty files and files of the tests that are deliberately no text are passed over. */
static int append_entry(struct loader *l, const char *dir, const char *name, int at_root) {
  char path[PATH_BYTES];
  struct stat status;
  if ((size_t)snprintf(path, sizeof path, "%s/%s", dir, name) >= sizeof path) return 0;
  if (lstat(path, &status) != 0) return 0; /* an editor's file that came and went */
  if (S_ISDIR(status.st_mode)) return is_source_folder(name, at_root) ? append_folder(l, path, 0) : 0;
  if (!S_ISREG(status.st_mode) || !is_source_name(name)) return 0;
  const size_t before = l->bytes;
  const int failed = append_file(l, path);
  if (failed == EXIT_INPUT) l->bytes = before;
  return failed == EXIT_INPUT ? 0 : failed;
}

static int append_folder(struct loader *l, const char *dir, int at_root) {
  struct dirent **entries;
  const int count = scandir(dir, &entries, NULL, by_name);
  if (count < 0)
    return text_fail(EXIT_SYSTEM, l->error, l->error_bytes, "%s: cannot be listed: %s", dir, strerror(errno));
  int failed = 0;
  for (int i = 0; i < count; i++) {
    const char *name = entries[i]->d_name;
    if (!failed && strcmp(name, ".") != 0 && strcmp(name, "..") != 0)
      failed = append_entry(l, dir, name, at_root);
    free(entries[i]);
  }
  free(entries);
  return failed;
}

/* Cuts path down to the folder that is the source tree; 0 when it is in none. */
static int find_root(char *path) {
  char probe[PATH_BYTES + 32];
  for (char *end = path; end; *end = '\0') {
    snprintf(probe, sizeof probe, "%s/include/moeblas.h", path);
    if (access(probe, R_OK) == 0) return 1;
    if ((end = strrchr(path, '/')) == NULL) break;
  }
  return 0;
}

static int append_source_tree(struct loader *l) {
  char path[PATH_BYTES];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
  path[length > 0 ? length : 0] = '\0';
  if (find_root(path) || (getcwd(path, sizeof path) && find_root(path))) return append_folder(l, path, 1);
  return text_fail(
      EXIT_INPUT, l->error, l->error_bytes,
      "no text given, and neither the program nor the current folder is in the moeblas source tree");
}

static int split(struct corpus *c, const struct loader *l) {
  const size_t tenth = l->bytes / HELD_OUT_EVERY, block = tenth < BLOCK_BYTES ? tenth : BLOCK_BYTES;
  c->train = malloc(l->bytes);
  c->val = malloc(l->bytes);
  if (c->train == NULL || c->val == NULL) return -1;
  for (size_t at = 0, i = 0; at < l->bytes; at += block, i++) {
    const size_t bytes = l->bytes - at < block ? l->bytes - at : block;
    const int held_out = i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1;
    memcpy(held_out ? c->val + c->val_bytes : c->train + c->train_bytes, l->text + at, bytes);
    *(held_out ? &c->val_bytes : &c->train_bytes) += bytes;
  }
  return 0;
}

int corpus_load(struct corpus *c, char *const *files, int count, char *error, size_t error_bytes) {
  struct loader l = {.error = error, .error_bytes = error_bytes};
  memset(c, 0, sizeof *c);
  int failed = count == 0 ? append_source_tree(&l) : 0;
  for (int i = 0; i < count && !failed; i++) failed = append_file(&l, files[i]);
  if (!failed && l.bytes < LEAST_BYTES)
    failed = text_fail(EXIT_INPUT, error, error_bytes, "the text has %zu bytes, wanted at least %d", l.bytes,
                       LEAST_BYTES);
  if (!failed && split(c, &l) != 0)
    failed = text_fail(EXIT_SYSTEM, error, error_bytes, "no memory for a text of %zu bytes", l.bytes);
  if (failed) corpus_free(c);
  free(l.text);
  return failed;
}

void corpus_free(struct corpus *c) {
  free(c->train);
  free(c->val);
  memset(c, 0, sizeof *c);
}

/* FNV-1a, 64 bit. */
static uint64_t hash(uint64_t h, const uint8_t *p, size_t bytes) {
  for (size_t i = 0; i < bytes; i++) h = (h ^ p[i]) * 0x100000001b3u;
  return (h ^ bytes) * 0x100000001b3u;
}

uint64_t corpus_hash(const struct corpus *c) {
  return hash(hash(0xcbf29ce484222325u, c->train, c->train_bytes), c->val, c->val_bytes);
}
