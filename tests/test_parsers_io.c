/* SPDX-License-Identifier: Apache-2.0
 *
 * What: readers whose file gives out while they read it, and lengths that no file of a test can have.
 * Idea: the calls to the system go through stand-ins that a test scripts; a file that breaks off is a stream whose
 * source fails after its text.
 * Invariant: every failure comes back as a status and a sentence. */
#include "test.h"

#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../tools/cli.h"
#include "../tools/presets.h"
#include "../tools/problem_list.h"
#include "../tools/train/safetensors.h"

/* ---- a stream that breaks off ---------------------------------------------------------------------------------- */

static const char *broken_text; /* what fopen's stream holds before it fails; NULL: fopen is the system's */
static int no_executable;       /* readlink fails */
static int no_problem;          /* problem_parse refuses */

FILE *__real_fopen(const char *path, const char *mode);
FILE *__wrap_fopen(const char *path, const char *mode);
ssize_t __real_readlink(const char *path, char *target, size_t bytes);
ssize_t __wrap_readlink(const char *path, char *target, size_t bytes);
bool __real_problem_parse(const char *text, struct problem *problem, char *error, size_t bytes);
bool __wrap_problem_parse(const char *text, struct problem *problem, char *error, size_t bytes);

static ssize_t read_broken(void *cookie, char *buffer, size_t bytes) {
  const char **const rest = cookie;
  const size_t length = strlen(*rest) < bytes ? strlen(*rest) : bytes;
  if (length == 0) return errno = EIO, -1;
  memcpy(buffer, *rest, length);
  *rest += length;
  return (ssize_t)length;
}

FILE *__wrap_fopen(const char *path, const char *mode) {
  if (broken_text == NULL) return __real_fopen(path, mode);
  return fopencookie(&broken_text, mode, (cookie_io_functions_t){.read = read_broken});
}
ssize_t __wrap_readlink(const char *path, char *target, size_t bytes) {
  return no_executable ? -1 : __real_readlink(path, target, bytes);
}
bool __wrap_problem_parse(const char *text, struct problem *problem, char *error, size_t bytes) {
  return !no_problem && __real_problem_parse(text, problem, error, bytes);
}

TEST(presets_that_break_off) {
  struct problem problem;
  char error[512] = "";
  broken_text = "name,h,notes\na,8,\n";
  const bool found = presets_find("a", &problem, error, sizeof error);
  broken_text = NULL;
  EXPECT(!found && strstr(error, "line 3, column 1: Input/output error"), "%d: %s", found, error);
}

/* The two places where the presets may lie are then ones that are not there. */
TEST(presets_of_an_executable_that_the_system_does_not_name) {
  struct problem problem;
  char error[512] = "";
  const char *const given = getenv("MOEBLAS_PRESETS");
  char *const before = given ? strdup(given) : NULL;
  unsetenv("MOEBLAS_PRESETS");
  no_executable = 1;
  const bool found = presets_find("a", &problem, error, sizeof error);
  no_executable = 0;
  if (before) setenv("MOEBLAS_PRESETS", before, 1);
  free(before);
  EXPECT(!found && strncmp(error, "presets: /../data/presets.csv: ", 31) == 0, "%d: %s", found, error);
}

/* ---- lists ----------------------------------------------------------------------------------------------------- */

static int count_problems(void *context, const struct problem *problem) {
  *(int64_t *)context += problem->tokens;
  return CLI_GO_ON;
}

/* Reads @FILE with this text and a disk that fails after it; what is said goes to `said`. */
static int read_list(const char *text, int64_t *count, char said[512]) {
  char argument[] = "@list", *arguments[] = {argument};
  FILE *const err = stderr;
  *count = 0;
  broken_text = text;
  stderr = fmemopen(said, 512, "w");
  const int code = problem_list("test", arguments, 1, count_problems, count);
  fclose(stderr);
  stderr = err;
  broken_text = NULL;
  return code;
}

TEST(a_list_that_breaks_off) {
  char said[512];
  int64_t count;
  const int code = read_list("t4\nt5\n", &count, said);
  EXPECT(code == CLI_IO && count == 0, "status %d, %lld tokens", code, (long long)count);
  EXPECT(strcmp(said, "moeblas test: list: Input/output error\n") == 0, "%s", said);
}

TEST(a_problem_that_is_drawn_and_refused) {
  struct problem problem, usual;
  problem_default(&usual);
  no_problem = 1;
  problem_random(&problem, 1, 1);
  no_problem = 0;
  EXPECT(memcmp(&problem, &usual, sizeof usual) == 0, "it is not the default");
}

/* ---- pread ----------------------------------------------------------------------------------------------------- */

/* What the calls answer, one after the other: -errno, or the bytes that are read, 0 being the end of the file.
 * AS_ASKED: all that was asked for, which is not written; SYSTEM: the system's answer. */
enum {
  AS_ASKED = 1 << 30,
  SYSTEM,
  MOST = 1 << 30
};
static const int *answers; /* NULL: pread is the system's */
static uint64_t asked;     /* bytes, by the calls that were answered AS_ASKED */
static off_t last_offset;
static int no_status; /* fstat fails */

ssize_t __real_pread(int fd, void *into, size_t bytes, off_t offset);
ssize_t __wrap_pread(int fd, void *into, size_t bytes, off_t offset);
int __real_fstat(int fd, struct stat *status);
int __wrap_fstat(int fd, struct stat *status);

ssize_t __wrap_pread(int fd, void *into, size_t bytes, off_t offset) {
  const int answer = answers ? *answers++ : SYSTEM;
  if (answer == SYSTEM) return __real_pread(fd, into, bytes, offset);
  last_offset = offset;
  if (answer < 0) return errno = -answer, -1;
  if (answer != AS_ASKED) return answer;
  EXPECT(bytes <= MOST, "%zu bytes are asked for at once", bytes);
  asked += bytes;
  return (ssize_t)bytes;
}
int __wrap_fstat(int fd, struct stat *status) {
  return no_status ? (errno = EIO, -1) : __real_fstat(fd, status);
}

/* Opens a good file with pread answering so. */
static int open_scripted(const int *script, char error[512]) {
  static const char file[] = "\x02\0\0\0\0\0\0\0{}";
  char path[] = "/tmp/moeblas_XXXXXX";
  const int fd = mkstemp(path);
  struct safetensors s;
  error[0] = '\0';
  if (fd < 0 || write(fd, file, sizeof file - 1) != sizeof file - 1) return -1;
  answers = script;
  const int failed = safetensors_open(&s, path, error, 512);
  answers = NULL;
  if (!failed) safetensors_close(&s);
  close(fd);
  unlink(path);
  return failed;
}

TEST(a_checkpoint_that_cannot_be_read) {
  static const struct {
    int answers[4];
    int status;
    const char *sentence;
  } cases[] = {{{SYSTEM, SYSTEM}, 0, ""},
               {{-EINTR, SYSTEM, -EINTR, SYSTEM}, 0, ""},
               {{-EIO}, 3, "cannot be read: Input/output error"},
               {{SYSTEM, -EIO}, 3, "cannot be read: Input/output error"},
               {{0}, 3, "became shorter while it was read"},
               {{SYSTEM, 0}, 3, "became shorter while it was read"}};
  char error[512];
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const int failed = open_scripted(cases[i].answers, error);
    EXPECT(failed == cases[i].status && strstr(error, cases[i].sentence), "%zu: %d \"%s\"", i, failed, error);
  }
  no_status = 1;
  const int failed = open_scripted(NULL, error);
  no_status = 0;
  EXPECT(failed == 3 && strstr(error, "cannot be read: Input/output error"), "%d \"%s\"", failed, error);
}

/* No call asks for more than 2^30 bytes, and each goes on where the last one ended. */
TEST(a_tensor_of_more_than_one_read) {
  static const int script[] = {AS_ASKED, AS_ASKED, AS_ASKED};
  const uint64_t bytes = 2 * (uint64_t)MOST + 4;
  const struct safetensors s = {.fd = -1, .data_start = 100};
  const struct safetensors_entry entry = {.name = "a", .begin = 8, .end = 8 + bytes};
  float nothing[1];
  char error[512] = "";
  asked = 0;
  answers = script;
  const int failed = safetensors_read(&s, &entry, nothing, error, sizeof error);
  EXPECT(!failed && answers == script + 3, "%s", error);
  answers = NULL;
  EXPECT(asked == bytes && last_offset == 108 + 2 * (off_t)MOST, "%llu bytes, the last at %lld",
         (unsigned long long)asked, (long long)last_offset);
}

/* ---- what is not written --------------------------------------------------------------------------------------- */

static void expect_unwritten(const struct tensor *tensors, int count, const struct checkpoint_meta *meta,
                             int code, const char *sentence) {
  char written[64] = "", error[512] = "";
  FILE *const file = fmemopen(written, sizeof written, "w");
  const int failed = safetensors_write(file, tensors, count, meta, meta != NULL, error, sizeof error);
  fclose(file);
  EXPECT(failed == code && strstr(error, sentence), "%d \"%s\", wanted \"%s\"", failed, error, sentence);
  EXPECT(written[0] == '\0', "something was written");
}

TEST(metadata_without_an_end) {
  struct checkpoint_meta key = {"", "value"}, value = {"key", ""};
  memset(key.key, 'k', sizeof key.key);
  memset(value.value, 'v', sizeof value.value);
  expect_unwritten(NULL, 0, &key, 3, "metadata without an end");
  expect_unwritten(NULL, 0, &value, 3, "metadata without an end");
}

TEST(tensors_beyond_all_files) {
  const struct tensor tensors[] = {{"a", NULL, {(int64_t)1 << 60}, 1},
                                   {"b", NULL, {((int64_t)1 << 62) - 1}, 1}};
  expect_unwritten(tensors, 2, NULL, 2, "tensor b: its shape has no size");     /* the sum is over 2^64 */
  expect_unwritten(tensors + 1, 1, NULL, 2, "tensor b: its shape has no size"); /* one is over 2^63 */
}

TEST_MAIN()
