"""launch/ray.sh against kubectl and gcloud that record their calls."""

import pytest
from stub_commands import Stubs, words

yaml = pytest.importorskip("yaml", reason="PyYAML reads the manifests")

COMMAND = ["bert-jax", "corpus", "--input=gs://raw/my *.jsonl", "--out=gs://c/$(HOME)", "a\nb"]
RUN = [*COMMAND, "--engine=ray:auto"]


@pytest.fixture
def stubs(tmp_path):
    stubs = Stubs(tmp_path)
    stubs.add("kubectl", 'if [[ $1 == apply ]]; then cat >"$STUBS/manifest"; fi')
    stubs.add("gcloud", "if [[ $* == *describe* ]]; then echo 10.1.2.3; fi")
    return stubs


def manifest(stubs, *flags):
    done = stubs.run("ray.sh", "yaml", "corpus", "--image=img:1", *flags, "--", *COMMAND)
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)


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
    # Kubernetes makes $$( of a command $( again.
    assert [word.replace("$$(", "$(") for word in container["command"][4:]] == RUN
    assert container["command"][2].endswith('--include-dashboard=false && exec "$@"')
    (container,) = pod_of(workers)["containers"]
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
    assert stubs.calls == [["kubectl", "apply", "--filename=-"]]
    given = yaml.safe_load((stubs.directory / "manifest").read_text())
    assert given == manifest(stubs)
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
    assert "hostname -I | grep -qwF 10.1.2.3" in line
    assert "ray start --address=10.1.2.3:6379" in line
    assert "--worker=0" in first
    assert words(first[-1].removeprefix("--command=")) == [
        "bert_jax/launch/on_host.sh", "start", "--", *RUN,
    ]  # fmt: skip
    dry = stubs.run("ray.sh", "tpu", "pod", *flags, "--dry-run", "--", *COMMAND)
    assert dry.returncode == 0, dry.stderr
    assert len(stubs.calls) == 3
    assert "HEAD:6379" in dry.stdout


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
