"""The device at hand as JSON: its name, versions, and its rate of bfloat16 products, measured.

python benchmarks/gpu/device.py
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from typing import Any

PACKAGES = (
    "jax", "jaxlib", "flax", "optax", "numpy", "torch", "triton", "transformers", "flash_attn",
)  # fmt: skip


def versions() -> dict[str, str | None]:
    """Return the version of each package; None where it is missing."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "?" if importlib.util.find_spec(name) else None
    return found


def driver() -> str | None:
    """Return the version of NVIDIA's driver, None where nothing tells it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.splitlines()[0].strip() if said.stdout else None


def matmul_flops(size: int) -> float:
    """Measure a product of two random bfloat16 matrices: operations a second, best of ten."""
    import jax
    import jax.numpy as jnp

    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    chain = jax.jit(lambda a, b: jax.lax.fori_loop(0, 8, lambda _, x: (x @ b) * 0.01, a))
    chain(a, a).block_until_ready()
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        chain(a, a).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 8 * 2 * size**3 / best


def describe(smoke: bool) -> dict[str, Any]:
    """Describe the first device of JAX; the rate is that of a GPU, or of a smoke run."""
    import jax

    device = jax.devices()[0]
    has_rate = smoke or device.platform == "gpu"
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "driver": driver(),
        "versions": versions(),
        "matmul_flops": matmul_flops(128 if smoke else 8192) if has_rate else None,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="on a CPU, with a small product")
    smoke = parser.parse_args().smoke
    if smoke:
        os.environ["JAX_PLATFORMS"] = "cpu"
    print(json.dumps(describe(smoke)))
    sys.exit()
