"""What a text is written in, and the speed of a real step."""

from collections.abc import Iterator
from types import SimpleNamespace

import jax
import pytest
from small_run import write_corpus

from bert_jax.cli.start import look
from bert_jax.cli.start.recipe import Size, recipe
from bert_jax.distributed.parallel.sharding import make_mesh

ENGLISH = "It is a truth universally acknowledged, that a single man must be in want of a wife. "
THAI = "ภาษาไทยเป็นภาษาที่เขียนโดยไม่เว้นวรรคระหว่างคำ"
JAPANESE = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。"
FRENCH = "Été comme hiver, l'élève espère réussir à lire ce livre où il a été question de forêts. "


@pytest.mark.parametrize(
    ("text", "first", "spaced", "accents"),
    [
        (ENGLISH, "Latin 100%", True, False),
        (FRENCH, "Latin 100%", True, True),
        (THAI, "Thai 100%", False, False),
        (JAPANESE, "Hiragana ", False, False),
        ("모든 행복한 가정은 서로 닮았다. ", "Hangul 100%", True, False),
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


def test_a_step_of_a_recipe_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(look, "make_mesh", lambda mesh: make_mesh(mesh, jax.devices()[:1]))
    monkeypatch.setattr(look, "_MEASURED_SECONDS", 0.0)
    monkeypatch.setattr(look, "_LEAST_STEPS", 1)
    assert look.step_seconds(recipe(Size(2, 64)), write_corpus(tmp_path)) > 0


@pytest.mark.parametrize(
    ("least", "enough", "seconds"),
    [(3, 0.0, 2.0), (1, 7.5, 2.0), (1, 8.5, 3.0)],
)
def test_steps_are_timed_without_the_first_until_it_is_enough(
    tmp_path, monkeypatch, least, enough, seconds
):
    """The first compiles; the median of the others counts."""
    took = iter([100.0, 1.0, 5.0, 2.0, 4.0, 3.0])

    def clock() -> Iterator[float]:
        now = 0.0
        for each in took:
            yield now
            now += each
            yield now

    monkeypatch.setattr(look, "time", SimpleNamespace(perf_counter=clock().__next__))
    monkeypatch.setattr(look, "jitted_init", lambda *_: lambda key: None)
    monkeypatch.setattr(look, "make_train_step", lambda *_: lambda state, batch: (state, {}))
    monkeypatch.setattr(look, "place_batch", lambda batch, mesh: batch)
    monkeypatch.setattr(look, "_MEASURED_SECONDS", enough)
    monkeypatch.setattr(look, "_LEAST_STEPS", least)
    assert look.step_seconds(recipe(Size(2, 64)), write_corpus(tmp_path)) == seconds
