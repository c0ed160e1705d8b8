"""The verbs from the command line, and the examples of docs/inference.md."""

import dataclasses
import gzip
import io
import json
import os
import re
import select
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asked_models import MODEL, random_model, write_lines
from vector_models import vector_model

import bert_jax
from bert_jax.artefacts.exchange.exported_files import write_huggingface
from bert_jax.cli import main as cli
from bert_jax.infer.predictor import Predictor
from bert_jax.model.embedding import EmbeddingConfig
from bert_jax.training.finetune import folds
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.run_plan import Result

DOCS = Path(__file__).parents[2] / "docs" / "inference.md"


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Directories of tiny models."""
    home = tmp_path_factory.mktemp("models")
    kinds = {"reviews": "class", "tiny": "pretrained", "tags": "tags", "span": "span"}
    (home / "work" / "search").mkdir(parents=True)
    for name, kind in kinds.items():
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


def test_home_is_expanded_in_paths_and_not_in_texts(home, run, monkeypatch):
    monkeypatch.setenv("HOME", f"{home}")
    code, out, err = run("classify", "~/work/reviews", "~", "--out=~/labels.jsonl")
    assert (code, out) == (0, ""), err
    assert json.loads((home / "labels.jsonl").read_text())["label"]
    assert bert_jax.load("~/work/reviews").classify("the cat")
    code, out, _ = run("classify", "~/work/reviews", "~", "the cat", "--top=1")
    assert out.splitlines()[0] == "~"
    code, _, err = run(
        "finetune", "--config=table", "--config.init=~/nowhere", "--workdir=~/run",
        "--config.task.train", "~/rows.csv",
    )  # fmt: skip
    assert code == 2
    assert f"{home}/nowhere does not exist" in err


def test_limits_of_a_verb(home, run):
    model = home / "work" / "reviews"
    limits = ("--device=cpu", "--batch-tokens=64", "--max-length=8")
    code, out, err = run("classify", model, "the cat sat on a mat . the dog", *limits)
    assert code == 0
    assert "texts are longer than 8 tokens" in err
    assert (
        run("classify", model, "the cat sat on a mat")[1].splitlines()[1:] == out.splitlines()[1:]
    )
    assert run("classify", model, "the cat", "--device=abacus")[0] == 2
    assert "--batch-tokens is 0" in run("classify", model, "a", "--batch-tokens=0")[2]


def test_classify_from_arguments_files_and_to_a_file(home, run, tmp_path):
    model = home / "work" / "reviews"
    code, out, err = run("classify", model, "the cat", "a dog", "--top", 1)
    assert (code, err) == (0, "")
    text, answer, *_ = out.splitlines()
    assert text == "the cat"
    assert re.fullmatch(r"    (bad|fair|good) \d\.\d{3}", answer)

    rows = [{"s": "the cat", "id": 1}, {"s": 5}, {"s": "a dog"}]
    lines = write_lines(tmp_path / "in.jsonl", rows)
    code, out, err = run("classify", model, "--input", lines, "--columns", "text=s")
    assert (code, len(out.splitlines())) == (2, 1)
    assert f"{lines}, line 2: the field 'text' is 5; it must be a string" in err

    found = tmp_path / "out.jsonl"
    code, out, err = run(
        "classify", model, "--input", lines, "--columns=text=s", "--out", found, "--on-error=skip"
    )
    assert (code, out) == (0, "")
    assert "1 of 3 records were skipped" in err
    first, second, third = map(json.loads, found.read_text().splitlines())
    assert (first["id"], second["line"], third.keys()) == (1, 2, {"label", "probabilities"})
    code, out, _ = run("classify", model, "the cat", "--json")
    assert json.loads(out) == {name: first[name] for name in ("label", "probabilities")}


def test_names_that_are_not_utf8(home, run, tmp_path):
    texts, out = tmp_path / os.fsdecode(b"caf\xe9.txt"), tmp_path / "out.jsonl"
    texts.write_text("the cat\n")
    code, _, err = run("classify", home / "work" / "reviews", "--input", texts, "--out", out)
    assert (code, len(out.read_text().splitlines())) == (0, 1), err
    lines = tmp_path / os.fsdecode(b"caf\xe9.jsonl")
    lines.write_text('{"text": "the cat"}\n{"text": 5}\n')
    for out in (tmp_path / "skipped.jsonl", tmp_path / "skipped.parquet"):
        given = "--input", lines, "--out", out, "--on-error=skip"
        code, _, err = run("embed", home / "work" / "reviews", *given)
        assert (code, out.exists()) == (0, True), err


@pytest.mark.parametrize("verb", ["classify", "embed"])
def test_an_input_is_not_replaced(home, run, tmp_path, verb):
    texts = tmp_path / "a.jsonl"
    texts.write_text('{"text": "the cat"}\n')
    (tmp_path / "link.jsonl").symlink_to(texts)
    given = "--input", tmp_path / "link.jsonl", "--out", texts
    code, _, err = run(verb, home / "work" / "reviews", *given)
    assert (code, "is also an input" in err) == (2, True), err
    assert texts.read_text() == '{"text": "the cat"}\n'


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
    for more, special in ((), True), (("--no-special-tokens",), False):
        code, printed, _ = run("embed", model, "the cat", "--pooling=mean", "--json", *more)
        (vector,) = bert_jax.load(f"{model}").embed(
            ["the cat"], pooling="mean", special_tokens=special
        )
        np.testing.assert_allclose(json.loads(printed)["embedding"], vector, atol=1e-5)


@pytest.mark.parametrize(
    ("own", "pooling", "width", "right"),
    [
        ("mean", "splade", MODEL.vocab_size, "not be given for sparse vectors"),
        ("splade", "mean", MODEL.hidden_dim, "be from 1 to 16"),
    ],
)
def test_vectors_have_the_width_of_the_chosen_pooling(run, tmp_path, own, pooling, width, right):
    saved = dataclasses.replace(random_model("pretrained"), embedding=EmbeddingConfig(own))
    write_huggingface(saved, tmp_path)
    command = "embed", tmp_path, "the cat", f"--pooling={pooling}", "--out", tmp_path / "a.npy"
    assert run(*command)[0] == 0
    assert np.load(tmp_path / "a.npy", allow_pickle=False).shape == (1, width)
    assert f"dimensions is 17; it must {right}" in run(*command, "--dimensions=17")[2]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["tag", "reviews", "a"], "this model has no tagging head; it supports classify and embed"),
        (["answer", "reviews", "a"], "a question needs a text: give --context"),
        (["answer", "reviews", "a", "--context=b", "--null-threshold=x"], "is 'x'; give a number"),
        (["classify", "reviews", "a", "--input", "b"], "not both"),
        (["classify", "reviews", "a", "--columns=text=b"], "--columns works only with --input"),
        (["classify", "reviews", '{"text": "b"}', "--format=jsonl"], "--format works only with"),
        (
            ["classify", "reviews", "--input", "b", "--columns", "txt=a"],
            "FIELD is text or text_b or id",
        ),
        (["classify", "nothing", "a"], "does not exist; give"),
        (["embed", "reviews", "a", "--layers", "x"], "the layers are 'x'; give one layer (-1)"),
        (["embed", "reviews", "a", "--layers", "9"], "there is no layer 9"),
        (["classify", "reviews", "a", "--out", "a.npy"], ".npy is for vectors"),
        (["classify", "nothing", "a", "--out", "a.csv"], "a.csv: unknown suffix; name a file that"),
        (["embed", "nothing", "a", "--out", "v.npz"], "v.npz: unknown suffix; name a file that"),
        (["tag", "nothing", "a", "--out", "gs://b/a.jsonl"], "gs:/b/a.jsonl is in a bucket; name"),
        (["tag", "nothing", "--input", "a.xlsx"], "the suffix .xlsx is unknown; known are .txt"),
        (
            ["attend", "nothing", "a", "--out", "a.pdf"],
            "a.pdf: the page is HTML; name a",
        ),
        (
            ["answer", "span", "a", "--context=b", "--null-threshold=nan"],
            "is nan; give a",
        ),
        (
            ["answer", "span", "a", "--context=b", "--null-threshold=inf"],
            "is inf; give a",
        ),
        (
            ["classify", "reviews", "a", "--threshold", "nan"],
            "--threshold is nan; it must be a finite",
        ),
        (["embed", "reviews", "a", "--layers", "2:x"], "the layers are '2:x'"),
        (["fill-mask", "tiny", "a"], "the text 'a' has no [MASK]"),
    ],
)
def test_what_is_wrong_is_said(home, run, argv, message):
    code, out, err = run(argv[0], home / "work" / argv[1], *argv[2:])
    assert (code, out) == (2, "")
    assert err.startswith(f"bert-jax {argv[0]}: ")
    assert message in err


@pytest.mark.parametrize("suffix", ["csv", "tsv", "json", "jsonl", "parquet", "csv.gz"])
@pytest.mark.parametrize("verb", ["classify", "embed"])
def test_a_table_is_asked_about_by_its_text_column(home, run, tmp_path, suffix, verb):
    model = home / "work" / "reviews"
    name, texts = tmp_path / f"a.{suffix}", ["the cat", "a dog"]
    if suffix == "parquet":
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet

        pyarrow.parquet.write_table(pa.table({"n": [1, 2], "body": texts}), name)
    elif "json" in suffix:
        write_lines(name, [{"n": n, "body": text} for n, text in enumerate(texts)])
    else:
        mark = "," if "csv" in suffix else "\t"
        content = "".join(f"{n}{mark}{text}\n" for n, text in (("n", "body"), *enumerate(texts)))
        data = content.encode()
        name.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    found = run(verb, model, "--input", name, "--columns", "text=body")
    assert found == run(verb, model, "--json", *texts)
    assert found[1].count("\n") == 2
    code, out, err = run(verb, model, "--input", name)
    assert (code, out) == (2, "")
    assert "--columns text=" in err or "no field 'text'; the fields present are 'n', 'body'" in err


def test_questions_and_contexts_of_a_table(home, run, tmp_path):
    name = tmp_path / "a.csv"
    name.write_text("id,q,context\n1,who ?,the cat sat\n2,who met lee ?,kim met lee\n")
    model = home / "work" / "span"
    code, out, _ = run("answer", model, "--input", name, "--columns", "question=q")
    assert code == 0
    first, second = map(json.loads, out.splitlines())
    assert (first["id"], second["id"]) == ("1", "2")
    for answer, context in ((first, "the cat sat"), (second, "kim met lee")):
        assert answer["answer"] == context[answer["start"] : answer["end"]]


@pytest.mark.parametrize(
    ("verb", "model", "options"),
    [
        ("fill-mask", "tiny", ["--top", "3"]), ("classify", "reviews", ["--top", "1"]),
        ("tag", "tags", ["--on-error", "skip"]), ("embed", "reviews", ["--pooling", "cls"]),
        ("answer", "span", ["--context", "the cat"]),
    ],
)  # fmt: skip
def test_options_may_stand_before_among_and_behind_texts(home, run, verb, model, options):
    model = home / "work" / model
    texts = ["a [MASK]", "-5 cats on [MASK]", "-", "--[MASK]"]
    if verb != "fill-mask":
        texts[2] = "-x"
    else:
        texts.pop(2)
    first, second, *dashed = texts
    expected = run(verb, model, first, second, *options, "--", *dashed)
    assert expected[0] == 0, expected
    assert run(verb, model, *options, first, second, "--", *dashed) == expected
    assert run(verb, model, first, *options, second, "--", *dashed) == expected
    assert run(verb, *options, model, first, second, "--", *dashed) == expected
    code, _, err = run(verb, model, *options, first, "--bogus")
    assert (code, err.startswith(f"bert-jax {verb}: unknown option --bogus")) == (2, True)


def test_candidates_are_readable(home, run):
    model = home / "work" / "tiny"
    code, out, _ = run("fill-mask", model, "--top", "2", "The cat [MASK] on a [MASK].")
    assert code == 0
    text, first, *rows = out.splitlines()
    assert (text, first, rows[2]) == ("The cat [MASK] on a [MASK].", "    mask 1", "    mask 2")
    code, out, _ = run("fill-mask", model, "--top", "2", "--json", text)
    candidates = [each for mask in json.loads(out)["masks"] for each in mask]
    for row, each in zip([*rows[:2], *rows[3:]], candidates, strict=True):
        token, share, _, id, *filled = row.split()
        assert (token, int(id), float(share)) == (
            each["token"], each["id"], pytest.approx(each["probability"], abs=6e-4),
        )  # fmt: skip
        assert " ".join(filled) == each["sequence"]
        assert each["sequence"].count("[MASK]") == 1
        assert token.removeprefix("##") in each["sequence"]


@pytest.mark.parametrize("as_json", [True, False])
def test_an_ascii_terminal_takes_every_answer(home, monkeypatch, as_json):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    argv = ["tag", str(home / "work" / "tags"), "kim 猫", *["--json"] * as_json]
    assert cli.main(argv) == 0
    out.flush()
    printed = out.buffer.getvalue().decode("ascii")
    assert "\\u732b" in printed
    if as_json:
        assert json.loads(printed)["tokens"] == ["kim", "猫"]


def test_labels_do_not_steer_a_terminal(tmp_path, monkeypatch):
    saved = random_model("class")
    labels = ("bad\x1b[2J", "fair\x9b31m", "good\rgone")
    outputs = dataclasses.replace(saved.outputs, labels=labels)
    write_huggingface(dataclasses.replace(saved, outputs=outputs), tmp_path)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdout", Terminal())
    assert cli.main(["classify", str(tmp_path), "the \x1b[31mcat"]) == 0
    printed = sys.stdout.getvalue()
    assert all(each.isprintable() for each in printed.replace("\n", ""))
    assert r"bad\u001b[2J" in printed
    assert r"the \u001b[31mcat" in printed


def test_what_is_cut_is_counted_once(home, run, tmp_path, monkeypatch):
    monkeypatch.setattr(Predictor, "CHUNK", 2)
    texts = tmp_path / "in.txt"
    texts.write_text("the cat\n" + "cat " * 60 + "\n" + "a\n" + "dog " * 60 + "\n")
    for verb in ("classify", "embed"):
        code, _, err = run(verb, home / "work" / "reviews", "--input", texts)
        assert code == 0
        assert err == (
            "Warning: 2 of 4 texts are longer than 48 tokens, including special tokens, and were "
            f"cut there ({texts}, line 2; {texts}, line 4)\n"
        )


def test_a_line_of_an_open_pipe_is_answered(home, monkeypatch):
    """From end to end: the second line is only written when the first has its answer."""
    ends, found = [os.pipe(), os.pipe()], []

    def converse() -> None:
        with os.fdopen(ends[0][1], "w") as into:
            for text in ("the cat", "a dog"):
                print(text, file=into, flush=True)
                ready, _, _ = select.select([ends[1][0]], [], [], 60)
                if not ready:
                    return
                found.append(os.read(ends[1][0], 1 << 16))

    other = threading.Thread(target=converse)
    with os.fdopen(ends[0][0]) as stdin, os.fdopen(ends[1][1], "w") as stdout:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stdout", stdout)
        other.start()
        code = cli.main(["classify", str(home / "work" / "reviews")])
        other.join()
    os.close(ends[1][0])
    assert code == 0
    assert len(found) == 2, "no answer came before the pipe was closed"
    assert [set(json.loads(line)) for line in found] == [{"label", "probabilities"}] * 2


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)


def run_example(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(code, str(DOCS), "exec"), names)  # noqa: S102 - it is ours
    return names


def test_the_example_of_asking_runs_and_is_short(home, monkeypatch, capsys):
    assert all(sum(map(bool, example.split("\n"))) <= 12 for example in examples())
    _, asking, comparing = examples()
    monkeypatch.chdir(home)
    write_huggingface(vector_model(query_prefix="q: "), home / "work" / "search")
    assert run_example(comparing.replace("256", "8"))["documents"].shape == (2, 8)
    capsys.readouterr()
    names = run_example(asking)
    assert names["vectors"].shape == (2, 16)
    assert capsys.readouterr().out.count("\n") == 3


def test_the_example_of_fine_tuning_is_a_configuration(monkeypatch):
    tuning, _, _ = examples()
    asked = []

    def finetune(config: FinetuneConfig, workdir: str, **_: Any) -> Result:
        asked.append((config, workdir))
        return Result(workdir, 0, finished=True)

    monkeypatch.setattr(folds, "finetune", finetune)
    run_example(tuning)
    ((config, workdir),) = asked
    assert (config.task.kind, config.task.train) == ("table", "reviews.csv")
    assert (config.init, workdir) == ("work/tiny", "work/reviews")


@pytest.mark.skipif("BERT_JAX_CHAOS" not in os.environ, reason="takes half a minute")
def test_the_example_of_fine_tuning_gives_what_is_asked(home, monkeypatch, tmp_path):
    tuning, asking, _ = examples()
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "tiny").symlink_to(home / "work" / "tiny")
    rows = [f"the {animal} sat {n},{animal}" for n in range(20) for animal in ("cat", "dog")]
    (tmp_path / "reviews.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    monkeypatch.chdir(tmp_path)
    # The tiny model has 48 positions.
    run_example(tuning.replace('{"train"', '{"max_length": 32, "train"'))
    names = run_example(asking)
    (answer,) = names["model"].classify("What a film.")
    assert answer["label"] in ("cat", "dog")
    assert names["vectors"].shape == (2, 16)
