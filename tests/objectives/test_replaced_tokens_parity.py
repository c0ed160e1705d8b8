"""Loss and gradients of both models against Transformers, on the same tokens."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_models import save_family

pytestmark = pytest.mark.parity
pytest.importorskip("torch")
pytest.importorskip("transformers")

from bert_jax.artefacts.formats.form import form_of  # noqa: E402
from bert_jax.objectives.masking import MaskingConfig  # noqa: E402
from bert_jax.objectives.replaced_tokens import (  # noqa: E402
    SHARED,
    ReplacedTokens,
    draw,
    generator_params,
    replace_tokens,
)
from bert_jax.tokenization.special_ids import SpecialIds  # noqa: E402

HEAD = {"dense": "dense", "score": "dense_prediction"}


def as_ours(model, arrays):
    """Their arrays (or gradients) as our tree, and the architecture."""
    form = form_of({**model.config.to_dict(), "architectures": [type(model).__name__]}, arrays,
                   where="config.json")  # fmt: skip
    config = replace(form.model, dtype="float32")
    tree = form.params(None)
    head = "discriminator_predictions"
    if any(name.startswith(head) for name in arrays):
        tree["rtd"] = {
            ours: {
                "kernel": arrays[f"{head}.{theirs}.weight"].T,
                "bias": arrays[f"{head}.{theirs}.bias"],
            }
            for ours, theirs in HEAD.items()
        }
    return tree, config


def joined(discriminator, generator):
    """Both trees as the objective's parameters; the generator's own tables are left out."""
    encoder = dict(generator["encoder"])
    encoder["embeddings"] = {
        name: part for name, part in encoder["embeddings"].items() if name not in SHARED
    }
    own = {"encoder": encoder, "mlm": generator["mlm"]}
    return {"encoder": discriminator["encoder"], "rtd": discriminator["rtd"], "generator": own}


def test_loss_and_gradients_are_those_of_transformers(tmp_path):
    import torch

    sizes = {"embedding_size": 16, "hidden_size": 32, "num_attention_heads": 4,
             "intermediate_size": 64}  # fmt: skip
    small = {"embedding_size": 16, "hidden_size": 8, "num_attention_heads": 1,
             "intermediate_size": 16}  # fmt: skip
    finder = save_family(tmp_path / "finder", "Electra", "ForPreTraining", **sizes)
    proposer = save_family(tmp_path / "proposer", "Electra", "ForMaskedLM", **small)
    finder.electra.embeddings.word_embeddings.padding_idx = None  # drops the gradient of a lookup
    proposer.electra.embeddings = finder.electra.embeddings
    proposer.generator_lm_head.weight = finder.electra.embeddings.word_embeddings.weight

    def arrays_of(model, gradients):
        found = {
            name: (p.grad if gradients else p).detach().numpy()
            for name, p in model.named_parameters()
            if name != "generator_lm_head.weight"
        }
        return as_ours(model, found)

    found, config = arrays_of(finder, gradients=False)
    proposing, _ = arrays_of(proposer, gradients=False)
    params = jax.device_put(joined(found, proposing))
    objective = ReplacedTokens(
        replace(config, hidden_dropout_rate=0.0, attention_dropout_rate=0.0),
        MaskingConfig(rate=0.3, max_predictions=6), SpecialIds(0, 1, 2, 3, 4), generator_size=0.25,
    )  # fmt: skip
    assert objective.generator.hidden_dim == 8
    rng = np.random.default_rng(0)
    segment_ids = (np.arange(16) < rng.integers(8, 17, 6)[:, None]).astype(np.int32)
    rows = objective.prepare(
        {
            "tokens": jnp.array(rng.integers(5, config.vocab_size, (6, 16)) * segment_ids),
            "type_ids": jnp.array(rng.integers(0, 2, (6, 16)) * segment_ids),
            "segment_ids": jnp.array(segment_ids),
            "row_index": jnp.arange(6, dtype=jnp.uint32),
        },
        11,
    )

    @jax.jit
    def ours(params):
        sums = objective.forward(params, rows, None, None).sums
        return objective.loss(sums, objective.counts(rows)), sums

    (loss, sums), gradients = jax.value_and_grad(ours, has_aux=True)(params)
    logits = objective.proposed_logits(generator_params(params), rows, None, None)
    tokens, is_replaced = replace_tokens(rows, draw(logits, rows["proposals"], rows["positions"]))
    assert int(is_replaced.sum()) == int(sums["rtd_replaced"]) > 10

    def tensor(array):
        return torch.tensor(np.asarray(array))

    inputs = {
        "attention_mask": tensor(segment_ids).long(),
        "token_type_ids": tensor(rows["type_ids"]).long(),
    }
    theirs = proposer(input_ids=tensor(rows["tokens"]).long(), **inputs).logits
    at = theirs.gather(
        1, tensor(rows["positions"]).long()[..., None].expand(-1, -1, theirs.shape[-1])
    )
    weights = tensor(rows["weights"])
    entropy = torch.nn.functional.cross_entropy(
        at.flatten(0, 1), tensor(rows["labels"]).long().flatten(), reduction="none"
    )
    masked = (entropy * weights.flatten()).sum() / weights.sum()
    np.testing.assert_allclose(logits[..., : config.vocab_size], at.detach(), atol=1e-5)
    detected = finder(input_ids=tensor(tokens).long(), labels=tensor(is_replaced).long(), **inputs)
    total = masked + 50 * detected.loss
    total.backward()
    np.testing.assert_allclose(loss, total.detach(), rtol=1e-5)
    np.testing.assert_allclose(sums["mlm_loss"] / sums["mlm_count"], masked.detach(), rtol=1e-5)
    np.testing.assert_allclose(
        sums["rtd_loss"] / sums["rtd_count"], detected.loss.detach(), rtol=1e-5
    )
    found, _ = arrays_of(finder, gradients=True)
    proposing, _ = arrays_of(proposer, gradients=True)
    expected = joined(found, proposing)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        wanted = expected
        for key in path:
            wanted = wanted[key.key]
        name = jax.tree_util.keystr(path)
        assert np.any(wanted), name
        np.testing.assert_allclose(
            leaf, wanted, rtol=1e-5, atol=1e-5 * max(1.0, float(jnp.abs(wanted).max())),
            err_msg=name,
        )  # fmt: skip
