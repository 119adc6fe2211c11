#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Proves the CUDA back end on a machine with a GPU and writes tests/cuda/verified.txt: which GPU, what passed, and the hash
# of the sources that the proof speaks of. Needs a finished build and neither make nor nvcc, so that a build may be carried
# there: `BUILD=build tests/cuda/gpu_check.sh`. `--hash` prints the hash alone. Exit status: 0 proved, 1 something failed
# and verified.txt is as it was, 2 there is no GPU that can be used, with the reason.
set -euo pipefail
cd "$(dirname "$0")/../.."
BUILD=${BUILD:-build}
export MOEBLAS_PRESETS=$PWD/data/presets.csv # BUILD may lie elsewhere
logs=$BUILD/log
problems=tests/problems
results=()
failed=0

hash_sources() {
  find src/cuda include src/*.h src/*.def -type f | LC_ALL=C sort | xargs sha256sum | sha256sum | cut -d ' ' -f 1
}
if [[ ${1:-} == --hash ]]; then
  hash_sources
  exit
fi

declare -A running # process of a step
start() { # name command...
  local name=$1
  shift
  timeout 550 "$@" >"$(log_of "$name")" 2>&1 </dev/null &
  running[$name]=$!
}
log_of() { echo "$logs/gpu_${1//[ \/]/_}.log"; }
finish() { # name [reason not to have started]: passes if it ended well and its closing line counts at least one pass and no failure
  local name=$1 log status=0 sum
  if [[ -z ${running[$name]:-} ]]; then
    results+=("$name: not run, $2")
    echo "SKIP ${results[-1]}"
    return
  fi
  log=$(log_of "$name")
  wait "${running[$name]}" || status=$?
  sum=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$log" | tail -n 1 || true)
  if [[ $status == 0 && $sum =~ ^[1-9][0-9]*\ passed,\ 0\ failed ]]; then
    results+=("$name: $sum")
    echo "PASS $name: $sum"
    return
  fi
  failed=$((failed + 1))
  echo "FAIL $name: exit status $status${sum:+, $sum}; $log ends with"
  grep -vE '^(ok|PASS) ' "$log" | tail -n 40 | sed 's/^/  | /' || true
}
step() { start "$@" && finish "$1"; }

reason=$("$BUILD/moeblas" check --backend cuda 't8 h64 f64' 2>&1 >/dev/null) || {
  status=$?
  if [[ $status == 2 ]]; then
    echo "gpu_check: ${reason:-the first problem is refused}" >&2
    exit 2
  fi
} # a failure is shown by the steps, which keep a log

mkdir -p "$logs"
for test in "$BUILD"/tests/cuda/*; do
  [[ -f $test && -x $test ]] && step "tests/cuda/$(basename "$test")" "$test"
done
step "check" "$BUILD/moeblas" check --backend cuda "@$problems/ci.txt" "@$problems/edge.txt" "@$problems/presets.txt"
step "check --bitwise smoke" "$BUILD/moeblas" check --backend cuda --bitwise "@$problems/smoke.txt"
step "check --mutate smoke" "$BUILD/moeblas" check --backend cuda --mutate "@$problems/smoke.txt"

# What follows takes the host's time and little of the GPU's, so it runs side by side.
sanitizer=$(command -v compute-sanitizer || command -v "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer" || true)
sanitizers=(memcheck racecheck synccheck initcheck)
for tool in "${sanitizers[@]}"; do
  [[ -n $sanitizer ]] && start "compute-sanitizer $tool smoke" "$sanitizer" --tool "$tool" --error-exitcode 9 \
    "$BUILD/moeblas" check --backend cuda "@$problems/smoke.txt"
done
# With the machine's own python3, on several processes where pytest-xdist is there; JAX must not take all memory.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
workers=$(python3 -c 'import xdist; print("-n 4")' 2>/dev/null || true)
for part in torch jax hf; do
  # shellcheck disable=SC2086 # two words or none
  python3 -c "import pytest, ${part/hf/transformers}" 2>/dev/null &&
    start "python $part" python3 -m pytest -q -p no:cacheprovider $workers tests/python/test_"$part"*.py
done
for tool in "${sanitizers[@]}"; do
  finish "compute-sanitizer $tool smoke" "the machine has no compute-sanitizer"
done
for part in torch jax hf; do
  finish "python $part" "the machine's python3 has no pytest or no ${part/hf/transformers}"
done

if ((failed)); then
  echo "gpu_check: $failed steps failed; tests/cuda/verified.txt is unchanged"
  exit 1
fi
gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | sort -u | head -n 1 || true)
{
  echo "date: $(date -u +%Y-%m-%d)"
  echo "gpu, driver: ${gpu:-unknown, nvidia-smi does not say}"
  echo "sources: $(hash_sources)"
  printf '%s\n' "${results[@]}"
} >tests/cuda/verified.txt
cat tests/cuda/verified.txt
