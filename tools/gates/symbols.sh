#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Gate: libmoeblas.so exports exactly the functions that the public headers declare, and libmoeblas.a defines no global
# name but moe_*. The declarations are read by the compiler, the export list of the Makefile by a pattern: the two ways
# must agree. `--self-test` shows that a missing, an extra and an ill-named symbol are found.
set -euo pipefail
cd "$(dirname "$0")/../.."
build=${BUILD:-build}

declared() {
  printf '#include "moeblas.h"\n#include "moeblas_ops.h"\n' |
    gcc -std=c11 -Iinclude -x c - -fsyntax-only -aux-info /dev/stdout | sed -nE 's/^.*include\/moeblas.*[ *](moe_\w+) \(.*/\1/p' | sort -u
}
exported() { nm -D --defined-only "$build/libmoeblas.so" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' | sort -u; }
global() { nm -g --defined-only "$build/libmoeblas.a" 2>/dev/null | awk 'NF == 3 { print $3 }' | sort -u; }

compare() { # declared, exported, global: one line a violation
  comm -23 <(echo "$1") <(echo "$2") | sed '/^$/d; s/$/: declared but not exported/'
  comm -13 <(echo "$1") <(echo "$2") | sed '/^$/d; s/$/: exported but not declared/'
  echo "$3" | grep -v '^moe_' | sed '/^$/d; s/$/: a global name of libmoeblas.a that does not start with moe_/' || true
}

if [[ ${1:-} == --self-test ]]; then
  two=$'moe_a\nmoe_b'
  [[ -z $(compare "$two" "$two" "$two") && -n $(compare "$two" moe_a "$two") && -n $(compare moe_a "$two" "$two") &&
    -n $(compare "$two" "$two" $'a\nmoe_a') && $(declared | wc -l) -gt 20 ]] || { echo "0 passed, 1 failed"; exit 1; }
  echo "1 passed, 0 failed"
  exit 0
fi

[[ -f $build/libmoeblas.so && -f $build/libmoeblas.a ]] || { echo "no library in $build"; echo "0 passed, 1 failed"; exit 1; }
found=$(compare "$(declared)" "$(exported)" "$(global)")
[[ -z $found ]] || { echo "$found"; echo "0 passed, 1 failed"; exit 1; }
echo "$(declared | wc -l) functions"
echo "1 passed, 0 failed"
