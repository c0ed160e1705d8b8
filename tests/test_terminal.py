"""What the verbs print, where the encoding or the terminal cannot take all of it."""

import io
import json
import sys
import time

import pytest
from tqdm import tqdm

from bert_jax.cli import main as cli
from bert_jax.terminal import progress_bar, safe_streams

HOSTILE = "good\x1b]0;owned\x07\x1b[2J\r\x9b31m\x7f"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def controls(text: str) -> set[str]:
    return {each for each in text if not each.isprintable()} - {"\n", "\t"}


def test_control_characters_are_shown_on_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    terminal = sys.stdout
    with safe_streams():
        print(f"label\t{HOSTILE} ä猫")
        print(json.dumps({HOSTILE: 1}, ensure_ascii=False))
        sys.stdout.unescaped.write("\x1b[34mours\x1b[0m\n")
    assert sys.stdout is terminal
    first, second, third, _ = terminal.getvalue().split("\n")
    assert not controls(first + second)
    assert first == r"label" + "\t" + r"good\u001b]0;owned\u0007\u001b[2J\u000d\u009b31m\u007f ä猫"
    assert json.loads(second) == {HOSTILE: 1}
    assert third == "\x1b[34mours\x1b[0m"


@pytest.mark.timed
def test_long_work_shows_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def said(stream, **given) -> str:
        monkeypatch.setattr(sys, "stderr", stream)
        for item in progress_bar(range(60), of="texts", unit="lines", **given):
            assert item is not None
            now[0] += 1.0
        return stream.getvalue()

    first, *others = said(io.StringIO()).splitlines()
    assert first == "texts:   8% 5.00/60.0 [00:05<00:55, 1.00 lines/s]"
    assert len(others) == 10  # at 10, 15, ..., 50 and 56 s
    assert said(io.StringIO(), shown=False) == said(Terminal(), shown=False) == ""
    assert "\rtexts: " in said(Terminal())
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with progress_bar(of="corpus", unit="B") as bar:
        now[0] += 6
        bar.update(3000)
    assert stream.getvalue() == "corpus: 3.00kB [00:06, 500B/s]\n"
    assert bar.n == 3000


def test_a_file_holds_what_was_printed(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with safe_streams():
        print(HOSTILE)
    assert sys.stdout.getvalue() == f"{HOSTILE}\n"


def test_bars_still_move(monkeypatch):
    plain, escaped = Terminal(), Terminal()
    for stream, safe in ((plain, False), (escaped, True)):
        monkeypatch.setattr(sys, "stderr", stream)
        bars = {"total": 3, "mininterval": 0, "bar_format": "{desc} {n}"}
        if safe:
            with safe_streams():
                draw(bars)
        else:
            draw(bars)
    assert escaped.getvalue() == plain.getvalue()
    assert "\r" in plain.getvalue()
    assert "\x1b[A" in plain.getvalue()


def draw(bars) -> None:
    outer = tqdm(desc="outer", **bars)
    inner = tqdm(desc="inner", leave=False, **bars)
    inner.update(1)
    outer.update(2)
    inner.close()
    outer.close()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_encoding_takes_what_is_printed(monkeypatch, encoding):
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)
    value = "ä猫\U0001f600\udcff"
    with safe_streams():
        print(json.dumps(value, ensure_ascii=False))
        out.flush()
    assert json.loads(out.buffer.getvalue().decode(encoding)) == value


def test_names_in_errors_are_escaped(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert cli.main(["classify", str(tmp_path / HOSTILE), "a"]) == 2
    assert "does not exist" in sys.stderr.getvalue()
    assert not controls(sys.stderr.getvalue())
