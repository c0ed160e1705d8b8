"""The configuration files: each builds, and has the size in its name."""

import importlib.util
import math
import re
import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import pytest
from made_plans import made_plan

from bert_jax.cli import main as cli
from bert_jax.config.command_line import load_config, overridden
from bert_jax.errors import UserError
from bert_jax.model.config import SIZES
from bert_jax.model.heads import init_params
from bert_jax.objectives.objective import num_params
from bert_jax.planning import compile as plan_compile
from bert_jax.planning import planner
from bert_jax.planning.command import startable
from bert_jax.planning.topology import parse_topology
from bert_jax.training.pretrain.config import PretrainConfig
from bert_jax.training.pretrain.settings import objective_of

CONFIGS = Path(__file__).parent.parent / "configs"
RECIPES = [path for room in ("pretrain", "translate") for path in (CONFIGS / room).glob("*.py")]
MODERN = {
    "modernbert_base": (50368, 149_655_232),
    "modernbert_large": (50368, 395_881_664),
    "ettin_17m": (50368, 16.9e6),
    "ettin_32m": (50368, 32.1e6),
    "ettin_68m": (50368, 68.5e6),
    "ettin_150m": (50368, 149_655_232),
    "ettin_400m": (50368, 395_881_664),
    "ettin_1b": (50368, 1031e6),
    "neobert": (30522, 245_136_954),  # the sum of its 172 tensors
    "deberta_v3_base": (128100, 183_831_552 + 768 * 768 + 3 * 768 + 128_100),  # and a head
    "eurobert_210m": (128256, 310_266_624),  # the name leaves out the output table
}
"""Published tokens of the vocabulary and parameters, those of the masked-LM head among them."""


@pytest.mark.parametrize("path", sorted(RECIPES), ids=lambda path: path.stem)
def test_configuration_builds(path: Path) -> None:
    load_config(PretrainConfig, str(path))


@pytest.mark.parametrize("size", SIZES)
def test_size_is_the_published_one(size: str) -> None:
    config = load_config(PretrainConfig, f"configs/pretrain/bert_{size}.py").model
    shape = ("hidden_dim", "num_layers", "num_heads", "mlp_dim", "num_positions", "norm_eps")
    for field in (*shape, "hidden_dropout_rate", "attention_dropout_rate", "activation"):
        assert getattr(config, field) == getattr(SIZES[size], field), field


@pytest.mark.parametrize("name", MODERN)
def test_parameters_are_the_published_ones(name: str) -> None:
    vocab_size, published = MODERN[name]
    config = load_config(PretrainConfig, f"pretrain/{name}").with_vocabulary(vocab_size).model
    shapes = jax.eval_shape(partial(init_params, config), jax.random.key(0))
    # Rows that pad the vocabulary are no parameters of the published model.
    padded = config.padded_vocab_size
    sizes = [
        math.prod(vocab_size if n == padded else n for n in leaf.shape)
        for leaf in jax.tree.leaves(shapes)
    ]
    missing = 0 if config.first_norm else config.hidden_dim
    count = sum(sizes) - missing
    assert count == published if isinstance(published, int) else abs(count / published - 1) < 0.01


@pytest.mark.parametrize(
    ("name", "vocab_size", "published"),
    [("transformer_base", 37000, 65e6), ("multi30k_tiny", 10000, 2.6e6)],
)
def test_translators_have_the_published_sizes(name: str, vocab_size: int, published: float) -> None:
    config = load_config(PretrainConfig, f"translate/{name}").with_vocabulary(vocab_size)
    assert num_params(objective_of(config)) == pytest.approx(published, rel=0.04)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("modernbert_base", 2.019e12), ("modernbert_large", 2.019e12), ("ettin_17m", 2e12),
     ("ettin_1b", 1.8e12), ("neobert", 2.2e12), ("eurobert_210m", 5e12)],
)  # fmt: skip
def test_recipes_see_the_published_tokens(name: str, tokens: float) -> None:
    config = load_config(PretrainConfig, name)
    assert sum(p.num_rows * p.length for p in config.phases) == pytest.approx(tokens, rel=0.01)


@pytest.mark.parametrize(
    ("name", "steps", "tokens"),
    [("ettin_17m", 6782, 4e9), ("ettin_400m", 2906, 2e9), ("ettin_1b", 1756, 2e9),
     ("modernbert_base", 5086, 3e9), ("modernbert_large", 2906, 2e9)],
)  # fmt: skip
def test_rates_warm_up_over_the_published_tokens(name: str, steps: int, tokens: float) -> None:
    """The rows of a step grow meanwhile."""
    config = load_config(PretrainConfig, name)
    assert config.warmup_steps == steps
    (first, left), phase = (0, steps), config.phases[0]
    for count, rows in phase.stages:
        first, left = first + min(count, left) * rows, max(left - count, 0)
    assert first * phase.length == pytest.approx(tokens, rel=1e-3)


ROOT = CONFIGS.parent
SLICE = r"(?:v\d\w?|tpu7x):\d+(?:x\d+)+(?:,slices=\d+)?"
PAGES = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *RECIPES]


def shown_plans() -> Iterator[tuple[str, list[str], str]]:
    """Yield recipe, overrides and slice of the plans that pages show, predict or say to start."""
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for command in re.findall(r"bert-jax plan (--config=[^\n`]*)", text):
            words = shlex.split(command)
            fields = [word for word in words if word.startswith("--config.")]
            for word in words:
                if word.startswith("--topology="):
                    yield words[0].removeprefix("--config="), fields, word[11:]
    table = (ROOT / "docs/planning.md").read_text()
    for recipe, chips, counts, mesh in re.findall(
        rf"^\| `(\w+)` \| ({SLICE}) \| ([\d, ]+) \|(.*)\|$", table, re.M
    ):
        for count in counts.split(","):
            fields = [f"--config.{each}" for each in re.findall(r"`([^`]+)`", mesh)]
            yield recipe, [*fields, f"--config.training.accumulation={count.strip()}"], chips
    predicted = (ROOT / "docs/benchmarks.md").read_text()
    for recipe, chips in re.findall(rf"^\| (\w+) \| [^|]+ \| [^|]+ \| ({SLICE}) ", predicted, re.M):
        yield recipe if "_" in recipe else f"bert_{recipe}", [], chips


@pytest.mark.parametrize("shown", list(shown_plans()), ids=lambda shown: f"{shown[0]} {shown[2]}")
def test_a_recipe_starts_on_each_slice_that_its_page_names(
    shown: tuple[str, list[str], str],
) -> None:
    recipe, fields, chips = shown
    config = load_config(PretrainConfig, recipe, fields)
    startable(config, parse_topology(chips))


def test_no_slice_is_named_without_a_plan_or_a_start() -> None:
    """Whatever the docstring of a recipe or the table of predictions names, a test above starts."""
    found = {(Path(recipe).stem, chips) for recipe, _, chips in shown_plans()}
    missing = []
    for path in RECIPES:
        for chips in re.findall(SLICE, path.read_text()):
            if not any(name.startswith(path.stem) and chips == given for name, given in found):
                missing.append((path.stem, chips))
    table = (ROOT / "docs/guide/costs.md").read_text()
    rows = re.findall(rf"^\| `(\w+)` +\| +({SLICE}) \|", table, re.M)
    missing += [row for row in rows if row not in found]
    assert not missing
    assert len(found) >= 20


@pytest.mark.parametrize("options", [[], ["--phase=all", "--json"]])
def test_plan_refuses_what_train_refuses_and_says_what_it_rounds(
    options: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "compile_step", made_plan)
    plan = ["plan", "--config=modernbert_large", "--config.model.vocab_size=50368", *options]
    assert cli.main([*plan, "--topology=v5p:4x4x4", "--config.training.accumulation=2"]) == 0
    said = "v5p:4x4x4: batch warm-up of phase 0: steps of 512, 1,152, 2,304 rows instead of 576"
    assert said in capsys.readouterr().err
    assert cli.main([*plan, "--topology=v5e:16x16"]) == 2
    assert "phases[1].batch_size is 640; it must be a multiple of 256" in capsys.readouterr().err


def test_a_size_is_part_of_the_name() -> None:
    given = [load_config(PretrainConfig, name) for name in (
        "ettin_17m", "pretrain/ettin:17m", "configs/pretrain/ettin_17m.py", "pretrain/ettin_17m",
    )]  # fmt: skip
    assert all(config == given[0] for config in given)
    assert given[0] != load_config(PretrainConfig, "ettin_32m")
    with pytest.raises(UserError, match="the size is '9b'; expected one of 17m, 32m"):
        load_config(PretrainConfig, "ettin_9b")
    with pytest.raises(UserError, match="there is no file 'nothing_17m'"):
        load_config(PretrainConfig, "nothing_17m")


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="planning needs libtpu")
@pytest.mark.parametrize("name", ["ettin_17m", "neobert", "eurobert_210m"])
def test_the_last_phase_can_be_planned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lowered = []
    answer = {"refused": "", "seconds": 0.0, "memory": None, "hlo": ""}
    monkeypatch.setattr(plan_compile, "_compile", lambda step: lowered.append(step) or answer)
    config = load_config(PretrainConfig, name).with_vocabulary(MODERN[name][0])
    last = len(config.training.phases) - 1
    batch = f"--config.training.phases[{last}].batch_size=4"
    config = overridden(config, ["--config.model.scan_unroll=1", batch])
    plan = plan_compile.compile_step(config, last, parse_topology("v5e:2x2"), cache=None)
    (step,) = lowered
    assert plan.fits
    # Attention of long rows, global and local, is a kernel on a TPU.
    assert "tpu_custom_call" in step.as_text()
