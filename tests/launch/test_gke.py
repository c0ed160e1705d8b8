"""launch/gke.sh against kubectl and xpk that record their calls."""

import subprocess

import pytest
from stub_commands import Stubs, in_pod, words

yaml = pytest.importorskip("yaml", reason="PyYAML reads the manifests")

ODD = [
    "--config.data.corpus=/my corpus",
    '--config.x=it\'s "q" \\n $(HOME) $HOME: #',
    "a\n$$$(HOME)",
]
COMMAND = ["bert-jax", "pretrain", "--config=a.py", *ODD]
RUN = ["bert-jax", "pretrain", "--stopped-code=75", *COMMAND[2:]]


@pytest.fixture
def stubs(tmp_path):
    stubs = Stubs(tmp_path)
    stubs.add("kubectl", 'if [[ $1 == apply ]]; then cat >"$STUBS/manifest"; fi')
    stubs.add("xpk")
    return stubs


def manifest(stubs, *flags):
    done = stubs.run("gke.sh", "yaml", "bert", "--image=img:1", *flags, "--", *COMMAND)
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)


def pod_of(jobset):
    (workers,) = jobset["spec"]["replicatedJobs"]
    return workers["template"]["spec"]["template"]["spec"]


def test_a_tpu_slice(stubs):
    jobset = manifest(stubs, "--topology=8x8", "--namespace=team", "--service-account=sa")
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert jobset["metadata"] == {
        "name": "bert",
        "namespace": "team",
        "annotations": {
            "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
        },
    }
    (workers,) = jobset["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    assert (workers["replicas"], job["parallelism"], job["completions"]) == (1, 16, 16)
    pod = pod_of(jobset)
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "8x8",
    }
    assert pod["serviceAccountName"] == "sa"
    (container,) = pod["containers"]
    assert container["image"] == "img:1"
    assert container["resources"] == {"limits": {"google.com/tpu": 4}}
    assert in_pod(container["command"]) == RUN


def test_odd_options_stay_strings(stubs):
    odd = "a, x: {b} #'\"c$$"
    names = ("image", "namespace", "service-account", "claim", "accelerator", "mount")
    for flags in ([f"--{name}={odd}" for name in names], [f"--bucket={odd}"]):
        jobset = manifest(stubs, *flags)
        pod = pod_of(jobset)
        (volume,) = pod["volumes"]
        if "csi" in volume:
            found = [volume["csi"]["volumeAttributes"]["bucketName"]]
        else:
            found = [volume["persistentVolumeClaim"]["claimName"],
                      pod["containers"][0]["image"], jobset["metadata"]["namespace"],
                      pod["serviceAccountName"], *pod["nodeSelector"].values(),
                      pod["containers"][0]["volumeMounts"][0]["mountPath"]]  # fmt: skip
        assert set(found) <= {odd, "4x4"}, found


def test_slices_on_spot_nodes_with_a_bucket(stubs):
    jobset = manifest(
        stubs, "--slices=2", "--spot", "--bucket=b", "--accelerator=tpu-v5p-slice",
        "--topology=2x2x4", "--mount=/data",
    )  # fmt: skip
    assert jobset["spec"]["replicatedJobs"][0]["replicas"] == 2
    template = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    assert template["metadata"]["annotations"] == {"gke-gcsfuse/volumes": "true"}
    pod = template["spec"]
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert pod["tolerations"][0]["key"] == "cloud.google.com/gke-spot"
    (volume,) = pod["volumes"]
    assert volume["csi"]["driver"] == "gcsfuse.csi.storage.gke.io"
    assert volume["csi"]["volumeAttributes"]["bucketName"] == "b"
    assert pod["containers"][0]["volumeMounts"] == [{"name": "shared", "mountPath": "/data"}]


def test_gpu_nodes_are_told_of_each_other(stubs):
    jobset = manifest(stubs, "--gpu-nodes=3", "--claim=disk")
    assert "annotations" not in jobset["metadata"]
    assert jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"] == 3
    (container,) = pod_of(jobset)["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    address, count, index = container["env"]
    assert address == {"name": "JAX_COORDINATOR_ADDRESS", "value": "bert-workers-0-0.bert:8482"}
    assert count == {"name": "JAX_NUM_PROCESSES", "value": "3"}
    assert index["name"] == "JAX_PROCESS_ID"
    assert "job-completion-index" in index["valueFrom"]["fieldRef"]["fieldPath"]


def test_what_is_started_again(stubs):
    jobset = manifest(stubs, "--max-restarts=3")
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 3
    (rule,) = jobset["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["backoffLimit"] == 0
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [2, 3, 4, 5, 7, 8, 130]
    assert pod_of(jobset)["restartPolicy"] == "Never"  # a pod failure policy wants it


def test_apply_gives_kubectl_the_manifest(stubs):
    done = stubs.run("gke.sh", "apply", "bert", "--image=img:1", "--", *COMMAND)
    assert done.returncode == 0, done.stderr
    assert stubs.calls == [["kubectl", "apply", "--filename=-"]]
    given = yaml.safe_load((stubs.directory / "manifest").read_text())
    assert given == manifest(stubs)
    dry = stubs.run("gke.sh", "apply", "bert", "--image=img:1", "--dry-run", "--", *COMMAND)
    assert len(stubs.calls) == 1
    (stubs.directory / "manifest").unlink()
    subprocess.run(
        ["bash", "-c", dry.stdout], check=True,
        env={"PATH": f"{stubs.directory}:/usr/bin:/bin", "STUBS": str(stubs.directory),
             "STUB_CALLS": str(stubs.directory / "calls")},
    )  # fmt: skip
    assert yaml.safe_load((stubs.directory / "manifest").read_text()) == given


def test_xpk(stubs):
    flags = ["--image=img:1", "--cluster=c", "--type=v5litepod-256", "--slices=2", "--project=p"]
    done = stubs.run("gke.sh", "xpk", "bert", *flags, "--", *COMMAND)
    assert done.returncode == 0, done.stderr
    (call,) = stubs.calls
    assert call[:-1] == [
        "xpk", "workload", "create", "--workload=bert", "--cluster=c", "--tpu-type=v5litepod-256",
        "--num-slices=2", "--docker-image=img:1", "--max-restarts=20",
        "--restart-on-user-code-failure", "--termination-grace-period-seconds=180", "--project=p",
    ]  # fmt: skip
    assert words(call[-1].removeprefix("--command=")) == RUN
    dry = stubs.run("gke.sh", "xpk", "bert", *flags, "--dry-run", "--", *COMMAND)
    assert words(dry.stdout) == call
    assert len(stubs.calls) == 1


def test_finetuning_that_a_signal_stops_is_to_be_continued(stubs):
    command = ["bert-jax", "finetune", "--workdir=w"]
    done = stubs.run("gke.sh", "yaml", "bert", "--image=i", "--", *command)
    (container,) = pod_of(yaml.safe_load(done.stdout))["containers"]
    assert container["command"] == [*command[:2], "--stopped-code=75", "--workdir=w"]


def test_other_verbs(stubs):
    for verb in ("logs", "status", "delete"):
        dry = stubs.run("gke.sh", verb, "bert", "--namespace=team", "--dry-run")
        assert stubs.calls == []
        assert stubs.run("gke.sh", verb, "bert", "--namespace=team").returncode == 0
        assert [words(line) for line in dry.stdout.splitlines()] == stubs.calls
        (stubs.directory / "calls").unlink()


@pytest.mark.parametrize(("verb", "tool"), [("apply", "kubectl"), ("xpk", "xpk")])
def test_a_failure_is_passed_on(stubs, verb, tool):
    stubs.add(tool, "echo 'forbidden' >&2; exit 6")
    done = stubs.run("gke.sh", verb, "bert", "--image=i", "--cluster=c", "--", *COMMAND)
    assert done.returncode == 6
    assert "forbidden" in done.stderr
    assert f"gke.sh: exit code 6 from: {tool}" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["apply", "Bert", "--image=i", "--", "x"], "the job's name is 'Bert'"),
        (["apply", "bert", "--", "x"], "give --image"),
        (["apply", "bert", "--image=i"], "apply needs a command after --"),
        (["apply", "bert", "--image=i", "--topology=4", "--", "x"], "--topology is 4"),
        (["apply", "bert", "--image=i", "--topology=3x3", "--", "x"], "has 9 chips, which"),
        (["xpk", "bert", "--image=i", "--", "x"], "give --cluster"),
        (
            ["yaml", "bert", "--image=i", "--gpu-nodes=4", "--slices=2", "--", "x"],
            "--slices is for TPUs",
        ),
        (
            ["apply", "bert", "--image=i", "--claim=c", "--bucket=b", "--", "x"],
            "--claim and --bucket are both given",
        ),
        (["xpk", "bert", "--image=i", "--claim=c", "--", "x"], "xpk takes no --claim"),
        (["xpk", "bert", "--image=i", "--topology=16x16", "--", "x"], "xpk takes no --topology"),
        (["xpk", "bert", "--image=i", "--service-account=s", "--", "x"], "or --service-account;"),
        (["apply", "bert", "--image=i", "--type=v5litepod-256", "--", "x"], "is for xpk; apply"),
        (["yaml", "bert", "--image=i", "--type=v5litepod-16", "--", "x"], "is for xpk; yaml"),
        (["logs", "bert", "--", "x"], "logs takes no command"),
    ],
)
def test_wrong_arguments(stubs, arguments, message):
    done = stubs.run("gke.sh", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert stubs.calls == []
