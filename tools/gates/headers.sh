#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Gate: each public header compiles alone, without a warning, as C11, C17 and C++17.
# `--self-test` shows that a header that leans on another, or that is not C++, is found.
set -euo pipefail
cd "$(dirname "$0")/../.."
warnings="-Wall -Wextra -Wpedantic -Werror -Iinclude -fsyntax-only"

compiles() { # header
  # shellcheck disable=SC2086 # warnings is words
  gcc -std=c11 $warnings -include "$1" -x c /dev/null &&
    gcc -std=c17 $warnings -include "$1" -x c /dev/null &&
    g++ -std=c++17 $warnings -include "$1" -x c++ /dev/null
}

if [[ ${1:-} == --self-test ]]; then
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  echo 'int good(void);' >"$scratch/good.h"
  echo 'int leans(int64_t x);' >"$scratch/leans.h"
  echo 'int not_cxx(int class);' >"$scratch/not_cxx.h"
  compiles "$scratch/good.h" || { echo "0 passed, 1 failed"; exit 1; }
  for bad in leans not_cxx; do
    ! compiles "$scratch/$bad.h" 2>/dev/null || { echo "$bad.h went through"; echo "0 passed, 1 failed"; exit 1; }
  done
  echo "1 passed, 0 failed"
  exit 0
fi

passed=0 failed=0
for header in include/*.h; do
  if compiles "$PWD/$header"; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
done
echo "$passed passed, $failed failed"
((failed == 0))
