"""Sums a vector with other nodes, two nodes at a time, to test whether each link carries what a training group sends.

The fork server forks the process when doctor_checks.py asks for it: torch is there already, which would cost seconds of
CPU.

Rules
-----
* Each pair meets in the rendezvous store of one of the two, where groups of tasks meet as well, and connects from a
  free port to a free port of the training address, as they do.
* A vector of whole numbers: large enough to fill packets of every size, and right to the last bit or wrong.
* With gloo all pairs sum at the same time; with NCCL, on one GPU, one after the other, in an order that is the same on
  all nodes. What sums is behind one function, `Sum`: NCCL's has only run against a double, never on GPUs.
* One answer holds the outcome of each pair, or why there was no sum. The process is niced and ends in time, whatever
  hangs, and at once when the agent no longer listens.
* A node so busy that half of the time is over before it can begin sums nothing: its lateness would look like a bad
  link.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import msgspec

from unicrond.agents.protocol.messages import Sum
from unicrond.events.queries.node_checks import Library, Pair, PairSum

_NICENESS = 10
#: Whole numbers of 4 bytes.
VECTOR = 1 << 20
#: How long a sum may take once both nodes are there.
SUM_S = 10.0
_TEXT_CHARS = 400
#: Share of the limit in which it must have begun; both nodes must be there _MEET_S later.
_BEGUN_BY, _MEET_S = 0.5, 5.0
#: Everything is reported this long before the limit.
_TELL_S = 1.0

#: Adds up the vector in place: (torch, store, rank, address, vector).
Summation: TypeAlias = Callable[[Any, Any, int, str, Any], None]


class NotThere(Exception):
    """The peer has not come to the rendezvous store."""


def run(order: Sum) -> NoReturn:
    """Send `order.answer` the outcome of each pair, or why there was no sum, as JSON."""
    ends_s = order.asked_s + order.limit_s
    signal.alarm(max(1, round(ends_s - time.monotonic()) + 2))
    os.nice(_NICENESS)
    with contextlib.suppress(
        OSError
    ):  # it has a session of its own: where the kernel shares CPUs by session, this value counts
        Path("/proc/self/autogroup").write_text(f"{_NICENESS}\n", "ascii")
    if order.gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = order.gpu
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as workers
    with socket.socket(socket.AF_UNIX) as answer:
        answer.connect(order.answer)
        threading.Thread(target=_end_with, args=(answer,), daemon=True).start()
        import torch  # the fork server has done it; it is not for the agent, which reads this module as well

        torch.set_num_threads(1)
        reply: list[PairSum] | str = too_late(time.monotonic() - order.asked_s, order.limit_s)
        if not reply:
            reply = sum_all(torch, order, LIBRARIES[order.library], ends_s - _TELL_S)
        answer.sendall(msgspec.json.encode(reply))
        os._exit(0)  # a thread may hang in the library


def _end_with(answer: socket.socket) -> NoReturn:
    """End this process with the agent: the agent sends nothing, so whatever is received is the end of the
    connection."""
    answer.recv(1)
    os._exit(1)


def too_late(after_s: float, limit_s: float) -> str:
    """Return why nothing is summed when the sums can begin only `after_s` after the request; "" where that is soon
    enough."""
    if after_s <= _BEGUN_BY * limit_s:
        return ""
    return f"the node is busy: its sums could begin after {after_s:.0f} s; give a --timeout-s above {2 * after_s:.0f}"


def sum_all(torch: Any, order: Sum, summation: Summation, ends_s: float) -> list[PairSum]:
    """Sum with every pair; return the outcomes by `ends_s` of the monotonic clock."""
    sums: dict[str, PairSum] = {}

    def sum_pair(pair: Pair) -> None:
        sums[pair.peer] = sum_with(torch, pair, order, summation, ends_s)

    def in_turn() -> None:
        for pair in sorted(order.pairs, key=lambda pair: pair.turn):
            sum_pair(pair)

    works = [in_turn] if order.library == "nccl" else [lambda pair=pair: sum_pair(pair) for pair in order.pairs]
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, ends_s - time.monotonic()))
    late = "the sum did not end in time"
    return [sums.get(pair.peer) or PairSum(peer=pair.peer, trouble=late) for pair in order.pairs]


def sum_with(torch: Any, pair: Pair, order: Sum, summation: Summation, ends_s: float) -> PairSum:
    """Sum with one peer, after a meeting in its store, and check the sum."""
    prefix, meet_by_s = f"doctor/{order.token}/{pair.turn}", ends_s - SUM_S - _TELL_S
    if order.library == "gloo":  # else a peer may have another pair before this one
        meet_by_s = min(meet_by_s, ends_s + _TELL_S - (1 - _BEGUN_BY) * order.limit_s + _MEET_S)
    try:
        server, store = _meet(torch, pair, prefix, meet_by_s)
    except NotThere as error:
        return PairSum(peer=pair.peer, trouble=str(error)[:_TEXT_CHARS])
    began_s = time.monotonic()
    vector = torch.arange(VECTOR, dtype=torch.int32) * (pair.rank + 1)
    try:
        summation(torch, store, pair.rank, order.address, vector)
        right = torch.equal(vector, torch.arange(VECTOR, dtype=torch.int32) * 3)
        trouble = "" if right else "the sum is wrong"
    except Exception as error:
        trouble = f"the sum failed: {_first_line(error)}"
    took_us = round((time.monotonic() - began_s) * 1e6)
    _part(server, store, pair, prefix)
    return PairSum(peer=pair.peer, trouble=trouble, duration_us=took_us)


def _meet(torch: Any, pair: Pair, prefix: str, meet_by_s: float) -> tuple[Any, Any]:
    """Return the store and the pair's part of it, once both nodes are there. Raise NotThere."""
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
    """Remove the meeting's keys from the store: rank 0 does so when rank 1 is done."""
    with contextlib.suppress(RuntimeError):
        if pair.rank == 1:
            store.set("done", "")
            return
        store.wait(["done"], timedelta(seconds=_TELL_S))
        for key in server.list_keys():
            if prefix in key:
                server.delete_key(key)


def by_gloo(torch: Any, store: Any, rank: int, address: str, vector: Any) -> None:
    """Sum on the CPU."""
    dist = torch.distributed
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=SUM_S)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    dist.ProcessGroupGloo(store, rank, 2, options).allreduce([vector]).wait()


def by_nccl(torch: Any, store: Any, rank: int, address: str, vector: Any) -> None:
    """Sum on the one GPU that this process sees. NCCL chooses its interfaces itself (NCCL_SOCKET_IFNAME), not by
    `address`."""
    dist = torch.distributed
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=SUM_S)
    on_gpu = vector.cuda()
    group = dist.ProcessGroupNCCL(store, rank, 2, options)
    group.allreduce([on_gpu]).wait()
    vector.copy_(on_gpu.cpu())
    group.abort()


LIBRARIES: dict[Library, Summation] = {"gloo": by_gloo, "nccl": by_nccl}


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]
