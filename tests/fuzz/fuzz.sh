#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs libFuzzer on every target, two at a time: `tests/fuzz/fuzz.sh SECONDS [TARGET...]`, the seconds shared by all targets.
# It starts from the corpora of the tree and keeps what it adds in $BUILD/corpus; an input that breaks a promise is left in
# $BUILD/finding and fails the run. Environment: BUILD, the folder of the fuzzers.
set -euo pipefail
cd "$(dirname "$0")/../.."
build=${BUILD:-build-fuzz} seconds=${1:-60}
shift || true
targets=("${@:-}")
[[ -n ${targets[0]} ]] || mapfile -t targets < <(sed -n 's/^int fuzz_\([a-z]*\)(.*/\1/p' tests/fuzz/fuzz.h)
export OMP_NUM_THREADS=1 ASAN_OPTIONS=detect_leaks=1
each=$((seconds * 2 / ${#targets[@]}))

one() { # target
  local log=$build/fuzz_$1.log
  mkdir -p "$build/corpus/$1" "$build/finding"
  if "$build/fuzz_$1" "$build/corpus/$1" "tests/fuzz/corpus/$1" -max_total_time="$each" -timeout=30 -max_len=4096 \
    -artifact_prefix="$build/finding/$1-" -print_final_stats=1 -verbosity=1 >"$log" 2>&1; then
    echo "ok   $1: $(sed -n 's/^stat::number_of_executed_units: *//p' "$log") inputs, nothing found"
  else
    echo "FAIL $1: see $log" && tail -n 20 "$log"
    return 1
  fi
}

failed=0
for ((i = 0; i < ${#targets[@]}; i += 2)); do
  processes=()
  for target in "${targets[@]:i:2}"; do
    one "$target" &
    processes+=($!)
  done
  for process in "${processes[@]}"; do wait "$process" || failed=$((failed + 1)); done
done
echo "$((${#targets[@]} - failed)) passed, $failed failed"
((failed == 0))
