"""Prices of chips and processor cores, each with its date and source."""

import datetime
import math
from pathlib import Path
from typing import Any, NamedTuple

from bert_jax.chips import CHIPS
from bert_jax.errors import UserError
from bert_jax.files.untrusted.json_file import read_json_object

PRICES = Path(__file__).with_name("prices.json")


class Price(NamedTuple):
    """Price of a chip or a core for an hour on demand."""

    dollars: float
    date: str
    """Day of the price, as YYYY-MM-DD."""
    source: str


def read_prices(path: Path = PRICES) -> dict[str, Price | None]:
    """Read the prices of a core and of the chips of `bert-jax plan`; None for an unknown price.

    Raise a UserError if the file is unreadable or has other names, or a price lacks date or source.
    """
    found = read_json_object(path, max_bytes=1 << 16)
    if found.keys() != {"core", *CHIPS}:
        raise UserError(f"{path}: the names must be core, {', '.join(CHIPS)}")
    return {name: _price(f"{path}: {name}", entry) for name, entry in found.items()}


def _price(where: str, entry: Any) -> Price | None:
    if not isinstance(entry, dict) or entry.keys() != set(Price._fields):
        raise UserError(f"{where} must have the fields {', '.join(Price._fields)}")
    if all(value is None for value in entry.values()):
        return None
    dollars, date, source = price = Price(**entry)
    if type(dollars) not in (int, float) or not 0 < dollars < math.inf:
        raise UserError(f"{where}.dollars is {dollars!r}; it must be a number above 0")
    try:
        datetime.date.fromisoformat(date)
    except (TypeError, ValueError):
        raise UserError(f"{where}.date is {date!r}; it must be a day as YYYY-MM-DD") from None
    if not isinstance(source, str) or not source.strip():
        raise UserError(f"{where}.source is {source!r}; it must say where the price is published")
    return price
