"""The chain from an export to the text it came from, in directories that are moved and changed."""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from small_run import TOKENIZER, small_config

from bert_jax.artefacts.exchange import theirs
from bert_jax.artefacts.exchange.export import export
from bert_jax.artefacts.exchange.importing import import_model
from bert_jax.artefacts.saved.ancestors import (
    MAX_DEPTH,
    RECORD,
    Ancestor,
    known_ancestors,
    last_part,
    weights_entry,
)
from bert_jax.artefacts.saved.average import average
from bert_jax.artefacts.saved.reading import read_model
from bert_jax.artefacts.saved.runs import FinetunedState
from bert_jax.cli.inspection import lineage
from bert_jax.cli.inspection.lineage import (
    Checked,
    _compared,
    _missing,
    check_lineage,
    lineage_lines,
)
from bert_jax.cli.main import main
from bert_jax.config.mapping import build, to_dict
from bert_jax.data.corpus.build import build_corpus
from bert_jax.distributed.checkpoint.manager import Checkpoints
from bert_jax.distributed.checkpoint.retention import Retention
from bert_jax.errors import UserError
from bert_jax.files.untrusted.json_file import read_json_object
from bert_jax.model.task_heads import TaskHeadConfig, init_task_params
from bert_jax.objectives.task import TaskObjective
from bert_jax.tasks.opening import restore_task
from bert_jax.training.finetune.config import FinetuneConfig
from bert_jax.training.finetune.saves import prepare_finetune_workdir, saved_content
from bert_jax.training.pretrain.branch import open_branch
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import Corpus, open_corpus
from bert_jax.training.pretrain.saves import prepare_workdir
from bert_jax.training.pretrain.settings import objective_of
from bert_jax.training.start import Start
from bert_jax.training.sweep.statistics import Outcome, Trial
from bert_jax.training.workdir import EMPTY


class State(NamedTuple):
    """Parameters alone."""

    params: Any


def save(workdir: Path, state: Any, step: int, **content: Any) -> None:
    checkpoints = Checkpoints(workdir / "checkpoints", Retention(keep=9))
    checkpoints.save_last(step, state, read_back=True, **content)
    checkpoints.close()


def random_params(init: Any, seed: int) -> Any:
    random = np.random.default_rng(seed)
    shapes = jax.eval_shape(init, jax.random.key(0))
    return jax.tree.map(
        lambda leaf: jax.numpy.asarray(random.normal(0, 0.1, leaf.shape).astype(leaf.dtype)), shapes
    )


def pretrained(workdir: Path, config: PretrainConfig, corpus: Corpus, step: int) -> None:
    """A run that has saved random parameters once."""
    config = config.with_vocabulary(corpus.train.vocab_size)
    prepare_workdir(workdir, config, corpus.train, Start())
    params = random_params(objective_of(config).init, step)
    save(workdir, State(params), step, config=to_dict(config), extra={})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text, a corpus, a run, a classifier of it and its export."""
    root = tmp_path_factory.mktemp("lineage")
    words = np.random.default_rng(0).integers(5, 64, (40, 12))
    (root / "text.txt").write_text("\n\n".join(" ".join(map(str, row)) for row in words))
    build_corpus([str(root / "text.txt")], TOKENIZER, root / "corpus", num_workers=1)
    config = small_config(data__corpus=str(root / "corpus"))
    pretrained(root / "run", config, open_corpus(str(root / "corpus")), 7)

    (root / "labels.csv").write_text("text,label\n5 6,a\n7 8,b\n")
    task = {"kind": "table", "train": str(root / "labels.csv")}
    tuned = build(FinetuneConfig, {"init": str(root / "run"), "task": task})
    initial = read_model(root / "run", encoder_only=True)
    prepare_finetune_workdir(root / "tuned", tuned, {}, initial.tokenizer_files, 7)
    head = TaskHeadConfig("classification", 2)
    model = dataclasses.replace(initial.config, attention_impl="xla")
    labelled = restore_task(
        {"task": to_dict(tuned.task), "learned": {"labels": ["a", "b"]}}, TOKENIZER
    )
    content = saved_content(
        tuned, TaskObjective(model, head, "single_label"), labelled,
        Outcome(Trial("x", 1e-4, 0), [{"step": 3, "accuracy": 0.5}], 0.5, 3, "", 1.0),
    )  # fmt: skip
    params = random_params(lambda key: init_task_params(model, head, key), 1)
    save(root / "tuned", FinetunedState(params), 3, **content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(theirs, "find_spec", lambda name: None)
        export(root / "tuned", "huggingface", root / "out" / "tuned")
    return root


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    """The same in a place of its own, and nothing at the places that are recorded."""
    shutil.copytree(made, tmp_path / "made")
    for path in (tmp_path / "made").rglob("*"):
        if path.name in ("config.json", "corpus.json", "parity.json"):
            content = path.read_text().replace(str(made), str(tmp_path / "made"))
            if path.name == "corpus.json":
                record = json.loads(content)
                del record["crc32"]  # the change is meant
                content = json.dumps(record)
            path.write_text(content)
    return tmp_path / "made"


def states(found: Checked) -> dict[str, str]:
    """Names of the chain, by role where they have one, and their states."""
    return {each.ancestor.role or each.ancestor.kind: each.state for each in found.walk()}


def test_the_chain_from_an_export_to_the_text(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(made / "out" / "tuned")
    assert main(["lineage", out, "--near", str(made), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    chain = []
    while found:
        chain.append((found["kind"], found["name"], found["step"], found["state"]))
        found = found["parents"][0] if found["parents"] else None
    assert chain == [
        ("export", "tuned", None, "verified"),
        ("fine-tuning", "tuned", 3, "verified"),
        ("pretraining", "run", 7, "verified"),
        ("corpus", "corpus", None, "verified"),
        ("file", str(made / "text.txt"), None, "verified"),
    ]
    assert main(["lineage", out, "--near", str(made), "--quick"]) == 0
    said = capsys.readouterr().out
    assert "labels.csv (file)" in said
    assert "0 of 6 verified\n6 not read" in said


def test_a_file_has_nothing_to_be_compared_with(made: Path) -> None:
    found = check_lineage(str(made / "text.txt"))
    assert found.state == "unrecorded"
    assert lineage_lines(found)[-2:] == [
        "0 of 1 verified", "1 intact, nothing recorded to compare with",
    ]  # fmt: skip


def test_an_export_alone_names_the_chain_without_places(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "out" / "tuned", tmp_path / "alone")
    parity = (tmp_path / "alone" / "parity.json").read_text()
    assert str(made.parent) not in parity
    found = check_lineage(str(tmp_path / "alone"))
    assert states(found) == {
        "export": "verified", "source": "missing", "init": "missing", "data.corpus": "missing",
        "task.train": "missing",
    }  # fmt: skip
    names = [each.ancestor.name for each in found.walk()]
    assert names == ["alone", "tuned", "run", "corpus", "text.txt", "labels.csv"]
    assert all(each.ancestor.recorded for each in found.walk() if each.ancestor.role)
    assert "no place is recorded" in "\n".join(lineage_lines(found))


def test_a_colon_in_a_path_does_not_put_the_path_into_records() -> None:
    """Times are common names of runs; the whole path was in cards that were published."""
    for place in ("/home/me/12:30/base", Path("/home/me/12:30/base")):
        assert last_part(place) == "base"
        assert Ancestor("source", "file", f"{place}").entry()["name"] == "base"
    assert "name" not in Ancestor("source", "file", "").entry()
    for name in ("tfds:wikipedia/20230601.en", "hf:me/texts:en"):
        entry = Ancestor("source", "file", name).entry()
        assert last_part(name) == entry["name"] == name
        (known,) = known_ancestors({RECORD: [entry]}, Path("corpus.json")).values()
        assert _missing(known) == ("unread", "not a file on this machine")
    gone = Ancestor("", "file", "/data/12:30/a.txt", "/data/12:30/a.txt")
    assert _missing(gone) == ("missing", "at /data/12:30/a.txt")


@pytest.mark.parametrize(
    ("file", "role"),
    [
        ("out/tuned/model.safetensors", "export"),
        ("labels.csv", "task.train"),
        ("text.txt", "source"),
        ("corpus/train/shards/00000/tokens.bin", "data.corpus"),
    ],
)
def test_a_changed_byte_is_found(
    copied: Path, file: str, role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    content = bytearray((copied / file).read_bytes())
    content[-1] ^= 1
    (copied / file).write_bytes(content)
    place = copied / "out" / "tuned" if role == "export" else copied / "tuned"
    found = check_lineage(str(place))
    assert [name for name, state in states(found).items() if state == "differs"] == [role]
    assert main(["lineage", str(place)]) == 1
    assert "1 DIFFERS" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "own", "recorded", "content", "expected"),
    [
        # A file's digest is that of its content; another's, that which its own record has.
        ("file", "", "b", ("verified", "b"), ("verified", "")),
        ("file", "b", "b", ("verified", "a"), ("differs", "digest a, but b was recorded")),
        ("pretraining", "a", "b", ("verified", ""), ("differs", "digest a, but b was recorded")),
        ("corpus", "b", "b", ("verified", ""), ("verified", "")),
        ("file", "", "b", ("unread", "it cannot be read"), ("unread", "it cannot be read")),
        ("file", "b", "b", ("unread", ""), ("unread", "the same digest in the records")),
        ("file", "a", "b", ("unread", ""), ("differs", "digest a, but b was recorded")),
        ("file", "", "b", ("unread", ""), ("unread", "")),
        ("corpus", "a", "b", ("unread", ""), ("differs", "digest a, but b was recorded")),
        ("corpus", "a", "", ("unread", ""), ("unread", "")),
        ("corpus", "a", "b", ("differs", "damaged"), ("differs", "damaged")),
        ("file", "", "", ("verified", "a"), ("unrecorded", "")),
        ("model", "a", "", ("verified", ""), ("unrecorded", "")),
        ("average", "a", "", ("verified", ""), ("unrecorded", "a note")),
    ],
)
def test_the_content_is_compared_with_what_the_descendant_recorded(
    kind: str, own: str, recorded: str, content: Any, expected: tuple[str, str]
) -> None:
    ancestor = Ancestor(
        "init", kind, "it", digest=own * 64, recorded=recorded * 64, note="a note"
    )  # fmt: skip
    state, said = content
    said = said * 64 if len(said) == 1 else said
    state, said = _compared(ancestor, state, said)
    assert (state, said.replace("a" * 12, "a").replace("b" * 12, "b")) == expected


@pytest.mark.parametrize("count", [2, 3])
def test_several_files_of_weights_have_one_digest(tmp_path: Path, count: int) -> None:
    """The digest of a list that `sha256sum` would print; a renamed file is another model."""
    files = [tmp_path / f"{n}.safetensors" for n in range(count)]
    for path in files:
        path.write_text(path.stem)
    lines = [f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files]
    expected = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    assert weights_entry("it", reversed(files))["digest"] == expected


@pytest.mark.parametrize("error", [ConnectionError("away"), PermissionError(13, "denied")])
def test_content_that_cannot_be_read_is_not_said_to_differ(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: OSError
) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise error

    for name in ("find_fault", "open_store"):
        monkeypatch.setattr(lineage, name, fail)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "corpus.json").touch()
    for kind in ("pretraining", "corpus"):
        ancestor = Ancestor("init", kind, "it", str(tmp_path), step=7, digest="a", recorded="a")
        state, said = lineage._content(ancestor, False, lambda text: None)
        assert _compared(ancestor, state, said) == ("unread", str(error))


def test_the_directory_itself_needs_no_record() -> None:
    assert _compared(Ancestor("", "average", "it", digest="a"), "verified", "") == ("verified", "")
    assert _compared(Ancestor("", "file", "it"), "verified", "a") == ("unrecorded", "")


@pytest.mark.parametrize(
    ("ancestor", "expected"),
    [
        (Ancestor("", "pretraining", "run", "gs://b/run", note="no access"),
         ("unread", "no access")),
        (Ancestor("", "pretraining", "run", "gs://b/run"), ("missing", "at gs://b/run")),
        (Ancestor("", "pretraining", "run", "/x/run", note="n"), ("missing", "at /x/run")),
        (Ancestor("", "corpus", "a:b"), ("missing", "no place is recorded")),
        (Ancestor("", "file", "tfds:wikipedia"), ("unread", "not a file on this machine")),
        (Ancestor("", "file", "gs://b/a.txt", "gs://b/a.txt"),
         ("unread", "not a file on this machine")),
        (Ancestor("", "file", "python-docs"),
         ("unread", "documentation of the packages that were installed")),
        (Ancestor("", "corpus", "python-docs"), ("missing", "no place is recorded")),
        (Ancestor("", "file", "a.txt", "/x/a.txt"), ("missing", "at /x/a.txt")),
    ],
)  # fmt: skip
def test_what_is_not_there_is_said_to_be_missing_or_out_of_reach(
    ancestor: Ancestor, expected: tuple[str, str]
) -> None:
    assert _missing(ancestor) == expected


def test_sources_beyond_the_eighth_are_counted_unless_they_differ() -> None:
    def source(state: str, number: int) -> Checked:
        return Checked(Ancestor("source", "file", f"{state}-{number}"), state, "", ())

    states = [*["verified"] * 10, *["missing"] * 8, *["differs"] * 9]
    run = Checked(Ancestor("init", "pretraining", "other"), "unread", "", ())
    root = Checked(
        Ancestor("", "corpus", "corpus", step=None, note="1,000 tokens"), "verified", "",
        (*(source(state, number) for number, state in enumerate(states)), run),
    )  # fmt: skip
    lines = lineage_lines(root)
    assert lines[0] == "corpus (corpus, 1,000 tokens) - verified"
    assert [line.split(" (")[0] for line in lines[1 : 8 + 8 + 9 + 1]] == [
        *(f"  source: verified-{n}" for n in range(8)),
        *(f"  source: missing-{n}" for n in range(10, 18)),
        *(f"  source: differs-{n}" for n in range(18, 27)),
    ]
    assert lines[26:28] == [
        "  init: other (pretraining) - not read", "  2 more sources - verified",
    ]  # fmt: skip
    assert lines[28:] == ["", "11 of 29 verified", "9 DIFFERS", "8 not found", "1 not read"]


def test_a_record_ends_before_its_file_is_nested_too_deeply(tmp_path: Path) -> None:
    """A run that began from a run that began from a run: a record of each would hold all."""
    last = Ancestor("init", "pretraining", "run")
    for _ in range(40):
        last = dataclasses.replace(last, parents=(last,))
    record = {"bert_jax": "0", "format": 2, "config": {}, RECORD: [last.entry()]}
    (tmp_path / "config.json").write_text(json.dumps(record))
    found = known_ancestors(
        read_json_object(tmp_path / "config.json", max_bytes=1 << 20), tmp_path / "config.json"
    )["init"]
    assert len([*found.walk()]) == 1 + MAX_DEPTH


def test_sources_are_not_compared_pair_by_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, equal = [], Ancestor.__eq__
    monkeypatch.setattr(
        Ancestor, "__eq__", lambda one, other: calls.append(one) or equal(one, other)
    )
    files = tuple(Ancestor("source", "file", f"{n}.txt", recorded=f"{n}") for n in range(2000))
    found = Ancestor("", "corpus", "it", parents=(*files, Ancestor("init", "model", "m"))).entry()
    assert [each["name"] for each in found["parents"]] == [*(f"{n}.txt" for n in range(20)), "m"]
    assert found["note"] == "1,980 more sources"
    assert len(calls) < 2000


def test_a_line_names_the_step_and_the_bytes() -> None:
    parts = (
        Ancestor("", "file", "a", "/x/a", part=(1000, 2500)),
        Ancestor("", "pretraining", "run", "/x/run", step=12_000),
        Ancestor("init", "import", "b", note="BertModel as safetensors"),
    )
    assert [lineage_lines(Checked(each, "missing", "at b", ()))[0] for each in parts] == [
        "/x/a (file, bytes 1,000 to 2,500) - not found: at b",
        "/x/run (pretraining, step 12,000) - not found: at b",
        "init: b (import of BertModel as safetensors) - not found: at b",
    ]


def test_a_run_that_went_on_is_another_ancestor(copied: Path) -> None:
    """The step of the fine-tuning is gone; the parents are those that were recorded."""
    (copied / "run" / "checkpoints" / "7").rename(copied / "run" / "checkpoints" / "9")
    found = check_lineage(str(copied / "tuned"))
    (run,) = [each for each in found.parents if each.ancestor.role == "init"]
    assert (run.state, run.said) == ("unread", "the checkpoint of step 7 is gone")
    assert [each.state for each in run.parents] == ["verified"]


def test_another_run_of_the_same_name_is_not_taken(copied: Path) -> None:
    corpus = open_corpus(str(copied / "corpus"))
    config = small_config(data__corpus=str(copied / "corpus"))
    pretrained(copied / "other" / "run", config, corpus, 8)
    shutil.rmtree(copied / "run")
    found = check_lineage(str(copied / "tuned"), [copied / "other"])
    assert states(found)["init"] == "missing"
    assert states(found)["data.corpus"] == "missing"  # without the run no place is known


def test_branches_averages_and_imports(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theirs, "find_spec", lambda name: None)
    corpus = open_corpus(str(copied / "corpus"))
    config = small_config(data__corpus=str(copied / "corpus")).with_vocabulary(64)
    from bert_jax.files.remote import open_workdir

    branch = open_branch(f"{copied / 'run'}@7", open_workdir(copied / "branch"), EMPTY)
    assert branch is not None
    prepare_workdir(copied / "branch", config, corpus.train, Start(), branch=branch.record)
    save(
        copied / "branch", State(random_params(objective_of(config).init, 3)), 9,
        config=to_dict(config), extra={},
    )  # fmt: skip
    average([str(copied / "run"), str(copied / "branch")], copied / "mean")
    found = check_lineage(str(copied / "mean"))
    assert {each.state for each in found.walk()} == {"verified"}
    names = [(each.ancestor.role, each.ancestor.name) for each in found.walk()]
    assert names == [
        ("", "mean"),
        ("average[0]", "run"), ("data.corpus", "corpus"), ("source", str(copied / "text.txt")),
        ("average[1]", "branch"), ("branch", "run"), ("data.corpus", "corpus"),
        ("source", str(copied / "text.txt")), ("data.corpus", "corpus"),
        ("source", str(copied / "text.txt")),
    ]  # fmt: skip
    record = json.loads((copied / "mean" / "config.json").read_text())
    assert [each["role"] for each in record[RECORD]] == ["average[0]", "average[1]"]


def test_an_import_of_an_export(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theirs, "find_spec", lambda name: None)
    import_model(str(copied / "out" / "tuned"), copied / "again")
    found = check_lineage(str(copied / "again"), [copied])
    kinds = [each.ancestor.kind for each in found.walk()]
    assert kinds == ["import", "export", "fine-tuning", "pretraining", "corpus", "file", "file"]
    assert {each.state for each in found.walk()} == {"verified"}
    for file in sorted((copied / "again").rglob("*.json")):
        if file.name in ("import.json", "parity.json"):
            continue
        before = file.read_bytes()  # of which `sha256`, the weights' digest, says nothing
        file.write_bytes(before + b"\n")
        assert check_lineage(str(copied / "again"), [copied]).state == "differs", file
        file.write_bytes(before)


def test_a_restart_keeps_the_ancestors(copied: Path) -> None:
    """What a run began from may be gone when it goes on."""
    before = json.loads((copied / "run" / "config.json").read_text())
    corpus = open_corpus(str(copied / "corpus"))
    config = small_config(data__corpus=str(copied / "corpus"), init="gone").with_vocabulary(64)
    prepare_workdir(copied / "run", config, corpus.train, Start(), has_saved=True)
    after = json.loads((copied / "run" / "config.json").read_text())
    assert after[RECORD] == before[RECORD] != []


@pytest.mark.parametrize("starts", [False, True])
def test_a_teacher_is_found_and_compared(starts: bool, copied: Path) -> None:
    store = open_corpus(str(copied / "corpus")).train
    distil = {"teacher": f"{copied}/run", "from_teacher": starts}
    config = small_config(data__corpus=str(copied / "corpus"), distil=distil)
    prepare_workdir(copied / "student", config.with_vocabulary(64), store, Start())
    teacher, _ = check_lineage(str(copied / "student")).parents
    role = "distil.from_teacher" if starts else "distil.teacher"
    assert (teacher.ancestor.role, teacher.ancestor.step) == (role, 7)
    assert {each.state for each in teacher.walk()} == {"verified"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({RECORD: 3}, "lineage is 3; expected a list of ancestors"),
        ({RECORD: [{"role": 3}]}, "lineage has an object of 1; expected role, kind, name, digest"),
        ({"average": {"sources": [{"step": 3}]}}, "expected workdir, step and digest"),
    ],
)
def test_a_malformed_record_is_named(tmp_path: Path, content: dict[str, Any], said: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"bert_jax": "0", "format": 2, "config": {}, **content}))
    with pytest.raises(UserError, match=str(path)) as raised:
        check_lineage(str(tmp_path))
    assert said in str(raised.value)


def test_no_directory_with_a_lineage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lineage", str(tmp_path)]) == 2
    assert "has no recorded lineage; give a work directory" in capsys.readouterr().err
