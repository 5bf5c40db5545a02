"""Results that the replicas of a task give each other outside of an iteration, through the rendezvous store.

Rules
-----
* No group is needed for it, and nothing waits: a reader asks again, or does without what has not come. So no death and
  no regroup can break it.
* A store that is lost holds nothing, and takes nothing: everybody is alone then.
* Who begins a purpose has had all results of the one before, so all others have had those of the one before that: then
  these are removed. (Who did without them finds out by itself what they were.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from unicrond.events.vocabulary import StoreAddress

_CONNECT_TIMEOUT = timedelta(seconds=10)


class SharedResults:
    """The results of one task, in one store. `name`: of the task."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._address: StoreAddress | None = None
        self._store: Any = None
        self._prefix = ""
        #: For the present purpose, and for the one before.
        self._keys: list[str] = []
        self._older_keys: list[str] = []

    @property
    def is_there(self) -> bool:
        """Return whether the store answered last."""
        return self._store is not None

    def begin(self, address: StoreAddress, purpose: str) -> None:
        """Remove what this process has published two purposes before, and go on under the keys of `purpose` in that
        store."""
        for key in self._older_keys:
            with contextlib.suppress(RuntimeError):
                if self._store is not None:
                    self._store.delete_key(key)
        self._older_keys, self._keys = self._keys, []
        self._prefix = f"results/{self._name}/{purpose}/"
        if self._store is None or address != self._address:
            self._address, self._store = address, None
            with contextlib.suppress(RuntimeError):  # dist.DistError: it is lost, or too slow
                self._store = dist.TCPStore(address.host, address.port, None, False, _CONNECT_TIMEOUT)

    def publish(self, key: str, value: bytes) -> None:
        """Let the others have the value."""
        try:
            if self._store is not None:
                self._store.set(self._prefix + key, value)
                self._keys.append(self._prefix + key)
        except RuntimeError:
            self._store = None

    def take(self, keys: Sequence[str]) -> Mapping[str, bytes]:
        """Return what has been published under these keys by now. Nothing waits in the store: a wait that is cut short
        leaves its connection behind with the answer."""
        if self._store is None:
            return {}
        whole = [self._prefix + key for key in keys]
        try:
            if self._store.check(whole):
                return dict(zip(keys, self._store.multi_get(whole), strict=True))
            pairs = zip(keys, whole, strict=True)
            return {key: self._store.get(name) for key, name in pairs if self._store.check([name])}
        except RuntimeError:
            self._store = None
            return {}

    def are_there(self, keys: Sequence[str]) -> bool:
        """Return whether all of these have been published."""
        try:
            return self._store is not None and self._store.check([self._prefix + key for key in keys])
        except RuntimeError:
            self._store = None
            return False
