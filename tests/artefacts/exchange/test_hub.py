"""Fetching from a Hub on this machine: what is asked of it, and what is said where it fails."""

import json
import os
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hub_server import MAIN, OTHER, Hub, running

from bert_jax.artefacts.exchange.hub import FILES, _has_safetensors, fetch, is_hub_name
from bert_jax.artefacts.formats.huggingface_files import WEIGHTS
from bert_jax.artefacts.formats.sentence_transformers import QUERIES, sentence_files
from bert_jax.errors import UserError
from bert_jax.model.embedding import EmbeddingConfig

SOUND = {
    "config.json": b'{"model_type": "bert"}',
    "adapter_config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "vocab.txt": b"[PAD]\n",
    "merges.txt": b"a b\n",
    "spiece.model": b"pieces",
    "1_Pooling/config.json": b"{}",
    "2_Dense/config.json": b"{}",
    "2_Dense/model.safetensors": b"map",
    "generation_config.json": b"{}",
    "sentence_xlm-roberta_config.json": b"{}",
    "router_config.json": b"{}",
    "query_0_SparseStaticEmbedding/model.safetensors": b"idf",
    "document_1_SpladePooling/config.json": b"{}",
}
HARMFUL = {
    "pytorch_model.bin": b"pickle",
    "training_args.bin": b"pickle",
    "optimizer.pt": b"pickle",
    "modeling_own.py": b"import os",
    "sub/config.json": b"{}",
    "onnx/model.safetensors": b"x",
    "2_Dense/pytorch_model.bin": b"pickle",
    "query_0_SparseStaticEmbedding/pytorch_model.bin": b"pickle",
    "query_0_SparseStaticEmbedding/old/model.safetensors": b"idf",
    "3_Dense/old/config.json": b"{}",
    "sub/tool.model": b"x",
    "tf_model.h5": b"x",
    "model.fp16.safetensors": b"x",
    "README.md": b"#",
    "results.json": b"{}",
}
SHARDS = {
    "config.json": b"{}",
    "model.safetensors.index.json": b"{}",
    "model-00001-of-00002.safetensors": b"1",
    "model-00002-of-00002.safetensors": b"2",
}
FLAX = {"config.json": b"{}", "flax_model.msgpack": b"flax"}
MODELS = {
    "me/sound": {MAIN: SOUND | HARMFUL, OTHER: SOUND | {"vocab.txt": b"other\n"}},
    "me/shards": {MAIN: SHARDS},
    "me/pickled": {MAIN: {**HARMFUL, "config.json": b"{}"}, OTHER: SOUND},
    "me/flax": {MAIN: FLAX | HARMFUL, OTHER: FLAX | SOUND},
    "me/empty": {MAIN: {"README.md": b"#"}},
}
REFUSALS = {"me/gated": (403, "GatedRepo"), "me/broken": (503, "")}

FETCH = """
import json, sys
from pathlib import Path
from bert_jax.errors import UserError
from bert_jax.artefacts.exchange.hub import fetch
said = []
for name in sys.argv[2:]:
    try:
        found = fetch(name, Path(sys.argv[1]))
        files = [path for path in found.rglob("*") if path.is_file()]
        said.append({str(path.relative_to(found)): path.read_text() for path in files})
    except UserError as error:
        said.append(str(error))
print(json.dumps(said))
"""


def fetched(cache: Path, endpoint: str, *names: str, **variables: str) -> list[Any]:
    """What `fetch` gives, in a process that reads the environment anew."""
    kept = {
        k: v for k, v in os.environ.items() if not k.lower().startswith(("hf_", "http", "all_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", FETCH, cache, *names],
        capture_output=True,
        text=True,
        timeout=120,
        env={**kept, "HF_ENDPOINT": endpoint, "HF_HOME": f"{cache}-home", "JAX_PLATFORMS": "cpu",
             "HF_HUB_DISABLE_XET": "1", **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_fetching(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    names = ["me/sound", "me/sound@refs/pr/1", f"me/sound@{OTHER}", "me/shards", "me/pickled",
             "me/pickled@refs/pr/1", "me/flax", "me/flax@refs/pr/1", "me/empty", "me/none",
             "me/sound@v9", "me/gated", "me/broken", "me/a--b"]  # fmt: skip
    with running(Hub(MODELS, REFUSALS)) as hub:
        said = dict(zip(names, fetched(tmp_path, hub.address, *names), strict=True))
    sound = {path: data.decode() for path, data in SOUND.items()}
    assert said["me/sound"] == sound
    other = {**sound, "vocab.txt": "other\n"}
    assert said["me/sound@refs/pr/1"] == said[f"me/sound@{OTHER}"] == other
    assert said["me/shards"] == {path: data.decode() for path, data in SHARDS.items()}
    assert said["me/pickled@refs/pr/1"] == said["me/flax@refs/pr/1"] == sound
    assert said["me/flax"] == {path: data.decode() for path, data in FLAX.items()}

    asked = {r.split("/", 5)[5] for r in hub.requests if "/resolve/" in r}
    assert asked == SOUND.keys() | SHARDS.keys() | FLAX.keys()

    assert "only the weights pytorch_model.bin, which are not fetched" in said["me/pickled"]
    assert "me/pickled@refs/pr/N" in said["me/pickled"]
    assert "me/empty has neither model.safetensors nor flax_model.msgpack" in said["me/empty"]
    assert "nor a model on the Hub is named me/none, or the model is private" in said["me/none"]
    assert "no such branch, tag or commit" in said["me/sound@v9"]
    assert f"grants access by request: ask for it at {hub.address}/me/gated" in said["me/gated"]
    assert "cannot be reached" in said["me/broken"]
    assert "HFValidationError" in said["me/a--b"]
    assert not [text for text in said.values() if isinstance(text, str) and "\n" in text]

    # The server is gone.
    found, missing = fetched(tmp_path, hub.address, "me/sound", "me/new")
    assert found == sound
    assert f"{hub.address} cannot be reached" in missing
    found, missing = fetched(tmp_path, hub.address, "me/sound", "me/new", HF_HUB_OFFLINE="1")
    assert found == sound
    assert "HF_HUB_OFFLINE is set" in missing


def test_what_an_export_writes_is_fetched() -> None:
    vectors = [EmbeddingConfig("splade", False), EmbeddingConfig("mean", True)]
    vectors += [EmbeddingConfig("splade", False, static_queries=True)]
    maps = {"0_tanh": {"kernel": np.zeros((4, 4), np.float32)}}
    written = {f"{QUERIES}/{WEIGHTS}", "generation_config.json"}
    for each in vectors:
        written |= sentence_files(each, 4, 8, {} if each.is_sparse else maps).keys()
    assert {"router_config.json", "2_Dense/model.safetensors", "modules.json"} <= written
    assert [name for name in written if not any(fnmatch(name, each) for each in FILES)] == []


def test_what_a_router_of_theirs_writes_is_fetched() -> None:
    """sentence-transformers puts the encoder of documents into a directory."""
    names = ("config.json", "model.safetensors", "tokenizer.json", "vocab.txt", "merges.txt")
    encoder = [f"document_0_MLMTransformer/{name}" for name in names]
    assert [name for name in encoder if not any(fnmatch(name, each) for each in FILES)] == []
    assert _has_safetensors("me/router", ["modules.json", *encoder])
    with pytest.raises(UserError, match="has neither"):
        _has_safetensors("me/other", ["other/model.safetensors"])


def test_names() -> None:
    for name in ("bert-base-uncased", "a/b", "a/b@main", "a/b.c_d@refs/pr/1", "a@v1.0"):
        assert is_hub_name(name)
    for name in ("", "a/b/c", "/a", "../a", "a/", "-a", "a@", "a b", "a/b@-x", "á", "a\n", "~/a"):
        assert not is_hub_name(name)
        with pytest.raises(UserError, match="not a model name; names on the Hub"):
            fetch(name)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"pip install 'bert_jax\[hub\]'"):
        fetch("a/b")
