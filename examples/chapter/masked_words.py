"""Station 8: a small BERT learns from text alone, then solves four tasks from a few labels.

    python examples/chapter/masked_words.py

Pretraining: French numbers, some words hidden, and the question whether the second number follows
the first. Fine-tuning: one text, two texts, tags and spans, each from 100 labelled rows, with the
pretrained encoder and with a fresh one; either the head learns alone, or all of the network.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import counting as task
import jax
import jax.numpy as jnp
import numpy as np
import optax
from counting import KNOWN, UNSEEN
from number_words import words_of
from station import Asked, asked, learn

from bert_jax.files.pictures import dress, new_figure, write_picture
from bert_jax.model.heads import encode, vocabulary_projection
from bert_jax.model.task_heads import TaskHeadConfig
from bert_jax.objectives.task import TaskObjective

NUM_LABELLED, NUM_UNSEEN = 100, 500
TENS = ("dix", "vingt", "vingts", "trente", "quarante", "cinquante", "soixante", "et")
SPELLED = {tuple(words_of(number)) for number in range(task.LIMIT)}
STARTS = {
    "head only, fresh encoder": "#e2e8f0", "head only, pretrained": "#90cdf4",
    "all, fresh encoder": "#a0aec0", "all, pretrained": "#2b6cb0",
}  # fmt: skip
"""Models: what learns from the labels, where the encoder comes from; and a colour."""


class Task(NamedTuple):
    """A task: its head, and the labels of rows."""

    name: str
    objective: TaskObjective
    labelled: Callable[[np.random.Generator, np.ndarray, int], tuple[Any, np.ndarray]]
    """Function from (random numbers, numbers, count) to rows and labels."""


def main(asked: Asked) -> None:
    """Pretrain, fine-tune four heads from two starts, and print and draw what they get right."""
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, asked.steps))
    params = task.OBJECTIVE.init(jax.random.key(0))
    params, losses = learn(task.loss, params, task.training_rows(asked.steps), optimizer)
    show_pretraining(params)
    print(f"\n{NUM_LABELLED} labelled rows            the head learns     head and encoder learn")
    print(f"right answers              {'fresh  pretrained       ' * 2}".rstrip())
    shares = {}
    for each in TASKS:
        shares[each.name] = fine_tuned(each, params["encoder"], max(1, asked.steps // 10))
        cells = "{:7.1%}{:12.1%}{:12.1%}{:12.1%}".format(*shares[each.name])
        print(f"{each.name:25}{cells}")
    draw(losses, shares, asked)


def show_pretraining(params: Any) -> None:
    """Print what the pretrained model gets right, and a text that it completes."""
    rows = jax.jit(lambda rows: task.OBJECTIVE.prepare(rows, 0))(task.unseen_rows(NUM_UNSEEN))
    sums = jax.jit(lambda rows: task.OBJECTIVE.forward(params, rows, None, None).sums)(rows)
    used = np.asarray(rows["weights"]) > 0
    usual = np.bincount(np.asarray(rows["labels"])[used]).max() / used.sum()
    print(f"hidden words that are right       {sums['mlm_correct'] / sums['mlm_count']:7.1%}")
    print(f"  always the most frequent word   {usual:7.1%}")
    print(f"next sentences that are right     {sums['nsp_correct'] / sums['nsp_count']:7.1%}\n")
    texts = [[["trois", "cent", "[MASK]", "deux"], ["trois", "cent", "vingt", "[MASK]"]]]
    texts += [[["quatre", "[MASK]", "neuf"], ["quatre", "vingt", "[MASK]"]]]
    shown = task.rows_of(texts)

    def chances(rows: Any) -> Any:
        states = encode(task.MODEL, params, rows["tokens"], rows["type_ids"], rows["segment_ids"])
        return jax.nn.softmax(vocabulary_projection(task.MODEL, params, states).logits())

    for tokens, found in zip(shown["tokens"], np.asarray(jax.jit(chances)(shown)), strict=True):
        words = [task.TOKENS[id] for id in tokens if id]
        print(" ".join(words))
        for place in np.flatnonzero(tokens == task.SPECIAL.mask):
            best = found[place].argmax()
            print(f"    {task.TOKENS[best]} {found[place, best]:.0%}")


def fine_tuned(each: Task, encoder: Any, num_steps: int) -> list[float]:
    """Train four models of `STARTS` side by side; return their shares of right unseen labels."""
    random, objective = np.random.default_rng(2), each.objective
    batch = with_labels(*each.labelled(random, KNOWN, NUM_LABELLED))
    fresh = objective.init(jax.random.key(1))
    starts = [fresh, {**fresh, "encoder": encoder}] * 2
    models = jax.tree.map(lambda *leaves: jnp.stack(leaves), *starts)
    trains = jnp.array([0.0, 0.0, 1.0, 1.0])  # whether the encoder learns, too

    def one(params: Any, trains: Any, batch: Any) -> Any:
        kept = jax.tree.map(
            lambda leaf: trains * leaf + (1 - trains) * jax.lax.stop_gradient(leaf),
            params["encoder"],
        )
        kept["pooler"] = params["encoder"]["pooler"]  # a part of the head
        sums = objective.forward({**params, "encoder": kept}, batch, None, None).sums
        return objective.loss(sums, objective.counts(batch))

    def loss(models: Any, batch: Any) -> Any:
        """Add the losses of all models, which share nothing."""
        return jnp.sum(jax.vmap(one, (0, 0, None))(models, trains, batch))

    optimizer = optax.adam(optax.cosine_decay_schedule(2e-3, num_steps))
    models, _ = learn(loss, models, [batch] * num_steps, optimizer)
    rows, labels = each.labelled(random, UNSEEN, NUM_UNSEEN)

    def outputs(params: Any, batch: Any) -> Any:
        return objective.forward(params, batch, None, None).outputs

    logits = np.asarray(jax.jit(jax.vmap(outputs, (0, None)))(models, with_labels(rows, labels)))
    if objective.kind == "span":  # start and end must both be right
        logits = np.where(rows["segment_ids"][:, :, None] > 0, logits, -np.inf)
        return [float(np.mean((model.argmax(1) == labels).all(-1))) for model in logits]
    return [float(np.mean((model.argmax(-1) == labels)[labels >= 0])) for model in logits]


def with_labels(rows: Any, labels: np.ndarray) -> Any:
    """Make a batch of rows and labels."""
    count = len(labels)
    index = np.arange(count, dtype=np.uint32)
    return {**rows, "row_index": index, "labels": labels, "weights": np.ones(count, np.float32)}


def part_of(words: list[str], place: int) -> int:
    """Say which part a word of a number belongs to: an index of `PARTS`."""
    rest = words[place:]
    if "mille" in rest:
        return 0
    if "cent" in rest or "cents" in rest:
        return 1
    return 2 if words[place] in TENS or rest[1:2] in (["vingt"], ["vingts"]) else 3


def exists(random: np.random.Generator, numbers: np.ndarray, count: int) -> Any:
    """Draw numbers; in half of them two neighbouring words change places, and the label is 0."""
    labels = random.integers(0, 2, count)
    return task.rows_of([[number_or_not(random, numbers, label)] for label in labels]), labels


def number_or_not(random: np.random.Generator, numbers: np.ndarray, label: int) -> list[str]:
    """Draw a number and, if the label is 0, swap words so that no number has the result."""
    while True:
        words = words_of(int(random.choice(numbers)))
        if label:
            return words
        at = int(random.integers(0, len(words)))
        words[at : at + 2] = words[at : at + 2][::-1]
        if tuple(words) not in SPELLED:
            return words


def goes_back(random: np.random.Generator, numbers: np.ndarray, count: int) -> Any:
    """Draw two numbers; the label is 1 if the second one comes directly before the first."""
    one, labels = random.choice(numbers, count) + 1, random.integers(0, 2, count)
    two = np.where(labels == 1, one - 1, random.integers(0, task.LIMIT, count))
    texts = [[words_of(a), words_of(b)] for a, b in zip(one.tolist(), two.tolist(), strict=True)]
    return task.rows_of(texts), labels


def parts(random: np.random.Generator, numbers: np.ndarray, count: int) -> Any:
    """Draw numbers; each word has a label, hundreds, tens or units."""
    texts = [words_of(n) for n in random.choice(numbers, count).tolist()]
    labels = np.full((count, task.LENGTH), -1)
    for row, words in enumerate(texts):
        labels[row, 1 : len(words) + 1] = [part_of(words, n) for n in range(len(words))]
    return task.rows_of([[words] for words in texts]), labels


def asked_part(random: np.random.Generator, numbers: np.ndarray, count: int) -> Any:
    """Draw a question for a part and a number; the label is the part's first and last place."""
    drawn, wanted = random.choice(numbers, count), random.integers(0, len(task.PARTS), count)
    texts, labels = [], []
    for number, part in zip(drawn.tolist(), wanted.tolist(), strict=True):
        words = words_of(number)
        places = [3 + n for n in range(len(words)) if part_of(words, n) == part]
        texts.append([[task.PARTS[part]], words])
        labels.append([places[0], places[-1]] if places else [0, 0])  # [CLS]: there is no answer
    return task.rows_of(texts), np.array(labels)


def objective(kind: Any, network: Any, num_labels: int) -> TaskObjective:
    """Make the objective of a head."""
    return TaskObjective(task.MODEL, TaskHeadConfig(network, num_labels, 0.0), kind)


TASKS = (
    Task("one text: is it a number", objective("single_label", "classification", 2), exists),
    Task("two texts: one less", objective("single_label", "classification", 2), goes_back),
    Task("tags: part of each word", objective("tags", "tagging", len(task.PARTS)), parts),
    Task("span: words of a part", objective("span", "span", 2), asked_part),
)


def draw(losses: np.ndarray, shares: dict[str, list[float]], asked: Asked) -> None:
    """Draw the loss of the pretraining and, beside it, what both starts get right."""
    figure = new_figure((9.5, 4.4))
    left, right = figure.subplots(1, 2)
    size = max(1, len(losses) // 50)
    means = losses[: len(losses) // size * size].reshape(-1, size).mean(1)
    left.plot(np.arange(len(means)) * size, means, color="#3182ce")
    left.set(xlabel="steps of the pretraining", ylabel="both losses, nats", ylim=(0, None))
    for number, (name, colour) in enumerate(STARTS.items()):
        values = [each[number] for each in shares.values()]
        places = np.arange(len(values)) + 0.2 * number - 0.3
        bars = right.barh(places, values, 0.19, color=colour, label=name)
        right.bar_label(bars, fmt="{:.0%}", fontsize=7, padding=2)
    right.set_yticks(range(len(shares)), [name.replace(": ", ":\n") for name in shares])
    right.invert_yaxis()
    right.set(xlabel="unseen answers that are right", xlim=(0, 1.15))
    right.legend(fontsize=8, frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1))
    dress(left)
    dress(right, "x")
    right.tick_params(axis="y", labelsize=8)
    write_picture(figure, asked.pictures / "masked_words.png")


if __name__ == "__main__":
    main(asked(__doc__, steps=1500))
