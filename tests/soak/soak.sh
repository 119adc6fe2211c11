#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs the parts of the soak on a machine with a GPU: `BUILD=build tests/soak/soak.sh SECONDS [PART...]`, so many seconds each
# and under ten minutes a part. Needs a finished build and neither make nor nvcc. Parts: replays threads beside memory
# faults, which are programs, and random, which checks random problems from SEED on (default: the time). The GPU should have
# no other user, whose memory would count as ours. Exit status: 0 passed, 1 failed, 2 nothing was run, with the reason.
set -euo pipefail
cd "$(dirname "$0")/../.."
build=${BUILD:-build} seconds=${1:-60}
shift || true
parts=("$@")
((${#parts[@]} > 0)) || parts=(replays threads beside memory faults random)
export MOEBLAS_PRESETS=$PWD/data/presets.csv SOAK_SECONDS=$seconds OMP_WAIT_POLICY=passive
known=' replays threads beside memory faults random '
passed=0 failed=0

refuse() {
  echo "soak: $1" >&2
  exit 2
}
if ! [[ $seconds =~ ^[1-9][0-9]*$ ]] || ((seconds > 480)); then refuse "SECONDS = $seconds, wanted 1 .. 480 a part"; fi
for part in "${parts[@]}"; do
  [[ $known == *" $part "* ]] || refuse "part $part, wanted one of$known"
done

add() { # part, log, exit status: counts what the log's closing line says, and shows what was seen
  local sum
  sum=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$2" | tail -n 1 || true)
  if [[ $3 == 0 && $sum =~ ^([1-9][0-9]*)\ passed,\ 0\ failed$ ]]; then
    passed=$((passed + BASH_REMATCH[1]))
    grep '^  ' "$2" || true
    echo "ok   $1: $sum"
    return
  fi
  failed=$((failed + 1))
  echo "FAIL $1: exit status $3${sum:+, $sum}; $2 ends with"
  tail -n 40 "$2" | sed 's/^/  | /'
}

random() { # checks 100 problems at a time until the time is over or one fails
  local log=$1 end=$((SECONDS + seconds)) seed=${SEED:-$(date +%s)} first status=0 cases=0 sum
  first=$seed
  while ((SECONDS < end && status == 0)); do
    timeout 540 "$build/moeblas" check --backend cuda --random 100 --seed "$seed" >"$log" 2>&1 </dev/null || status=$?
    sum=$(tail -n 1 "$log")
    [[ $sum =~ ^([0-9]+)\ passed ]] && cases=$((cases + BASH_REMATCH[1]))
    seed=$((seed + 1))
  done
  ((status)) || printf '  --random 100 --seed %s .. %s\n%s passed, 0 failed\n' "$first" $((seed - 1)) "$cases" >>"$log"
  return "$status"
}

reason=$("$build/moeblas" check --backend cuda 't8 h64 f64' 2>&1 >/dev/null) || {
  status=$?
  [[ $status != 2 ]] || refuse "skipped, nothing was run: ${reason:-the first problem is refused}"
} # a failure is shown by the parts

mkdir -p "$build/log"
for part in "${parts[@]}"; do
  log=$build/log/soak_$part.log status=0
  if [[ $part == random ]]; then
    random "$log" || status=$?
  else
    timeout 570 "$build/tests/soak/$part" >"$log" 2>&1 </dev/null || status=$?
  fi
  add "$part" "$log" "$status"
done
echo "$passed passed, $failed failed"
((failed == 0))
