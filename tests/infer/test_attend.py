"""The page of attention weights: what is in it, and what it refuses."""

import dataclasses
import html
import html.parser
import re

import numpy as np
import pytest
from asked_models import random_model
from attend_models import MODEL, attention_weights, scripts_model, weights_in
from fast_files import write_fast
from marian_files import write_tokenizer
from small_saved import FAMILIES, small_saved

from bert_jax.artefacts.saved import reading
from bert_jax.cli.main import main
from bert_jax.errors import UserError
from bert_jax.infer.attend import MAX_TOKENS, _row, attention, quantized
from bert_jax.infer.loaded import LoadedModel
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.tokenization.tokenizer import SPECIAL_TOKENS
from bert_jax.tokenization.wordpiece import WordPieceTokenizer


@pytest.fixture(scope="module")
def saved():
    return scripts_model()


def test_the_weights_in_the_page_are_those_of_the_model(saved):
    page = attention(saved, "the cat sat", "a dog ran").page
    data, weights = weights_in(page)
    assert data["tokens"] == ["[CLS]", "the", "cat", "sat", "[SEP]", "a", "dog", "ran", "[SEP]"]
    assert data["words"] == ["", "the", "cat", "sat", "", "a", "dog", "ran", ""]
    assert data["special"] == [1, 0, 0, 0, 1, 0, 0, 0, 1]
    assert data["second_start"] == 5
    expected = attention_weights(saved, data["tokens"], second_start=5)
    assert expected.max() > 0.4
    assert (abs(weights - expected) <= 0.004 * np.sqrt(expected) + 1e-5).all()
    # The second text has the other type: without it the weights differ by more than that.
    assert abs(weights - attention_weights(saved, data["tokens"], second_start=9)).max() > 0.05


def test_local_layers_say_so_and_have_no_weight_outside_their_windows():
    """The window of the small model is of 3 tokens on each side."""
    page = attention(small_saved("mlm", **FAMILIES["modernbert"]), "the cat sat on a mat . a").page
    data, weights = weights_in(page)
    assert data["windows"] == [None, 3, 3]
    assert "3 layers of 2 heads, 2 of them local (3 tokens on each side) · 10 tokens" in page
    places = np.arange(len(data["tokens"]))
    outside = abs(places[:, None] - places) > 3
    assert (weights[1:, :, outside] == 0).all()
    assert (weights[0, :, outside] > 0).any()
    assert (weights[1:, :, ~outside].sum(-1) > 0).all()
    np.testing.assert_allclose(weights.sum(-1), 1, atol=0.03)
    (plain, _) = weights_in(attention(scripts_model(), "the cat").page)
    assert plain["windows"] == [None, None]


def test_a_second_text_that_is_the_first_is_a_pair(saved):
    data, _ = weights_in(attention(saved, "the cat", "the cat").page)
    assert data["tokens"] == ["[CLS]", "the", "cat", "[SEP]", "the", "cat", "[SEP]"]
    assert data["second_start"] == 4


def test_a_byte_holds_a_weight_to_the_error_that_the_page_states():
    weights = np.linspace(0, 1, 10_000, dtype=np.float32).reshape(1, 1, 100, 100)
    error = abs((quantized(weights) / 255.0) ** 2 - weights)
    assert (error <= 0.004 * np.sqrt(weights) + 1e-5).all()


@pytest.mark.parametrize("second", [None, "a cat"])
def test_words_of_a_model_whose_rows_begin_without_cls(saved, tmp_path, second):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "marian"))
    row, words = _row(dataclasses.replace(saved, tokenizer=tokenizer), "the dog", second)
    first = [tokenizer.id_to_token(int(i)).replace("▁", "") for i in row.ids[:-1]]
    assert [*first, ""] == words
    assert "".join(words) == ("thedog" if second is None else "thedogacat")


class Tags(html.parser.HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.texts = [], {}
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        if self.tags:
            tag = self.tags[-1][0]
            self.texts[tag] = self.texts.get(tag, "") + data


ATTACK = "</script><script>alert(1)</script><!--<script> </title>\"' & {{data}} </style> \x00\u2028"


def test_text_is_text_wherever_it_stands(saved):
    plain = Tags(attention(dataclasses.replace(saved, name="a model"), "the", "the").page)
    page = attention(dataclasses.replace(saved, name=ATTACK), ATTACK, ATTACK).page
    found = Tags(page)
    assert [tag for tag, _ in found.tags] == [tag for tag, _ in plain.tags]
    for tag in ("title", "p", "bdi"):
        assert ATTACK.replace("\0", "\ufffd")[:60] in found.texts[tag]
    words = weights_in(page)[0]["words"]
    assert "".join(words[: len(words) // 2 + 1]) == re.sub(r"[\s\0]", "", ATTACK)
    page.encode()


class HostileTokenizer(WordPieceTokenizer):
    def id_to_token(self, id):
        return ATTACK


def test_a_vocabulary_is_text_too(saved):
    hostile = HostileTokenizer([*SPECIAL_TOKENS, "the"])
    page = attention(dataclasses.replace(saved, tokenizer=hostile), "the").page
    assert weights_in(page)[0]["tokens"] == [ATTACK] * 3
    plain = attention(saved, "the").page
    assert [tag for tag, _ in Tags(page).tags] == [tag for tag, _ in Tags(plain).tags]


def test_a_lone_surrogate_does_not_reach_the_file(saved):
    attention(dataclasses.replace(saved, name="\udcff"), "the \udcff", "a \ud800").page.encode()


def test_nothing_in_the_page_can_load_anything(saved):
    page = attention(saved, "the cat").page
    tags = Tags(page).tags
    assert not [a for _, a in tags if {"src", "href", "action", "style"} & set(a)]
    assert not [name for _, a in tags for name in a if name.startswith("on")]
    (policy,) = (a["content"] for _, a in tags if a.get("http-equiv"))
    assert policy.startswith(
        "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 's"
    )
    assert "unsafe" not in policy
    assert "url(" not in page
    assert "import" not in re.sub(r"!important", "", page)


def test_what_is_refused(saved):
    with pytest.raises(UserError, match=r"the text ' ' has no tokens"):
        attention(saved, " ")
    with pytest.raises(UserError, match=r"the second text '' has no tokens"):
        attention(saved, "the", "")
    with pytest.raises(UserError, match=rf"has 302 tokens, .* a page shows at most {MAX_TOKENS}"):
        attention(saved, "the " * 300)
    short = dataclasses.replace(saved, max_length=8)
    with pytest.raises(UserError, match=r"has 9 tokens, .* but many scripts takes at most 8"):
        attention(short, "the " * 7)


def test_the_command_replaces_a_file_with_a_page(tmp_path, monkeypatch, capsys, saved):
    asked = []
    monkeypatch.setattr(
        reading, "read_model", lambda path, **options: asked.append((path, options)) or saved
    )
    out = tmp_path / "new" / "page.html"
    for text in ("the dog", "the cat"):
        assert main(["attend", "work/x", text, "--text-b", "a hill", "--out", str(out)]) == 0
    assert asked == [("work/x", {"encoder_only": True})] * 2
    assert out.read_text("utf-8") == attention(saved, "the cat", "a hill").page
    assert [p.name for p in out.parent.iterdir()] == ["page.html"]
    assert capsys.readouterr().out.startswith(f"{out} (")
    for bad, why in ((tmp_path, "is a directory"), ("gs://bucket/a.html", "not a local path")):
        assert main(["attend", "work/x", "the", "--out", str(bad)]) == 2
        assert why in capsys.readouterr().err
    assert len(asked) == 2


def fills_in(page):
    return re.findall(r'<p class="fill">(.*?): <bdi>(.*?)</bdi></p>', page)


def test_a_mask_is_a_token_and_the_page_says_what_the_model_puts_there():
    saved = random_model("pretrained")
    page = attention(saved, "the [MASK] sat [MASK]").page
    data, _ = weights_in(page)
    assert data["tokens"] == ["[CLS]", "the", "[MASK]", "sat", "[MASK]", "[SEP]"]
    assert data["words"] == ["", "the", "[MASK]", "sat", "[MASK]", ""]
    (answer,) = LoadedModel(saved).fill_mask("the [MASK] sat [MASK]")
    expected = [
        ", ".join(f"{c['token']} {100 * c['probability']:.1f}\xa0%" for c in mask)
        for mask in answer["masks"]
    ]
    assert data["fills"] == {"2": expected[0], "4": expected[1]}
    assert fills_in(page) == [("Token 3, [MASK]", html.escape(expected[0])),
                              ("Token 5, [MASK]", html.escape(expected[1]))]  # fmt: skip


def test_tokens_of_bytes_are_readable(tmp_path):
    tokenizer = load_tokenizer(write_fast(tmp_path, "bpe"))
    saved = random_model("pretrained", vocab_size=tokenizer.vocab_size)
    saved = dataclasses.replace(saved, tokenizer=tokenizer)
    data, _ = weights_in(attention(saved, "The  dog 漢<mask>").page)
    assert data["tokens"] == ["<s>", "The", "␣", "dog", "␣", "漢", "漢", "漢", "<mask>", "</s>"]
    assert list(data["fills"]) == ["8"]
    assert "Ġ" not in data["fills"]["8"]


def test_a_mask_in_a_second_text_is_read_as_of_it():
    saved = random_model("pretrained")
    pair, _ = weights_in(attention(saved, "the cat", "[MASK] sat [MASK]").page)
    assert list(pair["fills"]) == ["4", "6"]
    embeddings = dict(saved.params["encoder"]["embeddings"])
    embeddings["type"] = embeddings["type"][[0, 0]]
    params = {**saved.params, "encoder": {**saved.params["encoder"], "embeddings": embeddings}}
    untyped = dataclasses.replace(saved, params=params)
    other, _ = weights_in(attention(untyped, "the cat", "[MASK] sat [MASK]").page)
    assert pair["fills"] != other["fills"]


def test_a_model_without_the_head_says_so(saved):
    page = attention(saved, "the [MASK]").page
    assert fills_in(page) == [("Token 3, [MASK]", "this model has no head that fills masks")]
    assert weights_in(page)[0]["tokens"] == ["[CLS]", "the", "[MASK]", "[SEP]"]


def test_candidates_are_text_too():
    saved = random_model("pretrained")
    plain = attention(saved, "the [MASK]").page
    words = [f"</script><script>{n}&" for n in range(saved.config.vocab_size - 5)]
    hostile = WordPieceTokenizer([*SPECIAL_TOKENS, *words])
    page = attention(dataclasses.replace(saved, tokenizer=hostile), "the [MASK]").page
    assert "&lt;script&gt;" in fills_in(page)[0][1]
    assert [tag for tag, _ in Tags(page).tags] == [tag for tag, _ in Tags(plain).tags]


def test_the_command_reads_the_head_where_a_text_has_a_mask(tmp_path, monkeypatch):
    asked = []
    saved = random_model("pretrained")
    monkeypatch.setattr(
        reading, "read_model", lambda path, **options: asked.append(options) or saved
    )
    out = tmp_path / "page.html"
    assert main(["attend", "x", "--out", str(out), "the cat", "--text-b", "a [MASK]"]) == 0
    assert asked == [{"encoder_only": True}, {}]
    assert len(fills_in(out.read_text("utf-8"))) == 1


def test_a_model_of_one_sentence_type_reads_pairs(saved):
    config = dataclasses.replace(MODEL, num_types=1)
    embeddings = dict(saved.params["encoder"]["embeddings"])
    embeddings["type"] = embeddings["type"][:1]
    params = {"encoder": {**saved.params["encoder"], "embeddings": embeddings}}
    one = dataclasses.replace(saved, config=config, params=params)
    data, weights = weights_in(attention(one, "the cat", "a dog").page)
    expected = attention_weights(one, data["tokens"], second_start=len(data["tokens"]))
    np.testing.assert_allclose(weights, expected, atol=0.005)
