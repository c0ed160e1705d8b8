"""What crosses a mesh: parameters in the compute type, sums of gradients in float32."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from bert_jax.distributed.parallel.collectives import gather, on_local_rows
from bert_jax.distributed.parallel.sharding import MeshConfig, make_mesh


def test_gradients_are_summed_in_float32_whatever_travels():
    mesh, spec = make_mesh(MeshConfig(1, 8, 1)), {"kernel": P("fsdp", None)}

    def step(params, row):
        def loss(params):
            kernel = gather(params, spec, mesh, jnp.bfloat16)["kernel"]
            assert (kernel.shape, kernel.dtype) == ((8, 2), jnp.bfloat16)
            return (kernel * row.astype(kernel.dtype)).astype(jnp.float32).sum()

        return jax.grad(loss)(params)

    # 256 + 7 takes a bit more than bfloat16 has.
    rows = np.float32([256.0, *[1.0] * 7])
    run = jax.jit(on_local_rows(step, mesh, (spec, P("fsdp")), spec))
    np.testing.assert_array_equal(
        run({"kernel": np.zeros((8, 2), np.float32)}, rows)["kernel"], 263.0
    )
