#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Gate: what was linked keeps the promises of the flags. Read-only relocations that are all resolved at start, no stack and no
# segment that is writable and executable, no relocation of code, a tool that may lie anywhere, canaries and checked string
# functions; and no path of this machine, so that builds in other folders give the same bytes.
# `--self-test` shows that a file linked the other way fails each of them.
set -euo pipefail
cd "$(dirname "$0")/../.."
build=${BUILD:-build}

complain() { # file path: one line a violation
  local file=$1 path=$2 segments dynamic symbols
  segments=$(readelf -hlW "$file") dynamic=$(readelf -dW "$file") symbols=$(readelf --dyn-syms -W "$file")
  grep -q GNU_RELRO <<<"$segments" || echo "$file: no RELRO"
  grep -qE 'BIND_NOW|Flags:.* NOW' <<<"$dynamic" || echo "$file: symbols are bound lazily"
  grep -qE 'GNU_STACK.* RW ' <<<"$segments" || echo "$file: the stack is executable"
  ! grep -qE ' (RWE|RW E) ' <<<"$segments" || echo "$file: a segment is writable and executable"
  ! grep -q TEXTREL <<<"$dynamic" || echo "$file: code is relocated"
  grep -q 'Type: *DYN' <<<"$segments" || echo "$file: not position independent"
  grep -q __stack_chk_fail <<<"$symbols" || echo "$file: no canaries"
  grep -qE '__\w+_chk' <<<"$symbols" || echo "$file: no checked string functions"
  ! grep -qF "$path" "$file" || echo "$file: contains the path $path"
}

if [[ ${1:-} == --self-test ]]; then
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  printf '#include <stdio.h>\nint main(int c, char **v) { char b[99]; return snprintf(b, 50 + c, "%%s", v[0]) + b[0]; }\n' >"$scratch/a.c"
  gcc -g -O2 -fno-stack-protector -U_FORTIFY_SOURCE -no-pie -Wl,-z,norelro,-z,lazy,-z,execstack "$scratch/a.c" -o "$scratch/bad"
  (cd "$scratch" && gcc -O2 -D_FORTIFY_SOURCE=2 -fstack-protector-all -fPIE -pie -Wl,-z,relro,-z,now a.c -o good)
  bad=$(complain "$scratch/bad" "$scratch" | wc -l)
  good=$(complain "$scratch/good" "$scratch")
  [[ -z $good && $bad -ge 7 ]] || { echo "$good"; echo "$bad complaints"; echo "0 passed, 1 failed"; exit 1; }
  echo "1 passed, 0 failed"
  exit 0
fi

[[ -f $build/libmoeblas.so ]] || { echo "no library in $build"; echo "0 passed, 1 failed"; exit 1; }
found=$(for file in libmoeblas.so libmoeblas_xla.so moeblas; do
  [[ ! -f $build/$file ]] || complain "$build/$file" "$PWD/"
done)
[[ -z $found ]] || { echo "$found"; echo "0 passed, 1 failed"; exit 1; }
echo "1 passed, 0 failed"
