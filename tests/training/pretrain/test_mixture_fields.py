"""Mixtures as a configuration has them."""

from types import SimpleNamespace

import numpy as np
import pytest
from one_shard import StoreWriter
from small_run import TOKENIZER, small_config, write_store

from bert_jax.data.mixture import Mixture
from bert_jax.errors import UserError
from bert_jax.files.remote import open_workdir
from bert_jax.tokenization.wordpiece import WordPieceTokenizer
from bert_jax.training.pretrain.corpus import phase_stores
from bert_jax.training.pretrain.saves import check_workdir, prepare_workdir
from bert_jax.training.start import Start
from bert_jax.training.workdir import look_into


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Three stores, the last with another tokenizer."""
    root = tmp_path_factory.mktemp("corpora")
    stores = {name: write_store(root / name, n, n) for name, n in (("a", 40), ("b", 10))}
    other = WordPieceTokenizer([*TOKENIZER.vocab[:-1], "else"])
    with StoreWriter(root / "other", other) as writer:
        writer.append(np.full(20, 7), np.full(2, 10), np.array([1, 1]))
        stores["other"] = writer.store()
    return stores


def config_of(corpora, *parts, phase=None, **data):
    """The run's mixture, and that of its second phase."""

    def listed(parts):
        return [{"corpus": str(corpora[name].path), "weight": weight} for name, weight in parts]

    phases = [{"length": 32, "batch_size": 16, "share": 0.5} for _ in range(2)]
    phases[1] |= phase or {}
    if "mixture" in phases[1]:
        phases[1]["mixture"] = listed(phases[1]["mixture"])
    section = {"corpus": str(corpora["a"].path), "mixture": listed(parts), **data}
    return small_config(data=section, training__phases=phases)


def test_a_phase_has_its_own_mixture(corpora):
    own = {"mixture": [("a", 1), ("b", 1)], "mixture_temperature": 1}
    config = config_of(corpora, ("a", 3), ("b", 1), phase=own)
    stores = phase_stores(config, corpora["a"])
    assert isinstance(stores[0], Mixture)
    assert stores[0].weights == (3, 1)
    assert stores[0].stores == (corpora["a"], stores[0].stores[1])
    sizes = [corpora[name].num_tokens for name in "ab"]
    assert stores[1].weights[0] / stores[1].weights[1] == pytest.approx(sizes[0] / sizes[1])
    assert stores[0].fingerprint == stores[1].fingerprint
    assert list(phase_stores(config, corpora["a"], only=1)) == [1]
    alone = config_of(corpora, ("a", 3), ("b", 1), phase={"corpus": str(corpora["b"].path)})
    assert phase_stores(alone, corpora["a"])[1].fingerprint == corpora["b"].fingerprint


def test_a_run_keeps_its_mixture_wherever_the_corpora_lie(corpora, tmp_path):
    config = config_of(corpora, ("a", 3), ("b", 1))
    stores = phase_stores(config, corpora["a"])
    prepare_workdir(tmp_path, config, corpora["a"], Start(), stores)
    work = open_workdir(tmp_path)
    check_workdir(work, look_into(work, "pretrain"), config, corpora["a"], stores)
    (tmp_path / "moved").symlink_to(corpora["b"].path)
    moved = small_config(
        data={
            "corpus": str(corpora["a"].path),
            "mixture": [
                {"corpus": str(corpora["a"].path), "weight": 3}, {"corpus": str(tmp_path / "moved")}
            ],
        },
        training__phases=[{"length": 32, "batch_size": 16, "share": 0.5}] * 2,
    )  # fmt: skip
    check_workdir(
        work, look_into(work, "pretrain"), moved, corpora["a"], phase_stores(moved, corpora["a"])
    )
    for changed in (("a", 2), ("b", 1)), (("a", 3), ("b", 1), ("c", 1)), (("b", 3), ("a", 1)):
        mixed = config_of({**corpora, "c": corpora["other"]}, *changed)
        texts = stores if len(changed) == 3 else phase_stores(mixed, corpora["a"])
        with pytest.raises(UserError, match=r"data\.mixture|training text|fingerprint"):
            check_workdir(work, look_into(work, "pretrain"), mixed, corpora["a"], texts)


def test_a_corpus_that_is_named_in_two_ways_is_named_twice(corpora, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(corpora["a"].path)
    named = corpora | {"link": SimpleNamespace(path=link)}
    with pytest.raises(UserError, match=r"data\.mixture names .*/link twice"):
        phase_stores(config_of(named, ("a", 1), ("link", 1)), corpora["a"])


@pytest.mark.parametrize(
    ("parts", "options", "message"),
    [
        ([("a", 1), ("b", 0)], {}, r"data\.mixture\[1\]\.weight is 0\.0; it must be above 0"),
        ([("a", -1)], {}, r"data\.mixture\[0\]\.weight is -1"),
        ([("a", 1)], {"mixture_temperature": 2}, r"data\.mixture_temperature is 2"),
        ([], {"phase": {"mixture": [("a", 0)]}}, r"training\.phases\[1\]\.mixture\[0\]\.weight"),
        ([], {"phase": {"mixture": [("a", 1)], "corpus": "x"}}, "a corpus, x, and a mixture"),
        ([], {"phase": {"mixture_temperature": -1}}, r"phases\[1\]\.mixture_temperature is -1"),
        ([("a", 1), ("a", 2)], {}, r"data\.mixture names .*/a twice"),
        ([("a", 1), ("other", 2)], {}, r"data\.mixture\[1\]: .*/other has the tokenizer"),
    ],
)
def test_mixtures_that_cannot_be(corpora, parts, options, message):
    with pytest.raises(UserError, match=message):
        phase_stores(config_of(corpora, *parts, **options), corpora["a"])
