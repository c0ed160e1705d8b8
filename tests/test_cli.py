"""The command line as its user meets it: one way through, and every refusal of bad input."""

import fnmatch
import glob
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

import bert_jax
from bert_jax.cli import main as cli
from bert_jax.cli.verbs.options import options
from bert_jax.errors import exit_code, report_error
from bert_jax.planning.prices import Price
from bert_jax.tokenization.load import load_tokenizer

SMALL = [
    f"--config.{field}"
    for field in (
        "model.num_layers=1", "model.hidden_dim=32", "model.num_heads=2", "model.mlp_dim=64",
        "model.num_positions=64", "training.num_steps=4", "training.log_every_steps=2",
        "training.phases[0].length=32", "training.phases[0].batch_size=8",
        "optimizer.warmup_steps=2", "training.eval_rows=16",
    )
]  # fmt: skip


class Answer(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Answer]


@pytest.fixture
def run(capsys) -> Run:
    def run(*argv: object) -> Answer:
        capsys.readouterr()
        try:
            code = cli.main([str(a) for a in argv])
        except SystemExit as stop:  # argparse
            code = int(stop.code or 0)
        return Answer(code, *capsys.readouterr())

    return run


def refused(answer: Answer, *parts: str) -> None:
    """Exit code 2 and one paragraph on standard error with these parts."""
    assert answer.code == 2, answer
    assert answer.err.count("\n") == 1, answer.err
    assert "Traceback" not in answer.err
    for part in parts:
        assert part in answer.err


def snapshot(directory: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()
    }


class Made(NamedTuple):
    text: Path
    tokenizer: Path
    corpus: Path
    run: Path
    outputs: dict[str, str]


def write_text(path: Path) -> None:
    names, verbs = ["the cat", "a dog", "our bird", "that fish"], ["sat", "ran", "slept", "sang"]
    places = ["on the hill", "under a tree", "near the river", "in a house"]
    documents = [
        " ".join(
            f"{names[(d + s) % 4]} {verbs[(d * 3 + s) % 4]} {places[(d // 4 + s) % 4]} {d}."
            for s in range(6)
        )
        for d in range(60)
    ]
    path.write_text("\n\n".join(documents) + "\n")


def pretrain(made: Made, workdir: Path, *fields: str) -> list[str]:
    return ["pretrain", "--config=pretrain/demo", f"--workdir={workdir}",
            f"--config.data.corpus={made.corpus}", *SMALL, *fields]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Made:
    """The way from text to a checkpoint, by the commands that the README names."""
    root = tmp_path_factory.mktemp("cli")
    made = Made(root / "a.txt", root / "tokenizer", root / "corpus", root / "run", {})
    write_text(made.text)
    for argv in (
        ["tokenizer", "--input", made.text, "--vocab-size", "120", "--out", made.tokenizer],
        ["corpus", "--input", made.text, "--tokenizer", made.tokenizer, "--out", made.corpus,
         "--heldout-rate", "0.2"],
        pretrain(made, made.run),
    ):  # fmt: skip
        assert cli.main([str(a) for a in argv]) == 0
    return made


def test_from_text_to_fill_mask(made: Made, run: Run):
    evaluated = run("evaluate", made.run)
    assert evaluated.code == 0
    assert "eval/mlm_loss" in evaluated.out
    metered = run("evaluate", made.run, "--masking-rates=10,40", "--rows=8", "--json")
    assert metered.code == 0, metered
    found = json.loads(metered.out)
    assert [each["masking_rate"] for each in found["masking_rates"]] == [0.1, 0.4]
    assert found["num_rows"] == 8
    assert (made.run / "positions.png").read_bytes().startswith(b"\x89PNG")
    replayed = run("replay", made.run, "--step", "3", "--rows", "2")
    assert replayed.code == 0
    assert replayed.out.count("[CLS]") == 2
    filled = run("fill-mask", made.run, "The cat [MASK] on the hill.", "--top", "3")
    assert filled.code == 0
    assert len(filled.out.splitlines()) == 4
    again = run(*pretrain(made, made.run))
    assert again.code == 0
    assert "continues from step 4" in again.out


def test_a_dry_run_prints_what_would_be_written_and_writes_nothing(made: Made, run: Run, tmp_path):
    answer = run(*pretrain(made, tmp_path / "w", "--dry-run"))
    assert answer.code == 0, answer
    assert not list(tmp_path.iterdir())
    config, end = json.JSONDecoder().raw_decode(answer.out)
    assert config == json.loads((made.run / "config.json").read_text())["config"]
    size = sum(p.stat().st_size for p in (made.run / "checkpoints" / "4").rglob("*") if p.is_file())
    (said,) = [line for line in answer.out[end:].splitlines() if line.startswith("checkpoints/")]
    assert float(said.split()[1]) == pytest.approx(size / 1e6, rel=0.1)
    refused(run(*pretrain(made, made.run, "--config.seed=7", "--dry-run")), "seed", "7 given")


@pytest.mark.without_libtpu
def test_a_profile_is_read_from_the_command_line(made: Made, run: Run, tmp_path):
    answer = run(*pretrain(made, tmp_path / "w", "--profile=2:3"))
    assert answer.code == 0, answer
    assert "profile of steps 2 to 3 on cpu: " in answer.out
    assert (tmp_path / "w" / "profile" / "lines.txt").exists()
    for given, reason in (("3", "give FIRST:LAST"), ("3:9", "end at most at step 4")):
        for flags in ((), ("--dry-run",)):
            refused(run(*pretrain(made, tmp_path / "no", f"--profile={given}", *flags)), reason)
    assert not (tmp_path / "no" / "config.json").exists()
    folds = ["finetune", "--config=table", "--config.task.folds=3", f"--workdir={tmp_path / 'no'}"]
    table = ["--config.init=model", "--config.task.train=a.csv", "--profile=2:3"]
    refused(run(*folds, *table), "--config.task.fold=1")


def test_a_quiet_run_prints_warnings_only(made: Made, run: Run, tmp_path):
    warmed = "--config.optimizer.warmup_steps=3"
    answer = run(*pretrain(made, tmp_path / "w", "--quiet", warmed))
    assert (answer.code, answer.out) == (0, "")
    lines = answer.err.splitlines()
    assert all(line.startswith("Warning: ") for line in lines)
    assert "rises for 3 of 4 steps" in answer.err
    assert run("status", tmp_path / "w").code == 0


def test_the_record_of_a_run_is_a_configuration(made: Made, run: Run, tmp_path):
    record = made.run / "config.json"
    again = run("pretrain", f"--config={record}", f"--workdir={made.run}")
    assert again.code == 0, again
    assert "continues from step 4" in again.out
    for verb, words in (("finetune", "is a recipe for `bert-jax pretrain`"), ("pretrain", "JSON")):
        if verb == "pretrain":
            record = tmp_path / "cut.json"
            record.write_text('{"config": ')
        refused(run(verb, f"--config={record}", f"--workdir={tmp_path / 'w'}"), words)


def test_field_that_does_not_bind_may_change(made: Made, run: Run):
    assert run(*pretrain(made, made.run, "--config.training.log_every_steps=1")).code == 0


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("empty.txt", b"", ["empty.txt is empty"]),
        ("bad.txt", b"good\nbad \xff\n", ["bad.txt, line 2", "0xff", "byte 5 of the line"]),
        ("long.txt", b"word " * 4_000_000, ["long.txt, line 1", "this line has at least"]),
        ("bad.jsonl", b'{"text": "a"}\n{"text": oops}\n', ["bad.jsonl, line 2", "not JSON"]),
        ("miss.jsonl", b'{"body": "a"}\n', ["miss.jsonl, line 1", "no field 'text'", "body"]),
        ("cut.txt.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03", ["ends in the middle"]),
        ("x.pdf", b"%PDF", ["x.pdf", "are not supported"]),
    ],
)
@pytest.mark.parametrize("verb", ["tokenizer", "corpus"])
def test_bad_file_is_refused(made: Made, run: Run, tmp_path, verb, name, content, parts):
    (tmp_path / name).write_bytes(content)
    how = ["--tokenizer", made.tokenizer] if verb == "corpus" else []
    answer = run(verb, "--input", tmp_path / name, *how, "--out", tmp_path / "out")
    refused(answer, *parts)
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("spec", ["", "no*.txt", "no.txt", "."])
def test_input_that_is_no_file_is_refused(run: Run, tmp_path, monkeypatch, spec):
    monkeypatch.chdir(tmp_path)
    refused(run("tokenizer", "--input", spec, "--out", "out"), spec)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["wordpiece", "unigram", "bpe"])
@pytest.mark.parametrize("size", ["0", "-1", "5", "6", "1000000000"])
def test_vocabulary_size_that_cannot_be(made: Made, run: Run, tmp_path, kind, size):
    out = tmp_path / "t"
    refused(
        run(
            "tokenizer", "--input", made.text, "--kind", kind, f"--vocab-size={size}", "--out", out
        ),
        f"vocab_size is {int(size):,}",
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("option", "value"),
    [("--heldout-rate", "1"), ("--heldout-rate", "nan"), ("--num-workers", "0"),
     ("--num-workers", "100000"), ("--shard-mb", "0"), ("--shard-mb", "nan")],
)  # fmt: skip
def test_corpus_option_out_of_range(made: Made, run: Run, tmp_path, option, value):
    refused(
        run("corpus", "--input", made.text, "--tokenizer", made.tokenizer, "--out",
            tmp_path / "c", f"{option}={value}"),
        value,
    )  # fmt: skip
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "option", "said"),
    [
        ("wordpiece", "--limit-alphabet=0", "limit_alphabet is 0"),
        ("wordpiece", "--min-frequency=0", "min_frequency is 0"),
        ("wordpiece", "--character-coverage=1.5", "character_coverage is 1.5"),
        ("unigram", "--character-coverage=0.5", "character_coverage is 0.5"),
        (
            "unigram",
            "--limit-alphabet=0",
            "--limit-alphabet cannot be used with --kind unigram or bpe",
        ),
        ("bpe", "--min-frequency=3", "--min-frequency cannot be used with --kind unigram or bpe"),
        ("bpe", "--keep-accents", "--keep-accents cannot be used with --kind unigram or bpe"),
    ],
)
def test_options_of_a_vocabulary_that_cannot_be(made: Made, run: Run, tmp_path, kind, option, said):
    out = tmp_path / "t"
    refused(run("tokenizer", "--input", made.text, "--kind", kind, option, "--out", out), said)
    assert not list(tmp_path.iterdir())


def test_options_of_a_vocabulary(run: Run, tmp_path):
    (tmp_path / "a.txt").write_text("Été été, café ok zq\n" * 3)
    how = ["tokenizer", "--input", tmp_path / "a.txt", "--vocab-size", "40"]
    run(*how, "--out", tmp_path / "a", "--keep-accents", "--limit-alphabet=4", "--min-frequency=7")
    made = load_tokenizer(tmp_path / "a")
    pieces = [made.id_to_token(id) for id in made.encode("Été ok").ids]
    assert pieces == ["é", "##t", "##é", "[UNK]"]
    run(*how, "--out", tmp_path / "b", "--character-coverage=0.2")
    assert load_tokenizer(tmp_path / "b").vocab_size < made.vocab_size


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_max_mb_out_of_range(made: Made, run: Run, tmp_path, value):
    refused(
        run("tokenizer", "--input", made.text, f"--max-mb={value}", "--out", tmp_path / "t"), value
    )


@pytest.mark.parametrize("flags", [[], ["--overwrite"]])
def test_what_is_no_corpus_is_never_overwritten(made: Made, run: Run, flags):
    before = snapshot(made.tokenizer)
    how = ["corpus", "--input", made.text, "--tokenizer", made.tokenizer, *flags, "--out"]
    refused(run(*how, made.tokenizer), "not overwritten")
    refused(run(*how, made.text / "c"), "a part of the path is a file")
    assert snapshot(made.tokenizer) == before


def test_existing_corpus_needs_overwrite(made: Made, run: Run, tmp_path):
    out = tmp_path / "c"
    shutil.copytree(made.corpus, out)
    how = ["corpus", "--input", made.text, "--tokenizer", made.tokenizer, "--out", out]
    refused(run(*how), "--overwrite")
    assert snapshot(out) == snapshot(made.corpus)
    assert run(*how, "--overwrite").code == 0
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_corpus_of_shards_and_its_estimate(made: Made, run: Run, tmp_path, monkeypatch):
    how = ["corpus", "--input", made.text, "--tokenizer", made.tokenizer, "--shard-mb=0.002"]
    estimated = run(*how, "--estimate")
    assert estimated.code == 0
    assert f" of {made.text.stat().st_size:,} bytes (" in estimated.out
    assert "documents        60\n" in estimated.out
    for price in (None, Price(0.5, "2026-01-31", "a page")):
        monkeypatch.setattr("bert_jax.planning.prices.read_prices", lambda p=price: {"core": p})
        said = run(*how, "--estimate").out
        assert "processor hours" in said
        assert ("dollars" in said) == (price is not None)
    assert "0.00 (0.5 a core-hour on demand on 2026-01-31, a page)\n" in said
    assert not list(tmp_path.iterdir())
    built = run(*how, "--num-workers=1", "--out", tmp_path / "c")
    assert built.code == 0
    assert " shards, " in built.out
    refused(run(*how), "give --out")
    out = ["--out", tmp_path / "d"]
    refused(run(*how, *out, "--estimate"), "--estimate writes nothing")
    refused(run(*how, *out, "--engine=local:auto"), "only --engine=ray takes an address")
    refused(run(*how, *out, "--by-column=lang"), "a.txt, document 1: no field 'lang'")
    refused(
        run("corpus", "--pairs", made.text, made.text, *how[3:5], "--estimate"),
        "--estimate works only with --input",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_one_document_under_nsp(made: Made, run: Run, tmp_path):
    (tmp_path / "one.txt").write_text("one document. it has two sentences.\n")
    corpus = tmp_path / "one"
    made_it = run("corpus", "--input", tmp_path / "one.txt", "--tokenizer", made.tokenizer,
                  "--out", corpus)  # fmt: skip
    assert made_it.code == 0
    answer = run(*pretrain(made, tmp_path / "w", f"--config.data.corpus={corpus}"))
    refused(answer, "1 document", "pairing 'nsp'")
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize(
    ("field", "parts"),
    [
        ("model.num_positions=16", ["phases[0].length 32", "num_positions 16"]),
        ("model.hiden_dim=3", ["unknown field model.hiden_dim", "did you mean model.hidden_dim"]),
        ("training.phases[4].length=3", ["there is no training.phases[4]"]),
        ("data.corpus=/no/where", ["/no/where does not exist", "bert-jax corpus"]),
        ("mesh.fsdp=3", ["mesh.fsdp=3"]),
    ],
)
def test_run_that_cannot_be_is_refused_before_anything_is_written(
    made: Made, run: Run, tmp_path, field, parts
):
    refused(run(*pretrain(made, tmp_path / "w", f"--config.{field}")), *parts)
    assert not list(tmp_path.iterdir())


def test_work_directory_of_another_run(made: Made, run: Run):
    before = snapshot(made.run)
    answer = run(*pretrain(made, made.run, "--config.optimizer.learning_rate=0.5"))
    refused(answer, "optimizer.learning_rate", "0.5 given")
    assert snapshot(made.run) == before


def test_work_directory_that_is_none(made: Made, run: Run, tmp_path):
    refused(run(*pretrain(made, made.text)), "is a file")
    refused(run(*pretrain(made, Path())), "--workdir is '.'")
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    refused(run(*pretrain(made, tmp_path)), "already contains the tokenizer")
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer"]


def test_store_of_another_tokenizer(made: Made, run: Run, tmp_path):
    tokenizer, corpus = tmp_path / "t", tmp_path / "c"
    assert run("tokenizer", "--input", made.text, "--vocab-size=90", "--out", tokenizer).code == 0
    how = ["--input", made.text, "--tokenizer", tokenizer, "--out", corpus]
    assert run("corpus", *how).code == 0
    refused(run("evaluate", made.run, "--corpus", corpus), "made with the tokenizer")
    answer = run(*pretrain(made, made.run, f"--config.data.corpus={corpus}"))
    refused(answer, "contains a run with another configuration", "the training corpus")


@pytest.mark.parametrize("damage", ["shards/00000/tokens.bin", "corpus.json", "tokenizer"])
def test_damaged_store(made: Made, run: Run, tmp_path, damage):
    corpus = tmp_path / "c"
    shutil.copytree(made.corpus, corpus)
    part = corpus / "train" / damage
    if damage == "tokenizer":
        shutil.rmtree(part)
    else:
        part.write_bytes(part.read_bytes()[:-5])
    answer = run(*pretrain(made, tmp_path / "w", f"--config.data.corpus={corpus}"))
    refused(answer, "is damaged", "uild the corpus again")
    assert not (tmp_path / "w").exists()


def test_looking_at_what_is_no_run(made: Made, run: Run, tmp_path):
    for where in (tmp_path, made.text, tmp_path / "none"):
        refused(run("replay", where, "--step", "0"), "so it is not a run")
        refused(run("evaluate", where), "holds no checkpoint")
        refused(run("fill-mask", where, "[MASK]"), str(where), "give the work directory of a")


@pytest.mark.parametrize("step", ["-1", "4"])
def test_replay_outside_the_run(made: Made, run: Run, step):
    refused(run("replay", made.run, f"--step={step}"), f"--step is {step}", "0 to 3")


def test_replay_of_a_corpus_that_moved(made: Made, run: Run, tmp_path):
    workdir = tmp_path / "w"
    shutil.copytree(made.run, workdir)
    record = json.loads((workdir / "config.json").read_text())
    record["config"]["data"]["corpus"] = str(tmp_path / "gone")
    (workdir / "config.json").write_text(json.dumps(record))
    refused(run("replay", workdir, "--step=0"), "gone does not exist", "--corpus")
    assert run("replay", workdir, "--step=0", "--corpus", made.corpus).code == 0


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--masking-rates=5,x", "is x; it must be a finite number"),
        ("--masking-rates=0", "in (0, 100)"),
        ("--masking-rates=150", "in (0, 100)"),
        ("--masking-rates=10,10", "once"),
        ("--length=3", "at least 8"),
    ],
)
def test_rows_and_rates_that_cannot_be_evaluated(made: Made, run: Run, argument, words):
    refused(run("evaluate", made.run, argument), argument.partition("=")[0], words)


@pytest.mark.parametrize("rows", ["0", "-1"])
def test_no_rows(made: Made, run: Run, rows):
    refused(run("evaluate", made.run, f"--rows={rows}"), f"--rows is {rows}")
    refused(run("replay", made.run, "--step=0", f"--rows={rows}"), f"--rows is {rows}")


def test_fill_mask_refuses(made: Made, run: Run):
    refused(run("fill-mask", made.run, "no mask"), "has no [MASK]")
    refused(run("fill-mask", made.run, ""), "has no [MASK]")
    refused(run("fill-mask", made.run, "cat " * 99 + "[MASK]"), "the model takes at most 64")
    refused(run("fill-mask", made.run, "[MASK]", "--top=0"), "top is 0")


@pytest.mark.parametrize(
    "argv",
    [
        ("export", "w", "--to=onnx", "--out=o", "--tolerance=nan"),
        ("import", "s", "--out=o", "--tolerance=inf"),
        ("classify", "w", "a", "--threshold=nan"),
    ],
)
def test_numbers_that_are_none_are_refused(run: Run, argv):
    option, _, value = argv[-1].partition("=")
    refused(run(*argv), f"{option} is {value}; it must be a finite number")


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConnectionError("the bucket is away"), 6), (BrokenPipeError(32, "Broken pipe"), None)],
)
def test_a_bucket_out_of_reach_is_no_bug_and_a_broken_pipe_is(error, code, capsys):
    assert report_error(error, "status") == exit_code(error) == code
    said = capsys.readouterr().err
    assert said == (f"bert-jax status: {error}\n" if code else "")


def test_a_run_whose_output_nobody_reads_has_failed(run: Run, tmp_path, monkeypatch):
    """Other verbs end with 0 when their reader stops, as in `| head`."""

    def trained(verb, config, **options):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(cli.verb_class("pretrain"), "trained", trained)
    assert run("pretrain", "--config=pretrain/demo", f"--workdir={tmp_path / 'w'}").code == 1


@pytest.mark.parametrize(("verb", "code"), [("Start", 1), ("Demo", 1), ("Lineage", 0)])
def test_training_of_other_verbs_fails_with_its_reader_too(run: Run, monkeypatch, verb, code):
    def trained(verb):
        raise BrokenPipeError(32, "Broken pipe")

    name = verb.lower()
    monkeypatch.setattr(cli.verb_class(name), "__call__", trained)
    monkeypatch.setattr(cli.os, "dup2", lambda *ends: None)  # pytest's own output stays
    monkeypatch.setattr(sys.stdout, "fileno", lambda: 1, raising=False)
    given = {"start": ["a.txt"], "demo": [], "lineage": ["work"]}
    assert run(name, *given[name]).code == code


@pytest.mark.parametrize(
    "argv",
    [
        ("tokenizer", "--input=none.txt", "--out=gs://b/tok"),
        ("contamination", "none.txt", "--against=none.tsv", "--out=gs://b/x.json"),
    ],
)
def test_a_bucket_is_no_place_for_small_outputs(run: Run, tmp_path, monkeypatch, argv):
    monkeypatch.chdir(tmp_path)
    refused(run(*argv), "is in a bucket; name a local ")
    assert not list(tmp_path.iterdir())


def test_no_verb_needs_its_arguments_in_an_order():
    """Of the positional arguments of a verb at most the last may be several."""
    for name in cli.MODULES:
        known = options(cli.verb_class(name))
        assert [each.is_several for each in known][:-1] == [False] * (len(known) - 1), name


def test_unknown_argument(run: Run):
    assert run("corpus", "--input=a", "--tokenizer=t", "--out=o", "--bogus").code == 2
    assert run("nothing").code == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_half_written(made: Made, tmp_path, number):
    source = tmp_path / "in.txt"
    source.write_text(made.text.read_text() * 2000)
    out = tmp_path / "out"
    # What a shell starts in the background ignores Ctrl-C, and so would its children.
    heeds = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from bert_jax.cli.main import main; sys.exit(main())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", heeds, "corpus", f"--input={source}", "--num-workers=1",
         f"--tokenizer={made.tokenizer}", f"--out={out}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while not list(tmp_path.glob("out.tmp-*")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait() == 128 + number
    assert [p.name for p in tmp_path.iterdir()] == ["in.txt"]


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_libtpu_is_quiet_where_there_is_no_tpu():
    # In Python, where nothing sets the level of XLA's messages.
    unset = ("TPU_", "TF_CPP_", "JAX_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # a second libtpu gives up before it looks
    process = subprocess.run(
        [sys.executable, "-c", "import bert_jax, jax; print(jax.devices()[0].platform)"],
        env=environ, capture_output=True, text=True, check=True,
    )  # fmt: skip
    if process.stdout == "cpu\n":
        assert process.stderr == ""


@pytest.mark.parametrize(("device", "expected"), [("/dev/vfio/0", None), ("", "localhost")])
def test_a_tpu_is_left_to_say_what_it_says(monkeypatch, device, expected):
    for name in ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_BOUNDS"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setattr(glob, "glob", lambda pattern: fnmatch.filter([device], pattern))
    bert_jax._quiet_libtpu()
    assert os.environ.get("TPU_WORKER_HOSTNAMES") == expected
