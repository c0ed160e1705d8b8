"""Options of verbs as fields of dataclasses, and the first page of the command."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pytest

from bert_jax.cli import main as cli
from bert_jax.cli.verbs.groups import Columns
from bert_jax.cli.verbs.options import Commas, Given, Text, Verb, options, read
from bert_jax.config.bounds import AtLeast
from bert_jax.errors import UserError

FIRST = [
    "start", "pretrain", "finetune", "evaluate", "predict", "export", "search", "plan", "demo",
]  # fmt: skip


class Group(Verb):
    """Options of a group."""

    TITLE: ClassVar[str] = "the group"

    rate: Annotated[float, AtLeast(0)] = 0.5
    """Rate."""


class Try(Group):
    """Try everything."""

    model: Given[Annotated[str, "MODEL"]]
    """Model."""
    texts: Given[tuple[Text, ...]] = ()
    """Texts."""
    mode: Literal["fast", "slow"] = "slow"
    """Mode in 100% of the cases."""
    sizes: Commas[int] = ()
    """Sizes."""
    several: tuple[Path, ...] = ()
    """Files."""
    sides: tuple[Path, Path] | None = None
    """Two files."""
    pairs: tuple[tuple[Path, ...], ...] = ()
    """Pairs of files."""
    keep: bool | None = None
    """Whether to keep."""
    quick: bool = False
    """Whether to hurry."""


def test_arguments_become_values_of_the_annotated_types(monkeypatch):
    monkeypatch.setenv("HOME", "/home/kim")
    given = [
        "--mode=fast", "m", "~ a", "--sizes=1, 2", "--several=~/a", "--several", "b", "--sides",
        "c", "d", "--pairs", "e", "f", "--pairs", "g", "--no-keep", "--quick", "--rate=2", "--",
        "--x",
    ]  # fmt: skip
    found = read(Try, "try", given)
    assert found.command_line.startswith("bert-jax try --mode=fast m '~ a'")
    assert (found.model, found.texts, found.mode) == ("m", ("~ a", "--x"), "fast")
    assert (found.sizes, found.several) == ((1, 2), (Path("/home/kim/a"), Path("b")))
    assert found.sides == (Path("c"), Path("d"))
    assert found.pairs == ((Path("e"), Path("f")), (Path("g"),))
    assert (found.keep, found.quick, found.rate) == (False, True, 2.0)
    assert read(Try, "try", ["m"]) == Try(model="m", command_line="bert-jax try m")
    assert read(Try, "try", ["m", "--rate=1"]).given(Group) == ["--rate"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["m", "--rate=-1"], "--rate is -1.0; it must be at least 0"),
        (["m", "--rate=nan"], "--rate is nan; it must be a finite number"),
        (["m", "--sizes=1,x"], "--sizes is x; it must be a whole number"),
        (
            ["m", "--mode=fats"],
            "--mode is 'fats'; it must be one of fast, slow; did you mean fast?",
        ),
        (["m", "--quik"], "unknown option --quik; did you mean --quick?"),
        (["m", "--sides", "a"], "--sides"),
        (["m", "--config.a=1"], "unknown option --config.a"),
        ([], "MODEL"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments, said):
    with pytest.raises(UserError) as error:
        read(Try, "try", arguments)
    assert said in f"{error.value}"


class Configured(Verb):
    """Take overrides."""

    CONFIGURED: ClassVar[bool] = True


def test_only_paths_of_fields_lead_home(monkeypatch):
    """A separator ~ became the home directory, so that a row's labels became one label."""
    monkeypatch.setenv("HOME", "/home/kim")
    given = ["--config.init=~/m", "--config.task.separator=~"]
    wanted = ("--config.init=/home/kim/m", "--config.task.separator=~")
    assert read(Configured, "try", given).overrides == wanted


def test_columns_are_named_in_one_way():
    columns = Columns(columns=("text=a, b,label=2", "delimiter=,,header=False"))
    assert columns.named("text", "label") == (
        {"text": "a, b", "label": "2"}, {"delimiter": ",", "header": False},
    )  # fmt: skip
    for wrong in ("text", "txt=a", "header=no", "delimiter="):
        with pytest.raises(UserError, match="--columns has"):
            Columns(columns=(wrong,)).named("text")
    of_task = Columns(columns=("choices=a,b,text_pair=",))  # the task knows its fields
    assert of_task.named() == ({"choices": "a,b", "text_pair": ""}, {})
    for wrong in ("text", "header=", "delimiter="):
        with pytest.raises(UserError, match="--columns has"):
            Columns(columns=(wrong,)).named()


def test_every_option_is_explained_in_the_help(capsys):
    for name in cli.MODULES:
        with pytest.raises(SystemExit):
            cli.main([name, "--help"])
        said = capsys.readouterr().out
        assert said.startswith(f"usage: bert-jax {name} ")
        for option in options(cli.verb_class(name)):
            assert option.is_positional or option.flag in said
        assert all(line.rstrip() for line in said.split("options:")[0].splitlines()[:1])
        if name == "tokenizer":
            told = " ".join(said.split())
            assert "(default: 30522)." in told
            assert told.count("must cover (default: at least 0.9995)") == told.count("0.9995") == 1
    assert "(default: 1.0)" not in said


def test_a_place_has_one_word_and_a_thing_one_option():
    found = {}
    for name in cli.MODULES:
        for option in options(cli.verb_class(name)):
            found.setdefault(option.flag, []).append(name)
    assert len(found) <= 129, len(found)
    gone = {"--png", "--licence", "--field", "--text-column", "--table", "--nbest", "--layer"}
    assert not gone & found.keys()


def test_nine_verbs_come_first_and_each_has_a_line(capsys):
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    verbs = [line.split()[0] for line in lines if line.startswith("  ")]
    assert verbs[: len(FIRST)] == FIRST
    assert sorted(verbs) == sorted(cli.MODULES)
    assert all(len(line) <= 80 for line in lines if line.startswith("  "))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pretrian"], "did you mean pretrain?"),
        (["train"], "this verb was renamed to pretrain"),
        ([], "bert-jax --help lists all"),
        (["status", "w", "--png=x"], "--png is now --plot"),
        (["corpus", "--licence=x"], "--licence is now --license"),
        (["mine", "m", "p", "--corpus=x"], "--corpus is now --input"),
        (["inspect", "c", "--out=x"], "--out is now --plot"),
        (["export", "m", "--to=huggingfce", "--out=o"], "did you mean huggingface?"),
    ],
)
def test_what_is_misspelled_or_old_is_refused_with_the_right_word(arguments, said, capsys):
    assert cli.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_the_first_page_imports_no_jax():
    ask = (
        "import sys; from bert_jax.cli.main import main; main(['--help']); main(['--version']); "
        "sys.exit(bool({'jax', 'flax', 'numpy', 'ml_collections'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", ask], stdout=subprocess.DEVNULL).returncode == 0


def test_a_reader_that_closes_the_pipe_is_no_error():
    """Few words wait in a buffer until the end, which finds the pipe closed."""
    ask = (
        "import sys; from bert_jax.cli import main as cli; "
        "cli.read = lambda *_: lambda: print('few words') or 1; sys.exit(cli.main(['status']))"
    )
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    end, pipe = os.pipe()
    os.close(end)
    done = subprocess.run(
        [sys.executable, "-c", ask], stdout=pipe, stderr=subprocess.PIPE, env=environment
    )
    os.close(pipe)
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_shell_completes_verbs_options_and_choices(tmp_path):
    pytest.importorskip("argcomplete", reason="argcomplete is not installed")

    def completed(line: str) -> set[str]:
        out = tmp_path / "completed"
        environ = os.environ | {
            "_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": f"{out}", "COMP_LINE": line,
            "COMP_POINT": f"{len(line)}", "_ARGCOMPLETE_IFS": "\n",
        }  # fmt: skip
        code = "from bert_jax.cli.main import main; main()"
        subprocess.run([sys.executable, "-c", code], env=environ, check=False)
        return {word.strip() for word in out.read_text().split("\n")}

    assert completed("bert-jax fin") == {"finetune"}
    assert {"--out", "--on-error"} <= completed("bert-jax tag --o")
    assert completed("bert-jax export m --to hug") == {"huggingface"}
