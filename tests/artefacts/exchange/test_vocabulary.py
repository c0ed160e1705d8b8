"""More words for a model that has a vocabulary: what is new, and that nothing else is."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from modern_files import KINDS, write_modern
from pretraining import apply_pretraining
from tokenizers import AddedToken
from translators import translator_of
from vector_models import vector_model

from bert_jax.artefacts.exchange.exported_files import write_huggingface
from bert_jax.artefacts.exchange.vocabulary import add_tokens, new_tokens, read_lines
from bert_jax.artefacts.formats.entries import lookup
from bert_jax.artefacts.saved.model import Origin, SavedModel
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import init_params
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.tokenization.sentencepiece import train_sentencepiece
from bert_jax.tokenization.tokenizer import SPECIAL_TOKENS, Tokenizer
from bert_jax.tokenization.wordpiece import WordPieceOptions, WordPieceTokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = [*SPECIAL_TOKENS, *LETTERS, *(f"##{c}" for c in LETTERS), "the", "heart", "##gram", "."]
OLD_TEXT, NEW_TEXT = "the heart. abc zzz", "the stent. cardiogram, Angio stents"


def tokenizer(size: int = len(WORDS), **options: bool) -> WordPieceTokenizer:
    """`WORDS`, and what is needed to make `size`."""
    more = [f"x{i}" for i in range(size - len(WORDS))]
    return WordPieceTokenizer([*WORDS, *more], WordPieceOptions(**options))


def model(tokenizer: Tokenizer, vocab_size: int, **fields: bool) -> SavedModel:
    config = ModelConfig(
        vocab_size=vocab_size, num_positions=32, hidden_dim=16, num_layers=1, num_heads=2,
        mlp_dim=32, dtype="float32", **fields,
    )  # fmt: skip
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    params = jax.tree.map(lambda s: random.normal(size=s.shape).astype(np.float32), shapes)
    params["encoder"]["embeddings"]["token"][vocab_size:] = 0
    params["mlm"]["bias"][vocab_size:] = 0
    if not config.tied:
        params["mlm"]["decoder"][vocab_size:] = 0
    return SavedModel(
        config, params, None, tokenizer, Path("old"), 32, "a model", Origin("huggingface")
    )


def mlm(saved: SavedModel, ids: np.ndarray) -> np.ndarray:
    rows = jnp.asarray(ids)[None]
    params = jax.tree.map(jnp.asarray, saved.params)
    run = jax.jit(apply_pretraining, static_argnums=0)
    logits = run(saved.config, params, rows, jnp.zeros_like(rows), jnp.ones_like(rows))
    return np.asarray(logits.vocabulary)[0]


@pytest.mark.parametrize(
    ("tokens", "rows", "after"),
    [
        (127, 128, 130),  # past the padding; the model has a row of no token
        (100, 110, 110),  # all that is needed
    ],
)
def test_old_logits_stay_and_new_rows_are_means(tokens: int, rows: int, after: int) -> None:
    saved = model(tokenizer(tokens), rows)
    grown = add_tokens(saved, new_tokens(saved.tokenizer, ["stent", "cardiogram", "angio"]))
    assert grown.config == dataclasses.replace(saved.config, vocab_size=after)
    ids = saved.tokenizer.encode(OLD_TEXT).ids
    np.testing.assert_array_equal(grown.tokenizer.encode(OLD_TEXT).ids, ids)
    before, now = mlm(saved, ids), mlm(grown, ids)
    np.testing.assert_array_equal(now[:, :tokens], before[:, :tokens])  # bit for bit

    for part in ("token", "bias"):
        old, new = (
            np.asarray(m.params["encoder"]["embeddings"]["token"] if part == "token"
                       else m.params["mlm"]["bias"])
            for m in (saved, grown)
        )  # fmt: skip
        assert len(new) == grown.config.padded_vocab_size
        np.testing.assert_array_equal(new[:tokens], old[:tokens])
        for id, word in enumerate(["stent", "cardiogram", "angio"], tokens):
            pieces = saved.tokenizer.encode(word).ids
            assert len(pieces) > 2
            np.testing.assert_allclose(new[id], old[pieces].mean(0), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(new[tokens + 3 : rows], old[tokens + 3 : rows])
        assert not new[after:].any()
    assert saved.tokenizer.vocab_size == tokens  # as it was
    assert saved.params["encoder"]["embeddings"]["token"].shape[0] == saved.config.padded_vocab_size


def test_new_words_in_text() -> None:
    saved = model(tokenizer(), len(WORDS))
    grown = add_tokens(saved, new_tokens(saved.tokenizer, ["stent", "cardiogram", "angio"]))
    pieces = [grown.tokenizer.id_to_token(id) for id in grown.tokenizer.encode(NEW_TEXT).ids]
    # The comma is unknown to this vocabulary; a longer word begins with the longest entry.
    assert pieces == ["the", "stent", ".", "cardiogram", "[UNK]", "angio", "stent", "##s"]
    assert len(saved.tokenizer.encode("cardiogram").ids) == 7


def test_a_model_without_an_mlm_head() -> None:
    saved = model(tokenizer(), len(WORDS))
    bare = dataclasses.replace(saved, params={"encoder": saved.params["encoder"]})
    assert add_tokens(bare, new_tokens(bare.tokenizer, ["stent"])).params.keys() == {"encoder"}


def test_the_weights_of_static_queries_grow_with_the_vocabulary(tmp_path: Path) -> None:
    old = vector_model("splade", static_queries=True)
    words = [f"zebra{letter}" for letter in "abc"]
    model = add_tokens(old, new_tokens(old.tokenizer, words))
    pieces = [old.params["queries"][ids].mean() for ids in old.tokenizer.encode_words(words)]
    wanted = np.concatenate([old.params["queries"], pieces])
    np.testing.assert_allclose(model.params["queries"], wanted, rtol=1e-6)
    write_huggingface(model, tmp_path)
    special = old.tokenizer.special_ids
    wanted = model.params["queries"].copy()
    wanted[[special.cls, special.sep]] = 0  # sentence-transformers reads queries without them
    np.testing.assert_array_equal(read_model(tmp_path).params["queries"], wanted)


def test_what_is_counted() -> None:
    lines = ["Stent", "", " stent ", "the", "naïve", "ab", "ω", "stent"]
    found = new_tokens(tokenizer(), lines)
    assert found == (("stent", "naive", "ab", "ω"), 1, 2, 2, 1)
    saved = model(tokenizer(), len(WORDS))
    assert add_tokens(saved, new_tokens(saved.tokenizer, ["the", "the "])) is saved
    assert f"{new_tokens(tokenizer(), ['the', 'the '])}" == (
        "0 tokens are new; 2 were in the vocabulary already"
    )
    assert (
        add_tokens(saved, new_tokens(saved.tokenizer, lines)).name == "a model, with 4 more tokens"
    )
    assert f"{found}" == (
        "4 tokens are new; each begins as the mean of its former pieces; 1 was in the "
        "vocabulary already; 2 are repetitions; 2 are added in normalised form; 1 start, at least "
        "in part, as [UNK]"
    )
    cased = new_tokens(tokenizer(lowercase=False), ["Stent", "stent", "Naïve"])
    assert cased.tokens == ("Stent", "stent", "Naïve")


def test_entries_that_are_no_word(tmp_path: Path) -> None:
    path = tmp_path / "tokens.txt"
    long = "a" * 101
    path.write_text(f"fine\n\nx-ray\n##ing\n[MASK]\ntwo words\n日本\n{long}\n\u200b\n")
    with pytest.raises(UserError) as caught:
        new_tokens(tokenizer(), read_lines(path), where=f"{path}, line {{}}")
    message = str(caught.value)
    for line, said in (
        (3, "'x-ray' is 3 words ('x - ray')"),
        (4, "'##ing' is 3 words ('# # ing') to this tokenizer; pieces of words cannot be added"),
        (5, "'[MASK]' is 3 words"),
        (6, "'two words' is 2 words"),
        (7, "'日本' is 2 words"),
        (8, "is longer than 100 characters"),
        (9, "has no character that this tokenizer keeps"),
    ):
        assert f"{path}, line {line}: " in message
        assert said in message
    assert "line 1:" not in message
    with pytest.raises(UserError, match="; and 5 more"):
        new_tokens(tokenizer(), ["a b"] * 25)
    with pytest.raises(UserError, match=r"entry 1: '\\ud800' has no character"):
        new_tokens(tokenizer(), ["\ud800"])
    path.write_text("\n \n")
    with pytest.raises(UserError, match="has no tokens"):
        read_lines(path)


def test_a_tokenizer_of_another_kind() -> None:
    texts = ["the heart is a stent", "a stent is in the heart"] * 5
    other = train_sentencepiece(texts, 300, model="unigram", character_coverage=1.0)
    with pytest.raises(UserError, match="of the kind sentencepiece"):
        new_tokens(other, ["stent"])


@pytest.mark.parametrize("kind", KINDS)
def test_words_for_a_tokenizer_json_and_a_decoder_of_its_own(kind, tmp_path):
    """Of ModernBERT's, EuroBERT's and mmBERT's form."""
    old = load_tokenizer(write_modern(tmp_path / "old", kind))
    words = ["stent", "naïve", "x-ray", "C++", "心臓"]
    words_of = (entry.strip("\u0120\u2581") for entry in old.vocab[old.vocab_size // 2 :])
    there = next(word for word in words_of if word and len(old.encode_words([word])[0]) == 1)
    new = new_tokens(old, ["stent ", *words[1:], "stent", "", there, "nai\u0308ve"])
    composed = kind == "modernbert"  # whose normalizer composes characters
    assert (new.existing, new.repeated) == (1, 1 + composed)
    words += [] if composed else ["nai\u0308ve"]
    assert new.tokens == tuple(words)
    saved = model(old, old.vocab_size, tied=False)
    grown = add_tokens(saved, new)
    for path in (("encoder", "embeddings", "token"), ("mlm", "decoder"), ("mlm", "bias")):
        before, after = (lookup(each.params, path) for each in (saved, grown))
        assert len(after) == grown.config.padded_vocab_size
        np.testing.assert_array_equal(after[: len(old.vocab)], before[: len(old.vocab)])
        for id, word in enumerate(words, old.vocab_size):
            pieces = old.encode(f" {word}").ids
            np.testing.assert_allclose(after[id], before[pieces].mean(0), rtol=1e-5, atol=1e-6)

    grown.tokenizer.save(tmp_path / "new")
    tokenizer = load_tokenizer(tmp_path / "new")
    assert tokenizer.fingerprint == grown.tokenizer.fingerprint
    ids = {word: id for id, word in enumerate(words, old.vocab_size)}
    text = "stent naïve\tx-ray C++, 心臓 (stent) stents stent_ consistent"
    found = tokenizer.encode(text)
    places = [n for n, id in enumerate(found.ids) if id >= old.vocab_size]
    spelled = [text[start:end] for start, end in found.offsets[places]]
    assert spelled == ["stent", "naïve", "x-ray", "C++", "心臓", "stent"]  # no part of a word
    assert found.ids[places].tolist() == [ids[word] for word in spelled]
    assert tokenizer.decode(found.ids[places]) == " ".join(spelled)
    assert not tokenizer.continues_word[found.ids[places]].any()
    rest = old.encode("the river froze early").ids
    np.testing.assert_array_equal(tokenizer.encode("the river froze early").ids, rest)
    with pytest.raises(
        UserError, match=r"is a special token .*; tokens, entry 2: 'two words' is 2"
    ):
        new_tokens(old, [old.id_to_token(old.special_ids.mask), "two words"])


def test_written_and_read(tmp_path: Path) -> None:
    saved = model(tokenizer(127), 127)
    grown = add_tokens(saved, new_tokens(saved.tokenizer, ["stent", "cardiogram"]))
    write_huggingface(grown, tmp_path)
    back = read_model(tmp_path)
    assert back.tokenizer.fingerprint == grown.tokenizer.fingerprint
    assert back.config.vocab_size == 129
    jax.tree.map(np.testing.assert_array_equal, back.params, grown.params)


@pytest.mark.parity
def test_in_transformers(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForPreTraining, AutoTokenizer

    saved = model(tokenizer(127), 127)
    grown = add_tokens(saved, new_tokens(saved.tokenizer, ["stent", "cardiogram", "angio"]))
    logits = []
    for each, name in ((saved, "old"), (grown, "new")):
        (tmp_path / name).mkdir()
        write_huggingface(each, tmp_path / name)
        theirs = AutoTokenizer.from_pretrained(tmp_path / name)
        for text in (OLD_TEXT, NEW_TEXT):
            ids = theirs(text, add_special_tokens=False)["input_ids"]
            assert ids == each.tokenizer.encode(text).ids.tolist()
        loaded = AutoModelForPreTraining.from_pretrained(tmp_path / name).eval()
        ids = each.tokenizer.encode(OLD_TEXT).ids
        with torch.no_grad():
            found = loaded(torch.tensor(ids[None])).prediction_logits[0].numpy()
        np.testing.assert_allclose(found, mlm(each, ids)[:, : found.shape[1]], atol=1e-4)
        logits.append(found[:, :127])
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-5)


def test_a_piece_of_words_is_no_word(tmp_path: Path) -> None:
    """It was counted as known, although the tokenizer still splits it."""
    old = load_tokenizer(write_modern(tmp_path / "old", "modernbert"))
    pieces = [entry for entry in old.vocab if entry.isalpha() and f"\u0120{entry}" not in old.vocab]
    assert pieces
    with pytest.raises(
        UserError, match=f"tokens, entry 1: '{pieces[-1]}' exists as a piece of words"
    ):
        new_tokens(old, [pieces[-1]])


def test_the_tables_of_a_translator_grow_with_its_vocabulary() -> None:
    saved = translator_of("pair", "uncased")
    grown = add_tokens(saved, new_tokens(saved.tokenizer, ["stent"]))
    assert grown.network is not None
    assert grown.network.model == grown.config
    assert grown.config.vocab_size > saved.config.vocab_size


def test_an_added_token_stays_at_the_end_of_the_vocabulary() -> None:
    """With a token behind it, it became a piece of words."""
    old = WordPieceTokenizer([*WORDS, "stent"], WordPieceOptions(), [AddedToken("stent")])
    with pytest.raises(UserError, match="ends with the added token 'stent'"):
        new_tokens(old, ["angio"])
