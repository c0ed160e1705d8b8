"""From a text and a time to a recipe: choices, promise, refusals; with pretended speeds."""

import dataclasses
import gzip
import json
import math
import shlex
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_finetuning import write_table
from small_run import snapshot
from started import pretend_speeds, speed_of, write_text

from bert_jax.cli.main import main
from bert_jax.cli.start import begin, law
from bert_jax.cli.start.begin import CHOICES, RECIPE, Asked
from bert_jax.cli.start.choose import choices
from bert_jax.cli.start.recipe import SIZES, Size, tokens_per_step
from bert_jax.config.command_line import load_config
from bert_jax.data.corpus.sources import resolve_sources
from bert_jax.errors import UserError
from bert_jax.tokenization.load import load_tokenizer
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.corpus import open_corpus

MEASURED = begin._measured
STEP = speed_of(SIZES[0]).seconds / 3600
"""Hours of a step of the smallest size."""
SHORT, LONG = 50 * STEP, 20_000 * STEP
"""Hours for few epochs and for many."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A text, its vocabulary and its corpus."""
    home = tmp_path_factory.mktemp("prepared")
    begin.prepare(resolve_sources([write_text(home / "text.txt")]), home)
    return home


@pytest.fixture
def text(prepared):
    return str(prepared / "text.txt")


@pytest.fixture
def home(prepared, text, tmp_path):
    """A directory with vocabulary and corpus, in which only the text has been asked for."""
    for name in ("tokenizer", "corpus"):
        shutil.copytree(prepared / name, tmp_path / "home" / name)
    (tmp_path / "home" / "start.json").write_text(json.dumps({"asked": {"files": [text]}}))
    return tmp_path / "home"


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    """Sizes whose speed was measured, of the three smallest."""
    monkeypatch.setattr(begin, "choices", partial(choices, sizes=SIZES[:3]))
    return pretend_speeds(monkeypatch)


def test_a_recipe_is_written_once_and_kept(text, home, measured, monkeypatch, capsys):
    asked = Asked((text,), SHORT)
    promise = begin.begin(asked, home)
    said = capsys.readouterr().out
    config = load_config(PretrainConfig, str(home / RECIPE))
    assert config.data.corpus == str(home / "corpus")
    assert config.model.hidden_dim in {size.width for size in measured}
    assert 1 <= config.training.num_steps <= 50
    assert f"{config.training.num_steps:,} steps" in (home / CHOICES).read_text()
    assert f"promise     {promise}" in said
    assert f"twice       {2 * SHORT:g} h: " in said
    assert f"bert-jax pretrain --config={home / RECIPE}" in (home / RECIPE).read_text()
    assert (home / CHOICES).read_text() in said
    before = snapshot(home)
    monkeypatch.setattr(begin, "prepare", lambda *_: pytest.fail("was prepared again"))
    number = len(measured)
    assert begin.begin(asked, home) == promise
    assert capsys.readouterr().out == (home / CHOICES).read_text()
    assert len(measured) == number
    assert snapshot(home) == before


def test_the_command_in_the_recipe_works_for_any_name_of_a_directory(text, home):
    home = home.rename(home.with_name("my 10:30 home"))
    begin.begin(Asked((text,), SHORT), home)
    rows = (home / RECIPE).read_text().splitlines()
    (line,) = (row for row in rows if "bert-jax pretrain" in row)
    config, workdir = (word.partition("=")[2] for word in shlex.split(line)[2:])
    assert load_config(PretrainConfig, config).data.corpus == str(home / "corpus")
    assert workdir == str(home / "run")


def test_the_same_command_continues_though_a_name_is_not_utf_8(text, home):
    named = str(Path(text).rename(Path(text).with_name("caf\udce9.txt")))
    try:
        (home / "start.json").unlink()
        for name in ("tokenizer", "corpus"):
            shutil.rmtree(home / name)
        asked = Asked((named,), SHORT)
        assert begin.begin(asked, home) == begin.begin(asked, home)
    finally:
        Path(named).rename(text)


def test_twice_the_time_promises_at_least_as_much(text, home, capsys):
    promise = begin.begin(Asked((text,), SHORT), home)
    (line,) = (row for row in capsys.readouterr().out.splitlines() if row.startswith("twice"))
    assert float(line.split()[-2]) >= round(promise.nats, 2)
    assert promise.spread == pytest.approx(law.INTERVAL * law.SPREAD)


def test_the_time_for_a_classifier_is_kept(text, home, tmp_path):
    labels = write_table(tmp_path / "labels.csv", 60, 0)
    shutil.copytree(home, tmp_path / "with")
    begin.begin(Asked((text,), LONG / 50), home)
    begin.begin(Asked((text,), LONG / 50, labels=labels), tmp_path / "with")
    seconds = []
    for place in (home, tmp_path / "with"):
        config = load_config(PretrainConfig, str(place / RECIPE))
        size = Size(config.model.num_layers, config.model.hidden_dim)
        seconds.append(config.training.num_steps * speed_of(size).seconds)
    assert seconds[1] < 0.9 * seconds[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hours": 9.0}, r"hours [\d.e-]+, which is now different; give the same again"),
        ({"files": ("other.txt",)}, r"files \['.*text.txt'\]"),
        ({"topology": "v5e:1x1"}, "topology ''"),
    ],
)
def test_other_arguments_are_refused_after_the_choice(text, home, changes, said):
    asked = Asked((text,), SHORT)
    begin.begin(asked, home)
    before = snapshot(home)
    with pytest.raises(UserError, match=f"home was started with {said}"):
        begin.begin(dataclasses.replace(asked, **changes), home)
    assert snapshot(home) == before


@pytest.mark.parametrize("chosen", [True, False])
def test_a_text_that_grew_is_another_text(text, home, tmp_path, chosen):
    """The old corpus was used, without a word."""
    mine = tmp_path / "mine.txt"
    shutil.copy(text, mine)
    asked = Asked((f"{tmp_path}/*.txt",), SHORT)
    (home / "start.json").write_text(json.dumps({"asked": {"files": list(asked.files)}}))
    promise = begin.begin(asked, home)
    if not chosen:
        known = json.loads((home / "start.json").read_text())
        (home / "start.json").write_text(json.dumps({"asked": known["asked"]}))
    size = mine.stat().st_size
    mine.write_text(f"{mine.read_text()}\n\nOne more.\n")
    before = snapshot(home)
    with pytest.raises(UserError, match=f"home was started with bytes of text {size}, which is"):
        begin.begin(asked, home)
    assert snapshot(home) == before
    mine.unlink()  # a machine that lacks the text goes on
    if chosen:
        assert begin.begin(asked, home) == promise


def test_what_start_itself_writes_is_no_text(tmp_path):
    (tmp_path / "work" / "tokenizer").mkdir(parents=True)
    for name in ("a.txt", "work/tokenizer/vocab.txt"):
        (tmp_path / name).write_text("12345")
    found = begin._size([f"{tmp_path}/**/*.txt"], tmp_path / "work")
    assert found == {"bytes of text": 5}


def test_labels_may_come_after_the_choice(text, home, tmp_path):
    promise = begin.begin(Asked((text,), SHORT), home)
    before = snapshot(home)
    asked = Asked((text,), SHORT, labels=write_table(tmp_path / "rows.csv", 60, 0))
    for wrong in ({"labels": "missing.csv"}, {"test": "missing.csv"}):
        with pytest.raises(UserError, match=r"missing\.csv"):
            begin.begin(dataclasses.replace(asked, **wrong), home)
    assert begin.begin(asked, home) == promise
    assert snapshot(home) == before


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"topology": "v9:4x4"}, "there is no chip 'v9'"),
        ({"labels": "missing.csv"}, "missing.csv"),
        ({"labels": "labels.csv", "test": "missing.csv"}, "missing.csv"),
        ({"labels": "labels.csv", "columns": (("label", "stars"),)}, "stars"),
    ],
)
def test_a_mistake_shows_before_a_speed_is_measured_and_can_be_corrected(
    text, home, tmp_path, monkeypatch, measured, wrong, said
):
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path / "labels.csv", 60, 0)
    asked = Asked((text,), SHORT)
    with pytest.raises(UserError, match=said):
        begin.begin(dataclasses.replace(asked, **wrong), home)
    assert not measured
    assert not (home / RECIPE).exists()
    begin.begin(dataclasses.replace(asked, labels="labels.csv", hours=2 * SHORT), home)
    assert (home / RECIPE).exists()


def test_another_text_is_refused_even_before_the_choice(text, home, tmp_path):
    """Vocabulary and corpus are those of the first."""
    with pytest.raises(UserError, match="missing"):
        begin.begin(Asked((text,), SHORT, labels=str(tmp_path / "missing.csv")), home)
    with pytest.raises(UserError, match="home was started with files"):
        begin.begin(Asked((write_text(tmp_path / "other.txt"),), SHORT), home)


@pytest.mark.parametrize("name", ["tokenizer", "corpus", RECIPE, CHOICES])
def test_what_another_command_made_is_neither_used_nor_removed(text, home, name):
    (home / "start.json").unlink()
    for other in {"tokenizer", "corpus"} - {name}:
        shutil.rmtree(home / other)
    if name in (RECIPE, CHOICES):
        (home / name).write_text("mine")
    before = snapshot(home)
    with pytest.raises(UserError, match=f"did not make .*{name}; give another --workdir"):
        begin.begin(Asked((text,), SHORT), home)
    assert snapshot(home) == before


def test_a_text_that_is_missing_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(UserError, match=r"none\.txt"):
        begin.begin(Asked((str(tmp_path / "none.txt"),), SHORT), tmp_path / "home")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_the_size_of_a_text_is_that_of_what_is_unpacked(text, home, tmp_path, monkeypatch, suffix):
    """It decides on the vocabulary and on the share that is held out."""
    sizes: list[int] = []
    content = Path(text).read_bytes()
    file = tmp_path / f"text.txt{suffix}"
    file.write_bytes(gzip.compress(content) if suffix else content)
    monkeypatch.setattr(begin, "vocabulary_size", lambda size, spaced: sizes.append(size) or 200)
    monkeypatch.setattr(begin, "make_once", lambda *_: None)
    monkeypatch.setattr(begin, "build_once", lambda *given: sizes.append(given[-1]))
    monkeypatch.setattr(begin, "_HELDOUT_BYTES", 1000)
    begin.prepare(resolve_sources([str(file)]), home)
    assert sizes == pytest.approx([len(content), 1000 / len(content)], rel=0.01)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "empty"),
        (" \n\n", "holds no text"),
        ("One line.\nAnother line.\n", r"text\.txt: with fewer than four documents"),
    ],
)
def test_a_text_of_nothing_is_refused_until_there_is_some(tmp_path, content, said):
    file, home = tmp_path / "text.txt", tmp_path / "home"
    file.write_text(content)
    with pytest.raises(UserError, match=said):
        begin.begin(Asked((str(file),), SHORT), home)
    assert [path.name for path in home.iterdir()] == ["start.json"]
    write_text(file)
    begin.begin(Asked((str(file),), SHORT), home)
    assert (home / RECIPE).exists()


def test_a_text_that_is_too_short_may_get_further_files(tmp_path):
    (tmp_path / "short.txt").write_text("One line.\nAnother line.\n")
    files = [str(tmp_path / "short.txt"), write_text(tmp_path / "long.txt")]
    with pytest.raises(UserError, match="or give more files"):
        begin.begin(Asked((files[0],), SHORT), tmp_path / "home")
    begin.begin(Asked(tuple(files), SHORT), tmp_path / "home")
    assert json.loads((tmp_path / "home" / "start.json").read_text())["asked"]["files"] == files


def test_many_epochs_are_warned_of(text, home, tmp_path):
    begin.begin(Asked((text,), SHORT), home)
    assert "Warning" not in (home / CHOICES).read_text()
    shutil.rmtree(tmp_path / "home")
    begin.begin(Asked((text,), 50 * LONG), home)
    assert f"; above {law.MANY_EPOCHS} a further epoch hardly" in (home / CHOICES).read_text()


def test_the_bigrams_of_the_text_move_the_promise(text, home, tmp_path, monkeypatch, capsys):
    promises = []
    for number, more in enumerate((-0.25, 0.5)):
        monkeypatch.setattr(law, "surplus", lambda train, heldout, more=more: more)
        place = tmp_path / f"{number}"
        shutil.copytree(home, place)
        promises.append(begin.begin(Asked((text,), SHORT), place))
        assert (
            f"pilot       a bigram model of this text: {more:+.2f} nats" in capsys.readouterr().out
        )
    assert promises[1].nats - promises[0].nats == pytest.approx(0.75)


def test_a_slice_is_predicted_and_has_rows_for_each_chip(text, home, monkeypatch, measured):
    """What does not fit is not chosen."""

    class Planned:
        configured = "as configured"

        def __init__(self, config, phase, topology, *, cache):
            assert (phase, config.model.vocab_size > 0) == (0, True)
            self.config, self.chips = config, topology.num_chips

        def plan(self, settings):
            assert settings == self.configured
            rows = self.config.training.phases[0].batch_size
            assert rows % self.chips == 0
            model = self.config.model
            fits = model.hidden_dim <= 128
            return SimpleNamespace(seconds=model.num_layers * 1e-3 if fits else None)

    monkeypatch.setattr(begin, "Planner", Planned)
    monkeypatch.setattr(begin, "choices", choices)
    for chips, name in ((1, "v5e:1x1"), (16, "v5e:4x4")):
        place = home.parent / f"{chips}"
        shutil.copytree(home, place)
        promise = begin.begin(Asked((text,), 1.0, topology=name), place)
        config = load_config(PretrainConfig, str(place / RECIPE))
        assert config.model.hidden_dim <= 128
        assert tokens_per_step(config) == chips * 2048
        assert config.training.num_steps > 100_000
        assert f"machine     {name}" in (place / CHOICES).read_text()
        assert math.isfinite(promise.nats)
        assert promise.spread == pytest.approx(law.INTERVAL * law.SPREAD)
    assert not measured


def test_each_device_of_this_machine_has_rows(text, home, monkeypatch):
    """In the run, and in the steps that are timed for it."""
    monkeypatch.setattr(begin.jax, "device_count", lambda: 3)
    monkeypatch.setattr(begin, "step_seconds", lambda config, corpus: tokens_per_step(config))
    corpus = open_corpus(str(home / "corpus"))
    assert MEASURED(corpus, SIZES[0]) == (3 * 2048, 3 * 2048)
    begin.begin(Asked((text,), SHORT), home)
    assert tokens_per_step(load_config(PretrainConfig, str(home / RECIPE))) == 3 * 2048


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--topology=v5e:1x1", "--go"], "--go trains on this machine, and --topology"),
        (["--test=rows.csv"], "--test works only with --labels"),
        (["--columns=text=body"], "--columns works only with --labels"),
        (["--hours=0"], "--hours"),
        (["--labels=a.csv", "--columns=words=review"], "--columns has 'words=review'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(text, tmp_path, capsys, arguments, said):
    assert main(["start", text, f"--workdir={tmp_path / 'home'}", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_verb_names_the_recipe_and_how_to_go_on(text, home, capsys):
    argv = ["start", text, f"--hours={SHORT}", f"--workdir={home}"]
    assert main(argv) == 0
    first = capsys.readouterr().out
    assert first.endswith(f"recipe      {home / RECIPE}; the same command with --go runs it\n")
    assert main(argv) == 0
    assert capsys.readouterr().out.splitlines()[-1] == first.splitlines()[-1]
    assert main([*argv[:2], "--hours=7", argv[3]]) == 2
    assert "was started with hours" in capsys.readouterr().err


def test_an_unspaced_text_gets_pieces_and_accents_are_kept(tmp_path, monkeypatch, capsys):
    """The vocabulary follows from the look."""
    for name, line in (("ไทย", "pieces"), ("été", "with accents"), ("plain", "lower-cased\n")):
        file = tmp_path / f"{line.strip()}.txt"
        words = [f"{name}{number % 7}" for number in range(4000)]
        file.write_text("\n\n".join(" ".join(words[n : n + 40]) + "." for n in range(0, 4000, 40)))
        begin.prepare(resolve_sources([str(file)]), tmp_path / line.strip())
        said = capsys.readouterr().out
        assert line in said
        learned = load_tokenizer(tmp_path / line.strip() / "tokenizer").vocab_size
        assert f"vocabulary  {learned:,} " in said


def test_more_ideographs_than_a_small_vocabulary_has_are_learned(tmp_path):
    """The advice was to set options that `start` does not have."""
    signs = [chr(0x4E00 + number) for number in range(4500)]
    lines = ["".join(f"{sign}の" for sign in signs[at : at + 50]) for at in range(0, 4500, 50)]
    (tmp_path / "signs.txt").write_text("\n\n".join(lines), "utf-8")
    begin.prepare(resolve_sources([f"{tmp_path / 'signs.txt'}"]), tmp_path)
    assert load_tokenizer(tmp_path / "tokenizer").vocab_size > 4500
