"""Sums a vector with other nodes, two nodes at a time: does the way carry what a training group sends?

    python -m agents.pair_sum ORDER       (JSON; started by checks.py, niced, with a time limit)

Rules
-----
* Each pair meets in the rendezvous store of one of the two, where groups of tasks meet as well, and connects from a
  free port to a free port of the training address, as they do.
* A vector of whole numbers: large enough to fill packets of every size, and right to the last bit or wrong.
* With gloo all pairs sum at the same time; with NCCL, on one GPU, one after the other, in an order that is the same on
  all nodes. What sums is behind one function, `Sum`: NCCL's has only run against a double, never on GPUs.
* One line on stdout says what came of each pair, or why there was no sum; the process ends in time, whatever hangs.
* A node so busy that torch takes half of the time to load sums nothing: who is late would look like a bad link.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeAlias

import msgspec

from events.node_checks import Library, Pair, PairSum

#: Whole numbers of 4 bytes.
VECTOR = 1 << 20
#: Once both are there.
SUM_S = 10.0
_TEXT_CHARS = 400
#: Share of the limit in which torch must be loaded; so much later both are there.
_LOADED_BY, _MEET_S = 0.5, 5.0
#: Before the limit everything is told.
_TELL_S = 1.0

#: Adds up the vector in place: (torch, store, rank, address, vector).
Sum: TypeAlias = Callable[[Any, Any, int, str, Any], None]


class Order(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`address`: this node's. See events.node_checks.LinksCheck."""

    address: str
    token: str
    pairs: tuple[Pair, ...]
    library: Library
    limit_s: float


class NotThere(Exception):
    """The peer has not come to the store."""


def main(arguments: list[str]) -> int:
    """Print what came of each pair, or why there was no sum, as JSON; the exit code."""
    began_s = time.monotonic()
    order = msgspec.json.decode(arguments[0], type=Order)
    signal.alarm(int(order.limit_s) + 2)
    import torch  # here, after the alarm

    torch.set_num_threads(1)
    told: list[PairSum] | str = too_late(time.monotonic() - began_s, order.limit_s)
    if not told:
        told = sum_all(torch, order, LIBRARIES[order.library], began_s + order.limit_s - _TELL_S)
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(told) + b"\n")
    sys.stdout.flush()
    os._exit(0)  # a thread may hang in the library


def too_late(load_s: float, limit_s: float) -> str:
    """Why nothing is summed where torch took so long to load; "": it was quick enough."""
    if load_s <= _LOADED_BY * limit_s:
        return ""
    return f"the node is busy: torch took {load_s:.0f} s to load; give a --limit-s above {2 * load_s:.0f}"


def sum_all(torch: Any, order: Order, by: Sum, ends_s: float) -> list[PairSum]:
    """What came of each pair by `ends_s` of the monotonic clock."""
    found: dict[str, PairSum] = {}

    def one(pair: Pair) -> None:
        found[pair.peer] = sum_with(torch, pair, order, by, ends_s)

    def in_turn() -> None:
        for pair in sorted(order.pairs, key=lambda pair: pair.turn):
            one(pair)

    works = [in_turn] if order.library == "nccl" else [lambda pair=pair: one(pair) for pair in order.pairs]
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, ends_s - time.monotonic()))
    late = "the sum did not end in time"
    return [found.get(pair.peer) or PairSum(peer=pair.peer, trouble=late) for pair in order.pairs]


def sum_with(torch: Any, pair: Pair, order: Order, by: Sum, ends_s: float) -> PairSum:
    """Meet one peer, sum, and look at the sum."""
    prefix, meet_by_s = f"doctor/{order.token}/{pair.turn}", ends_s - SUM_S - _TELL_S
    if order.library == "gloo":  # else a peer may have another pair before this one
        meet_by_s = min(meet_by_s, ends_s + _TELL_S - (1 - _LOADED_BY) * order.limit_s + _MEET_S)
    try:
        server, store = _meet(torch, pair, prefix, meet_by_s)
    except NotThere as error:
        return PairSum(peer=pair.peer, trouble=str(error)[:_TEXT_CHARS])
    began_s = time.monotonic()
    vector = torch.arange(VECTOR, dtype=torch.int32) * (pair.rank + 1)
    try:
        by(torch, store, pair.rank, order.address, vector)
        right = torch.equal(vector, torch.arange(VECTOR, dtype=torch.int32) * 3)
        trouble = "" if right else "the sum is wrong"
    except Exception as error:
        trouble = f"the sum failed: {_first_line(error)}"
    took_us = round((time.monotonic() - began_s) * 1e6)
    _part(server, store, pair, prefix)
    return PairSum(peer=pair.peer, trouble=trouble, took_us=took_us)


def _meet(torch: Any, pair: Pair, prefix: str, meet_by_s: float) -> tuple[Any, Any]:
    """The store, and the pair's part of it, once both are there. Raises NotThere."""
    dist = torch.distributed
    wait = timedelta(seconds=max(0.5, meet_by_s - time.monotonic()))
    try:
        server = dist.TCPStore(pair.store.host, pair.store.port, is_master=False, timeout=wait)
        store = dist.PrefixStore(prefix, server)
        store.set(f"here {pair.rank}", "")
        store.wait([f"here {1 - pair.rank}"], wait)
    except RuntimeError as error:  # DistStoreError, DistNetworkError
        at = f"{pair.store.host}:{pair.store.port}"
        raise NotThere(f"the two have not met in the store at {at}: {_first_line(error)}") from None
    store.set_timeout(timedelta(seconds=SUM_S))
    return server, store


def _part(server: Any, store: Any, pair: Pair, prefix: str) -> None:
    """Of the meeting nothing stays in the store: rank 0 removes it when rank 1 is done."""
    with contextlib.suppress(RuntimeError):
        if pair.rank == 1:
            store.set("done", "")
            return
        store.wait(["done"], timedelta(seconds=_TELL_S))
        for key in server.list_keys():
            if prefix in key:
                server.delete_key(key)


def by_gloo(torch: Any, store: Any, rank: int, address: str, vector: Any) -> None:
    """On the CPU."""
    dist = torch.distributed
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=SUM_S)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    dist.ProcessGroupGloo(store, rank, 2, options).allreduce([vector]).wait()


def by_nccl(torch: Any, store: Any, rank: int, address: str, vector: Any) -> None:
    """On the one GPU that this process sees. `address` is not asked: NCCL chooses its interfaces itself
    (NCCL_SOCKET_IFNAME)."""
    dist = torch.distributed
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=SUM_S)
    on_gpu = vector.cuda()
    group = dist.ProcessGroupNCCL(store, rank, 2, options)
    group.allreduce([on_gpu]).wait()
    vector.copy_(on_gpu.cpu())
    group.abort()


LIBRARIES: dict[Library, Sum] = {"gloo": by_gloo, "nccl": by_nccl}


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
