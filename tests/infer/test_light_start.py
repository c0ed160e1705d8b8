"""A model in Hugging Face's format answers without what training needs."""

import json
import subprocess
import sys

import pytest
from asked_models import random_model

from bert_jax.artefacts.exchange.exported_files import write_huggingface

ASK = """
import json, sys
import bert_jax
assert "jax" not in sys.modules and "numpy" not in sys.modules
from bert_jax.cli.main import main

directories = json.loads(sys.argv[1])
texts = {"fill-mask": ["the cat [MASK] ."], "answer": ["cat", "--context", "the cat sat ."]}
for verb, directory in directories.items():
    assert main([verb, directory, *texts.get(verb, ["the cat sat ."])]) == 0, verb
json.dump(sorted(sys.modules), sys.stderr)
"""
VERBS = {
    "fill-mask": "pretrained",
    "embed": "pretrained",
    "classify": "class",
    "tag": "tags",
    "answer": "span",
}
HEAVY = {"orbax", "grain", "tensorstore", "tensorflow", "torch", "transformers", "matplotlib"}
OURS = ("bert_jax.training", "bert_jax.distributed.checkpoint", "bert_jax.objectives")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """The modules of a process that has asked every verb."""
    directories = {}
    for verb, kind in VERBS.items():
        directory = tmp_path_factory.mktemp(kind)
        write_huggingface(random_model(kind), directory)
        directories[verb] = f"{directory}"
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(directories)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stderr.splitlines()[-1])


def test_answers_import_no_checkpoints_and_no_input_pipeline(loaded):
    assert "bert_jax.infer.answer" in loaded  # the verbs have run
    assert not HEAVY & {name.partition(".")[0] for name in loaded}


def test_answers_import_no_room_of_training(loaded):
    """Optax comes with `flax.nnx`; nothing of ours that uses it does."""
    assert not [name for name in loaded if name.startswith(OURS)]
