"""Accelerators: a table of their speeds, with sources, for telemetry and `bert-jax plan`.

Conventions
    Rates are per chip (the unit that is sold as one accelerator) and per second. Amounts of data
    are in bytes, not bits. JAX shows one chip as `devices_per_chip` devices; the property
    `per_device` gives the rates of one device.
    Links of the inter-chip interconnect (ICI) are counted per chip. Their rate is one-way: a link
    sends `ici_bytes_per_s_per_link` and receives as much at the same time.
    Google's "bidirectional ICI bandwidth per chip" is links x one-way rate x 2.
    Peak rates are for dense bfloat16 products with float32 accumulation.

Sources of the TPU rows
    [docs] docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}, "System architecture": peak rate,
        HBM, bidirectional ICI per chip, torus dimensions, data-centre network (DCN).
    [book] jax-ml.github.io/scaling-book/tpus ("How to Think About TPUs"): one-way rate per ICI
        link, the clock of v5e (1.5 GHz) and v5p (1.75 GHz), chips per host, 25 GB/s DCN per host.
    [isca] Jouppi et al., "TPU v4: An Optically Reconfigurable Supercomputer", ISCA 2023, table 4:
        clock of v4 (1050 MHz).
    [xla] `jax/_src/pallas/mosaic/tpu_info.py`: HBM in bytes, cores per chip, MXU sizes; and the
        compiler's own estimates for an 8192^3 product (docs/experiments.md, "The wind tunnel").

The clocks of v6e and tpu7x are not published. They are derived from peak = products per cycle x 2 x
clock. The products per cycle are chosen so that the compiler's estimate is plausible: 4 x 256 x 256
per chip on v6e (1.75 GHz), and as many per core on tpu7x (2.2 GHz). [docs] counts 2 MXUs of
256 x 256 on v6e; with 2, the clock would be 3.5 GHz, and the estimate 1.4 times too fast.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Accelerator:
    """An accelerator with its names, peak rate and memory."""

    name: str
    """Name in common use, for example "v5e" or "H100 SXM"."""
    device_kinds: tuple[str, ...]
    """Values of `jax.Device.device_kind` for this accelerator, the most common value first."""
    bf16_flops: float
    """Peak FLOP/s of a chip in bfloat16."""
    hbm_bytes: int
    """Memory of a chip in bytes."""
    hbm_bytes_per_s: float
    """Memory bandwidth of a chip in bytes per second."""
    devices_per_chip: int
    """Number of devices that JAX shows for one chip."""
    source: str


@dataclass(frozen=True)
class Chip(Accelerator):
    """A TPU, with the clock and the rates that turn cycles and bytes into seconds."""

    clock_hz: float
    """Clock of the cores in Hz, which turns the compiler's cycle counts into seconds."""
    ici_links: int
    """Number of ICI links per chip: two per dimension of the torus."""
    ici_bytes_per_s_per_link: float
    """One-way rate of an ICI link."""
    dcn_bytes_per_s: float
    """One-way rate of the data-centre network (DCN) per chip: the host's rate / number of chips."""
    cores: int
    """TensorCores per chip; a device with two cores ("megacore") splits every operation."""
    mxu_side: int
    """Number of rows of a systolic array (MXU), which equals its number of columns."""
    alus: int
    """32-bit operations per cycle in each of the 8 x 128 lanes of a core. [book] gives 2 for v4
    and 4 for v5; 4 is assumed for v6e and later TPUs."""

    @property
    def ici_bytes_per_s(self) -> float:
        """One-way rate of all ICI links of a chip together."""
        return self.ici_links * self.ici_bytes_per_s_per_link

    @property
    def per_device(self) -> "Chip":
        """One device of the chip, with its part of the chip's rates, memory and cores."""
        n = self.devices_per_chip
        return replace(
            self, bf16_flops=self.bf16_flops / n, hbm_bytes=self.hbm_bytes // n,
            hbm_bytes_per_s=self.hbm_bytes_per_s / n,
            ici_bytes_per_s_per_link=self.ici_bytes_per_s_per_link / n,
            dcn_bytes_per_s=self.dcn_bytes_per_s / n, cores=self.cores // n, devices_per_chip=1,
        )  # fmt: skip


_DOCS = "docs.cloud.google.com/tpu/docs/"
_BOOK = "jax-ml.github.io/scaling-book/tpus"
_GIB = 2**30

# Columns, in three lines per chip: name, device kinds, peak rate, HBM size, HBM rate, devices;
# source; clock, ICI links, rate per link, DCN rate, cores, MXU side, ALUs.
_TPUS = (
    Chip("v4", ("TPU v4",), 275e12, 32 * _GIB, 1200e9, 1,
         f"{_DOCS}v4 (peak, HBM); {_BOOK} (ICI, DCN); ISCA 2023 TPU v4 paper (clock)",
         1.05e9, 6, 45e9, 25e9 / 4, 2, 128, 2),
    Chip("v5e", ("TPU v5 lite", "TPU v5e"), 197e12, 16 * _GIB, 819e9, 1,
         f"{_DOCS}v5e (peak, HBM, 400 GB/s bidirectional ICI, 2 x 100 Gbit/s per host); "
         f"{_BOOK} (clock, ICI per link)",
         1.5e9, 4, 50e9, 25e9 / 8, 1, 128, 4),
    Chip("v5p", ("TPU v5", "TPU v5p"), 459e12, 95 * _GIB, 2765e9, 1,
         f"{_DOCS}v5p (peak, HBM, 1,200 GB/s bidirectional ICI, 50 Gbit/s DCN per chip); "
         f"{_BOOK} (clock, ICI per link)",
         1.75e9, 6, 100e9, 50e9 / 8, 2, 128, 4),
    Chip("v6e", ("TPU v6 lite", "TPU v6e"), 918e12, 32 * _GIB, 1638e9, 1,
         f"{_DOCS}v6e (peak, HBM, 800 GB/s bidirectional ICI, 25.6 Tbit/s DCN per pod); "
         "clock derived",
         1.75e9, 4, 100e9, 100e9 / 8, 1, 256, 4),
    Chip("tpu7x", ("TPU7x",), 2307e12, 192 * _GIB, 7380e9, 2,
         f"{_DOCS}tpu7x (peak, HBM size); HBM rate as in jax's tpu_info.py, within 0.3%; "
         "ICI and DCN taken as v5p's links and 100 Gbit/s per chip, unconfirmed; clock derived",
         2.2e9, 6, 100e9, 100e9 / 8, 2, 256, 4),
)  # fmt: skip
CHIPS = {chip.name: chip for chip in _TPUS}
"""TPUs by name. The name of a topology begins with the name of its TPU ("v5e:4x4"). A chip of v4 or
v5p counts as one device ("megacore"), which is the default of Cloud TPU."""

_A100 = "NVIDIA A100 data sheet: 312 TFLOP/s BFLOAT16 Tensor Core"
_HOPPER = "NVIDIA data sheet, half of the figure 'with sparsity'"
_H100_SXM, _H100_PCIE, _H200 = (
    f"H100: {_HOPPER} (1,979 TFLOP/s)",
    f"H100: {_HOPPER} (1,513 TFLOP/s)",
    f"H200: {_HOPPER} (1,979 TFLOP/s)",
)
_GPUS = (
    Accelerator("A100 40GB", ("NVIDIA A100-SXM4-40GB",), 312e12, 40 * 10**9, 1555e9, 1, _A100),
    Accelerator("A100 80GB", ("NVIDIA A100-SXM4-80GB",), 312e12, 80 * 10**9, 2039e9, 1, _A100),
    Accelerator("A100 80GB PCIe", ("NVIDIA A100 80GB PCIe",), 312e12, 80 * 10**9, 1935e9, 1, _A100),
    Accelerator("H100 SXM", ("NVIDIA H100 80GB HBM3",), 989.4e12, 80 * 10**9, 3350e9, 1, _H100_SXM),
    Accelerator("H100 PCIe", ("NVIDIA H100 PCIe",), 756.5e12, 80 * 10**9, 2000e9, 1, _H100_PCIE),
    Accelerator("H200", ("NVIDIA H200",), 989.4e12, 141 * 10**9, 4800e9, 1, _H200),
)
ACCELERATORS: dict[str, Accelerator] = {
    kind: accelerator for accelerator in (*_TPUS, *_GPUS) for kind in accelerator.device_kinds
}
"""TPUs and GPUs by their `jax.Device.device_kind`."""
