/* SPDX-License-Identifier: Apache-2.0
 *
 * A file that appears complete or not at all. */
#include "atomic.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "text.h"

static int join(char *out, size_t bytes, const char *dir, const char *name, const char *suffix) {
  const int length = snprintf(out, bytes, "%s/%s%s", dir, name, suffix);
  return length < 0 || (size_t)length >= bytes;
}

int atomic_open(struct atomic_file *a, const char *dir, const char *name, char *error, size_t error_bytes) {
  a->file = NULL;
  if (join(a->path, sizeof a->path, dir, name, "") ||
      join(a->temporary, sizeof a->temporary, dir, name, ".tmp") || join(a->dir, sizeof a->dir, dir, ".", ""))
    return text_fail(EXIT_SYSTEM, error, error_bytes, "the path of the folder for %s is too long", name);
  /* A temporary file left by a crash is reused; a link in its place is not followed. */
  const int fd = open(a->temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0666);
  if (fd >= 0 && (a->file = fdopen(fd, "wb")) != NULL) return 0;
  const int reason = errno;
  if (fd >= 0) {
    close(fd);
    unlink(a->temporary);
  }
  return text_fail(EXIT_SYSTEM, error, error_bytes, "%s: cannot be written: %s", a->temporary,
                   strerror(reason));
}

void atomic_cancel(struct atomic_file *a) {
  if (a->file == NULL) return;
  fclose(a->file);
  unlink(a->temporary);
  a->file = NULL;
}

/* The rename is on disk only when the folder is. File systems that cannot sync a folder say EINVAL. */
static int sync_folder(const char *dir) {
  const int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return -1;
  const int failed = fsync(fd) != 0 && errno != EINVAL;
  const int reason = errno;
  close(fd);
  errno = reason;
  return failed ? -1 : 0;
}

int atomic_commit(struct atomic_file *a, char *error, size_t error_bytes) {
  const int written = fflush(a->file) == 0 && !ferror(a->file) && fsync(fileno(a->file)) == 0;
  const int moved = written && rename(a->temporary, a->path) == 0;
  const int reason = errno ? errno : EIO; /* of the first write that failed */
  if (!moved) {
    atomic_cancel(a);
    return text_fail(EXIT_SYSTEM, error, error_bytes, "%s: cannot be written: %s", a->path, strerror(reason));
  }
  fclose(a->file);
  a->file = NULL;
  if (sync_folder(a->dir) == 0) return 0;
  return text_fail(EXIT_SYSTEM, error, error_bytes, "%s: is written, but its folder cannot be synced: %s",
                   a->path, strerror(errno));
}
