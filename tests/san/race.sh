#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# That TSan with archer sees a race, and none where a barrier is: without this a silent tool would look like a clean one.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
build() { # loop, name
  printf '#include <stdio.h>\nint main(void) { int sum = 0;\n%s\nprintf("%%d\\n", sum); return 0; }\n' "$1" >"$dir/$2.c"
  clang -O1 -g -fopenmp -fsanitize=thread -o "$dir/$2" "$dir/$2.c"
}
build '_Pragma("omp parallel for num_threads(4)") for (int i = 0; i < 100000; i++) sum += i & 1;' race
build '_Pragma("omp parallel for num_threads(4) reduction(+ : sum)") for (int i = 0; i < 100000; i++) sum += i & 1;' clean
"$dir/clean"
if "$dir/race" >"$dir/log" 2>&1; then echo "a race was not seen" >&2 && exit 1; fi
grep -q "data race" "$dir/log"
