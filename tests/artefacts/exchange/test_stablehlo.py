"""The StableHLO program computes what the model does, from its files alone."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
from small_saved import ROWS, small_saved

from bert_jax.artefacts.exchange.exported_files import state_dict_of
from bert_jax.artefacts.exchange.proof import batch_of, logits_of
from bert_jax.artefacts.exchange.stablehlo import exported, prove, write

EXAMPLE = Path(__file__).parents[3] / "examples/run_stablehlo.py"


@pytest.fixture(scope="module")
def pretrained():
    return small_saved()


@pytest.fixture(scope="module")
def written(pretrained, tmp_path_factory):
    out = tmp_path_factory.mktemp("stablehlo")
    write(pretrained, out)
    return out


def test_one_program_for_three_platforms_and_any_size(pretrained, written):
    proof = prove(pretrained, written, ROWS)
    assert max(proof["differences"].values()) < 1e-5
    assert proof["differences"].keys() == {"hidden", "pooled", "mlm", "nsp"}
    assert proof["platforms"] == ["cpu", "cuda", "tpu"]
    assert proof["shapes"] == [[4, 10], [2, 15], [1, 10]]
    # The weights are not in it.
    assert (written / "model.stablehlo").stat().st_size < 100_000


def test_the_proof_reads_the_weights_that_were_written(tmp_path):
    saved = small_saved("span", num_layers=1, num_positions=7)
    write(saved, tmp_path)
    weights = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    weights["qa_outputs.bias"][1] += 0.01
    safetensors.numpy.save_file(weights, tmp_path / "model.safetensors")
    found = prove(saved, tmp_path, ROWS[:1])["differences"]
    assert found["hidden"] < 1e-5
    assert found["head"] == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_classifiers_of_other_families(tmp_path, activation):
    saved = small_saved(
        "classification", num_layers=1, num_types=1, pooler_activation=activation, num_positions=7
    )
    write(saved, tmp_path)
    found = prove(saved, tmp_path, ROWS[:1])["differences"]
    assert found.keys() == {"hidden", "pooled", "head"}
    assert max(found.values()) < 1e-5


@pytest.mark.parametrize("kind", ["mlm", "classification"])
def test_embeddings_of_another_width(tmp_path, kind):
    saved = small_saved(kind, num_layers=1, embedding_dim=8, pooler_activation="gelu")
    write(saved, tmp_path)
    found = prove(saved, tmp_path, ROWS[:1])["differences"]
    assert found.keys() >= {"hidden", "head" if kind == "classification" else "mlm"}
    assert max(found.values()) < 1e-5


@pytest.mark.parametrize(
    ("kind", "outputs"),
    [
        ("mlm", {"hidden", "mlm"}),
        ("classification", {"hidden", "pooled", "head"}),
        ("rtd", {"hidden", "rtd"}),
        ("span", {"hidden", "head"}),
    ],
)
def test_outputs_are_those_of_the_class(kind, outputs):
    saved = small_saved(kind, scan_unroll=1)
    program = exported(saved, state_dict_of(saved))
    found = jax.tree.unflatten(program.out_tree, program.out_avals)
    assert found.keys() == outputs
    assert {str(size) for size in found["hidden"].shape} == {"batch", "length", "16"}
    # Elsewhere than on a CPU, products of float32 are of fewer bits by default.
    module = program.mlir_module()
    assert module.count("stablehlo.dot_general") == module.count("precision = [HIGHEST, HIGHEST]")
    assert "stablehlo.while" not in module
    batch = np.ones((2, 25), np.int32)
    with pytest.raises(ValueError, match="length <= 24"):
        jax.jit(program.call).lower(state_dict_of(saved), batch, batch, batch)


def test_the_example_runs_where_this_package_cannot_be_imported(pretrained, written):
    code = [line for line in EXAMPLE.read_text().splitlines() if line and '"""' not in line]
    assert len(code) <= 60
    run = (
        "import runpy, sys; sys.modules['bert_jax'] = None; sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", run, EXAMPLE, written, "the cat sat", "a dog"]
    done = subprocess.run(command, capture_output=True, text=True, env={"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    source = logits_of(pretrained, batch_of(pretrained, [[2, 5, 6, 8, 3], [2, 12, 7, 3]]))
    assert lines.keys() == source.keys()
    for name, array in source.items():
        assert lines[name].startswith(f"{name} {array.shape} ")
        shown = [float(x) for x in lines[name].split(")")[1].split()]
        np.testing.assert_allclose(shown, array.ravel()[: len(shown)], atol=1e-4)
