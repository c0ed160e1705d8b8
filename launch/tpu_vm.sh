#!/usr/bin/env bash
# A Cloud TPU VM pod, from request to deletion, through queued resources.
set -euo pipefail

usage() {
  cat <<'HELP'
tpu_vm.sh: pretrain on a Cloud TPU pod.

  tpu_vm.sh create  NAME [--type v5litepod-16] [--spot] [--slices N]   ask for the pod
  tpu_vm.sh wait    NAME                      until it is there
  tpu_vm.sh install NAME [--nfs HOST:/SHARE]  this checkout's HEAD and its packages on every host
  tpu_vm.sh run     NAME -- bert-jax pretrain ...   on every host; outlives this terminal
  tpu_vm.sh watch   NAME ... -- bert-jax pretrain ...   all of the above; again after a preemption
  tpu_vm.sh logs    NAME [--follow] [--lines N] [--worker K]
  tpu_vm.sh status  NAME                      of the request and of the run on each host
  tpu_vm.sh stop    NAME                      SIGTERM: the run saves and ends
  tpu_vm.sh delete  NAME                      the pod and the request
  tpu_vm.sh ssh     NAME [--worker K|all] -- COMMAND...

where
  --project P            default: gcloud's
  --zone Z               default: us-west4-a
the pod
  --type T               accelerator type, such as v5litepod-256, v5p-128, v6e-256 (v5litepod-16)
  --runtime-version V    default: that of the type
  --spot                 cheaper, and may be taken away at any time
  --slices N             several slices, connected over the data centre network (1)
  --create-flag FLAG     passed to `queued-resources create`; may be repeated
the hosts
  --nfs HOST:/SHARE      mounted on every host: the corpus and the work directory are shared
  --bucket NAME          the same through gcsfuse
  --mount DIR            where (/mnt/bert_jax)
  --setup COMMAND        runs on every host before the packages are installed
  --internal-ip          ssh to internal addresses
the run
  --restarts N           on each host, after an error that another try can mend (20)
  --poll SECONDS         how often `wait` and `watch` look (60)
  --max-recreates N      `watch` gives up after so many (50)
  --wait-limit SECONDS   `wait` gives up after so long; 0: never (0)
  --dry-run              print the commands and call nothing

Exit code: 0, that of the gcloud command that failed, 2 for wrong arguments, 3 for a request that
failed; `watch`: that of the run. `watch` is to run where it is not interrupted: tmux on a small VM.
ssh to several hosts needs the key in an agent: ssh-add ~/.ssh/google_compute_engine
HELP
}

# shellcheck source=/dev/null # checked by itself
source "$(dirname "${BASH_SOURCE[0]}")/words.bash"

say() { echo "[tpu_vm.sh] $(date -u +%FT%TZ) $*" >&2; }

# Runs a command, or prints it. A failure ends the script with the command's exit code.
call() {
  local code=0
  if [[ -n $dry_run ]]; then
    quoted "$@"
    echo
    return
  fi
  "$@" || code=$?
  ((code == 0)) || die "exit code $code from: $(quoted "$@")" "$code"
}

default_runtime() {
  case $1 in
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
    v2-* | v3-* | v4-*) echo tpu-ubuntu2204-base ;;
    *) die "no runtime version is known for --type $1; give --runtime-version (and see cloud.google.com/tpu/docs/runtimes)" ;;
  esac
}

queue() { call gcloud compute tpus queued-resources "$@" "${where[@]}"; }

# on_hosts WORKER COMMAND_LINE: runs a shell command line on a worker, or on `all`.
on_hosts() {
  if ((slices > 1)); then
    local node=0
    [[ $1 != all ]] || node=all
    queue ssh "$name" "--node=$node" "--worker=$1" "${ssh_flags[@]}" "--command=$2"
  else
    call gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" "--worker=$1" "${ssh_flags[@]}" \
      "--command=$2"
  fi
}

host_script() { quoted bert_jax/launch/on_host.sh "$@"; }

create() {
  local node=("--node-id=$name")
  [[ -n $runtime ]] || runtime=$(default_runtime "$type")
  ((slices == 1)) || node=("--node-count=$slices" "--node-prefix=$name")
  queue create "$name" "${node[@]}" "--accelerator-type=$type" \
    "--runtime-version=$runtime" ${spot:+--spot} "${create_flags[@]}"
}

# The request's state, or NONE. Nothing else of gcloud's errors is hidden.
state() {
  local errors code=0
  errors=$(mktemp)
  gcloud compute tpus queued-resources describe "$name" "${where[@]}" \
    '--format=value(state.state)' 2>"$errors" || code=$?
  if ((code)) && grep -q NOT_FOUND "$errors"; then
    echo NONE
    code=0
  elif ((code)); then
    cat "$errors" >&2
  fi
  rm -f "$errors"
  return "$code"
}

# The state of each slice's node: a preempted one may be gone before its request says so.
node_states() {
  local index nodes=("$name")
  if ((slices > 1)); then
    nodes=()
    for ((index = 0; index < slices; index++)); do nodes+=("$name-$index"); done
  fi
  for index in "${nodes[@]}"; do
    gcloud compute tpus tpu-vm describe "$index" "${where[@]}" '--format=value(state)' || return
  done
}

wait_until_active() {
  local now begin=$SECONDS
  if [[ -n $dry_run ]]; then
    echo "# until it prints ACTIVE:"
    queue describe "$name" '--format=value(state.state)'
    return
  fi
  while true; do
    now=$(state) || die "cannot ask for the state of $name" $?
    case $now in
      ACTIVE) return ;;
      FAILED | SUSPENDING | SUSPENDED | NONE)
        gcloud compute tpus queued-resources describe "$name" "${where[@]}" >&2 || true
        die "the request $name is $now, not waiting for resources; delete it and ask again" 3
        ;;
    esac
    ((wait_limit == 0 || SECONDS - begin < wait_limit)) || die "$name is still $now" 3
    say "$name is $now"
    sleep "$poll"
  done
}

install() {
  local archive=/tmp/bert_jax.tar.gz flags=()
  local copy=(scp "$archive" "$name:" --worker=all "${ssh_flags[@]}")
  [[ -z $nfs ]] || flags+=(--nfs "$nfs")
  [[ -z $bucket ]] || flags+=(--bucket "$bucket")
  [[ -z $nfs$bucket ]] || flags+=(--mount "$mount")
  [[ -z $setup ]] || flags+=(--setup "$setup")
  call git -C "$checkout" archive --format=tar.gz --prefix=bert_jax/ --output="$archive" HEAD
  if ((slices > 1)); then
    queue "${copy[@]}" --node=all
  else
    call gcloud compute tpus tpu-vm "${copy[@]}" "${where[@]}"
  fi
  on_hosts all "mkdir -p bert_jax && tar -xzf bert_jax.tar.gz && $(host_script install "${flags[@]}")"
}

run() {
  local line=("${command[@]}")
  # A run that a signal stopped is to be continued, and says so with this exit code.
  [[ ${line[0]} != bert-jax || ${line[1]:-} != pretrain ]] ||
    line=(bert-jax pretrain --stopped-code=75 "${line[@]:2}")
  on_hosts all "$(host_script start --restarts "$restarts" -- "${line[@]}")"
}

recreate() {
  ((recreates++ < max_recreates)) || die "$name was recreated $max_recreates times; giving up" 3
  say "recreating $name"
  queue delete "$name" --force --quiet
  create
}

# Keeps the pod and the run alive until the run ends.
watch() {
  local now progress nodes failures=0 recreates=0 active=''
  [[ -n $nfs$bucket$setup ]] ||
    die "a preempted pod's disks are lost; give --nfs, --bucket or a --setup that mounts what the work directory is on"
  if [[ -n $dry_run ]]; then
    create
    wait_until_active
    install
    run
    echo "# every $poll s: the state of the request, of the nodes and of the run"
    queue describe "$name" '--format=value(state.state)'
    on_hosts 0 "$(host_script status)"
    echo "# when the request is SUSPENDED or FAILED, or a node PREEMPTED or TERMINATED:"
    queue delete "$name" --force --quiet
    create
    wait_until_active
    install
    run
    return
  fi
  while true; do
    progress='' nodes=''
    # gcloud fails now and then; several times in a row it means something.
    if now=$(state) && { [[ $now != ACTIVE ]] || nodes=$(node_states); }; then
      if [[ $now == ACTIVE && ! $nodes =~ PREEMPTED|TERMINATED ]]; then
        active=1
        progress=$(on_hosts 0 "if [ -d bert_jax ]; then $(host_script status); else echo none; fi") ||
          now=UNKNOWN
        progress=${progress##*$'\n'}
      fi
    else
      now=UNKNOWN
    fi
    [[ $now == UNKNOWN ]] && failures=$((failures + 1)) || failures=0
    ((failures < 5)) || die "gcloud failed $failures times in a row" 1
    say "request $now${nodes:+, nodes ${nodes//$'\n'/ }}${progress:+, run: $progress}"
    case $now,$progress in
      ACTIVE,'exit 0') return 0 ;;
      ACTIVE,exit*) die "the run ended with exit code ${progress#exit }; see: tpu_vm.sh logs $name" "${progress#exit }" ;;
      ACTIVE,none)
        install
        run
        ;;
      ACTIVE,'' | SUSPENDED,*) recreate ;;
      FAILED,*)
        [[ -n $active ]] || wait_until_active # which says why, and ends
        recreate
        ;;
      NONE,*) create ;;
    esac
    sleep "$poll"
  done
}

logs() {
  local flags=(--lines "$lines")
  [[ -z $follow ]] || flags+=(--follow)
  on_hosts "$worker" "$(host_script log "${flags[@]}")"
}

status() {
  queue describe "$name" '--format=value(state.state)'
  on_hosts all "echo \"\$(hostname): \$($(host_script status))\""
}

main() {
  local verb=${1:-} name='' project='' zone=us-west4-a type=v5litepod-16 runtime='' spot='' slices=1
  local nfs='' bucket='' mount=/mnt/bert_jax setup='' restarts=20 poll=60 max_recreates=50
  local wait_limit=0 dry_run='' follow='' lines=50 worker=0 checkout
  local command=() create_flags=() ssh_flags=() where=()
  checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  case $verb in
    --help | -h | help) usage && return ;;
    create | wait | install | run | watch | logs | status | stop | delete | ssh) shift ;;
    '') usage >&2 && exit 2 ;;
    *) die "there is no verb $verb (see tpu_vm.sh --help)" ;;
  esac
  while (($#)); do
    case $1 in
      --help | -h) usage && return ;;
      --spot) spot=1 ;;
      --dry-run) dry_run=1 ;;
      --follow) follow=1 ;;
      --internal-ip) ssh_flags+=(--internal-ip) ;;
      --)
        shift
        command=("$@")
        break
        ;;
      --*=*) # --flag=value is --flag value
        local flag=${1%%=*} value=${1#*=}
        shift
        set -- "$flag" "$value" "$@"
        continue
        ;;
      --*)
        (($# > 1)) || die "$1 needs a value"
        case $1 in
          --project) project=$2 ;;
          --zone) zone=$2 ;;
          --type) type=$2 ;;
          --runtime-version) runtime=$2 ;;
          --slices) slices=$2 ;;
          --create-flag) create_flags+=("$2") ;;
          --nfs) nfs=$2 ;;
          --bucket) bucket=$2 ;;
          --mount) mount=$2 ;;
          --setup) setup=$2 ;;
          --restarts) restarts=$2 ;;
          --poll) poll=$2 ;;
          --max-recreates) max_recreates=$2 ;;
          --wait-limit) wait_limit=$2 ;;
          --lines) lines=$2 ;;
          --worker) worker=$2 ;;
          *) die "there is no flag $1 (see tpu_vm.sh --help)" ;;
        esac
        shift
        ;;
      *)
        [[ -z $name ]] || die "unexpected $1; the pod is $name already, and a command comes after --"
        name=$1
        ;;
    esac
    shift
  done
  [[ -n $name ]] || die "name the pod: tpu_vm.sh $verb NAME"
  [[ $slices =~ ^[1-9][0-9]*$ ]] || die "--slices is $slices; it must be a number above 0"
  case $verb in
    run | watch | ssh) ((${#command[@]})) || die "$verb needs a command after --" ;;
    *) ((${#command[@]} == 0)) || die "$verb takes no command" ;;
  esac
  where=(${project:+"--project=$project"} "--zone=$zone")
  [[ -n $dry_run ]] || command -v gcloud >/dev/null || die "gcloud is not installed: cloud.google.com/sdk" 127
  case $verb in
    wait) wait_until_active ;;
    stop) on_hosts all "$(host_script stop)" ;;
    delete) queue delete "$name" --force --quiet ;;
    ssh) on_hosts "$worker" "$(quoted "${command[@]}")" ;;
    *) "$verb" ;;
  esac
}

main "$@"
