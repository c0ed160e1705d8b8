"""Tagging of words: named entities in any scheme, and plain tags such as parts of speech."""

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
from scipy.special import softmax
from typing_extensions import override

from bert_jax.errors import UserError
from bert_jax.tasks.config import TaggingConfig
from bert_jax.tasks.examples import Data, LabelSet, MissingColumn, TaggedExample, file_name, listed
from bert_jax.tasks.rows import Rows
from bert_jax.tasks.tagging import metrics, schemes, sources
from bert_jax.tasks.tagging.windows import tag_windows
from bert_jax.tasks.task import Examined, HeadKind, LabelSpec, Outputs, Split, SplitScores, Task

_ENTITY_METRICS = ("f1", "precision", "recall", "accuracy")


class TaggingSplit(Split):
    """Sentences of one file, their rows and their scores."""

    _task: "TaggingTask"
    PER_TOKEN = True
    LABELS = "tags"

    def __init__(self, task: "TaggingTask", data: Data[TaggedExample]) -> None:
        self._task = task
        self._windows = tag_windows(
            data.examples,
            task.tokenizer,
            LabelSet(task.spec.labels),
            max_length=task.config.length,
            stride=task.config.tag_stride,
        )
        windows = self._windows.windows
        tokens = [window.ids for window in windows]
        labels = None if data.truth is None else [window.labels for window in windows]
        rows = Rows(tokens, np.array([*map(len, tokens)], np.int32), labels)
        owners = [window.example for window in windows]
        super().__init__(data, rows, task.metrics, self._windows.warnings, owners)

    def _best_constant(self, gold: list[tuple[str, ...]]) -> float:
        """Return the best score if all words, or all sentences, get one tag or entity type."""
        names = self._task.spec.labels
        if self._task.metric == "accuracy":  # O counts like any other tag
            counts = Counter(tag for tags in gold for tag in tags if tag)
            return max(counts[name] for name in names) / counts.total()
        words, sentences = Counter[str](), Counter[str]()
        total = num_words = 0
        for tags in gold:
            found = schemes.entities(tags)
            total, num_words = total + len(found), num_words + len(tags)
            words.update(each.type for each in found if each.end - each.start == 1)
            sentences.update(each.type for each in found if each.end - each.start == len(tags))
        known = {part[1] for name in names if (part := schemes.split_tag(name)) and part[0] != "O"}
        # Hits and predictions if each word, or each sentence, is predicted as one entity.
        constants = [
            (max((hits[kind] for kind in known), default=0), count)
            for hits, count in ((words, num_words), (sentences, len(gold)))
        ]
        if self._task.metric == "recall":
            return max(hits for hits, _ in constants) / max(total, 1)
        if self._task.metric == "precision":
            return max(hits / count for hits, count in constants)
        return 2 * max(hits / (count + total) for hits, count in constants)

    @property
    def unit_names(self) -> tuple[str, Sequence[Hashable]]:
        """Units of confidence intervals: documents if the file marks several, else sentences."""
        documents = [each.document for each in self._examples]
        return ("documents", documents) if len(set(documents)) > 1 else super().unit_names

    def _examine(self, outputs: Outputs, scores: SplitScores) -> Examined:
        predicted, plain = self._predicted(outputs), self._task.spec.scheme == "plain"

        def details() -> dict[str, Any]:
            if plain:
                found = metrics.tag_details(self._gold, predicted, self._task.spec.labels)
            else:
                found = metrics.entity_details(self._gold, predicted, self._best_tags(outputs))
            shares = [softmax(np.asarray(each, np.float64), axis=-1) for each in outputs]
            sure = self._windows.gather([each.max(axis=-1) for each in shares])
            return {**found, "mistakes": metrics.tag_mistakes(self._examples, predicted, sure)}

        grounds = (metrics.tag_grounds if plain else metrics.entity_grounds)(
            self._gold, predicted, self.units
        )
        return Examined(grounds, details)

    def _prediction_files(self, outputs: Outputs, scores: SplitScores) -> Iterator[tuple[str, str]]:
        """Yield predictions.jsonl and predictions.txt.

        predictions.txt has, for each word, the columns of the CoNLL script: the word, the file's
        tag (if any) and the predicted tag, separated by spaces. If a word or a tag contains white
        space, tabs separate the columns, and the white space is written as spaces.
        """
        yield from super()._prediction_files(outputs, scores)
        blocks: list[list[list[str]]] = []
        for example, tags in zip(self._examples, self._predicted(outputs), strict=True):
            columns = [example.tokens, tags]
            if example.tags is not None:
                columns.insert(1, tuple(tag or "_" for tag in example.tags))
            rows = zip(*columns, strict=True)
            blocks.append([[re.sub(r"[\t-\r]", " ", each) for each in row] for row in rows])
        mark = "\t" if any(" " in each for rows in blocks for row in rows for each in row) else " "
        yield "predictions.txt", "\n\n".join("\n".join(map(mark.join, b)) for b in blocks) + "\n"

    def _entries(self, outputs: Outputs, scores: SplitScores) -> Iterable[dict[str, Any]]:
        pairs = zip(self._examples, self._predicted(outputs), strict=True)
        return ({"tokens": example.tokens, "tags": tags} for example, tags in pairs)

    def _predicted(self, outputs: Outputs) -> list[tuple[str, ...]]:
        """Return the predicted tags of each sentence; entity tags are made valid IOB2."""
        found = self._best_tags(outputs)
        if self._task.spec.scheme == "plain":
            return found
        return [schemes.to_tags(schemes.entities(tags), len(tags)) for tags in found]

    def _best_tags(self, outputs: Outputs) -> list[tuple[str, ...]]:
        """Return the most probable tag of each word, whatever its neighbours' tags."""
        best = [np.asarray(logits).argmax(axis=-1) for logits in outputs]
        names = self._task.spec.labels
        return [tuple(names[n] for n in tags) for tags in self._windows.gather(best)]


class TaggingTask(Task[TaggingConfig]):
    """A tagging task (`kind: tagging`). Entity tags are learned, scored and written as IOB2."""

    SPLIT = TaggingSplit
    objective: HeadKind = "tags"

    @override
    def _metrics(self) -> Sequence[str]:
        return ("accuracy",) if self.spec.scheme == "plain" else _ENTITY_METRICS

    @classmethod
    def _read(cls, config: TaggingConfig) -> tuple[LabelSpec, Sequence[Data[TaggedExample]]]:
        read = [_read(config.source(name), config) for name in ("train", "dev")]
        for name, examples in zip((config.train, config.dev), read, strict=True):
            if examples[0].tags is None:
                raise UserError(
                    f"{name}: the column {config.conllu_column} is _ in every line, so there are "
                    "no tags; set task.conllu_column to upos, xpos or deprel"
                )
        is_plain = (
            config.scheme == "plain"
            or _format(config.train, config, with_tags=True) == "conllu"
            or (not config.lenient and schemes.detect_scheme(read[0]) == "plain")
        )
        scheme: Literal["iob2", "plain"] = "plain" if is_plain else "iob2"
        train, dev = (_in_scheme(examples, config, scheme) for examples in read)
        labels = _labels(train, config, scheme)
        if not _tags_of(dev) & set(labels.names):
            raise UserError(
                f"{config.dev}: its tags ({listed(sorted(_tags_of(dev)), 5)}) are not among the "
                f"tags to learn ({listed(labels.names, 5)}); check the column of the tags"
            )
        return LabelSpec(labels.names, scheme=scheme), [Data("train", train), Data("dev", dev)]

    def _read_other(self, source: str, labelled: bool) -> Data[TaggedExample]:
        config, why = self.config, ""
        examples: Sequence[TaggedExample] = ()
        try:
            examples = _in_scheme(_read(source, config), config, self.spec.scheme)
            if met := _tags_of(examples):
                known, some = met & set(self.spec.labels), listed(sorted(met), 5)
                why = "" if known else f"{source}: the model knows none of its tags ({some})"
        except MissingColumn as error:  # raised again below, unless the column of tags is missing
            why = f"{source}: there is no column {error.column!r}"
        except UserError as error:
            if labelled:
                raise
            why = f"{error}".partition("\n")[0]
        if why:
            examples = _read(source, config, with_tags=False)
        notes = (f"{why}, so its words have no tags",) if why else ()
        return Data(file_name(source), examples, warnings=notes)


def _format(source: str, config: TaggingConfig, with_tags: bool) -> str:
    # The default column of words is the first, where CoNLL-U has numbers.
    if config.format == "columns" and config.token_column == 1 and sources.is_conllu(source):
        if with_tags and config.tag_column != TaggingConfig.tag_column:
            raise UserError(
                f"{source} is CoNLL-U, but task.tag_column is {config.tag_column}; set "
                f"task.conllu_column, and task.tag_column to {TaggingConfig.tag_column}"
            )
        return "conllu"
    return config.format


def _read(source: str, config: TaggingConfig, *, with_tags: bool = True) -> list[TaggedExample]:
    match _format(source, config, with_tags):
        case "rows":
            tags = config.tags if with_tags else None
            return sources.read_token_lists(source, config.tokens, tags, config.tag_names)
        case "conllu":
            return sources.read_conllu(source, config.conllu_column if with_tags else None)
        case "wikiann":
            return sources.read_wikiann(source, with_tags=with_tags)
    tag_column = config.tag_column if with_tags else None
    return sources.read_columns(
        source, token_column=config.token_column, tag_column=tag_column, comment=config.comment
    )


def _tags_of(examples: Sequence[TaggedExample]) -> set[str]:
    return {tag for example in examples for tag in example.tags or ()} - {""}


def _labels(
    train: Sequence[TaggedExample], config: TaggingConfig, scheme: Literal["iob2", "plain"]
) -> LabelSet:
    """Return the tags to learn, from the configuration or else from the training data."""
    if not config.labels:
        labels = schemes.tag_labels(train, plain=scheme == "plain")
        if len(labels) < 2:
            raise UserError(
                f"{config.train}: the only tag is {labels.names[0]!r}, from which nothing can be "
                "learned; check the column of the tags"
            )
        return labels
    labels = LabelSet(config.labels)
    where = f"task.labels ({listed(config.labels)})"
    odd = [name for name in config.labels if name[0] not in "OBI" or not schemes.split_tag(name)]
    if scheme == "iob2" and (odd or "O" not in config.labels):
        raise UserError(
            f"{where}: {config.train} has entities, which are learned as IOB2, so list only O and, "
            "for each type, B-TYPE and I-TYPE; or set task.scheme=plain"
        )
    if lacks := sorted(_tags_of(train) - set(config.labels)):
        raise UserError(f"{where} lacks tags of {config.train}: {listed(lacks)}; add them")
    return labels


def _in_scheme(
    examples: Sequence[TaggedExample], config: TaggingConfig, scheme: str
) -> Sequence[TaggedExample]:
    return examples if scheme == "plain" else schemes.convert(examples, lenient=config.lenient)
