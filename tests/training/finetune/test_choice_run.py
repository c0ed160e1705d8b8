"""Multiple choice from a table to predictions, and as a class of Transformers."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from small_finetuning import small_config, write_config, write_files
from task_examples import read_json_lines

from bert_jax.artefacts.exchange.export import export
from bert_jax.artefacts.saved.reading import read_finetuned, read_model
from bert_jax.cli.main import main
from bert_jax.data.corpus.overlap.evaluation import text_key
from bert_jax.errors import UserError
from bert_jax.objectives.task import TaskObjective
from bert_jax.tasks.rows import eval_batches
from bert_jax.training.finetune.data import splits_of
from bert_jax.training.finetune.evaluate import divide, evaluate_finetuned, split_outputs
from bert_jax.training.finetune.setup import set_up

ENDINGS = ("the mat", "under a hill", "the cat on the mat")


def write_choices(path: Path, count: int, seed: int) -> str:
    """The right ending is the one with a hill; texts and endings have several lengths."""
    random = np.random.default_rng(seed)
    rows = ["sent1,sent2,a,b,c,label"]
    for number in range(count):
        order = random.permutation(3)
        text = ("the cat ran", "a dog sat on the mat .")[number % 2]
        rows.append(f"{text},a,{','.join(ENDINGS[n] for n in order)},{order.argsort()[1]}")
    path.write_text("\n".join(rows) + "\n")
    return f"{path}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The work directory of a finished run, two micro-batches a step."""
    home = tmp_path_factory.mktemp("choice")
    files = write_files(home)
    section = {
        "train": write_choices(home / "train.csv", 32, 0), "choices": ["a", "b", "c"],
        "dev": write_choices(home / "dev.csv", 20, 1),
    }  # fmt: skip
    config = small_config(
        files, task={"kind": "choice", "max_length": 16, **section},
        training__num_epochs=8.0, training__accumulation=2,
    )  # fmt: skip
    written = write_config(home / "config.py", config)
    assert not main(["finetune", f"--config={written}", f"--workdir={home / 'run'}"])
    return home / "run"


def test_the_right_ending_is_learned_and_predicted(run, tmp_path, capsys):
    outcome = json.loads((run / "statistics.json").read_text())["outcomes"][0]
    assert not outcome["failed"]
    assert outcome["best"] == 1.0
    data = run.parent / "dev.csv"
    assert evaluate_finetuned(run, str(data)).scores["accuracy"] == 1.0
    assert not main(["predict", str(run), f"--data={data}", f"--out={tmp_path / 'out'}"])
    predicted = read_json_lines(tmp_path / "out" / "predictions.jsonl")
    assert {entry["choice"] for entry in predicted} == {"a under a hill"}
    assert read_model(run).verbs == ("embed",)
    capsys.readouterr()


def test_an_export_is_scored_and_the_next_run_goes_on_from_its_head(run, tmp_path):
    out, data = tmp_path / "out", run.parent / "dev.csv"
    export(run, "huggingface", out)
    files = {"init": f"{out}", "train": f"{data}", "dev": f"{data}"}
    section = {"choices": ["a", "b", "c"], "train": f"{data}", "dev": f"{data}"}
    task = {"kind": "choice", "max_length": 16, **section}
    setup = set_up(small_config(files, task=task, head="keep"))
    expected = read_finetuned(run).params["head"]
    jax.tree.map(np.testing.assert_array_equal, setup.start.parts[0]["head"], expected)
    # SWAG's columns are the default, so a fourth choice is added.
    _, *lines = data.read_text().splitlines()
    cells = [line.split(",") for line in lines]
    rows = [",".join([*row[:-1], "the mat", row[-1]]) for row in cells]
    header = "sent1,sent2,ending0,ending1,ending2,ending3,label"
    (tmp_path / "swag.csv").write_text("\n".join([header, *rows]) + "\n")
    assert evaluate_finetuned(out, f"{tmp_path / 'swag.csv'}").scores["accuracy"] == 1.0
    columns = {"text": "sent1", "choices": "a,b,c"}
    assert evaluate_finetuned(out, f"{data}", columns=columns).scores["accuracy"] == 1.0
    (split,) = splits_of(run, read_finetuned(run), f"{data}")
    known = {text_key(split.texts()[0][0]): (3, 0)}  # a report has a choice without its beginning
    assert len(divide(split, known, needed=True)["clean"]) == 10


@pytest.mark.parity
def test_transformers_gives_the_same_logits_loss_and_choice(run, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    assert not main(["export", str(run), "--to=huggingface", f"--out={tmp_path / 'out'}"])
    capsys.readouterr()
    theirs = transformers.AutoModelForMultipleChoice.from_pretrained(tmp_path / "out").eval()
    assert type(theirs).__name__ == "BertForMultipleChoice"
    model = read_finetuned(run)
    split = model.origin.task.open_split(str(run.parent / "dev.csv"))
    ours = np.asarray(split_outputs(model, split))
    pad = model.tokenizer.special_ids.pad
    _, batch = next(eval_batches(split.rows, (16,), len(split.rows), pad))
    inputs = {"input_ids": "tokens", "attention_mask": "segment_ids", "token_type_ids": "type_ids"}
    with torch.no_grad():
        found = theirs(
            **{name: torch.tensor(batch[own]).long() for name, own in inputs.items()},
            labels=torch.tensor(batch["labels"]).long(),
        )
    np.testing.assert_allclose(ours, found.logits.numpy(), atol=1e-4)
    objective = TaskObjective(model.config, model.outputs.head, "choice")
    forward = jax.jit(lambda params, rows: objective.forward(params, rows, None, None))
    sums = forward(model.params, batch).sums
    assert float(sums["loss"] / sums["count"]) == pytest.approx(float(found.loss), abs=1e-5)
    back = read_model(tmp_path / "out")
    assert back.outputs.objective == "choice"
    assert back.outputs.head.num_labels == 1
    np.testing.assert_array_equal(back.params["head"]["kernel"], model.params["head"]["kernel"])
    imported = tmp_path / "imported"
    assert not main(["import", str(tmp_path / "out"), f"--out={imported}"])
    assert read_model(imported).outputs.objective == "choice"
    capsys.readouterr()
    report = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert report["class"] == "BertForMultipleChoice"
    assert report["proofs"]["transformers"]["ran"]
    assert "best of several" not in (tmp_path / "out" / "README.md").read_text()
    assert "the highest wins" in (tmp_path / "out" / "README.md").read_text()


def test_other_families_are_not_written(run):
    """Their classes of multiple choice compute something else."""
    import dataclasses

    from bert_jax.artefacts.exchange.exported_files import class_of

    model = read_finetuned(run)
    assert class_of(model) == "BertForMultipleChoice"
    config = dataclasses.replace(model.config, pooler_activation="gelu")
    with pytest.raises(UserError, match="only BERT, ModernBERT and DeBERTa have a class"):
        class_of(dataclasses.replace(model, config=config))
