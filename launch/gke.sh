#!/usr/bin/env bash
# Kubernetes: TPU slices on GKE through XPK or a plain JobSet, GPU nodes through a JobSet.
set -euo pipefail

usage() {
  cat <<'HELP'
gke.sh: pretrain on Kubernetes.

  gke.sh yaml   NAME [FLAGS] -- bert-jax pretrain ...   print a JobSet
  gke.sh apply  NAME [FLAGS] -- bert-jax pretrain ...   kubectl apply -f -
  gke.sh xpk    NAME [FLAGS] -- bert-jax pretrain ...   xpk workload create
  gke.sh logs   NAME [--follow]                  of process 0
  gke.sh status NAME
  gke.sh delete NAME

both
  --image IMAGE          that has bert_jax and its packages (required)
  --slices N             TPU slices, or 1 (1)
  --max-restarts N       of the whole set, after a failure or a preemption; Kubernetes counts over
                         the life of the job, whatever it has achieved (20)
TPU, JobSet
  --accelerator A        node label gke-tpu-accelerator: tpu-v5-lite-podslice (default),
                         tpu-v5p-slice, tpu-v6e-slice, tpu7x
  --topology T           node label gke-tpu-topology (4x4)
  --chips-per-node N     of the machine type (4)
GPU, JobSet (in place of the three above)
  --gpu-nodes N          nodes; one process each, with all its GPUs
  --gpus-per-node N      default: 8
JobSet
  --namespace NS         default: kubectl's
  --service-account SA   default: the namespace's
  --claim NAME           persistent volume claim, ReadWriteMany, mounted at --mount
  --bucket NAME          the same through the Cloud Storage FUSE CSI driver
  --mount DIR            default: /mnt/bert_jax
  --spot                 on spot nodes
XPK
  --cluster C            required
  --type T               such as v5litepod-256 (v5litepod-16)
  --project P, --zone Z  default: gcloud's

  --dry-run              print the command and call nothing

Exit code: that of kubectl or xpk, 2 for wrong arguments. XPK starts a run again after every code
except 0. A JobSet does not start a run again that ends with 2 (input to correct), 3 (several saves
in a row failed), 4 (a bad step), 5 (no intact checkpoint), 7 (another run has the work directory),
8 (fine-tuning learned nothing) or 130 (interrupted).
HELP
}

# shellcheck source=/dev/null # checked by itself
source "$(dirname "${BASH_SOURCE[0]}")/words.bash"

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

product() {
  local size result=1
  for size in ${1//x/ }; do result=$((result * size)); done
  echo "$result"
}

# Lines of YAML, each indented by so many spaces.
indented() {
  local spaces=$1 line
  shift
  for line; do printf '%*s%s\n' "$spaces" '' "$line"; done
}

jobset() {
  local nodes word selector=() resource env=() volume=() mounts=()
  if [[ -n $gpu_nodes ]]; then
    nodes=$gpu_nodes resource="nvidia.com/gpu: $gpus"
    # JobSet names pods SET-JOB-INDEX-POD and gives them that host name in the domain SET.
    env=(
      '- {name: JAX_COORDINATOR_ADDRESS, value: '"$(yaml "$name-workers-0-0.$name:8482")"'}'
      '- {name: JAX_NUM_PROCESSES, value: '"$(yaml "$nodes")"'}'
      '- name: JAX_PROCESS_ID'
      '  valueFrom:'
      "    fieldRef: {fieldPath: \"metadata.annotations['batch.kubernetes.io/job-completion-index']\"}"
    )
  else
    local chips
    chips=$(product "$topology")
    ((chips % chips_per_node == 0)) ||
      die "--topology $topology has $chips chips, which --chips-per-node $chips_per_node does not divide"
    nodes=$((chips / chips_per_node)) resource="google.com/tpu: $chips_per_node"
    selector=(
      "cloud.google.com/gke-tpu-accelerator: $(yaml "$accelerator")"
      "cloud.google.com/gke-tpu-topology: $topology"
    )
  fi
  [[ -z $spot ]] || selector+=('cloud.google.com/gke-spot: "true"')
  [[ -z $claim ]] || volume=("persistentVolumeClaim: {claimName: $(yaml "$claim")}")
  [[ -z $bucket ]] || volume=(
    'csi:'
    '  driver: gcsfuse.csi.storage.gke.io'
    "  volumeAttributes: {bucketName: $(yaml "$bucket"), mountOptions: implicit-dirs}"
  )
  cat <<YAML
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $name
YAML
  [[ -z $namespace ]] || echo "  namespace: $(yaml "$namespace")"
  # One slice of a TPU is one node pool; a job must not be spread over two.
  [[ -n $gpu_nodes ]] || indented 2 'annotations:' \
    '  alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool'
  cat <<YAML
spec:
  failurePolicy:
    maxRestarts: $max_restarts
    rules:
    - action: FailJobSet  # what a restart does not fix
      onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
  - name: workers
    replicas: $slices
    template:
      spec:
        parallelism: $nodes
        completions: $nodes
        backoffLimit: 0
        podFailurePolicy:
          rules:
          - action: FailJob
            onExitCodes: {containerName: bert-jax, operator: In, values: [2, 3, 4, 5, 7, 8, 130]}
        template:
YAML
  [[ -z $bucket ]] || indented 10 'metadata:' '  annotations: {gke-gcsfuse/volumes: "true"}'
  indented 10 spec:
  [[ -z $service_account ]] || indented 12 "serviceAccountName: $(yaml "$service_account")"
  indented 12 'restartPolicy: Never' 'terminationGracePeriodSeconds: 180'
  ((${#selector[@]} == 0)) || { indented 12 nodeSelector: && indented 14 "${selector[@]}"; }
  [[ -z $spot ]] || indented 12 'tolerations:' \
    '- {key: cloud.google.com/gke-spot, operator: Equal, value: "true", effect: NoSchedule}'
  if ((${#volume[@]})); then
    indented 12 'volumes:' '- name: shared' && indented 14 "${volume[@]}"
    mounts=('volumeMounts:' "- {name: shared, mountPath: $(yaml "$mount")}")
  fi
  indented 12 'containers:' '- name: bert-jax'
  indented 14 "image: $(yaml "$image")"
  # 8471 and 8431: libtpu; 8482: the coordinator of jax.distributed.
  indented 14 'ports: [{containerPort: 8471}, {containerPort: 8431}, {containerPort: 8482}]'
  ((${#env[@]} == 0)) || { indented 14 env: && indented 14 "${env[@]}"; }
  ((${#mounts[@]} == 0)) || indented 14 "${mounts[@]}"
  indented 14 "resources: {limits: {$resource}}" command:
  for word in "${line[@]}"; do indented 14 "- $(pod_word "$word")"; done
}

main() {
  local verb=${1:-} name='' image='' slices=1 max_restarts=20 accelerator=tpu-v5-lite-podslice
  local topology='' chips_per_node=4 gpu_nodes='' gpus=8 namespace='' service_account='' claim=''
  local bucket='' mount=/mnt/bert_jax spot='' cluster='' type='' project='' zone=''
  local dry_run='' follow='' command=() line=() where text
  case $verb in
    --help | -h | help) usage && return ;;
    yaml | apply | xpk | logs | status | delete) shift ;;
    '') usage >&2 && exit 2 ;;
    *) die "there is no verb $verb (see gke.sh --help)" ;;
  esac
  while (($#)); do
    case $1 in
      --help | -h) usage && return ;;
      --spot) spot=1 ;;
      --dry-run) dry_run=1 ;;
      --follow) follow=1 ;;
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
          --slices) slices=$2 ;;
          --max-restarts) max_restarts=$2 ;;
          --accelerator) accelerator=$2 ;;
          --topology) topology=$2 ;;
          --chips-per-node) chips_per_node=$2 ;;
          --gpu-nodes) gpu_nodes=$2 ;;
          --gpus-per-node) gpus=$2 ;;
          --namespace) namespace=$2 ;;
          --service-account) service_account=$2 ;;
          --claim) claim=$2 ;;
          --bucket) bucket=$2 ;;
          --mount) mount=$2 ;;
          --cluster) cluster=$2 ;;
          --type) type=$2 ;;
          --project) project=$2 ;;
          --zone) zone=$2 ;;
          *) die "there is no flag $1 (see gke.sh --help)" ;;
        esac
        shift
        ;;
      *)
        [[ -z $name ]] || die "unexpected $1; the job is $name already, and a command comes after --"
        name=$1
        ;;
    esac
    shift
  done
  [[ $name =~ ^[a-z]([a-z0-9-]*[a-z0-9])?$ ]] ||
    die "the job's name is '$name'; it must be lower-case letters, digits and -, as in: gke.sh $verb bert-base"
  local given=$topology topology=${topology:-4x4}
  [[ $topology =~ ^[0-9]+(x[0-9]+)+$ ]] || die "--topology is $topology; it must be as in 4x4 or 2x2x2"
  local number
  for number in "slices=$slices" "chips-per-node=$chips_per_node" "gpu-nodes=${gpu_nodes:-1}" "gpus-per-node=$gpus"; do
    [[ ${number#*=} =~ ^[1-9][0-9]*$ ]] || die "--${number%%=*} is ${number#*=}; it must be a number above 0"
  done
  [[ -z $gpu_nodes || $slices == 1 ]] || die "--slices is for TPUs; leave it out with --gpu-nodes"
  [[ -z $claim || -z $bucket ]] || die "--claim and --bucket are both given; give one of them"
  [[ $verb != xpk || -z $claim$bucket$namespace$gpu_nodes$service_account ]] ||
    die "xpk takes no --claim, --bucket, --namespace, --gpu-nodes or --service-account; use apply. A run under xpk can keep its work directory in gs://"
  [[ $verb != xpk || -z $given ]] || die "xpk takes no --topology; give --type, such as v5litepod-256"
  [[ ! $verb =~ ^(yaml|apply)$ || -z $type ]] || die "--type is for xpk; $verb takes --topology, as in --topology=16x16"
  where=(${namespace:+"--namespace=$namespace"})
  case $verb in
    yaml | apply | xpk)
      ((${#command[@]})) || die "$verb needs a command after --"
      [[ -n $image ]] || die "give --image, a container image that has bert_jax and its packages"
      with_stopped_code "${command[@]}"
      ;;
    *) ((${#command[@]} == 0)) || die "$verb takes no command" ;;
  esac
  case $verb in
    yaml) jobset ;;
    apply)
      text=$(jobset)
      if [[ -n $dry_run ]]; then
        printf "kubectl apply --filename=- <<'YAML'\n%s\nYAML\n" "$text"
      else
        call kubectl apply --filename=- <<<"$text"
      fi
      ;;
    xpk)
      [[ -n $cluster ]] || die "give --cluster, the name of a cluster made with xpk cluster create"
      call xpk workload create "--workload=$name" "--cluster=$cluster" "--tpu-type=${type:-v5litepod-16}" \
        "--num-slices=$slices" "--docker-image=$image" "--max-restarts=$max_restarts" \
        --restart-on-user-code-failure --termination-grace-period-seconds=180 \
        ${spot:+--spot} ${project:+"--project=$project"} ${zone:+"--zone=$zone"} \
        "--command=$(quoted "${line[@]}")"
      ;;
    logs)
      call kubectl logs "${where[@]}" ${follow:+--follow} \
        "--selector=jobset.sigs.k8s.io/jobset-name=$name,jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0" \
        --tail=-1
      ;;
    status)
      call kubectl get jobset "$name" "${where[@]}"
      call kubectl get pods "${where[@]}" "--selector=jobset.sigs.k8s.io/jobset-name=$name" --output=wide
      ;;
    delete) call kubectl delete jobset "$name" "${where[@]}" ;;
  esac
}

main "$@"
