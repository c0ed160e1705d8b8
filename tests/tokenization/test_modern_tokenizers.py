"""Tokenizers in the form of ModernBERT's, EuroBERT's and mmBERT's."""

import copy
import json
import pickle

import numpy as np
import pytest
from checked_encoding import checked_encoding
from hypothesis import given, settings
from hypothesis import strategies as st
from modern_files import CODE, KINDS, LLAMA, ROLES, TEXTS, definition, write_modern
from tokenizers import Tokenizer as Library

from bert_jax.errors import UserError
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.tokenization.masks import encode_masked, filled
from bert_jax.tokenization.split_pattern import takes_linear_time
from bert_jax.tokenization.tokenizer import make_row

WORDS = ["EU", "rejects", "German", "don't", "(", "'s", "漢字", "é", "1,000"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("made")
    return {kind: load_tokenizer(write_modern(directory / kind, kind)) for kind in KINDS}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    directory = tmp_path_factory.mktemp("library")
    paths = {kind: write_modern(directory / kind, kind) / "tokenizer.json" for kind in KINDS}
    return {kind: Library.from_file(f"{path}") for kind, path in paths.items()}


def texts_of(tokenizer, kind):
    """The sweep, added tokens in and between words, and no special token spelled out."""
    added = [token.content for token in tokenizer.added]
    marked = ["The river" + " froze".join(added) + "early.", *(f"a{t}b {t} {t}" for t in added)]
    return [t for t in (*TEXTS, *marked) if not any(name in t for name in ROLES[kind])]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_library(made, libraries, kind):
    texts = texts_of(made[kind], kind)
    assert set(CODE) < set(texts)
    for text in texts:
        wanted = libraries[kind].encode(text, add_special_tokens=False).ids
        assert checked_encoding(made[kind], text).ids.tolist() == wanted, text


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(
    text=st.text(
        st.one_of(st.characters(codec="utf-8"), st.sampled_from(" \n\t▁e\u0301'd1")), max_size=40
    )
)
def test_any_text(made, libraries, kind, text):
    for name in ROLES[kind]:
        text = text.replace(name, name[1:])
    wanted = libraries[kind].encode(text, add_special_tokens=False).ids
    assert checked_encoding(made[kind], text).ids.tolist() == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_found_by_role_and_never_made_from_text(made, kind):
    tokenizer, names = made[kind], ROLES[kind]
    assert tuple(map(tokenizer.id_to_token, vars(tokenizer.special_ids).values())) == names
    for name in set(names):
        for text in (name, f"the {name} dog", f"dog{name}dog"):
            assert len(checked_encoding(tokenizer, text).ids) > 1  # checks for special ids


def test_runs_of_spaces_are_tokens_and_come_back(made):
    modern = made["modernbert"]
    ids = modern.encode("a" + " " * 24 + "b").ids
    assert [modern.id_to_token(id) for id in ids] == ["a", " " * 24, "b"]
    assert not modern.continues_word[ids[1]]
    for kind in KINDS:
        assert made[kind].decode(made[kind].encode(CODE[0]).ids) == CODE[0]
    spans = modern.encode("a" + " " * 24 + "b").offsets.tolist()
    assert spans == [[0, 1], [25, 25], [25, 26]]


def test_a_word_that_is_a_token_needs_no_merges(made, tmp_path):
    euro = made["eurobert"]
    id = euro.token_to_id("Ġfroze")
    assert id in euro.encode("it froze.").ids
    whole = definition("eurobert")
    whole["model"]["ignore_merges"] = False
    other = load_tokenizer(write_modern(tmp_path / "a", "eurobert", **whole))
    assert id not in other.encode("it froze.").ids
    assert other.fingerprint != euro.fingerprint


def test_such_a_word_is_no_special_token(tmp_path):
    """A special token without brackets would be made of a text whole."""
    directory = write_modern(tmp_path / "a", "eurobert")
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mask_token": "Ġfroze"}))
    tokenizer = load_tokenizer(directory)
    assert tokenizer.id_to_token(tokenizer.special_ids.mask) == "Ġfroze"
    assert checked_encoding(tokenizer, "it froze").ids.size > 2  # checks for special ids
    tokenizer.save(tmp_path / "b")
    assert load_tokenizer(tmp_path / "b").fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_pickled_it_is_the_same(made, kind, tmp_path):
    tokenizer = made[kind]
    tokenizer.save(tmp_path / "saved")
    library = Library.from_file(f"{tmp_path / 'saved' / 'tokenizer.json'}")
    texts = texts_of(tokenizer, kind)
    for again in (load_tokenizer(tmp_path / "saved"), pickle.loads(pickle.dumps(tokenizer))):
        assert again.fingerprint == tokenizer.fingerprint
        assert again.special_ids == tokenizer.special_ids
        assert again.mask_strips_space == (kind == "modernbert")
        for text in texts:
            assert again.encode(text).ids.tolist() == tokenizer.encode(text).ids.tolist()
    ids = tokenizer.encode_batch(texts)
    for first, second in zip(range(0, 20, 2), range(1, 20, 2), strict=True):
        found = library.encode(texts[first], texts[second])
        assert make_row(tokenizer, ids[first], ids[second]).ids.tolist() == found.ids


@pytest.mark.parametrize("kind", KINDS)
def test_words_one_by_one_are_as_in_a_sentence(made, libraries, kind):
    found = made[kind].encode_words(WORDS)
    wanted = [libraries[kind].encode(f" {word}", add_special_tokens=False).ids for word in WORDS]
    assert [ids.tolist() for ids in found] == wanted
    if kind != "mmbert":  # whose tokens may hold several words
        whole = libraries[kind].encode(" " + " ".join(WORDS), add_special_tokens=False).ids
        assert np.concatenate(found).tolist() == whole


def test_an_added_token_that_is_a_word_has_no_space_before_it(made):
    modern = made["modernbert"]
    unused = modern.token_to_id("[unused1]")
    alone, begins = modern.encode_words(["[unused1]", "[unused1]s"])
    assert alone.tolist() == [unused]
    assert begins.tolist() == [unused, modern.token_to_id("Ġs")]


def test_masks_in_text_take_the_space_before_them(made, libraries):
    modern = made["modernbert"]
    found = encode_masked("The river [MASK] early.", modern)
    assert found.ids.tolist() == libraries["modernbert"].encode(
        "The river [MASK] early.", add_special_tokens=False
    ).ids  # fmt: skip
    text = "The river [MASK]."
    froze = modern.encode(" f").ids
    assert len(froze) == 1
    assert filled(text, (10, 16), froze[0], modern) == "The river f."


@pytest.mark.parametrize("kind", KINDS)
def test_what_continues_a_word_joins_what_the_ids_join(made, kind):
    tokenizer, mask = made[kind], ROLES[kind][4]
    text = f"The river {mask} early."
    at = (10, 10 + len(mask))
    ids = encode_masked(text, tokenizer).ids
    id = tokenizer.token_to_id("e")
    spelled = tokenizer.decode(np.where(ids == tokenizer.special_ids.mask, id, ids))
    assert filled(text, at, id, tokenizer) == spelled


def without_names(directory, **config):
    """Leave nothing but `tokenizer.json` and a model's configuration."""
    (directory / "tokenizer_config.json").unlink()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_roles_of_the_configuration_of_the_model(made, tmp_path):
    directory = write_modern(tmp_path, "eurobert")
    begin, end, mask = 500, 501, 502
    ids = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": end, "mask_token_id": mask}
    without_names(directory, **ids)
    assert load_tokenizer(directory).fingerprint == made["eurobert"].fingerprint
    without_names(write_modern(tmp_path, "eurobert"), **(ids | {"mask_token_id": None}))
    with pytest.raises(
        UserError, match="mask_token is missing; expected a token of the vocabulary"
    ):
        load_tokenizer(directory)
    without_names(write_modern(tmp_path, "eurobert"), **(ids | {"mask_token_id": end}))
    with pytest.raises(UserError, match="only the separator may have other roles, except that of"):
        load_tokenizer(directory)


def test_rows_tell_which_of_two_names_begins_a_row(made, tmp_path):
    """Published files name a cls_token that no row has, beside the bos_token that rows have."""
    directory = write_modern(tmp_path, "mmbert")
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"cls_token": "<eos>", "sep_token": "<eos>"}
    path.write_text(json.dumps(config))
    assert load_tokenizer(directory).fingerprint == made["mmbert"].fingerprint


def test_padding_may_be_the_separator_but_unknown_text_may_not(tmp_path):
    whole = definition("mmbert")
    whole["model"]["unk_token"] = "<eos>"
    directory = write_modern(tmp_path, "mmbert", **whole)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"unk_token": "<eos>"}))
    with pytest.raises(UserError, match=r"model\.unk_token is '<eos>', the separator"):
        load_tokenizer(directory)


def changed(kind, path, value):
    whole = copy.deepcopy(definition(kind))
    part = whole
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return whole


SPLIT = ["pre_tokenizer", "pretokenizers", 0]


@pytest.mark.parametrize(
    ("kind", "path", "value", "said"),
    [
        ("eurobert", [*SPLIT, "pattern"], {"Regex": "(a+)+b|a"}, "may take more than linear"),
        ("eurobert", [*SPLIT, "pattern"], {"Regex": "a" * 1001}, "at most 1,000 characters"),
        ("eurobert", [*SPLIT, "pattern"], {"Regex": ""}, "expected a String"),
        ("eurobert", [*SPLIT, "pattern"], None, "pattern is missing; expected an object"),
        ("eurobert", [*SPLIT, "behavior"], "Other", "behavior is 'Other'; expected 'Removed' or"),
        ("eurobert", [*SPLIT, "invert"], 1, "invert is 1"),
        ("eurobert", ["pre_tokenizer", "pretokenizers", 1, "type"], "Metaspace", "replacement is"),
        ("eurobert", SPLIT, {"type": "ByteLevel"}, "is ByteLevel, ByteLevel; expected one Byte"),
        ("mmbert", ["normalizer"], None, "is Split; expected one ByteLevel or Metaspace"),
        ("mmbert", ["normalizer"], {"type": "Sequence", "normalizers": [
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}, {"type": "NFKC"}]},
         "ends by replacing spaces"),
        ("modernbert", ["model", "vocab", "a"], 0, "two ids|gives the id|need the ids"),
        ("modernbert", ["added_tokens", 0, "id"], 1, "need the ids 0|gives the id|another token"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path, kind, path, value, said):
    with pytest.raises(UserError, match=f"tokenizer.json.*(?:{said})"):
        load_tokenizer(write_modern(tmp_path, kind, **changed(kind, path, value)))


GPT_2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    "pattern",
    [LLAMA, GPT_2, GPT_4O, r"\s+", "[0-9]", r"\p{N}{1,3}", "x*y|x+",
     r"\x{5b}(?=PAD\x{5d})|<(?=0x[0-9A-F]{2}>)"],
)  # fmt: skip
def test_patterns_of_published_tokenizers_take_linear_time(pattern):
    assert takes_linear_time(pattern)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(a+)+b|a+", "repeated inside a repetition"),
        ("(a|aa)+", "a repeated choice"),
        ("a*b", "no later alternative takes the run that was walked through"),
        (r"\s*x|\s|\s+", "one between takes a character of the run, which is walked through again"),
        (r"\s*x|\s+(?!\S)", "the later one may fail too"),
        ("a+a+b|a+", "the run is divided in all ways"),
        ("a?" * 9 + "a", "nine choices"),
        ("a*", "matches nothing"),
        ("a|", "matches nothing"),
        ("(?!a)", "matches nothing"),
        ("(?=ab{2})", "matches nothing"),
        ("a(?=b+c)", "a repetition looked at from each place"),
        ("a**", "repeated twice"),
        (r"(a)\1", "looks back"),
        ("(?<=a)b", "looks back"),
        ("[[a]&&[b]]", "a class of classes"),
        ("a(", "not closed"),
    ],
)
def test_patterns_that_may_take_longer(pattern, why):
    assert not takes_linear_time(pattern), why


parity = pytest.mark.parity


@parity
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_transformers(made, kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = made[kind]
    tokenizer.save(tmp_path / "ours")
    for directory in (write_modern(tmp_path / "theirs", kind), tmp_path / "ours"):
        theirs = transformers.AutoTokenizer.from_pretrained(directory)
        assert theirs.mask_token_id == tokenizer.special_ids.mask
        for text in texts_of(tokenizer, kind):
            wanted = theirs(text, add_special_tokens=False)["input_ids"]
            assert tokenizer.encode(text).ids.tolist() == wanted
            if kind != "eurobert" or directory.name == "ours":  # Llama 3 ends no row
                row = make_row(tokenizer, tokenizer.encode(text).ids).ids.tolist()
                assert theirs(text)["input_ids"] == row


@parity
@pytest.mark.parametrize("saved", [False, True])
def test_words_are_those_of_transformers_with_a_prefix_space(made, saved, tmp_path):
    transformers = pytest.importorskip("transformers")
    modern = made["modernbert"]
    write_modern(tmp_path / "a", "modernbert")
    modern.save(tmp_path / "b")
    # AutoTokenizer's class passes over the option.
    theirs = transformers.GPTNeoXTokenizer.from_pretrained(
        tmp_path / ("b" if saved else "a"), add_prefix_space=True
    )
    words = [*WORDS, "[unused1]", "[unused1]s"]
    ids = np.concatenate(modern.encode_words(words)).tolist()
    found = theirs(words, is_split_into_words=True, add_special_tokens=False)["input_ids"]
    assert found == ids
