#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# What sanitizers and analysers say of moeblas: `tests/san/san.sh [tsan] [memory] [leaks] [static]`, all without arguments.
# tsan: clang's TSan with its OpenMP run-time and archer, which tells TSan of barriers and tasks; nothing is suppressed.
# memory: valgrind, undefined values included. leaks: ASan, UBSan and LSan. static: gcc -fanalyzer, clang-tidy, cppcheck;
# what they say is a failure unless known.txt has it with a reason. Environment: BUILD, ONLY (part of a job's name), PATIENCE
# (a factor of every limit in seconds, for a machine that is busy; 1).
set -uo pipefail
cd "$(dirname "$0")/../.."
build=${BUILD:-build}
export OMP_WAIT_POLICY=passive MOEBLAS_PRESETS=$PWD/data/presets.csv
logs=$build-san-log
mkdir -p "$logs"
head -c 8192 docs/design.md >"$logs/text" # enough to train on
passed=0 failed=0

job() { # name, limit in seconds, command...: passes by its exit status
  local name=$1 limit=$2 began=$SECONDS
  shift 2
  [[ -z ${ONLY:-} || $name == *"$ONLY"* ]] || return 0
  timeout -k 5 $((limit * ${PATIENCE:-1})) "$@" >"$logs/$name" 2>&1
  local code=$?
  if ((code == 0)); then
    passed=$((passed + 1)) && echo "ok   $name ($((SECONDS - began)) s)"
  else
    failed=$((failed + 1)) && echo "FAIL $name (status $code): $logs/$name"
    grep -m 5 -E 'WARNING|ERROR|FAIL|is false|error' "$logs/$name" || tail -n 5 "$logs/$name"
  fi
}

# Arithmetic that allocates or shares nothing new is left to the tests that the sanitizers of make test cover; these are the
# ones with threads, files, allocations and the whole layer.
unit="act api api_ops api_run balance case combine device_failure device_failure_tool experts files fuzz fuzz_api gemm layer
memory metamorphic problem route route_backward safetensors sort token_count threads"

each_unit() { # prefix, limit, folder of the build, command in front...
  local prefix=$1 limit=$2 folder=$3
  shift 3
  for name in $unit; do
    [[ ! -e $folder/tests/test_$name ]] || job "${prefix}_$name" "$limit" "$@" "$folder/tests/test_$name"
  done
}

# The run-time of OpenMP is not compiled for TSan; archer stands in for what it would have seen.
part_tsan() {
  local archer
  archer=$(ls /usr/lib/llvm-*/lib/libarcher.so 2>/dev/null | head -n 1)
  [[ -n $archer ]] || { echo "FAIL tsan: wants libarcher.so (Debian package libomp-dev)" && failed=$((failed + 1)) && return; }
  make --no-print-directory CC=clang CUDA=0 SAN=thread BUILD="$build-tsan" CFLAGS="-Wno-pass-failed -Wno-missing-field-initializers" tests || { failed=$((failed + 1)) && return; }
  export TSAN_OPTIONS="ignore_noninstrumented_modules=1 halt_on_error=1 die_after_fork=0" OMP_TOOL_LIBRARIES=$archer
  local tool=$build-tsan/moeblas
  each_unit tsan 300 "$build-tsan"
  job tsan_race 60 tests/san/race.sh
  job tsan_smoke 300 "$tool" check --threads 4 @tests/problems/smoke.txt
  job tsan_random 300 "$tool" check --threads 4 --random 30
  job tsan_train 300 "$tool" train --backend cpu --threads 4 --data "$logs/text" --steps 2 --out "$logs/tsan-run"
  unset TSAN_OPTIONS OMP_TOOL_LIBRARIES
}

# valgrind has no AVX-512, and one error of the tool's own: libgomp keeps its threads' memory to the end.
part_memory() {
  make --no-print-directory CUDA=0 BUILD="$build" tests || { failed=$((failed + 1)) && return; }
  local check=(valgrind -q --error-exitcode=9 --leak-check=full --errors-for-leak-kinds=definite --show-leak-kinds=definite)
  export MOE_CPU_ISA=avx2
  for name in api api_run case experts files fuzz memory model problem safetensors sort; do
    job "valgrind_$name" 600 "${check[@]}" "$build/tests/test_$name"
  done
  job valgrind_smoke 900 "${check[@]}" "$build/moeblas" check --threads 1 @tests/problems/smoke.txt
  job valgrind_base 900 env MOE_CPU_ISA=base "${check[@]}" "$build/moeblas" check --threads 1 "t9 h16 f24 e4 k2 bf16 bwd shared=8 latent=8"
  # A step takes valgrind a quarter of an hour: test_model and test_experts have its arithmetic, and this reads what it saved.
  "$build/moeblas" train --backend cpu --data "$logs/text" --steps 1 --out "$logs/valgrind-run" >"$logs/valgrind-run.log" 2>&1
  job valgrind_train 300 "${check[@]}" "$build/moeblas" train --backend cpu --threads 1 --out "$logs/valgrind-run" --sample The --tokens 2
  unset MOE_CPU_ISA
}

part_leaks() {
  make --no-print-directory CUDA=0 SAN=address,undefined BUILD="$build-asan" tests || { failed=$((failed + 1)) && return; }
  export ASAN_OPTIONS=detect_leaks=1
  each_unit asan 600 "$build-asan"
  job asan_alloc_failure 900 "$build-asan/tests/test_alloc_failure"
  job asan_train 600 "$build-asan/moeblas" train --backend cpu --data "$logs/text" --steps 2 --out "$logs/asan-run"
  unset ASAN_OPTIONS
}

for part in ${*:-static tsan memory leaks}; do
  case $part in
  tsan | memory | leaks) "part_$part" ;;
  static) job static 1200 tests/san/static.sh ;;
  *) echo "tests/san/san.sh: part = $part, wanted tsan, memory, leaks or static" >&2 && exit 2 ;;
  esac
done
echo "$passed passed, $failed failed"
((failed == 0))
