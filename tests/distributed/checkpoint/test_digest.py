import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from bert_jax.distributed.checkpoint.digest import block_digest, leaf_digests, text

DTYPES = ["float32", "bfloat16", "int32", "uint8", "bool"]


def make(shape, dtype):
    values = np.asarray(np.random.default_rng(1).normal(size=shape) * 100)
    return jax.device_put(values > 0 if dtype == "bool" else as_dtype(values, dtype))


def as_dtype(values, dtype):
    """Negative values wrap around, quietly."""
    return values.astype(np.int64).astype(dtype) if dtype == "uint8" else values.astype(dtype)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def test_does_not_change_with_the_layout(mesh):
    arrays = {dtype: jax.device_put(small(dtype)) for dtype in DTYPES}
    digests = leaf_digests(arrays)
    for spec in (PartitionSpec("a", "b"), PartitionSpec(None, "a"), PartitionSpec(("b", "a"))):
        assert leaf_digests(jax.device_put(arrays, NamedSharding(mesh, spec))) == digests


def small(dtype):
    return (np.arange(64).reshape(8, 8) % 3).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_changes_with_any_bit(dtype):
    host = small(dtype)
    digest = leaf_digests({"x": jax.device_put(host)})["x"]
    seen = {digest}
    raw = host.tobytes()
    for byte in (0, host.nbytes // 2, host.nbytes - 1):
        for bit in range(1 if dtype == "bool" else 8):
            changed = bytearray(raw)
            changed[byte] ^= 1 << bit
            other = np.frombuffer(bytes(changed), host.dtype).reshape(host.shape)
            seen.add(leaf_digests({"x": jax.device_put(other)})["x"])
    assert len(seen) == 1 + 3 * (1 if dtype == "bool" else 8)
    rolled = jax.device_put(np.roll(host, 1, 1))
    assert leaf_digests({"x": rolled})["x"] != digest  # order counts


# The two large ones are added up in pieces: with a remainder, and along a later axis.
SHAPES = [(), (3,), (5, 7, 11), (1201, 2048), (2, 1 << 20)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_host_and_device_agree(dtype):
    arrays = {str(shape): make(shape, dtype) for shape in SHAPES}
    digests = leaf_digests(arrays)
    for name, array in arrays.items():
        host = np.asarray(array)
        assert text(block_digest(host, (0,) * host.ndim, host.shape)) == digests[name], name


def test_blocks_add_up(mesh):
    array = make((1024, 2400), "float32")
    digest = leaf_digests({"x": array})["x"]
    for spec in (PartitionSpec("a", "b"), PartitionSpec(None, ("b", "a")), PartitionSpec("b")):
        placed = jax.device_put(array, NamedSharding(mesh, spec))
        blocks = [
            block_digest(np.asarray(s.data), [i.start or 0 for i in s.index], array.shape)
            for s in placed.addressable_shards
            if s.replica_id == 0
        ]
        assert text(sum(blocks)) == digest
        assert leaf_digests({"x": placed}) == {"x": digest}
