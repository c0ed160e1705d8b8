"""TPU slices by name. libtpu describes their devices, even on a machine without a TPU.

A name has the kind of chip and the number of chips along each dimension of the torus: `v5e:16x16`,
`v5p:4x4x8`, `tpu7x:2x2x1`, or `v5e:1x1` for one chip. `v5e:16x16,slices=2` means two such slices
that the data-centre network joins (not `16x16*2`, because a shell would expand the star).
"""

import contextlib
import importlib.util
import itertools
import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bert_jax.chips import CHIPS, Chip
from bert_jax.errors import UserError, nearest

_SMALL_2D = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_SMALL_3D = ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_MAX_CHIPS_3D = {"v4": 4096, "v5p": 6144, "tpu7x": 9216}
"""Largest slice, in chips, of each kind with a 3-D torus (docs.cloud.google.com/tpu/docs)."""
_ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "v7x": "tpu7x", "v7": "tpu7x", "ironwood": "tpu7x",
            "trillium": "v6e", "v6lite": "v6e"}  # fmt: skip
_NO_LIBTPU = (
    "bert-jax plan compiles with libtpu, which is not installed; run pip install 'bert_jax[plan]' "
    "(no TPU is needed)"
)
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # do not query the metadata server of a cloud machine
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # otherwise, two plans at a time abort on a lock file
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_MIN_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


@dataclass(frozen=True)
class Topology:
    """A TPU slice, or several equal slices."""

    chip: Chip
    shape: tuple[int, ...]
    """Number of chips along each dimension of one slice."""
    num_slices: int = 1

    @property
    def name(self) -> str:
        """Name in the form that `parse_topology` reads."""
        slices = f",slices={self.num_slices}" if self.num_slices > 1 else ""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}{slices}"

    @property
    def num_chips(self) -> int:
        """Number of chips in all slices."""
        return math.prod(self.shape) * self.num_slices

    @property
    def num_devices(self) -> int:
        """Number of JAX devices. A chip may have two devices."""
        return self.num_chips * self.chip.devices_per_chip

    @property
    def bf16_flops(self) -> float:
        """Peak FLOP/s of all chips in bfloat16."""
        return self.num_chips * self.chip.bf16_flops


def parse_topology(name: str) -> Topology:
    """Return the topology that is named `CHIP:AxB[xC][,slices=N]`.

    Raise a UserError, which lists similar names, if the name is malformed or no such slice exists.
    """
    match = re.fullmatch(r"([\w-]+):(\d+(?:x\d+)*)(?:,slices=(\d+))?", name.strip())
    if match is None:
        raise UserError(
            f"--topology {name!r} must be CHIP:AxB or CHIP:AxBxC, optionally with ,slices=N, such "
            "as v5e:16x16, v5p:4x4x8, tpu7x:4x4x4, v5e:1x1 (one chip) or v5e:16x16,slices=2"
        )
    kind, dimensions, slices = match.groups()
    if kind not in CHIPS:
        near = nearest(kind, [*CHIPS, *_ALIASES])
        hint = f"; did you mean {_ALIASES.get(near, near)}?" if near else "."
        raise UserError(
            f"--topology {name!r}: there is no chip {kind!r}{hint} Known: {', '.join(CHIPS)}"
        )
    shape = tuple(int(n) for n in dimensions.split("x"))
    if not _exists(kind, shape):
        rule = "2-D, up to 16x16"
        if kind in _MAX_CHIPS_3D:
            most = f"{_MAX_CHIPS_3D[kind]:,}"
            rule = f"3-D, multiples of 4 in ascending order above 2x4x4, at most {most} chips"
        near_shapes = (f"{kind}:{'x'.join(map(str, near))}" for near in _nearest(kind, shape))
        raise UserError(
            f"--topology {name!r}: {kind} is not offered in this shape ({rule}); near it: "
            + ", ".join(near_shapes)
        )
    num_slices = int(slices or 1)
    if not 1 <= num_slices <= 64:
        raise UserError(f"--topology {name!r}: slices is {num_slices}; it must be 1 to 64")
    return Topology(CHIPS[kind], shape, num_slices)


def devices(topology: Topology) -> list[Any]:
    """Return descriptions of the slice's devices in libtpu's order, for compilation.

    Raise a UserError if libtpu is missing, or does not know the slice.
    """
    prepare_environment()
    from jax.experimental import topologies  # imports jax: set the environment first

    options: dict[str, Any] = {}
    if math.prod(topology.shape) == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    if topology.chip.name == "v4":
        options["chip_config_name"] = "megacore"  # both cores as one device, as on a real v4
    if topology.num_slices > 1:
        options["num_slices"] = topology.num_slices
    name = f"{topology.chip.name}:{'x'.join(map(str, topology.shape))}"
    try:
        with quiet():
            found = topologies.get_topology_desc(name, "tpu", **options).devices
    except Exception as error:  # jax has no special error type for libtpu's answers
        if "libtpu" in str(error) and "INVALID_ARGUMENT" not in str(error):
            raise UserError(_NO_LIBTPU) from error
        raise UserError(f"--topology {topology.name}: libtpu says {error}") from error
    if len(found) != (wanted := topology.num_devices):
        raise AssertionError(f"{topology.name}: {len(found)} devices in libtpu, not {wanted}")
    return list(found)


def prepare_environment() -> None:
    """Set the environment variables that libtpu reads when it loads, and keep JAX on the CPU.

    Raise a UserError if libtpu is not installed.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(_NO_LIBTPU)
    import jax

    jax.config.update("jax_platforms", "cpu")  # on a TPU machine, another process may use the chips


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Discard standard error, even from C++, in the `with` block: libtpu warns without a TPU."""
    sys.stderr.flush()
    try:
        saved = os.dup(2)
    except OSError:  # standard error is closed: nothing to drop
        yield
        return
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def _exists(kind: str, shape: tuple[int, ...]) -> bool:
    if kind not in _MAX_CHIPS_3D:
        return shape in _SMALL_2D
    if len(shape) != 3 or math.prod(shape) > _MAX_CHIPS_3D[kind]:
        return False
    cubes = all(n > 0 and n % 4 == 0 for n in shape) and tuple(sorted(shape)) == shape
    return shape in _SMALL_3D or cubes


def _nearest(kind: str, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the four existing shapes with the most similar dimensions, most similar first."""
    known: list[tuple[int, ...]] = [*_SMALL_2D]
    if kind in _MAX_CHIPS_3D:
        cubes = itertools.combinations_with_replacement(range(4, 32, 4), 3)
        known = [*_SMALL_3D, *(cube for cube in cubes if _exists(kind, cube))]
    wanted = max(math.prod(shape), 1)

    def distance(other: tuple[int, ...]) -> tuple[float, float]:
        padded = itertools.zip_longest(sorted(shape), sorted(other), fillvalue=1)
        sides = sum(abs(math.log(max(a, 1) / b)) for a, b in padded)
        return sides, abs(math.log(math.prod(other) / wanted))

    return sorted(known, key=distance)[:4]
