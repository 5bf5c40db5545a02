"""What each source of state costs, by the size of the state: to write to, and to take from.

python -m tests.benchmarks.test_state_sources --megabytes 16 256
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from tests.events.certified import Certified, now
from tests.integration.test_state_sources import OtherNode
from unicrond.agents.memory.peer_tokens import Credentials
from unicrond.agents.protocol import memory_exchange
from unicrond.agents.protocol.memory import Memory, digest_of
from unicrond.agents.protocol.memory_exchange import Fetching
from unicrond.agents.protocol.messages import Passes
from unicrond.agents.trainer.states import checkpoint
from unicrond.agents.trainer.states.state_bytes import Flat, read
from unicrond.events.vocabulary import MemoryService
from unicrond.events.vocabulary.shape import Shape

T = TypeVar("T")


def from_peer(service: MemoryService, passes: Passes | None) -> None:
    fetching = Fetching(service, "t", 0, 3, Shape(), passes)
    view = torch.empty(fetching.head.size_bytes, dtype=torch.uint8).numpy().data
    assert fetching.receive(view) == fetching.head.digest
    read(view, copy=True)


def sealed(directory: Path) -> tuple[Passes, Credentials]:
    """What n1 shows to n2, and n2's credentials."""
    certified = Certified(directory / "tls")
    keys = [certified.key(f"agent-{node}") for node in ("n1", "n2")]
    first, second = [Credentials(key, path) for path, key in keys]
    return first.passes(("n2",), "t", certified.warrant("n1", "t", 1), now()), second


def measure(megabytes: int, directory: Path) -> dict[str, float]:
    """Milliseconds."""
    spent: dict[str, float] = {}

    def timed(what: str, work: Callable[[], T]) -> T:
        started = time.perf_counter()
        done = work()
        spent[what] = (time.perf_counter() - started) * 1e3
        return done

    parts = {f"layer.{number}": torch.randn(megabytes * 2**20 // 4 // 16) for number in range(16)}
    tree = {"iteration": 1, "loss": 0.0, "tensors": parts, "optimizer": {}, "scheduler": None}
    memory, other = Memory.private(1 << 40), Memory.private(1 << 40)
    for iteration in (1, 2, 3):  # the pages of both slots are there from the third time on
        flat = Flat.of(tree)
        draft = memory.draft(flat.size_bytes)
        assert draft is not None
        timed("capture: training stands still", lambda d=draft, f=flat: f.write(d.view))  # type: ignore[misc]
        timed("capture: digest, in a thread", lambda d=draft, i=iteration: d.seal(i, 1))  # type: ignore[misc]
    with OtherNode("n2", {0: other}) as service:
        with memory.reading(3) as found:
            assert found is not None
            timed("copy to another node (loopback)", lambda: memory_exchange.push(service, "t", 0, "n1", *found))
            timed("take: memory here", lambda: (digest_of(found[1]), read(found[1], copy=True)))

        timed("take: another node's memory (loopback)", lambda: from_peer(service, None))
    passes, there = sealed(directory)
    with OtherNode("n2", {0: memory}, there) as service:
        timed("take: another node's memory, in TLS", lambda: from_peer(service, passes))
    job = checkpoint.WriteJob(directory, "t", 1, 1, 0, Shape(), "0-1", 2)
    timed("write to storage, in a thread", lambda: checkpoint.write(job, tree))
    timed("take: storage (page cache)", lambda: checkpoint.load(directory, "t", 1, 0))
    memory.close()
    other.close()
    return spent


@pytest.mark.parametrize("megabytes", [16, 128])
def test_state_source_cost(megabytes: int, tmp_path: Path) -> None:
    print(report(megabytes, measure(megabytes, tmp_path)))


def report(megabytes: int, spent: dict[str, float]) -> str:
    return "\n".join(f"{megabytes:5} MiB  {what:40} {ms:8.1f} ms" for what, ms in spent.items())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[16, 256])
    torch.set_num_threads(1)
    for size in parser.parse_args().megabytes:
        with tempfile.TemporaryDirectory() as scratch:
            print(report(size, measure(size, Path(scratch))))
