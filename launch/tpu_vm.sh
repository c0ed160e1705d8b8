#!/usr/bin/env bash
# A Cloud TPU VM pod, from request to deletion, through queued resources.
set -euo pipefail

usage() {
  cat <<'HELP'
tpu_vm.sh: pretrain on a Cloud TPU pod.

  tpu_vm.sh create  NAME [--type v5litepod-16] [--spot] [--slices N]   ask for the pod
  tpu_vm.sh wait    NAME                      until it is there
  tpu_vm.sh install NAME [--nfs HOST:/SHARE]  this checkout's HEAD and its packages on every host
  tpu_vm.sh check   NAME -- bert-jax pretrain ...   tries every host before the run is paid for
  tpu_vm.sh run     NAME -- bert-jax pretrain ...   on every host that does not run it yet
  tpu_vm.sh watch   NAME ... -- bert-jax pretrain ...   all of the above; again where need be
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
  --restarts N           on each host, after an error that another try can fix; counted anew after
                         each checkpoint (20)
  --poll SECONDS         how often `wait` and `watch` look (60)
  --max-failures N       `wait` and `watch` give up after so many failures of gcloud in a row, with
                         longer and longer pauses between them, up to 600 s (12)
  --max-recreates N      `watch` gives up after so many pods without a new checkpoint (50)
  --wait-limit SECONDS   `wait` gives up after so long; 0: never (0)
  --dry-run              print the commands and call nothing

Exit code: 0, that of the gcloud command that failed, 2 for wrong arguments, 3 for a request that
failed; `watch` and `check`: that of the run. `watch` is to run where it is not interrupted: tmux on a small VM.
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
  local errors code=0 answer
  errors=$(mktemp) || return
  answer=$(gcloud compute tpus queued-resources describe "$name" "${where[@]}" \
    '--format=value(state.state)' 2>"$errors") || code=$?
  if ((code)) && grep -q NOT_FOUND "$errors"; then
    answer=NONE code=0
  elif ((code)); then
    cat "$errors" >&2
  fi
  rm -f "$errors"
  [[ -n $answer ]] && echo "$answer"
  return "$((code ? code : ${#answer} == 0))"
}

# The state of each slice's node and the number of its hosts: a preempted node may be gone before its
# request says so.
node_states() {
  local index nodes=("$name")
  if ((slices > 1)); then
    nodes=()
    for ((index = 0; index < slices; index++)); do nodes+=("$name-$index"); done
  fi
  for index in "${nodes[@]}"; do
    gcloud compute tpus tpu-vm describe "$index" "${where[@]}" \
      '--format=value(state,networkEndpoints.len())' || return
  done
}

# After a failure in a row: waits longer than after the one before, and gives up at last.
failed() { # EXIT_CODE
  local seconds
  ((++failures < max_failures)) || die "gcloud failed $failures times in a row" "$1"
  seconds=$((poll << (failures < 9 ? failures : 9)))
  ((seconds <= longest_pause)) || seconds=$((poll > longest_pause ? poll : longest_pause))
  say "failure $failures of at most $max_failures in a row; again in $seconds s"
  sleep "$seconds"
}

# Ends with what the request says of itself.
refused() {
  gcloud compute tpus queued-resources describe "$name" "${where[@]}" >&2 || true
  die "the request $name is $1, not waiting for resources; delete it and ask again" 3
}

wait_until_active() {
  local now begin=$SECONDS
  if [[ -n $dry_run ]]; then
    echo "# until it prints ACTIVE:"
    queue describe "$name" '--format=value(state.state)'
    return
  fi
  while true; do
    now=$(state) || { failed $? && continue; }
    failures=0
    case $now in
      ACTIVE) return ;;
      FAILED | SUSPENDING | SUSPENDED | NONE) refused "$now" ;;
    esac
    ((wait_limit == 0 || SECONDS - begin < wait_limit)) || die "$name is still $now" 3
    say "$name is $now"
    sleep "$poll"
  done
}

# Ships the commit to every host and installs it. With `--idle`: not where something runs.
install() {
  local flags=() scratch line copy
  [[ -z $nfs ]] || flags+=(--nfs "$nfs")
  [[ -z $bucket ]] || flags+=(--bucket "$bucket")
  [[ -z $nfs$bucket ]] || flags+=(--mount "$mount")
  [[ -z $setup ]] || flags+=(--setup "$setup")
  # A directory of its own, which nobody else can write: two pods may be installed at once.
  scratch=$(mktemp -d ${dry_run:+-u}) || die "no temporary directory can be made" 1
  # shellcheck disable=SC2064 # the value of now
  trap "rm -rf $(quoted "$scratch")" EXIT
  call git -C "$checkout" archive --format=tar.gz --prefix=bert_jax/ \
    "--output=$scratch/bert_jax.tar.gz" "$commit"
  copy=(scp "$scratch/bert_jax.tar.gz" "$name:" --worker=all "${ssh_flags[@]}")
  if ((slices > 1)); then
    queue "${copy[@]}" --node=all
  else
    call gcloud compute tpus tpu-vm "${copy[@]}" "${where[@]}"
  fi
  line="mkdir -p bert_jax && tar -xzf bert_jax.tar.gz && $(host_script install "${flags[@]}")"
  [[ ${1:-} != --idle ]] ||
    line="case \$($(host_script status) 2>&1) in running*) ;; *) $line ;; esac"
  on_hosts all "$line"
}

# Runs the command with --check on every host, and ends with the first failure that a host names.
check() {
  local answers runs line hosts code=0 failed reason
  [[ "${command[*]:0:2}" =~ ^bert-jax\ (pretrain|finetune)$ ]] ||
    die "check needs the command of a run after --, as in: bert-jax pretrain ..."
  # shellcheck disable=SC2016 # expanded on the host
  printf -v line 'code=0; %s || code=$?; echo "bert_jax on $(hostname): exit $code"' \
    "$(host_script check -- "${command[@]}")"
  if [[ -n $dry_run ]]; then
    on_hosts all "$line"
    return
  fi
  answers=$(node_states) || die "gcloud does not describe $name" "$?"
  hosts=$(counted_hosts "$answers")
  { # shown at once, and kept
    answers=$(on_hosts all "$line" | while IFS= read -r told; do echo "$told" >&3 && echo "$told"; done) ||
      code=$?
  } 3>&1
  runs=$(states_of_hosts "$answers")
  if failed=$(grep -m 1 -o 'FAILED .*' <<<"$answers"); then die "the check failed: ${failed#FAILED  }"; fi
  if failed=$(first_failed "$runs"); then
    reason=$(grep -F "[${failed%%:*}] " <<<"$answers" | tail -n 1 | cut -d' ' -f2-) ||
      reason="bert_jax is not there; run: tpu_vm.sh install $name"
    die "the check failed on ${failed%%:*}: $reason" "${failed##* }"
  fi
  ((code == 0)) || die "gcloud does not reach all hosts; see: tpu_vm.sh status $name" "$code"
  (($(grep -c . <<<"$runs") >= hosts)) || die "not all of $hosts hosts answered; see: tpu_vm.sh status $name" 1
  say "all of $hosts hosts are ready"
}

# Starts the run on the hosts that do not run it yet. With `--unfinished`: not where it was done.
run() {
  local line flags=(--restarts "$restarts")
  [[ ${1:-} != --unfinished ]] || flags+=(--unfinished)
  with_stopped_code "${command[@]}"
  on_hosts all "$(host_script start "${flags[@]}" -- "${line[@]}")"
}

# Keeps the pod and the run alive until the run ends.
watch() {
  local request nodes runs active='' newest=0 recreates=0 line
  [[ -n $nfs$bucket$setup ]] ||
    die "a preempted pod's disks are lost; give --nfs, --bucket or a --setup that mounts what the work directory is on"
  with_stopped_code "${command[@]}"
  if [[ -n $dry_run ]]; then
    dry_watch
    return
  fi
  commit=$(git -C "$checkout" rev-parse HEAD) || die "$checkout is not a checkout with a commit"
  while true; do
    if look && act; then
      failures=0
      sleep "$poll"
    else
      failed $?
    fi
  done
}

dry_watch() {
  create
  wait_until_active
  install
  run
  echo "# every $poll s: the state of the request, of the nodes and of the run on every host"
  queue describe "$name" '--format=value(state.state)'
  on_hosts all "$(asked_of_hosts)"
  echo "# where a host does not run it: install and run again"
  echo "# when the request is SUSPENDED or FAILED, or a node PREEMPTED or TERMINATED:"
  queue delete "$name" --force --quiet
  echo "# and all of the above again"
}

# The command line that makes a host say how the run does there.
asked_of_hosts() {
  # shellcheck disable=SC2016 # expanded on the host
  printf 'echo "bert_jax on $(hostname): $(%s 2>/dev/null || echo none)"' \
    "$(host_script status -- "${line[@]}")"
}

# The number of hosts, from the answer of `node_states`.
counted_hosts() { awk '{ n += $2 } END { print n ? n : 1 }' <<<"$1"; }

# What the hosts say of the run there, a line `HOST: STATE` for each.
states_of_hosts() {
  sed -nE 's/^bert_jax on ([^ ]+: (none|other|running [0-9]+|exit [0-9]+))$/\1/p' <<<"$1" | sort -u
}

# The first host whose run has failed: 2 to 5, 7 and 8 are reasons; 6 and 134 often follow from them.
first_failed() {
  awk '/: exit [1-9]/ { rank = /: exit [2-578]$/ ? 1 : /: exit (6|134)$/ ? 3 : 2
      if (!best || rank < best) { best = rank; line = $0 } }
    END { if (!best) exit 1; print line }' <<<"$1"
}

# Finds out the state of the request and of its nodes, and of the run, a line `HOST: STATE` for each
# host. Fails where one of them does not answer.
look() {
  local answers hosts code=0
  nodes='' runs=''
  request=$(state) || return
  [[ $request == ACTIVE ]] || return 0
  active=1
  answers=$(node_states) || return
  nodes=$(cut -f 1 <<<"$answers" | paste -sd ' ' -)
  hosts=$(counted_hosts "$answers")
  [[ $nodes =~ ^READY(\ READY)*$ ]] || return 0
  answers=$(on_hosts all "$(asked_of_hosts)") || code=$?
  runs=$(states_of_hosts "$answers")
  [[ ! $runs =~ exit\ [1-9] ]] || return 0 # the word of one host is enough
  ((code == 0)) || return "$code"
  (($(grep -c . <<<"$runs") >= hosts)) || { say "not all of $hosts hosts answered" && return 1; }
}

# Does what is to be done about it. Fails where a command of it has failed.
act() {
  say "request $request${nodes:+, nodes $nodes}${runs:+, run: $(counted)}"
  case $request,$nodes in
    ACTIVE,*PREEMPTED* | ACTIVE,*TERMINATED* | SUSPENDED,*) recreate ;;
    FAILED,*) if [[ -n $active ]]; then recreate; else refused "$request"; fi ;;
    NONE,*) if [[ -n $active ]]; then attempt create; else create; fi ;;
    ACTIVE,*) [[ -z $runs ]] || act_on_runs ;;
  esac
}

act_on_runs() {
  local ended step
  step=$(sed -n 's/.*: running //p' <<<"$runs" | sort -n | tail -n 1)
  ((${step:-0} <= newest)) || newest=$step recreates=0
  if ended=$(first_failed "$runs"); then
    die "the run ended with exit code ${ended##* } on ${ended%%:*}; see: tpu_vm.sh logs $name --worker=all, and start it again with: tpu_vm.sh run" "${ended##* }"
  fi
  case $runs in
    *': other'*) die "the hosts run another command; stop it first: tpu_vm.sh stop $name" ;;
    *': none'*) attempt install --idle && attempt run --unfinished ;;
    *': running'*) ;;
    *) exit 0 ;; # on every host
  esac
}

recreate() {
  ((recreates < max_recreates)) ||
    die "$name was recreated $max_recreates times without a new checkpoint; giving up" 3
  say "recreating $name"
  attempt queue delete "$name" --force --quiet || return
  recreates=$((recreates + 1))
  attempt create
}

# Runs a function whose failure does not end the script.
attempt() { ("$@"); }

# How many hosts are in which state, as in `1 none,63 running 1200`.
counted() { cut -d' ' -f2- <<<"$runs" | sort | uniq -c | sed 's/^ *//' | paste -sd, -; }

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
  local wait_limit=0 dry_run='' follow='' lines=50 worker=0 checkout commit=HEAD
  local max_failures=12 failures=0 longest_pause=600
  local command=() create_flags=() ssh_flags=() where=()
  checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  case $verb in
    --help | -h | help) usage && return ;;
    create | wait | install | check | run | watch | logs | status | stop | delete | ssh) shift ;;
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
          --max-failures) max_failures=$2 ;;
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
  local number
  for number in "slices=$slices" "max-failures=$max_failures"; do
    [[ ${number#*=} =~ ^[1-9][0-9]*$ ]] || die "--${number%%=*} is ${number#*=}; it must be a number above 0"
  done
  for number in "restarts=$restarts" "poll=$poll" "max-recreates=$max_recreates" "wait-limit=$wait_limit"; do
    [[ ${number#*=} =~ ^[0-9]+$ ]] || die "--${number%%=*} is ${number#*=}; it must be a whole number"
  done
  [[ -z $nfs || -z $bucket ]] || die "--nfs and --bucket are both given; give one of them"
  case $verb in
    check | run | watch | ssh) ((${#command[@]})) || die "$verb needs a command after --" ;;
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
