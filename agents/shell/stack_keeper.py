"""Reads where workers that hang stand, before they are killed or leave their group, and tells it as StacksTaken.

Rules
-----
* The questions go out at once, before `take` returns: whatever is sent to the worker later takes effect later.
* A worker is asked itself, for ASKED_S; one that is stopped, or does not answer, is read by py-spy where that is
  installed. All together takes READ_S at most: what is not known by then is left out, and the reason stands in its
  place. A SIGKILL waits for no longer than that (daemon.py).
* An event is bounded (events/vocabulary/stacks.py): equal stacks stand once, of others the first STACK_TEXTS_MAX.

Which workers, and when: core/stopping.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Sequence

from msgspec.structs import replace

from unicrond.agents.core.state import Input, TakeStacks
from unicrond.agents.output.stacks import NoStacks, Questions, kernel_place, stacks
from unicrond.agents.protocol.marks import Mark
from unicrond.agents.protocol.messages import Flight, Stacks, TellFlight, TellStacks
from unicrond.agents.shell.progress_watch import Signs
from unicrond.events.queries.worker_queries import Collective
from unicrond.events.vocabulary import Name, StackReader, StacksTaken, WorkerId, WorkerStack
from unicrond.events.vocabulary.stacks import STACK_TEXTS_MAX, STACK_WORKERS_MAX, cut_stack

#: How long a worker may take to answer by itself, and how long all workers of one order may take together.
ASKED_S = 0.5
READ_S = 2.0
#: So much of READ_S is left to the rest when py-spy is given up.
_MARGIN_S = 0.1
#: Where py-spy begins with a thread.
_THREAD = re.compile(r"^Thread \w+ \(", re.MULTILINE)
_DURATION_MAX_US = 366 * 86_400_000_000
_ITERATION_MAX = 10**12


class StackKeeper:
    """Reads the stacks of one node's workers. `feed`: gets the StacksTaken."""

    def __init__(self, node: Name, questions: Questions, signs: Signs, feed: Callable[[Input], None]) -> None:
        self._node = node
        self._questions = questions
        self._signs = signs
        self._feed = feed
        self._reading: dict[WorkerId, asyncio.Task[tuple[WorkerStack, str]]] = {}
        self._orders: set[asyncio.Task[None]] = set()

    def take(self, order: TakeStacks) -> None:
        """Ask the workers now; what they answer, or py-spy tells, is fed when it is known."""
        readings = []
        for worker, pid in list(order.processes.items())[:STACK_WORKERS_MAX]:
            reading = asyncio.create_task(self._bounded(self._read(worker, pid), self._sight(worker, pid)))
            self._reading[worker] = reading
            reading.add_done_callback(lambda ended, worker=worker: self._forget(worker, ended))  # type: ignore[misc]
            readings.append(reading)
        telling = asyncio.create_task(self._tell(order, readings))
        self._orders.add(telling)
        telling.add_done_callback(self._orders.discard)

    def is_reading(self, worker: WorkerId) -> bool:
        """Return whether the worker's stack is being read now."""
        return worker in self._reading

    def when_read(self, worker: WorkerId, act: Callable[[], None]) -> None:
        """Call `act` once the worker's stack is read or given up, within READ_S."""
        self._reading[worker].add_done_callback(lambda _: act())

    async def close(self) -> None:
        """Give up what is being read; what waits for it happens now."""
        tasks = [*self._reading.values(), *self._orders]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, worker: WorkerId, ended: asyncio.Task[tuple[WorkerStack, str]]) -> None:
        if self._reading.get(worker) is ended:
            del self._reading[worker]

    async def _tell(self, order: TakeStacks, readings: Sequence[asyncio.Task[tuple[WorkerStack, str]]]) -> None:
        left_out = len(order.processes) - len(readings)
        workers, texts = bundle([await reading for reading in readings])
        self._feed(
            StacksTaken(
                node=self._node,
                task=order.task,
                generation=order.generation,
                workers=workers,
                stacks=texts,
                left_out=left_out,
            )
        )

    def _sight(self, worker: WorkerId, pid: int) -> WorkerStack:
        """Return what is seen of a worker from outside, without its help."""
        mark = self._signs.mark(worker) or Mark("unknown", 0, 0, 0, 0, 0, 0, 0, self._signs.now_us())
        return WorkerStack(
            worker=worker,
            phase=mark.phase,
            iteration=min(mark.iteration, _ITERATION_MAX),
            collectives_entered=mark.collectives_entered,
            is_waiting=mark.is_waiting,
            still_us=min(max(0, self._signs.now_us() - mark.changed_us), _DURATION_MAX_US),
            is_stopped=self._signs.is_stopped(pid),
            section=mark.section,
            section_us=min(mark.section_us(self._signs.now_us()), _DURATION_MAX_US),
        )

    def _read(self, worker: WorkerId, pid: int) -> Callable[[WorkerStack], Awaitable[tuple[WorkerStack, str]]]:
        """Ask the worker now, unless it is stopped; return how to get the rest."""
        is_stopped = self._signs.is_stopped(pid)
        stack = None if is_stopped else self._questions.send(worker, TellStacks())
        record = None if is_stopped else self._questions.send(worker, TellFlight())

        async def answers(sight: WorkerStack) -> tuple[WorkerStack, str]:
            """Wait for the answers; return what the worker is known to do, and its stack."""
            answer, flight = await asyncio.gather(_answer(stack), _answer(record))
            if isinstance(flight, Flight) and flight.collectives:
                sight = replace(sight, collective=collective_text(flight.collectives), standings=flight.standings)
            if isinstance(answer, Stacks) and answer.text:
                return replace(sight, reader="worker"), answer.text
            return await _from_outside(sight, pid)

        return answers

    async def _bounded(
        self, answers: Callable[[WorkerStack], Awaitable[tuple[WorkerStack, str]]], sight: WorkerStack
    ) -> tuple[WorkerStack, str]:
        try:
            async with asyncio.timeout(READ_S):
                return await answers(sight)
        except TimeoutError:
            return replace(sight, trouble=f"no stack within {READ_S:g} s"), ""


async def _answer(waiting: asyncio.Future[Flight | Stacks] | None) -> Flight | Stacks | None:
    if waiting is None:
        return None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ASKED_S):
            return await asyncio.shield(waiting)
    return None


async def _from_outside(sight: WorkerStack, pid: int) -> tuple[WorkerStack, str]:
    """Read the stack without the worker's help; else say why that is not possible, and where the kernel sees it."""
    try:
        text = await stacks(pid, READ_S - ASKED_S - _MARGIN_S)
    except NoStacks as error:
        state = "its process is stopped" if sight.is_stopped else "it did not answer: no thread of it can run Python"
        place = kernel_place(pid)
        reader: StackReader = "kernel" if place else ""
        trouble = f"{state}{f', in {place} of the kernel' if place else ''}; {error}"
        return replace(sight, reader=reader, trouble=trouble[:300]), ""
    return replace(sight, reader="py-spy"), cut_stack(without_numbers(text.decode(errors="replace").strip()))


def without_numbers(text: str) -> str:
    """Return what py-spy prints without the process's command line and the threads' numbers: so equal stacks are equal
    texts, and no secret of a command line comes to the log."""
    threads = _THREAD.search(text)
    return _THREAD.sub("Thread (", text[threads.start() :]) if threads else text


def collective_text(collectives: Sequence[Collective]) -> str:
    """Say which collective of a flight recorder counts: the first that has not ended, else the last."""
    pending = [collective for collective in collectives if not collective.is_over]
    last = pending[0] if pending else collectives[-1]
    kind = "transfer" if last.is_p2p else "number"
    ended = ", ended" if last.is_over else ""
    sizes = f", {last.sizes}" if last.sizes else ""
    return f"{last.name} of {last.library}, group {last.group}, {kind} {last.number}{sizes}{ended}"[:200]


def bundle(readings: Sequence[tuple[WorkerStack, str]]) -> tuple[tuple[WorkerStack, ...], tuple[str, ...]]:
    """Return the workers with the numbers of their stacks, and the different stacks."""
    texts: list[str] = []
    workers = []
    for sight, text in readings:
        if text and text not in texts and len(texts) < STACK_TEXTS_MAX:
            texts.append(text)
        number = texts.index(text) + 1 if text in texts else 0
        trouble = sight.trouble or ("" if number or not text else "left out: the others' stacks differ, too")
        workers.append(replace(sight, stack=number, trouble=trouble))
    return tuple(workers), tuple(texts)
