"""The checks of signatures that all tests run under refuse what they should."""

import importlib

import numpy as np
import pytest
from jaxtyping import TypeCheckError
from signature_checks import check_signatures

MODULE = """
from dataclasses import dataclass
import numpy as np
from jaxtyping import Float

@dataclass
class Pair:
    first: int

def add(x: Float[np.ndarray, "n"], y: Float[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
    return x + y

def outer(number, wrong):
    def inner(number: int) -> int:
        return wrong or number
    return inner(number)
"""


def test_shapes_types_results_and_nested_functions_are_checked(tmp_path, monkeypatch):
    (tmp_path / "checked_here.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    check_signatures("checked_here")
    module = importlib.import_module("checked_here")
    three = np.zeros(3)
    assert module.add(three, three).shape == (3,)
    assert [module.outer(number, 0) for number in (1, 2)] == [1, 2]
    assert module.outer(1, 5) == 5  # the second closure of one `def` is its own
    for call, given in (
        (module.add, (three, np.zeros(4))), (module.Pair, ("one",)),
        (module.outer, ("one", 0)), (module.outer, (1, "wrong")),
    ):  # fmt: skip
        with pytest.raises(TypeCheckError):
            call(*given)
