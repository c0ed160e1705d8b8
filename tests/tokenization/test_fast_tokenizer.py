"""Tokenizers from a `tokenizer.json` that is no WordPiece."""

import copy
import json
import pickle

import numpy as np
import pytest
from checked_encoding import checked_encoding
from fast_files import SPECIALS, TEXTS, definition, write_fast
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from bert_jax.errors import UserError
from bert_jax.tokenization.fast_tokenizer import FastTokenizer
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.tokenization.sentencepiece import train_sentencepiece
from bert_jax.tokenization.tokenizer import Tokenizer, make_row, num_special
from bert_jax.tokenization.training import train_wordpiece

KINDS = ["bpe", "unigram", "pieces"]


def loaded(kind, directory) -> FastTokenizer:
    return load_tokenizer(write_fast(directory, kind))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return {kind: loaded(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_library(made, kind):
    tokenizer = made[kind]
    assert isinstance(tokenizer, Tokenizer)
    library = Library.from_str(json.dumps(definition(kind)))
    for text in [*TEXTS[:3], "", " ", "  The dog\n\tsleeps 😀 e\u0301 ﬁ\u00a0x", "漢字 dog" * 40]:
        wanted = library.encode(text, add_special_tokens=False).ids
        assert checked_encoding(tokenizer, text).ids.tolist() == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_found_and_never_made_from_text(made, kind):
    tokenizer = made[kind]
    special = tokenizer.special_ids
    found = [tokenizer.id_to_token(id) for id in vars(special).values()]
    assert found == ["<pad>", "<unk>", "<s>", "</s>", "<mask>"]
    library = Library.from_str(json.dumps(definition(kind)))
    for token in SPECIALS:
        for text in (token, f"the {token} dog", f"dog{token}dog", f" {token}"):
            ids = checked_encoding(tokenizer, text).ids  # checks for special ids
            assert tokenizer.token_to_id(token) in library.encode(text).ids
            assert len(ids) > 1 or token == "<unk>"
    assert checked_encoding(tokenizer, "the 4 dog").ids.size  # what stands for <mask> inside
    assert not tokenizer.continues_word[list(vars(special).values())].any()


def test_offsets_are_of_the_text_as_it_was_given(made):
    text = "  The dog\tsleeps 😀 ﬁ e\u0301.\n"
    for kind in KINDS:
        _, spans = checked_encoding(made[kind], text)
        found = [tuple(span) for span in spans.tolist() if span[0] < span[1]]
        face = (text.index("😀"), text.index("😀") + 1)
        assert found.count(face) == (1 if kind == "unigram" else 4), "bytes, but of the unigram"
        found = set(found)
        parts = [text[a:b] for a, b in sorted(found)]
        assert "".join(parts).replace("\u0301", "") == "".join(text.split()).replace("\u0301", "")
        assert not any(part != part.strip() for part in parts)
        assert {"😀", "ﬁ", "."} < set(parts), "each piece of a character has the character's span"
        assert any(part in ("dog", "sleeps") for part in parts)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(text=st.text(st.one_of(st.characters(), st.sampled_from(" ▁<s>\n\u00a0Ġ")), max_size=40))
def test_any_text(made, kind, text):
    encoding = checked_encoding(made[kind], text)
    for start, end in encoding.offsets:
        assert text[start:end] == text[start:end].strip()
    made[kind].decode(encoding.ids)


def test_which_tokens_continue_a_word(made):
    for kind, texts in (("bpe", " the dog"), ("unigram", "the dog"), ("pieces", "the dog")):
        tokenizer = made[kind]
        ids = tokenizer.encode(texts).ids
        words = "".join(" "[bool(tokenizer.continues_word[id]) :] + tokenizer.id_to_token(id)
                        for id in ids)  # fmt: skip
        assert words.split() == [w.replace("_", first) for first in ["Ġ" if kind == "bpe" else "▁"]
                                 for w in ("_the", "_dog")]  # fmt: skip


def test_a_word_inside_a_sentence_is_encoded_as_there(made):
    assert made["bpe"].word_prefix == " "
    for kind in KINDS:
        tokenizer = made[kind]
        whole = tokenizer.encode("the lazy dog").ids
        parts = tokenizer.encode_batch([tokenizer.word_prefix + w for w in ("lazy", "dog")])
        np.testing.assert_array_equal(whole[-sum(map(len, parts)) :], np.concatenate(parts))


def test_decoding(made):
    special = made["bpe"].special_ids
    for kind in KINDS:
        tokenizer = made[kind]
        ids = tokenizer.encode("the dog 漢").ids
        assert tokenizer.decode([special.cls, *ids, special.mask]) == "<s> the dog 漢 <mask>"
        with pytest.raises(IndexError):
            tokenizer.decode([tokenizer.vocab_size])
    assert made["bpe"].decode(made["bpe"].encode("  😀").ids) == "😀"


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_pickled_it_is_the_same(made, kind, tmp_path):
    tokenizer = made[kind]
    tokenizer.save(tmp_path / "saved")
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert names == {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    for again in (load_tokenizer(tmp_path / "saved"), pickle.loads(pickle.dumps(tokenizer))):
        assert again.fingerprint == tokenizer.fingerprint
        assert again.special_ids == tokenizer.special_ids
        for text in TEXTS[:3]:
            np.testing.assert_array_equal(again.encode(text).ids, tokenizer.encode(text).ids)
    library = Library.from_file(f"{tmp_path / 'saved' / 'tokenizer.json'}")
    special = tokenizer.special_ids
    first, second = (tokenizer.encode(text).ids.tolist() for text in ("the dog", "jugs"))
    found = library.encode("the dog", "jugs")
    between = [special.sep] * (1 if kind == "pieces" else 2)
    assert found.ids == [special.cls, *first, *between, *second, special.sep]
    assert found.type_ids == [0] * (len(first) + 1 + len(between)) + [1] * (len(second) + 1)
    row = make_row(tokenizer, *(tokenizer.encode(text).ids for text in ("the dog", "jugs")))
    assert row.ids.tolist() == found.ids
    assert row.second_start == found.type_ids.index(1)
    assert num_special(tokenizer, pair=True) == found.special_tokens_mask.count(1)


def test_everything_that_determines_ids_is_in_the_fingerprint(tmp_path):
    whole = definition("bpe")
    prints = {loaded("bpe", tmp_path / "a").fingerprint}
    other = copy.deepcopy(whole)
    other["pre_tokenizer"]["add_prefix_space"] = True
    prints.add(load_tokenizer(write_fast(tmp_path / "b", "bpe", **other)).fingerprint)
    other = copy.deepcopy(whole)
    other["model"]["merges"][:2] = other["model"]["merges"][1::-1]
    prints.add(load_tokenizer(write_fast(tmp_path / "c", "bpe", **other)).fingerprint)
    (tmp_path / "d").mkdir()
    (tmp_path / "d/tokenizer_config.json").write_text(
        json.dumps({"cls_token": "</s>", "sep_token": {"content": "<s>"}})
    )
    other = definition("bpe") | {"post_processor": None}
    prints.add(load_tokenizer(write_fast(tmp_path / "d", "bpe", **other)).fingerprint)
    prints.add(load_tokenizer(write_fast(tmp_path / "e", "bpe", **other)).fingerprint)
    assert len(prints) == 5


def test_roles_are_those_of_the_files_beside(tmp_path):
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": "</s>", "eos_token": "<s>", "mask_token": "<pad>",
                    "pad_token": "<mask>"})
    )  # fmt: skip
    path = write_fast(tmp_path, "bpe", post_processor=None)
    special = load_tokenizer(path).special_ids
    assert (special.cls, special.sep, special.mask, special.pad) == (2, 0, 1, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_added_tokens_are_kept_whole(tmp_path, kind):
    whole = copy.deepcopy(definition(kind))
    size = len(whole["model"]["vocab"])
    plain = {"single_word": False, "rstrip": False, "lstrip": False, "normalized": False}
    whole["added_tokens"] += [
        plain | {"id": size, "content": "<new>", "special": True},
        plain | {"id": size + 1, "content": "Word", "special": False, "single_word": True},
    ]
    tokenizer = load_tokenizer(write_fast(tmp_path / "a", kind, **whole))
    tokenizer.save(tmp_path / "b")
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.token_to_id("<new>") == size
    library = Library.from_str(json.dumps(whole))
    saved = Library.from_file(f"{tmp_path}/b/tokenizer.json")
    again = load_tokenizer(tmp_path / "b")
    assert again.fingerprint == tokenizer.fingerprint
    for text in ("the <new>dog", "<new>", " <new> ", "Word Wordy aWord <NEW>", "the dog"):
        wanted = library.encode(text, add_special_tokens=False)
        assert checked_encoding(tokenizer, text).ids.tolist() == wanted.ids
        assert checked_encoding(again, text).ids.tolist() == wanted.ids
        assert saved.encode(text, add_special_tokens=False).ids == wanted.ids
    ids, spans = checked_encoding(tokenizer, "the <new>dog")
    assert spans[ids.tolist().index(size)].tolist() == [4, 9]
    assert not tokenizer.continues_word[size]


def test_two_files_of_older_roberta(made, tmp_path):
    model = definition("bpe")["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    found = load_tokenizer(tmp_path)
    assert found.fingerprint == made["bpe"].fingerprint
    # HerBERT's BPE has both files, too, but is not byte-level: a word ends with </w>.
    herbert = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "a", "b</w>", "ab</w>"]
    (tmp_path / "vocab.json").write_text(json.dumps({t: n for n, t in enumerate(herbert)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b</w>\n")
    with pytest.raises(UserError, match=r"merges.txt has no merge that begins with Ġ, a space"):
        load_tokenizer(tmp_path)
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(UserError, match="no tokenizer: it has no"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match=r"no merges.txt beside it"):
        load_tokenizer(tmp_path / "vocab.json")


def test_which_of_two_counts(tmp_path):
    """XLM-R's *.model has other ids than its tokenizer.json; one that was exported has the same."""
    loaded("bpe", tmp_path)
    (tmp_path / "sentencepiece.bpe.model").write_bytes(b"other ids")
    assert load_tokenizer(tmp_path).kind == "fast"
    model = train_sentencepiece(TEXTS, 330, character_coverage=1.0)._model
    (tmp_path / "tokenizer.model").write_bytes(model)
    assert load_tokenizer(tmp_path).kind == "fast"
    (tmp_path / "tokenizer_config.json").write_text('{"kind": "sentencepiece"}')
    assert load_tokenizer(tmp_path).kind == "sentencepiece"


def test_another_kind_is_not_saved_over(made, tmp_path):
    wordpiece = train_wordpiece(TEXTS, 120)
    wordpiece.save(tmp_path / "a")
    with pytest.raises(UserError, match="another kind"):
        made["bpe"].save(tmp_path / "a")
    wordpiece.save(tmp_path / "a")


def changed(kind, path, value):
    whole = copy.deepcopy(definition(kind))
    part = whole
    for key in path[:-1]:
        part = part[key]
    if value is KeyError:
        del part[path[-1]]
    else:
        part[path[-1]] = value
    return whole


PLACE = {"type": "Replace", "pattern": {"Regex": r"(?!\A)(?=[\p{M}a-c])"}, "content": "x"}
TABLE = {"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAAA"}


@pytest.mark.parametrize(
    ("kind", "path", "value", "said"),
    [
        ("bpe", ["pre_tokenizer"], None, "pre_tokenizer is missing"),
        ("bpe", ["pre_tokenizer", "type"], "Whitespace", "pre_tokenizer.type is 'Whitespace'"),
        ("bpe", ["pre_tokenizer", "use_regex"], False, "use_regex is False; expected True"),
        ("bpe", ["pre_tokenizer", "add_prefix_space"], 1, "add_prefix_space is 1"),
        ("bpe", ["normalizer"], {"type": "Replace", "pattern": {"Regex": "(a+)+b"}, "content": ""},
         "is not one character or class"),
        ("bpe", ["normalizer"], {**PLACE, "pattern": {"Regex": r"[ a]+\z"}}, "is not one char"),
        ("bpe", ["normalizer"], {"type": "Sequence", "normalizers": [PLACE] * 3}, "two that ins"),
        ("bpe", ["normalizer"], {"type": "Sequence", "normalizers": [TABLE] * 2}, "one Precomp"),
        ("bpe", ["normalizer"], {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"},
         "content is 'aa'; expected a text of at most 1 characters"),
        ("bpe", ["normalizer"], {"type": "Replace", "pattern": {"String": ""}, "content": "a"},
         "pattern is an object of 1; expected a String"),
        ("bpe", ["normalizer"], {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
         "is invalid"),
        ("bpe", ["normalizer"], {"type": "Precompiled", "precompiled_charsmap": "!"}, "not base64"),
        ("bpe", ["normalizer"], {"type": "Sequence", "normalizers": [{}] * 65}, "at most 64"),
        ("bpe", ["normalizer"], [], "normalizer is a list of 0; expected an object"),
        ("bpe", ["model", "dropout"], 0.1, "dropout is 0.1; expected null"),
        ("bpe", ["model", "ignore_merges"], 1, "ignore_merges is 1"),
        ("bpe", ["model", "end_of_word_suffix"], "</w>", "end_of_word_suffix is '</w>'"),
        ("bpe", ["model", "unk_token"], "<s>", "they must agree"),
        ("bpe", ["model", "vocab", "<s>"], 9, "model.vocab|two ids"),
        ("bpe", ["model", "vocab", "<s>"], 10**9, "need the ids 0 to"),
        ("bpe", ["model", "vocab", "<s>"], True, "<s>'. is True"),
        ("bpe", ["model", "vocab", "x" * 1001], 0, "expected a token of 1 to 1000 characters"),
        ("bpe", ["model", "merges", 0], ["Ġ", "nowhere"], r"merges\[0\]: 'nowhere' is not in"),
        ("bpe", ["model", "merges", 0], ["Ġ"], r"merges\[0\] is a list of 1; expected two tokens"),
        ("bpe", ["model", "merges"], {}, "merges is an object of 0"),
        ("bpe", ["added_tokens", 0, "special"], 0, r"added_tokens\[\d\].special is 0"),
        ("bpe", ["added_tokens", 0, "id"], 3, "another token's"),
        ("bpe", ["added_tokens", 0, "id"], 10**9, "another token's"),
        ("bpe", ["added_tokens", 0, "id"], "0", "id is '0'; expected a number"),
        ("unigram", ["model", "vocab", 0], ["<s>"], r"vocab\[0\] is a list of 1"),
        ("unigram", ["model", "vocab", 0], ["<s>", 1e200], "must be finite"),
        ("unigram", ["model", "vocab", 9], ["<s>", -1.0], "'<s>' has two ids"),
        ("unigram", ["model", "vocab"], [], "vocab is a list of 0"),
        ("unigram", ["model", "unk_id"], 0, "they must agree"),
        ("unigram", ["pre_tokenizer", "pretokenizers", 1, "replacement"], "_",
         "replacement is '_'"),
        ("unigram", ["pre_tokenizer"], {"type": "ByteLevel"}, "is Unigram; expected BPE"),
        ("bpe", ["post_processor", "sep"], ["<s>", 0], "makes '<s> A <s> <s> B <s>' of two texts"),
        ("bpe", ["post_processor", "sep"], None, "'<s> A </s> B </s>' or '<s> A </s> </s> B </s>'"),
        ("bpe", ["post_processor", "type"], "Other", "post_processor.type is 'Other'"),
        ("bpe", ["post_processor"], "Other", "post_processor is 'Other'; expected an object"),
        ("unigram", ["post_processor", "pair"], {}, "pair is an object of 0; expected a list"),
        ("unigram", ["post_processor", "pair", 0], "A", ".pair is 'A'; expected an object"),
        ("unigram", ["post_processor", "pair", 0], {}, "makes 'A </s> </s> B </s>' of two texts"),
        ("unigram", ["post_processor", "pair"], [{}] * 17, "a list of at most 16"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path, kind, path, value, said):
    with pytest.raises(UserError, match=f"tokenizer.json.*(?:{said})"):
        load_tokenizer(write_fast(tmp_path, kind, **changed(kind, path, value)))


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_do_not_name_the_type_of_their_model(made, tmp_path, kind):
    """As the library wrote them in 2020."""
    path = write_fast(tmp_path, kind, **changed(kind, ["model", "type"], KeyError))
    found = load_tokenizer(path)
    assert found.fingerprint == made[kind].fingerprint
    for text in TEXTS[:3]:
        np.testing.assert_array_equal(found.encode(text).ids, made[kind].encode(text).ids)


@pytest.mark.parametrize(
    ("whole", "config", "said"),
    [
        (False, {}, ""),
        (False, {"add_prefix_space": False}, ""),
        (True, {"add_prefix_space": True}, ""),
        (KeyError, {"add_prefix_space": True}, ""),  # the library's default
        (True, {}, "is True; expected False"),
        (KeyError, {}, "is True; expected False"),
        (True, {"add_prefix_space": False}, "is True; expected False"),
        (False, {"add_prefix_space": True}, "is False; expected True"),
    ],
)
def test_a_class_that_sets_the_space_before_a_text_agrees_with_the_file(
    tmp_path, whole, config, said
):
    """Transformers makes the pre-tokenizer of these classes from `tokenizer_config.json`."""
    place = tmp_path / "tokenizer_config.json"
    place.write_text(json.dumps(config | {"tokenizer_class": "RobertaTokenizerFast"}))
    other = changed("bpe", ["pre_tokenizer", "add_prefix_space"], whole)
    path = write_fast(tmp_path, "bpe", **other)
    if said:
        with pytest.raises(UserError, match=f"pre_tokenizer.add_prefix_space {said}"):
            load_tokenizer(path)
        place.write_text(json.dumps(config | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    found = load_tokenizer(path)
    assert found.pipeline.adds_space == (whole is not False)
    found.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").fingerprint == found.fingerprint


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"cls_token": "none"}, "cls_token is 'none'; expected a token of the vocabulary"),
        ({"cls_token": ["<s>"]}, "cls_token is a list of 1"),
        ({"cls_token": "<pad>"}, "must be different"),
        ({"mask_token": "a"}, "special token 'a' is made from text"),
        ({"mask_token": "Ġthe"}, "special token 'Ġthe' is made from text"),
    ],
)
def test_special_tokens_that_are_refused(tmp_path, config, said):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=said):
        loaded("bpe", tmp_path)


def test_a_panic_of_the_library_is_a_message(tmp_path, made, monkeypatch):
    class PanicException(BaseException):
        pass

    tokenizer = pickle.loads(pickle.dumps(made["bpe"]))

    def panics(*_, **__):
        raise PanicException("index out of bounds")

    with pytest.raises(UserError, match="cannot be run: index out of bounds"):
        tokenizer._run(panics)
