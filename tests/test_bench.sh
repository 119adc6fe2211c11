#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# `moeblas bench` from outside: which lines there are, that a graph is timed or refused aloud, ceilings before and after,
# targets, sweeps; and the Python beside it, as far as it runs without a GPU.
. "$(dirname "$0")/lib/script.sh" || exit
problem='t16 h16 f8 e4 k2 fp32 swiglu given'

bench() { # code argument...: runs it, output in $dir/out and $dir/err
  local wanted=$1
  shift
  "$moeblas" bench --backend cpu --repeat 3 --seconds 0.01 "$@" >"$dir/out" 2>"$dir/err" </dev/null
  local code=$?
  verdict "bench $*: exit status $code, wanted $wanted" test "$code" = "$wanted"
}
lines() { verdict "$2: $1 lines" test "$(grep -c "$2" "$dir/out")" = "$1"; }
says() { verdict "$1 should say '$2'" grep -qF -- "$2" "$dir/$1"; }

# the lines of one problem; the pass is no part of its name
bench 0 --csv "$problem bwd"
lines 2 ",$problem,[fb]wd,moeblas,[0-9]"
lines 2 ',moeblas-graph,,,,,,,,not run: graph_begin'
lines 2 ',ceiling,.*,before$'
lines 2 ',ceiling,.*,after$'
lines 0 ' bwd'
verdict "13 columns" test "$(awk -F, 'NF != 13' "$dir/out" | wc -l)" = 0
verdict "results are part of the memory" test \
  "$(awk -F, '$5 == "moeblas" && $4 == "bwd" { print ($11 > 0) }' "$dir/out")" = 1
bench 0 --json "$problem bwd"
says out '"refused": "graph_begin'
says out '"ceiling_gflops_after"'
bench 0 "$problem"
says out 'fwd moeblas-graph  not run: graph_begin'

bench 0 --csv --unfused "$problem bwd"
for op in 'up plain' 'up rows' 'dact plain' 'dw1 += fp32'; do lines 1 ",$op,[0-9]"; done

# a problem that is refused ends a JSON document all the same
bench 2 --json "$problem layout=interleaved:7"
verdict "JSON of a refused problem" python3 -m json.tool "$dir/out" /dev/null

# targets: another order of fields is the same problem, and what was not timed is not counted
printf 'name,problem,pass,best_peer_tflops,reach_tflops\n' >"$dir/targets.csv"
printf 'tiny,given swiglu k2 e4 h16 f8 t16 fp32,bwd,1e-9,2\nother,t99,fwd,1,2\n' >>"$dir/targets.csv"
bench 0 --csv --targets "$dir/targets.csv" "$problem bwd"
lines 1 ',bwd,moeblas,.*best_peer 0; reach 2$'
lines 0 ',fwd,moeblas.*best_peer'
says err 'tiny                 bwd'
says err '1 of its 2 rows were timed'
printf 'name,problem,pass,best_peer_tflops,reach_tflops\ntiny,t16 wobble,bwd,1,2\n' >"$dir/targets.csv"
bench 2 --targets "$dir/targets.csv" "$problem"
says err "line 2: 'wobble'"
bench 2 --targets README.md "$problem"
says err "line 1 is not"
bench 3 --targets "$dir/none" "$problem"

# sweeps
for text in t=1 t=0..4 t=4..4 t=1..8x 1..8 t=1..99999999; do bench 2 --sweep "$text" "$problem"; done
bench 2 --sweep t=1..4 't4 k1 rows'
"$moeblas" bench --backend cpu --repeat 3 --csv --sweep t=1..13 "$problem" >"$dir/out" 2>"$dir/err"
code=$?
verdict "a sweep finds cliffs or none" test "$code" = "$([[ -s $dir/err ]] && echo 1 || echo 0)"
for t in 1 2 3 4 6 8 12 13; do lines 1 ",t$t h16 f8 e4 k2 fp32 swiglu given,fwd,moeblas,"; done

# rounds: a tool that takes what its file says, a line a round
tool() { # name, time of each round...
  printf '%s\n' "${@:2}" >"$dir/$1.times"
  cat >"$dir/$1" <<EOF
echo problem,pass,impl,time_us
echo "tiny,fwd,moeblas,\$(head -n 1 $dir/$1.times)"
echo tiny,fwd,up,7
sed -i 1d $dir/$1.times
EOF
  sed -i '1i #!/bin/sh' "$dir/$1" && chmod +x "$dir/$1"
}
rounds() { # code argument...
  local wanted=$1
  shift
  tools/rounds.py "$@" >"$dir/out" 2>"$dir/err"
  local code=$?
  verdict "rounds $*: exit status $code, wanted $wanted" test "$code" = "$wanted"
}
tool new 100 104 102 103 101
rounds 0 "$dir/new" -- tiny
says out '       102.0 us  spread   3.9 %  fwd  tiny'
says out 'spread of 5 rounds: median 3.9 %, at most 3.9 %, above 1 % in 1 of 1 shapes'
tool new 102 102 && tool old 100 100
rounds 0 "$dir/new" --before "$dir/old" --rounds 2 -- tiny
says out '+2.0 %       102.0 us'
says out 'by more than 3 %: 0 of 1 shapes'
tool new 104 104 && tool old 100 100
rounds 1 "$dir/new" --before "$dir/old" --rounds 2 -- tiny
says out 'by more than 3 %: 1 of 1 shapes'
rounds 1 "$moeblas" --rounds 2 -- 't16 wobble'
says err 'ended with status 2 and 0 times'
rounds 2 "$moeblas" --rounds 1 -- "$problem"
rounds 0 "$moeblas" --rounds 2 -- --backend cpu --repeat 3 --seconds 0.01 "$problem bwd"
lines 1 'us  spread .*  bwd  '

# the plan
"$moeblas" info --backend cpu --plan "$problem bwd" >"$dir/out" 2>&1
says out 'workspace  '
says out "aim        $((32 * 24 * 4)) bytes"
"$moeblas" info --backend cpu --json --plan "$problem" >"$dir/out" 2>&1
verdict "JSON of a plan" python3 -m json.tool "$dir/out" /dev/null
"$moeblas" info --plan "t16 wobble" >"$dir/out" 2>&1
verdict "a plan of no problem is refused" test $? = 2

echo "$passed passed, $failed failed"
[[ $failed == 0 && $passed -gt 0 ]]
