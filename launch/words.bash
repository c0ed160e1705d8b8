# shellcheck shell=bash
# Sourced by the launch scripts: errors, commands as text and in YAML, and what a command says of its run.

die() {
  echo "${0##*/}: $1" >&2
  exit "${2:-2}"
}

# Before 4.4, an empty array counts as a variable that is not set. The bash of macOS is 3.2.
((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || die "bash is $BASH_VERSION; 4.4 or newer is needed"

# The arguments as one line that a shell reads back as the same arguments.
quoted() {
  local word text=''
  for word; do
    [[ $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]] || word=${word@Q}
    text+=" $word"
  done
  printf '%s' "${text# }"
}

# A YAML string (the same as JSON's).
yaml() {
  local text=$1
  text=${text//\\/\\\\}
  text=${text//\"/\\\"}
  text=${text//$'\n'/\\n}
  text=${text//$'\t'/\\t}
  printf '"%s"' "$text"
}

# A word of a pod's command as a YAML string. Each $ is doubled: Kubernetes turns $$ into $, and would
# replace $(VARIABLE).
pod_word() {
  # shellcheck disable=SC2016 # $ is meant as it stands
  local word=${1//'$'/'$$'}
  yaml "$word"
}

# Sets the caller's `line` to a command that ends with 75 when a signal has stopped the command
# before its last step: such a run is to be continued.
# The path of `bert-jax` and words before `bert-jax`, such as `env NAME=VALUE`, are allowed.
with_stopped_code() {
  local at
  line=("$@")
  for ((at = 1; at < $#; at++)); do
    [[ ${line[at - 1]##*/} == bert-jax && ${line[at]} =~ ^(pretrain|finetune)$ ]] || continue
    line=("${@:1:at+1}" --stopped-code=75 "${@:at+2}")
    return
  done
}

# The step of the newest checkpoint in the --workdir of a command; 0 where none can be seen.
newest_step() {
  local word before='' workdir='' path newest=0
  for word; do
    [[ $word != --workdir=* ]] || workdir=${word#*=}
    [[ $before != --workdir ]] || workdir=$word
    before=$word
  done
  [[ $workdir != \~/* ]] || workdir=$HOME${workdir#\~}
  while read -r path; do
    path=${path%/} path=${path##*/}
    [[ ! $path =~ ^[0-9]+$ ]] || ((10#$path <= newest)) || newest=$((10#$path))
  done < <(
    case $workdir in
      gs://*) gcloud storage ls "${workdir%/}/checkpoints/" "${workdir%/}/resume/" 2>/dev/null ;;
      ?*) printf '%s\n' "$workdir"/{checkpoints,resume}/* ;;
    esac
  )
  echo "$newest"
}
