"""The files of GLUE with their quirks, and the files that its leaderboard takes."""

import contextlib
import functools
import http.server
import json
import re
import subprocess
import sys
import tarfile
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest

from bert_jax.cli import main as cli
from bert_jax.errors import UserError
from bert_jax.tasks.examples import LabelSet
from bert_jax.tasks.glue import TASKS, glue_task, submission_file
from bert_jax.tasks.text.sources import read_glue, read_glue_tfds


def put(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return path


# Hand-made files, each with the quirk of its task


def test_cola_has_no_header_but_in_test(tmp_path):
    put(tmp_path / "CoLA/train.tsv", 'gj04\t1\t\t"Yes.\ngj04\t0\t*\tNo the.\n')
    put(tmp_path / "CoLA/test.tsv", "index\tsentence\n0\tMaybe.\n")
    train = read_glue(tmp_path, "cola", "train")
    assert [(e.text, e.label, e.origin.line) for e in train.examples] == [
        ('"Yes.', 1, 1),
        ("No the.", 0, 2),
    ]
    assert train.labels == LabelSet(("unacceptable", "acceptable"))
    (test,) = read_glue(tmp_path / "CoLA", "cola", "test").examples
    assert (test.id, test.text, test.label) == ("0", "Maybe.", None)


def test_labels_that_files_write_as_digits(tmp_path):
    put(tmp_path / "SST-2/dev.tsv", "sentence\tlabel\nfine . \t1\n")
    (example,) = read_glue(tmp_path, "sst2", "dev").examples
    assert example.text == "fine . "  # as it was written
    assert example.label == 1
    put(tmp_path / "SST-2/dev.tsv", "sentence\tlabel\nfine\tpositive\n")
    with pytest.raises(UserError, match=r"dev\.tsv, line 2: .*'positive' is not known; .*'0', '1'"):
        read_glue(tmp_path, "sst2", "dev")


def test_stsb_keeps_fractions(tmp_path):
    header = "index\tgenre\tsentence1\tsentence2\tscore\n"
    put(tmp_path / "STS-B/dev.tsv", header + '0\tx\ta "\tb\t2.600\n1\tx\tc\td\t5\n')
    data = read_glue(tmp_path, "stsb", "dev")
    assert [e.label for e in data.examples] == [2.6, 5.0]
    assert data.labels is None
    put(tmp_path / "STS-B/dev.tsv", header + "0\tx\ta\tb\t5.2\n")
    with pytest.raises(UserError, match=r"line 2: .*'5\.2', not a number between 0 and 5"):
        read_glue(tmp_path, "stsb", "dev")


def test_qqp_skips_broken_rows_of_train_but_not_of_test(tmp_path):
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    rows = "1\t2\t3\tA?\tB?\t1\n4\t5\t6\tC\nD?\tE?\t0\n7\t8\t9\tF?\t\t0\n"
    path = put(tmp_path / "QQP/train.tsv", header + rows)
    data = read_glue(tmp_path, "qqp", "train")
    assert [(e.text, e.text_pair, e.label) for e in data.examples] == [
        ("A?", "B?", 1),
        ("F?", "", 0),
    ]
    assert data.warnings == (
        f"{path}: 2 rows skipped for having more or fewer fields than the first (lines 3, 4)",
        f"{path}: 1 rows with an empty text kept (line 5)",
    )
    put(tmp_path / "QQP/test.tsv", "id\tquestion1\tquestion2\n0\tA\n")
    with pytest.raises(UserError, match=r"test\.tsv, line 2: 2 fields where the header has 3"):
        read_glue(tmp_path, "qqp", "test")


MRPC = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
PAIRS = ['1\t11\t12\t" a "\tb', "0\t21\t22\tc\td", "1\t31\t32\te\tf"]


def test_mrpc_with_and_without_the_split_of_glue(tmp_path):
    home = tmp_path / "MRPC"
    put(home / "msr_paraphrase_train.txt", MRPC + "".join(f"{pair}\r\n" for pair in PAIRS))
    put(home / "msr_paraphrase_test.txt", MRPC + "0\t1\t2\tg\th\r\n")
    put(home / "dev_ids.tsv", "21\t22\n")
    train = read_glue(tmp_path, "mrpc", "train")
    assert [(e.id, e.text, e.text_pair, e.label) for e in train.examples] == [
        ("0", '" a "', "b", 1),
        ("1", "e", "f", 1),
    ]
    (dev,) = read_glue(tmp_path, "mrpc", "dev").examples
    assert (dev.id, dev.text, dev.label, dev.origin.line) == ("0", "c", 0, 3)
    (test,) = read_glue(tmp_path, "mrpc", "test").examples
    assert (test.id, test.text, test.label) == ("0", "g", None)
    put(home / "dev_ids.tsv", "21\t22\n8\t9\n")
    with pytest.raises(UserError, match=r"dev_ids.tsv: .*train.txt lacks 1 of the listed .*'8 9'"):
        read_glue(tmp_path, "mrpc", "dev")
    # Files that GLUE's script made go first.
    put(home / "dev.tsv", MRPC + "1\t41\t42\ti\tj\n")
    assert read_glue(tmp_path, "mrpc", "dev").examples[0].text == "i"
    put(home / "test.tsv", MRPC.replace("Quality", "index") + "0\t41\t42\tk\tl\n")
    assert read_glue(tmp_path, "mrpc", "test").examples[0].text == "k"


def test_mnli_matched_and_mismatched_are_two_files(tmp_path):
    header = "index\tsentence1\tsentence2\tgold_label\n"
    put(tmp_path / "MNLI/dev_matched.tsv", header + "0\ta\tb\tcontradiction\n")
    put(tmp_path / "MNLI/dev_mismatched.tsv", header + "0\tc\td\tneutral\n")
    (matched,) = read_glue(tmp_path, "mnli", "dev_matched").examples
    (mismatched,) = read_glue(tmp_path, "mnli", "dev_mismatched").examples
    assert (matched.text, matched.label, mismatched.text, mismatched.label) == ("a", 2, "c", 1)
    with pytest.raises(UserError, match="mnli has no split 'dev'; it has train, dev_matched, "):
        read_glue(tmp_path, "mnli", "dev")
    put(tmp_path / "MNLI/dev_matched.tsv", header + "0\ta\tb\t-\n")
    with pytest.raises(UserError, match="line 2: the label '-' is not known"):
        read_glue(tmp_path, "mnli", "dev_matched")


def test_what_is_not_there(tmp_path):
    with pytest.raises(UserError, match="'sst-2' is not a GLUE task; expected one of cola, sst2, "):
        glue_task("sst-2")
    with pytest.raises(UserError, match=r"there is no .*train\.tsv; .* holds nothing"):
        read_glue(tmp_path, "rte", "train")
    put(tmp_path / "RTE/dev.tsv", "x")
    with pytest.raises(UserError, match=r"RTE holds dev\.tsv\. Name the directory with train\.tsv"):
        read_glue(tmp_path, "rte", "train")


# The real files

COUNTS = {
    ("cola", "train"): {0: 2528, 1: 6023},
    ("cola", "dev"): {0: 322, 1: 721},
    ("cola", "test"): {None: 1063},
    ("sst2", "train"): {0: 29780, 1: 37569},
    ("sst2", "dev"): {0: 428, 1: 444},
    ("sst2", "test"): {None: 1821},
    ("mrpc", "train"): {0: 1194, 1: 2474},
    ("mrpc", "dev"): {0: 129, 1: 279},
    ("qqp", "dev"): {0: 617, 1: 383},
    ("mnli", "dev_matched"): {0: 3479, 1: 3123, 2: 3213},
    ("mnli", "dev_mismatched"): {0: 350, 1: 316, 2: 334},
    ("qnli", "dev"): {0: 2702, 1: 2761},
    ("qnli", "test"): {None: 5463},
    ("rte", "train"): {0: 1249, 1: 1241},
    ("rte", "dev"): {0: 146, 1: 131},
    ("rte", "test"): {None: 3000},
    ("wnli", "train"): {0: 323, 1: 312},
    ("wnli", "dev"): {0: 40, 1: 31},
    ("wnli", "test"): {None: 146},
    ("ax", "test"): {None: 1104},
}


COUNT = """
import collections, json, sys
from bert_jax.tasks.text.sources import read_glue

for name, split in json.loads(sys.argv[2]):
    data = read_glue(sys.argv[1], name, split)
    assert not data.warnings, data.warnings
    counts = collections.Counter(example.label for example in data.examples)
    print(json.dumps([name, split, list(counts.items())]))
"""


def test_real_files_whole(real_data):
    # In a process of its own: checking every call's types would take half a minute.
    files = [*COUNTS, ("mnli", "train"), ("qqp", "train"), ("qnli", "train")]
    child = subprocess.run(
        [sys.executable, "-c", COUNT, real_data / "glue", json.dumps(files)],
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    found = {(name, split): dict(counts) for name, split, counts in
             map(json.loads, child.stdout.splitlines())}  # fmt: skip
    assert {key: found[key] for key in COUNTS} == COUNTS
    rows = {key: sum(counts.values()) for key, counts in found.items() if key not in COUNTS}
    assert rows == {("mnli", "train"): 24739, ("qqp", "train"): 19831, ("qnli", "train"): 18869}


REAL = [("cola", "dev"), ("cola", "test"), ("mrpc", "dev"), ("stsb", "dev"), ("stsb", "test"),
        ("qqp", "dev"), ("mnli", "dev_mismatched"), ("rte", "dev"), ("wnli", "test"),
        ("ax", "test"), ("sst2", "dev")]  # fmt: skip


@pytest.mark.parametrize(("name", "split"), REAL)
def test_real_texts_are_as_written(real_data, name, split):
    data = read_glue(real_data / "glue", name, split)
    task = TASKS[name]
    with open(data.examples[0].origin.path, encoding="utf-8-sig", newline="\n") as file:
        lines = file.read().split("\n")
    for example in data.examples:
        fields = lines[example.origin.line - 1].split("\t")
        assert example.text in fields
        assert example.text_pair in (fields if task.text_pair else [None])
    if split in task.submissions:
        rows = task.submissions[split][1]
        assert sorted(int(e.id) for e in data.examples) == list(range(rows))


def test_real_scores(real_data):
    data = read_glue(real_data / "glue", "stsb", "dev")
    labels = [e.label for e in data.examples]
    assert len(labels) == 1500
    assert labels[1] == 4.75
    assert (min(labels), max(labels)) == (0.0, 5.0)


# Submissions


@pytest.mark.parametrize(
    ("name", "split", "predict", "expected"),
    [
        ("cola", "test", [1, 0, 1], ["1", "0", "1"]),
        ("mrpc", "test", [0, 1, 1], ["0", "1", "1"]),
        ("wnli", "test", [0, 1, 1], ["0", "1", "1"]),
        ("qnli", "test", [0, 1, 0], ["entailment", "not_entailment", "entailment"]),
        ("rte", "test", [1, 1, 0], ["not_entailment", "not_entailment", "entailment"]),
        ("mnli", "test_matched", [0, 1, 2], ["entailment", "neutral", "contradiction"]),
        ("mnli", "test_mismatched", [2, 1, 0], ["contradiction", "neutral", "entailment"]),
        ("ax", "test", [2, 1, 0], ["contradiction", "neutral", "entailment"]),
        ("stsb", "test", [2.6, 5.2, 1.23456], ["2.600", "5.000", "1.235"]),
        ("stsb", "test", [-0.1, 0, 4.9996], ["0.000", "0.000", "5.000"]),
    ],
)
@pytest.mark.parametrize("kind", ["list", "array"])
def test_submission(name, split, predict, expected, kind):
    file, rows = TASKS[name].submissions[split]
    predictions = predict + [predict[0]] * (rows - 3)
    ids = [f"{n}" for n in range(rows)]
    backwards = np.array(predictions)[::-1] if kind == "array" else predictions[::-1]
    found, content = submission_file(name, split, ids[::-1], backwards)
    assert found == file
    lines = content.split("\n")
    assert lines[:4] == ["index\tprediction", *(f"{n}\t{e}" for n, e in enumerate(expected))]
    assert lines[-1] == ""
    assert len(lines) == rows + 2


def test_names_and_sizes_of_the_leaderboard():
    found = {f: rows for task in TASKS.values() for f, rows in task.submissions.values()}
    assert found == {
        "CoLA.tsv": 1063, "SST-2.tsv": 1821, "MRPC.tsv": 1725, "STS-B.tsv": 1379, "QQP.tsv": 390965,
        "MNLI-m.tsv": 9796, "MNLI-mm.tsv": 9847, "QNLI.tsv": 5463, "RTE.tsv": 3000, "WNLI.tsv": 146,
        "AX.tsv": 1104,
    }  # fmt: skip


def test_submissions_that_are_refused():
    ids = [f"{n}" for n in range(146)]
    with pytest.raises(UserError, match="wnli has no submission for 'dev'; predict on test"):
        submission_file("wnli", "dev", ids, [0] * 146)
    with pytest.raises(UserError, match=r"WNLI\.tsv: 145 predictions for 146 .* expects 146"):
        submission_file("wnli", "test", ids, [0] * 145)
    with pytest.raises(UserError, match=r"expects 146, one for each row of test\.tsv"):
        submission_file("wnli", "test", ids[:-1], [0] * 145)
    with pytest.raises(UserError, match="no prediction for row 145"):
        submission_file("wnli", "test", [*ids[:-1], "0"], [0] * 146)


# TensorFlow Datasets


@pytest.fixture
def tfds(tmp_path, monkeypatch):
    pytest.importorskip("array_record")
    tfds = pytest.importorskip("tensorflow_datasets")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tmp_path / "tfds"))
    return tfds


@pytest.mark.filterwarnings("ignore")  # of tensorflow-datasets
@pytest.mark.parametrize("name", TASKS)
def test_tfds_has_the_same_labels_and_columns(tfds, name):
    from tensorflow_datasets.text import Glue

    task = TASKS[name]
    config, text, text_pair = task.tfds
    features = Glue(config=config).info.features
    assert set(features) == {text, "label", "idx"} | ({text_pair} if text_pair else set())
    if task.labels:
        assert tuple(features["label"].names) == task.labels


@pytest.mark.filterwarnings("ignore")
def test_tfds_from_a_zip_without_tensorflow(tfds, tmp_path, monkeypatch, capsys):
    """The library's own code for GLUE: a server, an archive, no TensorFlow to unpack it."""
    from tensorflow_datasets.text.glue import Glue

    (tmp_path / "www").mkdir()
    with zipfile.ZipFile(tmp_path / "RTE.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for split, label in (("train", "entailment"), ("dev", "not_entailment")):
            rows = f'index\tsentence1\tsentence2\tlabel\n0\ta "{split}\tb\t{label}\n'
            archive.writestr(f"RTE/{split}.tsv", rows)
        rows = "".join(f"{n}\tt{n}\tu\n" for n in range(3))
        archive.writestr("RTE/test.tsv", "index\tsentence1\tsentence2\n" + rows)
    with served(tmp_path / "www") as address:
        monkeypatch.setattr(Glue.builder_configs["rte"], "data_url", f"{address}/RTE.zip")
        with pytest.raises(UserError, match=r"not prepared.*Prepare it.* bert-jax tfds glue/rte"):
            read_glue_tfds("rte", "train")
        assert cli.main(["tfds", "glue/rte"]) == 2
        assert re.search("glue/rte could not be prepared: .*code: 404", capsys.readouterr().err)
        (tmp_path / "RTE.zip").rename(tmp_path / "www/RTE.zip")
        assert cli.main(["tfds", "glue/rte"]) == 0
    where = capsys.readouterr().out
    assert cli.main(["tfds", "glue/rte"]) == 0  # is there already: no server is asked
    assert capsys.readouterr().out == where
    (train,) = read_glue_tfds("rte", "train").examples
    assert (train.text, train.text_pair, train.label) == ('a "train', "b", 0)
    data = read_glue_tfds("rte", "dev")
    assert [e.label for e in data.examples] == [1]
    assert data.labels == LabelSet(("entailment", "not_entailment"))
    test = read_glue_tfds("rte", "test").examples
    assert {(e.id, e.text, e.label) for e in test} == {(f"{n}", f"t{n}", None) for n in range(3)}
    assert "tensorflow" not in sys.modules


@pytest.mark.filterwarnings("ignore")
def test_tfds_from_a_tar(tfds, tmp_path):
    """Unpacked here; read from inside the archive by TensorFlow only, which is said."""
    from bert_jax.files.tfds import open_tfds, prepare_tfds

    (tmp_path / "www").mkdir()
    with tarfile.open(tmp_path / "www/a.tar.gz", "w:gz") as archive:
        (tmp_path / "a.txt").write_text("one\ntwo\n")
        archive.add(tmp_path / "a.txt", "in/a.txt")

    class BertJaxTar(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, download):
            path = download.download(f"{address}/a.tar.gz")
            if inside:
                text = next(iter(download.iter_archive(path)))[1].read().decode()
            else:
                text = (download.extract(path) / "in/a.txt").read_text()
            return {"train": enumerate({"text": line} for line in text.split())}

        def _generate_examples(self):
            raise NotImplementedError

    with served(tmp_path / "www") as address:
        inside = True
        with pytest.raises(UserError, match=r"needs TensorFlow.*tfds build bert_jax_tar"):
            prepare_tfds("bert_jax_tar")
        inside = False
        prepare_tfds("bert_jax_tar")
    split = open_tfds("a", "bert_jax_tar", "train")
    assert {each["text"] for each in split.examples} == {b"one", b"two"}


def test_tfds_scores_of_the_test_set_are_no_scores(monkeypatch):
    from bert_jax.files.tfds import PreparedSplit
    from bert_jax.tasks import tables as table_files

    example = {"sentence1": b"a", "sentence2": b"b", "label": np.float32(-1), "idx": np.int32(7)}
    split = PreparedSplit(dict.fromkeys(example), [example], "1.0.0")
    monkeypatch.setattr(table_files, "open_tfds", lambda *_: split)
    (read,) = read_glue_tfds("stsb", "test").examples
    assert (read.id, read.text, read.text_pair, read.label) == ("7", "a", "b", None)
    assert read.origin.path == "tfds:glue/stsb:test"
    example["label"] = np.float32(2.5)
    (read,) = read_glue_tfds("stsb", "dev").examples
    assert (read.id, read.label) == ("0", 2.5)
    assert read.origin.path == "tfds:glue/stsb:validation"


@pytest.mark.filterwarnings("ignore")
def test_tfds_with_a_name_that_is_not_there(tfds):
    from bert_jax.files.tfds import prepare_tfds

    with pytest.raises(UserError, match="nonesuch"):
        prepare_tfds("nonesuch")
    with pytest.raises(UserError, match="glue/colla: "):
        prepare_tfds("glue/colla")


@contextlib.contextmanager
def served(directory):
    """Serves the files of a directory; gives the address."""
    handler = functools.partial(QuietHandler, directory=str(directory))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass
