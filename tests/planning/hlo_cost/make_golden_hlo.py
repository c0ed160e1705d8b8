"""Compiles the small TPU programs that the tests of `bert_jax.planning` read.

python tests/planning/hlo_cost/make_golden_hlo.py   (needs libtpu; writes golden/*.hlo beside it)

What the analysis does not read is cut from the text, so that the files stay small.
"""

import os
import re
from pathlib import Path

os.environ.update(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    TPU_WORKER_HOSTNAMES="localhost",
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

GOLDEN = Path(__file__).with_name("golden")


def mesh_of(topology, shape, **options):
    """A mesh with the axes of the trainer."""
    devices = topologies.get_topology_desc(topology, "tpu", **options).devices
    devices = np.array(devices[: np.prod(shape)]).reshape(shape)
    return Mesh(devices, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def compiled(function, mesh, *arguments):
    """HLO of `function`; arguments are (shape, dtype, spec)."""
    structs = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in arguments
    ]
    return jax.jit(function).lower(*structs).compile().as_text()


def scans(mesh):
    """Loops of 5, 6 (reversed), 3 x 4 (nested), 8 in steps of 2, and one that depends on data."""

    def layer(x, w):
        return jnp.tanh(x @ w), x.sum()

    def function(x, five, six, three_four, eight, n):
        x, a = jax.lax.scan(layer, x, five)
        x, b = jax.lax.scan(layer, x, six, reverse=True)
        x, c = jax.lax.scan(lambda x, ws: jax.lax.scan(layer, x, ws), x, three_four)
        x, d = jax.lax.scan(layer, x, eight, unroll=2)
        x = jax.lax.fori_loop(0, n, lambda _, x: jnp.tanh(x @ five[0]), x)
        return x, a, b, c, d

    f32 = jnp.float32
    shapes = [(128, 128), (5, 128, 128), (6, 128, 128), (3, 4, 128, 128), (8, 128, 128)]
    return compiled(function, mesh, *((shape, f32, P()) for shape in shapes), ((), jnp.int32, P()))


def sharded(mesh):
    """Gradients of a scan over layers whose weights are split over fsdp."""

    def loss(w, x):
        def layer(x, w):
            return jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]), None

        x, _ = jax.lax.scan(layer, x, w)
        return (x.astype(jnp.float32) ** 2).mean()

    return compiled(
        jax.grad(loss),
        mesh,
        ((6, 2, 1024, 1024), jnp.bfloat16, P(None, None, "fsdp", None)),
        ((1024, 1024), jnp.bfloat16, P(("data", "fsdp"))),
    )


def data_parallel(mesh):
    """Gradients of two products, rows split over data."""

    def loss(w, x):
        return (jnp.tanh(x @ w) @ w).astype(jnp.float32).sum()

    return compiled(
        jax.grad(loss),
        mesh,
        ((512, 512), jnp.bfloat16, P()),
        ((mesh.size * 8, 512), jnp.bfloat16, P("data")),
    )


def kernel(mesh):
    """Splash attention: 4 heads of 64, length 256, two rows; it states no costs."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    full = [splash_attention_mask.FullMask((256, 256)) for _ in range(4)]
    attend = splash_attention_kernel.make_splash_mha_single_device(
        splash_attention_mask.MultiHeadMask(full)
    )
    argument = ((2, 4, 256, 64), jnp.bfloat16, P())
    return compiled(jax.vmap(attend), mesh, argument, argument, argument)


_NOISE = re.compile(
    r',"(?:iteration_bounds|cost_model_type|ml_estimated|is_mask|pad_|estimated_vmem|'
    r'estimated_bundle|estimated_scoped|buffering)\w*":(?:"[^"]*"|\[[^\]]*\]|\w+)'
    r'|"(?:flag_configs|scoped_memory_configs|used_scoped_memory_configs)":\[[^\]]*\],?'
    r'|"(?:kernel|output|input)_window_bounds":\[[^\]]*\],?'
    r'|"debug":"(?:[^"\\]|\\.)*",?|"(?:retry_config|aliasing_operands)":\{[^{}]*(?:\{[^{}]*\})?\}'
)


def strip(text):
    """Without the settings that say nothing about costs, and without paths of this machine."""
    text = re.sub(r'^(\d+) "[^"]*/(make_\w+.py)"$', r'\1 "/x/bert_jax/model/\2"', text, flags=re.M)
    text = re.sub(r'^(\d+) "[^"]*/site-packages/', r'\1 "/x/', text, flags=re.M)
    text = re.sub(r'"aliasing_operands":\{"lists":\[.*?\]\}\}?(?=\}$|,)', "", text, flags=re.M)
    return _NOISE.sub("", text)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    one, eight = (1, 1, 1), (2, 4, 1)
    for name, text in {
        "scans": scans(mesh_of("v5e:2x2", one)),
        "sharded": sharded(mesh_of("v5e:2x4", eight)),
        "slices": data_parallel(mesh_of("v5e:2x2", (8, 1, 1), num_slices=2)),
        "kernel": kernel(mesh_of("v5e:2x2", one)),
    }.items():
        path = GOLDEN / f"{name}.hlo"
        path.write_text(strip(text))
        print(path, path.stat().st_size)
