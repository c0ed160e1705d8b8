"""launch/ray.sh against kubectl and gcloud that record their calls."""

import re
import shlex
from pathlib import Path

import pytest
from stub_commands import Stubs, in_pod, words

yaml = pytest.importorskip("yaml", reason="PyYAML reads the manifests")

COMMAND = [
    "bert-jax",
    "corpus",
    "--input=gs://raw/my *.jsonl",
    "--out=gs://c/$(HOME)",
    "a\n$$$(HOME)",
]
RUN = [*COMMAND, "--engine=ray:auto"]


@pytest.fixture
def stubs(tmp_path):
    stubs = Stubs(tmp_path)
    stubs.add(
        "kubectl",
        'if [[ $1 == apply ]]; then cat >"$STUBS/manifest"; fi; '
        "[[ $1 != get || -e $STUBS/secret ]]",
    )
    stubs.add("gcloud", "if [[ $* == *describe* ]]; then echo 10.1.2.3; fi")
    return stubs


def manifest(stubs, *flags):
    done = stubs.run("ray.sh", "yaml", "corpus", "--image=img:1", *flags, "--", *COMMAND)
    assert done.returncode == 0, done.stderr
    policy, jobset = yaml.safe_load_all(done.stdout)
    own = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": "corpus"}}
    assert policy["kind"] == "NetworkPolicy"
    assert policy["spec"]["podSelector"] == own
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": own}]}]
    assert policy["metadata"].get("namespace") == jobset["metadata"].get("namespace")
    return jobset


def pod_of(job):
    return job["template"]["spec"]["template"]["spec"]


def test_a_head_and_workers(stubs):
    jobset = manifest(stubs, "--workers=7", "--cpus=4", "--memory=9Gi", "--namespace=team")
    assert jobset["metadata"] == {"name": "corpus", "namespace": "team"}
    assert jobset["spec"]["successPolicy"]["targetReplicatedJobs"] == ["head"]
    head, workers = jobset["spec"]["replicatedJobs"]
    assert (head["name"], workers["name"]) == ("head", "workers")
    assert head["template"]["spec"]["completions"] == 1
    assert workers["template"]["spec"]["parallelism"] == 7
    for job in (head, workers):
        (container,) = pod_of(job)["containers"]
        assert container["image"] == "img:1"
        limits = {"cpu": "4", "memory": "9Gi", "ephemeral-storage": "40Gi"}
        assert container["resources"] == {"requests": limits, "limits": limits}
        assert container["command"][:2] == ["bash", "-c"]
        assert "--num-cpus=4" in container["command"][2]
        assert pod_of(job)["restartPolicy"] == "Never"
    (container,) = pod_of(head)["containers"]
    command = in_pod(container["command"])
    assert command[4:] == RUN
    assert command[2].endswith('--include-dashboard=false && exec "$@"')
    (container,) = pod_of(workers)["containers"]
    secret = {"secretKeyRef": {"name": "corpus-ray", "key": "token"}}
    assert {"name": "RAY_AUTH_TOKEN", "valueFrom": secret} in container["env"]
    assert "--address=corpus-head-0-0.corpus:6379 --block" in container["command"][2]


def test_what_is_started_again(stubs):
    spec = manifest(stubs, "--max-restarts=3", "--spot", "--service-account=sa")["spec"]
    assert spec["failurePolicy"]["maxRestarts"] == 3
    head, workers = spec["replicatedJobs"]
    (rule,) = head["template"]["spec"]["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [2])
    (rule,) = workers["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rule["action"] == "Ignore"
    assert "nodeSelector" not in pod_of(head)
    assert pod_of(workers)["nodeSelector"] == {"cloud.google.com/gke-spot": "true"}
    assert pod_of(workers)["tolerations"][0]["value"] == "true"
    assert {pod_of(job)["serviceAccountName"] for job in (head, workers)} == {"sa"}


def test_apply_and_other_verbs(stubs):
    done = stubs.run("ray.sh", "apply", "corpus", "--image=img:1", "--", *COMMAND)
    assert done.returncode == 0, done.stderr
    get, create, apply = stubs.calls
    assert get == ["kubectl", "get", "secret", "corpus-ray"]
    assert create[:5] == ["kubectl", "create", "secret", "generic", "corpus-ray"]
    assert re.fullmatch("--from-literal=token=[0-9a-f]{64}", create[5])
    assert apply == ["kubectl", "apply", "--filename=-"]
    *_, given = yaml.safe_load_all((stubs.directory / "manifest").read_text())
    assert given == manifest(stubs)
    (stubs.directory / "calls").unlink()
    (stubs.directory / "secret").touch()
    assert stubs.run("ray.sh", "apply", "corpus", "--image=img:1", "--", *COMMAND).returncode == 0
    assert [call[1] for call in stubs.calls] == ["get", "apply"]  # the token stays
    (stubs.directory / "calls").unlink()
    apply = ["apply", "corpus", "--image=img:1", "--namespace=team"]
    dry = stubs.run("ray.sh", *apply, "--dry-run", "--", *COMMAND)
    (stubs.directory / "secret").unlink()
    assert stubs.run("ray.sh", *apply, "--", *COMMAND).returncode == 0
    _, create, _ = stubs.calls
    create[-1] = "--from-literal=token=TOKEN"
    assert words(dry.stdout.partition("\n")[0]) == create
    (stubs.directory / "secret").touch()
    (stubs.directory / "calls").unlink()
    for verb in ("logs", "status", "delete"):
        dry = stubs.run("ray.sh", verb, "corpus", "--namespace=team", "--dry-run")
        assert stubs.calls == []
        assert stubs.run("ray.sh", verb, "corpus", "--namespace=team").returncode == 0
        assert [words(line) for line in dry.stdout.splitlines()] == stubs.calls
        (stubs.directory / "calls").unlink()


def test_on_the_hosts_of_a_pod(stubs):
    flags = ["--project=p", "--zone=z"]
    done = stubs.run("ray.sh", "tpu", "pod", *flags, "--", *COMMAND)
    assert done.returncode == 0, done.stderr
    describe, everywhere, first = stubs.calls
    assert describe[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "describe", "pod"]
    assert "--worker=all" in everywhere
    bash, flag, line = words(everywhere[-1].removeprefix("--command="))
    assert (bash, flag) == ("bash", "-c")
    assert re.search("echo [0-9a-f]{64} >~/.ray/auth_token && export RAY_AUTH_MODE=token", line)
    assert "hostname -I | grep -qwF 10.1.2.3" in line
    assert "ray start --address=10.1.2.3:6379" in line
    assert "--worker=0" in first
    assert words(first[-1].removeprefix("--command=")) == [
        "env", "RAY_AUTH_MODE=token", "bert_jax/launch/on_host.sh", "start", "--", *RUN,
    ]  # fmt: skip
    dry = stubs.run("ray.sh", "tpu", "pod", *flags, "--dry-run", "--", *COMMAND)
    assert dry.returncode == 0, dry.stderr
    assert len(stubs.calls) == 3
    assert "HEAD:6379" in dry.stdout


MACHINES = {"n2-standard-8": (8, 32), "n2-standard-16": (16, 64)}
"""Cores and GB of the machine types of the page."""
SYSTEM_CORES, SYSTEM_GIB, GIB = 1.0, 6.0, 1e9 / 2**30
"""What Kubernetes and its own pods keep of a node, generously."""


def test_the_pods_of_the_page_fit_its_nodes(stubs):
    """No cluster was there: the requests of the pods are added up against the sizes of nodes."""
    page = Path(__file__).parents[2] / "docs" / "recipes" / "cluster.md"
    text = page.read_text().replace("\\\n", " ")
    pools = [
        shlex.split(line)
        for line in text.splitlines()
        if line.startswith("gcloud container") and "--machine-type" in line
    ]
    (start,) = (line for line in text.splitlines() if line.startswith("launch/ray.sh apply"))
    done = stubs.run("ray.sh", "yaml", *shlex.split(start)[2:])
    assert done.returncode == 0, done.stderr
    *_, jobset = yaml.safe_load_all(done.stdout)
    free = {
        "--spot" in pool: (
            int(next(word for word in pool if word.startswith("--num-nodes")).partition("=")[2]),
            *MACHINES[next(w for w in pool if w.startswith("--machine-type")).partition("=")[2]],
        )
        for pool in pools
    }
    assert set(free) == {True, False}
    for job in jobset["spec"]["replicatedJobs"]:
        nodes, cores, gigabytes = free["nodeSelector" in pod_of(job)]
        requests = pod_of(job)["containers"][0]["resources"]["requests"]
        memory = int(requests["memory"].removesuffix("Gi"))
        assert int(requests["cpu"]) <= cores - SYSTEM_CORES
        assert memory <= gigabytes * GIB - SYSTEM_GIB
        assert job["template"]["spec"]["parallelism"] <= nodes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["apply", "Corpus", "--image=i", "--", *COMMAND], "the name is 'Corpus'"),
        (["apply", "corpus", "--", *COMMAND], "give --image"),
        (["apply", "corpus", "--image=i"], "apply needs a command after --: bert-jax corpus"),
        (["tpu", "corpus", "--", "bert-jax", "pretrain"], "tpu needs a command after --"),
        (["yaml", "corpus", "--image=i", "--cpus=0", "--", *COMMAND], "--cpus is 0"),
        (["yaml", "corpus", "--image=i", "--memory=2", "--", *COMMAND], "--memory is 2"),
        (["logs", "corpus", "--", "x"], "logs takes no command"),
    ],
)
def test_wrong_arguments(stubs, arguments, message):
    done = stubs.run("ray.sh", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert stubs.calls == []
