"""The Orbax checkpoint is read without this package, bit for bit."""

import jax
import numpy as np
import pytest
from small_saved import ROWS, small_saved

from bert_jax.artefacts.exchange import orbax_export
from bert_jax.artefacts.exchange.orbax_export import prove, write
from bert_jax.artefacts.exchange.proof import ProofFailedError
from bert_jax.distributed.checkpoint.storage import write_tree
from bert_jax.errors import UserError
from bert_jax.files.untrusted.json_file import read_json_object
from bert_jax.tokenization.load import load_tokenizer


def test_three_lines_read_it(tmp_path):
    saved = small_saved("tagging")
    write(saved, tmp_path)

    from orbax.checkpoint import v1 as ocp

    params = ocp.load(tmp_path / "params")

    assert jax.tree.structure(params) == jax.tree.structure(saved.params)
    jax.tree.map(np.testing.assert_array_equal, params, saved.params)
    assert prove(saved, tmp_path, ROWS)["arrays"] == len(jax.tree.leaves(saved.params))
    config = read_json_object(tmp_path / "config.json", max_bytes=10_000)
    assert config["id2label"] == {"0": "O", "1": "B-X"}
    assert load_tokenizer(tmp_path).fingerprint == saved.tokenizer.fingerprint


def test_a_full_disk(tmp_path, monkeypatch):
    def full(directory, tree):
        """Raise as TensorStore does."""
        raise ValueError(f"UNAVAILABLE: {directory}: [OS error 28: ENOSPC No space left on device]")

    monkeypatch.setattr(orbax_export, "write_tree", full)
    with pytest.raises(UserError, match=r"cannot write params: the disk is full. Nothing was left"):
        write(small_saved("tagging"), tmp_path)


def test_the_proof_names_what_did_not_come_back(tmp_path):
    saved = small_saved("tagging")
    changed = jax.tree.map(np.copy, saved.params)
    changed["head"]["bias"][0] = np.nextafter(changed["head"]["bias"][0], np.float32(9))
    changed["extra"] = changed["encoder"].pop("pooler")["dense"]["bias"]
    write_tree(tmp_path / "params", changed)
    with pytest.raises(ProofFailedError) as caught:
        prove(saved, tmp_path, ROWS)
    for name in ("extra", "encoder/pooler/dense/bias", "encoder/pooler/dense/kernel", "head/bias"):
        assert name in str(caught.value)
    assert "4 of" in str(caught.value)
