"""Entities and their scores: by hand, by the CoNLL script's own rules, and against seqeval."""

import itertools
import random
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.tasks.tagging.metrics import entity_scores
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


def test_strict_by_hand():
    tags = ["I-PER", "O", "B-PER", "I-PER", "I-LOC", "B-LOC"]
    assert strict_entities(tags) == [("PER", 2, 4), ("LOC", 5, 6)]


def test_no_tag():
    for tag in ("PER", "", "X-PER", "B-", "o"):
        with pytest.raises(ValueError, match="no tag"):
            entities(["O", tag])


def test_scores_by_hand():
    gold = [["B-PER", "I-PER", "O", "B-LOC"], ["B-LOC"], ["I-LOC", "O"]]
    guess = [["B-PER", "I-PER", "O", "B-ORG"], ["B-LOC"], ["O", "I-LOC"]]
    scores = entity_scores(gold, guess)
    rows = {row.pop("label"): row for row in scores["classes"]}
    f1 = pytest.approx(2 * (1 / 2) * (1 / 3) / (1 / 2 + 1 / 3))
    assert rows == {
        "LOC": {"precision": 1 / 2, "recall": 1 / 3, "f1": f1, "predicted": 2, "support": 3},
        "ORG": {"precision": 0, "recall": 0, "f1": 0, "predicted": 1, "support": 0},
        "PER": {"precision": 1, "recall": 1, "f1": 1, "predicted": 1, "support": 1},
    }
    assert list(rows) == ["LOC", "ORG", "PER"]
    assert scores["micro"] == {"precision": 0.5, "recall": 0.5, "f1": 0.5}
    assert scores["macro"]["f1"] == pytest.approx((0.4 + 0 + 1) / 3)
    # Strictly, the third sentence has no entity.
    strict = entity_scores(gold, guess, strict=True)["micro"]
    assert strict == pytest.approx({"precision": 2 / 3, "recall": 2 / 3, "f1": 2 / 3})


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
@pytest.mark.parametrize("strict", [False, True])
def test_right_is_what_has_the_same_start_end_and_type(gold, guess, strict):
    for one, two in ((gold, guess), (guess, gold)):
        assert entity_scores([one.split()], [two.split()], strict=strict)["micro"]["f1"] == 0
        same = entity_scores([one.split()], [one.split()], strict=strict)
        assert same["micro"]["f1"] == 1


def test_a_sentence_ends_its_entities():
    (apart,) = entity_scores([["B-PER"], ["I-PER"]], [["B-PER"], ["I-PER"]])["classes"]
    assert apart["support"] == 2
    # The same place in another sentence is another entity.
    (crossed,) = entity_scores([["B-PER"], ["O"]], [["O"], ["B-PER"]])["classes"]
    assert (crossed["f1"], crossed["predicted"], crossed["support"]) == (0, 1, 1)


def test_nothing_found():
    none = {"precision": 0, "recall": 0, "f1": 0}
    scores = entity_scores([["O", "O"]], [["O", "O"]])
    assert scores == {"classes": [], "micro": none, "macro": none}
    (missed,) = entity_scores([["B-PER", "O"]], [["O", "O"]])["classes"]
    assert missed == {"label": "PER", **none, "predicted": 0, "support": 1}
    (invented,) = entity_scores([["O", "O"]], [["B-PER", "O"]])["classes"]
    assert invented == {"label": "PER", **none, "predicted": 1, "support": 0}


def test_refuses_unequal():
    with pytest.raises(ValueError, match=r"shorter|longer"):
        entity_scores([["O"]], [["O"], ["O"]])


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


def check_scores(gold, guess, *, strict):
    import seqeval.metrics
    import seqeval.scheme

    options = {"mode": "strict", "scheme": seqeval.scheme.IOB2} if strict else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is not defined
        expected = seqeval.metrics.classification_report(
            gold, guess, output_dict=True, zero_division=0, **options
        )
    scores = entity_scores(gold, guess, strict=strict)
    assert scores["macro"]["f1"] == pytest.approx(expected.pop("macro avg")["f1-score"])
    expected.pop("weighted avg")
    support = sum(row["support"] for row in scores["classes"])
    micro = {"label": "micro avg", **scores["micro"], "support": support}
    assert {
        row["label"]: (row["precision"], row["recall"], row["f1"], row["support"])
        for row in (*scores["classes"], micro)
    } == {
        name: pytest.approx((e["precision"], e["recall"], e["f1-score"], e["support"]))
        for name, e in expected.items()
    }


@pytest.mark.parity
@pytest.mark.parametrize(("strict", "prefixes"), [(False, "BIES"), (True, "BI")])
def test_as_seqeval(strict, prefixes):
    """On tags of any soundness, such as a model predicts; both of its modes."""

    @settings(max_examples=150)
    @given(tags_of(prefixes), st.randoms())
    def check(gold, draw):
        kinds = sorted({tag for tags in gold for tag in tags})
        guess = [[t if draw.random() < 0.7 else draw.choice(kinds) for t in each] for each in gold]
        read = strict_entities if strict else entities
        if any(map(read, (*gold, *guess))):  # seqeval has no mean without any
            check_scores(gold, guess, strict=strict)

    check()


@pytest.mark.parity
def test_as_seqeval_on_all_short_sequences():
    from seqeval import scheme as theirs
    from seqeval.metrics.sequence_labeling import get_entities

    for prefixes, most in (("BI", 5), ("BIES", 4)):
        some = ["O", *(f"{p}-{kind}" for p in prefixes for kind in ("PER", "LOC"))]
        for length in range(1, most + 1):
            for tags in map(list, itertools.product(some, repeat=length)):
                found = [(k, begin, end + 1) for k, begin, end in get_entities(tags)]
                assert entities(tags) == found, tags
                if prefixes == "BI":
                    strict = theirs.Tokens(tags, theirs.IOB2).entities
                    found = [(each.tag, each.start, each.end) for each in strict]
                    assert strict_entities(tags) == found, tags


@pytest.mark.parity
def test_as_seqeval_on_conll(real_data):
    """Real sentences, with a twelfth of the tags wrong."""
    examples = convert(read_columns(real_data / "ner/conll2003/eng.testa"))
    gold = [list(example.tags or ()) for example in examples]
    kinds = sorted({tag for tags in gold for tag in tags})
    draw = random.Random(0)
    guess = [[t if draw.random() > 1 / 12 else draw.choice(kinds) for t in each] for each in gold]
    check_scores(gold, guess, strict=False)
    check_scores(gold, guess, strict=True)
