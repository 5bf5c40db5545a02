"""Results that the replicas of a task give each other outside of an iteration, through the rendezvous store.

Rules
-----
* No group is needed for it, and nothing waits: a reader asks again, or does without what has not come. So no death and
  no regroup can break it.
* A store that is lost holds nothing, and takes nothing: everybody is alone then. So is one that is silent for
  ANSWER_MAX_S: its calls have no limit of their own, so a thread makes them, and stays behind with what hangs.
* The last reader of a purpose removes its results, those of a dead replica too; nobody waits for that. If a reader
  dies, nobody is the last. Then each survivor removes them when it begins the second purpose after it: a reader begins
  a purpose once it has read all results of the one before, so by then everybody has read them. A lone survivor shares
  nothing any more, and begins none: what is left then stays until the store ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from unicrond.events.vocabulary import StoreAddress

_CONNECT_TIMEOUT = timedelta(seconds=10)
ANSWER_MAX_S = 15.0


class SharedResults:
    """The results of one task, in one store. `name`: of the task."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._address: StoreAddress | None = None
        self._store: Any = None
        self._prefix = ""
        self._thread = ThreadPoolExecutor(1, "results")
        #: By the key that counts a purpose's readers, the keys of its results: of those that this process has ended.
        self._ended: dict[str, list[str]] = {}

    @property
    def is_there(self) -> bool:
        """Return whether the store answered last."""
        return self._store is not None

    def begin(self, address: StoreAddress, purpose: str) -> None:
        """Remove what is left of two purposes before, and go on under the keys of `purpose` in that store."""
        for counter in list(self._ended)[:-1]:
            self._ask(partial(_remove_left, counter=counter, names=self._ended.pop(counter)))
        self._prefix = f"results/{self._name}/{purpose}/"
        if self._store is None or address != self._address:
            self._address = address
            self._store = self._answer(lambda: dist.TCPStore(address.host, address.port, None, False, _CONNECT_TIMEOUT))

    def publish(self, key: str, value: bytes) -> None:
        """Let the others have the value."""
        name = self._prefix + key
        self._ask(lambda store: store.set(name, value))

    def end(self, keys: Iterable[str], readers: int) -> None:
        """Have this process counted, in a while, among the readers that have had all results of the purpose, which have
        these keys; the last of so many readers removes them."""
        counter, names = f"{self._prefix}readers", [self._prefix + key for key in keys]
        self._ended[counter] = names

        def leave(store: Any) -> None:
            """Count, and remove them where no reader is left."""
            if store.add(counter, 1) >= readers:
                _remove(store, counter, names)

        if self._store is not None:
            self._thread.submit(leave, self._store)

    def take(self, keys: Sequence[str]) -> Mapping[str, bytes]:
        """Return what has been published under these keys by now. Nothing waits in the store: a wait that is cut short
        leaves its connection behind with the answer."""
        names = {key: self._prefix + key for key in keys}

        def values(store: Any) -> dict[str, bytes]:
            """Return those that are there, with one request where all are."""
            if store.check(list(names.values())):
                return dict(zip(keys, store.multi_get(list(names.values())), strict=True))
            return {key: store.get(name) for key, name in names.items() if store.check([name])}

        return self._ask(values) or {}

    def are_there(self, keys: Sequence[str]) -> bool:
        """Return whether all of these have been published."""
        return bool(self._ask(lambda store: store.check([self._prefix + key for key in keys])))

    def _ask(self, work: Callable[[Any], Any]) -> Any:
        """Return what the store answers; None where there is none, or it is lost by now."""
        store = self._store
        answer = None if store is None else self._answer(lambda: (work(store),))
        if answer is None:
            self._store = None
            return None
        return answer[0]

    def _answer(self, work: Callable[[], Any]) -> Any:
        """Return what a thread's work gives; None where it fails, or takes too long."""
        answer = self._thread.submit(work)
        try:
            return answer.result(ANSWER_MAX_S)
        except RuntimeError:  # dist.DistError: it is lost, or too slow
            return None
        except TimeoutError:
            self._thread = ThreadPoolExecutor(1, "results")
            return None


def _remove_left(store: Any, counter: str, names: Iterable[str]) -> None:
    if store.check([counter]):
        _remove(store, counter, names)


def _remove(store: Any, counter: str, names: Iterable[str]) -> None:
    for name in (*names, counter):
        store.delete_key(name)
