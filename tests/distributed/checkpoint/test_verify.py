"""Any change to any file of a checkpoint is found, and named."""

import json
import logging
import shutil

import pytest
from checkpoint_states import (
    abstract,
    assert_same,
    change_a_digest,
    change_a_value,
    unmark,
    write,
)

from bert_jax.artefacts.saved.runs import named_steps
from bert_jax.distributed.checkpoint.manager import Checkpoints
from bert_jax.distributed.checkpoint.reading import load_newest
from bert_jax.distributed.checkpoint.record import read_record
from bert_jax.distributed.checkpoint.retention import Retention
from bert_jax.distributed.checkpoint.verify import (
    audit,
    audit_report,
    is_verified,
    verify_checkpoint,
)
from bert_jax.errors import UserError
from bert_jax.files.remote import open_workdir

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A work directory with two checkpoints and their states."""
    workdir = tmp_path_factory.mktemp("saved")
    return workdir, write(workdir, [5, 10])


def files_of(checkpoint):
    return sorted(str(p.relative_to(checkpoint)) for p in checkpoint.rglob("*") if p.is_file())


def flip(path):
    content = bytearray(path.read_bytes())
    if not content:
        content = bytearray(1)
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def truncate(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] if content else b"x")


DAMAGE = {"flip": flip, "truncate": truncate, "delete": lambda path: path.unlink()}


@pytest.mark.parametrize("damage", DAMAGE)
def test_every_file_is_watched(saved, tmp_path, damage):
    workdir, _ = saved
    names = files_of(workdir / "checkpoints" / "10")
    assert {"verified.json", "record/data.json", "params/manifest.ocdbt"} <= set(names)
    for name in names:
        if (damage, name) == ("delete", "verified.json"):
            continue  # then it is a checkpoint that was not read back yet
        copy = tmp_path / "10"
        shutil.copytree(workdir / "checkpoints" / "10", copy)
        DAMAGE[damage](copy / name)
        verdict = verify_checkpoint(copy)
        assert not verdict.intact, name
        assert name in verdict.fault
        shutil.rmtree(copy)


def test_the_digests_alone_find_what_changes_arrays(saved, tmp_path):
    """Without `verified.json`: a run that was killed between saving and reading back."""
    workdir, _ = saved
    copy = tmp_path / "work"
    shutil.copytree(workdir, copy)
    unmark(copy)
    path = copy / "checkpoints" / "10"
    assert verify_checkpoint(path).intact
    count = "opt_state/1/0/count"
    for name in ("params/encoder/w", "params/encoder/b", "opt_state/1/0/mu/nsp/w", count, "step"):
        shutil.rmtree(path)
        shutil.copytree(workdir / "checkpoints" / "10", path)
        change_a_value(path, name)
        assert verify_checkpoint(path).fault == f"array {name} differs from its digest"
    flip(path / "record" / "data.json")
    assert "its record" in verify_checkpoint(path).fault


def test_every_digest_is_compared_in_verification_and_in_a_restore(saved, tmp_path):
    workdir, states = saved
    copy = tmp_path / "work"
    shutil.copytree(workdir, copy)
    unmark(copy)
    path = copy / "checkpoints" / "10"
    names = read_record(path).arrays
    assert len(names) == 11
    for name in names:
        change_a_digest(path, name)
        assert verify_checkpoint(path).fault == f"array {name} differs from its digest"
        restored = load_newest(copy / "checkpoints", abstract(states[10]))
        (damaged,) = restored.damaged
        assert damaged.fault == f"1 of 11 arrays differ from their digest: {name}"
        change_a_digest(path, name)  # as it was
    assert load_newest(copy / "checkpoints", abstract(states[10])).damaged == ()
    change_a_digest(path, "params/nsp/w")
    (damaged,) = load_newest(copy / "checkpoints").damaged
    assert damaged.fault == "1 of 3 arrays differ from their digest: params/nsp/w"


@pytest.mark.parametrize("name", ["_CHECKPOINT_METADATA", "params/_METADATA", "rest/_sharding"])
def test_a_restore_skips_what_has_changed_and_says_so(saved, tmp_path, caplog, name):
    workdir, states = saved
    copy = tmp_path / "work"
    shutil.copytree(workdir, copy)
    flip(copy / "checkpoints" / "10" / name)
    checkpoints = Checkpoints(copy / "checkpoints", Retention(keep=3))
    with caplog.at_level(logging.WARNING):
        restored = checkpoints.restore(abstract(states[10]))
    checkpoints.close()
    assert restored.step == 5
    assert_same(restored.state, states[5])
    assert f"Skipped damaged checkpoint 10 (file {name} differs from its CRC)" in caplog.text
    assert (copy / "damaged" / "10.0" / name).exists()


def test_marking_is_optional_and_changes_nothing_else(saved, tmp_path):
    workdir, _ = saved
    copy = tmp_path / "work"
    shutil.copytree(workdir, copy)
    unmark(copy)
    path = copy / "checkpoints" / "10"
    verify_checkpoint(path)
    assert not is_verified(path)
    verdict = verify_checkpoint(path, mark=True)
    assert is_verified(path)
    assert set(json.loads((path / "verified.json").read_text())["files"]) == set(files_of(path)) - {
        "verified.json"
    }
    assert verdict.num_arrays == 11
    assert verdict.num_bytes > 3 * 4 * 8 * 4096


def test_audit(saved, tmp_path):
    workdir, _ = saved
    copy = tmp_path / "work"
    shutil.copytree(workdir, copy)
    flip(copy / "checkpoints" / "5" / "record" / "data.json")
    verdicts = audit(copy / "checkpoints", [5, 10])
    lines = audit_report(verdicts)
    assert lines[0] == "step  5  DAMAGED   file record/data.json differs from its CRC"
    assert lines[1].startswith("step 10  intact    11 arrays, 0.4 MB")
    assert lines[2] == ("1 of 2 checkpoints are intact; the newest intact one is step 10")
    assert [v.step for v in audit(copy / "checkpoints", [10])] == [10]


def test_steps_to_audit(saved, tmp_path):
    work = open_workdir(saved[0])
    assert named_steps(work, None, None) == [5, 10]
    assert named_steps(work, 5, None) == [5]
    with pytest.raises(UserError, match="no checkpoint of step 7; saved steps: 5, 10"):
        named_steps(work, 7, None)
    with pytest.raises(UserError, match="holds no checkpoint"):
        named_steps(open_workdir(tmp_path / "nothing"), None, None)


@pytest.mark.parametrize("damage", [flip, truncate, lambda path: path.unlink()])
def test_what_could_not_be_restored_is_not_marked(tmp_path, damage):
    """Arrays are read back without Orbax's list of them, but never restored without."""
    states = write(tmp_path, [5, 10])
    unmark(tmp_path)
    checkpoint = tmp_path / "checkpoints" / "10"
    listing = checkpoint / "params" / "_METADATA"
    if damage is flip:  # a name: still JSON
        listing.write_text(listing.read_text().replace("encoder", "encodes"))
    else:
        damage(listing)
    verdict = verify_checkpoint(checkpoint, mark=True)
    assert "the list of its arrays" in verdict.fault
    assert not is_verified(checkpoint)
    checkpoints = Checkpoints(tmp_path / "checkpoints", Retention(keep=3))
    assert checkpoints.restore(abstract(states[5])).step == 5
    checkpoints.close()


@pytest.mark.parametrize(
    ("said", "instead"),
    [
        ('"use_zarr3": true', '"use_zarr3": false'),
        ('"use_ocdbt"', '"use_ocdbu"'),
        ('"key_type": 2', '"key_type": 3'),
        ('"jax.Array"', '"jax.Brray"'),
        ('"skip_deserialize": false', '"skip_deserialize": true'),
    ],
)
def test_what_the_list_of_arrays_says_of_them_is_read(tmp_path, said, instead):
    """Restoring refuses it, or takes something else for the arrays."""
    write(tmp_path, [5])
    unmark(tmp_path)
    listing = tmp_path / "checkpoints" / "5" / "params" / "_METADATA"
    assert said in listing.read_text()
    listing.write_text(listing.read_text().replace(said, instead, 1))
    assert "the list of its arrays" in verify_checkpoint(tmp_path / "checkpoints" / "5").fault


def test_nothing_is_stored_that_verification_does_not_read(saved):
    """Such a file spoils a restore when it is damaged, for the sake of random keys."""
    workdir, _ = saved
    assert [n for n in files_of(workdir / "checkpoints" / "10") if "array_metadatas" in n] == []
