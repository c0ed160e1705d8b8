"""From a recipe to a model, a classifier, exports and a page."""

import importlib.util
import json
import os
import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
from small_finetuning import use_devices, write_table
from small_run import snapshot
from started import pretend_speeds, speed_of, write_text

from bert_jax.cli.main import main
from bert_jax.cli.start import begin, finish
from bert_jax.cli.start.begin import CHOICES, RECIPE, Asked, Promise
from bert_jax.cli.start.recipe import SIZES, as_file, recipe
from bert_jax.distributed.parallel.sharding import make_mesh
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.finetune.voice import NothingLearnedError
from bert_jax.training.pretrain import train as pretrain_module
from bert_jax.training.run_plan import Result

HOURS = 12 * speed_of(SIZES[0]).seconds / 3600
ASKED = Asked(("<b>my</b> text.txt",), HOURS, labels="labels.csv")
PROMISE = Promise(1.0, 0.25)


def loads_nothing(page: str) -> bool:
    """Return whether a page has all that it shows."""
    places = re.findall(r"""(?:src|href|url\(|@import)\s*=?\s*["']?([^"'>\s]+)""", page)
    return all(place.startswith("data:") for place in places) and "<script" not in page


def test_a_page_names_files_whose_names_are_not_utf_8(tmp_path):
    (tmp_path / CHOICES).write_text("size")
    finish._write_page(Asked((os.fsdecode(b"caf\xe9.txt"),), 1.0), ["reached"], [], tmp_path)
    assert "<h1>caf\\udce9.txt</h1>" in (tmp_path / finish.PAGE).read_text("utf-8")


@pytest.mark.slow
def test_a_text_and_a_table_become_a_classifier_with_proofs_and_a_page(
    tmp_path, capsys, monkeypatch
):
    pretend_speeds(monkeypatch)
    use_devices(monkeypatch, 1)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(
        pretrain_module, "make_mesh", lambda mesh: make_mesh(mesh, jax.devices()[:1])
    )
    home = tmp_path / "my start"
    text = write_text(tmp_path / "text.txt", 120)
    labels = write_table(tmp_path / "labels.csv", 60, 0)
    test = write_table(tmp_path / "test.csv", 40, 1)
    argv = ["start", text, f"--labels={labels}", f"--test={test}", f"--hours={HOURS}"]
    argv += ["--go", f"--workdir={home}"]
    code = main(argv)
    said = capsys.readouterr()
    assert code == (8 if "learned anything" in said.err else 0)
    for line in ("reached ", "export ", "accuracy ", "page "):
        assert f"\n{line}" in said.out
    page = (home / "start.html").read_text()
    assert loads_nothing(page)
    assert page.count("data:image/png;base64,") == 2
    for words in ("this model (on 40 examples of test", "a constant", "reached ", "promise "):
        assert words in page
    known = importlib.util.find_spec("sklearn") is not None
    assert ("TF-IDF and a linear model, same rows" in page) == known
    scores = json.loads((home / "classifier" / "report.json").read_text())["splits"]["test"]
    assert f"accuracy {scores['scores']['accuracy']:.3f}" in page
    record = json.loads((home / "classifier" / "config.json").read_text())["config"]
    assert len(record["sweep"]["learning_rates"]) == 3
    for name in ("encoder", "classifier"):
        parity = json.loads((home / "export" / name / "parity.json").read_text())
        assert parity["differences"]
        assert all(gap < 1e-3 for gap in parity["differences"].values())
        assert (home / "export" / name / "model.safetensors").exists()
    monkeypatch.setattr(finish, "export", lambda *_, **__: pytest.fail("was exported again"))
    made = re.compile(r"checkpoints/|export/|metrics\.jsonl|statistics\.json|recipe|choices")
    before = {name: file for name, file in snapshot(home).items() if made.search(name)}
    assert main(argv) == code
    assert {name: snapshot(home)[name] for name in before} == before
    assert loads_nothing((home / "start.html").read_text())
    (home / "run" / "metrics.jsonl").unlink()  # then the reached value is measured again
    capsys.readouterr()
    assert main(argv) == code
    assert re.findall("reached .*", capsys.readouterr().out) == re.findall("reached .*", said.out)
    parity = home / "export" / "classifier" / "parity.json"
    digest = json.loads(parity.read_text())["lineage"][0]["digest"]
    parity.write_text(parity.read_text().replace(digest, "0" * len(digest)))
    assert main(argv) == 2  # the classifier was trained again
    assert "classifier is the export of another model; delete it" in capsys.readouterr().err


@pytest.fixture
def home(tmp_path):
    """A directory in which a recipe has been chosen."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / CHOICES).write_text("size  <2x64>\n")
    (tmp_path / "home" / RECIPE).write_text(as_file(recipe(SIZES[0], 12), "Recipe"))
    return tmp_path / "home"


class Carried:
    """What `finish` has started, in order; nothing is trained."""

    def __init__(self, patch, stops=("", ""), unlearned="", late=False):
        self.names: list[str] = []
        self._stops = dict(zip(("run", "classifier"), stops, strict=True))
        self._unlearned, self._late = unlearned, late
        for name in ("train", "finetune"):
            patch.setattr(finish, name, self._trained)
        patch.setattr(finish, "export", self._exported)
        task = SimpleNamespace(train_split=lambda: SimpleNamespace(rows=range(60)))
        patch.setattr(finish, "open_labels", lambda asked, home: task)
        patch.setattr(finish, "classifier_config", lambda asked, home, num_rows: FinetuneConfig())
        scores = [("this model", "accuracy", 0.9), ("a constant", "accuracy", -0.1)]
        patch.setattr(finish, "_scores", lambda config, workdir: iter(scores))

    def _trained(self, config, workdir):
        name = workdir.name
        self.names.append(name)
        stopped = self._stops[name]
        return Result(
            workdir, 12, self._late or not stopped, eval_metrics={"eval/nats_below_unigram": 1.125},
            stopped_by=stopped, unlearned=self._unlearned if name == "classifier" else "",
        )  # fmt: skip

    def _exported(self, run, form, out, *, say):
        assert form == "huggingface"
        self.names.append(f"export of {run.name}")
        out.mkdir(parents=True)
        proofs = {"bert_jax": {"ran": True}, "transformers": {"ran": False}}
        parity = {"differences": {"a": 1e-7, "b": 2.5e-6}, "proofs": proofs}
        (out / "parity.json").write_text(json.dumps(parity))


@pytest.mark.parametrize(("signal", "late"), [("SIGINT", False), ("SIGTERM", True)])
def test_a_signal_ends_the_command_and_the_same_command_goes_on(home, monkeypatch, signal, late):
    """Before or after the last step of a run."""
    stopped = Carried(monkeypatch, (signal, ""), late=late)
    assert finish.finish(ASKED, PROMISE, home) == signal
    assert stopped.names == ["run"]
    later = Carried(monkeypatch, ("", signal), late=late)
    assert finish.finish(ASKED, PROMISE, home) == signal
    assert later.names == ["run", "export of run", "classifier"]
    assert not (home / finish.PAGE).exists()
    last = Carried(monkeypatch)
    assert finish.finish(ASKED, PROMISE, home) == ""
    assert last.names == ["run", "classifier", "export of classifier"]
    assert (home / finish.PAGE).exists()


@pytest.mark.parametrize(("stopped", "code"), [("", 0), ("SIGINT", 130), ("SIGTERM", 0)])
def test_the_exit_code_tells_ctrl_c(tmp_path, monkeypatch, stopped, code):
    monkeypatch.setattr(begin, "begin", lambda asked, home: PROMISE)
    monkeypatch.setattr(finish, "finish", lambda asked, promise, home: stopped)
    assert main(["start", "text.txt", "--go", f"--workdir={tmp_path}"]) == code


def test_the_result_is_beside_the_promise_on_a_page_that_loads_nothing(home, monkeypatch, capsys):
    Carried(monkeypatch)
    finish.finish(ASKED, PROMISE, home)
    page, said = (home / finish.PAGE).read_text(), capsys.readouterr().out
    line = "reached     1.12 nats; promised: 1.00 nats below the unigram line (80%: 0.75 to 1.25)"
    for text in (said, page):
        assert line in text
        assert "read back by bert_jax, largest difference 2.5e-06" in text
    assert "accuracy    0.900  this model" in said
    assert loads_nothing(page)
    assert "&lt;b&gt;my&lt;/b&gt; text.txt" in page
    assert "&lt;2x64&gt;" in page
    assert "<b>" not in page
    assert "value=0.900" in page
    assert "value=0.000" in page  # a meter has no place for less
    assert "<img" not in page


def test_a_model_alone_has_no_classifier(home, monkeypatch):
    carried = Carried(monkeypatch)
    assert finish.finish(replace(ASKED, labels=""), PROMISE, home) == ""
    assert carried.names == ["run", "export of run"]
    assert "Classifier" not in (home / finish.PAGE).read_text()


def test_a_classifier_that_learned_nothing_is_told_after_the_page(home, monkeypatch):
    Carried(monkeypatch, unlearned="no better than a constant")
    with pytest.raises(NothingLearnedError, match="no better than a constant"):
        finish.finish(ASKED, PROMISE, home)
    assert "accuracy 0.900" in (home / finish.PAGE).read_text()


@pytest.mark.parametrize(("rows", "epochs"), [(60, 20), (960, 10), (1000, 10), (10**6, 3)])
def test_a_classifier_trains_300_steps_within_3_to_20_epochs(home, rows, epochs):
    asked = replace(ASKED, test="test.csv", columns=(("text", "review"), ("header", True)))
    config = finish.classifier_config(asked, home, rows)
    assert config.training.num_epochs == epochs
    assert (config.training.batch_size, config.init) == (32, str(home / "run"))
    assert config.optimizer.learning_rate == 0  # by the model's width
    task = config.task
    assert (task.train, task.test, task.text, task.header) == (
        "labels.csv", "test.csv", "review", True,
    )  # fmt: skip
