"""A tiny run of each architecture and kind of task, and what becomes of it in each format."""

import dataclasses
import json
import textwrap
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from asked_models import write_lines
from conformance_files import check_of
from export_models import tokenizer_of
from one_shard import StoreWriter
from scipy.special import expit, softmax
from small_finetuning import use_devices
from small_saved import FAMILIES

from bert_jax.artefacts.exchange.conformance.check import INPUTS
from bert_jax.artefacts.exchange.export import FORMATS, export, held, refusal_lines, refusals
from bert_jax.artefacts.exchange.onnx import runtime
from bert_jax.artefacts.exchange.proof import PROOF_TEXTS, Batch, logits_of
from bert_jax.artefacts.exchange.theirs import missing
from bert_jax.artefacts.formats.peft import read_adapter
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.artefacts.saved.reading import read_adapted, read_model
from bert_jax.config.mapping import build
from bert_jax.data.store import TokenStore
from bert_jax.distributed.checkpoint.storage import read_tree
from bert_jax.distributed.parallel.sharding import make_mesh
from bert_jax.errors import UserError
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.finetune.setup import set_up
from bert_jax.training.finetune.train import finetune
from bert_jax.training.finetune.voice import planned_model
from bert_jax.training.pretrain import train as pretraining
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import Corpus
from bert_jax.training.pretrain.settings import objective_of
from bert_jax.training.pretrain.voice import planned_models

TOKENIZER = tokenizer_of("uncased")
WORDS = sorted({word.strip(".,;") for text in PROOF_TEXTS[:3] for word in text.split()})
_ELECTRA = {"embedding_dim": 4, "pooler_activation": "gelu"}
_TRANSLATOR = {
    "positions": "sinusoidal", "scale_embeddings": True, "norm_eps": 1e-5, "num_types": 0,
    "embedding_norm": False, "head_transform": False, "activation": "relu", "pooler": False,
}  # fmt: skip


class Architecture(NamedTuple):
    """A recipe of pretraining: fields of the model, the objective, and the text's pairing."""

    model: Mapping[str, Any] = {}
    objective: Mapping[str, Any] = {}
    pairing: str = "none"

    @property
    def translates(self) -> bool:
        return self.pairing == "translation"


ARCHITECTURES = {
    "BERT": Architecture(pairing="nsp"),
    "ELECTRA": Architecture(_ELECTRA, {"name": "replaced_tokens", "generator_size": 0.5}),
    "ModernBERT": Architecture({**FAMILIES["modernbert"], "attention_pattern": "GL"}),
    "NeoBERT": Architecture(FAMILIES["neobert"]),
    "EuroBERT": Architecture(FAMILIES["eurobert"]),
    "DeBERTa": Architecture(
        FAMILIES["deberta-v2"],
        {"name": "replaced_tokens", "generator_size": 0.5, "disentangled": True},
    ),
    "Encoder-decoder": Architecture(_TRANSLATOR, {"name": "translation"}, "translation"),
    "Recurrent seq2seq": Architecture({}, {"name": "recurrent_translation"}, "translation"),
}


def pretrain_config(architecture: Architecture) -> PretrainConfig:
    """Two steps of a model of one layer, 16 wide; ModernBERT has a local layer, too."""
    sizes = {
        "num_positions": 40, "hidden_dim": 16, "num_heads": 2, "mlp_dim": 24, "init_std": 0.05,
        "dtype": "float32",
    }  # fmt: skip
    layers = 2 if "attention_pattern" in architecture.model else 1
    return build(PretrainConfig, {
        "model": {**sizes, **architecture.model, "num_layers": layers},
        "objective": architecture.objective,
        "data": {"pairing": architecture.pairing},
        "training": {"num_steps": 2, "phases": [{"length": 32, "batch_size": 4}]},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 1},
    })  # fmt: skip


def write_corpus(path: Path, pairs: bool) -> TokenStore:
    """Documents of the words of proof texts or, for translation, pairs of such sentences."""
    random = np.random.default_rng(0)
    with StoreWriter(path, TOKENIZER) as writer:
        for _ in range(40):
            count = 2 if pairs else 6
            rows = [TOKENIZER.encode(" ".join(random.choice(WORDS, 4))).ids for _ in range(count)]
            ends = np.array([len(rows)])
            writer.append(np.concatenate(rows), np.array([*map(len, rows)]), ends)
        return writer.store(**({"pairs": True, "target_entropy": 5.0} if pairs else {}))


def _texts(count: int) -> list[str]:
    random = np.random.default_rng(1)
    return [" ".join(random.choice(WORDS, random.integers(2, 12))) for _ in range(count)]


def _labelled(home: Path, label: Callable[[int], Any], **fields: Any) -> dict[str, Any]:
    rows = [{"text": text, "label": label(n)} for n, text in enumerate(_texts(12))]
    return {"kind": "table", "train": write_lines(home / "rows.jsonl", rows), **fields}


def one_class(home: Path) -> dict[str, Any]:
    """One class of a pair of texts, as a reranker has."""
    rows = [
        {"text": one, "text_pair": other, "label": ("no", "yes")[n % 2]}
        for n, (one, other) in enumerate(zip(_texts(12), reversed(_texts(12)), strict=True))
    ]
    file = write_lines(home / "pairs.jsonl", rows)
    return {"kind": "table", "train": file, "text_pair": "text_pair"}


def several_labels(home: Path) -> dict[str, Any]:
    return _labelled(home, lambda n: ("a", "b", "a,b")[n % 3], problem_type="multi_label")


def number(home: Path) -> dict[str, Any]:
    return _labelled(home, lambda n: 3.0 + n % 4, problem_type="regression")


def tags(home: Path) -> dict[str, Any]:
    path = home / "tags.txt"
    words = [[f"{word} {('O', 'B-X')[len(word) % 2]}" for word in each.split()]
             for each in _texts(12)]  # fmt: skip
    path.write_text("\n\n".join("\n".join(each) for each in words) + "\n")
    return {"kind": "tagging", "train": str(path)}


def span(home: Path) -> dict[str, Any]:
    path = home / "questions.json"
    questions = [
        {"context": text, "qas": [{
            "id": f"{n}", "question": WORDS[n], "is_impossible": False,
            "answers": [{"text": text.split()[0], "answer_start": 0}],
        }]}
        for n, text in enumerate(_texts(12))
    ]  # fmt: skip
    path.write_text(json.dumps({"data": [{"title": "", "paragraphs": questions}]}))
    return {"kind": "squad", "train": str(path), "max_question": 8, "stride": 4}


def choice(home: Path) -> dict[str, Any]:
    rows = [
        {"sent1": text, "sent2": "", "a": "early", "b": "the river", "label": n % 2}
        for n, text in enumerate(_texts(12))
    ]
    file = write_lines(home / "choices.jsonl", rows)
    return {"kind": "choice", "train": file, "choices": ["a", "b"]}


def trees(home: Path) -> dict[str, Any]:
    path = home / "trees.conllu"
    sentences = [
        "".join(
            f"{n}\t{word}" + "\t_" * 4 + f"\t{n - 1}\t{'dep' if n > 1 else 'root'}\t_\t_\n"
            for n, word in enumerate(text.split(), 1)
        )
        for text in _texts(12)
    ]
    path.write_text("\n".join(sentences) + "\n")
    return {"kind": "parsing", "train": str(path)}


def vectors(home: Path) -> dict[str, Any]:
    rows = [{"query": text, "document": f"the {text}"} for text in dict.fromkeys(_texts(12))]
    return {"kind": "embedding", "train": write_lines(home / "texts.jsonl", rows)}


TASKS: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    "class": one_class, "labels": several_labels,
    "number": number, "tags": tags, "span": span, "choice": choice, "parser": trees,
    "vectors": vectors,
}  # fmt: skip
LOW_RANK = ("class", "labels", "number", "tags", "span")
"""Tasks for which PEFT has a type; their runs train low-rank updates, others all weights."""


def finetune_config(task: str, init: Path, home: Path) -> FinetuneConfig:
    """An epoch of three steps."""
    home.mkdir(parents=True, exist_ok=True)
    section = TASKS[task](home)
    return build(FinetuneConfig, {
        "task": {"max_length": 32, "dev": section["train"], **section},
        "init": str(init),
        "training": {"num_epochs": 1.0, "batch_size": 4, "eval_batch_size": 12, "max_buckets": 1},
        "optimizer": {"learning_rate": 5e-4},
        "lora": {"rank": 2 * (task in LOW_RANK)},
    })  # fmt: skip


def planned(name: str, home: Path) -> dict[str, dict[str, str]]:
    """The cells of an architecture's table before any run has trained."""
    config = pretrain_config(ARCHITECTURES[name]).with_vocabulary(TOKENIZER.vocab_size)
    found = planned_models(config, objective_of(config), TOKENIZER)
    rows = {name: cells(saved) for name, saved in zip(named(name), found.values(), strict=True)}
    random, (first, *_) = np.random.default_rng(0), found.values()
    shapes = jax.eval_shape(objective_of(config).init, jax.random.key(0))
    arrays = jax.tree.map(lambda a: random.normal(0, 0.3, a.shape).astype(np.float32), shapes)
    initial = dataclasses.replace(first, params={part: arrays[part] for part in first.params})
    for task in TASKS:
        config = finetune_config(task, home / "base", home / task)
        try:
            rows[task] = cells(planned_model(set_up(config, lambda *_, **__: initial)))
        except UserError as error:
            rows[task] = refused(error)
    return rows


def named(name: str) -> tuple[str, ...]:
    """Rows of the models of an architecture's pretraining run, which are its parts if several."""
    if ARCHITECTURES[name].objective.get("name") == "replaced_tokens":
        return "discriminator", "generator"
    return ("translation" if ARCHITECTURES[name].translates else "pretraining",)


def refused(error: UserError) -> dict[str, str]:
    """Cells of a run that is refused itself; the message begins with the model's name."""
    return dict.fromkeys(FORMATS, f"{error}".partition(": ")[2])


class Run(NamedTuple):
    """A run, the lines that it printed, and its models by row of the table."""

    path: Path
    said: list[str]
    models: dict[str, SavedModel]
    refused: dict[str, dict[str, str]]
    """Cells by row, if the run was refused."""

    @property
    def parts(self) -> dict[str, str]:
        """The name of each model for `export`."""
        return {row: row if len(self.models) > 1 else "" for row in self.models}


def pretrained(name: str, home: Path) -> Run:
    """Pretrain an architecture on one device."""
    config, rows, said = pretrain_config(ARCHITECTURES[name]), named(name), list[str]()
    store, path = write_corpus(home / "corpus", ARCHITECTURES[name].translates), home / "base"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretraining, "make_mesh", lambda c: make_mesh(c, jax.devices()[:1]))
        pretraining.train(config, path, corpus=Corpus(store, None), echo=said.append)
    parts = rows if len(rows) > 1 else ("",)
    models = [read_model(path, part=part) for part in parts]
    return Run(path, said, dict(zip(rows, models, strict=True)), {})


def finetuned(task: str, base: Run, home: Path) -> Run:
    """Train a task on one device."""
    said, path = list[str](), home / "run"
    with pytest.MonkeyPatch.context() as patch:
        use_devices(patch, 1)
        try:
            finetune(finetune_config(task, base.path, home), path, echo=said.append)
        except UserError as error:
            return Run(path, said, {}, {task: refused(error)})
    return Run(path, said, {task: read_model(path)}, {})


def cells(saved: SavedModel) -> dict[str, str]:
    """What becomes of a model in each format: a reason, or what the export holds."""
    whole = {format: saved.params.keys() <= held(saved, format).params.keys() for format in FORMATS}
    return {f: "proven" if whole[f] else "encoder" for f in FORMATS} | refusals(saved)


def proven(run: Run, base: Run) -> dict[str, dict[str, str]]:
    """Export a run in each format, and compare; return its rows of the table."""
    told = [line for line in run.said if line.startswith("exports")]
    assert told == refusal_lines(run.models)
    begun = (n for n, line in enumerate(run.said) if line.startswith("step 1/"))
    assert {*told} <= {*run.said[: next(begun, None)]}
    assert run.models or not run.path.exists()
    for row, part in run.parts.items():
        check_exits(run.models[row], run.path, part, base)
    return {row: cells(saved) for row, saved in run.models.items()} | run.refused


def check_exits(saved: SavedModel, run: Path, part: str, base: Run) -> None:
    """Export a model in each format, which must do what `cells` says."""
    for format, cell in cells(saved).items():
        out = run / f"{part} {format}"
        if cell in ("proven", "encoder"):
            parity = export(run, format, out, part=part, name="run", tolerance=1e-5)
            assert max(parity["differences"].values(), default=0.0) <= 1e-5
            check_answers(held(saved, format), format, out, base)
            continue
        with pytest.raises(UserError) as caught:
            export(run, format, out, part=part)
        assert cell in f"{caught.value}"
        assert not out.exists()


def check_answers(saved: SavedModel, format: str, out: Path, base: Run) -> None:
    """Compare a run and its export on texts of mixed length: the answers, and probabilities."""
    runs = format in ("onnx", "stablehlo") or not missing("torch", "transformers")
    if (out / "conformance/check.py").exists() and runs:
        assert check_of(out).main() == 0
    if saved.network is not None:  # `prove` has compared translations
        return
    outputs = reader(saved, format, out, base)
    for batch in json.loads((out / "conformance/cases.json").read_text())["batches"].values():
        zeros = np.zeros_like(batch["input_ids"])
        rows = Batch(*(np.array(batch.get(name, zeros), np.int32) for name in INPUTS))
        source, found = logits_of(saved, rows), outputs(rows)
        for name in source.keys() - {"hidden", "pooled"}:
            for ours, theirs, tokens in zip(
                source[name], np.asarray(found[name]), rows.segment_ids, strict=True
            ):
                place = (slice(int(tokens.sum())),) * max(1, ours.ndim - 1)
                place = place if ours.ndim > 1 else ...
                assert_same_answer(saved, name, ours[place], theirs[place])


def assert_same_answer(saved: SavedModel, name: str, ours: np.ndarray, theirs: np.ndarray) -> None:
    """Vectors and scores to 1e-5; of logits the probabilities, and the same best one."""
    objective = "" if saved.outputs is None or name != "head" else saved.outputs.objective
    axis = 0 if objective == "span" else -1
    if ours.shape[-1] == 1 or objective == "multi_label":
        answers = [(expit(each), each > 0) for each in (ours, theirs)]
    elif name == "embedding":
        answers = [(each, ()) for each in (ours, theirs)]
    else:
        answers = [(softmax(each, axis), each.argmax(axis)) for each in (ours, theirs)]
    (expected, best), (probabilities, same) = answers
    np.testing.assert_allclose(probabilities, expected, atol=1e-5, rtol=0)
    np.testing.assert_array_equal(same, best)


def reader(
    saved: SavedModel, format: str, out: Path, base: Run
) -> Callable[[Batch], Mapping[str, Any]]:
    """An export as a function of rows, from its files."""
    if format == "onnx":
        return runtime.program(saved, out)
    if format == "stablehlo":
        _, run = check_of(out).by_stablehlo(out, {})
        return lambda rows: run(dict(zip(INPUTS, rows, strict=True)))
    if format == "orbax":
        return partial(logits_of, dataclasses.replace(saved, params=read_tree(out / "params")))
    if format == "peft":
        written = base.path.parent / "written"
        if not written.exists():
            export(base.path, "huggingface", written, part=next(iter(base.parts.values())))
        return partial(logits_of, read_adapted(read_adapter(out, written)))
    return partial(logits_of, read_model(out))


def section(name: str, rows: Mapping[str, Mapping[str, str]]) -> str:
    """An architecture's part of the page: the table, and the reasons of each refusal."""
    lines = [
        f"## {name}",
        "",
        "| | " + " | ".join(FORMATS) + " |",
        "|---" * (1 + len(FORMATS)) + "|",
    ]
    reasons: dict[str, dict[str, list[str]]] = {}
    for row, found in rows.items():
        kept = {f: cell if cell in ("proven", "encoder") else "no" for f, cell in found.items()}
        lines.append(f"| {row} | " + " | ".join(kept[format] for format in FORMATS) + " |")
        for format in FORMATS:
            if kept[format] == "no":
                reasons.setdefault(found[format], {}).setdefault(format, []).append(row)
    lines.append("")
    for why, formats in reasons.items():
        places: dict[str, list[str]] = {}
        for format, named in formats.items():
            which = "all" if len(named) == len(rows) > 1 else ", ".join(named)
            places.setdefault(which, []).append(format)
        said = "; ".join(f"{named} to {', '.join(each)}" for named, each in places.items())
        lines += textwrap.wrap(f"- {said}: {why}.", 118, subsequent_indent="  ")
    return "\n".join(lines) + "\n"
