"""A thread-safe cache of recent results."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Kept(Generic[Key, Value]):
    """LRU cache of up to `most` results of a pure function, for several threads.

    A call waits if another thread is computing the same result. A failure is not cached.
    """

    def __init__(self, make: Callable[[Key], Value], most: int) -> None:
        self._make, self._most = make, most
        self._kept: OrderedDict[Key, Future[Value]] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, key: Key) -> Value:
        """Return the result for an argument, or raise the exception of the function."""
        with self._lock:
            found = self._kept.get(key)
            future = found or Future()
            self._kept[key] = future
            self._kept.move_to_end(key)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        if found is None:
            try:
                future.set_result(self._make(key))
            except BaseException as error:
                with self._lock:
                    if self._kept.get(key) is future:
                        del self._kept[key]
                future.set_exception(error)
        return future.result()
