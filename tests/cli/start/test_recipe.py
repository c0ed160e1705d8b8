"""Every size as a configuration and as a file that says the same."""

import ast
from itertools import pairwise

import pytest

from bert_jax.cli.start.recipe import SIZES, Size, as_file, recipe, tokens_per_step
from bert_jax.config.command_line import load_config
from bert_jax.config.mapping import to_dict
from bert_jax.training.pretrain.config import PretrainConfig

CORPUS = "work/my corpus"


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_recipe_written_as_a_file_is_read_back(tmp_path, size):
    config = recipe(size, 1234, CORPUS, chips=4)
    file, title = tmp_path / "recipe.py", "Chosen for 3 hours.\n\nsize  2x64\n"
    file.write_text(as_file(config, title))
    assert to_dict(load_config(PretrainConfig, str(file))) == to_dict(config)
    tree = ast.parse(file.read_text())
    assert ast.get_docstring(tree, clean=False) == title
    assert ast.get_docstring(tree.body[1])
    assert config.model.hidden_dim == size.width
    assert config.model.num_layers == size.num_layers
    assert config.data.corpus == CORPUS
    assert config.training.num_steps == 1234


def test_a_script_of_the_user_with_the_recipes_name_is_not_read(tmp_path, monkeypatch):
    (tmp_path / "start.py").write_text("raise SystemExit('this script was run')\n")
    monkeypatch.chdir(tmp_path)
    assert recipe(SIZES[0]).model.hidden_dim == SIZES[0].width


def test_the_file_names_only_what_differs_from_the_defaults():
    said = as_file(recipe(SIZES[1]), "Title")
    assert "'positions': 'rope'" in said
    assert "'seed'" not in said
    assert "'accumulation'" not in said


@pytest.mark.parametrize("title", ['He said """no"""', "a\\new\\x", 'ends with "'])
def test_no_title_breaks_the_file(tmp_path, title):
    """Titles contain paths that the user named."""
    file = tmp_path / "recipe.py"
    config = recipe(SIZES[0])
    file.write_text(as_file(config, title))
    assert to_dict(load_config(PretrainConfig, str(file))) == to_dict(config)
    assert ast.get_docstring(ast.parse(file.read_text()), clean=False) == title


def test_each_chip_gets_the_rows_of_one():
    for size in (Size(2, 128), Size(8, 512)):
        one, many = recipe(size), recipe(size, chips=16)
        rows = [config.training.phases[0].batch_size for config in (one, many)]
        assert rows[1] == 16 * rows[0]
        assert tokens_per_step(many) == 16 * tokens_per_step(one) == 16 * rows[0] * 128


@pytest.mark.parametrize("num_steps", [1, 7, 50, 1000, 1_000_000])
def test_a_run_of_any_length_is_logged_evaluated_and_saved(num_steps):
    config = recipe(SIZES[0], num_steps)
    every = config.training.eval_every_steps
    assert config.checkpoint.save_every_steps == every
    assert 1 <= every <= num_steps
    assert num_steps / 5 <= every < num_steps / 5 + 1
    assert 1 <= config.training.log_every_steps <= min(100, max(1, num_steps // 50))


def test_larger_sizes_have_more_parameters_cost_more_and_learn_slower():
    for smaller, larger in pairwise(SIZES):
        assert larger.parameters > smaller.parameters
        assert larger.cost(2048) > smaller.cost(2048)
        rates = [recipe(size).optimizer.learning_rate for size in (smaller, larger)]
        assert rates[1] <= rates[0]
    assert str(Size(4, 256)) == "4x256"
    assert Size(2, 128).parameters == 2 * (4 + 3) * 128 * 128
