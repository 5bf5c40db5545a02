"""The agent's own health check: computes, stores and sums for a few seconds, and compares the results.

    python -m unicrond.agents.health.self_test --slots 8 [--accelerators auto] [--limit-s 60]

What is tested, on the device of every slot at the same time (its GPU, or a CPU thread):
* the driver's report: no GPU is lost, needs an action, or has memory rows that can be remapped no more;
* matrix products: whole numbers, so small that every sum is exact in any order and precision; each product is held bit
  by bit against its repetitions, and against its factors (Freivalds: A(Bx) = (AB)x);
* memory: patterns and their complements, written, read back and compared;
* a collective: all slots sum vectors of whole numbers (gloo; nccl where each slot has a GPU to itself).

Rules
-----
* No GPU and no network are needed: one process per slot, which meet at a file. No other node takes part: the groups
  of the next tasks will show whether links to other nodes are sound.
* It ends in time: each part takes at most a share of `--limit-s`, and an alarm ends the whole.
* It takes little: one thread and at most MEMORY_BYTES per slot, niced by its starter.
* Exit code 0 and one line: nothing wrong was found. Exit code 1: the line says what, on which slot.
* `--break PART:SLOT` makes a part go wrong on purpose (matmul, memory, collective, silence), for drills and tests.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, get_args

from unicrond.agents.accelerators.diagnosis import states_of
from unicrond.agents.accelerators.driver import Choice
from unicrond.agents.accelerators.watch import open_driver
from unicrond.agents.host.prctl import die_with_parent
from unicrond.agents.protocol.gpus import visible_gpus

#: The memory to test in each slot: on a CPU, and on a GPU (at most a quarter of its free memory).
MEMORY_BYTES = {"cpu": 64 * 2**20, "cuda": 4 * 2**30}
_MATRIX = {"cpu": 384, "cuda": 4096}
_REPEATS = {"cpu": 4, "cuda": 16}
#: Sums of _MATRIX products of numbers below this are exact in a float's 24 bits; the numbers are exact in 8.
_LARGEST = 8
_VECTOR = 1 << 18
_PARTS = ("matmul", "memory", "collective", "silence")
_COLLECTIVE_S = 30.0


class SelfTestFailure(Exception):
    """A part of the test failed; the text says what is wrong."""


class Breakage(NamedTuple):
    """The failure that the self-test is to simulate, for drills."""

    part: str = ""
    slot: int = -1

    def hits(self, part: str, slot: int) -> bool:
        """Return whether this part is to fail on this slot."""
        return (part, slot) == (self.part, self.slot)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the test, print one line and return the exit code."""
    options = _parse(arguments)
    began_s = time.monotonic()
    try:
        lines = [*_check_drivers(options.accelerators, options.slots), *_test_slots(options)]
    except SelfTestFailure as problem:
        print(f"self-test: {problem}", flush=True)
        return 1
    took_s = time.monotonic() - began_s
    print(f"self-test: found nothing wrong in {took_s:.1f} s: {'; '.join(lines)}", flush=True)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m unicrond.agents.health.self_test",
        description="Check this node's health: compute, memory, GPUs.",
    )
    parser.add_argument("--slots", type=int, default=1, help="number of workers on the node (%(default)s)")
    parser.add_argument("--accelerators", choices=get_args(Choice), default="auto", help="source of its GPUs' health")
    parser.add_argument("--limit-s", type=float, default=60.0, help="time limit of the whole test (%(default)s)")
    parser.add_argument("--break", dest="breakage", default="", metavar="PART:SLOT", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    part, _, slot = options.breakage.partition(":")
    if options.slots < 1 or options.limit_s <= 0 or (part and (part not in _PARTS or not slot.isdecimal())):
        parser.error("--slots and --limit-s must be above 0, --break one of " + ", ".join(_PARTS) + " and a slot")
    options.breakage = Breakage(part, int(slot)) if part else Breakage()
    return options


# --- the driver ----------------------------------------------------------------------------------


def _check_drivers(choice: Choice, slots: int) -> list[str]:
    driver = open_driver(choice, visible_gpus(), slots)
    if driver is None:
        return []
    try:
        for gpu, name in enumerate(driver.names):
            for _, _, message, _ in states_of(driver.read(gpu)):
                raise SelfTestFailure(f"{name}: {message}")
    finally:
        driver.close()
    return [f"the driver of {len(driver.names)} accelerators reports no fault"]


# --- the slots -----------------------------------------------------------------------------------


def _test_slots(options: argparse.Namespace) -> list[str]:
    """Fork one process per slot before any has touched a GPU; the first that fails ends the test."""
    import torch  # here: --help need not wait for it

    torch.set_num_threads(1)
    gpus = visible_gpus() if torch.backends.cuda.is_built() else ()
    limit_s = max(1.0, options.limit_s * 0.9)
    with tempfile.TemporaryDirectory(prefix="unicron-self-test-") as meeting:
        slots = [_fork(slot, options, gpus, Path(meeting) / "store", limit_s) for slot in range(options.slots)]
        try:
            return _gather(slots, limit_s)
        finally:
            for pid, _ in slots:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _gather(slots: list[tuple[int, Connection]], limit_s: float) -> list[str]:
    ends_s = time.monotonic() + limit_s
    open_ends = {end: slot for slot, (_, end) in enumerate(slots)}
    answers: dict[int, str] = {}
    while open_ends:
        ready = wait(list(open_ends), max(0.0, ends_s - time.monotonic()))
        if not ready:
            raise SelfTestFailure(f"slot {min(open_ends.values())} did not answer within {limit_s:.0f} s")
        for end in ready:
            assert isinstance(end, Connection)  # only our own are waited for
            slot = open_ends.pop(end)
            try:
                wrong, text = end.recv()
            except EOFError:
                raise SelfTestFailure(f"slot {slot} ended before it answered") from None
            if wrong:
                raise SelfTestFailure(f"slot {slot}: {text}")
            answers[slot] = text
    return [f"{len(answers)} x {answers[0]}" if len(set(answers.values())) == 1 else ", ".join(answers.values())]


def _fork(
    slot: int, options: argparse.Namespace, gpus: tuple[str, ...], store: Path, limit_s: float
) -> tuple[int, Connection]:
    parent = os.getpid()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, Connection(reading, writable=False)
    code = 1
    try:
        die_with_parent(parent)
        os.close(reading)
        signal.alarm(int(limit_s) + 5)
        end = Connection(writing, readable=False)
        try:
            end.send((False, _test_slot(slot, options, gpus, store)))
        except SelfTestFailure as problem:
            end.send((True, str(problem)))
        except Exception as error:
            traceback.print_exc()
            end.send((True, f"{type(error).__name__}: {error}"[:500]))
        code = 0
    finally:
        os._exit(code)


def _test_slot(slot: int, options: argparse.Namespace, gpus: tuple[str, ...], store: Path) -> str:
    import torch

    breakage: Breakage = options.breakage
    kind = "cuda" if slot < len(gpus) else "cpu"
    if kind == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[slot]
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    device = torch.device(kind)
    if breakage.hits("silence", slot):
        signal.pause()
    products = _check_products(torch, device, slot, breakage)
    memory_bytes = _check_memory(torch, device, slot, breakage)
    summed = _check_collective(torch, device, slot, options.slots, len(gpus), store, breakage)
    return f"{kind}: {products} products, {memory_bytes >> 20} MiB{summed}"


def _check_products(torch: Any, device: Any, slot: int, breakage: Breakage) -> int:
    """Multiply in each precision of the device; return how many products were compared with their factors."""
    size, kind = _MATRIX[device.type], device.type
    generator = torch.Generator().manual_seed(slot)
    count = 0
    for precision in (torch.float32, torch.bfloat16) if kind == "cuda" else (torch.float32, torch.float64):
        factors = [torch.randint(-_LARGEST, _LARGEST, (size, size), generator=generator) for _ in range(2)]
        probe = torch.randint(0, 2, (size, 1), generator=generator)
        left_factor, right_factor = (factor.to(device, precision) for factor in factors)
        first: Any = None
        for repeat in range(_REPEATS[kind]):
            product = left_factor @ right_factor
            if breakage.hits("matmul", slot) and repeat == _REPEATS[kind] - 1:
                product[size // 2, size // 3] += 1
            if first is not None and not torch.equal(first, product):
                raise SelfTestFailure(
                    f"a matrix product in {precision} differs between two runs on {_name(torch, device)}"
                )
            first = product if first is None else first
            count += 1
        if precision is not torch.bfloat16:  # whose products are rounded
            expected = factors[0] @ (factors[1] @ probe)
            if not torch.equal(first.cpu().to(torch.int64) @ probe, expected):
                raise SelfTestFailure(f"a matrix product in {precision} is wrong on {_name(torch, device)}")
    return count


def _check_memory(torch: Any, device: Any, slot: int, breakage: Breakage) -> int:
    """Write patterns and read them back; return how many bytes."""
    size_bytes = MEMORY_BYTES[device.type]
    if device.type == "cuda":
        size_bytes = min(size_bytes, torch.cuda.mem_get_info()[0] // 4)
    words = torch.empty(size_bytes // 8, dtype=torch.int64, device=device)
    steps = torch.arange(len(words), dtype=torch.int64, device=device)
    for pattern in (0x5555555555555555, 0x3333333333333333):
        for inverted in (False, True):
            torch.bitwise_xor(steps, ~pattern if inverted else pattern, out=words)
            if breakage.hits("memory", slot):
                words[len(words) // 2] ^= 1 << 17
            words ^= ~pattern if inverted else pattern
            if not torch.equal(words, steps):
                at = int((words != steps).nonzero()[0])
                raise SelfTestFailure(
                    f"memory of {_name(torch, device)} does not keep its bits, first at byte {8 * at}"
                )
    return 2 * size_bytes


def _check_collective(
    torch: Any, device: Any, slot: int, slots: int, gpus: int, store: Path, breakage: Breakage
) -> str:
    """Sum vectors between the node's own slots."""
    if slots == 1:
        return ""
    from datetime import timedelta

    from torch import distributed

    backend = "nccl" if gpus >= slots else "gloo"
    meeting = distributed.FileStore(str(store), slots)
    limit = timedelta(seconds=_COLLECTIVE_S)
    distributed.init_process_group(backend, store=meeting, rank=slot, world_size=slots, timeout=limit)
    try:
        vector = torch.arange(_VECTOR, dtype=torch.int64) * (slot + 1)
        summed = vector.to(device) if backend == "nccl" else vector
        distributed.all_reduce(summed)
        if breakage.hits("collective", slot):
            summed[_VECTOR // 2] += 1
        expected = torch.arange(_VECTOR, dtype=torch.int64) * (slots * (slots + 1) // 2)
        if not torch.equal(summed.cpu(), expected):
            raise SelfTestFailure(f"a sum over the node's {slots} slots by {backend} is wrong")
    finally:
        distributed.destroy_process_group()
    return f", a sum over {slots} slots by {backend}"


def _name(torch: Any, device: Any) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


if __name__ == "__main__":
    sys.exit(main())
