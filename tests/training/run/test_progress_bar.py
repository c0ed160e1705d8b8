"""On a terminal a bar shows the progress, and lines appear above it; elsewhere lines show both."""

import io

import pytest

from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.training.run.goodput import Clock, Goodput
from bert_jax.training.run.telemetry import Telemetry


class Terminal(io.StringIO):
    """What a person reads."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """Opens telemetry with an output and a terminal of its own."""

    def opened(screen: io.StringIO, **options) -> tuple[Telemetry, io.StringIO]:
        out = io.StringIO()
        monkeypatch.setattr("sys.stdout", out)
        monkeypatch.setattr("sys.stderr", screen)
        arguments = {"num_steps": 10, "restored_step": 2, "peak": None} | options
        return Telemetry(
            tmp_path, metrics=MaskedLM.metrics_of(pairs=True),
            goodput=Goodput(None, Clock(lambda: 0.0), 0), **arguments,
        ), out  # fmt: skip

    return opened


@pytest.mark.timed
def test_a_bar_counts_the_steps_and_shows_the_loss(opened):
    telemetry, out = opened(screen := Terminal())
    with telemetry:
        assert "2/10" in screen.getvalue()  # those of before the restart
        for step, loss in ((3, 9.0), (4, 6.5)):
            telemetry.step_done(step, 100.0, 1000, loss)
        assert not telemetry.line_due(7)  # the bar says it
        telemetry.say("a line")
        assert out.getvalue() == "a line\n"
        shown = screen.getvalue().rpartition("\r")[2]  # drawn anew below the line
        assert "4/10" in shown
        assert "mlm loss 6.500" in shown
        assert "step" in shown
    # The bar goes at the end; what is said later is a line like any other.
    assert screen.getvalue().rpartition("\r")[0].rpartition("\r")[2].strip() == ""
    telemetry.say("the end")
    assert out.getvalue() == "a line\nthe end\n"


@pytest.mark.timed
@pytest.mark.parametrize("screen", [io.StringIO, Terminal])
def test_without_a_terminal_or_with_an_echo_lines_show_the_steps(opened, screen):
    said: list[str] = []
    echo = said.append if screen is Terminal else None
    telemetry, out = opened(screen := screen(), echo=echo)
    with telemetry:
        telemetry.step_done(7, 100.0, 1000, 6.5)
        assert telemetry.line_due(7)
        telemetry.progress_line(7, {"mlm_loss": 6.5})
    (line,) = said or out.getvalue().splitlines()
    assert line.startswith("step 7/10  mlm loss 6.500  ")
    assert screen.getvalue() == ""
    assert (not said) == (out.getvalue() != "")
