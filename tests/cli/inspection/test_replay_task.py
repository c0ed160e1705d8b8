"""A batch of a fine-tuning run as text, as the step gets it."""

import csv
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_finetuning import small_config, write_files
from task_examples import TOKENIZER

from bert_jax.cli.inspection.replay import label_texts, replay_task
from bert_jax.cli.main import main
from bert_jax.errors import UserError
from bert_jax.tasks.task import LabelSpec
from bert_jax.training.finetune.saves import prepare_finetune_workdir
from bert_jax.training.finetune.setup import set_up


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str], Any]:
    """A run of two waves of two trials before its first step: nothing else is read."""
    root = tmp_path_factory.mktemp("replay")
    files = write_files(root / "files")
    config = small_config(
        files, sweep={"seeds": 2, "at_once": 2, "learning_rates": [1e-3, 2e-3]}
    )  # fmt: skip
    setup = set_up(config)
    prepare_finetune_workdir(
        root / "work", config, setup.fingerprints, setup.initial.tokenizer_files, 0, setup.splits
    )
    return root / "work", files, setup


def test_rows_and_labels_are_those_of_the_step_and_of_the_file(begun):
    workdir, files, setup = begun
    with Path(files["train"]).open() as file:
        known = {row["text"]: row["label"] for row in csv.DictReader(file)}
    said = replay_task(workdir, setup.step.num_steps + 5)  # the last of an epoch, of 4 rows
    seeds = re.findall(r"^batch 5 of wave 1, seed (\d), learning rate 0\.002$", said, re.MULTILINE)
    assert seeds == ["6", "7"]
    rows = re.findall(r"row \d, \d+ tokens, label (\w+)\n +1  \[CLS\] (.+) \[SEP\]", said)
    assert len(rows) == 8
    batch = next(setup.rows_of(1, 5))
    for number, (label, text) in enumerate(rows):
        assert label == known[text]
        tokens = batch["tokens"].reshape(-1, 8, batch["tokens"].shape[-1])[number // 4, number % 4]
        own = [setup.initial.tokenizer.id_to_token(token) for token in tokens.tolist()]
        assert " ".join(own[1 : own.index("[SEP]")]) == text
    first, second = said.split("\n\nbatch 5")
    assert first.partition("\n")[2] != second.partition("\n")[2]


def test_on_the_command_line(begun, capsys):
    workdir, files, setup = begun
    assert main(["replay", f"{workdir}", "--step=0", "--rows=1"]) == 0
    said = capsys.readouterr().out
    assert said.count("(7 more rows)") == 2
    last = 2 * setup.step.num_steps - 1
    for step in (-1, last + 1):
        assert main(["replay", f"{workdir}", f"--step={step}"]) == 2
        assert f"--step is {step}; the run has batches 0 to {last}" in capsys.readouterr().err
    assert main(["replay", f"{workdir}", "--step=0", "--corpus=x"]) == 2
    assert "--corpus works only with a run of pretraining" in capsys.readouterr().err
    text = Path(files["train"]).read_text()
    try:
        Path(files["train"]).write_text(text + "the cat sat .,cat\n")
        with pytest.raises(UserError, match="fingerprint"):
            replay_task(workdir, 0)
    finally:
        Path(files["train"]).write_text(text)


@pytest.mark.parametrize(
    ("objective", "labels", "expected"),
    [
        ("single_label", [1, 0], ["label b", "label a"]),
        ("multi_label", [[1.0, 1.0], [0.0, 0.0]], ["labels a b", "labels none"]),
        ("regression", [0.5, -1.0], ["score 4", "score 1"]),
        ("span", [[1, 2], [0, 0]], ["answer c a", "answer none"]),
        ("tags", [[-1, 1, 0, -1], [-1, 0, -1, -1]], ["tags b a", "tags a"]),
        ("arcs", [[-1, 5, 2, -1], [-1, 0, -1, -1]], ["heads 2:b 1:a", "heads 0:a"]),
        ("choice", [2, 0], ["label 2", "label 0"]),
        ("embedding", None, ["", ""]),
        ("ranking", [[1.0, 0.0], [2.5, -1.0]], ["label 1 0", "label 2.5 -1"]),
    ],
)
def test_labels_in_words(objective, labels, expected):
    spec = LabelSpec(("a", "b"), mean=3.0, deviation=2.0)
    ids = [TOKENIZER.token_to_id(each) for each in ("[CLS]", "c", "a", "[SEP]")]
    batch = {"tokens": np.array([ids, ids], np.int32)}
    if labels is not None:
        batch["labels"] = np.array(labels)
    assert label_texts(objective, spec, TOKENIZER, batch) == expected
