"""The table of accelerators."""

import pytest

from bert_jax.chips import _GPUS, ACCELERATORS, CHIPS


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_a_chip_agrees_with_itself(chip):
    """Peak = cores x products per cycle x 2 x clock; the arrays' sides are published, and so is
    all but the clock of v6e and tpu7x, which are derived from four arrays a core."""
    arrays = 4
    products = chip.cores * arrays * chip.mxu_side**2
    assert 2 * products * chip.clock_hz == pytest.approx(chip.bf16_flops, rel=0.005)
    assert chip.ici_bytes_per_s == chip.ici_links * chip.ici_bytes_per_s_per_link
    assert chip.hbm_bytes_per_s > chip.ici_bytes_per_s > chip.dcn_bytes_per_s
    assert chip.source


@pytest.mark.parametrize(
    ("name", "bidirectional"), [("v5e", 400e9), ("v5p", 1200e9), ("v6e", 800e9), ("tpu7x", 1200e9)]
)
def test_links_add_up_to_the_published_bidirectional_rate(name, bidirectional):
    assert 2 * CHIPS[name].ici_bytes_per_s == bidirectional


def test_jax_names_of_tpus_are_known_to_jax():
    from jax._src.pallas.mosaic.tpu_info import chip_version_from_device_kind

    for chip in CHIPS.values():
        for kind in chip.device_kinds:
            version = chip_version_from_device_kind(kind)
            assert str(version) == chip.name.removeprefix("tpu")


def test_names_and_kinds_are_unique():
    kinds = [kind for a in (*CHIPS.values(), *_GPUS) for kind in a.device_kinds]
    assert len(kinds) == len(set(kinds))
    assert ACCELERATORS.keys() == set(kinds)


def test_a_device_is_its_share_of_the_chip():
    device = CHIPS["tpu7x"].per_device
    assert device.bf16_flops == 1153.5e12
    assert device.hbm_bytes == 96 * 2**30
    assert device.cores == 1
    assert device.per_device == device
    assert CHIPS["v5p"].per_device == CHIPS["v5p"]
