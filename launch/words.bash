# shellcheck shell=bash
# Sourced by the launch scripts: errors, commands as text, and what a command says of its run.

die() {
  echo "${0##*/}: $1" >&2
  exit "${2:-2}"
}

# The arguments as one line that a shell reads back as the same arguments.
quoted() {
  local word text=''
  for word; do
    [[ $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]] || word=${word@Q}
    text+=" $word"
  done
  printf '%s' "${text# }"
}

# Sets the caller's `line` to a command that ends with 75 when a signal has stopped the command
# before its last step: such a run is to be continued.
# shellcheck disable=SC2034
with_stopped_code() {
  line=("$@")
  [[ $1 != bert-jax || ! ${2:-} =~ ^(pretrain|finetune)$ ]] ||
    line=("$1" "$2" --stopped-code=75 "${@:3}")
}

# The step of the newest checkpoint in the --workdir of a command; 0 where none can be seen.
newest_step() {
  local word before='' workdir='' path newest=0
  for word; do
    [[ $word != --workdir=* ]] || workdir=${word#*=}
    [[ $before != --workdir ]] || workdir=$word
    before=$word
  done
  while read -r path; do
    path=${path%/} path=${path##*/}
    [[ ! $path =~ ^[0-9]+$ ]] || ((10#$path <= newest)) || newest=$((10#$path))
  done < <(
    case $workdir in
      gs://*) gcloud storage ls "$workdir/checkpoints/" "$workdir/resume/" 2>/dev/null ;;
      ?*) printf '%s\n' "$workdir"/{checkpoints,resume}/* ;;
    esac
  )
  echo "$newest"
}
