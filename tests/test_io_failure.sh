#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Disks and processes that give out under `moeblas train`: a full disk, a folder that cannot be written, output that cannot be
# printed, kill -9 at random moments, two runs in one folder. The checkpoint that was there is there still, or a newer whole
# one, and a run that was killed and resumed ends with the bits of one that was not.
# Environment: BUILD; KILLS, how many trainings are killed (3; `make kills` asks for 100).
. "$(dirname "$0")/lib/script.sh" || exit
export OMP_WAIT_POLICY=passive # other jobs share the cores
kills=${KILLS:-3}

head -c 20000 docs/design.md >"$dir/text"
train() { "$moeblas" train --backend cpu --data "$dir/text" "$@" >"$dir/out" 2>"$dir/err"; }
sentence() { [[ $(wc -l <"$dir/err") == 1 ]] && grep -q "^moeblas train: .*$1" "$dir/err" || { cat "$dir/err" && return 1; }; }
whole() { "$moeblas" train --backend cpu --out "$1" --sample x --tokens 1; } # the checkpoint can be read
same() { cmp "$1/checkpoint.safetensors" "$2/checkpoint.safetensors"; }

# ---- a full disk ------------------------------------------------------------------------------------------------
# A limit on the size of a file at every stage of a save stands for the disk; where mounting is allowed, a small tmpfs.
check "a run to fall back on" train --out "$dir/old" --steps 2 --stop 1
full_disk() { # kilobytes: log, page or checkpoint meets the limit
  rm -rf "$dir/full" && cp -r "$dir/old" "$dir/full" || return 1
  (trap '' XFSZ && ulimit -f "$1" && train --out "$dir/full" --resume)
  [[ $? == 3 ]] && sentence "cannot be written\|: No space\|too large" && same "$dir/old" "$dir/full" &&
    ! ls "$dir/full"/*.tmp 2>/dev/null
}
for kilobytes in 1 4 1000 20000; do check "no file beyond $kilobytes kB" full_disk "$kilobytes"; done

on_tmpfs() { # options of the mount, code; in a mount namespace of its own
  unshare -m bash -c 'mount -t tmpfs -o size=34m none "$1" && cp "$2"/* "$1" && { [[ -z $3 ]] || mount -o "remount,$3" "$1"; } || exit 9
    "$4" train --backend cpu --data "$5" --out "$1" --resume >"$6/out" 2>"$6/err"; code=$?
    cmp "$1/checkpoint.safetensors" "$2/checkpoint.safetensors" && ! ls "$1"/*.tmp 2>/dev/null && exit $code' \
    on_tmpfs "$dir/mount" "$dir/old" "$1" "$moeblas" "$dir/text" "$dir"
  [[ $? == 3 ]] && sentence "$2"
}
mkdir "$dir/mount"
if unshare -m mount -t tmpfs none "$dir/mount" 2>/dev/null; then
  check "a tmpfs with room for one checkpoint" on_tmpfs "" "No space left on device"
  check "a file system that is read only" on_tmpfs ro "Read-only file system"
else
  echo "a tmpfs cannot be mounted here: its two tests are left out"
fi

read_only() { # a folder without permission to write
  rm -rf "$dir/locked" && cp -r "$dir/old" "$dir/locked" && chmod 555 "$dir/locked" || return 1
  train --out "$dir/locked" --resume
  [[ $? == 3 ]] && sentence "Permission denied" && same "$dir/old" "$dir/locked"
}
[[ $(id -u) == 0 ]] || check "a folder without permission" read_only # root may write all the same

# ---- output that goes nowhere -----------------------------------------------------------------------------------
nowhere() { # a command whose stdout is full: exit status 3 and a sentence
  "$moeblas" "$@" >/dev/full 2>"$dir/err"
  [[ $? == 3 ]] && grep -q "^moeblas $1: " "$dir/err"
}
check "version on a full disk" nowhere version --json
check "info on a full disk" nowhere info --json
check "check on a full disk" nowhere check --backend cpu --json "t2 h4 f4 e2 k1"
check "train on a full disk" nowhere train --backend cpu --data "$dir/text" --out "$dir/nowhere" --steps 1 --json

# ---- two runs in one folder -------------------------------------------------------------------------------------
two_runs() { # the second is refused, the first goes on undisturbed
  local first code
  rm -rf "$dir/two"
  "$moeblas" train --backend cpu --data "$dir/text" --out "$dir/two" --steps 400 >"$dir/first" 2>&1 &
  first=$!
  for _ in {1..600}; do [[ -s $dir/two/log.csv ]] && break; sleep 0.1; done
  train --out "$dir/two" --steps 1
  code=$?
  kill -s INT "$first" && wait "$first"
  [[ $code != 0 ]] && sentence "another training is running in this folder" && whole "$dir/two"
}
check "two runs in one folder" two_runs

# ---- kill -9 ----------------------------------------------------------------------------------------------------
steps=15 # saved at 5, 10, 15
check "a run that nobody kills" train --out "$dir/calm" --steps $steps

kill_once() { # starts or resumes, kills at a random moment; 9: it was done before that
  local resume=() process before=0
  [[ -e $dir/cut/checkpoint.safetensors ]] && resume=(--resume) before=1
  "$moeblas" train --backend cpu --data "$dir/text" --out "$dir/cut" --steps $steps "${resume[@]}" >"$dir/out" 2>"$dir/err" &
  process=$!
  sleep "$(printf '%d.%03d' $((RANDOM % longest / 1000)) $((RANDOM % 1000)))"
  kill -s KILL "$process" 2>/dev/null
  wait "$process" 2>/dev/null
  case $? in
  137) ;;
  0) return 9 ;;
  *) cat "$dir/err" && return 1 ;;
  esac
  [[ $before == 0 || -e $dir/cut/checkpoint.safetensors ]] || { echo "the checkpoint is gone" && return 1; }
  [[ ! -e $dir/cut/checkpoint.safetensors ]] || whole "$dir/cut" >/dev/null || { echo "the checkpoint is damaged" && return 1; }
}
killed_and_resumed() { # to the bits of the calm run; then anew until enough have been killed
  local done=0 code resume
  rm -rf "$dir/cut"
  while ((done < kills)); do
    kill_once
    code=$?
    case $code in
    0) done=$((done + 1)) ;;
    9) same "$dir/calm" "$dir/cut" && rm -rf "$dir/cut" || return 1 ;;
    *) return 1 ;;
    esac
  done
  [[ -e $dir/cut/checkpoint.safetensors ]] && resume=(--resume) || resume=()
  train --out "$dir/cut" --steps $steps "${resume[@]}" && same "$dir/calm" "$dir/cut" && [[ ! -e $dir/cut/checkpoint.safetensors.tmp ]]
}
# As long as a run takes here: kills fall on all of it, the end included.
longest=$(($(date +%s%3N)))
train --out "$dir/time" --steps $steps
longest=$(($(date +%s%3N) - longest + 1000))
check "$kills kills, resumed to the same bits" killed_and_resumed

echo "$passed passed, $failed failed"
((failed == 0))
