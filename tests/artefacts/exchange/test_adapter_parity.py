"""Adapters against PEFT: ours loaded by it, and its own read here."""

import json

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from adapted_models import adapted  # noqa: E402
from export_models import model_of  # noqa: E402
from modern_models import save_modern  # noqa: E402

from bert_jax.artefacts.exchange.exported_files import class_of, write_huggingface  # noqa: E402
from bert_jax.artefacts.exchange.huggingface import auto_class  # noqa: E402
from bert_jax.artefacts.exchange.peft import prove, without_adapter, write  # noqa: E402
from bert_jax.artefacts.exchange.proof import batch_of, logits_of, proof_rows  # noqa: E402
from bert_jax.artefacts.exchange.theirs import quiet  # noqa: E402
from bert_jax.artefacts.saved.reading import read_model  # noqa: E402
from bert_jax.errors import UserError  # noqa: E402

CASES = [
    ("class", ("query", "key", "value", "output", "up", "down")),
    ("tags", ("query", "value")),
    ("span", ("down",)),
    ("score", ("query", "value")),
    ("relu", ("query", "up")),
    ("gelu", ("value", "output")),
    ("modernbert", ("query", "value", "gate", "down")),
    ("eurobert", ("query", "key", "up")),
]


def source(kind, directory):
    if kind not in ("modernbert", "eurobert"):
        return model_of(kind)
    save_modern(directory, kind, "ForSequenceClassification", num_hidden_layers=4)
    return read_model(directory)


@pytest.mark.parametrize(("kind", "targets"), CASES)
def test_peft_computes_our_logits(tmp_path, kind, targets):
    """Not merged, on a base that knows nothing of what the run has trained."""
    saved = adapted(source(kind, tmp_path / "theirs"), *targets)
    for name, make, of in (("base", write_huggingface, without_adapter(saved)),
                           ("ours", write, saved)):  # fmt: skip
        (tmp_path / name).mkdir()
        make(of, tmp_path / name)
    rows = proof_rows(saved)
    proven = prove(saved, tmp_path / "ours", rows)
    assert proven["proofs"]["peft"]["ran"]
    assert max(proven["differences"].values()) < 1e-5
    batch = batch_of(saved, rows[:8])
    with quiet():
        base = getattr(transformers, auto_class(class_of(saved))).from_pretrained(tmp_path / "base")
        model = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    given = {"input_ids": batch.tokens, "attention_mask": batch.segment_ids}
    if getattr(base.config, "type_vocab_size", 1) > 1:
        given["token_type_ids"] = batch.type_ids
    with torch.no_grad():
        found = model(**{name: torch.tensor(ids).long() for name, ids in given.items()})
    logits = (
        torch.stack([found.start_logits, found.end_logits], -1) if kind == "span" else found.logits
    ).numpy()
    ours, real = logits_of(saved, batch)["head"], batch.segment_ids > 0
    if logits.ndim == 3:
        logits, ours = logits[real], ours[real]
    np.testing.assert_allclose(logits, ours, atol=1e-5)
    np.testing.assert_array_less(1e-3, np.abs(ours).max())


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("class", {"r": 4, "lora_alpha": 12, "target_modules": ["query", "dense"]}),
        ("class", {"r": 4, "use_rslora": True, "alpha_pattern": {"value": 3},
                   "rank_pattern": {"query": 2}, "target_modules": "all-linear"}),
        ("modernbert", {"r": 3, "target_modules": ["Wqkv", "Wi"]}),
    ],
)  # fmt: skip
def test_adapters_of_peft_are_read(tmp_path, kind, settings):
    saved = source(kind, tmp_path / "theirs")
    (tmp_path / "base").mkdir()
    write_huggingface(saved, tmp_path / "base")
    torch.manual_seed(0)
    with quiet():
        base = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
        config = peft.LoraConfig(task_type="SEQ_CLS", **settings)
        model = peft.get_peft_model(base, config).eval()
        with torch.no_grad():
            for param in model.parameters():
                if param.requires_grad:
                    param += 0.1 * torch.randn_like(param)
        model.save_pretrained(tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["r"] == settings["r"]
    # PEFT names the base by its absolute path, which is not followed.
    with pytest.raises(UserError, match="ln -s MODEL"):
        read_model(tmp_path / "adapter")
    (tmp_path / "adapter/base").symlink_to(tmp_path / "base")
    back = read_model(tmp_path / "adapter")
    batch = batch_of(back, proof_rows(back)[:8])
    given = {"input_ids": batch.tokens, "attention_mask": batch.segment_ids}
    if getattr(base.config, "type_vocab_size", 1) > 1:
        given["token_type_ids"] = batch.type_ids
    with torch.no_grad():
        found = model(**{name: torch.tensor(ids).long() for name, ids in given.items()}).logits
    np.testing.assert_allclose(logits_of(back, batch)["head"], found.numpy(), atol=1e-5)
