"""DeBERTa-v3 as Microsoft publishes it: weights of Transformers' classes beside a `spm.model`."""

import io

import numpy as np
import pytest
import sentencepiece

pytestmark = pytest.mark.parity
pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from modern_models import modern_model  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

from bert_jax.artefacts.exchange.exported_files import write_huggingface  # noqa: E402
from bert_jax.artefacts.exchange.huggingface import prove  # noqa: E402
from bert_jax.artefacts.exchange.importing import import_model  # noqa: E402
from bert_jax.artefacts.exchange.proof import PROOF_TEXTS, proof_rows  # noqa: E402
from bert_jax.artefacts.saved.reading import read_model  # noqa: E402
from bert_jax.errors import UserError  # noqa: E402
from bert_jax.tokenization.load import load_tokenizer  # noqa: E402

TASKS = (
    "Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification",
    "ForQuestionAnswering", "ForMultipleChoice",
)  # fmt: skip
NOT_NFC = "ﬁne ﬂuﬀ, ½ of Ⅷ, x² + H₂O, ㎏ and ™, … ‥"
"""A text that the model's table changes, and NFC does not."""


@pytest.fixture(scope="module")
def spm():
    """A model with the special pieces of Microsoft's: [MASK] is none of them."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*PROOF_TEXTS] * 3), model_writer=out, vocab_size=500,
        character_coverage=0.98, hard_vocab_limit=False, minloglevel=2,
        normalization_rule_name="nmt_nfkc", pad_id=0, bos_id=1, eos_id=2, unk_id=3,
        pad_piece="[PAD]", bos_piece="[CLS]", eos_piece="[SEP]", unk_piece="[UNK]",
    )  # fmt: skip
    return out.getvalue()


def save(directory, spm, task, **fields):
    """The embeddings have more rows than the tokenizer has tokens, as Microsoft's do."""
    model = modern_model("deberta", task, vocab_size=520, num_hidden_layers=2, **fields)
    model.save_pretrained(directory)
    (directory / "spm.model").write_bytes(spm)


@pytest.mark.parametrize("task", TASKS)
def test_every_head_comes_in_and_goes_out(tmp_path, spm, task):
    save(tmp_path / "theirs", spm, task)
    report = import_model(tmp_path / "theirs", tmp_path / "ours", tolerance=1e-5)
    compared = report["compared"]
    heads = {"Model": set(), "ForMaskedLM": {"mlm"}}.get(task, {"head"})
    assert compared["differences"].keys() == {"hidden", *heads}
    assert compared["pairs_have_equal_ids"]
    assert len(PROOF_TEXTS) / 2 < compared["texts_with_equal_ids"] < len(PROOF_TEXTS)
    assert (report["class"], report["dropped"]) == (f"DebertaV2{task}", [])
    saved = read_model(tmp_path / "ours")
    (tmp_path / "again").mkdir()
    write_huggingface(saved, tmp_path / "again")
    first, last = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "again"))
    first = {name: each for name, each in first.items() if "predictions.decoder" not in name}
    assert first.keys() == last.keys()
    assert all(first[name].tobytes() == last[name].tobytes() for name in first)
    proof = prove(saved, tmp_path / "again", proof_rows(saved))
    assert proof["proofs"]["transformers"]["class"] == f"DebertaV2{task}"
    assert max(proof["differences"].values()) < 1e-5


def test_ids_are_those_of_the_model_that_was_published(tmp_path, spm):
    """Transformers 5 reads `spm.model` without its table of characters."""
    save(tmp_path, spm, "Model")
    ours = load_tokenizer(tmp_path)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=spm)
    size = theirs.get_piece_size()
    assert list(vars(ours.special_ids).values())[:5] == [0, 3, 1, 2, size]
    assert (ours.vocab_size, ours.id_to_token(size)) == (size + 1, "[MASK]")
    for text, ids in zip(PROOF_TEXTS, ours.encode_batch(PROOF_TEXTS), strict=True):
        assert ids.tolist() == theirs.encode(text)
    for name in ("do_lower_case", "split_by_punct"):
        (tmp_path / "tokenizer_config.json").write_text(f'{{"{name}": true}}')
        with pytest.raises(UserError, match=f"sets {name}; give a tokenizer.json"):
            load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    added = tmp_path / "added_tokens.json"
    added.write_text(f'{{"[MASK]": {size}}}')  # as Transformers 4 wrote
    assert load_tokenizer(tmp_path).vocab_size == size + 1
    added.write_text(f'{{"[MASK]": {size}, "<ent>": {size + 1}}}')
    with pytest.raises(UserError, match="adds '<ent>'; give"):
        load_tokenizer(tmp_path)
    added.unlink()
    other = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert other.mask_token_id == size
    assert other(NOT_NFC, add_special_tokens=False)["input_ids"] != theirs.encode(NOT_NFC)


def test_a_tokenizer_of_transformers_5_has_its_ids(tmp_path, spm):
    save(tmp_path / "theirs", spm, "Model")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    theirs.save_pretrained(tmp_path / "again")
    ours = load_tokenizer(tmp_path / "again")
    for text in PROOF_TEXTS:
        if "[MASK]" not in text:
            wanted = theirs(text, add_special_tokens=False)["input_ids"]
            assert ours.encode(text).ids.tolist() == wanted


def test_dropout_of_the_classifier_is_its_own_field(tmp_path, spm):
    save(tmp_path / "theirs", spm, "ForSequenceClassification", cls_dropout=0.25)
    import_model(tmp_path / "theirs", tmp_path / "ours")
    assert read_model(tmp_path / "ours").outputs.head.dropout_rate == np.float64(0.25)
