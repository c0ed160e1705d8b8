"""Translation of texts, with scores and, on request, more hypotheses and word attention."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer
from typing_extensions import override

from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.errors import UserError
from bert_jax.infer.predictor import MAX_TOKENS, Answer, Prepared, TextPredictor
from bert_jax.model.seq2seq.network import Network, Side, Tree
from bert_jax.model.seq2seq.search import Found, Prefix, SearchConfig, search
from bert_jax.tasks.examples import TextExample
from bert_jax.tasks.rows import Batch, Rows
from bert_jax.tasks.translation import decoded
from bert_jax.tokenization.tokenizer import Tokenizer, make_row, num_special


@dataclass(eq=False)
class Translator(TextPredictor):
    """Predictor of translations by beam search. `LoadedModel.translate` describes the options.

    A row is the source, then the prefix. The translation of a text without tokens is empty.
    """

    FIELDS = ("text", "prefix")
    CHUNK = 512

    batch_tokens: int = field(default=2 * MAX_TOKENS, kw_only=True)
    """Largest batch, in tokens: twice an encoder's, for a faster search (docs/experiments.md)."""
    search: SearchConfig = field(default_factory=SearchConfig)
    alignments: bool = False

    def __post_init__(self) -> None:
        self.model.require("translate", "decoder")
        self.num_cut = 0

    @override
    def prepare(self, examples: Sequence[TextExample]) -> Prepared[TextExample]:
        tokenizer, limit = self.model.tokenizer, self.model.max_length
        sources = tokenizer.encode_batch([example.text.strip() for example in examples])
        prefixes = tokenizer.target.encode_batch([example.text_pair or "" for example in examples])
        rows, starts, numbers, cut = [], [], [], []
        for number, (source, prefix) in enumerate(zip(sources, prefixes, strict=True)):
            if not len(source):
                continue
            room = limit - num_special(tokenizer, pair=False) - len(prefix)
            if room < 1:
                raise UserError(
                    f"{examples[number].origin}: the prefix has {len(prefix)} tokens, but "
                    f"{self.model.name} takes {limit} for both source and prefix; shorten the "
                    "prefix"
                )
            if len(source) > room:
                cut.append(number)
            first = make_row(tokenizer, source[:room]).ids
            rows.append(np.concatenate([first, prefix]).astype(np.int32))
            starts.append(len(first))
            numbers.append(number)
            if (most := int(self.search.limits(len(rows[-1]), limit))) < len(prefix):
                told = f"the prefix has {len(prefix)} tokens; max_length and its rate allow {most}"
                raise UserError(f"{examples[number].origin}: {told}")
        said = f"texts are longer than {limit} tokens, including special tokens,"
        found = Rows(rows, np.array(starts, np.int32))
        return Prepared(examples, found, context=numbers, cut=cut, limit=said)

    @override
    def forward(self, batch: Batch) -> Any:
        assert self.model.network is not None  # `require` checks it
        real, second = batch["segment_ids"] > 0, batch["type_ids"] > 0
        length = real.shape[1]
        limits = self.search.limits(real.sum(1), self.model.max_length)
        source = Side(jnp.asarray(batch["tokens"]), jnp.asarray(real & ~second, jnp.int32))
        prefix = None
        if second.any():
            order = np.argsort(~second, axis=1, kind="stable")
            tokens = np.take_along_axis(batch["tokens"], order, 1)
            prefix = Prefix(jnp.asarray(tokens), jnp.asarray(second.sum(1)))
        special = self.model.tokenizer.special_ids
        found = search(
            self.model.network, self.model.params, source, limits, prefix,
            settings=self.search, begin=special.cls, end=special.sep,
            max_length=int(self.search.limits(length, self.model.max_length)),
        )  # fmt: skip
        best = Found(*(part[:, : self.search.nbest] for part in found))
        # A slot without a hypothesis has length 0 and the score -inf. Set the score to 0, since
        # `outputs` rejects values that are not finite; slot 0 must always have a hypothesis.
        missing = best.lengths.at[:, 0].set(1) == 0
        best = best._replace(scores=jnp.where(missing, 0.0, best.scores))
        if not self.alignments:
            return best, ()
        first = found.tokens[:, 0], found.lengths[:, 0]
        network, params = self.model.network, self.model.params
        return best, (mean_attention(network, params, source, *first, special.cls),)

    @override
    def answers(self, prepared: Prepared[TextExample], outputs: Sequence[Any]) -> list[Answer]:
        empty: Answer = {"translation": "", "score": 0.0}
        more = {"candidates": [empty]} if self.search.nbest > 1 else {}
        more |= {"attention": []} if self.alignments else {}
        answers: list[Answer] = [{**empty, **more} for _ in prepared.examples]
        for number, row, start, (found, attention) in zip(
            prepared.context, prepared.rows.tokens, prepared.rows.second_start, outputs, strict=True
        ):
            limit = int(self.search.limits(len(row), self.model.max_length))
            first, *_ = hypotheses = self._hypotheses(found, limit)
            answers[number] = dict(first)
            self.num_cut += "cut" in first
            if self.search.nbest > 1:
                answers[number]["candidates"] = hypotheses
            if attention:
                count = found.lengths[0] - found.ended[0]
                answers[number]["attention"] = word_attention(
                    self.model.tokenizer, row[:start], found.tokens[0, :count], attention[0]
                )
        return answers

    @override
    def lines(self, example: TextExample, answer: Answer) -> list[str]:
        lines = []
        for each in answer.get("candidates", [answer]):
            score = f"{each['score']:.3f}  " if "candidates" in answer else ""
            cut = "  (cut at the length limit)" if "cut" in each else ""
            lines.append(f"{score}{each['translation']}{cut}")
        if pairs := answer.get("attention"):
            said = "  ".join(f"{pair['target']}←{pair['source']}" for pair in pairs)
            lines.append(f"attention: {said}")
        return lines

    @override
    def line(self, answer: Answer) -> str:
        return str(answer["translation"])

    def translated(self, texts: Sequence[str], advance: Callable[[int], object]) -> list[str]:
        """Translate texts in parts; `advance` is called with the number of texts in each part."""
        parts = self.parts({"text": texts}, most=self.CHUNK, advance=advance)
        return [answer["translation"] for part in parts for answer in self.predict(part)]

    def _hypotheses(self, found: Found, limit: int) -> list[Answer]:
        """Return each hypothesis with its score, and with `cut` if it ended at the length limit."""
        forces_end = self.model.network is not None and self.model.network.forces_end
        answers: list[Answer] = []
        for tokens, length, score, ended in zip(*found, strict=True):
            if not length:
                break
            text = decoded(self.model.tokenizer, tokens[: length - ended])
            answers.append({"translation": text, "score": round(float(score), 6)})
            if not ended or (forces_end and length == limit):
                answers[-1]["cut"] = True
        return answers


def best_tokens(saved: SavedModel, source: Integer[np.ndarray, " s"]) -> Integer[np.ndarray, " t"]:
    """Translate one row; return the tokens of the best translation without the end token."""
    ((found, _),) = Translator(saved).outputs(Rows([source], np.array([len(source)], np.int32)))
    return found.tokens[0, : found.lengths[0] - found.ended[0]]


@partial(jax.jit, static_argnums=(0, 5))
def mean_attention(
    network: Network, params: Tree, source: Side, tokens: Integer[Array, "B T"],
    lengths: Integer[Array, " B"], begin: int,
) -> Float[Array, "B T S"]:  # fmt: skip
    """Compute the cross-attention of each target token, averaged over layers and heads.

    If the network has no cross-attention, all weights are 0.
    """
    inputs = jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)), constant_values=begin)
    real = (jnp.arange(tokens.shape[1]) < lengths[:, None]).astype(jnp.int32)
    cross = network.weights(params, source, Side(inputs, real)).cross
    if cross is None:
        return jnp.zeros((*tokens.shape, source.tokens.shape[1]))
    return cross.mean((0, 2))


def word_attention(
    tokenizer: Tokenizer, source: Integer[np.ndarray, " s"], target: Integer[np.ndarray, " t"],
    weights: Float[np.ndarray, "T S"],
) -> list[dict[str, Any]]:  # fmt: skip
    """Find, for each target word, the source word that gets the most attention.

    Attention is not alignment: a decoder often, but not always, attends to the word it translates.

    Args:
        source: Token ids with [CLS] and [SEP], which are never chosen.
        target: Token ids without the end token.
        weights: Entry of `mean_attention` for this text; T and S may be padded.

    Returns:
        A dictionary for each target word: the words `target` and `source`; `places`, the indices of
        the target word and of the source word; and `weight`, the sum of the attention to the tokens
        of the source word, averaged over the tokens of the target word.
    """
    special = tokenizer.special_ids
    places = np.flatnonzero((source != special.cls) & (source != special.sep))
    words = _words(tokenizer, source[places])
    found: list[dict[str, Any]] = []
    if not words or not weights.any():
        return found
    for number, own in enumerate(_words(tokenizer, target)):
        row = weights[own].mean(0)[places]
        shares = [float(row[each].sum()) for each in words]
        best = int(np.argmax(shares))
        found.append({
            "target": decoded(tokenizer, target[own]),
            "source": decoded(tokenizer, source[places[words[best]]]),
            "places": [number, best],
            "weight": round(shares[best], 6),
        })  # fmt: skip
    return found


def _words(tokenizer: Tokenizer, ids: Integer[np.ndarray, " n"]) -> list[np.ndarray]:
    begins = np.flatnonzero(~tokenizer.continues_word[ids])
    return [part for part in np.split(np.arange(len(ids)), begins) if len(part)]
