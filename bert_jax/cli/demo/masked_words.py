"""`bert-jax demo`: from the documentation of Python, as raw text, to filled masks."""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bert_jax.artefacts.saved.reading import read_model
from bert_jax.cli.demo.console import build_once, config_there, heading, make_once, verdict
from bert_jax.config.command_line import load_config, overridden
from bert_jax.data.corpus.build import iter_texts
from bert_jax.data.corpus.kinds.pydocs import PythonDocs
from bert_jax.data.store import TokenStore, open_store
from bert_jax.errors import UserError, signal_code
from bert_jax.files.staging import staged_file
from bert_jax.infer.loaded import LoadedModel
from bert_jax.model.config import ModelConfig
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.tokenization.masks import MASK
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.tokenization.training import train_wordpiece
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.train import train
from bert_jax.training.run_plan import Result
from bert_jax.training.steps.optim import OptimizerConfig

VOCAB_SIZE = 4096
HELDOUT_RATE = 0.03
NUM_SENTENCES = 6
_PAIRS = next(metric for metric in MaskedLM.metrics_of(pairs=True) if metric.floor)
"""Metric of sentence pairs; its floor is the share of the more frequent answer."""


class Recipe(NamedTuple):
    """A configuration, and the scores on held-out text that its run must reach."""

    config: str
    least_gain: float
    """Nats by which the masked-LM loss must lie below the corpus's unigram entropy."""
    least_pair_accuracy: float
    """Smallest accepted accuracy in the classification of sentence pairs."""


RECIPES = {
    # Three seeds reached accuracies of 0.65 to 0.67; the standard error of 1,024 pairs is 0.015.
    "modern": Recipe("configs/pretrain/demo.py", 1.5, 0.62),
    "bert": Recipe("configs/pretrain/demo_bert.py", 0.5, 0.65),
}


def run_demo(recipe: Recipe, workdir: Path) -> int:
    """Run the demo in `workdir`. A second call continues an unfinished run.

    Return 0 if the model is good enough or if SIGTERM stopped the run, 130 if Ctrl-C stopped it
    (a stopped run is saved), and 1 if the model has not learned enough. Raise a `UserError` if
    `workdir` cannot be used, or holds a run of another configuration.
    """
    began = time.perf_counter()
    config, run = load_config(PretrainConfig, recipe.config), workdir / "run"
    if _PAIRS not in config.metrics:
        raise UserError(
            f"{recipe.config}: data.pairing is {config.data.pairing!r} and objective.name is "
            f"{config.objective.name!r}, but the demo judges masked words and pairs of sentences; "
            "set data.pairing to 'nsp' or 'sop', and objective.name to 'masked_lm'"
        )
    _refuse_other_recipe(config, run)
    heading(1, "A corpus from the documentation of Python and the installed packages")
    text, vocabulary, corpus = workdir / "text.txt", workdir / "tokenizer", workdir / "corpus"
    make_once(text, lambda: _write_text(text))

    heading(2, f"A WordPiece vocabulary of {VOCAB_SIZE:,} tokens, and the token store")
    documents = iter_texts([str(text)])
    make_once(vocabulary, lambda: train_wordpiece(documents, VOCAB_SIZE).save(vocabulary))
    build_once([str(text)], vocabulary, corpus, HELDOUT_RATE)
    tokenizer = load_tokenizer(vocabulary)

    heading(3, "Pretraining: masked words and next sentences")
    result = train(overridden(config, [f"--config.data.corpus={corpus}"]), run)
    if not result.finished:
        return signal_code(result.stopped_by)

    heading(4, "Held-out sentences with one word masked")
    heldout = open_store(corpus / "heldout", tokenizer)
    examples = itertools.islice(_masked_sentences(heldout, tokenizer), NUM_SENTENCES)
    texts, words = zip(*examples, strict=True)
    answers = LoadedModel(read_model(run)).fill_mask(texts)
    for sentence, word, answer in zip(texts, words, answers, strict=True):
        candidates = [f"{each['token']} {each['probability']:.3f}" for each in answer["masks"][0]]
        print(f"{sentence}\n    {'   '.join(candidates)}   (it was: {word})")

    heading(5, f"Where everything lies, after {(time.perf_counter() - began) / 60:.1f} minutes")
    print(f"text          {text}\ntokenizer     {vocabulary}\ntoken store   {corpus}")
    print(f"checkpoints   {run / 'checkpoints'}\nmetrics       {run / 'metrics.jsonl'}")
    print(f"loss curve    {run / 'loss.png'}\n")
    return _verdict(result, corpus, recipe)


def _refuse_other_recipe(config: PretrainConfig, run: Path) -> None:
    """Raise UserError if `run` holds a run of another recipe, before anything is built."""
    there = config_there(config, run)
    if there is None or _model_and_optimizer(there) == _model_and_optimizer(config):
        return
    for name, recipe in RECIPES.items():
        known = load_config(PretrainConfig, recipe.config)
        if _model_and_optimizer(there) == _model_and_optimizer(known):
            raise UserError(
                f"{run} holds a run of the recipe {name!r}; give --recipe={name} to continue that "
                "run, or another --workdir"
            )


def _model_and_optimizer(config: PretrainConfig) -> tuple[ModelConfig, OptimizerConfig]:
    return config.with_vocabulary(VOCAB_SIZE).model, config.optimizer


def _write_text(path: Path) -> str:
    """Write each paragraph as a line, and a blank line after each document; return a summary."""
    count = 0
    with staged_file(path) as file:
        for document in PythonDocs().texts():
            file.write(f"{document}\n\n".encode())
            count += 1
    return f"{path}: {path.stat().st_size / 1e6:.1f} MB, {count:,} documents"


def _masked_sentences(store: TokenStore, tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    """Yield random held-out sentences, each with one whole word masked, and the masked words."""
    shard = store.shards[0]
    offsets = shard.sentence_offsets
    candidates = np.flatnonzero((np.diff(offsets) >= 10) & (np.diff(offsets) <= 24))
    random = np.random.default_rng(0)
    for sentence in random.permutation(candidates):
        ids = np.asarray(shard.tokens[offsets[sentence] : offsets[sentence + 1]])
        tokens = [tokenizer.id_to_token(int(i)) for i in ids]
        whole = [
            word
            for word in range(1, len(tokens) - 1)
            if tokens[word].isalpha() and len(tokens[word]) > 2
            and tokens[word + 1][:2] != "##"
        ]  # fmt: skip
        if not whole:
            continue
        word = int(random.choice(whole))
        before, after = tokenizer.decode(ids[:word]), tokenizer.decode(ids[word + 1 :])
        yield f"{before} {MASK} {after}", tokens[word]


def _verdict(result: Result, corpus: Path, recipe: Recipe) -> int:
    values = result.eval_metrics
    if "eval/nats_below_unigram" not in values:
        raise UserError(
            f"{result.workdir}/metrics.jsonl has lost the run's last evaluation; delete "
            f"{result.workdir} and run the demo again"
        )
    gain = values["eval/nats_below_unigram"]
    accuracy, majority = values[f"eval/{_PAIRS.name}"], values[f"eval/{_PAIRS.floor}"]
    print(
        f"held-out masked-LM loss {gain:.2f} nats below the unigram baseline (at least "
        f"{recipe.least_gain})\nnext-sentence accuracy {accuracy:.2f} (at least "
        f"{recipe.least_pair_accuracy}, and above the {majority:.2f} of always giving the more "
        "frequent answer)"
    )
    learned_pairs = accuracy >= recipe.least_pair_accuracy and accuracy > majority
    commands = _next_commands(Path(result.workdir), corpus, recipe)
    learned = gain >= recipe.least_gain and learned_pairs
    return verdict(learned, commands, "To use your own text, see the README.")


def _next_commands(run: Path, corpus: Path, recipe: Recipe) -> list[list[str]]:
    return [
        ["fill-mask", str(run), f"This function returns a {MASK} of integers."],
        ["replay", str(run), "--step", "0", "--rows", "4"],
        [
            "pretrain", f"--config={recipe.config}", f"--workdir={run.with_name('longer')}",
            f"--config.data.corpus={corpus}", "--config.training.num_steps=10000",
        ],
    ]  # fmt: skip
