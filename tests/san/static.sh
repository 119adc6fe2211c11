#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# gcc -fanalyzer, clang-tidy (bugprone, cert, performance) and cppcheck over src and tools. A line of known.txt is
# "tool | file | part of the message | reason"; a warning without its line fails, and so does a line without its warning.
set -uo pipefail
cd "$(dirname "$0")/../.."
found=$(mktemp)
trap 'rm -f "$found"' EXIT
files=(src/*.c src/cpu/*.c tools/*.c tools/train/*.c)
flags=(-std=c11 -D_GNU_SOURCE -Iinclude -Isrc -Itools -Itests -DMOE_KERNEL=base)
# Left out: arguments that could be swapped (the names are the guard), results of printf and the like (cli_finish and
# ferror look once at the end), strcmp as a truth value, widened products of constants, casts that %lld wants.
checks='-*,bugprone-*,cert-*,performance-*,-bugprone-easily-swappable-parameters,-cert-err33-c'
checks+=,-bugprone-suspicious-string-compare,-bugprone-implicit-widening-of-multiplication-result
checks+=,-bugprone-misplaced-widening-cast

analyse() { # file: "tool | file | line | message"
  gcc "${flags[@]}" -O1 -fopenmp-simd -Wno-unknown-pragmas -fanalyzer -c -o /dev/null "$1" 2>&1 |
    sed -nE 's/^([^:]+):([0-9]+):[0-9]+: warning: (.*)/fanalyzer | \1 | \2 | \3/p'
  clang-tidy --quiet --checks="$checks" "$1" -- "${flags[@]}" -fopenmp 2>/dev/null |
    sed -nE "s|^$PWD/||; s/^([^:]+):([0-9]+):[0-9]+: warning: (.*)/clang-tidy | \1 | \2 | \3/p"
  cppcheck --quiet --std=c11 --enable=warning,performance --suppress=missingIncludeSystem -D__CPPCHECK__ "${flags[@]:2}" \
    --template='cppcheck | {file} | {line} | {message} [{id}]' "$1" 2>&1 | grep '^cppcheck |'
}
for file in "${files[@]}"; do analyse "$file"; done | sort -u >"$found"

passed=0 failed=0
while IFS= read -r line; do
  explained=0
  while IFS='|' read -r tool file part _; do
    tool=${tool% } file=${file# } file=${file% } part=${part# } part=${part% }
    [[ $line == "$tool | $file |"*"$part"* ]] && explained=1
  done < <(grep -v '^#' tests/san/known.txt)
  if ((explained)); then passed=$((passed + 1)); else failed=$((failed + 1)) && echo "new: $line"; fi
done <"$found"
while IFS='|' read -r tool file part _; do
  file=${file# } file=${file% } part=${part# } part=${part% }
  grep -F "${tool% } | $file |" "$found" | grep -qF "$part" || { failed=$((failed + 1)) && echo "known.txt: not found any more: $tool | $file | $part"; }
done < <(grep -v '^#' tests/san/known.txt)
echo "${#files[@]} files, $passed warnings explained, $failed not"
((failed == 0))
