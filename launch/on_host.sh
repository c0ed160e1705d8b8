#!/usr/bin/env bash
# What a host of the pod does; launch/tpu_vm.sh calls it on every worker.
set -euo pipefail

usage() {
  cat <<'HELP'
on_host.sh: install bert_jax on a machine and keep a training command running there.

  on_host.sh install [--extra tpu|gpu] [--nfs HOST:/SHARE] [--bucket NAME] [--mount DIR] [--setup COMMAND]
  on_host.sh start [--restarts N] [--pause SECONDS] [--unfinished] -- COMMAND...
  on_host.sh check -- COMMAND...        runs COMMAND --check here and now; each line begins with the host
  on_host.sh status [-- COMMAND...]     none | running | exit CODE; of COMMAND: also `running STEP`
                          with its newest checkpoint, and `other` where another command runs
  on_host.sh log [--lines N] [--follow]
  on_host.sh stop [--wait SECONDS]      SIGTERM: the run saves and ends

COMMAND runs apart from the terminal, in the checkout, with its .venv first on PATH. A host that runs
COMMAND already is left alone. COMMAND is started again when it ends with a code that another try can
fix: anything but 0 (done), 2 (input to correct), 3 (several saves in a row failed), 4 (a bad step),
5 (no intact checkpoint), 7 (another run has the work directory), 8 (fine-tuning learned nothing)
and 130 (interrupted). A signal that does not come
from `stop` (the host goes down) leaves `none`: the run is to be started again.

--restarts N      at most so often without a new checkpoint in its --workdir (default 20)
--pause SECONDS   before it is started again (default 120: the other hosts' processes notice within
                  100 s that one is gone, and end)
--unfinished      not where COMMAND has ended with exit code 0
--dry-run         print the commands and stop
The state is in $BERT_JAX_RUN (default ~/bert_jax_run): command, log, supervisor.pid, exit.
HELP
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
state=${BERT_JAX_RUN:-$HOME/bert_jax_run}
dry_run=

# shellcheck source=/dev/null # checked by itself
source "$here/launch/words.bash"

call() {
  if [[ -n $dry_run ]]; then
    printf '%s\n' "${*@Q}"
  else
    "$@"
  fi
}

alive() {
  local pid
  # After a reboot the number may be another process's.
  pid=$(cat "$state/supervisor.pid" 2>/dev/null) &&
    grep -qzx supervise "/proc/$pid/cmdline" 2>/dev/null
}

# Whether the run here, if any, is that of a command.
is_of() { [[ $(cat "$state/command" 2>/dev/null) == "$(quoted "$@")" ]]; }

install() {
  local extra=tpu nfs='' bucket='' mount=/mnt/bert_jax setup='' python
  while (($#)); do
    case $1 in
      --extra) extra=$2 ;;
      --nfs) nfs=$2 ;;
      --bucket) bucket=$2 ;;
      --mount) mount=$2 ;;
      --setup) setup=$2 ;;
      *) die "install does not know $1" ;;
    esac
    shift 2
  done
  cd "$here"
  if [[ -n $nfs || -n $bucket ]] && ! mountpoint -q "$mount"; then
    call sudo mkdir -p "$mount"
    if [[ -n $nfs ]]; then
      command -v mount.nfs >/dev/null || call sudo apt-get install -y -q nfs-common
      call sudo mount -t nfs -o hard,nconnect=4 "$nfs" "$mount"
    else
      command -v gcsfuse >/dev/null || die "gcsfuse is not installed; install it with --setup"
      call sudo chown "$(id -un)" "$mount"
      call gcsfuse --implicit-dirs "$bucket" "$mount"
    fi
  fi
  [[ -z $setup ]] || call bash -c "$setup"
  if [[ ! -x .venv/bin/python ]]; then
    for python in python3.14 python3.13 python3.12 python3.11 ''; do
      command -v "$python" >/dev/null && "$python" -c 'import ensurepip' 2>/dev/null && break
    done
    if [[ -n $python ]]; then
      call "$python" -m venv .venv
    else # Ubuntu 22.04 has Python 3.10
      call python3 -m pip install --quiet --user uv
      call python3 -m uv venv --quiet --seed --python 3.11 .venv
    fi
  fi
  call .venv/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[$extra]"
}

start() {
  local restarts=20 pause=120 unfinished=
  while (($#)); do
    case $1 in
      --restarts) restarts=$2 ;;
      --pause) pause=$2 ;;
      --unfinished) unfinished=1 && shift && continue ;;
      --) shift && break ;;
      *) die "start does not know $1; the command comes after --" ;;
    esac
    shift 2
  done
  (($#)) || die "start needs a command after --"
  if alive; then
    is_of "$@" || die "another run is there (supervisor $(cat "$state/supervisor.pid")); stop it first"
    echo "runs already; supervisor $(cat "$state/supervisor.pid")"
    return
  fi
  if [[ -n $unfinished ]] && is_of "$@" && [[ $(cat "$state/exit" 2>/dev/null) == 0 ]]; then
    echo "done already"
    return
  fi
  if [[ -n $dry_run ]]; then
    call nohup setsid bash "$here/launch/on_host.sh" supervise "$restarts" "$pause" "$@"
    return
  fi
  mkdir -p "$state"
  rm -f "$state/exit" "$state/stop"
  quoted "$@" >"$state/command"
  # All three streams away from the terminal, or ssh would stay until the run ends.
  nohup setsid bash "$here/launch/on_host.sh" supervise "$restarts" "$pause" "$@" \
    >>"$state/log" 2>&1 </dev/null &
  echo $! >"$state/supervisor.pid"
  while kill -0 $! 2>/dev/null && ! alive; do sleep 0.1; done # it is this script until it is another
  echo "started; supervisor $!"
}

# Runs a command with --check here and now. Each line begins with the name of the host.
check() {
  [[ ${1:-} != -- ]] || shift
  cd "$here"
  export PATH="$here/.venv/bin:$PATH"
  {
    ! alive || die "a run is there and has the chips; stop it first: tpu_vm.sh stop"
    command -v "$1" >/dev/null || die "$1 is not installed there; run tpu_vm.sh install" 127
    call "$@" --check
  } 2>&1 | sed -u "s/^/[$(hostname)] /"
}

supervise() {
  local restarts=$1 pause=$2 tries=0 code=0 stopping='' child='' step newest
  shift 2
  echo $$ >"$state/supervisor.pid.tmp" # `alive` may read at any time
  mv "$state/supervisor.pid.tmp" "$state/supervisor.pid"
  trap 'stopping=1; [[ -z $child ]] || kill -TERM "$child" 2>/dev/null || true' TERM
  cd "$here"
  export PATH="$here/.venv/bin:$PATH"
  newest=$(newest_step "$@")
  while true; do
    echo "[on_host.sh] $(date -u +%FT%TZ) try $((tries + 1)): $(printf '%q ' "$@")"
    "$@" &
    child=$!
    # A signal interrupts `wait`, so it is asked again until the child is gone.
    code=0
    wait "$child" || code=$?
    while kill -0 "$child" 2>/dev/null; do
      code=0
      wait "$child" || code=$?
    done
    child=''
    echo "[on_host.sh] $(date -u +%FT%TZ) ended with exit code $code"
    case $code in 0 | 2 | 3 | 4 | 5 | 7 | 8 | 130) break ;; esac
    step=$(newest_step "$@")
    ((step <= newest)) || newest=$step tries=0
    if [[ -z $stopping ]]; then
      ((tries++ < restarts)) || break
      sleep "$pause" &
      wait $! || true
    fi
    [[ -z $stopping || -e $state/stop ]] || return 0 # the host goes down: to be started again
    [[ -z $stopping ]] || break
  done
  echo "$code" >"$state/exit.tmp"
  mv "$state/exit.tmp" "$state/exit"
}

status() {
  local running=running
  [[ ${1:-} != -- ]] || shift
  if (($#)) && ! is_of "$@"; then
    if alive; then echo other; else echo none; fi
  elif alive; then # asked before the exit code, which a run writes before its end
    ((!$#)) || running+=" $(cd "$here" && newest_step "$@")"
    echo "$running"
  elif [[ -f $state/exit ]]; then
    echo "exit $(cat "$state/exit")"
  else
    echo none
  fi
}

log() {
  local lines=50 follow=()
  while (($#)); do
    case $1 in
      --lines) lines=$2 && shift ;;
      --follow) follow=(-F) ;;
      *) die "log does not know $1" ;;
    esac
    shift
  done
  call tail -n "$lines" "${follow[@]}" "$state/log"
}

stop() {
  local seconds=300
  [[ ${1:-} != --wait ]] || seconds=$2
  if ! alive; then
    echo "nothing runs here"
    return
  fi
  call touch "$state/stop"
  call kill -TERM "$(cat "$state/supervisor.pid")"
  [[ -z $dry_run ]] || return 0
  while alive && ((seconds-- > 0)); do sleep 1; done
  if alive; then
    echo "on_host.sh: still saving; ask again, or end it with kill -KILL" >&2
    exit 1
  fi
  status --
}

main() {
  local verb=${1:-}
  (($#)) && shift
  if [[ ${1:-} == --dry-run ]]; then
    dry_run=1
    shift
  fi
  case $verb in
    install | start | check | status | log | stop | supervise) "$verb" "$@" ;;
    --help | -h | help) usage ;;
    '') usage >&2 && exit 2 ;;
    *) die "there is no verb $verb (see on_host.sh --help)" ;;
  esac
}

main "$@"
