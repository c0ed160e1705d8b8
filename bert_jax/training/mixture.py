"""Corpora of a run that mixes several: their names, the text seen of each, their held-out text."""

from collections.abc import Mapping, Sequence
from typing import Any

from bert_jax.data.mixture import Mixture
from bert_jax.data.pipeline import ExampleStream
from bert_jax.data.store import TokenStore
from bert_jax.run.corpora import amounts, corpus_labels
from bert_jax.training.config import PretrainConfig
from bert_jax.training.corpus import open_corpus

Text = TokenStore | Mixture


class MixedCorpora:
    """Corpora of all phases of a run; none where no phase mixes several."""

    def __init__(self, config: PretrainConfig):
        """Name the corpora; open nothing."""
        phases = range(len(config.training.phases))
        names: list[str] = []
        if any(config.mixture_of(number) for number in phases):
            for number in phases:
                parts = config.mixture_of(number)
                own = config.training.phases[number].corpus or config.data.corpus
                names += [part.corpus for part in parts] or [own]
        self.names: Sequence[str] = tuple(dict.fromkeys(names))
        """Directories, in the order of the phases."""
        self.labels = dict(zip(self.names, corpus_labels(self.names), strict=True))
        """Names in metrics, by directory."""
        self._run = config.data.corpus

    def named(self, texts: Mapping[int, Text], config: PretrainConfig) -> dict[int, Text]:
        """Return the text of phases, in which a phase's own corpus has its name."""
        own = {n: phase.corpus for n, phase in enumerate(config.training.phases) if phase.corpus}
        return {
            number: Mixture((own[number],), (text,), (1.0,))
            if self.names and isinstance(text, TokenStore)
            else text
            for number, text in texts.items()
        }

    def seen(self, stream: ExampleStream, step: int) -> dict[str, Any]:
        """Return the values of a row of metrics for the text that the first steps have read."""
        if not self.names:
            return {}
        found = stream.progress(step)
        labels = [self.labels[each.name or self._run] for each in found]
        return amounts(labels, [each.tokens for each in found], [each.epochs for each in found])

    def heldout(self) -> dict[str, TokenStore]:
        """Open the held-out text of each corpus that has some, by label."""
        stores = {label: open_corpus(name).heldout for name, label in self.labels.items()}
        return {label: store for label, store in stores.items() if store is not None}
