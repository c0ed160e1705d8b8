"""A parser from a treebank to trees, by the command line."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from conformance_files import check_of
from small_finetuning import small_config, write_config, write_files

from bert_jax.artefacts.exchange.export import export
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.cli.main import main
from bert_jax.errors import UserError
from bert_jax.training.finetune.evaluate import evaluate_finetuned
from bert_jax.training.finetune.setup import set_up


def sentence(number: int) -> str:
    """Who, what and, at times, where, with the tree."""
    who, did = ("cat", "dog")[number % 2], ("sat", "ran")[number // 2 % 2]
    words = [("the", 2, "det"), (who, 3, "nsubj"), (did, 0, "root")]
    if number % 3:
        where, place = ("on", "under")[number % 5 > 1], ("mat", "hill")[number % 7 > 2]
        words += [(where, 6, "case"), ("a", 6, "det"), (place, 3, "obl")]
    words.append((".", 3, "punct"))
    rows = [
        f"{n}\t{word}" + "\t_" * 4 + f"\t{head}\t{relation}\t_\t_"
        for n, (word, head, relation) in enumerate(words, 1)
    ]
    return "\n".join(rows) + "\n\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The work directory of a finished run, and the dev file."""
    home = tmp_path_factory.mktemp("parsing")
    files = write_files(home)
    for name, numbers in (("train", range(24)), ("dev", range(24, 36))):
        files[name] = str(home / f"{name}.conllu")
        Path(files[name]).write_text("".join(map(sentence, numbers)))
    config = small_config(
        files,
        task={"kind": "parsing", "max_length": 16, "train": files["train"], "dev": files["dev"]},
        training__num_epochs=6.0,
    )  # fmt: skip
    workdir = home / "run"
    assert not main(
        ["finetune", f"--config={write_config(home / 'config.py', config)}",
         f"--workdir={workdir}"]
    )  # fmt: skip
    return workdir, Path(files["dev"])


def test_a_parser_learns_and_writes_trees(run, tmp_path, capsys):
    workdir, dev = run
    outcome = json.loads((workdir / "statistics.json").read_text())["outcomes"][0]
    assert not outcome["failed"]
    assert outcome["best"] > 0.9
    scores = evaluate_finetuned(workdir, str(dev)).scores
    assert scores["las"] == pytest.approx(outcome["best"])
    raw = tmp_path / "raw.conllu"
    rows = [line.split("\t") for line in dev.read_text().split("\n")]
    raw.write_text("\n".join("\t".join([*row[:6], *"____"][: len(row)]) for row in rows))
    assert not main(["predict", str(workdir), f"--data={raw}", f"--out={tmp_path / 'out'}"])
    written = (tmp_path / "out" / "predictions.conllu").read_text()
    ours, theirs = ([line.split("\t")[6:8] for line in text.split("\n") if line]
                    for text in (dev.read_text(), written))  # fmt: skip
    share = sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)
    assert share == pytest.approx(scores["las"])
    capsys.readouterr()


def test_the_next_run_goes_on_from_the_head_if_the_relations_are_the_same(run):
    workdir, dev = run
    task = {"kind": "parsing", "max_length": 16, "train": f"{dev}", "dev": f"{dev}"}
    files = {"init": f"{workdir}", "train": f"{dev}", "dev": f"{dev}"}
    (start,) = set_up(small_config(files, task=task, head="keep")).start.parts
    jax.tree.map(np.testing.assert_array_equal, start["head"], read_model(workdir).params["head"])
    names = ["root", "punct", "obl", "nsubj", "det", "case"]
    wrong = {"have the order case,det,": names, "lack amod;": [*names, "amod"]}
    for said, labels in wrong.items():
        config = small_config(files, task={**task, "labels": labels}, head="keep")
        with pytest.raises(UserError, match=said):
            set_up(config)
    assert "head" not in set_up(dataclasses.replace(config, head="auto")).start.parts[0]


def test_what_a_parser_is_not_asked(run, tmp_path):
    """No verb but predict, and no class of Transformers."""
    workdir, _ = run
    model = read_model(workdir)
    assert model.verbs == ("embed",)
    with pytest.raises(UserError, match="no class of Transformers has a head for parsing"):
        export(workdir, "huggingface", tmp_path / "huggingface")
    assert not (tmp_path / "huggingface").exists()


@pytest.mark.parametrize("format", ["onnx", "stablehlo"])
def test_programs_read_the_same_trees(run, tmp_path, format, capsys):
    """As docs/artefacts.md says: first tokens of words, arcs and relations, without bert_jax."""
    pytest.importorskip("onnxruntime")
    workdir, dev = run
    parity = export(workdir, format, tmp_path / "out")
    assert parity["differences"]["head"] < 1e-4
    check = check_of(tmp_path / "out")
    assert check.main() == 0
    assert "WRONG" not in capsys.readouterr().out
    about = json.loads((tmp_path / "out" / "conformance" / "cases.json").read_text())
    _, program = getattr(check, f"by_{format}")(tmp_path / "out", about)
    tokenizer = tokenizers.Tokenizer.from_file(f"{tmp_path / 'out' / 'tokenizer.json'}")
    labels = json.loads((tmp_path / "out" / "model.json").read_text())["outputs"]["labels"]
    assert not main(["predict", str(workdir), f"--data={dev}", f"--out={tmp_path / 'said'}"])
    written = (tmp_path / "said" / "predictions.conllu").read_text().strip().split("\n\n")
    for block in written:
        rows = [line.split("\t") for line in block.split("\n")]
        row = tokenizer.encode([columns[1] for columns in rows], is_pretokenized=True)
        at = [row.word_ids.index(n) for n in range(len(rows))]
        inputs = {"input_ids": row.ids, "token_type_ids": row.type_ids}
        inputs["attention_mask"] = row.attention_mask
        found = program({name: [ids] for name, ids in inputs.items()})
        arcs = np.asarray(found["logits" if format == "onnx" else "head"])[0]
        arcs = arcs[np.ix_(at, [0, *at])]
        heads = arcs[..., 0].argmax(1)
        relations = arcs[np.arange(len(rows)), heads, 1:].argmax(1)
        trees = [[f"{head}", labels[n]] for head, n in zip(heads, relations, strict=True)]
        assert trees == [columns[6:8] for columns in rows]
