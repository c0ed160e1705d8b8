"""Every file of a run's checkpoint, with a bit flipped, cut short, and missing."""

import gc
import logging
import random
import shutil
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from chaos_run import LONG, new_seed
from checkpoint_states import change_a_value
from small_run import fingerprint, small_config, write_corpus

from bert_jax.distributed.checkpoint.manager import Checkpoints
from bert_jax.distributed.checkpoint.record import read_record
from bert_jax.distributed.checkpoint.storage import saved_steps
from bert_jax.distributed.checkpoint.verify import verify_checkpoint
from bert_jax.distributed.parallel.sharding import make_mesh
from bert_jax.training.pretrain.settings import step_config
from bert_jax.training.pretrain.train import train
from bert_jax.training.run.events import read_events
from bert_jax.training.steps.state import abstract_state

CONFIG = small_config(
    training__num_steps=6,
    training__phases=[{"length": 32, "batch_size": 16}],
    training__accumulation=1,
    training__eval_every_steps=0,
    training__log_every_steps=1,
    checkpoint={"save_every_steps": 2, "keep": 4},
)
DAMAGES = ("flip", "truncate", "delete")

# Orbax's threads call back into its closed event loop, as in test_checkpoints.py.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True, scope="module")
def _late_callbacks():
    """Keeps them out of the next module."""
    yield
    time.sleep(0.1)
    gc.collect()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))._replace(heldout=None)


@pytest.fixture(scope="module")
def run(tmp_path_factory, cache, corpus) -> Path:
    """The work directory of a run with checkpoints 2, 4 and 6, all of them read back."""
    workdir = tmp_path_factory.mktemp("run") / "work"
    assert train(CONFIG, workdir, corpus=corpus, echo=lambda _: None).finished
    assert saved_steps(workdir / "checkpoints") == [2, 4, 6]
    for step in (2, 4, 6):  # where saves follow each other fast, the newest is read back only
        assert verify_checkpoint(workdir / "checkpoints" / str(step), mark=True).intact
    return workdir


@pytest.fixture(scope="module")
def abstract(corpus) -> Any:
    config = CONFIG.with_vocabulary(corpus.train.vocab_size)
    return abstract_state(step_config(config, corpus), make_mesh(config.mesh))


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(p.relative_to(checkpoint) for p in checkpoint.rglob("*") if p.is_file())


def harm(file: Path, damage: str, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(content)
    elif damage == "truncate":
        file.write_bytes(content[: rng.randrange(len(content))])
    else:
        file.unlink()


def cases(checkpoint: Path, rng: random.Random) -> list[tuple[Path, str]]:
    """Every file and damage; in the short form a file for each."""
    every = [
        (file, damage)
        for damage in DAMAGES
        for file in files_of(checkpoint)
        if damage == "delete" or (checkpoint / file).stat().st_size
    ]
    if LONG:
        return every
    return [rng.choice([case for case in every if case[1] == damage]) for damage in DAMAGES]


def copied(run: Path, tmp_path: Path) -> Path:
    """Directory of copies of the checkpoints 4 and 6."""
    shutil.rmtree(tmp_path, ignore_errors=True)
    for step in ("4", "6"):
        shutil.copytree(run / "checkpoints" / step, tmp_path / "checkpoints" / step)
    return tmp_path / "checkpoints"


def restored_from(directory: Path, abstract: Any) -> tuple[int, list[np.ndarray], dict[str, Any]]:
    checkpoints = Checkpoints(directory)
    restored = checkpoints.restore(abstract)
    checkpoints.close()
    assert restored is not None
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(restored.state)]
    return restored.step, leaves, restored.record.to_json()


def same(a: tuple[int, list[np.ndarray], Any], b: tuple[int, list[np.ndarray], Any]) -> bool:
    return (a[0], a[2]) == (b[0], b[2]) and all(
        np.array_equal(x, y) for x, y in zip(a[1], b[1], strict=True)
    )


def test_a_damaged_file_is_named_and_the_older_checkpoint_used(run, abstract, tmp_path, caplog):
    rng = random.Random(new_seed())
    expected = {}
    for step in (4, 6):
        directory = copied(run, tmp_path / "copy")
        if step == 4:
            shutil.rmtree(directory / "6")
        expected[step] = restored_from(directory, abstract)
    assert (expected[4][0], expected[6][0]) == (4, 6)
    for file, damage in cases(run / "checkpoints" / "6", rng):
        directory = copied(run, tmp_path / "copy")
        harm(directory / "6" / file, damage, rng)
        fault = verify_checkpoint(directory / "6").fault
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            restored = restored_from(directory, abstract)
        if (file.name, damage) == ("verified.json", "delete"):  # it has yet to be read back
            assert fault == ""
            assert same(restored, expected[6])
            continue
        assert str(file) in fault, (file, damage, fault)
        assert same(restored, expected[4]), (file, damage)
        assert f"Skipped damaged checkpoint 6 ({fault})" in caplog.text
        assert saved_steps(directory) == [4]
        assert (directory.parent / "damaged" / "6.0").is_dir()


def test_before_it_was_read_back_the_digests_tell(run, abstract, tmp_path, caplog):
    """As after a kill: without `verified.json`. All checksums of files are right."""
    rng = random.Random(new_seed())
    every = list(read_record(run / "checkpoints" / "6").arrays)
    for name in every if LONG else ["step", rng.choice(every)]:
        directory = copied(run, tmp_path / "copy")
        change_a_value(directory / "6", name)
        assert verify_checkpoint(directory / "6").fault == f"array {name} differs from its digest"
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert restored_from(directory, abstract)[0] == 4
        fault = f"1 of {len(every)} arrays differ from their digest: {name}"
        assert f"Skipped damaged checkpoint 6 ({fault})" in caplog.text


def test_before_it_was_read_back_harm_to_a_file_is_found_or_harms_no_value(
    run, abstract, tmp_path, caplog
):
    """As after a kill: without `verified.json`."""
    rng = random.Random(new_seed())
    directory = copied(run, tmp_path / "copy")
    expected = restored_from(directory, abstract)
    passed, believed = [], []
    for file, damage in cases(run / "checkpoints" / "6", rng):
        if file.name == "verified.json":
            continue
        directory = copied(run, tmp_path / "copy")
        (directory / "6" / "verified.json").unlink()
        harm(directory / "6" / file, damage, rng)
        fault = verify_checkpoint(directory / "6").fault
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            restored = restored_from(directory, abstract)
        if restored[0] == 4:
            assert "Skipped damaged checkpoint 6 (" in caplog.text
        else:
            passed.append(f"{damage} {file}")
            assert same(restored, expected), (file, damage)
        if not fault and restored[0] == 4:
            believed.append(f"{damage} {file}")
    print(f"harmless: {passed}")
    assert believed == []  # what verification lets pass is marked as good


def test_a_run_continues_from_what_is_intact(run, corpus, tmp_path, caplog):
    rng = random.Random(new_seed())
    expected = fingerprint(run, CONFIG, corpus)
    shutil.copytree(run, tmp_path / "work")
    directory = tmp_path / "work" / "checkpoints"
    harmed = []
    for step, damage in ((6, "flip"), (4, rng.choice(["truncate", "delete"]))):
        files = [
            f for f in files_of(directory / f"{step}") if (directory / f"{step}" / f).stat().st_size
        ]
        file = rng.choice([file for file in files if file.name != "verified.json"])
        harm(directory / f"{step}" / file, damage, rng)
        harmed.append(file)
    said: list[str] = []
    with caplog.at_level(logging.WARNING):
        assert train(CONFIG, tmp_path / "work", corpus=corpus, echo=said.append).finished
    assert any(line.startswith("continues from step 2") for line in said), said
    assert "Skipped damaged checkpoints 6 (" in caplog.text
    events = [e for e in read_events(tmp_path / "work/events.jsonl") if e["kind"] == "damaged"]
    assert [event["step"] for event in events] == [6, 4]
    for event, file in zip(events, harmed, strict=True):
        assert str(file) in event["message"]
    assert sorted(p.name for p in (tmp_path / "work/damaged").iterdir()) == ["4.0", "6.0"]
    assert saved_steps(directory) == [2, 4, 6]
    assert fingerprint(tmp_path / "work", CONFIG, corpus) == expected
