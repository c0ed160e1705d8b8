"""Saves that fail, and when old checkpoints go."""

import gc
import logging
import re
import threading

import pytest
from checkpoint_states import CONFIG, abstract, assert_same, make_state, unmark, write
from etils import epath
from gcs_emulator import make_bucket, running_emulator

from bert_jax.distributed.checkpoint import manager, storage
from bert_jax.distributed.checkpoint.manager import Checkpoints, SaveFailedError
from bert_jax.distributed.checkpoint.record import RecordFaultError, read_record
from bert_jax.distributed.checkpoint.retention import Retention
from bert_jax.distributed.checkpoint.storage import saved_steps
from bert_jax.distributed.checkpoint.verify import verified_steps, verify_checkpoint
from bert_jax.files.remote import open_workdir

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Run:
    """Checkpoints whose reports are kept."""

    def __init__(self, workdir, **options):
        self.directory = workdir / "checkpoints"
        self.reports: list[tuple[str, int, str]] = []
        self.checkpoints = Checkpoints(
            self.directory, report=lambda *report: self.reports.append(report), **options
        )

    def save(self, step: int) -> bool:
        self.checkpoints.save(step, make_state(step), config=CONFIG, extra={})
        return self.checkpoints.wait()


def failing(message: str):
    class Failing:
        def result(self) -> None:
            failure = ValueError("RESOURCE_EXHAUSTED: somewhere")
            failure.__cause__ = OSError(message)
            failure.__cause__.__context__ = failure  # a ring, as Orbax makes them
            raise failure

    return lambda *_: Failing()


def test_a_failed_save_is_told_and_the_next_one_tried(tmp_path, monkeypatch, caplog):
    run = Run(tmp_path)
    assert run.save(1)
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(manager.storage, "write_async", failing("No space left on device"))
        assert not run.save(2)
    ((kind, step, message),) = run.reports
    assert (kind, step) == ("save_failed", 2)
    assert "could not be written" in message
    assert "the disk is full. The newest checkpoint is step 1." in message
    assert message in caplog.text
    assert run.save(3)
    run.checkpoints.close()
    assert saved_steps(run.directory) == [1, 3]
    assert verify_checkpoint(run.directory / "1").intact


def test_failures_in_a_row_end_the_run(tmp_path, monkeypatch):
    run = Run(tmp_path, max_failed_saves=3)
    assert run.save(1)
    with monkeypatch.context() as patch:
        patch.setattr(manager.storage, "write_async", failing("Read-only file system"))
        assert not run.save(2)
        assert not run.save(3)
    assert run.save(4)  # the row is broken
    monkeypatch.setattr(manager.storage, "write_async", failing("Read-only file system"))
    assert not run.save(5)
    assert not run.save(6)
    with pytest.raises(SaveFailedError, match=r"3 saves in a row .* step 7 .* read-only") as error:
        run.save(7)
    assert error.value.exit_code == 3
    run.checkpoints.close()
    assert saved_steps(run.directory) == [1, 4]


@pytest.mark.parametrize("before", [0, 2])
def test_the_last_save_is_tried_until_it_works(tmp_path, monkeypatch, before):
    """Earlier failures do not use up its tries."""
    run = Run(tmp_path, max_failed_saves=3)
    write_async, calls = manager.storage.write_async, []

    def write(*arguments):
        calls.append(arguments)
        wanted = write_async if len(calls) == before + 3 else failing("Input/output error")
        return wanted(*arguments)

    monkeypatch.setattr(manager.storage, "write_async", write)
    for step in range(before):
        assert not run.save(step)
    run.checkpoints.save_last(9, make_state(9), read_back=True, config=CONFIG, extra={})
    run.checkpoints.close()
    assert len(calls) == before + 3
    assert verified_steps(run.directory) == [9]


def test_the_last_save_is_tried_after_any_number_of_failures(tmp_path, monkeypatch):
    run = Run(tmp_path, max_failed_saves=1)
    with monkeypatch.context() as patch:
        patch.setattr(manager.storage, "write_async", failing("No space left on device"))
        run.checkpoints.save(1, make_state(1), config=CONFIG, extra={})
    run.checkpoints.save_last(2, make_state(2), read_back=False, config=CONFIG, extra={})
    run.checkpoints.close()
    assert [report[:2] for report in run.reports] == [("save_failed", 1)]
    assert saved_steps(run.directory) == [2]


def test_a_directory_that_is_gone_and_comes_back(tmp_path):
    run = Run(tmp_path)
    assert run.save(1)
    away = tmp_path / "away"
    run.directory.rename(away)
    run.directory.write_text("a file is in the way")
    assert not run.save(2)
    run.directory.unlink()
    away.rename(run.directory)
    assert run.save(3)
    run.checkpoints.close()
    assert saved_steps(run.directory) == [1, 3]
    assert [p.name for p in run.directory.glob("*tmp*")] == []


def test_a_directory_that_is_gone_for_a_moment_is_no_damage(tmp_path, monkeypatch):
    run = Run(tmp_path)
    verify, seen = manager.verify_checkpoint, []

    def gone_and_back(path, **options):
        if not seen:
            run.directory.rename(tmp_path / "away")
        verdict = verify(path, **options)
        seen.append(verdict.intact)
        if len(seen) == 1:
            (tmp_path / "away").rename(run.directory)
        return verdict

    monkeypatch.setattr(manager, "verify_checkpoint", gone_and_back)
    run.checkpoints.save_last(1, make_state(1), read_back=True, config=CONFIG, extra={})
    run.checkpoints.close()
    assert seen == [False, True]
    assert verified_steps(run.directory) == [1]
    assert run.reports == []


def test_a_directory_that_comes_back_after_its_verification_is_no_damage(tmp_path, monkeypatch):
    run = Run(tmp_path)
    verify, set_aside = manager.verify_checkpoint, manager.storage.set_aside
    away = tmp_path / "away"

    def gone(path, **options):
        if run.directory.exists():
            run.directory.rename(away)
        return verify(path, **options)

    def back(*arguments):
        away.rename(run.directory)
        return set_aside(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(manager, "verify_checkpoint", gone)
        patch.setattr(manager.storage, "set_aside", back)
        run.checkpoints.save_last(1, make_state(1), read_back=True, config=CONFIG, extra={})
    assert not (tmp_path / "damaged").exists()
    away.rename(run.directory)
    assert run.save(2)
    run.checkpoints.close()
    assert saved_steps(run.directory) == [1, 2]
    assert run.reports == []


def test_a_directory_that_is_gone_is_not_made_again(tmp_path):
    run = Run(tmp_path)
    assert run.save(1)
    away = tmp_path / "away"
    run.directory.rename(away)
    assert not run.save(2)
    assert not run.directory.exists()
    assert "the directory is gone. No checkpoint exists yet." in run.reports[0][2]
    away.rename(run.directory)
    assert run.save(3)
    run.checkpoints.close()
    assert saved_steps(run.directory) == [1, 3]


def test_an_error_before_orbax_is_a_failed_save_too(tmp_path, monkeypatch):
    run = Run(tmp_path)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(manager.storage, "write_async", refuse)
    assert not run.save(1)
    assert "the directory is not writable. No checkpoint exists yet." in run.reports[0][2]
    run.checkpoints.close()


@pytest.mark.parametrize("error", [ConnectionError("away"), PermissionError(13, "denied")])
def test_steps_that_cannot_be_listed_are_a_failed_save(tmp_path, monkeypatch, error):
    run = Run(tmp_path)
    assert run.save(1)

    def refuse(path):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(type(run.checkpoints._directory), "iterdir", refuse)
        patch.setattr(type(run.checkpoints._directory), "is_dir", lambda _: False)  # in a bucket
        with pytest.raises(type(error)):
            saved_steps(run.directory)
        assert not run.save(2)
    assert [report[:2] for report in run.reports] == [("save_failed", 2)]
    assert run.save(3)
    run.checkpoints.close()
    assert saved_steps(run.directory) == [1, 3]


def flip(path, at=0.5):
    content = bytearray(path.read_bytes())
    content[int(len(content) * at)] ^= 1
    path.write_bytes(bytes(content))


def test_what_does_not_read_back_is_set_aside_and_replaces_nothing(tmp_path, monkeypatch):
    run = Run(tmp_path, retention=Retention(keep=1))
    run.checkpoints.save_last(1, make_state(1), read_back=True, config=CONFIG, extra={})
    verify, seen = manager.verify_checkpoint, []

    def bad_disk(path, **options):
        seen.append(path.name)
        if path.name == "2" and seen.count("2") == 1:
            flip(max((path / "params" / "d").iterdir(), key=lambda p: p.stat().length))
        return verify(path, **options)

    monkeypatch.setattr(manager, "verify_checkpoint", bad_disk)
    run.checkpoints.save_last(2, make_state(2), read_back=True, config=CONFIG, extra={})
    run.checkpoints.close()
    assert seen == ["2", "2", "2"]  # read twice, and written again
    ((kind, step, message),) = run.reports
    assert (kind, step) == ("damaged", 2)
    assert re.fullmatch(r"read back, array params/.*; set aside", message)
    assert verified_steps(run.directory) == [2]
    assert [p.name for p in (tmp_path / "damaged").iterdir()] == ["2.0"]


def test_a_disk_that_gives_back_nothing_as_written_ends_the_run(tmp_path, monkeypatch):
    run = Run(tmp_path, max_failed_saves=2)
    verify, reads = manager.verify_checkpoint, []

    def bad_disk(path, **options):
        if len(reads) % 2 == 0:  # each save is read twice
            flip(max((path / "params" / "d").iterdir(), key=lambda p: p.stat().length))
        reads.append(path)
        return verify(path, **options)

    monkeypatch.setattr(manager, "verify_checkpoint", bad_disk)
    with pytest.raises(SaveFailedError, match=r"^2 saves in a row were damaged .* Check the disk"):
        run.checkpoints.save_last(1, make_state(1), read_back=True, config=CONFIG, extra={})
    assert len(list((tmp_path / "damaged").iterdir())) == 2


def test_a_work_directory_with_dots_is_read_back(tmp_path):
    (tmp_path / "there").mkdir()
    place = open_workdir(tmp_path / "there" / ".." / "run")
    place.local.mkdir()
    checkpoints = Checkpoints(place.checkpoints, max_failed_saves=1)
    checkpoints.save_last(1, make_state(1), read_back=True, config=CONFIG, extra={})
    checkpoints.close()
    assert saved_steps(tmp_path / "run" / "checkpoints") == [1]


def test_nothing_is_deleted_before_its_successor_was_read_back(tmp_path, monkeypatch):
    go_on = threading.Event()
    verify = manager.verify_checkpoint

    def slow(path, **options):
        assert go_on.wait(60)
        return verify(path, **options)

    run = Run(tmp_path, retention=Retention(keep=1))
    run.checkpoints.save_last(1, make_state(1), read_back=True, config=CONFIG, extra={})
    monkeypatch.setattr(manager, "verify_checkpoint", slow)
    for step in (2, 3, 4):
        assert run.save(step)  # a save does not wait for the reading
    assert saved_steps(run.directory) == [1, 2, 3, 4]
    go_on.set()
    run.checkpoints.save_last(5, make_state(5), read_back=True, config=CONFIG, extra={})
    run.checkpoints.close()
    assert saved_steps(run.directory) == [5]


def test_a_run_continued_reads_back_what_it_started_from(tmp_path):
    states = write(tmp_path, [1, 2])
    unmark(tmp_path)
    run = Run(tmp_path, retention=Retention(keep=1))
    restored = run.checkpoints.restore(abstract(states[2]))
    assert_same(restored.state, states[2])
    run.checkpoints._reader.wait()
    assert saved_steps(run.directory) == verified_steps(run.directory) == [2]
    run.checkpoints.close()


def test_interrupted_deletion_and_marks_are_cleaned_up(tmp_path):
    write(tmp_path, [1, 2])
    directory = tmp_path / "checkpoints"
    (directory / "1").rename(directory / "1.deleted")
    (directory / "2.verified.json.deleted").write_text("{")
    Checkpoints(directory).close()
    assert sorted(p.name for p in directory.iterdir()) == ["2"]


def kept_of(workdir, *losses, lengths=(None,) * 4):
    """Steps that stay of saves with these losses, on rows of these lengths."""
    run = Run(workdir, retention=Retention(keep=1, keep_best=1, best_metric="eval/mlm_loss"))
    for step, (loss, length) in enumerate(zip(losses, lengths, strict=True), 1):
        run.checkpoints.save_last(
            step, make_state(step), read_back=True, config=CONFIG,
            extra={} if length is None else {"judged_on": [length, 0.15]},
            metrics={"eval/mlm_loss": loss},
        )  # fmt: skip
    run.checkpoints.close()
    return saved_steps(run.directory)


def test_the_best_are_kept_by_the_metrics_of_their_records(tmp_path):
    assert kept_of(tmp_path, 3.0, 2.0, 2.5, 4.0) == [2, 4]


@pytest.mark.parametrize(("first", "best"), [(128, 3), (None, 1)])  # older records have none
def test_the_best_are_kept_among_those_that_were_judged_on_the_same_rows(tmp_path, first, best):
    lengths = first, 512, 512, 512
    assert kept_of(tmp_path, 1.0, 3.0, 2.0, 2.5, lengths=lengths) == [best, 4]


def test_a_record_that_could_not_be_read_is_read_again(tmp_path, monkeypatch):
    reads = []

    def away_once(path):
        reads.append(path.name)
        if path.name == "2" and reads.count("2") == 1:
            raise RecordFaultError("its record cannot be read: the bucket is away")
        return read_record(path)

    monkeypatch.setattr(manager, "read_record", away_once)
    assert kept_of(tmp_path, 3.0, 2.0, 2.5, 4.0) == [2, 4]


def test_leftovers_that_cannot_be_removed_from_a_bucket_are_no_checkpoint(tmp_path, monkeypatch):
    with running_emulator(tmp_path / "log"):
        make_bucket("runs")
        directory = epath.Path("gs://runs/work/checkpoints")
        assert saved_steps(directory) == saved_steps(epath.Path("gs://none/work")) == []
        checkpoints = Checkpoints(directory, max_failed_saves=1)
        (directory / "5" / "params").mkdir(parents=True)
        (directory / "5" / "params" / "a").write_text("part")
        monkeypatch.setattr(storage, "remove_unfinished", lambda directory: None)
        with pytest.raises(SaveFailedError, match="already exists"):
            checkpoints.save_last(5, make_state(5), read_back=True, config={}, extra={})
        assert saved_steps(directory) == []
        checkpoints.close()
    gc.collect()  # coroutines that Orbax has not awaited
