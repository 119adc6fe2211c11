#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# `moeblas train` from outside: files, exit codes, what is printed; equal bits after an interruption and for any number of
# threads; every refusal is one sentence and leaves the old checkpoint alone. Environment: BUILD.
. "$(dirname "$0")/lib/script.sh" || exit
export OMP_WAIT_POLICY=passive # other jobs share the cores

train() { "$moeblas" train "$@" >"$dir/out" 2>"$dir/err"; }
exits() { # code (a pattern), then a command of which it is the exit status
  local want=$1 got=0
  shift
  "$@" || got=$?
  [[ $got == $want ]] || { echo "exit status $got, wanted $want" && cat "$dir/err" && return 1; }
}
refused() { # code, part of the sentence, then arguments of train
  local code=$1 part=$2
  shift 2
  exits "$code" train "$@" && [[ $(wc -l <"$dir/err") == 1 ]] && grep -q "^moeblas train: .*$part" "$dir/err" ||
    { cat "$dir/err" && return 1; }
}
has_gpu() { "$moeblas" check --backend cuda 't8 h64 f64' >/dev/null 2>&1; }
same() { cmp "$dir/$1/checkpoint.safetensors" "$dir/$2/checkpoint.safetensors"; }

cat docs/*.md include/*.h | head -c 20000 >"$dir/text"
text=(--data "$dir/text")

# ---- one run, and the same in pieces ----------------------------------------------------------------------------
check "runs" train "${text[@]}" --out "$dir/whole" --steps 6
check "leaves a log" grep -q '^6,' "$dir/whole/log.csv"
check "leaves a page" grep -q '</html>' "$dir/whole/report.html"
check "prints a summary" grep -Eq 'held-out text +[0-9.]+ bits/byte' "$dir/out"
check "says nothing on stderr" test ! -s "$dir/err"
check "stops" train "${text[@]}" --out "$dir/parts" --steps 6 --stop 3
check "stopped early" exits 1 same whole parts
check "resumes" train "${text[@]}" --out "$dir/parts" --resume
check "to the same bits" same whole parts
check "has nothing left to do" train "${text[@]}" --out "$dir/parts" --resume
check "and changes nothing" same whole parts
check "runs on one thread" train "${text[@]}" --out "$dir/one" --steps 6 --threads 1
check "to the same bits, too" same whole one
check "runs with another seed" train "${text[@]}" --out "$dir/seed" --steps 6 --seed 2
check "to other bits" exits 1 same whole seed
check "balances by bias" train "${text[@]}" --out "$dir/bias" --steps 3 --stop 1 --balance bias
check "and resumes" train "${text[@]}" --out "$dir/bias" --resume
check "runs on the CPU in bf16" train "${text[@]}" --out "$dir/half" --steps 4 --backend cpu --dtype bf16 --stop 2
check "and says so" grep -Eq 'experts on +cpu, in bf16' "$dir/out"
check "also on the page" grep -q 'experts on cpu in bf16' "$dir/half/report.html"
check "goes on in fp32" train "${text[@]}" --out "$dir/half" --resume --backend cpu
check "where fp32 began elsewhere" train "${text[@]}" --out "$dir/full32" --steps 4 --backend cpu
check "to other bits" exits 1 same half full32
check "runs out of time" train "${text[@]}" --out "$dir/time" --steps 1000 --minutes 0.001
check "and says so" grep -q 'resume goes on' "$dir/out"

# ---- JSON -------------------------------------------------------------------------------------------------------
json_keys() {
  tail -n 1 "$dir/out" | python3 -c '
import json, sys
got = json.load(sys.stdin)
for key in "steps train_bpb val_bpb ngram2_bpb ngram4_bpb tokens_per_s seconds params active_params".split():
    assert got[key] > 0, key
assert got["backend"] in ("cpu", "cuda") and got["dtype"] == "fp32"
assert got["steps"] == 2 and got["active_params"] < got["params"] and 1 < got["val_bpb"] < 9'
}
check "speaks JSON" train "${text[@]}" --out "$dir/json" --steps 2 --json
check "in one line" test "$(wc -l <"$dir/out")" = 1
check "with all keys" json_keys

# ---- sampling ---------------------------------------------------------------------------------------------------
sample() { "$moeblas" train --out "$dir/whole" --sample "The library" "$@"; }
check "continues a text" grep -q '^The library' <(sample)
check "equally for a seed" cmp <(sample --seed 3) <(sample --seed 3)
check "not for another" exits 1 cmp <(sample --seed 3) <(sample --seed 4)
check "by as many bytes as asked" test "$(sample --tokens 1 | wc -c)" -le 17

# ---- interrupts -------------------------------------------------------------------------------------------------
interrupt() { # signal: the run ends with 130 and what it saved is what an undisturbed run has after that step
  local step process
  rm -rf "$dir/cut" "$dir/calm"
  "$moeblas" train "${text[@]}" --out "$dir/cut" --steps 60 >"$dir/out" 2>"$dir/err" &
  process=$!
  for _ in {1..300}; do grep -q '^2,' "$dir/cut/log.csv" 2>/dev/null && break; sleep 0.1; done
  kill -s "$1" "$process"
  exits 130 wait "$process" && [[ ! -s $dir/err ]] || return 1
  step=$(tail -n 1 "$dir/cut/log.csv" | cut -d, -f1)
  train "${text[@]}" --out "$dir/calm" --steps 60 --stop "$step" && same cut calm
}
check "ends on SIGINT, with everything saved" interrupt INT
check "ends on SIGTERM, with everything saved" interrupt TERM

# ---- refusals ---------------------------------------------------------------------------------------------------
: >"$dir/empty"
echo short >"$dir/short"
check "no such file" refused 2 "nosuch" --data "$dir/nosuch" --out "$dir/no"
check "an empty file" refused 2 "empty" --data "$dir/empty" --out "$dir/no"
check "too little text" refused 2 "short\|bytes" --data "$dir/short" --out "$dir/no"
check "no file after --data" refused 2 "files" --data
check "a word too many" refused 2 "stray" stray
check "no such preset" refused 2 "huge" "${text[@]}" --preset huge --out "$dir/no"
check "no such balance" refused 2 "luck" "${text[@]}" --balance luck --out "$dir/no"
check "no steps" refused 2 "steps" "${text[@]}" --steps 0 --out "$dir/no"
check "no such back end" refused 2 "tpu" "${text[@]}" --backend tpu --out "$dir/no"
check "no such format" refused 2 "fp8" "${text[@]}" --dtype fp8 --out "$dir/no"
has_gpu || check "the GPU where there is none" refused 2 "CUDA" "${text[@]}" --backend cuda --out "$dir/no"
check "nothing is left of refused runs" test ! -e "$dir/no"
check "a folder that cannot be made" refused '[23]' "" "${text[@]}" --out /proc/moeblas
check "a folder that is a file" refused '[23]' "text" "${text[@]}" --out "$dir/text"
check "no checkpoint to resume" refused '[23]' "checkpoint" "${text[@]}" --resume --out "$dir/no"
check "no checkpoint to sample" refused '[23]' "checkpoint" --sample x --out "$dir/no"
check "another preset" refused 2 "preset" "${text[@]}" --resume --preset small --out "$dir/whole"
check "another seed" refused 2 "seed" "${text[@]}" --resume --seed 9 --out "$dir/whole"
check "another balance" refused 2 "balance" "${text[@]}" --resume --balance bias --out "$dir/whole"
check "another text" refused 2 "text" --data docs/design.md --resume --out "$dir/whole"
check "an empty prompt" refused 2 "empty" --sample "" --out "$dir/whole"

damage() { # shell command on a copy of the checkpoint, whose refusal follows
  rm -rf "$dir/bad" && mkdir "$dir/bad" && cp "$dir/whole/checkpoint.safetensors" "$dir/bad" || return 1
  (cd "$dir/bad" && eval "$1") && cp "$dir/bad/checkpoint.safetensors" "$dir/kept" || return 1
  refused '[23]' "checkpoint" "${text[@]}" --resume --out "$dir/bad" && cmp "$dir/kept" "$dir/bad/checkpoint.safetensors"
}
check "a short checkpoint" damage 'truncate -s -4 checkpoint.safetensors'
check "an empty checkpoint" damage 'truncate -s 0 checkpoint.safetensors'
check "noise in the header" damage 'printf "\377\377\377" | dd of=checkpoint.safetensors bs=1 seek=20 conv=notrunc'
check "another format" damage 'sed -i s/moeblas-train-1/moeblas-train-9/ checkpoint.safetensors'
check "a step that is none" damage "sed -i 's/\"step\":\"6\"/\"step\":\"x\"/' checkpoint.safetensors"

full_disk() { # a file larger than 4 MB cannot be written: exit 3, and the checkpoint that was there stays
  rm -rf "$dir/full" && cp -r "$dir/parts" "$dir/full" || return 1
  (trap '' XFSZ && ulimit -f 4096 && refused 3 "checkpoint" "${text[@]}" --out "$dir/full" --steps 1) && same parts full
}
check "a full disk" full_disk

echo "$passed passed, $failed failed"
((failed == 0))
