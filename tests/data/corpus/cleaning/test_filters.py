import pytest

from bert_jax.data.corpus.cleaning.clean import (
    Cleaner,
    CleaningConfig,
    Dropped,
    DropReport,
    identify,
)
from bert_jax.data.corpus.cleaning.filters import EDITS, FILTERS, GROUPS, Prose, resolve_filters
from bert_jax.errors import UserError

PROSE = (
    "The river rises in the hills above the town, and it runs for forty miles to the sea. "
    "People have fished there with nets that their parents made. "
    "In spring the water is high, so boats of all sizes come up from the harbour to be sold. "
    "Nobody who lives near the banks remembers a year without a market."
)


def dropped(spec: str, text: str) -> str | None:
    found = Cleaner(CleaningConfig(filters=(spec,))).clean(0, text)
    return found.reason if isinstance(found, Dropped) else None


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("words", "too short", "word " * 50),
        ("word-length", "a b c d", "some words here"),
        ("symbols", "one # two ... # three", "one two three four five six seven eight nine ten #"),
        ("bullets", "\n".join(["- item"] * 10), "\n".join(["- item"] * 9 + ["text"])),
        ("ellipses", "more ...\nmore…\nend\nend", "more ...\nend\nend\nend"),
        ("alphabetic", "1 2 3 four five", "1 two three four five"),
        ("stop-words", "der die das the", "The end of it"),
        ("repeated-lines", "a\na\na\nb", "a\na\nb\nc"),
        ("repeated-line-characters", "long line\nlong line\nb", "b\nb\nlong line"),
        ("top-2-gram", "buy now buy now or leave", "buy now or leave today " + "x" * 40),
        ("repeated-5-grams", "one two three four five " * 2, "one two three four five six seven"),
        ("sentences", "One. Two.", "One is here. Two is there. Three is gone."),
        ("lorem-ipsum", "Lorem Ipsum dolor", "dolor"),
        ("braces", "if (x) { y }", "if x then y"),
    ],
)
def test_a_filter_drops_what_its_source_drops(name: str, bad: str, good: str):
    assert dropped(name, bad) == name
    assert dropped(name, good) is None


def test_shares_by_hand():
    # Ten words with two hash signs and, spelled in two ways, three ellipses: the more of the two.
    assert FILTERS["symbols"].measure(Prose("# a # b ... c d… e … f")) == pytest.approx(0.3)
    assert FILTERS["symbols"].measure(Prose("# a # b ... c d e f g")) == pytest.approx(0.2)
    # 16 characters; "ab cd" twice has 8 of them, and "ab cd ef" is there once.
    text = Prose("ab cd ef ab cd gh ijkl")
    assert FILTERS["top-2-gram"].measure(text) == pytest.approx(8 / 16)
    longer = Prose("ab cd ab cd longer words")  # once, with more characters
    assert FILTERS["top-2-gram"].measure(longer) == pytest.approx(8 / 19)
    assert FILTERS["top-3-gram"].measure(text) == 0
    # Words 6 to 11 repeat words 0 to 5: two 5-grams that overlap, each character counted once.
    words = "aa bb cc dd ee ff"
    assert FILTERS["repeated-5-grams"].measure(Prose(f"{words} {words}")) == pytest.approx(0.5)


BOUNDS = {  # Rae et al. 2021, A.1.1 and table A1; Raffel et al. 2020, section 2.2
    "words": (50, 100_000), "word-length": (3, 10), "symbols": (None, 0.1), "bullets": (None, 0.9),
    "ellipses": (None, 0.3), "alphabetic": (0.8, None), "stop-words": (2, None),
    "repeated-lines": (None, 0.3), "repeated-line-characters": (None, 0.2),
    "top-2-gram": (None, 0.2), "top-3-gram": (None, 0.18), "top-4-gram": (None, 0.16),
    "repeated-5-grams": (None, 0.15), "repeated-6-grams": (None, 0.14),
    "repeated-7-grams": (None, 0.13), "repeated-8-grams": (None, 0.12),
    "repeated-9-grams": (None, 0.11), "repeated-10-grams": (None, 0.1),
    "sentences": (3, None), "lorem-ipsum": (None, 0), "braces": (None, 0),
}  # fmt: skip


def test_bounds_are_those_of_the_publications():
    found = CleaningConfig(filters=("gopher", "c4")).record()["filters"]
    assert {name: (each["low"], each["high"]) for name, each in found.items()} == BOUNDS


def test_words_are_looked_at_without_their_punctuation():
    assert FILTERS["alphabetic"].measure(Prose("rivers, (1990s) 12 -- end.")) == pytest.approx(0.6)
    assert FILTERS["stop-words"].measure(Prose('"The" bank (of), the and? that')) == 4


@pytest.mark.parametrize("mark", "•‣●▪◦-*")
def test_each_bullet_is_one(mark):
    assert dropped("bullets", "\n".join([f"{mark} item"] * 10)) == "bullets"


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("citation-marks", "Known[1] since [citation needed] then.\n[edit]", "Known since  then."),
        ("terminal-punctuation", "A title\nA sentence.\nMore...\n“Said.”", "A sentence.\n“Said.”"),
        ("short-lines", "four words are few\nfive words are just enough", "five words are just "
         "enough"),
        ("javascript", "Enable JavaScript to go on.\nText.", "Text."),
        ("policies", "We have a Cookie Policy.\nText.", "Text."),
    ],
)  # fmt: skip
def test_an_edit_leaves_lines_out(name: str, before: str, after: str):
    cleaner = Cleaner(CleaningConfig(filters=(name,)))
    assert cleaner.clean(0, before) == after
    gone = before.count("\n") - after.count("\n")
    assert cleaner.report.record() == {"dropped": {}, "dropped_lines": {name: gone} if gone else {}}


def test_prose_passes_every_filter():
    assert Cleaner(CleaningConfig(filters=("gopher", "c4"))).clean(0, PROSE) == PROSE


def test_groups_name_filters_and_edits_that_are_there():
    assert {name for names in GROUPS.values() for name in names} == {*FILTERS, *EDITS}


def test_bounds_can_be_given():
    _, filters = resolve_filters(["gopher", "words=3:"])
    assert (filters["words"].low, filters["words"].high) == (3, float("inf"))
    assert dropped("words=3:4", "three words here") is None
    assert dropped("words=:2", "three words here") == "words"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("word", "there is no filter 'word'. Did you mean 'words'?"),
        ("words=many:", "'many:' are not LOW:HIGH"),
        ("words=9:3", "'9:3' are not LOW:HIGH"),
        ("words=9", "'9' are not LOW:HIGH"),
        ("gopher=1:2", "gopher has no bounds"),
    ],
)
def test_an_unknown_filter_is_named(spec: str, said: str):
    with pytest.raises(UserError, match="--filter") as error:
        CleaningConfig(filters=(spec,))
    assert said in f"{error.value}"


def test_documents_of_other_languages_are_dropped():
    pytest.importorskip("py3langid")
    cleaner = Cleaner(CleaningConfig(language="de"))
    german = "Der Fluss entspringt in den Bergen über der Stadt und fließt bis zum Meer."
    assert cleaner.clean(0, german) == german
    found = cleaner.clean(1, PROSE)
    assert isinstance(found, Dropped)
    assert found.detail.startswith("en with probability")
    assert cleaner.report.record()["dropped"] == {"language": 1}
    with pytest.raises(UserError, match="--language is 'deu', which py3langid does not know"):
        CleaningConfig(language="deu")


def test_a_language_is_dropped_below_the_threshold():
    pytest.importorskip("py3langid")
    text = "Das war es"
    language, probability = identify(text)
    assert language == "de"
    assert 0.5 < probability < 0.95
    cleaners = [
        Cleaner(CleaningConfig(language="de", language_threshold=probability + more))
        for more in (-0.01, 0.01)
    ]
    dropped = Dropped("language", f"de with probability {probability:.2f} only")
    assert [cleaner.clean(0, text) for cleaner in cleaners] == [text, dropped]


def test_a_document_without_lines_is_dropped_for_that():
    assert dropped("javascript", "Please enable JavaScript.") == "no-lines-left"


def test_samples_are_the_same_however_the_documents_were_divided(tmp_path):
    texts = [f"text {number}" for number in range(50)]
    config = CleaningConfig(filters=("words",))
    whole = Cleaner(config, source="a", samples=3)
    parts = [Cleaner(config, source="a", samples=3) for _ in range(3)]
    for number, text in enumerate(texts):
        whole.clean(number, text)
        parts[number % 3].clean(number, text)
    merged = DropReport(3)
    for part in reversed(parts):
        merged.merge(vars(part.report))
    assert merged == whole.report
    merged.write_samples(tmp_path / "dropped")
    assert len((tmp_path / "dropped" / "words.jsonl").read_text().splitlines()) == 3
