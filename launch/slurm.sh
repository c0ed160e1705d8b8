#!/usr/bin/env bash
# A GPU cluster under Slurm.
set -euo pipefail

usage() {
  cat <<'HELP'
slurm.sh: submit a pretraining job to Slurm.

  slurm.sh [FLAGS] -- bert-jax pretrain --config=... --workdir=...

  --nodes N              default: 1
  --gpus-per-node N      default: 8
  --per gpu|node         one process per GPU, or per node with all its GPUs (gpu)
  --name NAME            default: bert_jax
  --time T               limit, as Slurm takes it; the run saves 180 s before (1-00:00:00)
  --partition P, --account A, --cpus-per-task N, --output FILE
  --sbatch-flag FLAG     any other, such as --sbatch-flag=--constraint=a100; may be repeated
  --setup COMMAND        in the job before the run, such as 'module load cuda'; may be repeated
  --restarts N           times that a job may be put back into the queue without a new checkpoint (20)
  --dry-run              print the command and call nothing

The job runs in the current directory, with its .venv first on PATH where there is one. At the time
limit and on a preemption the run saves, and the job goes back into the queue and continues; so does
one that crashed or stood still, but not one that ended with 2 (input to correct), 3 (several saves
in a row failed), 4 (a bad step), 5 (no intact checkpoint), 7 (another run has the work directory),
8 (fine-tuning learned nothing) or 130 (interrupted).
The work directory and the corpus must be on a file system that all nodes share.
Exit code: sbatch's, 2 for wrong arguments.
HELP
}

# shellcheck source=/dev/null # checked by itself
source "$(dirname "${BASH_SOURCE[0]}")/words.bash"

# The batch script; Slurm runs it on the first node.
script() {
  local tasks=1 devices='' run
  if [[ $per == gpu ]]; then
    tasks=$gpus # JAX gives task i of a node its GPU i
  else
    devices=$(seq -s, 0 $((gpus - 1))) # or the task would get GPU 0 alone
  fi
  # srun returns the highest code of its tasks, and 137 for one that it kills. So those that met the
  # same error get a minute to say so themselves; then the others, which wait for them, are killed.
  run=(srun --kill-on-bad-exit=0 --wait=60 "--ntasks-per-node=$tasks" env ${devices:+"JAX_LOCAL_DEVICE_IDS=$devices"} "$@")
  cat <<SCRIPT
#!/usr/bin/env bash
[[ ! -d .venv/bin ]] || export PATH="\$PWD/.venv/bin:\$PATH"
SCRIPT
  printf '%s\n' "${setup[@]}"
  # Not before: what --setup sources, such as scripts of conda, may use variables that are not set.
  echo 'set -uo pipefail'
  declare -f newest_step insisted
  cat <<SCRIPT
newest() { newest_step $(quoted "$@"); }
# Since Slurm 22.05, srun takes this from no other place.
[[ -z \${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=\$SLURM_CPUS_PER_TASK
count=\${SLURM_RESTART_COUNT:-0}
# File with two numbers: the restart count at the newest checkpoint, and the step of that checkpoint.
kept=.bert_jax-\$SLURM_JOB_ID
{ read -r since step <"\$kept"; } 2>/dev/null || since=0 step=\$(newest)
note() { # COUNT
  local now
  now=\$(newest)
  ((now <= step)) || since=\$1 step=\$now
  echo "\$since \$step" >"\$kept"
}
note "\$((count - 1))" # a preemption may have killed this script after a checkpoint
code=0
$(quoted "${run[@]}") || code=\$?
# What another try does not fix. 75 is stopped and saved before the last step, 6 stood still.
case \$code in 0 | 2 | 3 | 4 | 5 | 7 | 8 | 130) rm -f "\$kept"; exit "\$code" ;; esac
note "\$count"
# A cancelled job is not RUNNING and stays cancelled.
if ((count - since < $restarts)) &&
  [[ \$(insisted squeue --noheader --jobs="\$SLURM_JOB_ID" --format=%T) == RUNNING ]]; then
  insisted scontrol requeue "\$SLURM_JOB_ID"
fi
exit "\$code"
SCRIPT
}

# Runs a command until it works, five times at most: Slurm's controller does not always answer.
insisted() {
  local pause
  for pause in 10 30 60 120 ''; do
    "$@" && return
    [[ -z $pause ]] || sleep "$pause"
  done
  return 1
}

main() {
  local nodes=1 gpus=8 per=gpu name=bert_jax limit=1-00:00:00 restarts=20 dry_run=''
  local output='%x-%j.out' extra=() setup=() command=() line=() flags text code=0
  while (($#)); do
    case $1 in
      --help | -h) usage && return ;;
      --dry-run) dry_run=1 ;;
      --)
        shift
        command=("$@")
        break
        ;;
      --*=*)
        local flag=${1%%=*} value=${1#*=}
        shift
        set -- "$flag" "$value" "$@"
        continue
        ;;
      --*)
        (($# > 1)) || die "$1 needs a value"
        case $1 in
          --nodes) nodes=$2 ;;
          --gpus-per-node) gpus=$2 ;;
          --per) per=$2 ;;
          --name) name=$2 ;;
          --time) limit=$2 ;;
          --restarts) restarts=$2 ;;
          --output) output=$2 ;;
          --partition | --account | --cpus-per-task) extra+=("$1=$2") ;;
          --sbatch-flag) extra+=("$2") ;;
          --setup) setup+=("$2") ;;
          *) die "there is no flag $1 (see slurm.sh --help)" ;;
        esac
        shift
        ;;
      *) die "unexpected $1; the command comes after --" ;;
    esac
    shift
  done
  ((${#command[@]})) || die "no command; give it after --, as in: -- bert-jax pretrain --config=..."
  [[ $per == gpu || $per == node ]] || die "--per is $per; it must be gpu or node"
  local number
  for number in "nodes=$nodes" "gpus-per-node=$gpus"; do
    [[ ${number#*=} =~ ^[1-9][0-9]*$ ]] || die "--${number%%=*} is ${number#*=}; it must be a number above 0"
  done
  [[ $restarts =~ ^[0-9]+$ ]] || die "--restarts is $restarts; it must be a whole number"
  with_stopped_code "${command[@]}"
  flags=(
    "--job-name=$name" "--nodes=$nodes" "--gpus-per-node=$gpus"
    "--ntasks-per-node=$([[ $per == gpu ]] && echo "$gpus" || echo 1)"
    "--time=$limit" --signal=TERM@180 --requeue --open-mode=append "--output=$output"
    "${extra[@]}"
  )
  text=$(script "${line[@]}")
  if [[ -n $dry_run ]]; then
    printf "%s <<'SCRIPT'\n%s\nSCRIPT\n" "$(quoted sbatch "${flags[@]}")" "$text"
    return
  fi
  command -v sbatch >/dev/null || die "sbatch is not installed; run this on a login node of the cluster" 127
  sbatch "${flags[@]}" <<<"$text" || code=$?
  ((code == 0)) || die "exit code $code from: $(quoted sbatch "${flags[@]}")" "$code"
}

main "$@"
