"""The train step: one result on every mesh, under accumulation, with dropout and unequal masks."""

import re
from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pretraining import apply_pretraining
from steps import batch_gradients, forward, masked_lm_step, with_model

from bert_jax.distributed.parallel.sharding import (
    MeshConfig,
    batch_sharding,
    make_mesh,
    place_batch,
)
from bert_jax.errors import UserError
from bert_jax.model.config import ModelConfig
from bert_jax.model.heads import init_params
from bert_jax.objectives.masking import MaskingConfig
from bert_jax.tokenization.special_ids import SpecialIds
from bert_jax.training.steps.guard import GUARD_METRICS
from bert_jax.training.steps.optim import OptimizerConfig
from bert_jax.training.steps.state import TrainState, abstract_state, jitted_init, state_shardings
from bert_jax.training.steps.step import dropout_seed, make_train_step

MODEL = ModelConfig(
    vocab_size=250,
    num_positions=16,
    hidden_dim=16,
    num_layers=2,
    num_heads=8,
    mlp_dim=32,
    scan_unroll=1,
)
CONFIG = masked_lm_step(
    model=MODEL,
    masking=MaskingConfig(max_predictions=4),
    optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=2),
    num_steps=10,
    special_ids=SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4),
    seed=7,
)
ROWS, LENGTH, POSITIONS = 32, 16, 8
MESHES = [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 1, 8), (4, 2, 1), (2, 4, 1, 2)]  # the last: slices


def one_device():
    return make_mesh(MeshConfig(1), jax.devices()[:1])


@lru_cache
def make_params():
    return jax.device_get(jitted_init(CONFIG, one_device())(jax.random.key(0)).params)


def make_batch(rows=ROWS, seed=0):
    """Rows of 6 to LENGTH tokens, some without a sentence pair."""
    rng = np.random.default_rng(seed)
    segment_ids = (np.arange(LENGTH) < rng.integers(6, LENGTH + 1, rows)[:, None]).astype(np.uint8)
    tokens = rng.integers(5, MODEL.vocab_size, (rows, LENGTH)).astype(np.uint16)
    tokens[:, 0] = 2
    return {
        "tokens": tokens * segment_ids,
        "type_ids": rng.integers(0, 2, (rows, LENGTH)).astype(np.uint8),
        "segment_ids": segment_ids,
        "pair_labels": rng.integers(-1, 2, rows).astype(np.int32),
        "row_index": np.arange(1000, 1000 + rows, dtype=np.uint32),
    }


def make_masked_rows():
    """Rows as `mask_batch` returns them, with 1 to 8 masked positions, most on the last devices."""
    rng = np.random.default_rng(1)
    batch = make_batch()
    batch["segment_ids"][:] = 1
    count = np.sort(1 + np.arange(ROWS) % POSITIONS)
    return {
        **batch,
        "tokens": batch["tokens"].astype(np.int32),
        "positions": np.stack([rng.permutation(LENGTH)[:POSITIONS] for _ in range(ROWS)]).astype(
            np.int32
        ),
        "labels": rng.integers(5, MODEL.vocab_size, (ROWS, POSITIONS)).astype(np.int32),
        "weights": (np.arange(POSITIONS) < count[:, None]).astype(np.float32),
    }


def gradients_on(mesh, accumulation=1, **settings):
    config = replace(CONFIG, accumulation=accumulation, **settings)
    shardings = state_shardings(config, mesh).params
    params = jax.device_put(make_params(), shardings)

    def run(params, rows):
        return batch_gradients(
            config, mesh, params, rows, dropout_seed(config, config.seed, jnp.int32(3))
        )

    jitted = jax.jit(
        run, in_shardings=(shardings, batch_sharding(mesh)), out_shardings=(shardings, None)
    )
    return jax.device_get(jitted(params, place_batch(make_masked_rows(), mesh)))


@pytest.fixture(scope="module")
def expected():
    """Gradients and sums of the whole batch on one device."""
    return gradients_on(one_device())


@pytest.mark.parametrize(
    ("sizes", "accumulation"), [*((sizes, 4) for sizes in MESHES), ((1, 8, 1), 1), ((2, 2, 2), 1)]
)
def test_every_mesh_gives_the_loss_and_gradients_of_one_device(expected, sizes, accumulation):
    grads, sums = gradients_on(make_mesh(MeshConfig(*sizes)), accumulation)
    for name, value in expected[1].items():
        np.testing.assert_allclose(sums[name], value, rtol=1e-5, err_msg=name)
    assert_close(grads, expected[0], 1e-5)


@pytest.mark.parametrize(
    ("sizes", "accumulation", "unroll"), [((1, 8, 1), 4, 2), ((2, 2, 2), 4, 1), ((2, 4, 1), 1, 2)]
)
def test_gathering_once_a_step_gives_the_same_gradients(expected, sizes, accumulation, unroll):
    objective = with_model(CONFIG, replace(MODEL, scan_unroll=unroll)).objective
    grads, sums = gradients_on(
        make_mesh(MeshConfig(*sizes)), accumulation, gather="step", objective=objective
    )
    for name, value in expected[1].items():
        np.testing.assert_allclose(sums[name], value, rtol=1e-5, err_msg=name)
    assert_close(grads, expected[0], 1e-5)


def test_gradients_that_travel_in_bfloat16_are_close(expected):
    grads, _ = gradients_on(make_mesh(MeshConfig(8)), reduce_dtype="bfloat16")
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(grads))
    ours, theirs = (
        np.concatenate([x.ravel() for x in jax.tree.leaves(tree)]) for tree in (grads, expected[0])
    )
    assert 1e-4 < np.linalg.norm(ours - theirs) / np.linalg.norm(theirs) < 1e-2


def test_accumulation_on_one_device(expected):
    grads, sums = gradients_on(one_device(), accumulation=4)
    for name, value in expected[1].items():
        np.testing.assert_allclose(sums[name], value, rtol=1e-5, err_msg=name)
    assert_close(grads, expected[0], 1e-5)


def test_gradient_is_that_of_the_summed_loss():
    """Against a loss written out over logits at all positions, without dropout."""
    config = with_model(CONFIG, replace(MODEL, hidden_dropout_rate=0.0, attention_dropout_rate=0.0))
    assert dropout_seed(config, config.seed, jnp.int32(0)) is None
    params = jax.device_put(make_params())
    rows = jax.device_put(make_masked_rows())

    @jax.jit
    def reference(params):
        model = config.objective.model
        types, segments = rows["type_ids"].astype(int), rows["segment_ids"].astype(int)
        logits = apply_pretraining(model, params, rows["tokens"], types, segments)
        log_p = jax.nn.log_softmax(logits.vocabulary)
        chosen = log_p[jnp.arange(ROWS)[:, None], rows["positions"], rows["labels"]]
        mlm = -jnp.sum(chosen * rows["weights"]) / jnp.sum(rows["weights"])
        nsp = jax.nn.log_softmax(logits.pairs)[
            jnp.arange(ROWS), jnp.maximum(rows["pair_labels"], 0)
        ]
        has_pair = rows["pair_labels"] >= 0
        return mlm - jnp.sum(nsp * has_pair) / jnp.sum(has_pair)

    grads, _ = jax.jit(lambda p: batch_gradients(config, one_device(), p, rows, None))(params)
    assert_close(grads, jax.jit(jax.grad(reference))(params), 1e-6)


def assert_close(tree, reference, tolerance):
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(reference), strict=True
    ):
        np.testing.assert_allclose(
            a, b, rtol=tolerance, atol=tolerance, err_msg=jax.tree_util.keystr(path)
        )
        # A softmax ignores what all keys share: the gradient of their bias is rounding noise.
        name = jax.tree_util.keystr(path)
        assert np.any(np.asarray(b) != 0) or name.endswith("['key']['bias']"), name


def test_initial_state_is_sharded_and_the_same_on_every_mesh():
    for sizes in MESHES[2:3]:
        mesh = make_mesh(MeshConfig(*sizes))
        state = jitted_init(CONFIG, mesh)(jax.random.key(0))
        shardings = state_shardings(CONFIG, mesh)
        for leaf, sharding, abstract in zip(
            *map(jax.tree.leaves, (state, shardings, abstract_state(CONFIG, mesh))), strict=True
        ):
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
            assert (leaf.shape, leaf.dtype) == (abstract.shape, abstract.dtype)
            assert abstract.sharding == sharding
        table = state.params["encoder"]["embeddings"]["token"]
        assert table.addressable_shards[0].data.size == table.size // (sizes[1] * sizes[2])
        for a, b in zip(*map(jax.tree.leaves, (state.params, make_params())), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-8)  # the same bits, rounded apart


@pytest.fixture(scope="module")
def trained():
    """Three steps on one device and on (2, 2, 2) with 4 micro-batches: states and metrics."""
    runs = []
    for mesh, accumulation in ((one_device(), 1), (make_mesh(MeshConfig(2, 2, 2)), 4)):
        config = replace(CONFIG, accumulation=accumulation)
        step = make_train_step(config, mesh)
        state = jitted_init(config, mesh)(jax.random.key(0))
        first, metrics = state, []
        for number in range(3):
            state, values = step(state, place_batch(make_batch(seed=number), mesh))
            metrics.append(values)
        runs.append((first, state, jax.device_get(metrics)))
    return runs


def test_whole_steps_agree_across_meshes(trained):
    (_, state, metrics), (_, other_state, other_metrics) = trained
    for a, b in zip(metrics, other_metrics, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_allclose(a[name], b[name], rtol=2e-5, atol=1e-6, err_msg=name)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(state.params),
        jax.tree.leaves(other_state.params),
        strict=True,
    ):
        # A thousandth of a step of Adam; eps is far above the rounding noise of the gradients.
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6, err_msg=jax.tree_util.keystr(path))


def test_metrics_are_those_of_the_batch(trained):
    _, state, metrics = trained[0]
    batch = make_batch(seed=0)
    first = metrics[0]
    assert set(first) == {
        "loss", "mlm_loss", "nsp_loss", "mlm_accuracy", "nsp_accuracy", "grad_norm",
        "learning_rate", "num_tokens",
        *GUARD_METRICS,
    }  # fmt: skip
    assert first["num_tokens"] == batch["segment_ids"].sum() < batch["tokens"].size
    np.testing.assert_allclose(first["loss"], first["mlm_loss"] + first["nsp_loss"], rtol=1e-6)
    np.testing.assert_allclose([m["learning_rate"] for m in metrics], [5e-4, 1e-3, 1e-3], rtol=1e-6)
    params = jax.device_put(make_params())

    @jax.jit
    def reference(params, batch):
        rows = CONFIG.objective.prepare(batch, CONFIG.seed)
        seed = dropout_seed(CONFIG, CONFIG.seed, jnp.int32(0))
        grads, sums = batch_gradients(CONFIG, one_device(), params, rows, seed)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        return sums, norm, rows["weights"]

    sums, norm, weights = reference(params, place_batch(batch, one_device()))
    assert np.sum(weights) == sums["mlm_count"] > 0
    assert len(set(np.sum(weights, axis=1).tolist())) > 1  # unequal masks
    np.testing.assert_allclose(first["grad_norm"], norm, rtol=1e-5)
    np.testing.assert_allclose(
        first["nsp_accuracy"], sums["nsp_correct"] / sums["nsp_count"], rtol=1e-6
    )
    assert sums["nsp_count"] == np.sum(batch["pair_labels"] >= 0)
    assert state.step == state.opt_state.num_updates == 3


def test_the_state_is_donated(trained):
    first, state, _ = trained[0]
    assert isinstance(state, TrainState)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first.params))


@pytest.mark.parametrize("part", ["hidden", "attention", "embedding", "mlp"])
def test_dropout_in_one_part_of_the_model_is_enough(part):
    rates = {f"{name}_dropout_rate": 0.0 for name in ("hidden", "attention")}
    config = with_model(CONFIG, replace(MODEL, **rates | {f"{part}_dropout_rate": 0.1}))
    assert dropout_seed(config, config.seed, jnp.int32(0)) is not None


def test_masks_and_dropout_change_with_step_seed_and_row():
    params, rows = jax.device_put(make_params()), make_masked_rows()
    row_index = rows["row_index"]
    same = {name: value[-1:] for name, value in rows.items()}

    @jax.jit
    def loss_per_row(number, row_index):
        def one(index):
            row = {**jax.tree.map(jnp.asarray, same), "row_index": index[None]}
            return forward(CONFIG, params, row, seed)["mlm_loss"]

        seed = dropout_seed(CONFIG, CONFIG.seed, number)
        return jax.lax.map(one, row_index)

    losses = np.asarray(loss_per_row(np.int32(0), row_index))
    assert len(np.unique(losses)) == ROWS  # equal rows, another mask each
    again = loss_per_row(np.int32(0), row_index[::-1])
    np.testing.assert_array_equal(again, losses[::-1])  # a function of the row, not of its place
    assert not np.any(loss_per_row(np.int32(1), row_index) == losses)
    seeds = {int(dropout_seed(CONFIG, s, jnp.int32(t))) for s in (0, 1) for t in (0, 1)}
    assert len(seeds) == 4

    mask = jax.jit(lambda batch, seed: CONFIG.objective.prepare(batch, seed)["tokens"])
    first, second = (np.asarray(mask(make_batch(), np.uint32(seed))) for seed in (0, 1))
    assert np.any(first != second)


def test_bfloat16_loss_is_within_a_hundredth_of_float32():
    params = jax.device_put(make_params())
    rows = jax.device_put(make_masked_rows())
    losses = []
    for dtype in ("float32", "bfloat16"):
        config = with_model(CONFIG, replace(MODEL, dtype=dtype))
        sums = jax.jit(lambda p, config=config: forward(config, p, rows, None))(params)
        assert {leaf.dtype for leaf in sums.values()} == {jnp.dtype("float32")}
        losses.append([sums["mlm_loss"] / sums["mlm_count"], sums["nsp_loss"] / sums["nsp_count"]])
    np.testing.assert_allclose(losses[1], losses[0], atol=1e-2)
    assert losses[1] != losses[0]


COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|"
    r"collective-broadcast)(?:-start)?\("
)


def collectives(config, mesh):
    """(kind, elements, inside a loop) of each collective of the compiled step."""
    batch = {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in make_batch().items()
    }
    lowered = make_train_step(config, mesh).lower(abstract_state(config, mesh), batch)
    found = []
    for line in lowered.compile().as_text().splitlines():
        if match := COLLECTIVE.search(line):
            sizes = [
                int(np.prod([int(n) for n in dims.split(",") if n]))
                for dims in re.findall(r"\w+\[([\d,]*)\]", match[1])
            ]
            found.append((match[2], sum(sizes), "while/body" in line))
    return found


UNROLLED = with_model(CONFIG, replace(MODEL, num_layers=1))
"""Without a loop over layers, as by default: there a collective would stand once for all."""
NUM_PARAMS = sum(
    leaf.size
    for leaf in jax.tree.leaves(
        jax.eval_shape(lambda: init_params(UNROLLED.objective.model, jax.random.key(0)))
    )
)


def test_data_parallelism_communicates_gradients_and_nothing_else():
    found = collectives(UNROLLED, make_mesh(MeshConfig(8)))
    assert {kind for kind, *_ in found} == {"all-reduce"}
    # The token table is looked up and is the decoder: its two gradients are added, then reduced.
    assert NUM_PARAMS <= sum(size for _, size, _ in found) < NUM_PARAMS + 100


def test_accumulation_communicates_gradients_once():
    config = replace(UNROLLED, accumulation=4)
    found = collectives(config, make_mesh(MeshConfig(8)))
    assert {kind for kind, *_ in found} == {"all-reduce"}
    assert NUM_PARAMS <= sum(size for _, size, _ in found) < NUM_PARAMS + 100
    assert not any(in_loop for *_, in_loop in found)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_fsdp_gathers_parameters_and_reduces_gradients(remat):
    """In the loop over layers each matrix is gathered, in the backward loop again; never kept."""
    found = collectives(
        with_model(CONFIG, replace(MODEL, remat=remat)), make_mesh(MeshConfig(2, 4))
    )
    assert {kind for kind, *_ in found} == {"all-gather", "all-reduce", "reduce-scatter"}
    shapes = jax.eval_shape(lambda: init_params(MODEL, jax.random.key(0)))
    layer = sum(x.size // 2 for x in jax.tree.leaves(shapes["encoder"]["layers"]) if x.size > 64)
    rest = sum(
        x.size
        for x in jax.tree.leaves({**shapes, "encoder": {**shapes["encoder"], "layers": {}}})
        if x.ndim > 1
    )
    rest -= MODEL.num_positions * MODEL.hidden_dim  # every device has the position table

    def total(kind, in_loop):
        return sum(size for k, size, looped in found if (k, looped) == (kind, in_loop))

    assert total("all-gather", True) == 2 * layer
    assert total("reduce-scatter", True) == layer // 4
    assert total("all-gather", False) == rest
    assert total("reduce-scatter", False) == rest // 4
    assert total("all-reduce", True) == 0


def test_gathering_once_a_step_sends_each_matrix_once_each_way():
    config, mesh = replace(UNROLLED, accumulation=2, gather="step"), make_mesh(MeshConfig(1, 8))
    found = collectives(config, mesh)
    assert not any(in_loop for *_, in_loop in found)
    state = abstract_state(config, mesh)
    split = sum(x.size for x in jax.tree.leaves(state.params) if "fsdp" in x.sharding.spec)
    gathered = sum(size for kind, size, _ in found if kind == "all-gather")
    reduced = sum(size for kind, size, _ in found if kind == "all-reduce")
    assert gathered == split
    assert NUM_PARAMS <= reduced < NUM_PARAMS + 100


def test_a_batch_that_does_not_divide_is_refused():
    mesh = make_mesh(MeshConfig(8))
    with pytest.raises(UserError, match="must be a multiple of 32"):
        make_train_step(replace(CONFIG, accumulation=4), mesh).lower(
            abstract_state(CONFIG, mesh), make_batch(rows=24)
        )
    with pytest.raises(UserError, match="accumulation is 0"):
        replace(CONFIG, accumulation=0)
