#!/usr/bin/env bash
# A corpus built on a Ray cluster: on Kubernetes through a JobSet, or on the hosts of a TPU pod.
set -euo pipefail

usage() {
  cat <<'HELP'
ray.sh: build a corpus on many machines.

  ray.sh yaml   NAME [FLAGS] -- bert-jax corpus ...   print a JobSet: a head, which runs the command, and workers;
                                                 and a NetworkPolicy, so that only its pods reach Ray
  ray.sh apply  NAME [FLAGS] -- bert-jax corpus ...   kubectl apply -f -, after the secret NAME-ray with Ray's token
  ray.sh logs   NAME [--follow]                  of the command
  ray.sh status NAME
  ray.sh delete NAME
  ray.sh tpu    NAME [FLAGS] -- bert-jax corpus ...   on the hosts of a pod that tpu_vm.sh created and installed;
                                                 tpu_vm.sh logs, status and stop go on from there

The command is given --engine=ray:auto. Sources and --out must be where all machines reach
them: gs://, or a shared disk.

Kubernetes
  --image IMAGE          that has bert_jax[cluster,gcs,data] (required)
  --workers N            pods beside the head (4)
  --cpus N               cores of a pod; a task takes one (8)
  --memory M             of a pod, as Kubernetes writes it (16Gi: 2 GiB a task)
  --disk M               ephemeral storage of a pod, where shards for a bucket are written first (40Gi)
  --spot                 workers on spot nodes; tasks of a lost one are done again
  --max-restarts N       of the command, after a failure; what is complete is not done again (20)
  --namespace NS         default: kubectl's
  --service-account SA   that may read the sources and write --out; default: the namespace's
TPU pod
  --project P            default: gcloud's
  --zone Z               default: us-west4-a
  --internal-ip          ssh to internal addresses

  --dry-run              print the commands and call nothing

Exit code: that of kubectl or gcloud, 2 for wrong arguments. A command that ends with 2 (input to correct) is
not started again.
HELP
}

# shellcheck source=/dev/null # checked by itself
source "$(dirname "${BASH_SOURCE[0]}")/words.bash"
here=$(dirname "${BASH_SOURCE[0]}")

call() {
  local code=0
  if [[ -n $dry_run ]]; then
    quoted "$@"
    echo
    return
  fi
  command -v "$1" >/dev/null || die "$1 is not installed" 127
  "$@" || code=$?
  ((code == 0)) || die "exit code $code from: $(quoted "$@")" "$code"
}

# One kind of pod: its name, how many, the line of bash that it runs, its job's policy, its tolerations.
pods() {
  local kind=$1 count=$2 script=$3
  cat <<YAML
  - name: $kind
    template:
      spec:
        parallelism: $count
        completions: $count
YAML
  if [[ $kind == head ]]; then
    cat <<'YAML'
        backoffLimit: 0
        podFailurePolicy:
          rules:
          - action: FailJob
            onExitCodes: {containerName: ray, operator: In, values: [2]}
YAML
  else
    cat <<'YAML'
        backoffLimit: 1000
        podFailurePolicy:
          rules:
          - action: Ignore
            onPodConditions: [{type: DisruptionTarget}]
YAML
  fi
  printf '        template:\n          spec:\n'
  [[ -z $service_account ]] || echo "            serviceAccountName: $service_account"
  [[ -z $spot || $kind == head ]] || cat <<'YAML'
            nodeSelector: {cloud.google.com/gke-spot: "true"}
            tolerations:
            - {key: cloud.google.com/gke-spot, operator: Equal, value: "true", effect: NoSchedule}
YAML
  cat <<YAML
            restartPolicy: Never
            containers:
            - name: ray
              image: $image
              resources:
                requests: &$kind {cpu: "$cpus", memory: $memory, ephemeral-storage: $disk}
                limits: *$kind
              env:
              - {name: RAY_USAGE_STATS_ENABLED, value: "0"}
              - {name: RAY_AUTH_MODE, value: token}
              - {name: RAY_AUTH_TOKEN, valueFrom: {secretKeyRef: {name: $name-ray, key: token}}}
              command: ["bash", "-c", $(pod_word "$script"), "ray"$(for word in "${@:4}"; do printf ', %s' "$(pod_word "$word")"; done)]
YAML
}

# The head of an object of Kubernetes: its version, its kind, its name.
object() {
  printf 'apiVersion: %s\nkind: %s\nmetadata:\n  name: %s\n' "$1" "$2" "$name"
  [[ -z $namespace ]] || echo "  namespace: $namespace"
}

# Only the pods of this job reach each other: whoever reaches Ray runs code on its machines.
policy() {
  local own="{matchLabels: {jobset.sigs.k8s.io/jobset-name: $name}}"
  object networking.k8s.io/v1 NetworkPolicy
  cat <<YAML
spec:
  podSelector: $own
  policyTypes: [Ingress]
  ingress:
  - from:
    - podSelector: $own
---
YAML
}

new_token() {
  od -An -N32 -tx1 /dev/urandom | tr -d ' \n'
}

jobset() {
  policy
  # Ray counts the cores of the machine; those of the pod are said to it.
  local start="ray start --num-cpus=$cpus --disable-usage-stats"
  object jobset.x-k8s.io/v1alpha2 JobSet
  cat <<YAML
spec:
  successPolicy: {operator: All, targetReplicatedJobs: [head]}
  failurePolicy:
    maxRestarts: $max_restarts
    rules:
    - action: FailJobSet  # what a restart does not fix
      onJobFailureReasons: [PodFailurePolicy]
      targetReplicatedJobs: [head]
  replicatedJobs:
YAML
  pods head 1 "$start --head --port=6379 --include-dashboard=false && exec \"\$@\"" "${command[@]}"
  # JobSet gives the head's pod this host name. Workers may come first.
  pods workers "$workers" \
    "until $start --address=$name-head-0-0.$name:6379 --block; do sleep 5; done"
}

# Ray on every host of a pod, and the command on the first one, apart from the terminal.
tpu() {
  local where=(${project:+"--project=$project"} "--zone=$zone") flags head line token
  flags=("${where[@]}" ${internal_ip:+--internal-ip} ${dry_run:+--dry-run})
  head=HEAD
  if [[ -z $dry_run ]]; then
    command -v gcloud >/dev/null || die "gcloud is not installed: cloud.google.com/sdk" 127
    head=$(gcloud compute tpus tpu-vm describe "$name" "${where[@]}" \
      '--format=value(networkEndpoints[0].ipAddress)') || die "there is no pod $name to be seen" 1
    [[ -n $head ]] || die "the first host of $name has no address" 1
  fi
  token=TOKEN
  [[ -n $dry_run ]] || token=$(new_token)
  line="umask 077 && mkdir -p ~/.ray && echo $token >~/.ray/auth_token && export RAY_AUTH_MODE=token"
  line+=" && cd bert_jax && .venv/bin/python -m pip install --quiet --constraint constraints.txt"
  line+=" --editable '.[cluster,gcs,data]' && { .venv/bin/ray stop >/dev/null || true; }"
  line+=" && if hostname -I | grep -qwF $head; then .venv/bin/ray start --head --port=6379"
  line+=" --node-ip-address=$head --include-dashboard=false --disable-usage-stats;"
  line+=" else until .venv/bin/ray start --address=$head:6379 --disable-usage-stats; do sleep 5; done; fi"
  "$here/tpu_vm.sh" ssh "$name" "${flags[@]}" --worker all -- bash -c "$line"
  # The command is a client of Ray, which takes the token from the file only in this mode.
  "$here/tpu_vm.sh" ssh "$name" "${flags[@]}" --worker 0 -- env RAY_AUTH_MODE=token \
    bert_jax/launch/on_host.sh start -- "${command[@]}"
}

main() {
  local verb=${1:-} name='' image='' workers=4 cpus=8 memory=16Gi disk=40Gi spot='' max_restarts=20
  local namespace='' service_account='' project='' zone=us-west4-a internal_ip='' dry_run='' follow=''
  local command=() where text
  case $verb in
    --help | -h | help) usage && return ;;
    yaml | apply | logs | status | delete | tpu) shift ;;
    '') usage >&2 && exit 2 ;;
    *) die "there is no verb $verb (see ray.sh --help)" ;;
  esac
  while (($#)); do
    case $1 in
      --help | -h) usage && return ;;
      --spot) spot=1 ;;
      --dry-run) dry_run=1 ;;
      --follow) follow=1 ;;
      --internal-ip) internal_ip=1 ;;
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
          --image) image=$2 ;;
          --workers) workers=$2 ;;
          --cpus) cpus=$2 ;;
          --memory) memory=$2 ;;
          --disk) disk=$2 ;;
          --max-restarts) max_restarts=$2 ;;
          --namespace) namespace=$2 ;;
          --service-account) service_account=$2 ;;
          --project) project=$2 ;;
          --zone) zone=$2 ;;
          *) die "there is no flag $1 (see ray.sh --help)" ;;
        esac
        shift
        ;;
      *)
        [[ -z $name ]] || die "unexpected $1; the name is $name already, and a command comes after --"
        name=$1
        ;;
    esac
    shift
  done
  [[ $name =~ ^[a-z]([a-z0-9-]*[a-z0-9])?$ ]] ||
    die "the name is '$name'; it must be lower-case letters, digits and -, as in: ray.sh $verb corpus"
  local number
  for number in "workers=$workers" "cpus=$cpus" "max-restarts=$max_restarts"; do
    [[ ${number#*=} =~ ^[1-9][0-9]*$ ]] || die "--${number%%=*} is ${number#*=}; it must be a number above 0"
  done
  for number in "memory=$memory" "disk=$disk"; do
    [[ ${number#*=} =~ ^[1-9][0-9]*[KMGT]i?$ ]] || die "--${number%%=*} is ${number#*=}; it must be as in 16Gi"
  done
  where=(${namespace:+"--namespace=$namespace"})
  case $verb in
    yaml | apply | tpu)
      [[ ${command[0]:-} == bert-jax && ${command[1]:-} == corpus ]] ||
        die "$verb needs a command after --: bert-jax corpus ..."
      [[ $verb == tpu || -n $image ]] ||
        die "give --image, a container image that has bert_jax[cluster,gcs,data]"
      command+=(--engine=ray:auto)
      ;;
    *) ((${#command[@]} == 0)) || die "$verb takes no command" ;;
  esac
  case $verb in
    yaml) jobset ;;
    apply)
      text=$(jobset)
      # Pods that join later need the same token, so a secret that is there stays.
      if [[ -n $dry_run ]]; then
        call kubectl create secret generic "$name-ray" "${where[@]}" --from-literal=token=TOKEN
        printf "kubectl apply --filename=- <<'YAML'\n%s\nYAML\n" "$text"
      else
        if ! kubectl get secret "$name-ray" "${where[@]}" >/dev/null 2>&1; then
          call kubectl create secret generic "$name-ray" "${where[@]}" "--from-literal=token=$(new_token)"
        fi
        call kubectl apply --filename=- <<<"$text"
      fi
      ;;
    logs)
      call kubectl logs "${where[@]}" ${follow:+--follow} \
        "--selector=jobset.sigs.k8s.io/jobset-name=$name,jobset.sigs.k8s.io/replicatedjob-name=head" --tail=-1
      ;;
    status)
      call kubectl get jobset "$name" "${where[@]}"
      call kubectl get pods "${where[@]}" "--selector=jobset.sigs.k8s.io/jobset-name=$name" --output=wide
      ;;
    delete)
      call kubectl delete jobset "$name" "${where[@]}"
      call kubectl delete --ignore-not-found "networkpolicy/$name" "secret/$name-ray" "${where[@]}"
      ;;
    tpu) tpu ;;
  esac
}

main "$@"
