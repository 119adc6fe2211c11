#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The command line from outside: exit codes, --help, --json, colour, and what goes to stdout and what to stderr.
. "$(dirname "$0")/lib/script.sh" || exit

# Runs the tool; its output is in $dir/out and $dir/err, its code in $code.
tool() { "$moeblas" "$@" >"$dir/out" 2>"$dir/err" </dev/null; code=$?; }
exits() { # code argument...
  local wanted=$1
  shift
  tool "$@"
  verdict "moeblas $*: exit status $code, wanted $wanted" test "$code" = "$wanted"
}
says() { verdict "$1 should say '$2'" grep -qF -- "$2" "$dir/$1"; }
silent() { verdict "$1 should be empty" test ! -s "$dir/$1"; }
is_json() { verdict "moeblas $*: one JSON document" python3 -m json.tool "$dir/out" /dev/null; }

# help
for command in info check bench train version help; do
  exits 0 "$command" --help
  says out "usage: moeblas $command"
  silent err
done
exits 0 help
exits 0 --help
exits 0 help check
says out "groups=G/B"
exits 0 --version
says out "moeblas "

# wrong usage
exits 2
silent out
exits 2 frobnicate
says err "'frobnicate' is not a command"
exits 2 help frobnicate
exits 2 check --frobnicate
says err "--frobnicate is not an option"
silent out
exits 2 check
exits 2 check --random
says err "--random: wants a value"
exits 2 check --random many
exits 2 check --random -1
exits 2 check --json=yes t4
exits 2 check --backend tpu t4
says err "auto, cpu or cuda"
exits 2 check 't64 wobble'
says err "wobble"
exits 2 info extra
exits 2 bench
exits 2 bench --csv --json t4
exits 2 bench t0
exits 2 check 't8 layout=interleaved:7' # sound fields, a plan that the library refuses
says out "REFUSED"

# files
exits 3 check @/nonexistent
says err "/nonexistent"
printf 't8 h8 f8 # a comment\n\nt8 wobble\n' >"$dir/list.txt"
exits 2 check "@$dir/list.txt"
says err "line 3"
silent out
printf '1 2 3\n' >"$dir/shares.txt"
exits 3 check "t8 h8 f8 skew=$dir/shares.txt"
says err "wants 8 numbers"
printf '1 0 0 0 5 0 2 1e-3\n' >"$dir/shares.txt"
exits 0 check "t8 h8 f8 skew=$dir/shares.txt"
if [[ -w /dev/full ]]; then
  "$moeblas" info >/dev/full 2>"$dir/err"
  verdict "a full disk is exit status 3" test $? = 3
fi

# presets
exits 0 info --presets
says out "gpt-oss-20b"
printf 'name,h,notes\na,zero,\n' >"$dir/presets.csv"
of_the_build=${MOEBLAS_PRESETS-data/presets.csv} # the build may lie elsewhere
export MOEBLAS_PRESETS=$dir/presets.csv
exits 3 info --presets
says err "line 2, column 2"
silent out
exits 2 check preset=a
export MOEBLAS_PRESETS=$of_the_build

# results
exits 0 check 't8 h16 f8 bwd'
says out "1 passed, 0 failed"
exits 0 check --random 3 --seed 2
says out "3 passed, 0 failed"
exits 0 check --random 3 --exact --seed 2
says out "3 passed, 0 failed"
exits 0 check --mutate 't33 h40 f24 bf16 reglu bwd exact'
says out "0 failed"
exits 2 check 't8 h8 f8 situ exact'
says err "a tanh is not"
exits 0 check --bitwise 't8 h16 f8 given bwd'
exits 0 check --mutate 't16 h16 f8 bwd'
says out "0 failed"
exits 0 check --threads 1 -- 't8 h16 f8'
exits 0 bench --repeat 3 --seconds 0.01 --csv 't8 h16 f8 bwd bias'
verdict "the CSV has 13 columns" test "$(awk -F, 'NF != 13' "$dir/out" | wc -l)" = 0
says out "date,commit,problem,pass,impl,time_us,tflops,gbps,pct_of_floor,launches,peak_mib,spread_pct,note"
verdict "the CSV has the layer both ways" test "$(grep -c ',moeblas,' "$dir/out")" = 2

# JSON: one document, nothing else
exits 0 info --json && is_json
exits 0 info --presets --json && is_json
exits 0 version --json && is_json
exits 0 help --json && is_json
exits 0 check --json 't8 h16 f8' && is_json
exits 0 check --json --mutate 't8 h16 f8' && is_json
exits 2 check --json 't8 layout=interleaved:7' && is_json
exits 0 bench --json --repeat 3 --seconds 0.01 't8 h16 f8 bwd given' && is_json

# colour: none into a file; into a terminal unless NO_COLOR or a dumb one
escape=$'\033'
tool check 't4 h8 f8'
verdict "no colour into a file" test -z "$(grep -F "$escape" "$dir/out")"
terminal='import os, pty, sys
try:
    child, terminal = pty.fork()
except OSError as reason:
    print(f"no terminal can be made here ({reason}): colour on one is not tested", file=sys.stderr)
    sys.exit(77)
if child == 0:
    os.execvp(sys.argv[1], sys.argv[1:])
output = b""
try:
    while piece := os.read(terminal, 4096):
        output += piece
except OSError:  # the other end is closed
    pass
os.waitpid(child, 0)
print(output.count(b"\33[32m"))'
on_terminal() { env "$@" python3 -c "$terminal" "$moeblas" check 't4 h8 f8'; }
coloured=$(on_terminal TERM=xterm NO_COLOR=)
if [[ $? != 77 ]]; then
  verdict "colour on a terminal" test "${coloured:-0}" -gt 0
  verdict "NO_COLOR is honoured" test "$(on_terminal TERM=xterm NO_COLOR=1)" = 0
  verdict "a dumb terminal gets no colour" test "$(on_terminal TERM=dumb NO_COLOR=)" = 0
fi

echo "$passed passed, $failed failed"
[[ $failed == 0 && $passed -gt 0 ]]
