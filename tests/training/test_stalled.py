"""Real processes, of which one stops, dies or is asked to stop: no hang, and the same result."""

import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import fingerprint, small_config, write_corpus

from bert_jax.config.mapping import to_dict
from bert_jax.training.run.telemetry import read_metrics

LOCAL = Path(__file__).parents[2] / "launch" / "local.py"
TIMEOUT = 1200.0
STALL_SECONDS = 40  # a busy machine compiles and saves for longer than 15

SCRIPT = """
# `bert-jax`, to which things happen, one in each start of the pod: a place, the how-manieth time
# that it is reached (or seconds), a signal, and the process that gets it.
import json, os, signal, sys, threading, time
from pathlib import Path
from types import SimpleNamespace
from jax._src import compiler
from bert_jax.cli import main as cli
from bert_jax.data import pipeline
from bert_jax.training.pretrain import saves

# JAX keeps what process 0 has compiled, and on CPUs no other can use it. So each keeps its own.
compiler.distributed = SimpleNamespace(global_state=SimpleNamespace(process_id=0, client=None))

marks = Path(os.environ["MARKS"])
number = len(list(marks.iterdir()))
place, count, what, process = (json.loads(os.environ["HAPPENS"]) + [[None, 0, 0, 0]] * 99)[number]

def happen():
    (marks / str(number)).touch()
    os.kill(os.getpid(), what)

def reach(name):
    global count, place
    if name == "batch" and what == signal.SIGTERM:
        time.sleep(0.5)  # a stop that all agree upon takes a moment
    if name == place and process == int(os.environ["JAX_PROCESS_ID"]):
        count -= 1
        if count == 0:
            happen()
    if name == "batch" and place == "seconds" and process == int(os.environ["JAX_PROCESS_ID"]):
        place = None
        threading.Timer(count, happen).start()

def passing(owner, method, name):
    original = getattr(owner, method)
    def wrapper(*args, **kwargs):
        reach(name)
        return original(*args, **kwargs)
    setattr(owner, method, wrapper)

passing(pipeline.TrainBatches, "__next__", "batch")
passing(pipeline.EvalBatches, "_filled", "evaluation")
passing(saves.Checkpoints, "save", "save")
sys.exit(cli.main())
"""


class Pods:
    """Runs of one configuration in 2 processes with 2 devices each."""

    def __init__(self, here):
        self.here = here
        self.corpus = write_corpus(here / "corpus")
        self.config = small_config(
            training__num_steps=12,
            training__phases=[{"length": 32, "batch_size": 16}],
            training__accumulation=1,
            training__eval_every_steps=6,
            training__log_every_steps=1,
            checkpoint__save_every_steps=5,
            data={"corpus": str(here / "corpus")},
        )
        given = json.dumps(to_dict(self.config))
        (here / "config.py").write_text(
            f"import json\ndef get_config():\n    return json.loads({given!r})\n"
        )
        (here / "script.py").write_text(SCRIPT)

    def run(self, name, *happens, stall_seconds=STALL_SECONDS, steps=12, grace=1.0, spare=0):
        """Trains in here/name, with as many restarts as things happen, and `spare` ones.

        Returns the exit code and the messages, with the logs of a run that failed.
        """
        marks = self.here / f"{name}.marks"
        marks.mkdir(exist_ok=True)
        environ = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(self.here / "compiled"),  # kills spoil entries
            "MARKS": str(marks),
            "HAPPENS": json.dumps(happens),
        }
        started = subprocess.Popen(
            [sys.executable, LOCAL, f"--logs={self.here / f'{name}.logs'}", f"--grace={grace}",
             f"--restarts={len(happens) + spare}", "--", sys.executable, self.here / "script.py",
             "pretrain", f"--config={self.here / 'config.py'}", f"--workdir={self.here / name}",
             "--config.mesh.data=1", "--config.mesh.fsdp=4",
             f"--config.training.num_steps={steps}",
             f"--config.training.stall_seconds={stall_seconds}"],
            env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            _, messages = started.communicate(timeout=TIMEOUT)
        finally:
            if started.poll() is None:  # two signals end the processes too
                started.terminate()
                started.terminate()
        if started.returncode:
            messages += "\n".join(self.log(name, process)[-8000:] for process in (0, 1))
        return started.returncode, messages

    def log(self, name, process):
        """Of one process, over all tries."""
        return (self.here / f"{name}.logs" / f"process_{process}.log").read_text()

    def steps(self, name):
        return [row["step"] for row in read_metrics(self.here / name / "metrics.jsonl")]

    def fingerprint(self, name, steps=12):
        training = dataclasses.replace(self.config.training, num_steps=steps)
        config = dataclasses.replace(self.config, training=training)
        return fingerprint(self.here / name, config, self.corpus)


@pytest.fixture(scope="module")
def pods(tmp_path_factory):
    """With the run `calm`, to which nothing happened."""
    pods = Pods(tmp_path_factory.mktemp("stalled"))
    code, messages = pods.run("calm", stall_seconds=0)  # compiling takes what it takes
    assert code == 0, messages
    return pods


def tries(messages):
    """The exit codes after which the pod was started again."""
    return [
        int(code)
        for code in re.findall(r"(?m)^\[local.py\] try \d+, after exit code (\d+)$", messages)
    ]


@pytest.mark.slow
def test_a_peer_that_stops_and_one_that_dies(pods):
    stop, kill = ("batch", 8, signal.SIGSTOP, 1), ("batch", 3, signal.SIGKILL, 1)
    code, messages = pods.run("lost", stop, kill)
    assert code == 0, messages
    assert tries(messages) == [6, 137], messages + pods.log("lost", 0) + pods.log("lost", 1)
    assert "process 0 ended with exit code 6" in messages

    first = pods.log("lost", 0).split("[local.py] try 2")[0]
    assert f"process 0 stands still: nothing was completed for {STALL_SECONDS} s" in first
    assert re.search(r"training/loop\.py\", line \d+ in _train_stage", first)
    assert (pods.here / "lost" / "stacks.0.txt").read_text() in first
    assert not (pods.here / "lost" / "stacks.1.txt").exists()
    events = (pods.here / "lost" / "events.jsonl").read_text().splitlines()
    (stalled,) = [event for event in map(json.loads, events) if event["kind"] == "stalled"]
    assert (stalled["process"], stalled["seconds"]) == (0, STALL_SECONDS)

    assert pods.fingerprint("lost") == pods.fingerprint("calm")


@pytest.mark.slow
def test_one_process_that_is_asked_to_stop_stops_all(pods):
    code, messages = pods.run("asked", ("batch", 4, signal.SIGTERM, 1))
    assert code == 0, messages  # of both
    assert tries(messages) == []
    *_, stopped = pods.steps("asked")
    assert stopped < 12
    assert f"SIGTERM: stopped after step {stopped} of 12, saved" in pods.log("asked", 0)

    # A start on a busy machine has ended with exit code 1 twice, and its log was not kept.
    code, messages = pods.run("asked", spare=1)
    assert code == 0, messages
    assert f"continues from step {stopped}\n" in pods.log("asked", 0)
    assert pods.fingerprint("asked") == pods.fingerprint("calm")


@pytest.mark.skipif(
    os.environ.get("BERT_JAX_CHAOS") != "1", reason="takes minutes; BERT_JAX_CHAOS=1 runs it"
)
def test_whatever_happens_wherever_to_whichever(pods):
    code, messages = pods.run("long", stall_seconds=0, steps=60)
    assert code == 0, messages
    places = [("batch", 3), ("evaluation", 2), ("save", 1)]
    ends = [signal.SIGSTOP, signal.SIGKILL]
    happens = [(*place, end, process) for place in places for end in ends for process in (0, 1)]
    chance = random.Random(0)
    chance.shuffle(happens)
    happens += [
        ("seconds", chance.uniform(0, 2), chance.choice(ends), chance.choice((0, 1)))
        for _ in range(4)  # as many as come before the end
    ]
    code, messages = pods.run("chaos", *happens, steps=60)
    assert code == 0, messages
    done = len(list((pods.here / "chaos.marks").iterdir()))
    assert len(tries(messages)) == done >= len(places) * 4
    assert set(tries(messages)) <= {6, 134, 137}  # 134: one stopped as all were leaving
    assert pods.fingerprint("chaos", 60) == pods.fingerprint("long", 60)
