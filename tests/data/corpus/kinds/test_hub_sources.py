"""Data sets of a Hub on this machine, read where they lie."""

import io
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import MAIN, OTHER, Hub, running

from bert_jax.data.corpus import sources as hub_module
from bert_jax.data.corpus.sources import match_hub
from bert_jax.errors import UserError


def parquet(*texts: str) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"text": list(texts), "lang": ["de"] * len(texts)}), file)
    return file.getvalue()


def jsonl(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


FILES = {
    "README.md": b"#",
    "de/train-00000.parquet": parquet("eins", "zwei"),
    "de/train-00001.parquet": parquet("drei"),
    "de/validation.jsonl": jsonl("vier"),
    "en/train.jsonl": jsonl("one", "two"),
}
PLAIN = {"part-1.jsonl": jsonl("a"), "part-2.jsonl": jsonl("b"), "x.py": b""}
SETS = {
    "me/sets": {MAIN: FILES, OTHER: PLAIN},
    "me/plain": {MAIN: PLAIN},
    "me/none": {MAIN: {"x.csv": b""}},
}
CONFIGS = [
    {"config_name": "deutsch", "default": True, "data_files": [
        {"split": "train", "path": "de/train-*"}, {"split": "test", "path": ["de/validation*"]}]},
    {"config_name": "english", "data_files": "en/*.jsonl"},
    {"config_name": "gone", "data_files": "fr/*.jsonl"},
]  # fmt: skip
READ = """
import json, sys
from bert_jax.data.corpus.documents import ReadOptions
from bert_jax.data.corpus.sources import resolve_sources
from bert_jax.errors import UserError
said = []
for spec in sys.argv[1:]:
    try:
        found = resolve_sources([spec], ReadOptions(keep=("lang",)))
        said.append([[source.name, [[d.text, d.fields] for d in source.documents()]]
                     for source in found])
    except UserError as error:
        said.append(str(error))
print(json.dumps(said))
"""


def read(address: str, home: Any, *specs: str) -> list[Any]:
    """What sources give, in a process that reads the environment anew."""
    kept = {
        k: v for k, v in os.environ.items() if not k.lower().startswith(("hf_", "http", "all_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", READ, *specs], capture_output=True, text=True, timeout=120,
        env={**kept, "HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_files_are_read_in_place(tmp_path):
    with running(Hub(SETS, {"me/gated": (403, "GatedRepo")})) as hub:
        found = read(
            hub.address, tmp_path, "hf:me/sets:de", "hf:me/sets:de:validation", "hf:me/sets@"
            "refs/pr/1", "hf:me/none", "hf:me/nothing", "hf:me/gated", "hf:me/sets:fr",
            "hf:me/sets:de:test", "hf:sets",
        )  # fmt: skip
    root = f"hf://datasets/me/sets@{MAIN}"
    assert found[0] == [
        [f"{root}/de/train-00000.parquet", [["eins", {"lang": "de"}], ["zwei", {"lang": "de"}]]],
        [f"{root}/de/train-00001.parquet", [["drei", {"lang": "de"}]]],
    ]
    assert found[1] == [[f"{root}/de/validation.jsonl", [["vier", {}]]]]
    assert [texts for _, texts in found[2]] == [[["a", {}]], [["b", {}]]]
    for said, message in zip(
        found[3:],
        ["no file in a supported format", "the Hub has no data set me/nothing", "ask for it at",
         "no configuration 'fr'; there are de, en", "no split 'test'; there are train, validation",
         "write hf:OWNER/NAME"],
        strict=True,
    ):  # fmt: skip
        assert message in said
    assert not list(tmp_path.rglob("*.parquet"))


def test_files_are_listed_with_one_request_for_each_directory(tmp_path):
    numbers = range(30)
    files = {f"{folder}/train-{n}.jsonl": jsonl(f"{n}") for folder in "ab" for n in numbers}
    with running(Hub({"me/many": {MAIN: files}}, {})) as hub:
        (found,) = read(hub.address, tmp_path, "hf:me/many")
    assert len(found) == 60
    assert [each.partition("/tree/")[2][:42] for each in hub.requests if "/tree/" in each] == [
        f"{MAIN}/a", f"{MAIN}/b",
    ]  # fmt: skip
    assert len([each for each in hub.requests if "/resolve/" not in each]) < 8


def names(monkeypatch, spec: str, configs: list[dict] | None, present=FILES) -> list[str]:
    """Paths that a specification stands for, of a data set whose card has `configs`."""

    info = SimpleNamespace(
        sha=MAIN,
        siblings=[SimpleNamespace(rfilename=name) for name in present],
        card_data=SimpleNamespace(to_dict=lambda: {"configs": configs}),
    )
    monkeypatch.setattr(hub_module, "_info", lambda *_: info)
    return [url.partition(f"{MAIN}/")[2] for url in match_hub(spec)]


def test_the_card_names_files(monkeypatch):
    train = ["de/train-00000.parquet", "de/train-00001.parquet"]
    assert names(monkeypatch, "hf:me/sets", CONFIGS) == train
    assert names(monkeypatch, "hf:me/sets:deutsch:test", CONFIGS) == ["de/validation.jsonl"]
    assert names(monkeypatch, "hf:me/sets:english", CONFIGS) == ["en/train.jsonl"]
    assert names(monkeypatch, "hf:me/sets", None) == [*train, "en/train.jsonl"]
    for spec, message in (
        ("hf:me/sets:german", "no configuration 'german'; there are deutsch"),
        ("hf:me/sets:deutsch:dev", "no split 'dev'; there are test, train"),
        ("hf:me/sets:gone", r"the card names fr/\*\.jsonl, and none of these is a file"),
    ):
        with pytest.raises(UserError, match=message):
            names(monkeypatch, spec, CONFIGS)
    with pytest.raises(UserError, match="several configurations; name one of english, gone"):
        names(monkeypatch, "hf:me/sets", CONFIGS[1:])


def test_the_card_names_directories(monkeypatch):
    present = [f"{place}/{name}.jsonl" for place in ("v1", "v2") for name in ("train", "test")]
    configs = [
        {"config_name": "one", "data_dir": "v1"},
        {"config_name": "two", "data_dir": "./v2/", "default": True},
        {"config_name": "three", "data_dir": "v2", "data_files": "te*.jsonl"},
    ]
    for spec, wanted in (
        ("hf:me/d", "v2/train"), ("hf:me/d:one", "v1/train"), ("hf:me/d:one:test", "v1/test"),
        ("hf:me/d:three", "v2/test"),
    ):  # fmt: skip
        assert names(monkeypatch, spec, configs, present) == [f"{wanted}.jsonl"]
    with pytest.raises(UserError, match="no split 'dev'"):
        names(monkeypatch, "hf:me/d:one:dev", configs, present)


@pytest.mark.parametrize(
    ("path", "covered"),
    [
        ("*.jsonl", ["a.jsonl"]),
        ("sub/*", ["sub/c.jsonl", "sub/d.parquet"]),
        ("**/*.parquet", ["b.parquet", "sub/d.parquet", "sub/deep/e.parquet"]),
        ("sub/**/*.parquet", ["sub/d.parquet", "sub/deep/e.parquet"]),
        ("sub/**", ["sub/c.jsonl", "sub/d.parquet", "sub/deep/e.parquet"]),
    ],
)
def test_a_star_stays_in_its_directory_and_two_stand_for_any(monkeypatch, path, covered):
    present = ["a.jsonl", "b.parquet", "sub/c.jsonl", "sub/d.parquet", "sub/deep/e.parquet"]
    configs = [{"config_name": "default", "data_files": path}]
    assert names(monkeypatch, "hf:me/sets", configs, present) == covered
