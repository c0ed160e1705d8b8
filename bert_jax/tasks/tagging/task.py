"""Tags for words: named entities in any scheme, and tags that are not of entities."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bert_jax.errors import UserError
from bert_jax.files.staging import replace_file
from bert_jax.tasks.config import TaggingConfig, TaskConfig
from bert_jax.tasks.examples import LabelSet, TaggedExample, listed
from bert_jax.tasks.problems import MissingColumn
from bert_jax.tasks.rows import Rows
from bert_jax.tasks.tagging.metrics import entity_scores
from bert_jax.tasks.tagging.schemes import (
    convert,
    detect_scheme,
    entities,
    split_tag,
    tag_labels,
    to_tags,
)
from bert_jax.tasks.tagging.sources import (
    is_conllu,
    read_columns,
    read_conllu,
    read_token_lists,
    read_wikiann,
)
from bert_jax.tasks.tagging.windows import tag_windows
from bert_jax.tasks.task import Learned, Objective, Outputs, describe
from bert_jax.tokenization.tokenizer import Tokenizer


class TaggingTask:
    """A task about words; see `task.Task`.

    Tags of entities are learned, scored and written as IOB2, in whatever scheme the files are.

    Args:
        config: of kind tagging.
        learned: the tags, and whether they are of entities.
        tokenizer: of the model.
        train: training data; None for a task that was restored.
        dev: dev data.
    """

    objective: Objective = "tags"

    def __init__(
        self,
        config: TaskConfig,
        learned: Learned,
        tokenizer: Tokenizer,
        train: Sequence[TaggedExample] | None = None,
        dev: Sequence[TaggedExample] | None = None,
    ) -> None:
        self.config = config
        self.learned = learned
        self.tokenizer = tokenizer
        self.labels = LabelSet(learned.labels)
        self.num_outputs = len(self.labels)
        self.metric = "accuracy" if learned.scheme == "plain" else "f1"
        self._train = None if train is None else TaggingSplit(self, "train", train)
        self._dev = None if dev is None else TaggingSplit(self, "dev", dev)

    @classmethod
    def open(cls, config: TaskConfig, tokenizer: Tokenizer) -> "TaggingTask":
        """Read training and dev data; see `task.open_task`."""
        tagging = config.tagging
        read = [_read(config.source(name), tagging) for name in ("train", "dev")]
        for name, examples in zip((tagging.train, tagging.dev), read, strict=True):
            if examples[0].tags is None:
                raise UserError(
                    f"{name}: the column {tagging.conllu_column} is _ in every line, so there are "
                    "no tags; set task.tagging.conllu_column to upos, xpos or deprel"
                )
        is_plain = (
            tagging.scheme == "plain"
            or _format(tagging.train, tagging) == "conllu"
            or (not tagging.lenient and detect_scheme(read[0]) == "plain")
        )
        scheme: Literal["iob2", "plain"] = "plain" if is_plain else "iob2"
        train, dev = (_in_scheme(examples, tagging, scheme) for examples in read)
        labels = _labels(train, tagging, scheme)
        if not _met(dev) & set(labels.names):
            raise UserError(
                f"{tagging.dev}: no tag ({listed(sorted(_met(dev)), 5)}) is among those to learn "
                f"({listed(labels.names, 5)}); is it the column of the tags?"
            )
        return cls(config, Learned(labels.names, scheme=scheme), tokenizer, train, dev)

    def train_split(self) -> "TaggingSplit":
        """See `task.Task`."""
        if self._train is None:
            raise UserError("a task read from a checkpoint has no training data")
        return self._train

    def dev_splits(self) -> "list[TaggingSplit]":
        """See `task.Task`."""
        if self._dev is None:
            raise UserError("a task read from a checkpoint has no dev data; name a file")
        return [self._dev]

    def open_split(self, source: str, *, labelled: bool = True) -> "TaggingSplit":
        """See `task.Task`."""
        config, why = self.config.tagging, ""
        examples: Sequence[TaggedExample] = ()
        try:
            examples = _in_scheme(_read(source, config), config, self.learned.scheme)
            if met := _met(examples):
                known, some = met & set(self.labels.names), listed(sorted(met), 5)
                why = "" if known else f"{source}: the model knows no tag of it ({some})"
        except MissingColumn as error:  # of another column than the tags' it will be raised again
            why = f"{source}: there is no column {error.column!r}"
        except UserError as error:
            if labelled:
                raise
            why = f"{error}".partition("\n")[0]
        if why:
            examples = _read(source, config, with_tags=False)
        notes = (f"{why}, so its words have no tags",) if why else ()
        name = source if source.startswith("tfds:") else Path(source).name
        return TaggingSplit(self, name, examples, notes)

    def describe(self) -> dict[str, Any]:
        """See `task.Task`."""
        return describe(self.config, self.learned)


class TaggingSplit:
    """Sentences of one file; see `task.Split`."""

    def __init__(
        self,
        task: TaggingTask,
        name: str,
        examples: Sequence[TaggedExample],
        notes: tuple[str, ...] = (),
    ) -> None:
        self._task = task
        self._examples = examples
        self._windows = tag_windows(
            examples,
            task.tokenizer,
            task.labels,
            max_length=task.config.length,
            stride=task.config.tag_stride,
        )
        self.name = name
        self.warnings = (*notes, *self._windows.warnings)
        self._has_tags = all(example.tags is not None for example in examples)
        windows = self._windows.windows
        self.rows = Rows(
            [window.ids for window in windows],
            np.array([len(window.ids) for window in windows], np.int32),
            [window.labels for window in windows] if self._has_tags else None,
        )

    @cached_property
    def constant_score(self) -> float:
        """See `task.Split`; of entities, every word is one, or every sentence."""
        if not self._has_tags:
            return float("nan")
        gold, names = self._gold(), self._task.learned.labels
        if self._task.metric == "accuracy":
            counts = Counter(tag for tags in gold for tag in tags if tag)
            return max(counts[name] for name in names) / counts.total()
        words, sentences = Counter[str](), Counter[str]()
        found = [entities(tags) for tags in gold]
        for tags, some in zip(gold, found, strict=True):
            words.update(each.type for each in some if each.end - each.start == 1)
            sentences.update(each.type for each in some if each.end - each.start == len(tags))
        total = sum(map(len, found))
        known = {part[1] for name in names if (part := split_tag(name)) and part[0] != "O"}
        best_word = max((words[kind] for kind in known), default=0)
        best_sentence = max((sentences[kind] for kind in known), default=0)
        num_words = sum(map(len, gold))
        return 2 * max(best_word / (num_words + total), best_sentence / (len(gold) + total))

    def score(self, outputs: Outputs, saved: Mapping[str, float] | None = None) -> dict[str, float]:
        """See `task.Split`; accuracy is over words."""
        del saved
        gold = self._gold()
        names = ["accuracy"] if self._task.metric == "accuracy" else list(_ENTITY_METRICS)
        if not self._is_finite(outputs):
            return dict.fromkeys(names, float("nan"))
        predicted = self._predicted(outputs)
        if self._task.metric == "accuracy":
            pairs = zip(gold, predicted, strict=True)
            hits = [a == b for g, p in pairs for a, b in zip(g, p, strict=True) if a]
            return {"accuracy": sum(hits) / len(hits)}
        found = entity_scores(gold, predicted)
        overall = found.overall
        values = (overall.f1, overall.precision, overall.recall, found.token_accuracy)
        return dict(zip(names, values, strict=True))

    def write_predictions(
        self, outputs: Outputs, out: Path, scores: Mapping[str, float]
    ) -> list[Path]:
        """Write predictions.jsonl and predictions.txt.

        The latter has a word a line with the tag of the file, where it has one, and the predicted
        one, as the CoNLL script takes it; apart by spaces, or tabs where a word holds a space.
        """
        del scores
        if not self._is_finite(outputs):
            raise UserError(f"{self.name}: outputs are not finite; the model has diverged")
        mark = "\t" if any(" " in word for each in self._examples for word in each.tokens) else " "
        entries: list[str] = []
        blocks: list[str] = []
        for example, tags in zip(self._examples, self._predicted(outputs), strict=True):
            entry = {"id": example.id, "tokens": example.tokens, "tags": tags}
            entries.append(json.dumps(entry, ensure_ascii=False))
            columns = [example.tokens, tags]
            if example.tags is not None:
                columns.insert(1, tuple(tag or "_" for tag in example.tags))
            blocks.append("\n".join(map(mark.join, zip(*columns, strict=True))))
        paths = [Path(out) / "predictions.jsonl", Path(out) / "predictions.txt"]
        for path, lines, between in zip(paths, (entries, blocks), ("\n", "\n\n"), strict=True):
            replace_file(path, (between.join(lines) + "\n").encode())
        return paths

    def _predicted(self, outputs: Outputs) -> list[tuple[str, ...]]:
        """Return the tags of each sentence; those of entities as sound IOB2."""
        best = [np.asarray(logits).argmax(axis=-1) for logits in outputs]
        names = self._task.learned.labels
        found = [tuple(names[n] for n in tags) for tags in self._windows.gather(best)]
        if self._task.learned.scheme == "plain":
            return found
        return [to_tags(entities(tags), len(tags), "iob2") for tags in found]

    def _is_finite(self, outputs: Outputs) -> bool:
        rows = zip(self.rows.tokens, outputs, strict=True)
        return all(np.isfinite(logits[: len(ids)]).all() for ids, logits in rows)

    def _gold(self) -> list[tuple[str, ...]]:
        tags = [example.tags for example in self._examples if example.tags is not None]
        if not self._has_tags:
            raise UserError(f"{self.name} has no tags, so it cannot be scored; predict it")
        return tags


_ENTITY_METRICS = ("f1", "precision", "recall", "accuracy")


def _format(source: str, config: TaggingConfig) -> str:
    # The words of columns are in the first unless said otherwise, where CoNLL-U has numbers.
    if config.format == "columns" and config.token_column == 1 and is_conllu(source):
        return "conllu"
    return config.format


def _read(source: str, config: TaggingConfig, *, with_tags: bool = True) -> list[TaggedExample]:
    format_ = _format(source, config)
    if format_ == "rows":
        return read_token_lists(
            source,
            tokens=config.tokens,
            tags=config.tags if with_tags else None,
            tag_names=config.tag_names or None,
        )
    if format_ == "conllu":
        return read_conllu(source, config.conllu_column if with_tags else None)
    if format_ == "wikiann":
        return read_wikiann(source, with_tags=with_tags)
    return read_columns(
        source,
        token_column=config.token_column,
        tag_column=config.tag_column if with_tags else None,
        comment=config.comment or None,
    )


def _met(examples: Sequence[TaggedExample]) -> set[str]:
    return {tag for example in examples for tag in example.tags or ()} - {""}


def _labels(
    train: Sequence[TaggedExample], config: TaggingConfig, scheme: Literal["iob2", "plain"]
) -> LabelSet:
    """Return the tags to learn: those of the configuration, else those of the training data."""
    if not config.labels:
        labels = tag_labels(train, scheme)
        if len(labels) < 2:
            raise UserError(
                f"{config.train}: the only tag is {labels.names[0]!r}, from which nothing can be "
                "learned; is it the column of the tags?"
            )
        return labels
    labels = LabelSet(config.labels)
    where = f"task.tagging.labels ({listed(config.labels)})"
    odd = [name for name in config.labels if name[:1] not in tuple("OBI") or not split_tag(name)]
    if scheme == "iob2" and (odd or "O" not in config.labels):
        raise UserError(
            f"{where}: {config.train} has entities, which are learned as IOB2: O, and B- and I- "
            "with each type. Write the tags so, or set task.tagging.scheme=plain"
        )
    lacks = sorted(_met(train) - set(config.labels))
    if lacks:
        raise UserError(f"{where} lacks tags of {config.train}: {listed(lacks)}; add them")
    return labels


def _in_scheme(
    examples: Sequence[TaggedExample], config: TaggingConfig, scheme: str
) -> Sequence[TaggedExample]:
    return examples if scheme == "plain" else convert(examples, lenient=config.lenient)
