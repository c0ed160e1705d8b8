"""Sentences as sequences: first sub-words, windows, and one value a word back from them."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marian_files import write_tokenizer

from bert_jax.errors import UserError
from bert_jax.tasks.examples import LabelSet, Origin, TaggedExample
from bert_jax.tasks.rows import NO_LABEL
from bert_jax.tasks.tagging.schemes import convert, tag_labels
from bert_jax.tasks.tagging.sources import read_columns, read_wikiann
from bert_jax.tasks.tagging.windows import tag_windows
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.tokenization.tokenizer import SPECIAL_TOKENS
from bert_jax.tokenization.training import train_bytelevel
from bert_jax.tokenization.wordpiece import WordPieceTokenizer

PIECES = ["un", "##aff", "##able", "a", "b", "##c", "."]
TOKENIZER = WordPieceTokenizer([*SPECIAL_TOKENS, *PIECES])
LABELS = LabelSet(("O", "B-X", "I-X"))
CLS, SEP, UNK = (SPECIAL_TOKENS.index(token) for token in ("[CLS]", "[SEP]", "[UNK]"))


def example(words, tags=None, line=1):
    return TaggedExample("0", tuple(words), tags and tuple(tags), Origin("a.txt", line))


def ids(text):
    return [TOKENIZER.token_to_id(token) for token in text.split()]


def test_label_on_the_first_sub_word():
    found = tag_windows([example(["unaffable", "a", "bc"], ["B-X", "O", "I-X"])], TOKENIZER, LABELS)
    (window,) = found.windows
    assert window.ids.tolist() == ids("[CLS] un ##aff ##able a b ##c [SEP]")
    assert window.labels.tolist() == [-1, 1, -1, -1, 0, 2, -1, -1]
    assert window.words.tolist() == [-1, 0, -1, -1, 1, 2, -1, -1]
    assert {window.ids.dtype, window.labels.dtype, window.words.dtype} == {np.dtype(np.int32)}
    assert (found.sentence_words, found.warnings) == ((3,), ())


def test_words_of_a_byte_level_tokenizer_have_a_space_before_them():
    tokenizer = train_bytelevel(["The dog, (the dog) sleeps. The dog sleeps."] * 2, 300)
    words = ["The", "dog", "(", "sleeps", ".", "(dog"]
    found = tag_windows([example(words, ["O", "B-X", "O", "O", "O", "I-X"])], tokenizer, LABELS)
    (window,) = found.windows
    inside = tokenizer.encode(" " + " ".join(words)).ids
    assert window.ids[1:-1].tolist() == inside.tolist()
    firsts = [tokenizer.id_to_token(id)[0] for id in window.ids[window.words >= 0]]
    assert firsts == ["Ġ"] * len(words)
    assert window.labels[window.words >= 0].tolist() == [0, 1, 0, 0, 0, 2]


def test_labels_of_a_tokenizer_without_cls(tmp_path):
    """A row of Marian's begins with the first word, as its encoder was trained."""
    pytest.importorskip("sentencepiece")
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "marian"))
    words = ["the", "dog", "sees", "a", "cat"]
    sentence = example(words, ["O", "B-X", "O", "O", "B-X"])
    for length in (32, 5):
        for window in tag_windows(
            [sentence], tokenizer, LABELS, max_length=length, stride=1
        ).windows:
            assert len(window.ids) == len(window.labels) == len(window.words)
            for at in np.flatnonzero(window.words >= 0):
                word = words[window.words[at]]
                (pieces,) = tokenizer.encode_words([word])
                assert window.ids[at] == pieces[0]
                assert window.labels[at] == ("dog" in word or "cat" in word)
    (whole,) = tag_windows([sentence], tokenizer, LABELS, max_length=32, stride=1).windows
    assert whole.labels[0] == 0


def test_windows_by_hand():
    """Room for 4 of 7 sub-words, a window every 2: at 0, 2 and 4, the last shorter."""
    words = ["a", "b", "a", "b", "a", "b", "."]
    sentence = example(words, ["O", "B-X", "I-X", "O", "B-X", "I-X", "O"], line=9)
    found = tag_windows([example(["b"]), sentence], TOKENIZER, LABELS, max_length=6, stride=2)
    assert [window.example for window in found.windows] == [0, 1, 1, 1]
    assert [window.ids.tolist() for window in found.windows[1:]] == [
        ids("[CLS] a b a b [SEP]"), ids("[CLS] a b a b [SEP]"), ids("[CLS] a b . [SEP]"),
    ]  # fmt: skip
    # Sub-word 2 has no context to its left in the second window and one to its right in the first.
    assert [window.words.tolist() for window in found.windows[1:]] == [
        [-1, 0, 1, 2, -1, -1], [-1, -1, 3, 4, -1, -1], [-1, -1, 5, 6, -1],
    ]  # fmt: skip
    assert [window.labels.tolist() for window in found.windows[1:]] == [
        [-1, 0, 1, 2, -1, -1], [-1, -1, 0, 1, -1, -1], [-1, -1, 2, 0, -1],
    ]  # fmt: skip
    assert found.warnings == (
        "a.txt: 1 sentences of more than 4 sub-words, read in windows (line 9)",
    )


def test_just_fits():
    words = ["a"] * 4
    assert len(tag_windows([example(words)], TOKENIZER, max_length=6, stride=4).windows) == 1
    assert (
        len(tag_windows([example([*words, "a"])], TOKENIZER, max_length=6, stride=4).windows) == 2
    )


def test_a_word_that_leaves_nothing():
    """Zero-width and other deleted characters: the word is still labelled, and counted."""
    sentence = example(["a", "\u200b", "\xa0", "b"], ["O", "B-X", "I-X", "O"], line=4)
    found = tag_windows([sentence], TOKENIZER, LABELS)
    assert found.windows[0].ids.tolist() == [CLS, *ids("a"), UNK, UNK, *ids("b"), SEP]
    assert found.windows[0].labels.tolist() == [-1, 0, 1, 2, 0, -1]
    (warning,) = found.warnings
    assert "a.txt: 2 words for which the tokenizer has no token" in warning
    assert "4" in warning


def test_special_tokens_in_text_are_text():
    found = tag_windows([example(["[SEP]", "[MASK]"])], TOKENIZER)
    assert found.windows[0].ids.tolist().count(SEP) == 1
    assert found.windows[0].ids[-1] == SEP
    assert SPECIAL_TOKENS.index("[MASK]") not in found.windows[0].ids


def test_without_tags():
    found = tag_windows([example(["a", "b"])], TOKENIZER, LABELS)
    assert (found.windows[0].labels == NO_LABEL).all()
    assert found.windows[0].words.tolist() == [-1, 0, 1, -1]
    found = tag_windows([example(["a"], ["B-X"])], TOKENIZER)
    assert (found.windows[0].labels == NO_LABEL).all()


def test_unknown_tags_are_not_learned_and_named_once():
    tags = [["B-Y", "I-Y", "O"], ["Z", "B-X", "B-Y"]]
    found = tag_windows(
        [example("aba", each, line=7 + n) for n, each in enumerate(tags)], TOKENIZER, LABELS
    )
    assert [each.labels.tolist() for each in found.windows] == [[-1, -1, -1, 0, -1],
                                                                [-1, -1, 1, -1, -1]]  # fmt: skip
    assert found.warnings == (
        "a.txt: 4 words with tags that the model does not know, counted as misses: 'B-Y', 'I-Y', "
        "'Z' (lines 7, 7, 8, 8)",
    )


def test_a_word_without_a_tag_is_not_learned():
    found = tag_windows([example("ab", ["B-X", ""])], TOKENIZER, LABELS)
    assert found.windows[0].labels.tolist() == [-1, 1, -1, -1]
    assert found.warnings == ()


def test_memory_grows_with_the_words():
    """A file without blank lines is one sentence."""
    peaks = []
    for number in (2_000, 8_000):
        sentence = [example(["a"] * number)]
        tracemalloc.start()
        tag_windows(sentence, TOKENIZER, max_length=18, stride=8)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 6 * peaks[0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_length": 2}, "max_length is 2; .*need 3"),
        ({"max_length": 8, "stride": 7}, "stride is 7; expected 1 to 6"),
        ({"stride": 0}, "stride is 0; expected 1"),
    ],
)
def test_bad_lengths(options, expected):
    with pytest.raises(UserError, match=expected):
        tag_windows([example(["a"])], TOKENIZER, **options)


def check_windows(examples, tokenizer, found, labels, max_length):
    """Every sub-word is in a window, every word labelled once, where context is greatest."""
    special = tokenizer.special_ids
    expected = [[part.tolist() for part in tokenizer.encode_batch(e.tokens)] for e in examples]
    by_example = [[] for _ in examples]
    for window in found.windows:
        by_example[window.example].append(window)
    assert [window.example for window in found.windows] == sorted(w.example for w in found.windows)
    for sentence, parts, windows in zip(examples, expected, by_example, strict=True):
        whole = [id for part in parts for id in part or [special.unk]]
        first = np.cumsum([0, *[max(1, len(part)) for part in parts]])[:-1]
        seen = np.full(len(whole), -1)
        seen_words = []
        context = np.full((len(windows), len(parts)), -1)
        begin = 0
        for number, window in enumerate(windows):
            assert len(window.ids) <= max_length
            assert (window.ids[0], window.ids[-1]) == (special.cls, special.sep)
            inner = window.ids[1:-1].tolist()
            while whole[begin : begin + len(inner)] != inner:
                begin += 1
            seen[begin : begin + len(inner)] = inner
            sides = np.minimum(first - begin, begin + len(inner) - 1 - first)
            context[number] = np.maximum(sides, -1)
            here = np.flatnonzero(window.words >= 0)
            seen_words += [(word, number) for word in window.words[here]]
            assert (here - 1 + begin).tolist() == first[window.words[here]].tolist()
            tags = [sentence.tags[word] for word in window.words[here]]
            assert [labels.names[label] for label in window.labels[here]] == tags
            assert (np.delete(window.labels, here) == NO_LABEL).all()
            begin += 1
        assert seen.tolist() == whole  # nothing is cut
        assert sorted(word for word, _ in seen_words) == list(range(len(parts)))
        if len(set(whole)) == len(whole):  # else a window may have been found too early
            for word, number in seen_words:
                assert context[number, word] == context[:, word].max()
    gathered = found.gather([np.append(window.labels, [7, 7]) for window in found.windows])
    names = [tuple(labels.names[label] for label in each) for each in gathered]
    assert names == [each.tags for each in examples]


DISTINCT = WordPieceTokenizer(
    [*SPECIAL_TOKENS, *(f"{p}{n}" for n in range(80) for p in ("w", "##"))]
)


@settings(max_examples=80)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    max_length=st.integers(3, 20),
    data=st.data(),
)
def test_nothing_is_cut(lengths, max_length, data):
    stride = data.draw(st.integers(1, max_length - 2))
    examples = []
    for length in lengths:
        # Words of one or two pieces, all pieces of a sentence different.
        words = [
            f"w{n}{n}" if data.draw(st.booleans()) else f"w{n}" for n in range(10, 10 + length)
        ]
        tags = data.draw(st.lists(st.sampled_from(LABELS.names), min_size=length, max_size=length))
        examples.append(example(words, tags))
    found = tag_windows(examples, DISTINCT, LABELS, max_length=max_length, stride=stride)
    check_windows(examples, DISTINCT, found, LABELS, max_length)


def test_gather():
    sentence = example(["a"] * 7)
    found = tag_windows([sentence, example(["b"])], TOKENIZER, max_length=6, stride=2)
    values = [np.full(8, 10 + number) for number in range(len(found.windows))]
    first, second = found.gather(values)
    assert first.tolist() == [10, 10, 10, 11, 11, 12, 12]
    assert second.tolist() == [13]


@pytest.mark.parametrize(
    ("name", "vocab", "max_length"),
    [
        ("conll2003/eng.testa", "bert-base-cased", 32),
        ("ncbi-disease/devel.tsv", "bert-base-uncased", 64),
        ("wikiann-en/dev", "bert-base-multilingual-cased", 16),
    ],
)
def test_real_files(real_data, name, vocab, max_length):
    read = read_wikiann if "wikiann" in name else read_columns
    examples = convert(read(real_data / "ner" / name))[:1000]
    labels = tag_labels(examples)
    tokenizer = load_tokenizer(real_data / "vocab" / vocab)
    found = tag_windows(examples, tokenizer, labels, max_length=max_length, stride=max_length // 2)
    assert len(found.windows) > len(examples)
    assert "read in windows" in found.warnings[0]
    check_windows(examples, tokenizer, found, labels, max_length)


def test_a_first_tag_of_a_known_type_is_no_miss():
    """CoNLL-2003's own taggers know I-LOC only; both gold tags and predictions become B-LOC."""
    found = tag_windows([example("ab", ["B-Z", "I-Z"])], TOKENIZER, LabelSet(("I-Z", "O")))
    assert found.windows[0].labels.tolist() == [-1, -1, 0, -1]
    assert found.warnings == ()
