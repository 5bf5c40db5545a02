"""The process group of one generation over the replicas, for one shard index: formed, used, and left at any moment.

Rules
-----
* The group is a bare ProcessGroupGloo or ProcessGroupNCCL, not registered in torch's default world, so that it can
  be replaced at every change of membership without touching anything of Megatron's.
* How it is formed: `forming.py`.
* Every collective is asynchronous; the main thread waits for it in the agent channel, so an urgent membership or a
  Quit interrupts it.
* A group is left *at once*: gloo neither aborts nor times out a collective whose peer is silent, and destroying the
  group blocks until its timeout (measured). What does work, within a millisecond, is to shut down the group's own
  sockets: every operation in flight fails, here and at the peers, which otherwise notice a death one hop at a time.
  The listening socket must be left alone, or gloo's accept loop ends the process.
* NCCL is aborted instead, in a thread: an abort may hang (a driver in trouble). One that does not end in time is the
  process's end: it says so, and another takes its place.
* Gloo may reduce CUDA tensors (`backend: gloo` on a GPU). It copies back on streams of its own, so the user of a sum
  makes its stream wait for them first. Everything else a gloo group exchanges is on the CPU.
* What follows an operation of this member's own accord (`then`) does so before the operation counts as finished: with
  gloo in the library's thread, with NCCL at once, on a stream behind the operation.
* Gloo tells nothing of what one member gives another but to the one that waits for it: a thread does.
* An error is kept as text, never as an exception object: a traceback would keep the group alive.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from unicrond.agents.protocol.marks import Marker
from unicrond.agents.trainer.groups.forming import Attempt, FormedGroup, GroupPlacement, event_after, nccl_error
from unicrond.agents.trainer.groups.rendezvous_store import StoreConnections
from unicrond.agents.trainer.groups.socket_peers import ConnectionEnds
from unicrond.agents.trainer.lifecycle.results import GroupBroken, MembershipSuperseded
from unicrond.agents.trainer.process.channel import AgentChannel
from unicrond.events.vocabulary import WorkerWaiting

_POLL_CUDA_S = 0.002
#: A worker that waits for longer for a group to meet says so: it has answered, and does not hang.
WAITS_S = 2.0
_CLOSE_TIMEOUT_S = 1.0
_ABORT_TIMEOUT_S = 10.0
#: Groups with an operation that would not end: destroying them could block, so they live as long as the process.
_parked: list[object] = []


class AbortHangs(RuntimeError):
    """The NCCL communicator cannot be aborted: this process can be of no group any more."""


class ShardGroup:
    """A member of the process group of `generation`. `rank` and `size` count replicas."""

    def __init__(
        self, formed: FormedGroup | None, generation: int, rank: int, size: int, channel: AgentChannel,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.generation = generation
        self.rank = rank
        self.size = size
        self.device = device
        self._formed = formed
        self._process_group = formed.process_group if formed else None
        #: Of its connections; none once it is left.
        self.ends = ConnectionEnds(formed.sockets, formed.listening, rank) if formed else ConnectionEnds({})
        self._channel = channel
        self._in_flight = _InFlight(channel, self._nccl)
        self._timeout_s = 0.0
        #: Where it is noted that the worker waits here for its peers.
        self.mark = Marker(None)
        #: While its members meet: called by each `finish` that takes longer than WAITS_S.
        self.on_wait: Callable[[], None] | None = None

    @property
    def _nccl(self) -> object | None:
        """Return the process group, if it is one of NCCL's: then everything that it exchanges is on the GPU."""
        return self._process_group if self.device.type == "cuda" else None

    @property
    def keeps_order(self) -> bool:
        """Return whether its operations run one after the other, in the order in which they were begun."""
        return self._nccl is not None

    def exchange_ends(self) -> torch.Tensor | None:
        """Start telling each member which end of the connection to it is this member's (`socket_peers.py`): pass what
        comes to `learn_ends`, when it has come. None with NCCL, or where a member's hook is older.
        """
        if not self.ends:
            return None
        own_marks = torch.tensor(self.ends.own_marks(), dtype=torch.int64)
        peer_marks = torch.zeros_like(own_marks)
        counts = [1] * self.size
        self.all_to_all(peer_marks, own_marks, counts, counts)
        return peer_marks

    def learn_ends(self, peer_marks: torch.Tensor | None) -> None:
        """Learn the ends of the peers' connections, which `exchange_ends` has brought."""
        if peer_marks is not None:
            self.ends.learn(peer_marks.tolist())

    def set_timeout(self, timeout_s: float) -> None:
        """Have collectives from now on time out after about so long (the library's own time-out, the last resort)."""
        if self._process_group is None or abs(timeout_s - self._timeout_s) < 0.25 * self._timeout_s:
            return
        self._timeout_s = timeout_s
        self._process_group._set_default_timeout(timedelta(seconds=timeout_s))  # type: ignore[attr-defined]

    def all_gather(self, row: Sequence[int]) -> PendingRows:
        """Start gathering every member's row of signed 64-bit integers (all of one length)."""
        own_row = torch.tensor(row, dtype=torch.int64, device=self.device)
        rows = [torch.empty_like(own_row) for _ in range(self.size)]
        if self._process_group is None:
            rows[0].copy_(own_row)
        else:
            begin = partial(self._process_group.allgather, [rows], [own_row])  # type: ignore[attr-defined]
            self._in_flight.start(begin, own_row, *rows)
        return PendingRows(rows)

    def all_reduce(self, tensor: torch.Tensor) -> Operation:
        """Start summing the tensor over the members, in place. Never raises: `finish` does."""
        if self.size == 1:
            return Operation(is_done=True)
        return self._in_flight.start(lambda: self._process_group.allreduce([tensor]), tensor)  # type: ignore[attr-defined]

    def all_to_all(
        self, target: torch.Tensor, source: torch.Tensor, target_sizes: Sequence[int], source_sizes: Sequence[int],
        callback: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """Start exchanging: member m gets `source_sizes[m]` elements of `source`, in rank order, and `target` is filled
        with `target_sizes[m]` elements of each; after that call `callback`."""
        if self.size == 1:
            target.copy_(source)
            if callback is not None:
                callback()
            return
        sizes = list(target_sizes), list(source_sizes)

        def begin() -> object:
            """Start the library's operation."""
            return self._process_group.alltoall_base(target, source, *sizes, dist.AllToAllOptions())  # type: ignore[attr-defined]

        self._in_flight.start(begin, target, source, callback=callback)

    def gather(self, whole: torch.Tensor, part: torch.Tensor) -> Operation:
        """Start filling `whole` with every member's part, in rank order; all have the same length."""
        if self.size == 1:
            return Operation(is_done=True)
        return self._in_flight.start(lambda: self._process_group._allgather_base(whole, part), whole, part)  # type: ignore[attr-defined]

    def send(self, tensor: torch.Tensor, member: int, tag: int) -> None:
        """Start sending the tensor to a member, which receives it by the same tag; it must not change meanwhile."""
        self._in_flight.start(lambda: self._process_group.send([tensor], member, tag), tensor, in_thread=True)  # type: ignore[attr-defined]

    def receive(self, tensor: torch.Tensor, member: int, tag: int) -> Operation:
        """Start overwriting the tensor with what the member sends by the same tag."""
        return self._in_flight.start(
            lambda: self._process_group.recv([tensor], member, tag),  # type: ignore[attr-defined]
            tensor, in_thread=True,
        )  # fmt: skip

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Start overwriting `tensor` with member `source`'s."""
        if self._process_group is not None:
            options = dist.BroadcastOptions()
            options.rootRank = source
            begin = partial(self._process_group.broadcast, [tensor], options)  # type: ignore[attr-defined]
            self._in_flight.start(begin, tensor)

    def finish(self, *only: Operation) -> None:
        """Wait for everything started, or for these operations. Raises GroupBroken, MembershipSuperseded (an urgent
        membership came) or QuitRequested."""
        flight = self._in_flight
        self.mark.entering()

        def settled() -> bool:
            """Return whether the wait is over."""
            return flight.settled(*only) or self._channel.newest(self.generation, urgent_only=True) is not None

        poll_s = None if self._nccl is None else _POLL_CUDA_S
        on_wait, late_s = self.on_wait, time.monotonic() + WAITS_S
        while not self._channel.wait(settled, WAITS_S if on_wait and poll_s is None else poll_s):
            if on_wait is not None and time.monotonic() >= late_s:
                on_wait()
                on_wait = None
        if flight.error is not None:
            raise GroupBroken(flight.error)
        if not flight.settled(*only):
            raise MembershipSuperseded(f"generation {self.generation} is superseded")
        if not only:
            flight.reset()
        self.mark.leaving()

    def close(self) -> None:
        """Leave at once; operations in flight fail. Blocks for at most _CLOSE_TIMEOUT_S, or, with NCCL, for at most
        _ABORT_TIMEOUT_S; then it raises AbortHangs."""
        if self._process_group is None:
            return
        flight, process_group, nccl = self._in_flight, self._process_group, self._nccl
        self._in_flight, self._process_group = _InFlight(self._channel, None), None
        if nccl is not None:
            _abort(nccl, flight)
            return
        assert self._formed is not None
        self._formed.end()
        self._formed, self.ends = None, ConnectionEnds({})
        if not flight.wait_until_over(_CLOSE_TIMEOUT_S):
            _parked.append(process_group)
        flight.reset()


def _abort(nccl: object, flight: _InFlight) -> None:
    """End a NCCL communicator. Kernels may write until it has ended: what they write to is kept for so long."""
    over = threading.Event()

    def abort() -> None:
        """Abort the communicator, in a thread."""
        try:
            nccl.abort()  # type: ignore[attr-defined]
        except RuntimeError as error:
            print(f"aborting the NCCL communicator: {error}", file=sys.stderr)
        flight.reset()
        over.set()

    threading.Thread(target=abort, name="abort", daemon=True).start()
    if not over.wait(_ABORT_TIMEOUT_S):
        raise AbortHangs(f"the NCCL communicator cannot be aborted within {_ABORT_TIMEOUT_S:g} s")


class PendingRows:
    """The rows of an all-gather that is under way; read them after `ShardGroup.finish`."""

    def __init__(self, rows: list[torch.Tensor]) -> None:
        self._rows = rows

    def read(self) -> list[list[int]]:
        """Return the rows by rank."""
        return [row.tolist() for row in self._rows]


class Operation:
    """A collective that is under way. `tensors`: what it writes to and reads from, which must live as long."""

    __slots__ = ("_is_done", "_lands", "_tensors", "over", "work")

    def __init__(self, *tensors: torch.Tensor, is_done: bool = False) -> None:
        self.work: object = None
        #: With NCCL: the event behind it.
        self.over: torch.cuda.Event | None = None
        self._tensors = tensors
        self._is_done = is_done
        self._lands = False

    def mark_done(self, *, lands: bool = False) -> None:
        """Mark it as done well. `lands`: on streams without a waiter yet. From any thread."""
        self._lands = lands and any(tensor.is_cuda for tensor in self._tensors)
        self._is_done = True

    @property
    def succeeded(self) -> bool:
        """Return whether it is done, and done well: what the caller's stream does from now on sees the result."""
        if self._is_done and self._lands:
            self.work.wait()  # type: ignore[attr-defined]
            self._lands = False
        return self._is_done


class _InFlight:
    """The operations that were started and have not been waited for. `nccl`: the process group, if it is one of NCCL's.

    With NCCL an event behind each operation, on a stream of ours, tells that the GPU is done with it. (The library's
    own is_completed is also true where the communicator has failed, and its wait may then abort, which may hang.)
    """

    def __init__(self, channel: AgentChannel, nccl: object | None) -> None:
        self._channel = channel
        self._nccl = nccl
        self._stream: torch.cuda.Stream | None = None
        self._operations: list[Operation] = []
        self._finished = 0
        self._over = threading.Condition()
        self.error: str | None = None

    def start(
        self, begin: Callable[[], object], *tensors: torch.Tensor, callback: Callable[[], None] | None = None,
        in_thread: bool = False,
    ) -> Operation:  # fmt: skip
        """Begin an operation. One that cannot even begin counts as failed; what comes after it is not tried."""
        operation = Operation(*tensors)
        if self.error is not None:
            return operation
        try:
            operation.work = work = begin()
            if self._nccl is not None:
                self._stream = self._stream or torch.cuda.Stream(tensors[0].device)
                operation.over = event_after(work, self._stream)
        except (AttributeError, RuntimeError) as error:  # no attributes: the group has been left meanwhile
            self.error = str(error)
            return operation
        self._operations.append(operation)
        if self._nccl is not None:
            if callback is not None:
                with torch.cuda.stream(self._stream):
                    callback()
        elif in_thread:
            ending = partial(self._note, operation, work.wait, None)  # type: ignore[attr-defined]
            threading.Thread(target=ending, name="waits", daemon=True).start()
        else:
            work.get_future().add_done_callback(lambda future: self._note(operation, future.value, callback))  # type: ignore[attr-defined]
        return operation

    def _note(self, operation: Operation, wait: Callable[[], object], callback: Callable[[], None] | None) -> None:
        try:
            wait()
            operation.mark_done(lands=True)
            if callback is not None and operation.succeeded:
                callback()
        except Exception as error:
            self.error = self.error or str(error) or repr(error)
        with self._over:
            self._finished += 1
            self._over.notify_all()
        self._channel.wake()

    def settled(self, *only: Operation) -> bool:
        """Return whether one has failed or all, or only these, are done."""
        if self._nccl is not None:
            self._poll(self._nccl)
        are_done = all(operation.succeeded for operation in only) if only else self._finished == len(self._operations)
        return self.error is not None or are_done

    def _poll(self, nccl: object) -> None:
        """Poll the operations in their order: that is how they run."""
        self.error = self.error or nccl_error(nccl) or None
        while self.error is None and self._finished < len(self._operations):
            operation = self._operations[self._finished]
            assert operation.over is not None
            if not operation.over.query():
                return
            torch.cuda.current_stream().wait_event(operation.over)
            operation.mark_done()
            self._finished += 1

    def wait_until_over(self, timeout_s: float) -> bool:
        """Wait until all have ended; False where that takes longer."""
        with self._over:
            return self._over.wait_for(lambda: self._finished == len(self._operations), timeout_s)

    def reset(self) -> None:
        """Drop all operations."""
        self._operations = []
        self._finished = 0


def form(
    place: GroupPlacement, generation: int, channel: AgentChannel, timeout_s: float | None,
    standby: tuple[str, Attempt] | None = None, stores: StoreConnections | None = None,
) -> ShardGroup:  # fmt: skip
    """Form the group of `generation` with its other members; return when this member is connected to all.

    `standby`: a group that may be used instead; `stores`: where the connection to the store is kept. Raises
    MembershipSuperseded when a newer membership (urgent or not) comes meanwhile, GroupBroken when forming fails or
    takes longer than `timeout_s`, SumsMismatch where a member has an older hook, QuitRequested.
    """
    if place.size == 1:
        return ShardGroup(None, generation, place.rank, place.size, channel, place.device)
    attempt = Attempt(place, channel, standby, stores)

    def over() -> bool:
        """Return whether the attempt has ended, or a newer membership has come."""
        return attempt.over or channel.newest(generation) is not None

    try:
        in_time = channel.wait(over, WAITS_S if timeout_s is None else min(WAITS_S, timeout_s))
        if not in_time:
            channel.send(WorkerWaiting(**channel.reporter, generation=generation))
            in_time = channel.wait(over, None if timeout_s is None else max(0.0, timeout_s - WAITS_S))
    except BaseException:
        attempt.abandon()
        raise
    formed, error = attempt.claim()
    if attempt.fatal is not None:
        raise attempt.fatal
    if formed is None:
        if error is not None:
            raise GroupBroken(error)
        if in_time:
            raise MembershipSuperseded(f"generation {generation} was superseded while it formed")
        raise GroupBroken(f"not all members of generation {generation} joined within {timeout_s} s")
    return ShardGroup(formed, generation, place.rank, place.size, channel, place.device)
