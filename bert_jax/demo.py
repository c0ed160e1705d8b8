"""`bert-jax demo`: the whole way from raw text to filled masks, on text that is already there."""

import dataclasses
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bert_jax.corpus.build import build_corpus, is_corpus, iter_texts
from bert_jax.corpus.pydocs import PythonDocs
from bert_jax.data.store import TokenStore, open_store
from bert_jax.data.tokenizer import Tokenizer, load_tokenizer
from bert_jax.data.wordpiece import train_wordpiece
from bert_jax.infer import MASK, MaskFiller, format_candidates
from bert_jax.training.config import PretrainConfig
from bert_jax.training.report import TrainResult
from bert_jax.training.train import train

VOCAB_SIZE = 8192
HELDOUT_RATE = 0.02
LEAST_GAIN = 0.5
"""Nats that the held-out masked-LM loss must lie below the unigram entropy of the corpus."""
LEAST_NSP_ACCURACY = 0.65
NUM_SENTENCES = 6


def run_demo(config: PretrainConfig, workdir: Path) -> int:
    """Runs the demo in `workdir`; a second run continues what the first one left.

    Returns:
        0 when the model is as good as it must be, 1 when it is not or was stopped.
    """
    began = time.perf_counter()
    _heading(1, "A corpus from the documentation of Python and the installed packages")
    text, vocabulary, corpus = workdir / "text.txt", workdir / "tokenizer", workdir / "corpus"
    _write_text(text)

    _heading(2, f"A WordPiece vocabulary of {VOCAB_SIZE:,} tokens, and the token store")
    if vocabulary.exists():
        print(f"{vocabulary} is there already")
    else:
        train_wordpiece(iter_texts([str(text)]), VOCAB_SIZE).save(vocabulary)
    tokenizer = load_tokenizer(vocabulary)
    if is_corpus(corpus):
        print(f"{corpus} is there already")
    else:
        built = build_corpus([str(text)], tokenizer, corpus, heldout_rate=HELDOUT_RATE)
        print(built.summary())

    _heading(3, "Pretraining: masked words and next sentences")
    data = dataclasses.replace(config.data, corpus=str(corpus))
    run = workdir / "run"
    result = train(dataclasses.replace(config, data=data), run)
    if not result.finished:
        return 0

    _heading(4, "Held-out sentences with one word masked")
    heldout = open_store(corpus / "heldout", tokenizer)
    filler = MaskFiller.load(run)
    examples = itertools.islice(_masked_sentences(heldout, tokenizer), NUM_SENTENCES)
    texts, words = zip(*examples, strict=True)
    for sentence, word, masks in zip(texts, words, filler.fill(texts), strict=True):
        print(f"{sentence}\n    {format_candidates(masks[0])}   (it was: {word})")

    _heading(5, f"Where everything lies, after {(time.perf_counter() - began) / 60:.1f} minutes")
    print(f"text          {text}\ntokenizer     {vocabulary}\ntoken store   {corpus}")
    print(f"checkpoints   {run / 'checkpoints'}\nmetrics       {run / 'metrics.jsonl'}")
    print(f"loss curve    {run / 'loss.png'}\n")
    return _verdict(result, run)


def _heading(number: int, title: str) -> None:
    print(f"\n[{number}/5] {title}", flush=True)


def _write_text(path: Path) -> None:
    """One paragraph a line, a blank line between documents; appears when complete."""
    if path.exists():
        print(f"{path} is there already")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    source = PythonDocs()
    count = 0
    with temporary.open("w", encoding="utf-8") as file:
        for document in source.documents():
            file.write(document + "\n\n")
            count += 1
    temporary.replace(path)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, {count:,} documents")


def _masked_sentences(store: TokenStore, tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    """Sentences spread over the held-out text, each with a whole word masked, and the word."""
    offsets = store.sentence_offsets
    candidates = np.flatnonzero((np.diff(offsets) >= 10) & (np.diff(offsets) <= 24))
    random = np.random.default_rng(0)
    for sentence in random.permutation(candidates):
        ids = np.asarray(store.tokens[offsets[sentence] : offsets[sentence + 1]])
        tokens = [tokenizer.id_to_token(int(i)) for i in ids]
        whole = [
            place
            for place in range(1, len(tokens) - 1)
            if tokens[place].isalpha() and len(tokens[place]) > 2
            and tokens[place + 1][:2] != "##"
        ]  # fmt: skip
        if not whole:
            continue
        place = int(random.choice(whole))
        before, after = tokenizer.decode(ids[:place]), tokenizer.decode(ids[place + 1 :])
        yield f"{before} {MASK} {after}", tokens[place]


def _verdict(result: TrainResult, run: Path) -> int:
    gain = result.baseline - result.eval_metrics["eval/mlm_loss"]
    accuracy = result.eval_metrics["eval/nsp_accuracy"]
    print(
        f"held-out masked-LM loss {gain:.2f} nats below the unigram baseline (at least "
        f"{LEAST_GAIN}), next-sentence accuracy {accuracy:.2f} (at least {LEAST_NSP_ACCURACY})"
    )
    if gain < LEAST_GAIN or accuracy < LEAST_NSP_ACCURACY:
        print("The demo FAILED: the model has not learned what it should have.")
        return 1
    print(
        "\nNext:\n"
        f'  bert-jax fill-mask {run} "This function returns a [MASK] of integers."\n'
        f"  bert-jax replay {run} --step 0 --rows 4\n"
        "  bert-jax tokenizer --input 'my/*.txt' --out work/tokenizer   # your own text, as the "
        "README goes on"
    )
    return 0
