"""Marian's tokenizer: two models, one map, no [CLS], and files that stay as they are."""

import json
import pickle

import numpy as np
import pytest
import sentencepiece
from marian_files import sentences, tokenizer_files, write_tokenizer

from bert_jax.errors import UserError
from bert_jax.objectives.masking import MaskingConfig, mask_tokens
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.tokenization.tokenizer import make_row, num_special

VOCAB = json.loads(tokenizer_files()["vocab.json"])
TEXTS = [
    "the dog sees Köln",
    "gadd eht 漢字",
    "",
    " ",
    "</s> and <pad>",
    "ﬁne \ud800 text",
    *sentences(3)[1],
]


@pytest.fixture
def directory(tmp_path):
    return write_tokenizer(tmp_path / "marian")


@pytest.fixture
def tokenizer(directory):
    return load_tokenizer(directory)


@pytest.mark.parametrize("side", ["source", "target"])
def test_ids_are_those_of_the_pieces_in_the_map(tokenizer, side):
    model = sentencepiece.SentencePieceProcessor(model_proto=tokenizer_files()[f"{side}.spm"])
    ours = tokenizer if side == "source" else tokenizer.target
    texts = [text.replace("\ud800", "\ufffd") for text in TEXTS]
    wanted = [[VOCAB.get(p, 1) for p in model.encode(text, out_type=str)] for text in texts]
    assert [ids.tolist() for ids in ours.encode_batch(TEXTS)] == wanted
    assert [ours.encode(text).ids.tolist() for text in TEXTS] == wanted
    assert wanted[1].count(1) >= 1  # what the map lacks is unknown
    assert ours.encode_batch([]) == []


def test_the_two_sides_split_a_text_in_different_ways(tokenizer):
    text = sentences(1)[0][0]
    assert tokenizer.encode(text).ids.tolist() != tokenizer.target.encode(text).ids.tolist()
    assert tokenizer.target.special_ids == tokenizer.special_ids
    assert tokenizer.target.fingerprint == tokenizer.fingerprint


def test_a_text_never_gives_a_special_id(tokenizer):
    """Not even where a model has a piece of that name."""
    special = {tokenizer.special_ids.pad, tokenizer.special_ids.sep}
    for ids in tokenizer.encode_batch(["</s>", "<pad>", "a</s>b <pad>", "<s> <unk>"]):
        assert not special & {*ids.tolist()}


def test_a_language_code_is_one_token(tokenizer):
    text = ">>deu<< the dog"
    ids, offsets = tokenizer.encode(text)
    assert ids[0] == VOCAB[">>deu<<"]
    assert ids[1:].tolist() == tokenizer.encode("the dog").ids.tolist()
    spelled = [text[start:end] for start, end in offsets]
    assert spelled[0] == ">>deu<<"
    assert "".join(spelled[1:]) == "thedog"
    assert tokenizer.encode(">>xyz<< the dog").ids[0] == tokenizer.special_ids.unk
    assert tokenizer.encode(">> the dog").ids[0] != VOCAB[">>deu<<"]


def test_a_row_is_the_pieces_and_the_end(tokenizer):
    special = tokenizer.special_ids
    assert (special.pad, special.cls, special.mask) == (len(VOCAB) - 1,) * 3
    assert (special.sep, special.unk) == (0, 1)
    first, second = np.array([5, 6], np.int32), np.array([7], np.int32)
    assert make_row(tokenizer, first).ids.tolist() == [5, 6, 0]
    assert make_row(tokenizer, first).second_start == 3
    row = make_row(tokenizer, first, second)
    assert (row.ids.tolist(), row.second_start) == ([5, 6, 7, 0], 2)
    assert num_special(tokenizer, pair=False) == num_special(tokenizer, pair=True) == 1


def test_texts_come_back_from_either_side(tokenizer):
    for side, texts in zip((tokenizer, tokenizer.target), sentences(20, seed=4), strict=True):
        known = [text for text in texts if 1 not in side.encode(text).ids]
        assert len(known) > 10
        assert [side.decode(side.encode(text).ids) for text in known] == known


def test_files_are_written_as_they_were_read(directory, tokenizer, tmp_path):
    tokenizer.save(tmp_path / "again")
    names = sorted(path.name for path in directory.iterdir())
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == names
    for name in names:
        assert (tmp_path / "again" / name).read_bytes() == (directory / name).read_bytes()
    again = load_tokenizer(tmp_path / "again" / "source.spm")
    assert again.fingerprint == tokenizer.fingerprint
    for each in (tokenizer, tokenizer.target):
        copy, text = pickle.loads(pickle.dumps(each)), sentences(1)[1][0]
        assert copy.encode(text).ids.tolist() == each.encode(text).ids.tolist()
    other = json.dumps({**VOCAB, "<unk>": 2, [*VOCAB][2]: 1})
    (tmp_path / "again" / "vocab.json").write_text(other)
    assert load_tokenizer(tmp_path / "again").fingerprint != tokenizer.fingerprint


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("tokenizer_config.json", {"separate_vocabs": True}, "separate_vocabs is True; expected F"),
        (
            "tokenizer_config.json",
            {"sp_model_kwargs": {"alpha": 1}},
            "sp_model_kwargs is an object of 1",
        ),
        ("tokenizer_config.json", {"eos_token": "<end>"}, "vocab.json: eos_token is '<end>'; exp"),
        ("tokenizer_config.json", {"eos_token": "<unk>"}, "eos_token is '<unk>'; expected a token"),
        ("tokenizer_config.json", {"additional_special_tokens": ["<x>"]}, "added token is '<x>'"),
        ("vocab.json", {"<pad>": 1}, "vocab.*gives the id 1 to '<unk>' and to '<pad>'"),
    ],
)
def test_what_is_refused(directory, name, changes, said):
    found = json.loads((directory / name).read_text())
    (directory / name).write_text(json.dumps(found | changes))
    with pytest.raises(UserError, match=said):
        load_tokenizer(directory)


def test_a_missing_or_damaged_model_is_named(directory):
    (directory / "target.spm").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"target\.spm is not a SentencePiece model"):
        load_tokenizer(directory)
    (directory / "target.spm").unlink()
    with pytest.raises(UserError, match=r"target\.spm cannot be read: No such file"):
        load_tokenizer(directory)


def test_words_cannot_be_masked(tokenizer):
    ids = np.array([[5, 6, 0]])
    with pytest.raises(UserError, match=r"no mask token.*objective.name 'translation'"):
        mask_tokens(
            ids, np.ones_like(ids), np.arange(1), seed=0, config=MaskingConfig(),
            vocab_size=len(VOCAB), special_ids=tokenizer.special_ids,
        )  # fmt: skip
