"""Fields of a `config.json`, each checked and converted to ours."""

from collections.abc import Mapping
from typing import Any

MAX_SIZE = 1 << 24
MAX_LAYERS = 1024
"""Upper bounds for values from a file; no existing model exceeds them."""

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}
"""Activations, foreign names to ours; of several foreign names, exports write the first."""

_FLAGS = {"norm_bias", "attention_bias", "mlp_bias", "decoder_bias", "head_bias", "tied"}


def read_field(name: str, ours: str, value: Any, wrong: list[str]) -> Any:
    """Convert a field's value for the field `ours` of `ModelConfig`.

    A value that does not fit becomes None, and `wrong` gets an entry that says what would fit.
    """
    result: Any
    if ours in ("activation", "head_activation"):
        fits = isinstance(value, str) and value in ACTIVATIONS
        wanted, result = f"one of {', '.join(ACTIVATIONS)}", ACTIVATIONS.get(f"{value}")
    elif ours in _FLAGS:
        fits, wanted, result = isinstance(value, bool), "true or false", value
    elif ours.endswith("_rate"):
        fits, wanted = type(value) in (int, float) and 0 <= value < 1, "in [0, 1)"
        result = float(value) if fits else None  # 0 may be written as an integer
    elif ours in ("norm_eps", "init_std"):
        fits, wanted, result = type(value) is float and 0 < value < 1, "between 0 and 1", value
    else:
        limit = MAX_LAYERS if ours == "num_layers" else MAX_SIZE
        fits, wanted = type(value) is int and 1 <= value <= limit, f"from 1 to {limit:,}"
        result = value
    if not fits:
        wrong.append(f"{name} is {show(value)}; it must be {wanted}")
    return result if fits else None


def check_only(
    found: Mapping[str, Any], only: Mapping[str, tuple[Any, str]], wrong: list[str]
) -> None:
    """Add to `wrong` the fields whose value is neither the one that fits nor null."""
    for name, (value, why) in only.items():
        if name in found and found[name] not in (value, None):
            wrong.append(f"{name} is {show(found[name])}; {why}")


def their_activation(ours: str) -> str:
    """Return the foreign name of our activation."""
    return next(theirs for theirs, name in ACTIVATIONS.items() if name == ours)


def show(value: object) -> str:
    """Format a value from a file for a message; lists and objects only by size."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    return repr(value)[:80]
