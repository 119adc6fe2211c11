#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs the tests of a finished build and sums them: `tests/run.sh [unit] [problems] [scripts] [gates] [python]`, all without
# arguments. Two jobs run at a time. A job is a program that ends with the line "N passed, N failed"; one that does not,
# or that fails, stops itself short or tests nothing, counts as a failure. The closing line is the sum.
# Environment: BUILD, ONLY (part of a job's name), JOB_SECONDS (limit of one job).
set -euo pipefail
cd "$(dirname "$0")/.."
export BUILD=${BUILD:-build} JOB_SECONDS=${JOB_SECONDS:-1500}
export OMP_WAIT_POLICY=passive # two jobs share the cores
export PYTHON=${PYTHON:-$(ls /usr/bin/python3 2>/dev/null || echo python3)} # with Debian's packages
export MOEBLAS_PRESETS=$PWD/data/presets.csv # BUILD may lie elsewhere
logs=$BUILD/log
only=${ONLY:-}
jobs=()

add() { # name command...
  [[ -z $only || $1 == *"$only"* ]] && jobs+=("$*")
  return 0
}

add_python() { # test file: a job, unless a module that its importorskip lines name is absent; then it says so
  local name modules absent
  name=python_$(basename "${1#*test_}" .py)
  [[ $name == *"$only"* ]] || return 0
  modules=$(sed -nE 's/^(\w+ = )?pytest\.importorskip\("(\w+)".*/\2/p' "$1")
  # shellcheck disable=SC2086 # modules is words
  if absent=$("$BUILD/venv/bin/python" -c "$find_absent" pytest numpy $modules); then
    add "$name" "$BUILD/venv/bin/python" -m pytest -q -p no:cacheprovider "$1"
  else
    echo "$name is skipped: $BUILD/venv has no $absent; make test-python installs everything"
  fi
}
find_absent='import sys, importlib.util as util
absent = [name for name in sys.argv[1:] if not util.find_spec(name)]
print(*absent, sep=", ")
sys.exit(bool(absent))'

for part in ${*:-unit problems scripts gates python}; do
  case $part in
  unit) for source in tests/test_*.c; do
    name=$(basename "$source" .c)
    add "$name" "$BUILD/tests/$name"
  done
    [[ ! -x $BUILD/tests/mock_cuda ]] || add mock_cuda "$BUILD/tests/mock_cuda" ;; # built where there is nvcc
  problems)
    for list in ci edge exact presets; do
      add "problems_$list" "$BUILD/moeblas" check "@tests/problems/$list.txt"
    done
    add problems_random "$BUILD/moeblas" check --random 100 --seed 1
    add problems_bitwise "$BUILD/moeblas" check --bitwise @tests/problems/smoke.txt
    add problems_mutated "$BUILD/moeblas" check --mutate @tests/problems/smoke.txt @tests/problems/exact.txt
    for isa in base avx2; do # the best one of the machine has had its turn
      [[ $isa == base ]] || grep -qw "$isa" /proc/cpuinfo || continue
      add "problems_$isa" env "MOE_CPU_ISA=$isa" "$BUILD/moeblas" check @tests/problems/ci.txt
    done
    ;;
  scripts) for script in tests/*.sh; do
    [[ $script == tests/run.sh ]] || add "$(basename "$script" .sh)" "$script"
  done ;;
  gates) for gate in tools/gates/*.sh tools/gates/*.py; do
    name=gate_$(basename "${gate%.*}")
    add "$name" "$gate"
    add "${name}_self_test" "$gate" --self-test
  done ;;
  python)
    tools/venv.sh "$BUILD"
    for source in tests/python/test_*.py; do add_python "$source"; done
    ;;
  *) echo "tests/run.sh: part = $part, wanted unit, problems, scripts, gates or python" >&2; exit 2 ;;
  esac
done
if ((${#jobs[@]} == 0)); then
  echo "tests/run.sh: no test has a name with \"$only\" in it" >&2
  exit 2
fi
rm -rf "$logs"
mkdir -p "$logs"
export logs

run_job() { # "name command..."
  local name=${1%% *} command=${1#* } status=0 start=$SECONDS passed failed
  # shellcheck disable=SC2086 # the command is words
  timeout "$JOB_SECONDS" $command >"$logs/$name.log" 2>&1 </dev/null || status=$?
  read -r passed failed < <(sed -nE 's/^([0-9]+) passed, ([0-9]+) failed$/\1 \2/p' "$logs/$name.log" | tail -n 1) ||
    { passed=0 failed=0; }
  ((passed + failed > 0 && (status == 0 || failed > 0))) || failed=$((failed + 1))
  echo "$passed $failed" >"$logs/$name.sum"
  ((failed == 0)) || grep -vE '^(ok|PASS) ' "$logs/$name.log" | tail -n 40 | sed 's/^/  | /'
  printf '%-28s %d passed, %d failed  (%d s%s)\n' "$name" "$passed" "$failed" $((SECONDS - start)) \
    "$( ((status == 0)) || echo ", exit status $status: $command")"
}
export -f run_job
printf '%s\0' "${jobs[@]}" | xargs -0 -P 2 -I '{}' bash -c 'run_job "$1"' run_job '{}'

read -r passed failed < <(awk '{ p += $1; f += $2 } END { print p + 0, f + 0 }' "$logs"/*.sum)
echo "$passed passed, $failed failed"
((failed == 0))
