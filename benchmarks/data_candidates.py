r"""Candidates for the record that change the text: its size, copies, order, and the vocabulary.

    python benchmarks/data_candidates.py --corpus work/novels --text novels.txt \
        --bulk encyclopedia.txt --unseen other_novels.txt --runs work/data

`--corpus` is built from `--text` (`candidates.py` has the commands and explains the budget); a
blank line ends each document. Candidates train on other corpora, which this script builds:

- `half`, `quarter`, `eighth`: every second, fourth or eighth document. All runs have the same
  number of steps, so they read less text more often.
- `copies`: every fifth document is there five times, so four ninths of the text are copies.
- `vocab_4096`, `vocab_16384`: other sizes of the vocabulary.
- `bulk`, `bulk_mixed`, `bulk_then_text`: `--bulk` alone; 20% of the rows from `--text` throughout;
  all of these rows in the last 20% of the steps, at the end of the rate's decay.

Masked losses of different vocabularies cannot be compared. The table's loss is therefore the
negative log-likelihood of a word (nats) in 300 lines of `--unseen`: each token is predicted
behind masks on itself and on the later tokens of its word (`word_l2r` of
`bert-jax evaluate --minimal-pairs`). `masked` is the loss on the held-out documents of `--text`.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from candidates import Row, compare, config_of, run, timed_run

from bert_jax.artefacts.saved.reading import read_model
from bert_jax.config.command_line import config_from
from bert_jax.config.mapping import to_dict
from bert_jax.data.corpus.build import build_corpus, is_corpus, iter_texts
from bert_jax.infer.forward import on_device
from bert_jax.infer.minimal_pairs import pair_scores
from bert_jax.infer.records import Record
from bert_jax.tasks.examples import Origin
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.tokenization.training import train_wordpiece
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import Corpus, open_corpus

HELDOUT_RATE = 0.04
LINES, WORDS = 300, range(8, 41)
"""Number of scored lines, and numbers of words in such a line."""


def every(step: int) -> Callable[[list[str]], list[str]]:
    """Make a function that takes one document of each `step`."""
    return lambda documents: documents[::step]


TEXTS: dict[str, Callable[[list[str]], list[str]]] = {
    "half": every(2),
    "quarter": every(4),
    "eighth": every(8),
    "copies": lambda documents: documents + 4 * documents[::5],
}
VOCABULARIES = {"vocab_4096": 4096, "vocab_16384": 16384}
BULK: dict[str, Callable[[str, str], list[dict[str, Any]]]] = {
    "bulk": lambda text, bulk: [{"corpus": bulk}],
    "bulk_mixed": lambda text, bulk: [
        {"mixture": [{"corpus": bulk, "weight": 0.8}, {"corpus": text, "weight": 0.2}]}
    ],
    "bulk_then_text": lambda text, bulk: [
        {"corpus": bulk, "share": 0.8}, {"corpus": text, "share": 0.2},
    ],
}  # fmt: skip
"""Phases, by the candidate's name."""


def built(out: Path, text: str, tokenizer: Any) -> str:
    """Build a corpus, unless it is there; return its directory."""
    if not is_corpus(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        source = out.with_suffix(".txt")
        source.write_text(text, "utf-8")
        print(build_corpus([str(source)], tokenizer, out, heldout_rate=HELDOUT_RATE).summary())
    return str(out)


def nats_per_word(workdir: Path, unseen: Path) -> float:
    """Return the mean negative log-likelihood of the words of evenly spaced lines."""
    lines = [line for line in unseen.read_text("utf-8").splitlines() if len(line.split()) in WORDS]
    lines = lines[:: len(lines) // LINES][:LINES]
    pairs = [
        Record(Origin(str(unseen), number), {"sentence_good": line, "sentence_bad": line})
        for number, line in enumerate(lines, 1)
    ]
    scores = pair_scores(on_device(read_model(workdir)), pairs)[:, 0, 0]
    return -scores.sum() / sum(len(line.split()) for line in lines)


def with_data(name: str, options: argparse.Namespace, corpus: Corpus) -> Row:
    """Train a candidate, and score it."""
    same = config_of("same", options.corpus, options.seed)
    same = config_from(PretrainConfig, same, {"objective": {"name": "masked_lm"}})
    corpora, workdir = options.runs / "corpora", options.runs / f"{name}-{options.seed}"
    if name in VOCABULARIES:
        tokenizer = train_wordpiece(iter_texts([str(options.text)]), VOCABULARIES[name])
        own = built(corpora / name, options.text.read_text("utf-8"), tokenizer)
        config = config_from(PretrainConfig, same, {"data.corpus": own})
        row = timed_run(config, same, options.steps, workdir, corpus, open_corpus(own))
    else:
        shape = to_dict(same.training.phases[0])
        phases = [shape | phase for phase in phases_of(name, options, corpora)]
        config = config_from(PretrainConfig, same, {"training.phases": phases})
        row = run(config, options.steps, workdir)
    return row | {"loss": nats_per_word(workdir, options.unseen), "masked": row["loss"]}


def phases_of(name: str, options: argparse.Namespace, corpora: Path) -> list[dict[str, Any]]:
    """Build the corpora of a candidate with the vocabulary of `same`; return its phases."""
    if name == "same":
        return [{}]
    tokenizer = load_tokenizer(Path(options.corpus) / "train" / "tokenizer")
    if name in BULK:
        bulk = built(corpora / "bulk", options.bulk.read_text("utf-8"), tokenizer)
        return BULK[name](options.corpus, bulk)
    documents = TEXTS[name](options.text.read_text("utf-8").split("\n\n"))
    return [{"corpus": built(corpora / name, "\n\n".join(documents), tokenizer)}]


if __name__ == "__main__":
    names = ["same", *TEXTS, *VOCABULARIES, *BULK]
    sys.exit(compare(__doc__, names, with_data, further=("text", "bulk", "unseen")))
