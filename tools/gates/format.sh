#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Gate: clang-format leaves every C file as it is, and every source names its licence.
# `--self-test` shows that a badly formatted file is found.
set -euo pipefail
cd "$(dirname "$0")/../.."

complain() { # file...: one line a violation
  clang-format --style=file:.clang-format --dry-run --ferror-limit=1 "$@" 2>&1 | grep -E 'warning:|error:' || true
  grep -L 'SPDX-License-Identifier: Apache-2.0' "$@" | sed 's/$/: no SPDX licence line/' || true
}

if [[ ${1:-} == --self-test ]]; then
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  printf '/* SPDX-License-Identifier: Apache-2.0 */\nint good;\n' >"$scratch/good.c"
  printf '/* SPDX-License-Identifier: Apache-2.0 */\nint   bad ;\n' >"$scratch/bad.c"
  printf 'int unlicensed;\n' >"$scratch/unlicensed.c"
  [[ -z $(complain "$scratch/good.c") && -n $(complain "$scratch/bad.c") && -n $(complain "$scratch/unlicensed.c") ]] ||
    { echo "0 passed, 1 failed"; exit 1; }
  echo "1 passed, 0 failed"
  exit 0
fi

mapfile -t files < <(git ls-files -co --exclude-standard '*.c' '*.h')
found=$(complain "${files[@]}")
[[ -z $found ]] || { echo "$found"; echo "0 passed, 1 failed"; exit 1; }
echo "${#files[@]} files formatted"
echo "1 passed, 0 failed"
