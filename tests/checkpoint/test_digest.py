import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from bert_jax.checkpoint.digest import block_digest, leaf_digests, text

DTYPES = ["float32", "bfloat16", "int32", "uint8", "bool"]


def make(shape, dtype):
    values = jax.random.normal(jax.random.key(1), shape) * 100
    return values > 0 if dtype == "bool" else values.astype(dtype)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_changes_with_any_bit_and_not_with_the_layout(dtype, mesh):
    array = (jnp.arange(64).reshape(8, 8) % 3).astype(dtype)
    digest = leaf_digests({"x": array})["x"]
    for spec in (PartitionSpec("a", "b"), PartitionSpec(None, "a"), PartitionSpec(("b", "a"))):
        placed = jax.device_put(array, NamedSharding(mesh, spec))
        assert leaf_digests({"x": placed}) == {"x": digest}
    seen = {digest}
    host = np.asarray(array)
    raw = host.tobytes()
    for byte in (0, host.nbytes // 2, host.nbytes - 1):
        for bit in range(1 if dtype == "bool" else 8):
            changed = bytearray(raw)
            changed[byte] ^= 1 << bit
            other = np.frombuffer(bytes(changed), host.dtype).reshape(host.shape)
            seen.add(leaf_digests({"x": jnp.asarray(other)})["x"])
    assert len(seen) == 1 + 3 * (1 if dtype == "bool" else 8)
    assert leaf_digests({"x": jnp.roll(array, 1, 1)})["x"] != digest  # order counts


# The two large ones are added up in pieces: with a remainder, and along a later axis.
@pytest.mark.parametrize("shape", [(), (3,), (5, 7, 11), (1201, 2048), (2, 1 << 20)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_host_and_device_agree(shape, dtype):
    array = make(shape, dtype)
    host = np.asarray(array)
    assert text(block_digest(host, (0,) * host.ndim, shape)) == leaf_digests({"x": array})["x"]


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
