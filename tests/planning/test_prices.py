"""The file of prices: each price has a date and a source."""

import json
import re

import pytest

from bert_jax.chips import CHIPS
from bert_jax.errors import UserError
from bert_jax.planning.prices import read_prices


def test_shipped_prices_have_date_and_source():
    assert set(read_prices()) == {"core", *CHIPS}


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({"dollars": 1.2, "date": None, "source": "a page"}, "v5e.date is None"),
        ({"dollars": 1.2, "date": "January", "source": "a page"}, "v5e.date is 'January'"),
        ({"dollars": 1.2, "date": "2026-01-31", "source": None}, "v5e.source is None"),
        ({"dollars": 1.2, "date": "2026-01-31", "source": " "}, "v5e.source is ' '"),
        ({"dollars": None, "date": "2026-01-31", "source": "a page"}, "v5e.dollars is None"),
        ({"dollars": "1.2", "date": "2026-01-31", "source": "a page"}, "v5e.dollars is '1.2'"),
        ({"dollars": -1, "date": "2026-01-31", "source": "a page"}, "v5e.dollars is -1"),
        ({"dollars": 1.2}, "v5e must have the fields"),
    ],
)
def test_a_price_without_date_or_source_is_refused(entry, told, tmp_path):
    path = tmp_path / "prices.json"
    none = dict.fromkeys(("dollars", "date", "source"))
    path.write_text(json.dumps(dict.fromkeys(["core", *CHIPS], none) | {"v5e": entry}))
    with pytest.raises(UserError, match=re.escape(told)):
        read_prices(path)


def test_prices_of_other_names_are_refused(tmp_path):
    path = tmp_path / "prices.json"
    path.write_text('{"v5": {"dollars": null, "date": null, "source": null}}')
    with pytest.raises(UserError, match="the names must be core, v4, v5e"):
        read_prices(path)
