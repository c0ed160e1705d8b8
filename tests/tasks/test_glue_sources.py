"""The files that a run on a GLUE task names as its sources, whether or not they are there."""

import pytest

from bert_jax.errors import UserError
from bert_jax.tasks.glue import GlueConfig, glue_sources


@pytest.mark.parametrize("nested", [True, False])
def test_sources_are_the_training_and_dev_files_that_are_there(tmp_path, nested):
    """In the task's directory or in the one that holds all tasks; a run reads no test file."""
    home = tmp_path / "MNLI" if nested else tmp_path
    home.mkdir(exist_ok=True)
    files = ["train.tsv", "dev_matched.tsv", "dev_mismatched.tsv", "test_matched.tsv"]
    for name in (*files, "notes.txt"):
        (home / name).touch()
    expected = [f"{home / name}" for name in files[:3]]
    assert glue_sources("mnli", f"{tmp_path}") == expected
    assert GlueConfig(name="mnli", data=f"{tmp_path}").sources == {
        f"task.data/{name}": path for name, path in zip(files, expected, strict=False)
    }
    (home / "dev_mismatched.tsv").unlink()
    assert glue_sources("mnli", f"{tmp_path}") == expected[:2]


def test_sources_of_mrpc_are_also_those_that_were_published_first(tmp_path):
    for name in ("msr_paraphrase_train.txt", "dev_ids.tsv", "msr_paraphrase_test.txt"):
        (tmp_path / name).touch()
    found = glue_sources("mrpc", f"{tmp_path}")
    assert found == [f"{tmp_path}/msr_paraphrase_train.txt", f"{tmp_path}/dev_ids.tsv"]


def test_files_that_are_not_there_are_named_as_they_should_be(tmp_path):
    assert glue_sources("cola", f"{tmp_path}") == [
        f"{tmp_path}/train.tsv", f"{tmp_path}/dev.tsv",
    ]  # fmt: skip
    (tmp_path / "CoLA").mkdir()
    assert glue_sources("cola", f"{tmp_path}")[0] == f"{tmp_path}/CoLA/train.tsv"


def test_a_prepared_data_set_has_the_name_of_its_configuration():
    assert glue_sources("stsb", "tfds") == ["tfds:glue/stsb"]
    assert GlueConfig(name="mnli", data="tfds").sources == {"task.data/mnli": "tfds:glue/mnli"}
    with pytest.raises(UserError, match="'sst' is not a GLUE task; expected one of cola, sst2"):
        glue_sources("sst", "tfds")
