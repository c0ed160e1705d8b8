"""What a text is written in, and the speed of a real step."""

import functools
from collections.abc import Iterator
from types import SimpleNamespace

import jax
import pytest
from small_run import write_corpus

from bert_jax.cli.start import look
from bert_jax.cli.start.recipe import Size, recipe
from bert_jax.distributed.parallel.sharding import make_mesh
from bert_jax.training.steps.step import make_train_step

ENGLISH = "It is a truth universally acknowledged, that a single man must be in want of a wife. "
THAI = "ภาษาไทยเป็นภาษาที่เขียนโดยไม่เว้นวรรคระหว่างคำ"
JAPANESE = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。"
FRENCH = "Été comme hiver, l'élève espère réussir à lire ce livre où il a été question de forêts. "


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize(
    ("text", "first", "spaced", "accents"),
    [
        (ENGLISH, "Latin 100%", True, False),
        (FRENCH, "Latin 100%", True, True),
        (THAI, "Thai 100%", False, False),
        (JAPANESE, "Hiragana ", False, False),
        ("Все счастливые семьи похожи друг на друга. ", "Cyrillic 100%", True, False),
    ],
)
def test_a_text_shows_its_scripts_spaces_and_accents(text, first, spaced, accents):
    writing = look.look_at([text] * 20)
    assert writing.scripts.startswith(first)
    assert (writing.spaced, writing.accents) == (spaced, accents)


def test_few_accents_or_words_of_another_script_change_nothing():
    assert not look.look_at([ENGLISH] * 20 + ["café "]).accents
    writing = look.look_at([ENGLISH * 50 + THAI])
    assert writing.spaced
    mixed = look.look_at([ENGLISH, JAPANESE, JAPANESE]).scripts
    assert {part.split()[0] for part in mixed.split(", ")} == {"Latin", "Hiragana", "Han"}


def test_a_text_without_letters_is_taken_for_spaced():
    for texts in ([], [""], ["1, 2, 3!"]):
        assert look.look_at(texts) == look.Writing("", True, False)


def test_only_the_beginning_of_a_long_text_is_read(monkeypatch):
    monkeypatch.setattr(look, "_SAMPLE_CHARS", 100)

    def texts():
        yield ENGLISH * 2
        pytest.fail("more was read than the sample")

    assert look.look_at(texts()).scripts == "Latin 100%"
    assert look.look_at([ENGLISH[:90] + THAI * 9]).spaced  # 10 of 100 characters


def test_larger_texts_have_larger_vocabularies():
    sizes = [look.vocabulary_size(10**power) for power in range(14)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] < 2**16  # ids have 16 bits
    assert all(size % 128 == 0 for size in sizes)


def test_the_machine_has_a_name():
    assert look.machine().endswith(" CPU cores")


@pytest.mark.parametrize(
    ("least", "enough", "seconds"),
    [(3, 0.0, 2.0), (1, 7.5, 2.0), (1, 8.5, 3.0)],
)
def test_steps_are_timed_without_the_first_until_it_is_enough(
    corpus, monkeypatch, least, enough, seconds
):
    """The first compiles; the median of the others counts."""
    took = iter([100.0, 1.0, 5.0, 2.0, 4.0, 3.0])
    now = [0.0]

    def clock() -> Iterator[float]:
        while True:
            yield now[0]
            now[0] += next(took)
            yield now[0]

    monkeypatch.setattr(look, "time", SimpleNamespace(perf_counter=clock().__next__))
    monkeypatch.setattr(look, "make_mesh", lambda mesh: make_mesh(mesh, jax.devices()[:1]))
    monkeypatch.setattr(look, "make_train_step", functools.cache(make_train_step))
    monkeypatch.setattr(look, "_MEASURED_SECONDS", enough)
    monkeypatch.setattr(look, "_LEAST_STEPS", least)
    assert look.step_seconds(recipe(Size(2, 64)), corpus) == seconds
