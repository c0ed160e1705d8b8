# ruff: noqa: RUF001 (texts in many scripts)
"""WordPiece against BERT's reference algorithm, its files, its training, and bad input."""

import importlib.util
import json
import pickle
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bounded_child import run_bounded
from checked_encoding import checked_encoding
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.errors import UserError
from bert_jax.terminal import Intervals
from bert_jax.tokenization import tokenizer as tokenizer_module
from bert_jax.tokenization import training, wordpiece
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.tokenization.special_ids import SpecialIds
from bert_jax.tokenization.tokenizer import SPECIAL_TOKENS, Tokenizer
from bert_jax.tokenization.training import train_wordpiece
from bert_jax.tokenization.wordpiece import WordPieceOptions, WordPieceTokenizer

GOLDEN_DIR = Path(__file__).parents[1] / "golden"
GOLDEN = json.loads((GOLDEN_DIR / "tokenizer" / "wordpiece.json").read_text())
SMALL = {
    name: WordPieceTokenizer(part["vocab"], WordPieceOptions(lowercase=name == "uncased"))
    for name, part in GOLDEN["small"].items()
}
TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps.",
    "Pack my box with five dozen liquor jugs; the jugs are heavy.",
    "Größe, naïve café: the cafés of Zürich. 東京 is Tokyo; 京都 is Kyoto.",
] * 3


def _reference() -> Any:
    spec = importlib.util.spec_from_file_location("golden", GOLDEN_DIR / "make_wordpiece.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REFERENCE = _reference()


def tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.id_to_token(i) for i in tokenizer.encode(text).ids]


# --- the algorithm -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_tokens_equal_the_reference_on_a_small_vocabulary(name: str) -> None:
    expected = GOLDEN["small"][name]["tokens"]
    for text, right in zip(GOLDEN["inputs"], expected, strict=True):
        assert " ".join(tokens(SMALL[name], text)) == right, ascii(text)


@pytest.mark.parametrize("name", GOLDEN["published"])
def test_tokens_equal_the_reference_on_published_vocabularies(name: str, real_data: Path) -> None:
    import hashlib

    path = real_data / "vocab" / name / "vocab.txt"
    golden = GOLDEN["published"][name]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == golden["vocab_sha256"]
    loaded = load_tokenizer(path.parent)
    assert loaded.special_ids == SpecialIds(0, 100, 101, 102, 103)
    assert isinstance(loaded, WordPieceTokenizer)
    assert loaded.options.lowercase == name.endswith("uncased")
    for text, right in zip(GOLDEN["inputs"], golden["tokens"], strict=True):
        assert " ".join(tokens(loaded, text)) == right, ascii(text)
    for ids, text in zip(loaded.encode_batch(GOLDEN["inputs"]), GOLDEN["inputs"], strict=True):
        np.testing.assert_array_equal(ids, loaded.encode(text).ids)


@pytest.mark.parametrize("case", GOLDEN["deviations"], ids=lambda case: case["why"][:20])
def test_known_deviations_from_the_reference_are_what_the_list_says(case: dict[str, Any]) -> None:
    # A newer `tokenizers` that fails here changed the ids of such texts: update the list, and warn.
    assert case["ours"] != case["reference"]
    words = sorted({w for w in case["ours"] + case["reference"] if len(w) < 100} - {"[UNK]"})
    made = WordPieceTokenizer([*SPECIAL_TOKENS, *words], WordPieceOptions(case["lowercase"]))
    assert tokens(made, case["text"]) == case["ours"]


# Characters of Unicode 3.2 mean the same to every version of Python and of the library, except
# private use and U+166D (in the list of deviations).
_OLD = st.characters(exclude_categories=("Cs", "Co", "Cn")).filter(
    lambda c: unicodedata.ucd_3_2_0.category(c) != "Cn" and c not in "\u166dΣ"
)
_PLAIN = st.sampled_from(
    " \tabcABCéÉİıßçñ.,[]#'-0е́Ёア中한\u0301\u00ad\u200d\ufffd\x00\x0b\x1c\x85\xa0"
)


def _mixed(rare: st.SearchStrategy[str], size: int) -> st.SearchStrategy[str]:
    """Texts of plain and of any characters; st.text would draw from the union, nearly all rare."""
    return st.lists(st.one_of(_PLAIN, _PLAIN, rare), max_size=size).map("".join)


@pytest.mark.parametrize("lowercase", [False, True])
@settings(max_examples=150)
@given(text=_mixed(_OLD, 30))
def test_words_equal_the_reference_on_any_old_characters(lowercase: bool, text: str) -> None:
    words = REFERENCE.basic_words(text, lowercase)
    vocab = [*SPECIAL_TOKENS, *sorted(set(words))]
    made = WordPieceTokenizer(vocab, WordPieceOptions(lowercase))
    assert tokens(made, text) == words


@pytest.mark.parametrize("name", SMALL)
@settings(max_examples=150)
@given(text=_mixed(st.characters(), 60))
def test_offsets_and_batches_on_any_text(name: str, text: str) -> None:
    made = SMALL[name]
    ids, offsets = checked_encoding(made, text)
    normalizer = made.options.normalizer()
    for id, (start, end) in zip(ids.tolist(), offsets.tolist(), strict=True):
        if id != made.special_ids.unk:
            piece = text[start:end].encode("utf-8", "replace").decode()
            token = made.id_to_token(id).removeprefix("##")
            normal = normalizer.normalize_str(piece).strip()
            # A Hangul syllable becomes several letters; each of its pieces spans the syllable.
            assert token in normal if len(normal) > len(piece) else token == normal


@settings(max_examples=50)
@given(texts=st.lists(st.text(_PLAIN, max_size=80), max_size=6))
def test_a_batch_is_its_texts_one_by_one(texts: list[str]) -> None:
    made = SMALL["uncased"]
    for ids, text in zip(made.encode_batch(texts), texts, strict=True):
        np.testing.assert_array_equal(ids, made.encode(text).ids)


def test_batches_stay_right_while_the_word_cache_overflows(monkeypatch: Any) -> None:
    monkeypatch.setattr(wordpiece, "_CACHED_WORDS", 5)
    made = pickle.loads(pickle.dumps(SMALL["uncased"]))
    texts = GOLDEN["inputs"]
    for _ in range(2):
        for at in range(0, len(texts), 3):
            part = texts[at : at + 3]
            for ids, text in zip(made.encode_batch(part), part, strict=True):
                np.testing.assert_array_equal(ids, made.encode(text).ids)
            assert len(made._cache) <= 5


def test_text_never_yields_special_ids() -> None:
    vocab = [*SPECIAL_TOKENS, "[", "]", "mask", "cls", "sep", "pad", "unk"]
    made = WordPieceTokenizer(vocab)
    text = "[MASK] [CLS][SEP] x[PAD] [UNK]"
    special = set(vars(made.special_ids).values()) - {made.special_ids.unk}
    assert not special & set(made.encode(text).ids.tolist())
    assert not special & set(made.encode_batch([text])[0].tolist())
    assert tokens(made, "[MASK]") == ["[", "mask", "]"]


def test_injection_is_impossible_after_loading_saved_files(tmp_path: Path) -> None:
    # The saved file lists the special tokens as added tokens, for transformers.
    made = WordPieceTokenizer([*SPECIAL_TOKENS, "[", "]", "mask"])
    made.save(tmp_path / "t")
    loaded = load_tokenizer(tmp_path / "t" / "tokenizer.json")
    assert tokens(loaded, "[MASK]") == ["[", "mask", "]"]


def test_extreme_texts() -> None:
    made = SMALL["uncased"]
    assert made.encode("").ids.shape == (0,)
    assert made.encode("").offsets.shape == (0, 2)
    assert made.encode_batch([]) == []
    assert [len(x) for x in made.encode_batch(["", "  "])] == [0, 0]
    long_word = made.encode("a" * 200_000)
    assert long_word.ids.tolist() == [made.special_ids.unk]
    assert long_word.offsets.tolist() == [[0, 200_000]]
    (long_text,) = made.encode_batch(["fox " * 100_000])
    assert len(long_text) == 100_000 * len(made.encode("fox").ids)
    assert made.encode("a\ud800b").ids.tolist() == made.encode("ab").ids.tolist()
    assert made.encode_batch(["a\ud800b"])[0].tolist() == made.encode("ab").ids.tolist()


def test_decode_and_lookups() -> None:
    made = WordPieceTokenizer([*SPECIAL_TOKENS, "un", "##aff", "##able", "!", "##"])
    ids = [2, *made.encode("Unaffable!").ids, 4, 3]
    assert made.decode(ids) == "[CLS] unaffable! [MASK] [SEP]"
    assert made.token_to_id("##aff") == 6
    assert made.token_to_id("aff") is None
    assert made.continues_word.tolist() == [False] * 6 + [True, True, False, False]
    for bad in (-1, made.vocab_size):
        with pytest.raises(IndexError):
            made.id_to_token(bad)
        with pytest.raises(IndexError):
            made.decode([bad])
    assert isinstance(made, Tokenizer)


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        WordPieceOptions(),
        WordPieceOptions(lowercase=False),
        WordPieceOptions(lowercase=True, strip_accents=False, split_cjk=False, max_word_chars=7),
    ],
)
def test_every_way_to_load_gives_the_same_tokenizer(
    options: WordPieceOptions, tmp_path: Path
) -> None:
    made = WordPieceTokenizer(GOLDEN["small"]["cased"]["vocab"], options)
    made.save(tmp_path / "t")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t"]
    for path in ("t", "t/tokenizer.json", "t/vocab.txt"):
        loaded = load_tokenizer(tmp_path / path)
        assert loaded.fingerprint == made.fingerprint
        for text in GOLDEN["inputs"]:
            np.testing.assert_array_equal(loaded.encode(text).ids, made.encode(text).ids)
    assert pickle.loads(pickle.dumps(made)).fingerprint == made.fingerprint


def test_fingerprint_changes_with_all_that_determines_ids() -> None:
    vocab = [*SPECIAL_TOKENS, "a", "b"]
    variants = [
        WordPieceTokenizer(vocab),
        WordPieceTokenizer([*SPECIAL_TOKENS, "b", "a"]),
        WordPieceTokenizer([*vocab, "c"]),
        WordPieceTokenizer(vocab, WordPieceOptions(lowercase=False)),
        WordPieceTokenizer(vocab, WordPieceOptions(strip_accents=False)),
        WordPieceTokenizer(vocab, WordPieceOptions(split_cjk=False)),
        WordPieceTokenizer(vocab, WordPieceOptions(max_word_chars=99)),
    ]
    assert len({v.fingerprint for v in variants}) == len(variants)
    same = WordPieceTokenizer(vocab, WordPieceOptions(strip_accents=True))
    assert same.fingerprint == variants[0].fingerprint
    # Written into every store: a change to how it is computed makes them all unreadable.
    assert variants[0].fingerprint.startswith("ccb014e4330adc0e")


def test_cased_or_uncased_from_vocab_txt(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    special = "\n".join(SPECIAL_TOKENS)

    def lowercase(words: str) -> bool:
        path.write_text(f"{special}\n{words}\n", encoding="utf-8")
        loaded = load_tokenizer(path)
        assert isinstance(loaded, WordPieceTokenizer)
        return loaded.options.lowercase

    assert lowercase("a\nb\n<S>\n[unused1]\n[Q]")
    assert not lowercase("a\nParis")
    assert not lowercase("a\n##B")
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"do_lower_case": true}')
    assert lowercase("a\nParis")
    config.write_text('{"do_lower_case": "yes"}')
    with pytest.raises(UserError, match="do_lower_case is 'yes'"):
        lowercase("a")


def test_windows_files_and_odd_tokens_are_read(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    lines = [*SPECIAL_TOKENS, "a", "\u2028", "##\u2028"]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode() + b"\r\n")
    loaded = load_tokenizer(path)
    assert loaded.vocab_size == 8
    assert loaded.token_to_id("##\u2028") == 7


GOOD = "\n".join([*SPECIAL_TOKENS, "a"]).encode() + b"\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (GOOD + b"a\n", r"line 7: 'a' occurs already \(.*line 6\)"),
        (GOOD + b"\nb\n", "line 7 is empty"),
        (GOOD + b"\xff\xfe\n", "line 7, byte 1: 0xff is not UTF-8"),
        (GOOD + b"b\0c\n", "line 7: a NUL byte"),
        (b"[PAD]\n[UNK]\na\n", r"3 tokens, but lacks \[CLS\], \[SEP\], \[MASK\]"),
        (GOOD + b"x\ry\n", "line 7: .* line break"),
    ],
)
def test_bad_vocab_txt(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)


def test_absurdly_large_files_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "vocab.txt"
    with path.open("wb") as file:
        file.truncate(tokenizer_module.MAX_FILE_BYTES + 1)  # sparse
    with pytest.raises(UserError, match="larger than"):
        load_tokenizer(path)
    path.write_bytes(GOOD)
    monkeypatch.setattr("bert_jax.tokenization.tokenizer_parts.MAX_TOKENS", 5)
    with pytest.raises(UserError, match="more than 5 lines"):
        load_tokenizer(path)


def _json(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    WordPieceTokenizer([*SPECIAL_TOKENS, "a"]).save(tmp_path / "t")
    for name in ("vocab.txt", "tokenizer_config.json"):
        (tmp_path / "t" / name).unlink()
    path = tmp_path / "t" / "tokenizer.json"
    return path, json.loads(path.read_text())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model.type", "WordLevel", "model.type is 'WordLevel'; expected 'WordPiece'"),
        ("model", None, "model is missing; expected an object"),
        ("model.vocab", [], "model.vocab is a list"),
        ("model.vocab.a", 99, r"model.vocab\['a'\] is 99; .* ids 0 to 5"),
        ("model.vocab.a", 4, "gives the id 4 to .* and to 'a'"),
        ("model.vocab.a", "5", r"model.vocab\['a'\] is '5'"),
        ("model.vocab.\ud800", 6, "not valid Unicode"),
        ("model.unk_token", "<unk>", "model.unk_token is '<unk>'; expected '.UNK.'"),
        ("model.continuing_subword_prefix", "@@", "continuing_subword_prefix is '@@'"),
        ("model.max_input_chars_per_word", -1, "max_input_chars_per_word is -1"),
        ("normalizer.type", "Sequence", "normalizer.type is 'Sequence'"),
        ("normalizer.clean_text", False, "normalizer.clean_text is False"),
        ("normalizer.lowercase", "no", "normalizer.lowercase is 'no'"),
        ("pre_tokenizer", {"type": "Whitespace"}, "pre_tokenizer.type is 'Whitespace'"),
        ("added_tokens", [{"content": "[DRUG]", "id": 5}], "gives '.DRUG.' the id 5, .* another"),
        ("added_tokens", [{"content": "[DRUG]", "id": 7}], r"beyond the next free id \(6\)"),
        ("added_tokens", [{"content": "[DRUG]", "id": "6"}], r"added_tokens\[0\].id is '6'"),
        (
            "added_tokens",
            [{"content": "[DRUG]", "id": 6, "lstrip": 1}],
            "lstrip is 1; expected True or",
        ),
        ("added_tokens", [{"content": 3, "id": 6}], r"added_tokens\[0\].content is 3"),
        ("added_tokens", {}, "added_tokens is an object of 0; expected a list"),
        ("added_tokens", [{"content": "[MASK]", "id": 5}], r"gives '\[MASK\]' the id 5"),
        (
            "post_processor",
            {"type": "RobertaProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]},
            r"post_processor puts two \[SEP\] between texts; expected one",
        ),
    ],
)
def test_bad_tokenizer_json(field: str, value: Any, message: str, tmp_path: Path) -> None:
    path, whole = _json(tmp_path)
    *parents, last = field.split(".")
    part = whole
    for name in parents:
        part = part[name]
    part[last] = value
    path.write_text(json.dumps(whole))
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("field", ["model.type", "post_processor"])
def test_what_older_files_leave_out(field: str, tmp_path: Path) -> None:
    path, whole = _json(tmp_path)
    wanted = load_tokenizer(path).fingerprint
    *parents, last = field.split(".")
    part = whole
    for name in parents:
        part = part[name]
    del part[last]
    path.write_text(json.dumps(whole))
    assert load_tokenizer(path).fingerprint == wanted


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "line 1: not JSON"),
        ("[1]", "top level is a list"),
        ("[" * 200_000, "nested too deeply|not JSON"),
        ('{"model": 1, "model": 2}', "'model' occurs twice"),
    ],
)
def test_files_that_are_not_tokenizer_json(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        load_tokenizer(path)


_MARKED = ["<ent> Paris</ent> a<ENT>b", " <ent>", "ent enta <ent >", "Covid a covid19 COVID-19"]


def _marked(directory: Path) -> tuple[Any, dict[str, Any]]:
    """A tokenizer with added tokens, saved by the library, and the content of its file."""
    import tokenizers

    _, whole = _json(directory)
    library = tokenizers.Tokenizer.from_str(json.dumps(whole))
    added = tokenizers.AddedToken
    library.add_special_tokens(["<ent>", added("</ent>", lstrip=True)])
    library.add_tokens(["ent", "covid", added("a b", single_word=True)])
    path = directory / "t" / "tokenizer.json"
    library.save(str(path))
    return library, json.loads(path.read_text())


def test_added_tokens_are_kept_whole(tmp_path: Path) -> None:
    library, whole = _marked(tmp_path)
    made = load_tokenizer(tmp_path / "t")
    made.save(tmp_path / "again")
    again = load_tokenizer(tmp_path / "again")
    theirs = type(library).from_file(f"{tmp_path}/again/tokenizer.json")
    assert made.fingerprint == again.fingerprint
    for text in [*_MARKED, "a b a  b", "a\x0bb <e\x0bnt>", ""]:
        wanted = library.encode(text, add_special_tokens=False)
        for each in (made, again, pickle.loads(pickle.dumps(made))):
            ids, offsets = checked_encoding(each, text)
            assert (ids.tolist(), [*map(tuple, offsets)]) == (wanted.ids, wanted.offsets), text
        assert theirs.encode(text, add_special_tokens=False).ids == wanted.ids
    assert made.vocab[6:] == ("<ent>", "</ent>", "ent", "covid", "a b")
    assert made.decode([6, 5, 7]) == "<ent> a </ent>"
    # Without one of them, or with another rule of matching, ids are others.
    flags = [entry for entry in whole["added_tokens"] if entry["id"] > 4]
    prints = {made.fingerprint, WordPieceTokenizer(made.vocab).fingerprint}
    flags[0]["single_word"] = True
    (tmp_path / "t" / "tokenizer.json").write_text(json.dumps(whole))
    prints.add(load_tokenizer(tmp_path / "t").fingerprint)
    assert len(prints) == 3


def test_added_tokens_of_older_files(tmp_path: Path) -> None:
    _, whole = _marked(tmp_path)
    wanted = load_tokenizer(tmp_path / "t")
    entries = {str(entry.pop("id")): entry for entry in whole["added_tokens"]}
    vocab = "".join(f"{token}\n" for token in [*SPECIAL_TOKENS, "a"])
    files: list[dict[str, Any]] = [
        {"tokenizer_config.json": {"added_tokens_decoder": entries}},
        {
            "tokenizer_config.json": {},
            "special_tokens_map.json": {
                "additional_special_tokens": ["<ent>", entries["7"]], "cls_token": "[CLS]",
            },
            "added_tokens.json": {"<ent>": 6, "</ent>": 7, "ent": 8, "covid": 9, "a b": 10},
        },
    ]  # fmt: skip
    for number, parts in enumerate(files):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / "vocab.txt").write_text(vocab)
        for name, content in parts.items():
            (directory / name).write_text(json.dumps(content))
        found = load_tokenizer(directory)
        for text in _MARKED:
            np.testing.assert_array_equal(found.encode(text).ids, wanted.encode(text).ids)
    # A name alone is that of an entry of the vocabulary, or comes after all others.
    (tmp_path / "0" / "tokenizer_config.json").write_text(
        json.dumps({"additional_special_tokens": ["<x>", "[Q]", "[MASK]"]})
    )
    (tmp_path / "0" / "vocab.txt").write_text(vocab.replace("a\n", "[Q]\na\n"))
    found = load_tokenizer(tmp_path / "0")
    assert found.encode("a[Q]<x>[MASK]").ids[:3].tolist() == [6, 5, 7]
    assert found.special_ids.mask not in found.encode("a [MASK]").ids


def test_contradicting_files_are_refused(tmp_path: Path) -> None:
    WordPieceTokenizer([*SPECIAL_TOKENS, "a"]).save(tmp_path / "t")
    config = tmp_path / "t" / "tokenizer_config.json"
    right = config.read_text()
    config.write_text('{"do_lower_case": false}')
    with pytest.raises(UserError, match=r"lowercase means True, but do_lower_case.* False"):
        load_tokenizer(tmp_path / "t")
    config.write_text('{"strip_accents": false, "tokenize_chinese_chars": true}')
    with pytest.raises(UserError, match=r"normalizer.strip_accents means True, but .* is False"):
        load_tokenizer(tmp_path / "t")
    config.write_text('{"tokenize_chinese_chars": false, "strip_accents": null}')
    with pytest.raises(UserError, match=r"handle_chinese_chars means True, but .* is False"):
        load_tokenizer(tmp_path / "t")
    config.write_text(right)
    (tmp_path / "t" / "vocab.txt").write_bytes(GOOD + b"b\n")
    with pytest.raises(UserError, match="list different tokens"):
        load_tokenizer(tmp_path / "t")


@pytest.mark.parametrize(
    ("field", "value"), [("word_tokenizer_type", "mecab"), ("subword_tokenizer_type", "character")]
)
def test_japanese_words_of_another_tokenizer_are_refused(
    field: str, value: str, tmp_path: Path
) -> None:
    (tmp_path / "vocab.txt").write_bytes(GOOD)
    config = {"do_lower_case": False, "word_tokenizer_type": "basic"} | {field: value}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"tokenizer_config.json: {field} is '{value}'; expected"):
        load_tokenizer(tmp_path)


def test_where_no_tokenizer_is(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file or directory"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(UserError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "x.bin").write_bytes(b"x")
    with pytest.raises(UserError, match=r"not a tokenizer file; .* ends in \.json"):
        load_tokenizer(tmp_path / "x.bin")
    (tmp_path / "vocab.txt").write_bytes(GOOD)
    (tmp_path / "a.model").write_bytes(b"x")
    with pytest.raises(UserError, match=r"2 tokenizers, vocab.txt and a.model"):
        load_tokenizer(tmp_path)


def test_a_failing_save_leaves_nothing_behind(tmp_path: Path, monkeypatch: Any) -> None:
    made = WordPieceTokenizer([*SPECIAL_TOKENS, "a"])

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokenizer_module.os, "fsync", full)
    with pytest.raises(UserError, match="cannot be written: No space left"):
        made.save(tmp_path / "t")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    made.save(tmp_path / "t")
    (tmp_path / "t" / "note").write_text("kept")
    other = WordPieceTokenizer([*SPECIAL_TOKENS, "b"])
    other.save(tmp_path / "t")
    assert load_tokenizer(tmp_path / "t").fingerprint == other.fingerprint
    assert (tmp_path / "t" / "note").exists()
    assert len(list(tmp_path.iterdir())) == 1
    shutil.rmtree(tmp_path / "t")
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(UserError, match="another kind"):
        made.save(tmp_path / "t")


def test_the_current_directory_gets_the_files_and_stays(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    before = tmp_path.stat().st_ino
    WordPieceTokenizer([*SPECIAL_TOKENS, "a"]).save(Path())
    assert (load_tokenizer(Path()).vocab_size, tmp_path.stat().st_ino) == (6, before)
    assert not list(tmp_path.glob("*tmp*"))


@pytest.mark.parity
def test_transformers_loads_what_is_saved(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for name, made in SMALL.items():
        made.save(tmp_path / name)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        for text in GOLDEN["inputs"]:
            if "[MASK]" not in text:  # theirs matches special tokens in text, ours never
                ids = theirs(text, add_special_tokens=False)["input_ids"]
                assert ids == made.encode(text).ids.tolist(), ascii(text)
        assert theirs.mask_token_id == made.special_ids.mask
        assert theirs("a b")["input_ids"][0] == made.special_ids.cls


# --- training ------------------------------------------------------------------------------------


def test_training_gives_the_same_vocabulary_every_time(monkeypatch: Any) -> None:
    first = train_wordpiece(iter(TEXTS), 120)
    assert first.vocab_size == 120
    assert first.vocab[:5] == SPECIAL_TOKENS
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    for texts in (TEXTS, TEXTS[::-1], [" ".join(TEXTS)]):
        assert train_wordpiece(texts, 120).vocab == first.vocab
    assert "the" in first.vocab
    assert "jugs" in first.vocab


def test_trained_vocabulary_covers_its_texts() -> None:
    for lowercase in (True, False):
        made = train_wordpiece(TEXTS, 150, lowercase=lowercase)
        assert made.options.lowercase == lowercase
        for ids, text in zip(made.encode_batch(TEXTS), TEXTS, strict=True):
            assert made.special_ids.unk not in ids
            plain = made.options.normalizer().normalize_str(text)
            assert made.decode(ids).replace(" ", "") == plain.replace(" ", "")


def test_word_counting_in_pieces_changes_nothing(monkeypatch: Any) -> None:
    texts = [*TEXTS, "a\x0bb c\x1cd", "x" * 101, "\ud800 surrogate"]
    whole, _ = training._count_words(texts, WordPieceOptions(), 1.0)
    assert whole["ab"] == 1
    assert whole["cd"] == 1
    assert "x" * 101 not in whole
    monkeypatch.setattr(training, "_COUNTED_WORDS", 1)
    assert training._count_words(texts, WordPieceOptions(), 1.0) == (whole, 0)


def test_alphabet_limit_keeps_the_most_frequent_characters() -> None:
    made = train_wordpiece(["aa ab ba bb zq"] * 3, 10, limit_alphabet=2)
    assert set(made.vocab[5:9]) == {"a", "b", "##a", "##b"}
    assert made.special_ids.unk in made.encode("zq").ids


def _of_many_characters(size: int = 2000) -> list[str]:
    """Ideographs, of which the n-th is as frequent as 1/n; each is a word of its own."""
    return ["".join(chr(0x4E00 + n) * (4 * size // (n + 1)) for n in range(size)), "the cat sat"]


def _unknown(made: WordPieceTokenizer, texts: list[str]) -> float:
    ids = np.concatenate(made.encode_batch(texts))
    return float((ids == made.special_ids.unk).mean())


def test_the_alphabet_follows_the_text(caplog: Any) -> None:
    texts = _of_many_characters()
    whole = train_wordpiece(texts, 30000)
    assert _unknown(whole, texts) == 0, "there is room for all of them"
    assert [record.getMessage() for record in caplog.records] == [
        f"the vocabulary has {whole.vocab_size} of the 30000 tokens that were asked for: no "
        "remaining pair occurs 2 times; use more text, or ask for fewer tokens"
    ]
    caplog.clear()
    small = train_wordpiece(texts, 1500)
    assert small.vocab_size == 1500
    assert 0.03 < _unknown(small, texts) < 0.035, "and not 7% as with 1,000 characters"
    assert (
        "511 of the 2006 characters of the texts, 3.31% of the text, have no token (vocab_size "
        "1500 has no room for them)"
    ) in caplog.text
    caplog.clear()
    most = train_wordpiece(texts, 2000)
    assert 0 < _unknown(most, texts) < 0.0005
    assert not caplog.records


@pytest.mark.parametrize(
    ("options", "size", "cause"),
    [
        ({"limit_alphabet": 1000}, 1000, "limit_alphabet is 1000"),
        ({"character_coverage": 0.9}, None, "character_coverage is 0.9"),
        ({"limit_alphabet": 1000, "character_coverage": 0.9}, None, "character_coverage is 0.9"),
        ({"limit_alphabet": 9, "character_coverage": 0.9}, 9, "limit_alphabet is 9"),
    ],
)
def test_a_limit_of_the_alphabet_is_named(
    options: dict[str, Any], size: int | None, cause: str, caplog: Any
) -> None:
    texts = _of_many_characters()
    made = train_wordpiece(texts, 30000, **options)
    chars = {token.removeprefix("##") for token in made.vocab[5:]}
    kept = {char for char in chars if len(char) == 1}
    assert size is None or len(kept) == size
    total = "".join(texts).replace(" ", "")
    share = sum(char in kept for char in total) / len(total)
    assert size or 0.9 <= share < 0.901
    assert f"have no token ({cause})" in caplog.text
    assert f"{100 * (1 - share):.2f}% of the text" in caplog.text


def test_a_small_alphabet_is_whole_whatever_its_share() -> None:
    texts = ["the cat sat on the mat " * 3000, "zebra"]
    made = train_wordpiece(texts, 60)
    assert {"z", "##b", "##r"} <= set(made.vocab)
    covered = train_wordpiece(texts, 60, character_coverage=0.999)
    assert not {"z", "##b", "##r"} & set(covered.vocab)


def test_bad_training_requests(caplog: Any) -> None:
    with pytest.raises(UserError, match="have no words"):
        train_wordpiece(["", "\x00 \n"], 100)
    with pytest.raises(UserError, match="vocab_size is 3; the special tokens alone take 5"):
        train_wordpiece(["ab ba"], 3)
    with pytest.raises(UserError, match=r"vocab_size is 8; .* 2 most frequent .* need 9"):
        train_wordpiece(["ab ba"], 8)
    with pytest.raises(UserError, match="limit is 1,000,000"):
        train_wordpiece(["ab ba"], 2_000_000)
    for name, wrong in (
        ("min_frequency", 0), ("limit_alphabet", 0), ("character_coverage", 0.0),
        ("character_coverage", 1.1), ("character_coverage", float("nan")),
    ):  # fmt: skip
        with pytest.raises(UserError, match=f"{name} is {wrong}; it must be"):
            train_wordpiece(["ab ba"], 100, **{name: wrong})
    assert train_wordpiece(["ab ba"] * 2, 11).vocab_size == 11
    assert not caplog.records
    assert train_wordpiece(["ab ba"] * 2, 1000).vocab_size == 11
    assert "the vocabulary has 11 of the 1000 tokens" in caplog.text


def test_progress_bar_is_drawn_only_on_request(capfd: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(Intervals, "due", lambda intervals: True)
    train_wordpiece(TEXTS, 120)
    assert capfd.readouterr() == ("", "")
    train_wordpiece(TEXTS, 120, progress=True)
    assert " texts/s]" in capfd.readouterr().err


def test_rare_words_are_dropped_where_memory_ends(caplog):
    texts = [f"often oft w{number} often" for number in range(1000)]
    counts, dropped = training._count_words(texts, WordPieceOptions(), 100 / 2**20)
    assert counts["often"] == 2000
    assert counts["oft"] == 1000
    assert 50 <= len(counts) <= 100
    assert len(counts) + dropped == 1002
    everything, dropped = training._count_words(texts, WordPieceOptions(), 1002 / 2**20)
    assert (len(everything), dropped) == (1002, 0)
    trained = [train_wordpiece(texts, 60, memory=memory) for memory in (0.001, 4.0)]
    assert (
        trained[0].fingerprint == trained[1].fingerprint
    )  # 1,002 words fit into a thousandth of a GiB, too
    assert "dropped" not in caplog.text
    train_wordpiece(texts, 60, memory=100 / 2**20)
    assert f"rare words were dropped {1002 - len(counts)} times, because counted" in caplog.text


def test_words_counted_in_parts_are_counted_together(caplog):
    """Equal words of parts add up, within the same bound."""
    texts = [f"often oft w{number % 400} often {'x' * 101} É a\x0bb" for number in range(1000)]
    options = WordPieceOptions()
    parts = [training.count_words(texts[at : at + 300], options) for at in range(0, 1000, 300)]
    together = training._count_words([*parts, training.count_words([], options)], options, 1.0)
    assert together == training._count_words(texts, options, 1.0)
    assert train_wordpiece(parts, 60).fingerprint == train_wordpiece(texts, 60).fingerprint
    assert "dropped" not in caplog.text
    bounded = [training.count_words([" ".join(texts)], options, 100 / 2**20)]
    counts, dropped = training._count_words([*bounded, *parts], options, 100 / 2**20)
    assert counts["often"] == 4000
    assert len(counts) <= 100
    assert dropped > bounded[0].dropped > 0


def test_memory_does_not_grow_with_the_words():
    """Three times as many distinct words take the same memory; unbounded, they take more."""
    code = """
    from pathlib import Path
    from bert_jax.tokenization import training
    from bert_jax.tokenization.wordpiece import WordPieceOptions
    number, most = int(sys.argv[1]), int(sys.argv[2])
    training._COUNTED_WORDS = 1000
    texts = (f"{n * 11400714819323198485 % 2**64:x}" for n in range(number))
    training._count_words(texts, WordPieceOptions(), most / 2**20)
    print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
    """
    imports = "import bert_jax.tokenization.training"

    def memory(number: int, most: int) -> int:
        return int(run_bounded(code, number, most, extra=1 << 30, imports=imports)) << 10

    small, large = (memory(number, 4000) for number in (40_000, 120_000))
    assert abs(large - small) < 4 << 20
    assert memory(120_000, 10**6) > large + (8 << 20)
