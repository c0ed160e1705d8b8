"""A loop that keeps a device busy: it fetches a result while the next results are computed."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax

Item = TypeVar("Item")


def in_flight(dispatch: Callable[[Item], Any], items: Iterable[Item]) -> Iterator[tuple[Item, Any]]:
    """Yield (item, result as numpy), in order, while the next two results are computed."""
    waiting: deque[tuple[Item, Any]] = deque()
    for item in items:
        waiting.append((item, dispatch(item)))
        if len(waiting) > 2:
            first, result = waiting.popleft()
            yield first, jax.device_get(result)
    for first, result in waiting:
        yield first, jax.device_get(result)
