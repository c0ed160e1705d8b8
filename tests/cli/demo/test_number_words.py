from pathlib import Path
from types import SimpleNamespace

import pytest

from bert_jax.cli import main as cli
from bert_jax.cli.demo import masked_words
from bert_jax.cli.demo import number_words as demo
from bert_jax.cli.main import verb_class
from bert_jax.cli.verbs.options import read
from bert_jax.config.command_line import load_config
from bert_jax.data.corpus.numbers import french_words
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.workdir import begin_workdir

TINY = """
def get_config():
    return {
        "objective": {"name": "translation"},
        "model": {
            "num_layers": 1, "hidden_dim": 16, "num_heads": 2, "mlp_dim": 16, "num_positions": 32,
            "num_types": 0, "pooler": False,
        },
        "data": {"pairing": "translation", "target_length": 16, "num_threads": 0},
        "training": {
            "num_steps": 2, "phases": ({"length": 32, "batch_size": 8},), "eval_every_steps": 0,
        },
    }
"""
"""A run too short to learn anything."""


def test_the_vocabulary_spells_all_words_and_single_digits():
    numbers = [0, 4, 71, 80, 21_000, 200_200, 999_999]
    texts = [french_words(number) for number in numbers]
    tokenizer = demo.words_and_digits(texts)
    for number, text in zip(numbers, texts, strict=True):
        words, digits = (tokenizer.encode(each).ids for each in (text, str(number)))
        assert tokenizer.special_ids.unk not in words
        assert len(words) == len(text.replace("-", " - ").split())
        assert len(digits) == len(str(number))
        assert tokenizer.decode(digits) == str(number)
    assert "zéro" in tokenizer.vocab


@pytest.mark.parametrize(("num_wrong", "code"), [(0, 0), (20, 0), (21, 1)])
def test_verdict_wants_99_percent(capsys, tmp_path, num_wrong, code):
    examples = [(french_words(number), str(number)) for number in range(2000)]
    given = ["x" if number < num_wrong else digits for number, (_, digits) in enumerate(examples)]
    share = demo._show(examples, given)
    assert share == pytest.approx(1 - num_wrong / 2000)
    said = capsys.readouterr().out
    assert said.count("(it is: ") == min(num_wrong, demo.NUM_SHOWN)
    assert ("Mistakes" in said) == (num_wrong > 0)
    assert demo._verdict(share, len(examples), tmp_path) == code
    said = capsys.readouterr().out
    assert ("FAILED" in said) == (code == 1)
    assert ("Next, to try" in said) == (code == 0)


def test_recipes_are_the_networks_that_they_name():
    names = {"": "translation", ":recurrent": "recurrent_translation"}
    for argument, objective in names.items():
        config = load_config(PretrainConfig, f"{demo.CONFIG}{argument}")
        assert config.objective.name == objective


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ([], (demo.CONFIG, Path("work/demo_translation"))),
        (["--config=my/file.py", "--workdir=w"], ("my/file.py", Path("w"))),
    ],
)
def test_the_command_line_names_a_file_and_a_directory(monkeypatch, arguments, given):
    asked = []
    monkeypatch.setattr(demo, "run_demo", lambda *arguments: asked.append(arguments) or 0)
    assert cli.main(["demo", "--recipe=translation", *arguments]) == 0
    assert asked == [given]


@pytest.mark.parametrize(
    ("there", "arguments"),
    [
        (masked_words.RECIPES["modern"].config, ["--recipe=translation"]),
        (demo.CONFIG, []),
        (f"{demo.CONFIG}:recurrent", ["--recipe=translation"]),
    ],
)
def test_a_directory_of_another_demo_is_refused(tmp_path, capsys, there, arguments):
    config = load_config(PretrainConfig, there).with_vocabulary(64)
    begin_workdir(tmp_path / "run", config, None)
    assert cli.main(["demo", f"--workdir={tmp_path}", *arguments]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path / 'run'} holds a run with objective.name '{config.objective.name}'" in said
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("workdir", ["w", "."])
def test_next_commands_are_ones_that_the_command_line_takes(workdir):
    verbs = []
    for words in demo._next_commands(Path(workdir)):
        verbs.append(words[0])
        asked = read(verb_class(words[0]), words[0], words[1:])
        place = asked.model if words[0] == "translate" else asked.workdir
        assert Path(place) in (Path(workdir, "run"), Path(workdir, "recurrent"))
        assert not asked.overrides
    assert verbs == ["translate", "replay", "demo"]
    load_config(PretrainConfig, asked.config)


@pytest.mark.parametrize(("signal", "code"), [("SIGINT", 130), ("SIGTERM", 0)])
def test_a_stopped_demo_ends_with_the_code_of_the_signal(tmp_path, monkeypatch, signal, code):
    for name, value in {"NUM_TRAIN": 60, "NUM_UNSEEN": 8, "FIRST_DRAWN": 30}.items():
        monkeypatch.setattr(demo, name, value)
    stopped = SimpleNamespace(finished=False, stopped_by=signal)
    monkeypatch.setattr(demo, "train", lambda *_: stopped)
    assert cli.main(["demo", "--recipe=translation", f"--workdir={tmp_path}"]) == code


def test_short_form_goes_all_the_way(tmp_path, capsys, monkeypatch):
    for name, value in {"NUM_TRAIN": 60, "NUM_UNSEEN": 8, "FIRST_DRAWN": 30}.items():
        monkeypatch.setattr(demo, name, value)
    (tmp_path / "tiny.py").write_text(TINY)
    arguments = [
        "demo",
        "--recipe=translation",
        f"--config={tmp_path}/tiny.py",
        f"--workdir={tmp_path}",
    ]
    assert cli.main(arguments) == 1  # nothing is learned
    said = capsys.readouterr().out
    assert "step 2" in said
    assert "Mistakes, 6 of 8:" in said
    assert "0.00% of 8 unseen numbers exact" in said
    page = (tmp_path / "attention.html").read_text("utf-8")
    assert "quatre" in page
    assert f"{tmp_path / 'attention.html'}: open it in a browser" in said
    known, unseen = (
        demo.Sides(tmp_path / f"{name}.words.txt", tmp_path / f"{name}.digits.txt").lines()
        for name in ("train", "unseen")
    )
    assert (len(known), len(unseen)) == (60, 8)
    assert not set(known) & set(unseen)
    assert all(words == french_words(int(digits)) for words, digits in known + unseen)

    files = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.txt")}
    assert cli.main(arguments) == 1  # goes on with what is there
    assert capsys.readouterr().out.count("is there already") == 6
    assert files == {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.txt")}
