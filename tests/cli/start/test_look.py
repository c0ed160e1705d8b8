"""What a text is written in, and which machine this is."""

import pytest

from bert_jax.cli.start import look

ENGLISH = "It is a truth universally acknowledged, that a single man must be in want of a wife. "
THAI = "ภาษาไทยเป็นภาษาที่เขียนโดยไม่เว้นวรรคระหว่างคำ"
JAPANESE = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。"
HINDI = "मैं घर में हूँ और मेरी बहन बाज़ार में है। "
RUSSIAN = "Мой дедушка живёт в старом доме, и каждый день он ловит рыбу. "
FRENCH = "Été comme hiver, l'élève espère réussir à lire ce livre où il a été question de forêts. "


@pytest.mark.parametrize(
    ("text", "first", "spaced", "accents"),
    [
        (ENGLISH, "Latin 100%", True, False),
        (FRENCH, "Latin 100%", True, True),
        (THAI, "Thai 100%", False, False),
        (JAPANESE, "Hiragana ", False, False),
        (HINDI, "Devanagari 100%", True, True),  # without vowel signs, two words are equal
        (RUSSIAN, "Cyrillic 100%", True, True),  # two letters consist of a letter and a sign
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
