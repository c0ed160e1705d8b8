"""A recipe on a track becomes a line; the line's run is repeated to the last digit."""

import hashlib
import json
import re
import runpy
import sys
from pathlib import Path

import jax
import pytest
from started import write_text

from bert_jax.artefacts.saved.reading import read_model
from bert_jax.cli.main import main
from bert_jax.cli.record import attempt
from bert_jax.errors import UserError
from bert_jax.objectives.config import OBJECTIVES

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


def test_a_line_is_written_and_repeated(track, tmp_path, capsys):
    out = tmp_path / "out" / "small.jsonl"
    recipe = write_recipe(tmp_path)
    assert main(["record", *track, f"--recipe={recipe}", "--seeds=3,4", f"--out={out}"]) == 0
    third, fourth = map(json.loads, out.read_text().splitlines())
    assert (third["name"], third["what"], third["seed"]) == ("mine", "Two narrow layers.", 3)
    assert (third["steps"], third["step_seconds"], fourth["steps"]) == (3, 10.0, 3)
    assert third["loss"] != fourth["loss"]
    capsys.readouterr()
    assert main(["record", *track, f"--recipe={out}:2"]) == 0
    assert capsys.readouterr().out.endswith(f"{fourth['loss']} here: equal\n")
    out.write_text(json.dumps({**third, "loss": third["loss"] + 1e-7, "code": "other"}))
    assert main(["record", *track, f"--recipe={out}:1"]) == 1
    said = capsys.readouterr().out
    assert "differs  code: other in the record" in said
    assert "NOT equal" in said


def test_a_recipe_brings_an_objective_that_the_package_lacks(track, tmp_path, monkeypatch, capsys):
    """The module beside the recipe registers the name; only the recipe reads the stored run."""
    name = "own_words"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own_words_module.py").write_text(OWN.format(name=name))
    recipe = write_recipe(tmp_path, name, "import own_words_module")
    out = tmp_path / "small.jsonl"
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["record", *track, f"--recipe={recipe}", f"--out={out}"]) == 0
    (run,) = (tmp_path / "work" / "small" / "runs").glob("*/seed*")
    assert read_model(run).config.hidden_dim == 16
    del OBJECTIVES[name]
    with pytest.raises(UserError, match=r"'own_words'.*a name that the recipe registers"):
        read_model(run)


def test_a_recipe_cannot_make_the_evaluation_easier(track, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(attempt, "step_seconds", lambda config, corpus: 10.0)
    losses = []
    for name, rate in (("whole", 1.0), ("kept", 0.0)):
        (tmp_path / name).mkdir()
        recipe = write_recipe(tmp_path / name)
        masking = f'"masking": {{"mask_rate": {rate}, "random_rate": 0.0, "eval_rate": 0.5}},'
        recipe.write_text(recipe.read_text().replace('"data"', masking + ' "data"'))
        assert main(["record", *track, f"--recipe={recipe}"]) == 0
        losses.append(json.loads(capsys.readouterr().out.splitlines()[-1])["loss"])
    assert losses[0] == losses[1]


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
    assert not (tmp_path / "work" / "small" / "corpus").exists()


@pytest.mark.parametrize("place", ["none.jsonl:1", "small.jsonl", "small.jsonl:7", "small.jsonl:1"])
def test_what_is_no_line_is_refused(track, tmp_path, place, capsys):
    (tmp_path / "small.jsonl").write_text("{}")
    assert main(["record", *track, f"--recipe={tmp_path}/{place}"]) == 2
    assert "names no line of a record" in capsys.readouterr().err


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
