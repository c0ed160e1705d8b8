"""The verbs from the command line, and the examples of docs/inference.md."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asked_models import random_model, write_lines

from bert_jax import cli
from bert_jax.exchange.huggingface import write_huggingface

DOCS = Path(__file__).parents[2] / "docs" / "inference.md"


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Directories of tiny models."""
    home = tmp_path_factory.mktemp("models")
    for name, kind in (("reviews", "class"), ("tiny", "pretrained")):
        (home / "work" / name).mkdir(parents=True)
        write_huggingface(random_model(kind), home / "work" / name)
    return home


@pytest.fixture
def run(capsys) -> Callable[..., tuple[int, str, str]]:
    def run(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main([str(each) for each in argv])
        return (code, *capsys.readouterr())

    return run


def test_classify_from_arguments_files_and_to_a_file(home, run, tmp_path):
    model = home / "work" / "reviews"
    code, out, err = run("classify", model, "the cat", "a dog", "--top", 1)
    assert (code, err) == (0, "")
    text, answer, *_ = out.splitlines()
    assert text == "the cat"
    assert re.fullmatch(r"    (bad|fair|good) \d\.\d{3}", answer)

    rows = [{"s": "the cat", "id": 1}, {"s": 5}, {"text": "a dog"}]
    lines = write_lines(tmp_path / "in.jsonl", rows)
    code, out, err = run("classify", model, "--input", lines, "--field", "text=s")
    assert (code, out) == (2, "")
    assert f"{lines}, line 2: the field 'text' holds 5, not text" in err

    found = tmp_path / "out.jsonl"
    code, out, err = run(
        "classify", model, "--input", lines, "--field=text=s", "--out", found, "--on-error=skip"
    )
    assert (code, out) == (0, "")
    assert "1 of 3 records were skipped" in err
    first, second, third = map(json.loads, found.read_text().splitlines())
    assert (first["id"], second["line"], third.keys()) == (1, 2, {"label", "probabilities"})
    code, out, _ = run("classify", model, "the cat", "--json")
    assert json.loads(out) == {name: first[name] for name in ("label", "probabilities")}


def test_embed_to_npy(home, run, tmp_path):
    texts = tmp_path / "in.txt"
    texts.write_text("the cat\n\n猫\n")
    out = tmp_path / "a.npy"
    model = home / "work" / "reviews"
    code, printed, err = run(
        "embed", model, "--input", texts, "--out", out, "--pooling=cls", "--normalize"
    )
    assert (code, printed) == (0, "")
    assert f"3 answers in {out}" in err
    vectors = np.load(out, allow_pickle=False)
    assert vectors.shape == (3, 16)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["tag", "reviews", "a"], "this model cannot tag, for it has no head for the tags"),
        (["answer", "reviews", "a"], "a question needs a text: give --context"),
        (["answer", "reviews", "a", "--context=b", "--null-threshold=x"], "is 'x'; give a number"),
        (["classify", "reviews", "a", "--input", "b"], "not both"),
        (["classify", "reviews", "--input", "b", "--field", "txt=a"], "ours are text, text_b, id"),
        (["classify", "nothing", "a"], "does not exist; give"),
        (["embed", "reviews", "a", "--layers", "x"], "the layers are 'x'; give one such as -1"),
        (["embed", "reviews", "a", "--layer", "9"], "there is no layer 9"),
        (["classify", "reviews", "a", "--out", "a.npy"], ".npy is for vectors"),
        (["fill-mask", "tiny", "a"], "the text 'a' has no [MASK]"),
    ],
)
def test_what_is_wrong_is_said(home, run, argv, message):
    code, out, err = run(argv[0], home / "work" / argv[1], *argv[2:])
    assert (code, out) == (2, "")
    assert err.startswith(f"bert-jax {argv[0]}: ")
    assert message in err


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)


def run_example(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(code, str(DOCS), "exec"), names)  # noqa: S102 - it is ours
    return names


def test_the_example_of_asking_runs_and_is_short(home, monkeypatch, capsys):
    tuning, asking = examples()
    assert all(sum(map(bool, example.split("\n"))) <= 12 for example in (tuning, asking))
    monkeypatch.chdir(home)
    names = run_example(asking)
    assert names["vectors"].shape == (2, 16)
    assert capsys.readouterr().out.count("\n") == 3


@pytest.mark.skipif("BERT_JAX_CHAOS" not in os.environ, reason="takes half a minute")
def test_the_example_of_fine_tuning_gives_what_is_asked(home, monkeypatch, tmp_path):
    tuning, asking = examples()
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "tiny").symlink_to(home / "work" / "tiny")
    rows = [f"the {animal} sat {n},{animal}" for n in range(20) for animal in ("cat", "dog")]
    (tmp_path / "reviews.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    monkeypatch.chdir(tmp_path)
    # The tiny model has 48 positions.
    short = '"task": {"max_length": 32, "kind"'
    run_example(tuning.replace('"task": {"kind"', short))
    names = run_example(asking)
    assert names["answer"]["label"] in ("cat", "dog")
    assert names["vectors"].shape == (2, 16)
