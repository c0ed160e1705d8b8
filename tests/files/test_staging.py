"""Directories that appear complete or not at all, when a signal comes while one is made."""

import errno
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest

from bert_jax.errors import UserError
from bert_jax.files import staging
from bert_jax.files.staging import StagedDirectory, signals_wait


def end(number, frame):
    raise SystemExit(128 + number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("call", ["mkdir", "open"])
def test_a_signal_between_two_calls_leaves_no_directory(tmp_path, monkeypatch, number, call):
    owner = Path if call == "mkdir" else os
    before, came = getattr(owner, call), []

    def interrupted(*arguments, **options):
        made = before(*arguments, **options)
        if "out.tmp-" in f"{arguments[0]}" and not came:
            came.append(number)
            signal.raise_signal(number)
        return made

    handlers = {each: signal.signal(each, end) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        monkeypatch.setattr(owner, call, interrupted)
        with pytest.raises(SystemExit, match=f"{128 + number}"):
            StagedDirectory(tmp_path / "out", lambda _: True)
        assert came
        assert not list(tmp_path.iterdir())
        assert signal.getsignal(number) is end
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
    with StagedDirectory(tmp_path / "out", lambda _: True) as staged:
        staged.commit()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def fill(path: Path, text: str, **options) -> None:
    """Make a directory of one file, which may replace another of that kind."""
    with StagedDirectory(path, lambda each: (each / "kind").is_file(), **options) as staged:
        (staged.path / "kind").write_text(text)
        staged.commit()


def test_a_directory_is_kept_unless_asked(tmp_path):
    (tmp_path / "out").mkdir()  # an empty one is filled
    fill(tmp_path / "out", "first")
    with pytest.raises(UserError, match="already exists and is complete"):
        fill(tmp_path / "out", "second")
    with (
        pytest.raises(RuntimeError),
        StagedDirectory(tmp_path / "out", lambda _: True, overwrite=True),
    ):
        raise RuntimeError("a failed rebuild")
    assert (tmp_path / "out" / "kind").read_text() == "first"
    fill(tmp_path / "out", "second", overwrite=True)
    assert (tmp_path / "out" / "kind").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_current_directory_is_never_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match=r"is the current directory or .* directory in it that does"
    ):
        StagedDirectory(".", lambda _: True, overwrite=True)
    assert list(tmp_path.parent.glob(f"{tmp_path.name}*")) == [tmp_path]


@pytest.mark.parametrize("kind", [str, Path])
def test_a_target_in_a_bucket_is_refused(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^gs:/+bucket/out is in a bucket; name a local directory"):
        fill(kind("gs://bucket/out"), "first")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["gs://bucket/report.md", "s3://bucket/a/report.md"])
def test_a_file_in_a_bucket_is_refused(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^(gs|s3):/bucket/.* is in a bucket; name a local file"):
        staging.replace_file(Path(path), b"text")
    assert not list(tmp_path.iterdir())


def test_other_directories_are_never_replaced(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="holds files of another kind"):
        fill(tmp_path / "out", "first", overwrite=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file"):
        fill(tmp_path / "file", "first", overwrite=True)


def test_interrupted_replacement_is_undone(tmp_path):
    fill(tmp_path / "out", "first")
    os.rename(tmp_path / "out", tmp_path / "out.replaced-by-1234")
    with pytest.raises(UserError, match="already exists and is complete"):
        fill(tmp_path / "out", "second")
    assert (tmp_path / "out" / "kind").read_text() == "first"
    shutil.copytree(tmp_path / "out", tmp_path / "out.replaced-by-1234")
    fill(tmp_path / "out", "second", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_directory_that_the_user_has_renamed_is_kept(tmp_path):
    fill(tmp_path / "out.old-1234", "mine")
    fill(tmp_path / "out", "first")
    fill(tmp_path / "out", "second", overwrite=True)
    for name, text in (("out", "second"), ("out.old-1234", "mine")):
        assert (tmp_path / name / "kind").read_text() == text


def test_a_link_leads_to_the_directory_that_is_filled(tmp_path):
    place, link = tmp_path / "disk" / "place", tmp_path / "out"
    place.mkdir(parents=True)
    link.symlink_to(place)
    for text in ("first", "second"):
        fill(link, text, overwrite=text == "second")
        assert link.is_symlink()
        assert (place / "kind").read_text() == text
        assert [path.name for path in place.parent.iterdir()] == ["place"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "out"]


def test_a_mount_point_is_refused_before_the_work(tmp_path, monkeypatch):
    """No directory can be renamed to it."""
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "out")
    with pytest.raises(UserError, match=r"out is the current directory or a mount point: "):
        StagedDirectory(tmp_path / "out", lambda _: True, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_another_user_left_is_kept(tmp_path, monkeypatch):
    """Its lock cannot be opened: the user's process may live."""
    left = tmp_path / "out.tmp-1"
    left.mkdir()
    (left / staging._LOCK).touch()
    before = os.open

    def refused(path, *arguments, **options):
        if Path(path).parent == left:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return before(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refused)
    fill(tmp_path / "out", "first")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", left.name]


def test_signals_do_not_wait_in_other_threads(tmp_path):
    made = []

    def make():
        with signals_wait(), StagedDirectory(tmp_path / "out", lambda _: True) as staged:
            made.append(staged.path)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert made
    assert signal.getsignal(signal.SIGINT) is before


def test_files_that_a_thread_writes_at_the_end_go_too(tmp_path, monkeypatch):
    """The save of an array may end after the save of another array has failed."""
    before, calls = staging.shutil.rmtree, []

    def written_at_the_end(path, **options):
        before(path, **options)
        if not calls:
            path.mkdir()
            (path / "late").write_text("array")
        calls.append(path)

    monkeypatch.setattr(staging.shutil, "rmtree", written_at_the_end)
    with StagedDirectory(tmp_path / "out", lambda _: True):
        pass
    assert len(calls) == 2
    assert not list(tmp_path.iterdir())


def test_a_pipe_or_directory_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    for name, what in (("pipe", "device or a pipe"), ("directory", "directory")):
        with pytest.raises(UserError, match=f"{name} is a {what}; name a file"):
            staging.replace_file(tmp_path / name, b"data")
    assert (tmp_path / "pipe").is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["directory", "pipe"]


def test_what_a_killed_writer_left_beside_a_file_is_removed(tmp_path):
    """Not what a living one writes, which holds the lock, nor what has been opened this moment."""
    old, young, other = (tmp_path / f"{name}.tmp-{n}" for n, name in enumerate(("x", "x", "y")))
    users = tmp_path / "x.tmp-backup"
    for path in (old, young, users, other):
        path.write_bytes(b"half")
    for path in (old, users, other):
        os.utime(path, (1, 1))
    with staging.staged_file(tmp_path / "x") as file:
        (living,) = tmp_path.glob(f"x.tmp-{os.getpid()}")
        os.utime(living, (1, 1))
        assert not old.exists()
        renamed = living.rename(tmp_path / "x.tmp-99")  # as another process would have it
        staging.replace_file(tmp_path / "x", b"second")
        assert renamed.exists()
        renamed.rename(living)
        file.write(b"first")
    assert (tmp_path / "x").read_bytes() == b"first"
    kept = ["x", young.name, users.name, other.name]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


def test_a_signal_while_the_old_directory_is_removed_leaves_only_the_new_one(tmp_path, monkeypatch):
    def remove(path, **options):
        signal.raise_signal(signal.SIGTERM)
        rmtree(path, **options)

    fill(tmp_path / "out", "first")
    rmtree, before = shutil.rmtree, signal.signal(signal.SIGTERM, end)
    monkeypatch.setattr(shutil, "rmtree", remove)
    try:
        with pytest.raises(SystemExit):
            fill(tmp_path / "out", "second", overwrite=True)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "kind").read_text() == "second"
