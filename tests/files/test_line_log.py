import os

from full_disk import files_of_at_most

from bert_jax.files.line_log import LineLog


def test_lines_that_do_not_fit_wait_and_none_is_torn(tmp_path, caplog):
    path = tmp_path / "log"
    log = LineLog(path)
    with files_of_at_most(25):
        for number in range(10):
            log.write(f"line {number}")  # 7 bytes each: the fourth is cut after 4
            assert path.read_bytes() == b"".join(
                b"line %d\n" % i for i in range(min(number + 1, 3))
            )
    with files_of_at_most(50):
        log.flush()
        assert path.read_bytes() == b"".join(b"line %d\n" % i for i in range(7))
    log.write("line 10")
    assert path.read_bytes() == b"".join(b"line %d\n" % i for i in range(11))
    failed, mended = caplog.messages
    reason = "No space left on device"
    assert f"{path} cannot be written ({reason})" in failed
    assert mended == f"{path} can be written again"


def test_a_directory_that_vanishes_and_comes_back(tmp_path, caplog):
    here, away = tmp_path / "run", tmp_path / "away"
    here.mkdir()
    log = LineLog(here / "log")
    log.write("1")
    here.rename(away)
    log.write("2")
    log.sync()
    assert not here.exists()  # it was a mount, say: what is below it is not the place
    assert (away / "log").read_text() == "1\n"
    away.rename(here)
    log.write("3")
    log.close()
    assert (here / "log").read_text() == "1\n2\n3\n"
    assert len(caplog.records) == 2


def test_a_line_that_others_may_have_written_behind_is_left(tmp_path):
    path = tmp_path / "log"
    ours, others = LineLog(path, shared=True), LineLog(path, shared=True)
    with files_of_at_most(10):
        ours.write("ours 1")
        ours.write("ours 2")  # 3 bytes of it
    assert path.read_bytes() == b"ours 1\nour"
    others.write("others 1")
    ours.write("ours 3")
    assert path.read_text().splitlines() == ["ours 1", "our", "others 1", "ours 2", "ours 3"]


def test_a_line_that_a_kill_cut_off_stands_alone(tmp_path):
    path = tmp_path / "log"
    path.write_text("cut o")
    LineLog(path).write("next")
    assert path.read_text() == "cut o\nnext\n"


def test_memory_is_bounded_and_what_is_dropped_is_said(tmp_path, caplog):
    path = tmp_path / "missing" / "log"
    log = LineLog(path, limit=3)
    for number in range(5):
        log.write(str(number))
    log.close()
    assert caplog.messages[-1] == f"{path}: 3 lines are lost"
    path.parent.mkdir()
    log.flush()
    assert path.read_text() == "2\n3\n4\n"
    assert caplog.messages[-1] == f"{path} can be written again; 2 lines were lost"


def test_sync_of_what_cannot_be_synced_is_a_warning(tmp_path, caplog, monkeypatch):
    def broken(file):
        raise OSError(5, "Input/output error")

    log = LineLog(tmp_path / "log")
    log.sync()  # of no line
    assert not caplog.records
    log.write("1")
    monkeypatch.setattr(os, "fsync", broken)
    log.sync()
    assert caplog.messages == [f"{tmp_path / 'log'} may not be on the disk: Input/output error"]
