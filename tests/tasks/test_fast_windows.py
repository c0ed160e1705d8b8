"""Words, answers, corpora and masks of whole words with tokenizers that are no WordPiece."""

import numpy as np
import pytest
from fast_files import write_fast
from squad_examples import question
from tokenizers import Tokenizer as Library

from bert_jax.data.corpus.build import build_corpus
from bert_jax.data.store import open_store
from bert_jax.tasks.config import WindowOptions
from bert_jax.tasks.examples import LabelSet, Origin, TaggedExample, TextExample
from bert_jax.tasks.long_texts import text_rows
from bert_jax.tasks.squad.windows import build_windows
from bert_jax.tasks.tagging.windows import tag_windows
from bert_jax.tokenization.load import load_tokenizer

KINDS = ["bpe", "unigram", "pieces"]
CONTEXT = "The  lazy 漢 dog sleeps;\nthe fox, too."


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return {kind: load_tokenizer(write_fast(tmp_path_factory.mktemp(kind), kind)) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_words_with_tags_have_the_ids_that_they_have_in_a_sentence(made, kind):
    tokenizer = made[kind]
    sentence = TaggedExample("0", ("the", "lazy", "dog"), ("O", "O", "B"), Origin("a", 1))
    (window,) = tag_windows([sentence], tokenizer, LabelSet(("O", "B"))).windows
    special = tokenizer.special_ids
    inside = tokenizer.encode(" the lazy dog" if kind == "bpe" else "the lazy dog").ids
    assert window.ids.tolist() == [special.cls, *inside, special.sep]
    begins = np.flatnonzero(window.words >= 0)
    assert not tokenizer.continues_word[window.ids[begins]].any()
    assert len(begins) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_of_an_answer_spell_it(made, kind):
    tokenizer = made[kind]
    for answer in ("dog sleeps", "lazy", "漢", "The  lazy", "too", "the fox"):
        asked = question(CONTEXT, answer, text="the dog?")
        (window,) = build_windows([asked], tokenizer, WindowOptions()).windows
        first, last = window.target
        spans = tokenizer.encode(CONTEXT).offsets
        begin = len(window.ids) - 1 - len(spans)
        start, end = spans[first - begin][0], spans[last - begin][1]
        assert CONTEXT[start:end] == answer


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_two_texts_are_those_of_the_library(made, kind, tmp_path):
    """RoBERTa and XLM-R have two separators between texts; a pair and a window are such rows."""
    tokenizer = made[kind]
    tokenizer.save(tmp_path / "saved")
    library = Library.from_file(f"{tmp_path / 'saved/tokenizer.json'}")
    found = library.encode("the dog?", CONTEXT)
    asked = question(CONTEXT, "lazy", text="the dog?")
    (window,) = build_windows([asked], tokenizer, WindowOptions()).windows
    assert window.ids.tolist() == found.ids
    assert window.context_at == found.type_ids.index(1)
    separators = window.ids.tolist().count(tokenizer.special_ids.sep)
    assert separators == (2 if kind == "pieces" else 3)
    pair = TextExample("0", "the dog?", CONTEXT, None, Origin("a", 1))
    fitted = text_rows([pair], tokenizer, len(found.ids), None)
    assert fitted.rows.tokens[0].tolist() == found.ids
    assert fitted.rows.second_start[0] == window.context_at
    assert not fitted.long
    fitted = text_rows([pair], tokenizer, len(found.ids) - 1, None)
    assert len(fitted.rows.tokens[0]) == len(found.ids) - 1
    assert fitted.long == [0]


@pytest.mark.parametrize("kind", KINDS)
def test_sentences_of_a_corpus_begin_words(made, kind, tmp_path):
    """Whole words are masked as such where one sentence follows another."""
    tokenizer = made[kind]
    text = "The dog sleeps. The fox sleeps.\n\nThe jugs. The dog."
    (tmp_path / "in.txt").write_text("\n\n".join(f"{text} {'dog ' * n}." for n in range(6)))
    build_corpus([str(tmp_path / "in.txt")], tokenizer, tmp_path / "out", num_workers=1,
                 progress=False)  # fmt: skip
    store = open_store(tmp_path / "out" / "train")
    begins = store.shards[0].tokens[store.shards[0].sentence_offsets[:-1]]
    assert len(begins) > 10
    assert not tokenizer.continues_word[begins].any()
    again = load_tokenizer(tmp_path / "out" / "train" / "tokenizer")
    assert again.fingerprint == tokenizer.fingerprint == store.tokenizer_fingerprint
