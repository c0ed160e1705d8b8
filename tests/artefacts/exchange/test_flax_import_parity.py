"""Imports of flax_model.msgpack against Transformers, which reads a copy in safetensors."""

import pytest

pytestmark = pytest.mark.parity
pytest.importorskip("torch")
pytest.importorskip("transformers")

from family_models import save_family  # noqa: E402
from flax_files import into_flax  # noqa: E402

from bert_jax.artefacts.exchange.importing import import_model  # noqa: E402


@pytest.mark.parametrize(
    ("family", "task"),
    [
        ("Bert", "ForPreTraining"), ("Bert", "ForMultipleChoice"), ("Bert", "Model"),
        ("Roberta", "ForMaskedLM"), ("Roberta", "ForSequenceClassification"),
        ("Electra", "ForMaskedLM"), ("Electra", "ForPreTraining"),
        ("Electra", "ForSequenceClassification"), ("DistilBert", "ForMaskedLM"),
        ("DistilBert", "ForQuestionAnswering"), ("DistilBert", "ForSequenceClassification"),
    ],
)  # fmt: skip
def test_the_same_proof_as_of_safetensors(tmp_path, family, task):
    save_family(tmp_path / "theirs", family, task, num_labels=2)
    first = import_model(tmp_path / "theirs", tmp_path / "first", tolerance=2e-5)
    into_flax(tmp_path / "theirs")
    second = import_model(tmp_path / "theirs", tmp_path / "second", tolerance=2e-5)
    assert first["sha256"] == second["sha256"]
    assert first["compared"] == second["compared"]
    assert "differences" in second["compared"]
