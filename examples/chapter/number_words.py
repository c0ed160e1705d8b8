"""Task of stations 3, 4, 5 and 7: lists of numbers in French words, to be written in digits.

A pair is two rows of ids. A source is [CLS] words [SEP], a target [CLS] digits: [CLS] stands where
a text begins, [SEP] where it ends. No number of the test was in the training.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from station import learn

from bert_jax.data.corpus.numbers import french_words
from bert_jax.model.config import ModelConfig
from bert_jax.model.seq2seq.network import Network, Side
from bert_jax.model.seq2seq.recurrent import RecurrentNetwork
from bert_jax.model.seq2seq.recurrent_layers import RecurrentConfig
from bert_jax.model.seq2seq.search import SearchConfig, search
from bert_jax.objectives.losses import cross_entropy
from bert_jax.objectives.translation import next_tokens

PAD, CLS, SEP = range(3)
UNSEEN, KNOWN = np.split(np.random.default_rng(0).permutation(1000), [100])
"""Numbers of the test and of the training."""
MOST_NUMBERS = 4
ROWS = 64
"""Pairs in a batch."""
THEN, COMMA = "puis", ","
"""Token between the numbers of a source, and between those of a target."""


def words_of(number: int) -> list[str]:
    """Spell a number in French; hyphens only join words and are left out."""
    return re.findall(r"\w+", french_words(number))


WORDS = sorted({word for number in range(1000) for word in words_of(number)})
TOKENS = ["[PAD]", "[CLS]", "[SEP]", *WORDS, THEN, *"0123456789", COMMA]
ID = {token: id for id, token in enumerate(TOKENS)}


MOST_WORDS = MOST_NUMBERS * (max(len(words_of(number)) for number in range(1000)) + 1) - 1
MOST_SIGNS = MOST_NUMBERS * 4 - 1


class Pairs(NamedTuple):
    """Sources and targets, one pair a row."""

    source: Side
    target: Side
    labels: Any
    """The token after each token of the target, which the decoder is to predict."""


def drawn(numbers: np.ndarray, count: int, seed: int) -> list[list[int]]:
    """Draw lists of one, two, three, four, one, two ... numbers."""
    random = np.random.default_rng(seed)
    return [random.choice(numbers, n % MOST_NUMBERS + 1).tolist() for n in range(count)]


def spelled(numbers: list[int]) -> list[str]:
    """Spell a list of numbers: the words of each, with `puis` (then) between them."""
    words = [word for number in numbers for word in (THEN, *words_of(number))]
    return words[1:]


def in_digits(numbers: list[int]) -> str:
    """Write a list of numbers in digits, with commas between them."""
    return COMMA.join(map(str, numbers))


def pairs_of(lists: Sequence[list[int]]) -> Pairs:
    """Make the pairs of lists of numbers."""
    source = side([["[CLS]", *spelled(each), "[SEP]"] for each in lists], MOST_WORDS + 2)
    target = side([["[CLS]", *in_digits(each)] for each in lists], MOST_SIGNS + 1)
    labels = next_tokens(*map(jnp.asarray, target), SEP)
    return Pairs(source, target, np.asarray(labels))


def side(rows: Sequence[Sequence[str]], length: int) -> Side:
    """Make rows of ids, filled up to a length with padding, which belongs to segment 0."""
    tokens, segments = np.zeros((2, len(rows), length), np.int32)
    for row, texts in enumerate(rows):
        tokens[row, : len(texts)] = [ID[text] for text in texts]
        segments[row, : len(texts)] = 1
    return Side(tokens, segments)


def recurrent(width: int, num_layers: int = 1, **settings: Any) -> RecurrentNetwork:
    """Make a network whose states have `width` numbers."""
    model = ModelConfig(
        vocab_size=len(TOKENS), num_positions=MOST_WORDS + 2, hidden_dim=width, num_heads=1,
        num_layers=num_layers, hidden_dropout_rate=0.0, init_std=0.3, dtype="float32",
    )  # fmt: skip
    return RecurrentNetwork(model, RecurrentConfig(**settings))


def trained(network: Network, num_steps: int, rate: float = 5e-3) -> tuple[Any, np.ndarray]:
    """Train a network; return its parameters and the loss of each step in nats per token."""
    lists, random = pairs_of(drawn(KNOWN, 20_000, seed=1)), np.random.default_rng(2)

    def batches() -> Iterator[Pairs]:
        for _ in range(num_steps):
            chosen = random.integers(0, len(lists.labels), ROWS)
            yield jax.tree.map(lambda array, chosen=chosen: array[chosen], lists)

    adam = optax.adam(optax.cosine_decay_schedule(rate, num_steps))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adam)
    return learn(loss_of(network), network.init(jax.random.key(0)), batches(), optimizer)


def loss_of(network: Network) -> Any:
    """Make the loss of a network: -log of the probability of the right next token, in nats."""

    def loss(params: Any, pairs: Pairs) -> Any:
        logits = network.logits(params, pairs.source, pairs.target)
        surprise, _ = cross_entropy(logits, pairs.labels)
        real = pairs.target.segment_ids > 0
        return jnp.sum(surprise * real) / jnp.sum(real)

    return loss


def written(network: Network, params: Any, source: Side, num_beams: int = 1) -> list[str]:
    """Write the digits of sources; with one beam, each the most probable after those before."""
    most = MOST_SIGNS + 1
    found = search(
        network, params, source, np.full(len(source.tokens), most),
        settings=SearchConfig(num_beams=num_beams), max_length=most, begin=CLS, end=SEP,
    )  # fmt: skip
    rows = np.asarray(found.tokens[:, 0]).tolist()
    return ["".join(TOKENS[id] for id in row if id > SEP) for row in rows]


def exact(network: Network, params: Any, num_beams: int = 1) -> list[float]:
    """Compute the shares of unseen lists of 1, 2, 3, 4 numbers that are written without mistake."""
    lists = drawn(UNSEEN, 1000, seed=3)
    answers = written(network, params, pairs_of(lists).source, num_beams)
    right = [answer == in_digits(each) for answer, each in zip(answers, lists, strict=True)]
    return [float(np.mean(right[n::MOST_NUMBERS])) for n in range(MOST_NUMBERS)]


def print_header(title: str) -> None:
    """Print the head of a table of shares."""
    print(
        f"unseen lists without mistake\n{title:26}",
        "1 number",
        "2 numbers",
        "3 numbers",
        "4 numbers",
    )


def print_shares(name: str, shares: Sequence[float]) -> None:
    """Print a row of the table."""
    print(f"{name:24}", *(f"{share:9.1%}" for share in shares))
