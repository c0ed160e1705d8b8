"""Marks by which branches keep checkpoints, on disk and in a bucket."""

import pytest
from checkpoint_states import make_state, write
from etils import epath
from full_disk import files_of_at_most
from gcs_emulator import make_bucket, running_emulator

from bert_jax.distributed.checkpoint.manager import Checkpoints
from bert_jax.distributed.checkpoint.retention import (
    Retention,
    branches_of,
    keep_for_branch,
    kept_steps,
)
from bert_jax.distributed.checkpoint.storage import saved_steps
from bert_jax.distributed.checkpoint.verify import verify_checkpoint
from bert_jax.errors import UserError


def test_a_step_that_a_branch_began_from_stays_for_ever(tmp_path):
    directory = tmp_path / "checkpoints"
    write(tmp_path, [1, 2], keep=1)
    assert saved_steps(directory) == [2]
    going_on = Checkpoints(directory, Retention(keep=1))  # holds the directory when a branch comes
    keep_for_branch(directory, 2, "work/new")
    for step in (3, 4):
        going_on.save_last(step, make_state(step), read_back=True, config={}, extra={})
    going_on.close()
    assert saved_steps(directory) == [2, 4]
    write(tmp_path, [5], keep=1)  # a later start
    assert saved_steps(directory) == [2, 5]
    assert verify_checkpoint(directory / "2").intact


def test_several_branches_of_a_step(tmp_path):
    for step, name in ((7, "a"), (3, "b"), (7, "c"), (7, "a")):
        keep_for_branch(tmp_path, step, name)
    assert kept_steps(tmp_path) == {3, 7}
    found = branches_of(tmp_path)
    assert (list(found), found[3], sorted(found[7])) == ([3, 7], ["b"], ["a", "c"])
    for path in tmp_path.glob("3.*"):
        path.write_text("{")
    assert kept_steps(tmp_path) == {3, 7}
    assert branches_of(tmp_path)[3] == ["a branch whose mark cannot be read"]


def test_a_mark_that_cannot_be_written_is_none(tmp_path):
    with files_of_at_most(16), pytest.raises(UserError):
        keep_for_branch(tmp_path, 2, "work/new")
    assert list(tmp_path.iterdir()) == []


def test_in_a_bucket(tmp_path):
    with running_emulator(tmp_path / "log"):
        make_bucket("runs")
        directory = epath.Path("gs://runs/stable/checkpoints")
        assert kept_steps(directory) == set()
        keep_for_branch(directory, 2, "gs://runs/new")
        keep_for_branch(directory, 2, "gs://runs/new")
        assert branches_of(directory) == {2: ["gs://runs/new"]}
