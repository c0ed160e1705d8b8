"""Entities and their scores: by hand, by the CoNLL script's own rules, and against seqeval."""

import functools
import itertools
import random
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.tasks.tagging.metrics import EntityScore, entity_scores
from bert_jax.tasks.tagging.schemes import Entity, convert, entities, strict_entities
from bert_jax.tasks.tagging.sources import read_columns


def tags_of(prefixes: str, length: int = 12):
    some = ["O", *(f"{p}-{kind}" for p in prefixes for kind in ("PER", "LOC"))]
    return st.lists(st.lists(st.sampled_from(some), min_size=1, max_size=length), min_size=1)


def conlleval(tags: list[str], *, letters: str = "BI") -> list[Entity]:
    """The script's two tables of transitions, kept apart as they are there."""
    ends = {"BB", "BO", "IB", "IO", "EE", "EI", "EO"}
    starts = {"BB", "IB", "OB", "OI", "EE", "EI", "OE"}
    assert {tag[0] for tag in tags} <= {*letters, "O"}
    found, begin, before, kind_before = [], 0, "O", ""
    for place, tag in enumerate([*tags, "O"]):
        now, _, kind = tag.partition("-")
        if before + now in ends or (before != "O" and kind_before != kind):
            found.append(Entity(kind_before, begin, place))
        if before + now in starts or (now != "O" and kind_before != kind):
            begin = place
        before, kind_before = now, kind
    return found


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("B-PER I-PER O B-LOC", [("PER", 0, 2), ("LOC", 3, 4)]),
        ("I-PER I-PER B-PER O I-LOC", [("PER", 0, 2), ("PER", 2, 3), ("LOC", 4, 5)]),
        ("O I-PER I-LOC", [("PER", 1, 2), ("LOC", 2, 3)]),  # the type changes
        ("B-PER B-PER I-LOC", [("PER", 0, 1), ("PER", 1, 2), ("LOC", 2, 3)]),
        ("B-PER I-PER E-PER S-PER S-PER", [("PER", 0, 3), ("PER", 3, 4), ("PER", 4, 5)]),
        ("B-PER E-PER I-PER E-PER O E-LOC", [("PER", 0, 2), ("PER", 2, 4), ("LOC", 5, 6)]),
        ("U-PER B-PER L-PER", [("PER", 0, 1), ("PER", 1, 3)]),
        ("B-a-b I-a-b I-a", [("a-b", 0, 2), ("a", 2, 3)]),
        ("B I O I", [("_", 0, 2), ("_", 3, 4)]),
        ("O O", []),
        ("", []),
    ],
)
def test_entities_by_hand(tags, expected):
    assert entities(tags.split()) == expected


@pytest.mark.parametrize(
    ("scheme", "tags", "expected"),
    [
        ("iob2", "I-PER O B-PER I-PER I-LOC B-LOC", [("PER", 2, 4), ("LOC", 5, 6)]),
        ("iob1", "I-PER B-PER I-PER O B-LOC I-LOC", [("PER", 0, 1), ("PER", 1, 3), ("LOC", 5, 6)]),
        ("iob1", "I-PER B-PER B-LOC", [("PER", 0, 1)]),
        ("iobes", "B-PER I-PER O B-LOC E-LOC S-LOC E-PER", [("LOC", 3, 5), ("LOC", 5, 6)]),
        ("iobes", "B-PER E-PER I-PER E-PER B-PER", [("PER", 0, 2)]),
    ],
)
def test_strict_by_hand(scheme, tags, expected):
    assert strict_entities(tags.split(), scheme) == expected


def test_no_tag():
    for tag in ("PER", "", "X-PER", "B-", "o"):
        with pytest.raises(ValueError, match="no tag"):
            entities(["O", tag])
    with pytest.raises(ValueError, match="'S-PER' is none of iob2"):
        strict_entities(["S-PER"], "iob2")


def test_scores_by_hand():
    gold = [["B-PER", "I-PER", "O", "B-LOC"], ["B-LOC"], ["I-LOC", "O"]]
    guess = [["B-PER", "I-PER", "O", "B-ORG"], ["B-LOC"], ["O", "I-LOC"]]
    scores = entity_scores(gold, guess)
    assert scores.per_type == {
        "LOC": EntityScore(correct=1, predicted=2, gold=3),
        "ORG": EntityScore(correct=0, predicted=1, gold=0),
        "PER": EntityScore(correct=1, predicted=1, gold=1),
    }
    assert list(scores.per_type) == ["LOC", "ORG", "PER"]
    assert scores.overall == (2, 4, 4)
    assert (scores.overall.precision, scores.overall.recall, scores.overall.f1) == (0.5, 0.5, 0.5)
    location = scores.per_type["LOC"]
    assert (location.precision, location.recall) == (1 / 2, 1 / 3)
    assert location.f1 == pytest.approx(2 * (1 / 2) * (1 / 3) / (1 / 2 + 1 / 3))
    assert scores.macro_f1 == pytest.approx((0.4 + 0 + 1) / 3)
    assert scores.token_accuracy == 4 / 7
    assert scores.table().splitlines() == [
        "          precision  recall      F1  entities",
        "LOC           50.00   33.33   40.00         3",
        "ORG            0.00    0.00    0.00         0",
        "PER          100.00  100.00  100.00         1",
        "all           50.00   50.00   50.00         4",
        "token accuracy 57.14",
    ]
    # Strictly, the third sentence has no entity.
    assert entity_scores(gold, guess, scheme="iob2").overall == (2, 3, 3)


@pytest.mark.parametrize(
    ("gold", "guess"),
    [
        ("B-PER I-PER O", "B-PER O O"),  # another end
        ("B-PER I-PER O", "O B-PER O"),  # another start
        ("B-PER I-PER O", "B-LOC I-LOC O"),  # another type
        ("B-PER O O", "O O B-PER"),  # elsewhere
        ("B-PER I-PER I-PER", "B-PER B-PER I-PER"),  # one as two
    ],
)
@pytest.mark.parametrize("scheme", [None, "iob2"])
def test_right_is_what_has_the_same_start_end_and_type(gold, guess, scheme):
    for one, two in ((gold, guess), (guess, gold)):
        assert entity_scores([one.split()], [two.split()], scheme=scheme).overall.correct == 0
        same = entity_scores([one.split()], [one.split()], scheme=scheme).overall
        assert same.correct == same.gold == same.predicted


def test_a_sentence_ends_its_entities():
    apart = entity_scores([["B-PER"], ["I-PER"]], [["B-PER"], ["I-PER"]])
    assert apart.overall.gold == 2
    # The same place in another sentence is another entity.
    crossed = entity_scores([["B-PER"], ["O"]], [["O"], ["B-PER"]])
    assert crossed.overall == (0, 1, 1)


def test_nothing_found():
    scores = entity_scores([["O", "O"]], [["O", "O"]])
    assert scores.overall == (0, 0, 0)
    assert (scores.overall.precision, scores.overall.recall, scores.overall.f1) == (0, 0, 0)
    assert (scores.macro_f1, scores.token_accuracy) == (0, 1)
    assert "all" in scores.table()
    missed = entity_scores([["B-PER", "O"]], [["O", "O"]])
    assert (missed.overall, missed.overall.recall) == ((0, 0, 1), 0)
    assert entity_scores([["O", "O"]], [["B-PER", "O"]]).overall == (0, 1, 0)


def test_refuses_unequal():
    with pytest.raises(ValueError, match="1 sentences in the data, 2 predicted"):
        entity_scores([["O"]], [["O"], ["O"]])
    with pytest.raises(ValueError, match="sentence 1: 2 tags, 1 predicted"):
        entity_scores([["O"], ["O", "O"]], [["O"], ["O"]])
    with pytest.raises(ValueError, match="no words"):
        entity_scores([], [])


def test_as_the_conll_script():
    """On all sequences of up to five tags with B, I and O."""
    some = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
    for length in range(6):
        for tags in itertools.product(some, repeat=length):
            assert entities(tags) == conlleval(list(tags)), tags


def test_where_the_conll_script_differs():
    """What the module says of it: two S are one to the script, and B after E begins nothing."""
    singles = ["S-PER", "S-PER"]
    assert conlleval(singles, letters="S") == [("PER", 0, 2)]
    assert entities(singles) == [("PER", 0, 1), ("PER", 1, 2)]
    after = ["B-PER", "E-PER", "B-PER", "E-PER"]
    assert conlleval(after, letters="BE") == [("PER", 0, 4)]
    assert entities(after) == [("PER", 0, 2), ("PER", 2, 4)]


SEQEVAL = {"iob1": "IOB1", "iob2": "IOB2", "iobes": "IOBES"}


def check_scores(gold, guess, scheme):
    import seqeval.metrics
    import seqeval.scheme

    options = {} if scheme is None else {"mode": "strict"}
    if scheme is not None:
        options["scheme"] = getattr(seqeval.scheme, SEQEVAL[scheme])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is not defined
        expected = seqeval.metrics.classification_report(
            gold, guess, output_dict=True, zero_division=0, **options
        )
        accuracy = seqeval.metrics.accuracy_score(gold, guess)
    scores = entity_scores(gold, guess, scheme=scheme)
    assert scores.token_accuracy == pytest.approx(accuracy)
    named = {**scores.per_type, "micro avg": scores.overall}
    assert scores.macro_f1 == pytest.approx(expected.pop("macro avg")["f1-score"])
    expected.pop("weighted avg")
    assert {name: (s.precision, s.recall, s.f1, s.gold) for name, s in named.items()} == {
        name: pytest.approx((e["precision"], e["recall"], e["f1-score"], e["support"]))
        for name, e in expected.items()
    }


@pytest.mark.parity
@pytest.mark.parametrize("scheme", [None, "iob1", "iob2", "iobes"])
def test_as_seqeval(scheme):
    """On tags of any soundness, such as a model predicts; both of its modes."""

    @settings(max_examples=150, deadline=None)
    @given(tags_of("BI" if scheme in ("iob1", "iob2") else "BIES"), st.randoms())
    def check(gold, draw):
        kinds = sorted({tag for tags in gold for tag in tags})
        guess = [[t if draw.random() < 0.7 else draw.choice(kinds) for t in each] for each in gold]
        read = entities if scheme is None else functools.partial(strict_entities, scheme=scheme)
        if any(map(read, (*gold, *guess))):  # seqeval has no mean without any
            check_scores(gold, guess, scheme)

    check()


@pytest.mark.parity
def test_as_seqeval_on_all_short_sequences():
    from seqeval import scheme as theirs
    from seqeval.metrics.sequence_labeling import get_entities

    for scheme, prefixes, most in (("iob1", "BI", 5), ("iob2", "BI", 5), ("iobes", "BIES", 4)):
        some = ["O", *(f"{p}-{kind}" for p in prefixes for kind in ("PER", "LOC"))]
        kind = getattr(theirs, SEQEVAL[scheme])
        for length in range(1, most + 1):
            for tags in map(list, itertools.product(some, repeat=length)):
                found = [(k, begin, end + 1) for k, begin, end in get_entities(tags)]
                assert entities(tags) == found, tags
                strict = theirs.Tokens(tags, kind).entities
                found = [(each.tag, each.start, each.end) for each in strict]
                assert strict_entities(tags, scheme) == found, (scheme, tags)


@pytest.mark.parity
def test_as_seqeval_on_conll(real_data):
    """Real sentences, with a twelfth of the tags wrong."""
    examples = convert(read_columns(real_data / "ner/conll2003/eng.testa"))
    gold = [list(example.tags or ()) for example in examples]
    kinds = sorted({tag for tags in gold for tag in tags})
    draw = random.Random(0)
    guess = [[t if draw.random() > 1 / 12 else draw.choice(kinds) for t in each] for each in gold]
    check_scores(gold, guess, None)
    check_scores(gold, guess, "iob2")
