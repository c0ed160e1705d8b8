"""Whether `bert-jax status --diagnose` names the cause of a plateau in runs with planted faults.

    python benchmarks/diagnose.py --out work/diagnose             # the 20 runs that judge
    python benchmarks/diagnose.py --out work/diagnose --tuning    # the runs that set the limits
    python benchmarks/diagnose.py --out work/diagnose --table     # of the runs so far

A run has 2 layers of width 64, 300 steps of 32 rows of 64 tokens of the corpus of `bert-jax demo`,
and one fault. The limits of `bert_jax.cli.inspection.diagnose` were set on the runs of `--tuning`,
which differ from the 20 runs in seed, in the strength of the fault and mostly in the recipe. The
diagnosis of each run is kept in OUT/diagnoses.jsonl, so that a stopped measurement goes on.
"""

import argparse
import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
from demo_recipes import demo_corpus

from bert_jax.cli.inspection.diagnose import diagnosis
from bert_jax.config.command_line import load_config
from bert_jax.data.corpus.build import build_corpus, is_corpus
from bert_jax.data.corpus.sources import resolve_sources
from bert_jax.distributed.checkpoint.manager import Checkpoints
from bert_jax.distributed.checkpoint.reading import load_newest
from bert_jax.distributed.parallel.sharding import make_mesh
from bert_jax.files.remote import open_workdir
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.tokenization.training import train_wordpiece
from bert_jax.training.pretrain import saves
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import open_corpus
from bert_jax.training.pretrain.settings import step_config
from bert_jax.training.pretrain.train import train
from bert_jax.training.steps.bad_step import BadStepError
from bert_jax.training.steps.state import abstract_state, jitted_init

TINY = (
    "model.num_layers=2", "model.hidden_dim=64", "model.num_heads=2", "model.mlp_dim=128",
    "optimizer.warmup_steps=20", "training.num_steps=300", "checkpoint.save_every_steps=100",
    "training.eval_every_steps=0", "training.phases[0].batch_size=32",
)  # fmt: skip
RECIPES: dict[str, tuple[str, tuple[str, ...]]] = {
    "modern, Muon": ("pretrain/demo", ()),
    "modern, AdamW": ("pretrain/demo", ("optimizer.name=adamw",)),
    "modern, StableAdamW": ("pretrain/demo", ("optimizer.name=stable_adamw",)),
    "BERT, AdamW": ("pretrain/demo:bert", ("optimizer.learning_rate=3e-3",)),
    "BERT, LAMB": ("pretrain/demo:bert", ("optimizer.name=lamb", "optimizer.learning_rate=1e-2")),
    "BERT, Muon": ("pretrain/demo:bert", ("optimizer.name=muon", "optimizer.learning_rate=3e-3")),
}  # fmt: skip


class Case(NamedTuple):
    """A run with one fault, or with none."""

    cause: str
    """Cause that a right diagnosis names first; "healthy" for none."""
    fault: str
    recipe: str
    seed: int
    fields: tuple[str, ...] = ()
    corpus: str = "corpus"
    """Name in `CORPORA`."""
    scale_at: str = ""
    """When queries and keys are multiplied by `scale`: start or end."""
    scale: float = 1.0

    @property
    def name(self) -> str:
        """Name of the run's directory."""
        return "-".join(f"{self.cause} {self.fault} {self.recipe} {self.seed}".split())


def _rate(recipe: str, rate: float, seed: int) -> Case:
    return Case(
        "learning rate", f"rate {rate:g}", recipe, seed, (f"optimizer.learning_rate={rate}",)
    )


def _text(recipe: str, corpus: str, seed: int, *fields: str) -> Case:
    return Case("data", corpus, recipe, seed, fields, corpus)


def _masks(recipe: str, fault: str, seed: int, *fields: str) -> Case:
    return Case("masking", fault, recipe, seed, tuple(f"masking.{field}" for field in fields))


def _init(recipe: str, std: float, seed: int) -> Case:
    return Case("initial scale", f"init_std {std:g}", recipe, seed, (f"model.init_std={std}",))


def _scaled(recipe: str, scale: float, at: str, seed: int) -> Case:
    fault = f"queries, keys x {scale:g} at the {at}"
    return Case("attention", fault, recipe, seed, (), "corpus", at, scale)


FINAL = [
    Case("healthy", "none", "modern, Muon", 0),
    Case("healthy", "none", "modern, AdamW", 1),
    Case("healthy", "none", "BERT, AdamW", 2),
    Case("healthy", "none", "BERT, LAMB", 3),
    Case("healthy", "none", "BERT, Muon", 4, ("data.pairing=none",)),
    _rate("BERT, AdamW", 1e-6, 5),
    _rate("modern, Muon", 1.0, 6),
    _rate("modern, AdamW", 0.1, 7),
    _text("modern, AdamW", "6 documents", 8),
    _text("BERT, Muon", "no letters after h", 9),
    _text("modern, Muon", "lines", 50, "data.pairing=none"),
    _masks("BERT, AdamW", "rate 0.005", 51, "rate=0.005"),
    _masks("modern, AdamW", "rate 0.95", 52, "rate=0.95"),
    _masks("modern, Muon", "all shown", 53, "mask_rate=0.0", "random_rate=0.0"),
    _init("BERT, LAMB", 1.0, 54),
    _init("modern, Muon", 1e-5, 55),
    _init("BERT, AdamW", 0.6, 56),
    _scaled("BERT, AdamW", 0.0, "start", 57),
    _scaled("modern, Muon", 100.0, "start", 58),
    _scaled("modern, StableAdamW", 50.0, "end", 59),
]
TUNING = [
    *(Case("healthy", "none", recipe, 10 + n) for n, recipe in enumerate(RECIPES)),
    Case("healthy", "single texts", "BERT, AdamW", 17, ("data.pairing=none",)),
    Case("healthy", "init_std 0.02", "BERT, AdamW", 18, ("model.init_std=0.02",)),
    Case("healthy", "rate 3e-4", "modern, AdamW", 12, ("optimizer.learning_rate=3e-4",)),
    _rate("modern, AdamW", 1e-5, 20),
    _rate("BERT, AdamW", 1e-4, 22),
    _rate("BERT, AdamW", 3e-2, 23),
    _rate("modern, Muon", 0.3, 25),
    _rate("BERT, LAMB", 0.3, 27),
    _init("modern, AdamW", 0.3, 34),
    _init("modern, StableAdamW", 1e-3, 36),
    _scaled("modern, AdamW", 0.0, "start", 38),
    _scaled("BERT, LAMB", 50.0, "start", 39),
    _scaled("BERT, Muon", 30.0, "end", 41),
    _text("modern, AdamW", "no letters after p", 29),
]


def _few(texts: list[str]) -> list[str]:
    """Repeat the six longest of the documents below 3,000 characters, up to 2 MB."""
    return sorted((text for text in texts if len(text) < 3000), key=len)[-6:] * 110


def _lines(texts: list[str]) -> list[str]:
    lines = (line.strip() for text in texts for line in text.split("\n"))
    return [line for line in lines if 0 < len(line) < 50][:40_000]


CORPORA: dict[str, Callable[[list[str]], list[str]]] = {"6 documents": _few, "lines": _lines}
"""Functions that make the documents of a faulty corpus from the documents of the demo."""
ALPHABETS = {"no letters after p": "abcdefghijklmnop", "no letters after h": "abcdefgh"}
"""Letters that the tokenizer of a faulty corpus knows."""


def corpus_of(name: str, out: Path) -> Path:
    """Build a corpus, if it is not there."""
    if name == "corpus":
        return demo_corpus(out)
    directory = out / name.replace(" ", "_")
    if is_corpus(directory):
        return directory
    sources = ["python-docs"]
    texts = [text for source in resolve_sources(sources) for text in source.texts()]
    known = ("".join(c for c in text.lower() if c in ALPHABETS[name] + " ") for text in texts)
    tokenizer = load_tokenizer(demo_corpus(out) / "train" / "tokenizer")
    if name in ALPHABETS:
        tokenizer = train_wordpiece(known, 2000)
    else:
        file = out / f"{directory.name}.jsonl"
        rows = (json.dumps({"text": text}) + "\n" for text in CORPORA[name](texts))
        file.write_text("".join(rows))
        sources = [str(file)]
    print(build_corpus(sources, tokenizer, directory, heldout_rate=0.0).summary())
    return directory


def _with_scaled(params: Any, scale: float) -> Any:
    def one(path: Any, leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        return leaf * scale if "'query'" in name or "'key'" in name else leaf

    return jax.tree_util.tree_map_with_path(one, params)


@contextlib.contextmanager
def _scaled_start(scale: float) -> Iterator[None]:
    made = jitted_init

    def init(*settings: Any) -> Any:
        start = made(*settings)
        return lambda key: (state := start(key))._replace(params=_with_scaled(state.params, scale))

    with mock.patch.object(saves, "jitted_init", init):
        yield


def _scale_end(workdir: Path, scale: float) -> None:
    config = saves.read_config(workdir)
    directory, stores = workdir / "checkpoints", open_corpus(config.data.corpus)
    abstract = abstract_state(step_config(config, stores), make_mesh(config.mesh))
    restored = load_newest(directory, abstract)
    assert restored is not None
    shutil.rmtree(directory / str(restored.step))
    checkpoints = Checkpoints(directory, config.retention)
    state = restored.state._replace(params=_with_scaled(restored.state.params, scale))
    record = restored.record
    checkpoints.save_last(
        restored.step, state, read_back=True, config=record.config, extra=record.extra
    )
    checkpoints.close()


def run(case: Case, out: Path) -> dict[str, Any]:
    """Train, and return the diagnosis."""
    file, changes = RECIPES[case.recipe]
    corpus = corpus_of(case.corpus, out)
    fields = (*TINY, *changes, *case.fields, f"seed={case.seed}", f"data.corpus={corpus}")
    config = load_config(PretrainConfig, file, [f"--config.{field}" for field in fields])
    workdir = out / "runs" / case.name
    shutil.rmtree(workdir, ignore_errors=True)
    scaled = _scaled_start(case.scale if case.scale_at == "start" else 1.0)
    with scaled, contextlib.suppress(BadStepError):  # the guard may stop a run of a high rate
        train(config, workdir, echo=lambda _: None)
    if case.scale_at == "end":
        _scale_end(workdir, case.scale)
    began = time.process_time()
    found, _ = diagnosis(open_workdir(workdir))
    return {**found["diagnosis"], "seconds": time.process_time() - began}


def table(cases: list[Case], rows: dict[str, dict[str, Any]]) -> None:
    """Print a line for each run, and the number of right diagnoses."""
    print("| planted | recipe, seed | step, loss | first finding | measured | others | right |")
    print("|---|---|---|---|---|---|---|")
    right = 0
    for case in cases:
        row = rows[case.name]
        first, *others = row["findings"] or [{"cause": "healthy", "measured": "-"}]
        is_right = first["cause"] == case.cause
        right += is_right
        rest = ", ".join(each["cause"] for each in others) or "-"
        print(
            f"| {case.cause}: {case.fault} | {case.recipe}, {case.seed} | {row['step']}, "
            f"{row['loss']:.2f} | {first['cause']} | {first['measured']} | {rest} | "
            f"{'yes' if is_right else 'no'} |"
        )
    print(f"\n{right} of {len(cases)} right")


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tuning", action="store_true", help="the runs that set the limits")
    parser.add_argument("--table", action="store_true", help="print what is there, and run nothing")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    file, rows = options.out / "diagnoses.jsonl", {}
    jax.config.update("jax_compilation_cache_dir", str((options.out / "cache").absolute()))
    for line in file.read_text().splitlines() if file.exists() else ():
        row = json.loads(line)
        rows[row["case"]] = row
    cases = TUNING if options.tuning else FINAL
    for case in cases:
        if case.name not in rows and not options.table:
            rows[case.name] = {"case": case.name, **run(case, options.out)}
            with file.open("a") as out:
                out.write(json.dumps(rows[case.name]) + "\n")
            print(case.name, rows[case.name]["findings"], flush=True)
    table([case for case in cases if case.name in rows], rows)


if __name__ == "__main__":
    main()
