import numpy as np
import pytest

from bert_jax.data.corpus.numbers import LIMIT, draw_numbers, french_words

KNOWN = {
    0: "zéro",
    1: "un",
    16: "seize",
    17: "dix-sept",
    20: "vingt",
    21: "vingt et un",
    22: "vingt-deux",
    61: "soixante et un",
    69: "soixante-neuf",
    70: "soixante-dix",
    71: "soixante et onze",
    77: "soixante-dix-sept",
    80: "quatre-vingts",
    81: "quatre-vingt-un",
    91: "quatre-vingt-onze",
    99: "quatre-vingt-dix-neuf",
    100: "cent",
    101: "cent un",
    180: "cent quatre-vingts",
    200: "deux cents",
    201: "deux cent un",
    1000: "mille",
    1001: "mille un",
    2000: "deux mille",
    21_000: "vingt et un mille",
    80_000: "quatre-vingt mille",
    80_080: "quatre-vingt mille quatre-vingts",
    200_000: "deux cent mille",
    200_200: "deux cent mille deux cents",
    999_999: "neuf cent quatre-vingt-dix-neuf mille neuf cent quatre-vingt-dix-neuf",
}
UNITS = """
    zéro un deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze quinze seize
"""
TENS = {"vingt": 20, "trente": 30, "quarante": 40, "cinquante": 50, "soixante": 60}
VALUES = {word: number for number, word in enumerate(UNITS.split())} | TENS


def value(text: str) -> int:
    """Read number words aloud: an addition of what is said, unless a word multiplies."""
    total = thousands = 0
    for word in text.replace("-", " ").replace(" et ", " ").split():
        word = {"cents": "cent", "vingts": "vingt"}.get(word, word)
        if word == "mille":
            thousands, total = max(total, 1), 0
        elif word == "cent":
            total = max(total, 1) * 100
        elif word == "vingt" and total % 100 == 4:
            total += 76
        else:
            total += VALUES[word]
    return 1000 * thousands + total


@pytest.mark.parametrize(("number", "words"), KNOWN.items())
def test_spelling(number, words):
    assert french_words(number) == words


def test_words_say_their_number():
    drawn = np.random.default_rng(0).integers(LIMIT, size=2000).tolist()
    numbers = [*range(1100), *range(79_990, 82_010), *drawn]
    assert [value(french_words(number)) for number in numbers] == numbers


@pytest.mark.parametrize("number", [-1, LIMIT])
def test_numbers_out_of_range_have_no_words(number):
    with pytest.raises(ValueError, match="expected 0 to 999,999"):
        french_words(number)


def test_unseen_numbers_are_in_no_training():
    numbers = draw_numbers(3000, 500, seed=1, first=1000)
    train, unseen = set(numbers.train.tolist()), set(numbers.unseen.tolist())
    assert (len(train), len(unseen)) == (3000, 500)
    assert train.isdisjoint(unseen)
    assert train.issuperset(range(1000))
    assert 1000 <= min(unseen) <= max(unseen) < LIMIT
    assert numbers.unseen.mean() == pytest.approx(LIMIT / 2, rel=0.1)
    again, other = (draw_numbers(3000, 500, seed, first=1000) for seed in (1, 2))
    np.testing.assert_array_equal(numbers.train, again.train)
    assert unseen != set(other.unseen.tolist())
    with pytest.raises(ValueError, match="it must be at least first, which is 5001"):
        draw_numbers(5000, 1, seed=0, first=5001)
