"""`bert_jax.load`: answers against the training code's own functions, shapes, refusals."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from applied_task import apply_task
from asked_models import HEADS, TOKENIZER, WORDS, random_model
from translators import translator_of
from vector_models import vector_model

from bert_jax.artefacts.formats.huggingface_files import Reading
from bert_jax.artefacts.saved.model import SavedModel
from bert_jax.errors import UserError
from bert_jax.infer import forward
from bert_jax.infer.attend import attention
from bert_jax.infer.embed import Embedder
from bert_jax.infer.loaded import LoadedModel
from bert_jax.infer.predictor import MAX_TOKENS, Given, shape_for
from bert_jax.infer.tag import split_words
from bert_jax.model.heads import layer_outputs
from bert_jax.tasks.long_texts import LongTexts
from bert_jax.tokenization.wordpiece import WordPieceTokenizer

TEXTS = ["the cat sat", "", "kim met the dog on a hill . " * 2, "猫 ran"]
PAIRS = ["a dog", None, "the mat", None]


def row_of(text: str, pair: str | None = None) -> tuple[np.ndarray, ...]:
    """The padded row that is meant, made by hand: tokens, type ids, segment ids."""
    special = TOKENIZER.special_ids
    ids = [special.cls, *TOKENIZER.encode(text).ids, special.sep]
    types = [0] * len(ids)
    if pair is not None:
        second = [*TOKENIZER.encode(pair).ids, special.sep]
        ids, types = ids + second, types + [1] * len(second)
    fill = 48 - len(ids)
    rows = (ids + [special.pad] * fill, types + [0] * fill, [1] * len(ids) + [0] * fill)
    return tuple(np.array([row], np.int32) for row in rows)


def logits_of(saved: SavedModel, rows: tuple[np.ndarray, ...]) -> np.ndarray:
    """Of the function that training and `bert-jax predict` use."""
    assert saved.outputs is not None
    return np.asarray(_logits(saved.config, saved.outputs.head, saved.params, *rows))[0]


_logits = jax.jit(apply_task, static_argnums=(0, 1))


@pytest.fixture(scope="module")
def classifying() -> tuple[SavedModel, LoadedModel]:
    saved = random_model("class")
    return saved, LoadedModel(saved)


def test_classes_are_those_of_the_training_code(classifying):
    saved, model = classifying
    assert model.verbs == ("classify", "embed")
    answers = model.classify(TEXTS, PAIRS)
    for text, pair, answer in zip(TEXTS, PAIRS, answers, strict=True):
        logits = logits_of(saved, row_of(text, pair))
        shares = np.exp(logits - logits.max())
        expected = dict(zip(model.labels, shares / shares.sum(), strict=True))
        assert answer["probabilities"] == pytest.approx(expected, abs=2e-5)
        assert list(answer["probabilities"]) == sorted(expected, key=lambda name: -expected[name])
        assert answer["label"] == next(iter(answer["probabilities"]))


def test_large_batches_compute_places_of_the_last_layer_and_answer_the_same(monkeypatch):
    saved = random_model("class")
    model = LoadedModel(saved)
    batch = dict(zip(("tokens", "type_ids", "segment_ids"), row_of(*TEXTS[:2]), strict=True))
    small, _, _ = forward._before_end(model.model, batch)
    expected = forward.task_logits(model.model, batch)
    monkeypatch.setattr(forward, "FEW_TOKENS", 0)
    large, _, _ = forward._before_end(model.model, batch)
    assert large.keys() - small.keys() == {"layer"}
    found = forward.task_logits(model.model, batch)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_allclose(found[0], logits_of(saved, row_of(*TEXTS[:2])), atol=1e-5)


def test_a_call_compiles_nothing_that_one_before_it_compiled(classifying):
    _, model = classifying
    short, long = "cat", "the cat sat on a mat . " * 4
    model.classify([short, long, short])
    before = forward._task_logits.program()._cache_size()
    model.classify([long, "dog ran", "", short])
    model.classify(["dog", "dog", "the dog sat under a hill . " * 4])
    assert forward._task_logits.program()._cache_size() == before
    assert [shape_for(n, 3, 512) for n in (16, 17, 512)] == [(4, 16), (4, 24), (2, 512)]
    every = {shape_for(n, count, 512) for n in range(1, 513) for count in range(1, 500)}
    assert len({length for _, length in every}) == 15
    assert len(every) == 61
    assert all(rows * length <= MAX_TOKENS for rows, length in every)
    assert shape_for(513, 3, 8192) == (1, 640)  # not 8,192 tokens


def test_order_is_kept_over_batches(classifying):
    _, model = classifying
    texts = [f"the {'cat ' * (n % 9)}sat" for n in range(70)]
    together = model.classify(texts)
    alone = {text: model.classify(text)[0] for text in texts[:9]}
    for text, answer in zip(texts, together, strict=True):
        assert answer["probabilities"] == pytest.approx(alone[text]["probabilities"], abs=2e-5)


def test_several_labels_and_scores():
    saved = random_model("classes")
    model = LoadedModel(saved)
    share = 1 / (1 + np.exp(-logits_of(saved, row_of("the cat"))))
    (answer,) = model.classify("the cat", threshold=float(np.sort(share)[1]) - 1e-4)
    assert sorted(answer["labels"]) == sorted(np.array(["x", "y", "z"])[share >= np.sort(share)[1]])
    assert answer["probabilities"] == pytest.approx(
        dict(zip("xyz", share.tolist(), strict=True)), abs=2e-5
    )
    saved = random_model("score")
    (answer,) = LoadedModel(saved).classify("the cat", "a dog")
    assert answer["score"] == pytest.approx(
        float(logits_of(saved, row_of("the cat", "a dog"))[0]), abs=2e-5
    )
    small = {**saved.params, "head": jax.tree.map(lambda leaf: 1e-6 * leaf, saved.params["head"])}
    (least,) = LoadedModel(dataclasses.replace(saved, params=small)).classify("the cat", "a dog")
    assert least["score"] == pytest.approx(1e-6 * answer["score"], rel=1e-5)


def test_thresholds_and_long_texts_of_the_model():
    """Labels above thresholds of their own; the mean of the logits of two windows."""
    saved = random_model("classes")
    text = "the cat sat on a mat . " * 8
    ids = TOKENIZER.encode(text).ids.tolist()
    room, special = saved.max_length - 2, TOKENIZER.special_ids
    assert room < len(ids) < room + room // 2
    rows = [
        tuple(np.array([row], np.int32) for row in (each, [0] * 48, [1] * 48))
        for part in (ids[:room], ids[-room:])
        for each in ([special.cls, *part, special.sep],)
    ]
    logits = np.mean([logits_of(saved, row) for row in rows], axis=0)
    share = 1 / (1 + np.exp(-logits))
    least = (share[0] - 1e-3, share[1] + 1e-3, share[2] - 1e-3)
    outputs = dataclasses.replace(
        saved.outputs, thresholds=tuple(map(float, least)), long=LongTexts("windows")
    )
    with warnings.catch_warnings(action="error"):  # nothing is cut
        short, long = LoadedModel(dataclasses.replace(saved, outputs=outputs)).classify(["a", text])
    expected = dict(zip("xyz", share.tolist(), strict=True))
    assert long["probabilities"] == pytest.approx(expected, abs=2e-5)
    assert long["labels"] == ["x", "z"]
    alone = LoadedModel(saved).classify("a")[0]["probabilities"]
    assert short["probabilities"] == pytest.approx(alone, abs=2e-5)
    ends = dataclasses.replace(
        saved, outputs=dataclasses.replace(outputs, long=LongTexts("head_tail"))
    )
    with pytest.warns(UserWarning, match="1 of 1 texts are longer than 48 .* lost their middle"):
        LoadedModel(ends).classify(text)


def test_tags_of_a_text_with_offsets_and_of_a_long_one():
    saved = random_model("tags")
    model = LoadedModel(saved)
    text = "Kim  met Lee, in rome.\n猫山"
    (answer, nothing, long) = model.tag([text, " ", "kim met lee in rome . " * 20])
    words = ["Kim", "met", "Lee", ",", "in", "rome", ".", "猫", "山"]
    assert answer["tokens"] == words
    assert [text[start:end] for start, end in answer["offsets"]] == words
    logits = logits_of(saved, row_of(" ".join(words).lower()))[1 : len(words) + 1]
    best = [model.labels[n] for n in logits.argmax(-1)]
    assert [tag[2:] for tag in answer["tags"]] == [tag[2:] for tag in best]
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    assert answer["entities"]
    for entity in answer["entities"]:
        first, end = entity["words"]
        score = np.mean([max(each) for each in shares[first:end]])
        assert entity["score"] == pytest.approx(score, abs=1e-4)
        assert entity["text"] == text[entity["start"] : entity["end"]]
        assert entity["text"].startswith(words[first])
        assert entity["text"].endswith(words[end - 1])
    assert nothing == {"tokens": [], "tags": [], "offsets": [], "entities": []}
    assert len(long["tags"]) == 120
    (given,) = model.tag([words])
    assert given["tags"] == answer["tags"]
    assert "offsets" not in given
    wide = dataclasses.replace(saved.outputs, reading=Reading(24))
    (short,) = LoadedModel(dataclasses.replace(saved, outputs=wide), max_length=16).tag([words * 3])
    assert len(short["tags"]) == 3 * len(words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("(didn't) 1,000!", ["(", "didn't", ")", "1,000", "!"]),
        ("the U.S. e.g. end.", ["the", "U.S.", "e.g.", "end", "."]),
        ("Ph.D., z.B. x", ["Ph.D.", ",", "z.B.", "x"]),
        ("Booking.com. 3.50.", ["Booking.com", ".", "3.50", "."]),
        ("... हिन्दी में।", [".", ".", ".", "हिन्दी", "में", "।"]),
        ("在Berlin、東京\u3000x", ["在", "Berlin", "、", "東", "京", "x"]),
        ("", []),
    ],
)
def test_words_of_raw_text(text, words):
    assert [text[start:end] for start, end in split_words(text)] == words


def test_answers_are_slices_and_long_contexts_are_read_to_the_end():
    model = LoadedModel(random_model("span"))
    context = "The cat sat on a mat. " * 12 + "Kim met Lee."
    answers = model.answer(["who ?", "who met lee ?"], context, top=4)
    for answer in answers:
        assert answer["answer"] == context[answer["start"] : answer["end"]]
        shares = [each["probability"] for each in answer["candidates"]]
        assert shares == sorted(shares, reverse=True)
        assert len(shares) == 4
        assert answer["null_odds"] is not None
    always, never = (
        model.answer("who ?", context, null_threshold=threshold)[0] for threshold in (-1e9, 1e9)
    )
    assert (always["answer"], always["start"], always["end"]) == ("", 0, 0)
    assert never["answer"] == answers[0]["answer"]


def test_vectors_are_of_the_states():
    saved = random_model("pretrained")
    model = LoadedModel(saved)
    states = np.asarray(
        layer_outputs(
            saved.config, saved.params, *map(jnp.asarray, row_of("the cat sat", "a dog"))
        ).states
    )[:, 0, :8]  # 8 tokens: [CLS] the cat sat [SEP] a dog [SEP]
    inner = states[2][[1, 2, 3, 5, 6]]
    for options, expected in (
        ({"layers": slice(-2, -1)}, states[1:].mean((0, 1))),
        ({"layers": slice(None, 1)}, states[:2].mean((0, 1))),
        ({"layers": slice(1, None)}, states[1:].mean((0, 1))),
        ({"pooling": "cls"}, states[2][0]),
        ({"pooling": "max", "special_tokens": False}, inner.max(0)),
        ({"pooling": "mean_sqrt_len", "special_tokens": False}, inner.sum(0) / np.sqrt(5)),
    ):
        (found,) = model.embed("the cat sat", "a dog", **options)
        np.testing.assert_allclose(found, expected, atol=2e-5)
        (unit,) = model.embed("the cat sat", "a dog", **options, normalize=True)
        np.testing.assert_allclose(unit, expected / np.linalg.norm(expected), atol=2e-5)


def test_tuples_are_pairs(classifying):
    _, model = classifying
    mixed = list(zip(TEXTS, PAIRS, strict=True))
    mixed = [text if pair is None else (text, pair) for text, pair in mixed]
    assert model.classify(mixed) == model.classify(TEXTS, PAIRS)
    np.testing.assert_array_equal(model.embed(mixed), model.embed(TEXTS, PAIRS))
    assert len(model.classify(("the cat", "a dog"))) == 2


def test_what_a_model_says_of_itself(classifying):
    saved, model = classifying
    assert f"{model!r}" == (
        "<random class: 2 layers x 16, at most 48 tokens, 27 in the vocabulary; classify, embed>"
    )
    assert (model.tokenizer, model.max_length) == (saved.tokenizer, 48)
    # Verbs have the names of methods.
    assert f"{LoadedModel(random_model('pretrained'))!r}".endswith("; fill_mask, embed>")


def test_limits_of_length_batch_and_device(classifying, monkeypatch):
    saved, model = classifying
    short = LoadedModel(saved, max_length=8, device="cpu", batch_tokens=16)
    assert short.max_length == 8
    with pytest.warns(UserWarning, match="longer than 8 tokens"):
        cut = short.classify("the cat sat on a mat . the dog ran")
    assert cut == model.classify("the cat sat on a mat")
    shapes = []
    whole = forward.task_logits
    monkeypatch.setattr(
        "bert_jax.infer.predictor.task_logits",
        lambda model, batch: shapes.append(batch["tokens"].shape) or whole(model, batch),
    )
    short.classify(["the cat"] * 5)
    assert shapes == [(2, 8), (2, 8), (1, 8)]


@pytest.mark.parametrize("make", [lambda: random_model("class"), translator_of])
def test_a_cpu_beside_a_gpu_computes_as_a_cpu_alone(monkeypatch, make):
    """`auto` follows the default backend, which is the GPU then."""
    saved = make()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for dtype, wanted in (("auto", "float32"), ("bfloat16", "bfloat16")):
        config = dataclasses.replace(saved.config, dtype=dtype)
        found = forward.on_device(dataclasses.replace(saved, config=config), "cpu")
        assert (found.config.dtype, found.config.attention_impl) == (wanted, "xla")
        if found.network is not None:
            assert (found.network.model.dtype, found.network.model.attention_impl) == (
                "float32", "xla",
            )  # fmt: skip


def test_attention_of_a_loaded_model(tmp_path, monkeypatch):
    saved = random_model("pretrained")
    found = LoadedModel(saved).attend("the cat sat", "a dog")
    assert found.tokens == ["[CLS]", "the", "cat", "sat", "[SEP]", "a", "dog", "[SEP]"]
    assert found.weights.shape == (2, 2, 8, 8)
    np.testing.assert_allclose(found.weights.sum(-1), 1, atol=1e-5)
    assert found.page == attention(saved, "the cat sat", "a dog").page
    assert "8 tokens in 2 layers of 2 heads" in f"{found}"
    monkeypatch.setenv("HOME", f"{tmp_path}")
    found.save("~/page.html")
    assert (tmp_path / "page.html").read_text("utf-8") == found.page
    assert found._repr_html_().startswith('<iframe srcdoc="&lt;!doctype html')


def test_no_texts_are_no_answers(classifying):
    _, model = classifying
    assert model.classify([]) == []
    assert model.embed([]).shape == (0, 16)


def test_texts_without_words_have_no_tags():
    model = LoadedModel(random_model("tags"))
    blank = {"tokens": [], "tags": [], "offsets": [], "entities": []}
    assert model.tag(["", " "]) == [blank, blank]


@pytest.mark.parametrize(
    ("kind", "ask", "message"),
    [
        (
            "pretrained",
            lambda m: m.classify("a"),
            "no classification head; it supports fill-mask and embed",
        ),
        (
            "class",
            lambda m: m.fill_mask("[MASK]"),
            "no masked-LM head; it supports classify and embed",
        ),
        ("class", lambda m: m.tag("a"), "random class: this model has no tagging head"),
        ("tags", lambda m: m.answer("a", "b"), "no span head; it supports tag and embed"),
        (
            "class",
            lambda m: m.classify(["a"], ["b", "c"]),
            "got 1 text but 2 text_b; give the same number of each",
        ),
        ("class", lambda m: m.classify([("a", "b")], ["c"]), "texts has tuples, and pairs is"),
        ("class", lambda m: m.classify(["a", ("b",)]), "text 2 is a tuple of length 1; a pair is"),
        ("class", lambda m: LoadedModel(m.model, device="abacus"), "'abacus'; JAX finds cpu:0"),
        ("class", lambda m: LoadedModel(m.model, device="cpu:99"), "device is 'cpu:99'"),
        ("class", lambda m: LoadedModel(m.model, max_length=49), "takes 8 to 48 tokens"),
        ("class", lambda m: LoadedModel(m.model, batch_tokens=0), "batch_tokens is 0"),
        ("class", lambda m: m.classify("a", top=0), "top is 0"),
        ("class", lambda m: m.classify("a", threshold=2.0), "threshold is 2"),
        ("class", lambda m: m.classify("a", threshold=0.9), "0.9, but .* predicts one class for"),
        ("score", lambda m: m.classify("a", top=2), "top is 2, but .* predicts a score"),
        ("class", lambda m: m.embed("a", layers=3), r"no layer 3.*0 \(the embeddings\) to 2"),
        ("class", lambda m: m.embed("a", layers=slice(-1, -2)), "end before they begin"),
        ("class", lambda m: m.embed("a", layers=()), "layers is empty"),
        ("class", lambda m: m.embed("a", pooling="pooler", layers=1), "only the last layer"),
        ("class", lambda m: m.embed("a", layers=slice("a", 1)), "layers is slice.'a'"),
        ("class", lambda m: m.embed("a", layers=slice(0, 1, 1)), "cannot have a step"),
        ("span", lambda m: m.answer("a", "cat", null_threshold=np.nan), "null_threshold is nan"),
        ("span", lambda m: m.answer("a", "cat", null_threshold=-np.inf), "null_threshold is -inf"),
        ("span", lambda m: m.answer("who ?", " "), "has no token"),
        ("pretrained", lambda m: m.fill_mask("[MASK] " + "cat " * 60), "has 63 tokens.*48"),
    ],
)
def test_what_it_refuses(kind, ask, message):
    with pytest.raises(UserError, match=message):
        ask(LoadedModel(random_model(kind)))


@pytest.mark.parametrize(
    ("kind", "ask", "message"),
    [
        ("class", lambda m, long: m.classify(long), "2 of 3 texts are longer than 48 tokens, .*"),
        ("class", lambda m, long: m.embed(long), "2 of 3 texts are longer than 48 tokens, .*"),
        ("span", lambda m, long: m.answer(long, "cat"), "2 of 3 questions are longer than 12 .*"),
    ],
)
def test_one_warning_counts_what_was_cut(kind, ask, message):
    model = LoadedModel(random_model(kind))
    with pytest.warns(UserWarning, match=rf"^{message}cut there \(text 1; text 3\)$") as caught:
        ask(model, ["cat " * 60, "cat", "dog " * 60])
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("given", "longest", "reading"),
    [
        (None, 384, None),
        (512, 512, None),
        (100, 100, None),
        (None, 512, Reading(128, max_answer_tokens=1000)),
        (100, 100, Reading(128, max_answer_tokens=1000)),  # less than 128 + 64 + 4
    ],
)
def test_windows_have_the_given_length(monkeypatch, given, longest, reading):
    monkeypatch.setattr(LoadedModel, "_ask", lambda self, asked, columns: [{"": asked}])
    saved = random_model("span", num_positions=512)
    saved = dataclasses.replace(saved, outputs=dataclasses.replace(saved.outputs, reading=reading))
    model = LoadedModel(saved, max_length=given)
    answerer = model.answer("who ?", "cat")[0][""]
    fields = {"question": "who ?", "context": "cat " * 600}
    rows = answerer.prepare([answerer.example(fields, Given("text", 1))]).rows
    assert rows.lengths.max() == longest
    assert answerer._max_tokens == (longest if reading else 30)


@pytest.mark.parametrize("kind", ["tags", "span"])
def test_what_is_read_in_windows_is_not_cut(kind):
    model, long = LoadedModel(random_model(kind)), "cat " * 100
    assert model.tag(long) if kind == "tags" else model.answer("who ?", long)


def test_a_model_that_has_diverged_says_so():
    saved = random_model("class")
    saved.params["head"]["bias"][0] = np.nan
    with pytest.raises(UserError, match="not finite"):
        LoadedModel(saved).classify("the cat")


def test_every_kind_is_asked_here():
    assert set(HEADS) == {"pretrained", "class", "classes", "score", "tags", "span"}
    assert len(WORDS) == len(set(WORDS))


def test_sparse_vectors_of_a_table_with_more_rows_than_tokens():
    saved = vector_model("splade")
    fewer = WordPieceTokenizer(saved.tokenizer.vocab[:-3])
    embedder = Embedder(LoadedModel(dataclasses.replace(saved, tokenizer=fewer)).model)
    answer = np.arange(saved.config.vocab_size, dtype=np.float32)
    found = embedder.fields(answer)["embedding"]
    assert next(iter(found.items())) == (fewer.vocab[-1], fewer.vocab_size - 1)
    assert len(found) == fewer.vocab_size - 1
