"""What Transformers and PEFT save again from an export is read here, with the same answers."""

import dataclasses

import pytest

pytestmark = pytest.mark.parity
pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from adapted_models import adapted  # noqa: E402
from export_models import KINDS, TOKENIZERS, model_of, tokenizer_of  # noqa: E402
from modern_files import KINDS as MODERN_KINDS  # noqa: E402
from modern_files import write_modern  # noqa: E402
from small_saved import FAMILIES, OUTPUTS, small_saved  # noqa: E402
from translators import FORMS, translator_of  # noqa: E402

from bert_jax.artefacts.exchange.exported_files import class_of, has_class, write_huggingface  # noqa: E402
from bert_jax.artefacts.exchange.huggingface import auto_class  # noqa: E402
from bert_jax.artefacts.exchange.peft import without_adapter  # noqa: E402
from bert_jax.artefacts.exchange.peft import write as write_adapter  # noqa: E402
from bert_jax.artefacts.exchange.proof import (  # noqa: E402
    PROOF_TEXTS,
    compare,
    inputs_of,
    logits_of,
    proof_rows,
)
from bert_jax.artefacts.exchange.theirs import quiet  # noqa: E402
from bert_jax.artefacts.saved.reading import read_model  # noqa: E402
from bert_jax.tokenization.load import load_tokenizer  # noqa: E402


def save_again(name, directory):
    """Load a directory as the class `name` and save it; return where."""
    with quiet():
        model = getattr(transformers, name).from_pretrained(directory)
        model.save_pretrained(directory / "again")
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        tokenizer.save_pretrained(directory / "again")
    return directory / "again"


def assert_same(back, saved):
    """Rows, ids, what the head means, outputs."""
    assert (back.max_length, back.outputs) == (saved.max_length, saved.outputs)
    assert back.tokenizer.special_ids == saved.tokenizer.special_ids
    for text in PROOF_TEXTS:
        found, expected = (each.tokenizer.encode(text).ids.tolist() for each in (back, saved))
        assert found == expected, text
    rows = [(proof_rows(saved)[:4], saved.max_length)]
    (gaps,) = compare(saved, rows, lambda batch: logits_of(back, batch))
    assert max(gaps.values()) < 1e-5
    assert logits_of(back, inputs_of(back, *rows[0])).keys() == gaps.keys()


def of_kind(kind):
    return dataclasses.replace(model_of(kind), max_length=30)


def with_tokenizer(name, tmp_path):
    if name in TOKENIZERS:
        return of_kind("mlm") if name == "uncased" else model_of("mlm", name)
    tokenizer = load_tokenizer(write_modern(tmp_path / "tokenizer", name))
    saved = small_saved("mlm", vocab_size=tokenizer.vocab_size, num_positions=40)
    return dataclasses.replace(saved, tokenizer=tokenizer).without({"pooler"})


def of_family(family, kind):
    tokenizer, fields = tokenizer_of("uncased"), FAMILIES[family]
    pooling = {"pooling": "mean"} if kind == "classification" and "pooler" in fields else {}
    sizes = {"vocab_size": tokenizer.vocab_size, "num_positions": 40}
    saved = small_saved(kind, **fields, **pooling, **sizes)
    if family == "modernbert":
        saved.params["encoder"]["layers"]["attention_norm"]["scale"][0] = 1  # that nothing reads
    saved = dataclasses.replace(saved, tokenizer=tokenizer, max_length=30)
    return saved if kind == "classification" else saved.without({"pooler"})


@pytest.mark.parametrize("name", [*TOKENIZERS, *MODERN_KINDS])
def test_every_tokenizer(tmp_path, name):
    """A SentencePiece model comes back as the `tokenizer.json` that the export wrote for it."""
    saved = with_tokenizer(name, tmp_path)
    saved = dataclasses.replace(saved, max_length=30)
    write_huggingface(saved, tmp_path)
    assert_same(read_model(save_again("BertForMaskedLM", tmp_path)), saved)


@pytest.mark.parametrize("kind", KINDS)
def test_every_class(tmp_path, kind):
    saved = of_kind(kind)
    write_huggingface(saved, tmp_path)
    assert_same(read_model(save_again(class_of(saved), tmp_path)), saved)


@pytest.mark.parametrize("kind", ["mlm", *OUTPUTS])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "neobert"])
def test_every_modern_family(tmp_path, family, kind):
    saved = of_family(family, kind)
    if not has_class(saved):
        assert kind == "span"
        return
    write_huggingface(saved, tmp_path)
    assert_same(read_model(save_again(class_of(saved), tmp_path)), saved)


@pytest.mark.parametrize("kind", ["class", "classes", "score", "tags", "span"])
def test_every_adapter(tmp_path, kind):
    peft = pytest.importorskip("peft")
    saved = dataclasses.replace(adapted(of_kind(kind), "query", "value"), max_length=30)
    for name, make, of in (("base", write_huggingface, without_adapter(saved)),
                           ("ours", write_adapter, saved)):  # fmt: skip
        (tmp_path / name).mkdir()
        make(of, tmp_path / name)
    with quiet():
        base = getattr(transformers, auto_class(class_of(saved))).from_pretrained(tmp_path / "base")
        peft.PeftModel.from_pretrained(base, tmp_path / "ours").save_pretrained(tmp_path / "again")
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
        tokenizer.save_pretrained(tmp_path / "again")
    (tmp_path / "again" / "base").symlink_to(tmp_path / "base")
    back = read_model(tmp_path / "again")
    numbered = tuple(f"LABEL_{n}" for n in range(len(saved.outputs.labels)))
    assert back.outputs.labels in (numbered, saved.outputs.labels)
    assert_same(dataclasses.replace(back, outputs=saved.outputs), saved)


@pytest.mark.parametrize("form", FORMS)
def test_every_model_that_translates(tmp_path, form):
    saved = translator_of(form, "unigram")
    write_huggingface(saved, tmp_path)
    assert_same(read_model(save_again(class_of(saved), tmp_path)), saved)
