"""What members tell each other in a store costs each of them a few messages, however many they are."""

from __future__ import annotations

import threading
from collections import Counter

import torch.distributed as dist

from unicrond.agents.trainer.groups.store_messages import StoreExchange

SIZE = 50


class Counted(dist.Store):  # type: ignore[misc]
    """A store that counts what it is asked, and for how many keys."""

    def __init__(self, store: object) -> None:
        super().__init__()
        self._inner = store
        self.asked: Counter[str] = Counter()
        self.keys = 0

    def __getattribute__(self, name: str) -> object:
        if name in ("set", "compare_set", "wait", "get", "multi_get", "delete_key"):
            self.asked[name] += 1
        return super().__getattribute__(name)

    def set(self, key: str, value: bytes | str) -> None:
        self._inner.set(key, value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._inner.compare_set(key, expected, desired)

    def wait(self, keys: list[str], timeout: object = None) -> None:
        self.keys += len(keys)
        self._inner.wait(keys, timeout)

    def get(self, key: str) -> bytes:
        return self._inner.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.keys += len(keys)
        return self._inner.multi_get(keys)

    def delete_key(self, key: str) -> bool:
        return self._inner.delete_key(key)


def meet(stores: list[Counted]) -> list[list[bytes] | None]:
    """All members tell their ranks; what each has heard."""
    words = [StoreExchange(store, rank, len(stores), lambda: False) for rank, store in enumerate(stores)]
    heard: list[list[bytes] | None] = [None] * len(stores)

    def member(rank: int) -> None:
        words[rank].publish("name", f"member {rank}")
        heard[rank] = words[rank].collect("name")
        words[rank].withdraw()

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return heard


def test_store_exchange_takes_few_messages_per_member() -> None:
    inner = dist.HashStore()
    stores = [Counted(inner) for _ in range(SIZE)]
    assert meet(stores) == [[f"member {rank}".encode() for rank in range(SIZE)]] * SIZE
    tellers = [store for store in stores if store.asked["multi_get"]]
    assert len(tellers) == 1
    assert max(sum(store.asked.values()) for store in stores) <= 6
    assert sum(store.keys for store in stores) <= 4 * SIZE
    assert inner.num_keys() == 2, "what was told, and the teller; nothing of each member"


def test_store_exchange_can_be_abandoned() -> None:
    given_up = threading.Event()
    words = StoreExchange(dist.HashStore(), 0, 2, given_up.is_set)
    given_up.set()
    words.publish("name", "alone")
    assert words.collect("name") is None
