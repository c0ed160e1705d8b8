"""Work directories in a bucket, against an emulator of Google Cloud Storage on this machine."""

import contextlib
import hashlib
import http.server
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import jax
import numpy as np
import pytest
from etils import epath
from etils.epath.backend import fsspec_backend
from gcs_emulator import make_bucket, running_emulator
from google.auth.exceptions import DefaultCredentialsError
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint._src.serialization.tensorstore_utils import build_kvstore_tspec

from bert_jax.distributed.checkpoint import storage
from bert_jax.errors import UserError
from bert_jax.files import remote, urls
from bert_jax.files.remote import WorkDir, open_workdir


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address."""
    with running_emulator(tmp_path_factory.mktemp("emulator") / "log") as address:
        yield address


@pytest.fixture
def bucket(emulator: str, request: pytest.FixtureRequest) -> str:
    """The name of an empty bucket."""
    name = f"bucket-{hashlib.sha256(request.node.name.encode()).hexdigest()[:12]}"
    make_bucket(name)
    return name


def files() -> Any:
    return fsspec.filesystem("gs", use_listings_cache=False)


def objects(url: str) -> dict[str, bytes]:
    found = files().find(url)
    return {name.removeprefix(url.removeprefix("gs://")): files().cat_file(name) for name in found}


def write_small_files(workdir: WorkDir) -> None:
    (workdir.local / "config.json").write_text("{}")
    (workdir.local / "metrics.jsonl").write_text('{"step": 1}\n')
    (workdir.local / "tokenizer").mkdir()
    (workdir.local / "tokenizer" / "vocab.txt").write_text("[PAD]\n")


def generation(url: str) -> str:
    return str(files().info(url)["generation"])


def test_a_local_work_directory_is_itself(tmp_path):
    workdir = open_workdir(tmp_path / "run")
    assert workdir.local == tmp_path / "run"
    assert str(workdir.checkpoints) == str(tmp_path / "run" / "checkpoints")
    assert str(workdir.damaged) == str(tmp_path / "run" / "damaged")
    workdir.sync(required=True)
    assert not workdir.local.exists()


def test_small_files_come_back_in_another_mirror(bucket):
    first = open_workdir(f"gs://{bucket}/runs/one")
    assert list(first.local.iterdir()) == []
    write_small_files(first)
    (first.local / "config.json.tmp-77").write_text("cut o")
    (first.local / "goodput.json.tmp").write_text("cut o")
    first.sync(required=True)
    files().pipe_file(f"gs://{bucket}/runs/one/checkpoints/5/large", b"weights")
    files().pipe_file(f"gs://{bucket}/runs/one/damaged/4.0/large", b"weights")
    files().pipe_file(f"gs://{bucket}/runs/one/resume/3/large", b"weights")
    files().pipe_file(f"gs://{bucket}/runs/one/lease-1.json", b"{}")
    files().pipe_file(f"gs://{bucket}/runs/one-more/config.json", b"of another run")

    second = open_workdir(f"gs://{bucket}/runs/one/")
    assert second.local != first.local
    assert second.name == first.name == f"gs://{bucket}/runs/one"
    there = {p.relative_to(second.local).as_posix() for p in second.local.rglob("*") if p.is_file()}
    assert there == {"config.json", "metrics.jsonl", "tokenizer/vocab.txt"}
    assert (second.local / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert str(second.checkpoints) == f"gs://{bucket}/runs/one/checkpoints"
    assert first.mirror.renewals == []
    assert second.mirror.renewals == [pytest.approx(time.time(), abs=60)]


def test_a_path_that_lost_a_slash(bucket):
    files().pipe_file(f"gs://{bucket}/run/config.json", b"{}")
    workdir = open_workdir(Path(f"gs://{bucket}/run"))
    assert (workdir.local / "config.json").exists()
    assert workdir.name == f"gs://{bucket}/run"


def test_only_what_changed_is_uploaded(bucket):
    url = f"gs://{bucket}/run"
    workdir = open_workdir(url)
    write_small_files(workdir)
    workdir.sync()
    before = {name: generation(f"{url}/{name}") for name in ("config.json", "metrics.jsonl")}
    with (workdir.local / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 2}\n')
    workdir.sync()
    assert generation(f"{url}/config.json") == before["config.json"]
    assert generation(f"{url}/metrics.jsonl") != before["metrics.jsonl"]
    assert objects(url)["/metrics.jsonl"] == b'{"step": 1}\n{"step": 2}\n'

    again = open_workdir(url)  # what was downloaded is not uploaded
    before = {name: generation(f"{url}/{name}") for name in ("config.json", "metrics.jsonl")}
    again.sync()
    assert {name: generation(f"{url}/{name}") for name in before} == before


def test_what_is_appended_during_an_upload_comes_with_the_next(bucket, monkeypatch):
    workdir = open_workdir(f"gs://{bucket}/run")
    metrics, mirror = workdir.local / "metrics.jsonl", workdir.mirror.files
    metrics.write_text('{"step": 1}\n')
    upload = mirror.pipe_file

    def slow(path, content):
        upload(path, content)
        with metrics.open("a") as file:
            file.write('{"step": 2}\n')

    with monkeypatch.context() as patch:
        patch.setattr(mirror, "pipe_file", slow)
        workdir.sync(required=True)
    assert objects(workdir.name)["/metrics.jsonl"] == b'{"step": 1}\n'
    workdir.sync(required=True)
    assert objects(workdir.name)["/metrics.jsonl"] == b'{"step": 1}\n{"step": 2}\n'


def test_other_processes_do_not_upload(bucket, monkeypatch):
    workdir = open_workdir(f"gs://{bucket}/run")
    write_small_files(workdir)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    workdir.sync()
    assert objects(f"gs://{bucket}/run") == {}


def test_a_failed_upload_is_tried_again(bucket, caplog):
    url = f"gs://{bucket}/run"
    workdir = open_workdir(url)
    files().rmdir(bucket)
    write_small_files(workdir)
    with caplog.at_level(logging.ERROR, "bert_jax"):
        workdir.sync()
    assert "there is no bucket" in caplog.text
    with pytest.raises(UserError, match="there is no bucket"):
        workdir.sync(required=True)

    make_bucket(bucket)
    workdir.sync()
    assert set(objects(url)) == {"/config.json", "/metrics.jsonl", "/tokenizer/vocab.txt"}


@pytest.mark.parametrize("fails", [True, False])
def test_the_mirror_stays_when_it_could_not_be_uploaded(emulator, fails):
    bucket = f"leaves-{fails}".lower()
    make_bucket(bucket)
    program = f"""
from bert_jax.files.remote import open_workdir
import fsspec
workdir = open_workdir("gs://{bucket}/run")
(workdir.local / "config.json").write_text("{{}}")
if {fails}:
    fsspec.filesystem("gs").rmdir("{bucket}")
workdir.sync()
print(workdir.local)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    mirror = Path(done.stdout.strip())
    assert mirror.exists() == fails
    assert (f"could not be uploaded to gs://{bucket}/run are in {mirror}" in done.stderr) == fails


def test_a_missing_bucket(emulator):
    with pytest.raises(UserError, match=r"no bucket nowhere-at-all.*gcloud storage buckets create"):
        open_workdir("gs://nowhere-at-all/run")


@contextlib.contextmanager
def server_that_answers(status: int, values: dict[str, Any]) -> Iterator[str]:
    """A server that says the same to all requests; its address."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(values).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("localhost", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://localhost:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (401, "Anonymous caller does not have storage.objects.list access"),
        (403, "me@example.org does not have storage.objects.list access"),
    ],
)
def test_no_rights(emulator, monkeypatch, status, message):
    answer = {"error": {"code": status, "message": message}}
    with server_that_answers(status, answer) as address:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        with pytest.raises(UserError, match="gcloud auth application-default login") as refused:
            open_workdir("gs://somewhere/run")
        for name in ("one.txt", "*.txt"):
            with pytest.raises(UserError, match=r"cannot read .*no credentials"):
                urls.match_urls(f"gs://somewhere/{name}")
    assert "cannot open gs://somewhere/run" in str(refused.value)


def test_out_of_reach(emulator, monkeypatch):
    """No error of the user's: a launcher starts such a run again."""
    with server_that_answers(400, {"error": {"code": 400, "message": "out of order"}}) as address:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        with pytest.raises(ConnectionError, match=r"cannot open gs://.*/run: .*out of order"):
            open_workdir("gs://somewhere/run")


def test_no_credentials(emulator, monkeypatch):
    async def call(*_: object, **__: object) -> None:
        raise DefaultCredentialsError("not found")

    monkeypatch.setattr("gcsfs.GCSFileSystem._call", call)
    with pytest.raises(UserError, match="gcloud auth application-default login"):
        open_workdir("gs://somewhere/run")


def test_without_gcsfs(monkeypatch):
    monkeypatch.setattr(urls.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'bert_jax\[gcs\]'"):
        open_workdir("gs://bucket/run")


@pytest.mark.parametrize("path", ["hf://bucket/run", Path("file:///tmp/run")])
def test_other_schemes(path):
    with pytest.raises(UserError, match=r"is not supported\. Give a local directory or gs://"):
        open_workdir(path)


def test_s3_is_refused_because_of_orbax():
    with pytest.raises(UserError, match=r"Orbax, which .* no s3://\. Give a local .*`aws s3 sync`"):
        open_workdir("s3://bucket/run")
    with pytest.raises(ValueError, match="should be absolute"):  # else the refusal may go
        build_kvstore_tspec("s3://bucket/run")


@pytest.mark.parametrize("path", ["gs://bucket", "gs://bucket/", "gs://"])
def test_no_directory(path):
    with pytest.raises(UserError, match="names no directory"):
        open_workdir(path)


def test_object_names_cannot_leave_the_mirror(emulator, monkeypatch):
    name = "run/../../escaped"
    found = {"name": name, "bucket": "bucket", "size": "1", "updated": "2026-11-21T00:00:00Z"}
    listing = {"kind": "storage#objects", "items": [found]}
    with server_that_answers(200, listing) as address:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        with pytest.raises(UserError, match=r"an object with the name '\.\./\.\./escaped'"):
            open_workdir("gs://bucket/run")


def test_a_large_object_is_not_downloaded(bucket, monkeypatch):
    monkeypatch.setattr(remote, "_LARGEST", 10)
    files().pipe_file(f"gs://{bucket}/run/weights.npy", b"x" * 11)
    with pytest.raises(UserError, match=r"run/weights.npy has 11 bytes"):
        open_workdir(f"gs://{bucket}/run")


def sharded_arrays() -> dict[str, dict[str, Any]]:
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())
    table = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    return {
        "params": {
            "embed": {"table": jax.device_put(table, rows)},
            "bias": jax.device_put(np.arange(7, dtype=np.float32), whole),
        },
        "rest": {"step": jax.device_put(np.int32(5), whole)},
    }


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def record_of(checkpoint):
    return storage.read_object(checkpoint / storage.RECORD / "data.json")


def test_checkpoints_in_a_bucket(bucket):
    place = open_workdir(f"gs://{bucket}/run").checkpoints
    assert storage.saved_steps(place) == []
    arrays = sharded_arrays()
    for step in (5, 10, 15):
        storage.write_async(place / str(step), arrays, {"step": step}).result()
    assert storage.saved_steps(place) == [5, 10, 15]
    assert record_of(place / "10") == {"step": 10}

    loaded, fault = storage.read_arrays(place / "10", abstract(arrays))
    assert fault == ""
    jax.tree.map(np.testing.assert_array_equal, loaded, arrays)
    table = arrays["params"]["embed"]["table"]
    assert loaded["params"]["embed"]["table"].sharding == table.sharding
    blocks = list(storage.host_blocks(place / "10", "params", "embed/table"))
    np.testing.assert_array_equal(np.concatenate([block for block, _, _ in blocks]), table)

    (place / "15" / "commit_success.txt").unlink()  # as a save that was killed leaves it
    assert storage.saved_steps(place) == [5, 10]
    storage.remove_unfinished(place)
    assert {p.name for p in place.iterdir()} == {"5", "10"}
    storage.write_async(place / "15", arrays, {"step": 15}).result()
    assert storage.saved_steps(place) == [5, 10, 15]

    storage.delete(place / "5")
    assert storage.saved_steps(place) == [10, 15]
    assert {p.name for p in place.iterdir()} == {"10", "15"}
    aside = storage.set_aside(place / "15", place.parent / "damaged")
    assert storage.saved_steps(place) == [10]
    assert record_of(aside) == {"step": 15}


def test_a_record_is_as_it_was_when_the_save_began(bucket):
    place = open_workdir(f"gs://{bucket}/run").checkpoints
    record = {"sums": {"loss": 1.0}}
    pending = storage.write_async(place / "5", sharded_arrays(), record)
    record["sums"]["loss"] = 2.0  # the loop goes on
    pending.result()
    assert record_of(place / "5") == {"sums": {"loss": 1.0}}


def test_listings_see_what_others_write(bucket, monkeypatch):
    # epath keeps the first file system that it makes, so a process begins with checkpoints here.
    fsspec_backend._get_filesystem.cache_clear()
    monkeypatch.setattr(fsspec.config, "conf", {})
    place = epath.Path(f"gs://{bucket}/run/checkpoints")
    assert storage.saved_steps(place) == []
    (place / "5" / "commit_success.txt").write_text("done")
    assert storage.saved_steps(place) == [5]
    program = f"""
import tensorstore
store = tensorstore.KvStore.open("gs://{bucket}/run/checkpoints/6/").result()
store.write(b"commit_success.txt", b"done").result()
"""
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert storage.saved_steps(place) == [5, 6]
