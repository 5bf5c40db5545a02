"""What a change of membership costs as groups grow: whole regroups, the rendezvous store alone, standby groups alone.

    python -m tests.benchmarks.groups regroup --members 2 4 8 16 24
    python -m tests.benchmarks.groups store --members 64 256 1024
    python -m tests.benchmarks.groups standby --members 3 5 8
    python -m tests.benchmarks.groups verdict --members 64 1024 16384

`--base TREE`: beside another checkout, in turns. Members are light processes (`store`: threads of a few processes) that
run the trainer's own code on one machine: "wall" is what its cores make of all members together, "member" the median
CPU time of one, "store" the CPU time of the process in the middle. All milliseconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MICRO_BATCHES_PER_REPLICA = 4
BUCKETS = 20
#: Processes that share the members of `store`.
CLIENTS = 4
_FORK = multiprocessing.get_context("fork")


# --- the process in the middle -------------------------------------------------------------------


@contextlib.contextmanager
def rendezvous_store() -> Iterator[tuple[str, int, int]]:
    """A node's store: its address and its process."""
    from unicrond.agents.trainer.groups.rendezvous_store import serve

    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
        host, port = listener.getsockname()
        pid = os.fork()
        if pid == 0:
            serve(listener)
        try:
            yield host, port, pid
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def cpu_ms(pid: int) -> float:
    """Of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e6


def memory_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def together(
    count: int, rounds: int, member: Callable[[int, Any], list[Any]], watched: int, steps: int = 1
) -> dict[str, list[Any]]:
    """Run `member(number, barrier)` in so many processes, which wait at the barrier before each round and after each of
    its steps. Returns what each has said of each round, and the CPU time of the `watched` process in the last step."""
    barrier = _FORK.Barrier(count + 1)
    pipes = []
    processes = []
    for number in range(count):
        receiver, sender = _FORK.Pipe(duplex=False)

        def run(number: int = number, sender: Any = sender) -> None:
            sender.send(member(number, barrier))

        processes.append(_FORK.Process(target=run, daemon=True))
        pipes.append(receiver)
        processes[-1].start()
    used_ms = []
    for _ in range(rounds):
        barrier.wait(120)
        for _ in range(steps - 1):
            barrier.wait(120)
        began_ms = cpu_ms(watched)
        barrier.wait(120)
        used_ms.append(cpu_ms(watched) - began_ms)
    said = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join(30)
        process.kill()
    return {"said": said, "store_ms": used_ms}


# --- whole regroups ------------------------------------------------------------------------------


def worker(number: int, count: int, store: tuple[str, int], standby_max: int) -> tuple[Any, Any]:
    """A worker's rendezvous without an agent, and the membership that names all `count`."""
    import torch

    from unicrond.agents.protocol.messages import GroupMembership, Launch
    from unicrond.agents.trainer.groups.shard_group import Rendezvous
    from unicrond.agents.trainer.process.channel import AgentChannel
    from unicrond.events.vocabulary import Member, StoreAddress, TaskSpec

    torch.set_num_threads(1)
    address = StoreAddress(host=store[0], port=store[1])
    launch = Launch(
        worker=f"t.{number + 1}", task="t", node="n", address="127.0.0.1", agent_socket="/nowhere", replica=number,
        shard=0, store=address, spec=TaskSpec(name="t"),
    )  # fmt: skip
    context: Any = SimpleNamespace(
        launch=launch,
        channel=AgentChannel(launch, 3600),
        replica=SimpleNamespace(device=torch.device("cpu"), all_true=bool, highest=lambda *values: list(values)),
        settings=SimpleNamespace(standby_max=standby_max, collective_timeout_s=60.0, fault_wait_s=60.0),
        generation=0,
    )
    members = tuple(Member(worker=f"t.{one + 1}", node="n", replica=one, shard=0) for one in range(count))
    membership = GroupMembership(generation=1, members=members, joiners=(), urgent=True, store=address)
    return Rendezvous(context), membership


def regroup_member(count: int, rounds: int, store: tuple[str, int], number: int, barrier: Any) -> list[Any]:
    import msgspec

    from unicrond.agents.trainer.lifecycle.verdict import Position, judge

    rendezvous, membership = worker(number, count, store, 0)
    micro_batches = MICRO_BATCHES_PER_REPLICA * count
    position = Position(True, 10, False, tuple(range(number, micro_batches, count)))
    said = []
    for generation in range(1, rounds + 1):
        membership = msgspec.structs.replace(membership, generation=generation)
        barrier.wait(120)
        times, cpu = [time.monotonic()], time.process_time()
        rendezvous.keep_old_group(is_sound=False, bounded=False)
        rendezvous.follow(membership)
        rendezvous.form(membership)
        times.append(time.monotonic())
        positions = rendezvous.exchange(position, micro_batches, BUCKETS, sharded=False)
        times.append(time.monotonic())
        judge(positions, micro_batches)
        times.append(time.monotonic())
        used = time.process_time() - cpu
        barrier.wait(120)
        said.append((times, used))
    return said


def regroup(count: int, rounds: int) -> dict[str, list[float]]:
    """Wall of each step: from the first member's beginning to the last one's end."""
    with rendezvous_store() as (host, port, pid):
        told = together(count, rounds, partial(regroup_member, count, rounds, (host, port)), pid)
        found: dict[str, list[float]] = {"wall": [], "form": [], "exchange": [], "verdict": [], "member": []}
        for number in range(1, rounds):  # the first one makes what is made once
            times = [said[number][0] for said in told["said"]]
            began, formed, exchanged, drawn = ([one[step] for one in times] for step in range(4))
            found["wall"].append((max(drawn) - min(began)) * 1e3)
            found["form"].append((max(formed) - min(began)) * 1e3)
            found["exchange"].append(statistics.median(e - f for e, f in zip(exchanged, formed, strict=True)) * 1e3)
            found["verdict"].append(statistics.median(d - e for d, e in zip(drawn, exchanged, strict=True)) * 1e3)
            found["member"].append(statistics.median(said[number][1] for said in told["said"]) * 1e3)
        found["store"] = told["store_ms"][1:]
        return found


# --- the store alone -----------------------------------------------------------------------------

#: What gloo says of a member: its host's name, its address, and behind them a number for each member.
_HEAD = bytes(200)


def _meet_now(server: Any, rank: int, size: int, prefix: str) -> None:
    import numpy as np
    import torch.distributed as dist

    from unicrond.agents.trainer.groups.gloo_store_messages import GlooStore
    from unicrond.agents.trainer.groups.store_messages import StoreExchange

    words = StoreExchange(dist.PrefixStore(prefix, server), rank, size, lambda: False)
    words.publish("standby", "-")
    words.publish("port", f"+{30000 + rank}")
    words.collect("port")
    told = GlooStore(words, size, f"10.0.{rank >> 8}.{rank & 255} {30000 + rank}")
    told.set(f"0/{rank}", _HEAD + np.arange(size, dtype=np.int64).tobytes())
    for member in range(size):
        told.get(f"0/{member}")
    words.withdraw()


def _meet_before(server: Any, rank: int, size: int, prefix: str) -> None:
    """As of 3c0a30a: every member reads every other's port, then gloo every other's value, which names all members."""
    import torch.distributed as dist

    store = dist.PrefixStore(prefix, server)
    store.set(f"standby/{rank}", "-")
    store.set(f"port/{rank}", str(30000 + rank))
    everyone = [f"port/{member}" for member in range(size)]
    store.wait(everyone, timedelta(seconds=300))
    store.multi_get(everyone)
    store.set(f"0/{rank}", (_HEAD + bytes(8 * size)).decode())
    for member in range(size):
        store.wait([f"0/{member}"], timedelta(seconds=300))
        store.get(f"0/{member}")


def store_client(
    size: int, rounds: int, address: tuple[str, int], meet: Callable[..., None], number: int, barrier: Any
) -> list[Any]:
    import torch.distributed as dist

    ranks = range(number, size, CLIENTS)
    said = []
    for generation in range(rounds):
        prefix = f"gen/t/{generation}/0"
        barrier.wait(300)
        times = [time.monotonic()]
        # One by one: torch asks for the name of each address it connects to, and a name service drops what is too much.
        servers = {rank: dist.TCPStore(*address, None, False, timedelta(seconds=300)) for rank in ranks}
        threads = [threading.Thread(target=meet, args=(server, rank, size, prefix)) for rank, server in servers.items()]
        times.append(time.monotonic())
        barrier.wait(300)
        times.append(time.monotonic())
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        times.append(time.monotonic())
        barrier.wait(300)
        said.append(times)
    return said


def store(size: int, rounds: int, meet: Callable[..., None]) -> dict[str, list[float]]:
    with rendezvous_store() as (host, port, pid):
        told = together(CLIENTS, rounds, partial(store_client, size, rounds, (host, port), meet), pid, steps=2)
        found: dict[str, list[float]] = {"wall": [], "connecting": []}
        for number in range(rounds):
            times = [said[number] for said in told["said"]]
            found["connecting"].append((max(one[1] for one in times) - min(one[0] for one in times)) * 1e3)
            found["wall"].append((max(one[3] for one in times) - min(one[2] for one in times)) * 1e3)
        found["store"] = told["store_ms"]
        found["MiB of the store"] = [memory_mib(pid)]
        return found


# --- standby groups alone ------------------------------------------------------------------------


def standby_member(count: int, rounds: int, store: tuple[str, int], number: int, barrier: Any) -> list[Any]:
    import msgspec

    rendezvous, membership = worker(number, count, store, count)
    rendezvous.follow(membership)
    rendezvous.form(membership)
    workers = [member.worker for member in membership.members]
    said = []
    for generation in range(1, rounds + 1):
        membership = msgspec.structs.replace(membership, generation=generation)
        rendezvous.follow(membership)
        barrier.wait(120)
        began, cpu = time.monotonic(), time.process_time()
        rendezvous.prepare_standby(membership)
        standby = rendezvous._standby
        rest = [workers[:lost] + workers[lost + 1 :] for lost in range(count) if lost != number]
        while not all(standby.offer(others) for others in rest):
            time.sleep(0.0005)
        said.append((began, time.monotonic(), time.process_time() - cpu, len([*Path("/proc/self/fd").iterdir()])))
        barrier.wait(120)
        standby.close()
        time.sleep(0.05 * count)
    return said


def standby(count: int, rounds: int) -> dict[str, list[float]]:
    with rendezvous_store() as (host, port, pid):
        told = together(count, rounds, partial(standby_member, count, rounds, (host, port)), pid)
        rows = [[said[number] for said in told["said"]] for number in range(1, rounds)]
        return {
            "wall": [(max(one[1] for one in row) - min(one[0] for one in row)) * 1e3 for row in rows],
            "member": [statistics.median(one[2] for one in row) * 1e3 for row in rows],
            "descriptors": [statistics.median(one[3] for one in row) for row in rows],
            "store": told["store_ms"][1:],
        }


# --- what each member works out by itself --------------------------------------------------------


def verdict(size: int, rounds: int) -> dict[str, list[float]]:
    """From all members' rows to the verdict, and what has to travel where optimizer state is sharded: CPU time."""
    from unicrond.agents.trainer.lifecycle.shares import Shares, assign_parts
    from unicrond.agents.trainer.lifecycle.verdict import Position, judge

    micro_batches = MICRO_BATCHES_PER_REPLICA * (size + 1)
    rows = [Position(True, 10, False, tuple(range(r, micro_batches, size + 1))).row(micro_batches, BUCKETS) for r in
            range(size)]  # fmt: skip
    shares = Shares([64 * 4 * size])
    before = assign_parts([frozenset([f"n{replica}"]) for replica in range(size + 1)])
    shares.layout = shares.layout_of(before)[1:]
    wanted = assign_parts([frozenset([f"n{replica}"]) for replica in range(1, size + 1)])
    found: dict[str, list[float]] = {"rows and verdict": [], "moves of parts": [], "gathering parts": []}

    def timed(name: str, run: Callable[[], object]) -> None:
        began = time.process_time()
        run()
        found[name].append((time.process_time() - began) * 1e3)

    for _ in range(rounds):
        timed("rows and verdict", lambda: judge([Position.from_row(row, micro_batches) for row in rows], micro_batches))
        timed("moves of parts", lambda: shares.dividing(wanted))
        timed("gathering parts", lambda: shares.gathering())
    return found


# --- all of it -----------------------------------------------------------------------------------

MEASURED: dict[str, Callable[[int, int], dict[str, list[float]]]] = {
    "regroup": regroup,
    "store": lambda size, rounds: store(size, rounds, _meet_now),
    "store-before": lambda size, rounds: store(size, rounds, _meet_before),
    "standby": standby,
    "verdict": verdict,
}


def show(what: str, members: Sequence[int], rounds: int, trees: dict[str, Path]) -> None:
    for count in members:
        for name, tree in trees.items():
            command = [sys.executable, __file__, what, "--one", str(count), "--rounds", str(rounds)]
            env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
            answer = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False)
            if answer.returncode:
                raise SystemExit(answer.stderr)
            told: dict[str, list[float]] = json.loads(answer.stdout.splitlines()[-1])
            row = ", ".join(
                f"{key} {statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"
                for key, values in told.items()
            )
            print(f"{what}, {count} members, {name}: {row}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=MEASURED)
    parser.add_argument("--members", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--base", type=Path, help="another checkout to measure beside this one")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(MEASURED[given.what](given.one, given.rounds)))
        return
    show(given.what, given.members, given.rounds, {**({"base": given.base} if given.base else {}), "now": Path.cwd()})


if __name__ == "__main__":
    main()
