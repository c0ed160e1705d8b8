# shellcheck shell=bash
# Sourced by the launch scripts: how they end with an error and print a command.

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
