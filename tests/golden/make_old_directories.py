"""Write tests/golden/directories.tar.gz: one small directory of each kind that a user keeps.

    python tests/golden/make_old_directories.py

Made once, by version 0.1.0, and never again: `tests/test_old_directories.py` holds later versions
to them. Only the command line is used. The archive has

    tokenizer/ sentences/      a WordPiece and a SentencePiece tokenizer
    corpus/                    a token store
    pretrained/                a run of 12 steps, stopped after 6 of them
    table.csv finetuned/       a classifier that was trained on the table
    exported/ imported/        its export to Hugging Face's format, and an import of that
    expected.json              what the verbs said of them, and the losses of the steps 7 to 12
"""

import json
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
WORDS = ["cat", "dog", "bird", "fish", "tree", "house", "river", "stone", "cloud", "garden"]
VERBS = ["sees", "hears", "likes", "finds", "follows"]
TEXTS = ["the cat sees the dog .", "a bird likes the river in the garden ."]
MASKED = "the cat sees a [MASK] ."
SHAPE = {"num_layers": 2, "hidden_dim": 16, "num_heads": 2, "mlp_dim": 32, "num_positions": 48,
         "scan_unroll": 1}  # fmt: skip


def run(*words: object) -> str:
    """What a verb prints; an error ends the script."""
    command = [sys.executable, "-m", "bert_jax.cli", *map(str, words)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def pretraining(corpus: Path | str, workdir: Path | str) -> list[str]:
    """The words of the command that trains, or continues, the run."""
    settings = {f"model.{name}": value for name, value in SHAPE.items()} | {
        "data.corpus": corpus,
        "data.objective": "nsp",
        "training.num_steps": 12,
        "training.phases": "({'length': 24, 'batch_size': 8},)",
        "training.log_every_steps": 1,
        "training.eval_every_steps": 6,
        "training.eval_rows": 16,
        "optimizer.learning_rate": 0.01,
        "optimizer.warmup_steps": 3,
        "checkpoint.save_every_steps": 6,
        "checkpoint.keep": 2,
        "seed": 3,
    }
    overrides = [f"--config.{name}={value}" for name, value in settings.items()]
    recipe = HERE.parent.parent / "configs/pretrain/bert_tiny.py"
    return ["pretrain", f"--config={recipe}", f"--workdir={workdir}", *overrides]


def losses(workdir: Path, first: int) -> dict[str, float]:
    """Training loss by step, from step `first` on."""
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {
        str(row["step"]): row["train/loss"]
        for row in rows
        if "train/loss" in row and row["step"] >= first
    }


def write_text(path: Path) -> None:
    """Sixty short documents."""
    draw = random.Random(1)
    documents = []
    for _ in range(60):
        lines = [
            f"the {draw.choice(WORDS)} {draw.choice(VERBS)} a {draw.choice(WORDS)} ."
            for _ in range(draw.randint(4, 9))
        ]
        documents.append("\n".join(lines))
    path.write_text("\n\n".join(documents) + "\n")


def write_table(path: Path) -> None:
    """Forty texts, labelled by what they begin with."""
    draw = random.Random(2)
    rows = ["text,label"]
    for _ in range(40):
        word = draw.choice(WORDS[:4])
        label = "pet" if word in ("cat", "dog") else "wild"
        rows.append(f"the {word} {draw.choice(VERBS)} a {draw.choice(WORDS)} .,{label}")
    path.write_text("\n".join(rows) + "\n")


def fingerprint(tokenizer: Path, out: Path) -> str:
    """Fingerprint of the token store that a tokenizer makes of `TEXTS`."""
    out.mkdir()
    (out / "text.txt").write_text("\n\n".join(TEXTS))
    run("corpus", "--input", out / "text.txt", "--tokenizer", tokenizer,
        "--heldout-rate", 0, "--out", out / "corpus")  # fmt: skip
    record = json.loads((out / "corpus/train/corpus.json").read_text())
    return str(record["fingerprint"])


def make(root: Path) -> None:
    """Everything below `root`."""
    text = root / "text.txt"
    write_text(text)
    write_table(root / "table.csv")
    run("tokenizer", "--input", text, "--vocab-size", 90, "--out", root / "tokenizer")
    run("tokenizer", "--input", text, "--vocab-size", 300, "--kind", "unigram",
        "--out", root / "sentences")  # fmt: skip
    run("corpus", "--input", text, "--tokenizer", root / "tokenizer", "--heldout-rate", 0.2,
        "--out", root / "corpus")  # fmt: skip
    run(*pretraining(root / "corpus", root / "pretrained"))
    expected = {"losses": losses(root / "pretrained", 7)}
    for name in ("tokenizer", "sentences"):
        expected[name] = fingerprint(root / name, root / "scratch")
        shutil.rmtree(root / "scratch")
    shutil.rmtree(root / "pretrained/checkpoints/12")
    out = root / "fills.jsonl"
    run("fill-mask", root / "pretrained", MASKED, "--out", out)
    expected["pretrained"] = json.loads(out.read_text())
    out.unlink()
    run("finetune", f"--config={HERE.parent.parent / 'configs/finetune/table.py'}",
        f"--workdir={root / 'finetuned'}", f"--config.init={root / 'pretrained'}",
        f"--config.task.train={root / 'table.csv'}", "--config.task.max_length=24",
        "--config.training.num_epochs=3.0", "--config.optimizer.learning_rate=0.01")  # fmt: skip
    run("export", root / "finetuned", "--to", "huggingface", "--out", root / "exported")
    run("import", root / "exported", "--out", root / "imported")
    for name in ("finetuned", "exported", "imported"):
        out = root / "classes.jsonl"
        run("classify", root / name, *TEXTS, "--out", out)
        expected[name] = [json.loads(line) for line in out.read_text().splitlines()]
        out.unlink()
    text.unlink()
    for picture in (*root.rglob("*.png"), *root.rglob("tensorboard")):
        shutil.rmtree(picture) if picture.is_dir() else picture.unlink()
    (root / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "old"
        root.mkdir()
        make(root)
        with tarfile.open(HERE / "directories.tar.gz", "w:gz") as archive:
            for path in sorted(root.iterdir()):
                archive.add(path, path.name)


if __name__ == "__main__":
    main()
