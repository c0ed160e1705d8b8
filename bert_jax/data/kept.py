"""Results that are made once and kept for a while."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Kept(Generic[Key, Value]):
    """Results of a pure function by argument; the last ones used, `most`, are kept.

    Safe to call from several threads: who asks for a result that is being made waits for it. A
    result that was dropped meanwhile, or that failed, is made again.
    """

    def __init__(self, make: Callable[[Key], Value], most: int) -> None:
        self._make, self._most = make, most
        self._kept: OrderedDict[Key, Future[Value]] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, key: Key) -> Value:
        """Return the result for an argument; raises what the function raises."""
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
