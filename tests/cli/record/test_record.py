"""A recipe on a track becomes a line; the line's run is repeated to the last digit."""

import hashlib
import json
import os
import re
import runpy
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from started import write_text

from bert_jax.artefacts.saved.reading import read_model
from bert_jax.artefacts.saved.runs import Start
from bert_jax.cli.main import main
from bert_jax.cli.record import attempt
from bert_jax.cli.record.track import Track
from bert_jax.errors import UserError
from bert_jax.objectives.config import OBJECTIVES
from bert_jax.training.run import session
from bert_jax.training.run_plan import Result

RECORDS = Path(__file__).parents[3] / "records"
RECIPE = '''"""Two narrow layers."""

{more}

def get_config():
    return {{
        "objective": {{"name": "{objective}"}},
        "model": {{"num_layers": 2, "hidden_dim": 16, "num_heads": 2, "mlp_dim": 32,
                  "num_positions": 32, "num_types": 0, "pooler": False}},
        "data": {{"pairing": "none"}},
        "training": {{"phases": [{{"length": 32, "batch_size": 8}}], "eval_every_steps": 0}},
        "optimizer": {{"warmup_rate": 0.1}},
    }}
'''
OWN = """from dataclasses import dataclass

from bert_jax.objectives.config import OBJECTIVES, MaskedLMConfig


@dataclass(frozen=True)
class Own(MaskedLMConfig):
    name: str = "{name}"


OBJECTIVES["{name}"] = Own
"""


@pytest.fixture
def track(tmp_path):
    """Arguments of a track with one text."""
    text = Path(write_text(tmp_path / "texts.txt"))
    (tmp_path / "texts").mkdir()
    data = text.read_bytes()
    (tmp_path / "texts" / "own.txt").write_bytes(data)
    fields = {
        "texts": [{"name": "own.txt", "sha256": hashlib.sha256(data).hexdigest()}],
        "devices": len(jax.devices()), "seconds": 30.0, "vocab_size": 200,
        "heldout_rate": 0.1, "eval_rows": 16,
    }  # fmt: skip
    (tmp_path / "small.json").write_text(json.dumps(fields))
    return [
        f"--track={tmp_path}/small.json", f"--input={tmp_path}/texts", f"--workdir={tmp_path}/work"
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    """A step takes ten seconds; a second measurement is an error."""
    times = iter([10.0])
    monkeypatch.setattr(attempt, "step_seconds", lambda config, corpus: next(times))


def write_recipe(home, objective="masked_lm", more=""):
    (home / "mine").mkdir(exist_ok=True)
    recipe = home / "mine" / "recipe.py"
    recipe.write_text(RECIPE.format(objective=objective, more=more))
    return recipe


def test_a_line_is_written_and_repeated(track, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(session, "peak_flops", lambda kind, dtype: 1e9)  # of a CPU it is not known
    out = tmp_path / "out" / "small.jsonl"
    recipe = write_recipe(tmp_path)
    assert main(["record", *track, f"--recipe={recipe}", "--seeds=3,4", f"--out={out}"]) == 0
    third, fourth = map(json.loads, out.read_text().splitlines())
    assert (third["name"], third["what"], third["seed"]) == ("mine", "Two narrow layers.", 3)
    assert (third["steps"], third["step_seconds"], fourth["steps"]) == (3, 10.0, 3)
    assert third["loss"] != fourth["loss"]
    assert third["mfu"] > 0
    capsys.readouterr()
    assert main(["record", *track, f"--recipe={out}:2"]) == 0
    assert capsys.readouterr().out.endswith(f"{fourth['loss']} here: equal\n")
    out.write_text(json.dumps({**third, "loss": third["loss"] + 1e-7, "code": "other"}))
    assert main(["record", *track, f"--recipe={out}:1"]) == 1
    said = capsys.readouterr().out
    assert "differs  code: other in the record" in said
    assert "NOT equal" in said


def test_a_record_in_a_bucket_is_refused_before_training(track, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path)
    assert main(["record", *track, f"--recipe={recipe}", "--out=gs://bucket/a.jsonl"]) == 2
    assert "is in a bucket; name a local file" in capsys.readouterr().err
    assert not (tmp_path / "work").exists()


def test_a_recipe_brings_an_objective_that_the_package_lacks(track, tmp_path, monkeypatch, capsys):
    """The module beside the recipe registers the name; only the recipe reads the stored run."""
    name = "own_words"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own_words_module.py").write_text(OWN.format(name=name))
    recipe = write_recipe(tmp_path, name, "import own_words_module")
    out = tmp_path / "small.jsonl"
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["record", *track, f"--recipe={recipe}", f"--out={out}"]) == 0
    (run,) = (tmp_path / "work").glob("small-*/runs/*/seed*")
    assert read_model(run).config.hidden_dim == 16
    del OBJECTIVES[name]
    with pytest.raises(UserError, match=r"'own_words'.*a name that the module of a recipe reg"):
        read_model(run)
    capsys.readouterr()
    assert main(["status", str(run)]) == 2
    assert "registers (docs/record.md)" in capsys.readouterr().err
    code = re.search(
        r'python -c "(.*?)" status RUN', (RECORDS.parent / "docs" / "record.md").read_text("utf-8")
    )[1]
    monkeypatch.delitem(sys.modules, "own_words_module")
    monkeypatch.setattr(sys, "argv", ["-c", "status", str(run)])
    file = tmp_path / "code.py"
    file.write_text(code.replace("zero_outputs_objective", "own_words_module"))
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(file))
    assert done.value.code == 0
    del OBJECTIVES[name]


def test_a_recipe_cannot_make_the_evaluation_easier(track, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(attempt, "step_seconds", lambda config, corpus: 10.0)
    losses = []
    for name, rate in (("whole", 1.0), ("kept", 0.0)):
        (tmp_path / name).mkdir()
        recipe = write_recipe(tmp_path / name)
        masking = f'"mask_rate": {rate}, "random_rate": 0.0, "eval_rate": 0.5'
        masking = f'"masking": {{{masking}, "whole_word": {name == "whole"}}}, '
        recipe.write_text(recipe.read_text().replace('"data"', masking + '"data"'))
        assert main(["record", *track, f"--recipe={recipe}"]) == 0
        losses.append(json.loads(capsys.readouterr().out.splitlines()[-1])["loss"])
    assert losses[0] == losses[1]


def test_what_another_track_or_other_code_made_is_made_again(track, tmp_path, monkeypatch, capsys):
    """A line has no corpus, steps or loss of an earlier state of its track or of the package."""
    times, code, corpora, runs = iter([10.0, 10.0, 5.0]), attempt._code_digest, [], []
    metrics = dict.fromkeys((attempt.LOSS, "eval/nats_below_unigram"), 1.0)
    result = SimpleNamespace(eval_metrics=metrics, train_metrics={}, stopped_by="")
    make = attempt.prepare
    monkeypatch.setattr(
        attempt, "prepare", lambda track, texts, at: corpora.append(at) or make(track, texts, at)
    )
    monkeypatch.setattr(attempt, "step_seconds", lambda config, corpus: next(times))
    monkeypatch.setattr(attempt, "train", lambda config, run: runs.append(run) or result)
    out = tmp_path / "out.jsonl"
    arguments = ["record", *track, f"--recipe={write_recipe(tmp_path)}", f"--out={out}"]
    assert main([*arguments, "--seeds=0,0"]) == 0
    path = tmp_path / "small.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 190}))
    assert main(arguments) == 0
    package = Path(attempt.__file__).parents[2]
    monkeypatch.setattr(attempt, "_code_digest", lambda *at: "x" if package in at else code(*at))
    assert main(arguments) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    steps = [json.loads(line)["steps"] for line in lines]
    assert steps == [3, 3, 3, 6]
    assert out.read_text().splitlines() == lines[1:]  # the second line is of the first run
    assert runs[0] == runs[1]
    assert len({*runs}) == 3
    assert corpora[0] == corpora[1] != corpora[2] == corpora[3]


@pytest.mark.parametrize(
    ("change", "known"),
    [({}, True), ({"hours": 2.0, "path": "other.py"}, True), ({"track": "four"}, False),
     ({"name": "other"}, False), ({"seed": 1}, False), ({"steps": 4}, False),
     ({"code": "other"}, False)],
)  # fmt: skip
def test_a_run_counts_once(tmp_path, change, known):
    """An interrupted command is repeated for the seeds that are left."""
    line = {"track": "two", "path": "r.py", "name": "mine", "seed": 0, "steps": 3, "hours": 1.0}
    line |= dict.fromkeys(attempt._SAME, "x") | {"versions": {"jax": "1"}}
    out = tmp_path / "out.jsonl"
    assert not attempt.is_recorded(line, out)
    out.write_text(json.dumps(line) + "\n")
    assert attempt.is_recorded(line | change, out) == known


def test_a_record_that_lacks_its_last_line_end_keeps_its_lines(track, tmp_path, monkeypatch):
    """The new line became a part of the last."""
    line = {"name": "mine", "seed": 0}
    made = [line | {"seed": seed} for seed in (1, 2)]
    monkeypatch.setattr(attempt, "attempt", lambda *asked: made[asked[-1] - 1])
    monkeypatch.setattr(attempt, "is_recorded", lambda line, out: False)
    (tmp_path / "out.jsonl").write_text(json.dumps(line))
    argv = ["--recipe=mine.py", "--seeds=1,2", f"--out={tmp_path / 'out.jsonl'}"]
    assert main(["record", *track, *argv]) == 0
    found = [json.loads(each) for each in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [each["seed"] for each in found] == [0, 1, 2]


def test_a_changed_shipped_recipe_makes_another_run(track, tmp_path, monkeypatch, capsys):
    """In a clone, the recipes on which others build lie beside the package."""
    clone, runs = tmp_path / "clone", []
    shipped = clone / "configs" / "pretrain" / "start.py"
    shipped.parent.mkdir(parents=True)
    metrics = dict.fromkeys((attempt.LOSS, "eval/nats_below_unigram"), 1.0)
    result = SimpleNamespace(eval_metrics=metrics, train_metrics={}, stopped_by="")
    monkeypatch.setattr(attempt, "__file__", f"{clone}/bert_jax/cli/record/attempt.py")
    monkeypatch.setattr(attempt, "step_seconds", lambda config, corpus: 10.0)
    monkeypatch.setattr(attempt, "train", lambda config, run: runs.append(run) or result)
    for text in ("rate = 1", "rate = 1", "rate = 2"):
        shipped.write_text(text)
        assert main(["record", *track, f"--recipe={write_recipe(tmp_path)}"]) == 0
    assert runs[0] == runs[1] != runs[2]


def test_only_modules_beside_the_recipe_belong_to_it(track, tmp_path, monkeypatch, capsys):
    """Other recipes may lie in directories below."""
    runs = []
    metrics = dict.fromkeys((attempt.LOSS, "eval/nats_below_unigram"), 1.0)
    result = SimpleNamespace(eval_metrics=metrics, train_metrics={}, stopped_by="")
    monkeypatch.setattr(attempt, "step_seconds", lambda config, corpus: 10.0)
    monkeypatch.setattr(attempt, "train", lambda config, run: runs.append(run) or result)
    recipe = write_recipe(tmp_path)
    (recipe.parent / "other").mkdir()
    for place in (recipe, recipe.parent / "other" / "recipe.py", recipe.parent / "module.py"):
        place.write_text(recipe.read_text())
        assert main(["record", *track, f"--recipe={recipe}"]) == 0
    assert runs[0] == runs[1] != runs[2]


def test_the_hours_are_those_of_all_starts_of_the_run(track, tmp_path, monkeypatch, capsys):
    """A run that was finished before takes no time now."""
    metrics = dict.fromkeys((attempt.LOSS, "eval/nats_below_unigram"), 1.0)
    result = SimpleNamespace(eval_metrics=metrics, train_metrics={}, stopped_by="")
    times = [{"startup": 36.0, "productive": 1764.0}, {"productive": 3600.0}]
    starts = [Start(n * 1e4, n * 1e4, 0, 3, 3, seconds) for n, seconds in enumerate(times)]

    def train(config, run):
        run.mkdir(parents=True)
        (run / "goodput.json").write_text(json.dumps({"starts": [*map(asdict, starts)]}))
        return result

    monkeypatch.setattr(attempt, "train", train)
    assert main(["record", *track, f"--recipe={write_recipe(tmp_path)}"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["hours"] == 1.5


def test_recipes_of_one_file_are_measured_apart(track, tmp_path, monkeypatch, capsys):
    """The argument may be a part of a shipped name; the path of a recipe may have a colon."""
    times = iter([10.0, 5.0, 2.0])
    metrics = dict.fromkeys((attempt.LOSS, "eval/nats_below_unigram"), 1.0)
    result = SimpleNamespace(eval_metrics=metrics, train_metrics={}, stopped_by="")
    monkeypatch.setattr(attempt, "step_seconds", lambda config, corpus: next(times))
    monkeypatch.setattr(attempt, "train", lambda config, run: result)
    (tmp_path / "a:b").mkdir()
    for recipe in ("start_2x64", "start_2x128", write_recipe(tmp_path / "a:b")):
        assert main(["record", *track, f"--recipe={recipe}"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    found = [(line["name"], line["steps"]) for line in map(json.loads, lines)]
    assert found == [("start-2x64", 3), ("start-2x128", 6), ("mine", 15)]


def test_a_signal_after_the_last_step_ends_the_command(track, tmp_path, monkeypatch, capsys):
    """The next seed was trained, as if nobody had pressed Ctrl-C."""
    metrics = dict.fromkeys((attempt.LOSS, "eval/nats_below_unigram"), 1.0)
    runs, recipe, out = [], write_recipe(tmp_path), tmp_path / "out.jsonl"
    for signal, code in (("SIGINT", 130), ("SIGTERM", 143)):
        result = Result("", 3, True, eval_metrics=metrics, stopped_by=signal)
        monkeypatch.setattr(
            attempt, "train", lambda config, run, result=result: runs.append(run) or result
        )
        try:
            ended = main(["record", *track, f"--recipe={recipe}", f"--out={out}", "--seeds=0,1"])
        except SystemExit as stop:
            ended = stop.code
        assert ended == code
    assert (len(runs), out.exists()) == (2, False)


def test_a_recipe_in_the_current_directory_has_its_name(track, tmp_path, monkeypatch, capsys):
    metrics = dict.fromkeys((attempt.LOSS, "eval/nats_below_unigram"), 1.0)
    result = Result("", 3, True, eval_metrics=metrics)
    monkeypatch.setattr(attempt, "train", lambda config, run: result)
    monkeypatch.chdir(write_recipe(tmp_path).parent)
    assert main(["record", *track, "--recipe=recipe.py"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["name"] == "mine"


def test_machines_without_affinity_count_all_their_cores(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    device = jax.devices()[0].device_kind
    here = Track(device=device, devices=len(jax.devices()), cores=3)
    assert "3 cores" in attempt.check_device(here)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"texts": [{"name": "none.txt", "sha256": ""}]}, r"none\.txt: no such file; --input"),
        ({"texts": [{"name": "own.txt", "sha256": "0"}]}, "losses on another text do not compare"),
        ({"devices": 99}, "but the track is for 99 x cpu"),
        ({"cores": 9999}, "and 9999 cores"),
        ({"second": 5}, "second"),
    ],
)
def test_what_does_not_fit_the_track_is_refused(track, tmp_path, change, message, capsys):
    path = tmp_path / "small.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert main(["record", *track, f"--recipe={write_recipe(tmp_path)}"]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said), said
    assert not [*(tmp_path / "work").glob("*/corpus")]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("    return {", "    return {{", "SyntaxError"),
        ('"data": {', '"init": "work/a", "data": {', "sets init or distil.teacher"),
        ('"data": {', '"distil": {"teacher": "work/a"}, "data": {', "sets init or distil.teacher"),
    ],
)
def test_a_recipe_that_cannot_be_timed_is_refused(track, tmp_path, old, new, message, capsys):
    recipe = write_recipe(tmp_path)
    recipe.write_text(recipe.read_text().replace(old, new))
    assert main(["record", *track, f"--recipe={recipe}"]) == 2
    assert message in capsys.readouterr().err


def test_a_directory_is_no_record(track, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(attempt, "attempt", lambda *given: {"name": "mine"})
    assert main(["record", *track, "--recipe=mine.py", f"--out={tmp_path}"]) == 2
    assert f"--out {tmp_path} is a directory; name a file" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["none.jsonl:1", "small.jsonl", "small.jsonl:7", "small.jsonl:1"])
def test_what_is_no_line_is_refused(track, tmp_path, place, capsys):
    (tmp_path / "small.jsonl").write_text("{}")
    assert main(["record", *track, f"--recipe={tmp_path}/{place}"]) == 2
    assert "names no line of a record" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--seeds=1", "--out=more.jsonl"])
def test_a_repeated_line_has_its_own_seed_and_adds_no_line(track, tmp_path, option, capsys):
    assert main(["record", *track, f"--recipe={tmp_path}/small.jsonl:1", option]) == 2
    wanted = f"{option.partition('=')[0]} works only with a recipe, not with a line of a record"
    assert wanted in capsys.readouterr().err


@pytest.mark.parametrize("number", [0, -1])
def test_lines_do_not_count_from_the_end(track, tmp_path, number, capsys):
    line = {"path": "r.py", "seed": 0, "steps": 1, "loss": 1.0}
    (tmp_path / "small.jsonl").write_text(f"{json.dumps(line)}\n" * 2)
    assert main(["record", *track, f"--recipe={tmp_path}/small.jsonl:{number}"]) == 2
    assert f"lines count from 1, not from {number}" in capsys.readouterr().err


def test_the_page_shows_the_lines():
    script = runpy.run_path(str(RECORDS / "page.py"))
    assert script["PAGE"].read_text("utf-8") == script["page"]()


def test_gains_are_paired_by_seed():
    gain = runpy.run_path(str(RECORDS / "page.py"))["gain"]
    base = [{"seed": seed, "loss": 3.0 + seed} for seed in range(3)]
    lower = [{"seed": seed, "loss": 2.9 + seed} for seed in range(3)]
    assert gain(lower, base) == "+0.100 (+0.100 to +0.100)"
    assert gain(lower[:1], base) == "+0.100 (one seed)"
    assert gain([{"seed": 9, "loss": 1.0}], base) == ""
