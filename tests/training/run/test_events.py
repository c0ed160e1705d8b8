import json
import threading
from dataclasses import replace
from types import SimpleNamespace

from full_disk import files_of_at_most

from bert_jax.files.remote import open_workdir
from bert_jax.model.attention import attend
from bert_jax.training.run.events import Events, read_events
from bert_jax.training.run.session import Session


def test_an_event_is_a_line(tmp_path):
    path = tmp_path / "events.jsonl"
    Events(path, 3).write("save_failed", "disk\nfull", step=7, tries=2)
    (event,) = read_events(path)
    assert event.pop("time").endswith("+00:00")
    assert event == {
        "process": 3, "kind": "save_failed", "step": 7, "message": "disk\nfull", "tries": 2,
    }  # fmt: skip
    assert path.read_text().count("\n") == 1


def test_lines_that_are_not_whole_are_left_out(tmp_path):
    path = tmp_path / "events.jsonl"
    assert read_events(path) == []
    Events(path).write("start", "one")
    with path.open("ab") as file:
        file.write(b"\n".join([
            b"\xff\x00", b"[]", b"null", b'{"kind": 3, "time": "x", "message": "y"}',
            b"[" * 100_000, b'{"kind": "start", "ti',
        ]))  # fmt: skip
    assert [event["message"] for event in read_events(path)] == ["one"]
    Events(path).write("start", "two")
    assert [event["message"] for event in read_events(path)] == ["one", "two"]


class Unprintable:
    def __init__(self):
        self.me = [self]


def test_any_value_is_taken(tmp_path):
    path = tmp_path / "events.jsonl"
    ring: list = []
    ring.append(ring)
    Events(path).write(
        "error", "x" * 10_000, loss=float("nan"), ring=ring, odd=Unprintable(), key={(1, 2): 3}
    )
    (event,) = read_events(path)
    json.loads(path.read_text(), parse_constant=lambda name: 1 / 0)
    assert event["loss"] == "nan"
    assert event["ring"] == "[[...]]"
    assert event["key"] == "{(1, 2): 3}"
    assert len(event["message"]) == 4000


def test_processes_share_the_file(tmp_path):
    path = tmp_path / "events.jsonl"

    def write(process):
        events = Events(path, process)
        for step in range(200):
            events.write("damaged", "m" * 100, step=step)

    threads = [threading.Thread(target=write, args=(process,)) for process in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = read_events(path)
    for process in range(4):
        steps = [event["step"] for event in events if event["process"] == process]
        assert steps == list(range(200))


def test_a_full_disk_delays_events_and_ends_nothing(tmp_path, caplog):
    path = tmp_path / "events.jsonl"
    events = Events(path)
    events.write("start", "begun")
    room = path.stat().st_size + 20
    with files_of_at_most(room):
        events.write("save_failed", "the disk is full", step=1)
        events.write("save_failed", "the disk is still full", step=2)
    assert path.stat().st_size == room  # not cut off: others may have written behind it
    assert len(read_events(path)) == 1
    events.write("finished", "done", step=3)
    assert [event["kind"] for event in read_events(path)] == [
        "start", "save_failed", "save_failed", "finished",
    ]  # fmt: skip


def test_a_run_records_what_the_choice_of_attention_costs(tmp_path, caplog):
    with Session(open_workdir(str(tmp_path)), stall_seconds=0.0).open(lambda: None):
        attend.log.warning("scores in float32")
        attend.log.info("nothing to record")
    attend.log.warning("after the run")
    (event,) = read_events(tmp_path / "events.jsonl")
    assert (event["kind"], event["message"]) == ("attention", "scores in float32")
    assert [record.getMessage() for record in caplog.records] == [
        "scores in float32", "after the run",
    ]  # fmt: skip


def test_a_save_first_flushes_the_metrics_and_confirms_the_lease(tmp_path):
    done = []
    work = replace(open_workdir(str(tmp_path)), confirm=lambda: done.append("lease"))
    session = Session(work, stall_seconds=0.0)
    session.out = SimpleNamespace(sync=lambda: done.append("metrics"))
    with session.saving("a save"):
        assert done == ["metrics", "lease"]
