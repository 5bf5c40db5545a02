"""The soak: `python -m tests.soak.run --agents 2000 --minutes 60 --faults-per-hour 60 --out soak.json`.

1. nats-server and coordinator start as `unicrond run` starts them; agents join; tasks over all nodes are submitted.
2. When all tasks are whole, a time of rest; then faults: of five, four kill a worker, one switches a node off for a
   while. In the middle the coordinator is killed, and the next one takes over; with `--servers 3` the streams' leaders
   step down at three quarters.
3. When all tasks are whole again, the log is read once: what was acknowledged must stand there exactly once.

Exit code 0 where nothing was lost and all healed; the figures are in the JSON, and beside it a plot.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from tests.integration.nats_cluster import NatsCluster, nats_cluster
from tests.soak import reading, report
from tests.soak.memberships import Memberships
from unicrond.core.state.state import ClusterState
from unicrond.ctl.client import ApiError, Client
from unicrond.events.log.subjects import BEAT_STREAM, EVENT_STREAM
from unicrond.events.nats.connection import Connection, Login, connect
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.nats.streams import api
from unicrond.local.dev import free_port

_TICKS = os.sysconf("SC_CLK_TCK")
_NODE_EVERY = 5
_SAMPLE_S = 1.0


def usage(pid: int) -> tuple[float, float]:
    """CPU in seconds and resident memory in MB; zeros where the process is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0, 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / 1e6


class FleetProcess:
    """One process of many nodes."""

    def __init__(self, process: asyncio.subprocess.Process, memberships: Memberships) -> None:
        self.process = process
        self.joined: dict[str, float] = {}
        self._memberships = memberships
        self._answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            told = json.loads(line)
            if "told" in told:
                task, generation, urgent, members, hosts = told["told"]
                self._memberships.told(task, generation, urgent, members, hosts, told["at"])
            elif "following" in told:
                self._memberships.following(self.process.pid, told["following"], told["s"])
            elif "joined" in told:
                self.joined |= told["joined"]
            else:
                self._answers.put_nowait(told)

    async def order(self, **order: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        await self.process.stdin.drain()
        async with asyncio.timeout(120):
            return await self._answers.get()


class Soak:
    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self.options = options
        self.directory = directory
        self.drawn = random.Random(options.seed)
        self.memberships = Memberships()
        self.fleets: list[FleetProcess] = []
        self.coordinator: subprocess.Popen[bytes] | None = None
        self.samples: list[dict[str, Any]] = []
        self.faults: list[dict[str, Any]] = []
        self.figures: dict[str, Any] = {"options": {k: str(v) for k, v in vars(options).items()}}
        self.phase = "joining"
        self._down_until: dict[str, float] = {}
        self._cluster: NatsCluster | None = None
        nats, http = free_port(), free_port()
        self.urls = [f"nats://127.0.0.1:{nats}"]
        self.login = Login()
        self.client = Client(f"http://127.0.0.1:{http}", timeout_s=60.0)
        self._config = directory / "unicron.json"
        self._settings = {
            "state_dir": str(directory / "state"),
            "heartbeat_s": options.heartbeat_s,
            "nats": {"port": nats},
            "api": {"port": http},
            "auth": "off",
        }
        self.names = [f"n{number:05d}" for number in range(options.agents)]
        spare = max(1, options.agents // 100)
        count = max(1, min(20, options.agents // 10))
        self.wanted = (options.agents - spare) // count * options.slots
        self.tasks = [f"t{number:02d}" for number in range(count)]

    # --- processes -------------------------------------------------------------------------------

    def use(self, cluster: NatsCluster) -> None:
        """Servers of their own, in place of the coordinator's."""
        self._cluster, self.urls, self.login = cluster, cluster.urls, cluster.login
        keys = {"nkey_seed": str(cluster.seed), "tls_ca": str(cluster.ca)}
        self._settings["nats"] = {"url": ",".join(cluster.urls), "replicas": len(cluster.urls), **keys}

    def start_coordinator(self) -> None:
        with (self.directory / "coordinator.log").open("ab") as log:
            self.coordinator = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.soak.coordinator",
                    str(self._config),
                    str(self.directory / "delays.jsonl"),
                ],
                stdout=log,
                stderr=log,
            )

    def nats_pids(self) -> list[int]:
        if self._cluster is not None:
            return [process.pid for process in self._cluster.servers.values()]
        return [int((self.directory / "state" / "nats" / "nats-server.pid").read_text())]

    async def live(self, timeout_s: float = 120.0) -> None:
        async with asyncio.timeout(timeout_s):
            while True:
                with contextlib.suppress(ApiError):
                    if (await asyncio.to_thread(self.client.health))["status"] == "live":
                        return
                assert self.coordinator is not None
                assert self.coordinator.poll() is None, "the coordinator ended; see coordinator.log"
                await asyncio.sleep(0.05)

    async def start_fleets(self) -> None:
        options = self.options
        for number in range(options.processes):
            settings = {
                "urls": self.urls,
                "nkey_seed": str(self.login.nkey_seed or ""),
                "tls_ca": str(self.login.tls_ca or ""),
                "names": self.names[number :: options.processes],
                "slots": options.slots,
                "heartbeat_s": options.heartbeat_s,
                "iteration_s": options.iteration_s,
                "kept_every_s": options.kept_every_s,
                "join_every_s": options.processes / options.joins_per_s,
            }
            path = self.directory / f"settings{number}.json"
            path.write_text(json.dumps(settings))
            with (self.directory / f"fleet{number}.log").open("wb") as log:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "tests.soak.fleet",
                    str(path),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    limit=64 << 20,
                )
            self.fleets.append(FleetProcess(process, self.memberships))

    async def end(self) -> None:
        for fleet in self.fleets:
            with contextlib.suppress(ProcessLookupError):
                fleet.process.kill()
            await fleet.process.wait()
        if self.coordinator is not None and self.coordinator.poll() is None:
            self.coordinator.send_signal(signal.SIGINT)  # with its nats-server
            try:
                await asyncio.to_thread(self.coordinator.wait, 30)
            except subprocess.TimeoutExpired:
                self.coordinator.kill()
        if self._cluster is None:
            with contextlib.suppress(OSError, ValueError):
                os.kill(self.nats_pids()[0], signal.SIGTERM)

    # --- what is watched -------------------------------------------------------------------------

    async def watch(self, connection: Connection) -> None:
        while True:
            assert self.coordinator is not None
            sample: dict[str, Any] = {"s": time.monotonic(), "phase": self.phase, "pid": self.coordinator.pid}
            fleets = [fleet.process.pid for fleet in self.fleets]
            for name, pids in (("coordinator", [self.coordinator.pid]), ("nats", self.nats_pids()), ("fleet", fleets)):
                used = [usage(pid) for pid in pids]
                sample[f"{name}_cpu_s"], sample[f"{name}_mb"] = sum(u[0] for u in used), sum(u[1] for u in used)
            for name, stream in (("events", EVENT_STREAM), ("beats", BEAT_STREAM)):
                state = (await api(connection, f"STREAM.INFO.{stream}", {}))["state"]
                sample[name], sample[f"{name}_bytes"] = state["last_seq"], state["bytes"]
            self.samples.append(sample)
            await asyncio.sleep(_SAMPLE_S)

    async def until(self, what: str, holds: Any, timeout_s: float) -> float:
        """When it held; raises TimeoutError with `what`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not holds():
                    for fleet in self.fleets:
                        assert fleet.process.returncode is None, "a fleet ended; see fleet*.log"
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise TimeoutError(f"waited {timeout_s:g} s for: {what}; {self.memberships.story(self.wanted)}") from None
        return time.monotonic()

    def all_whole(self) -> bool:
        return self.memberships.all_whole(self.tasks, self.wanted)

    async def count_fsyncs(self) -> float | None:
        """Each second, by strace where there is one and it may; slows the server meanwhile."""
        if not self.options.strace_s or shutil.which("strace") is None:
            return None
        path = self.directory / "strace.txt"
        begin_s = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *("timeout", "-s", "INT", str(self.options.strace_s), "strace", "-f", "-c", "-o", str(path)),
            *("-e", "trace=fsync,fdatasync", *(word for pid in self.nats_pids() for word in ("-p", str(pid)))),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        await process.wait()
        took_s = time.monotonic() - begin_s
        rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        calls = sum(int(row[3]) for row in rows if row and row[-1] in ("fsync", "fdatasync"))
        return calls / took_s if calls else None

    # --- faults ----------------------------------------------------------------------------------

    async def fault(self, number: int, kind: str = "") -> None:
        """`kind`: as it is reported, where that is not told by what happens."""
        node_fault = not kind and number % _NODE_EVERY == _NODE_EVERY - 1
        for _ in range(50):
            name = self.drawn.choice(self.names)
            if self._down_until.get(name, 0.0) > time.monotonic():
                continue
            fleet = self.fleets[self.names.index(name) % len(self.fleets)]
            before = self.memberships.generations()
            if node_fault:
                told = await fleet.order(do="drop_node", id=number, node=name, for_s=self.options.down_s)
                self._down_until[name] = time.monotonic() + self.options.down_s + 10
            else:
                told = await fleet.order(do="kill_worker", id=number, node=name)
                if not told["worker"]:
                    continue
            self.faults.append({**told, "before": before, "kind": kind or ("node" if node_fault else "worker")})
            return

    async def bring_faults(self, duration_s: float) -> None:
        count = max(1, round(self.options.faults_per_hour * duration_s / 3600))
        begin_s = time.monotonic()
        due = sorted(begin_s + duration_s * (n + self.drawn.random()) / count for n in range(count))
        happens: list[tuple[float, int, Callable[[], Awaitable[None]]]]
        happens = [(due_s, number, partial(self.fault, number)) for number, due_s in enumerate(due)]
        happens.append((begin_s + duration_s / 2, -1, self.take_over))
        if self._cluster is not None:
            happens.append((begin_s + duration_s * 3 / 4, -1, self.step_down))
        for due_s, _, happening in sorted(happens, key=lambda each: each[:2]):
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            await happening()
        await asyncio.sleep(max(0.0, begin_s + duration_s - time.monotonic()))

    async def step_down(self) -> None:
        """Another server leads the streams; a fault falls into the change."""
        connection = await connect(self.urls, name="soak", login=self.login, timeout_s=30)
        try:
            assert self._cluster is not None
            before = [await self._cluster.leader(connection, stream) for stream in (EVENT_STREAM, BEAT_STREAM)]
            for stream in (EVENT_STREAM, BEAT_STREAM):
                await api(connection, f"STREAM.LEADER.STEPDOWN.{stream}", {})
            await self.fault(20_000, "leader change")
            after = [await self._cluster.leader(connection, stream) for stream in (EVENT_STREAM, BEAT_STREAM)]
            self.figures["leader_changes"] = [f"{a} -> {b or 'none yet'}" for a, b in zip(before, after, strict=True)]
        finally:
            await connection.close()

    async def take_over(self) -> None:
        """The coordinator dies in the middle of a fault; the next one finds it in the log."""
        assert self.coordinator is not None
        await self.fault(10_000, "takeover")
        self.coordinator.kill()
        self.coordinator.wait()
        begin_s = time.monotonic()
        self.start_coordinator()
        await self.live()
        self.figures["takeover_s"] = round(time.monotonic() - begin_s, 2)

    # --- the whole -------------------------------------------------------------------------------

    async def run(self) -> bool:
        options, figures = self.options, self.figures
        self._config.write_text(json.dumps(self._settings))  # JSON is YAML
        self.start_coordinator()
        await self.live()
        await self.start_fleets()
        connection = await connect(self.urls, name="soak", login=self.login, timeout_s=30)
        watching = asyncio.create_task(self.watch(connection))
        try:
            await self.until("all joined", lambda: sum(len(f.joined) for f in self.fleets) == options.agents, 600)
            last_join_s = max(s for fleet in self.fleets for s in fleet.joined.values())
            first_join_s = min(s for fleet in self.fleets for s in fleet.joined.values())
            figures["joining_s"] = round(last_join_s - first_join_s, 2)
            self.phase = "staffing"
            begin_s = time.monotonic()
            for name in self.tasks:
                await asyncio.to_thread(self.client.submit, self.spec(name))
            figures["submitting_s"] = round(time.monotonic() - begin_s, 2)
            whole_s = await self.until("all tasks whole", self.all_whole, options.patience_s)
            figures["whole_after_last_join_s"] = round(whole_s - last_join_s, 2)
            figures["whole_after_submission_s"] = round(whole_s - begin_s, 2)
            print(json.dumps(figures), flush=True)
            await asyncio.sleep(5)
            self.phase = "rest"
            rest_s = max(3.0, min(300.0, options.minutes * 60 * 0.2))
            await asyncio.sleep(rest_s)
            self.phase = "strace"
            figures["fsyncs_per_s_at_rest"] = await self.count_fsyncs()
            self.phase = "faults"
            await self.bring_faults(max(10.0, options.minutes * 60 - rest_s))
            await self.until("all tasks whole again", self.all_whole, options.patience_s)
            self.phase = "end"
            return await self.look_back(connection)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await connection.close()

    def spec(self, name: str) -> dict[str, Any]:
        return {
            "name": name,
            "min_workers": self.options.slots,
            "max_workers": self.wanted,
            "global_batch": self.wanted,
            "iterations": 10**9,
            "checkpoint": {"interval": 0},
        }

    async def settled_state(self) -> ClusterState:
        """The head's state once it has closed all incidents, or when patience is at its end: that all tasks are whole
        it may read later than the fleets."""
        until_s = time.monotonic() + self.options.patience_s
        while True:
            state, _ = await asyncio.to_thread(self.client.state)
            if not state.incidents or time.monotonic() > until_s:
                return state
            await asyncio.sleep(0.2)

    async def look_back(self, connection: Connection) -> bool:
        figures = self.figures
        await asyncio.sleep(2)  # what is under way arrives
        acknowledged: dict[str, dict[str, dict[str, int]]] = {}
        for number, fleet in enumerate(self.fleets):
            path = self.directory / f"acknowledged{number}.json"
            told = await fleet.order(do="acknowledged", path=str(path))
            figures.setdefault("fleets", []).append(told)
            acknowledged |= json.loads(path.read_text())
        state = await self.settled_state()
        figures["fold"] = {
            "entries": state.seq,
            "duplicates": state.duplicates,
            "inert": state.inert,
            "quarantined": state.quarantined_messages,
            "refused": [refusal.reason for refusal in state.refusals[-5:]],
            "incidents_closed": len(state.closed_incidents),
            "incidents_open": [
                f"{one.kind} {one.worker or one.node}: {one.message}" for one in state.incidents.values()
            ],
        }
        ways = reading.Ways(self.faults, time.time() - time.monotonic())
        figures["log"] = found = await reading.read(NatsEventLog(connection), acknowledged, ways)
        figures |= report.figures(self)
        healed = all(fault.get("whole_s") is not None for fault in figures["faults"])
        figures["nothing_lost"] = not found["missing"] and not found["doubled"] and not found["out_of_order"]
        figures["all_healed"] = healed
        return bool(healed and figures["nothing_lost"] and not figures["fold"]["quarantined"])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--faults-per-hour", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=Path("soak.json"))
    parser.add_argument("--processes", type=int, default=2, help="for the agents")
    parser.add_argument("--servers", type=int, choices=(1, 3), default=1, help="NATS: one embedded, or a cluster")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--heartbeat-s", type=float, default=1.0)
    parser.add_argument("--iteration-s", type=float, default=5.0)
    parser.add_argument("--kept-every-s", type=float, default=10.0, help="SnapshotStored per node and task; 0: none")
    parser.add_argument("--joins-per-s", type=float, default=200.0)
    parser.add_argument("--down-s", type=float, default=15.0, help="how long a node stays away")
    parser.add_argument("--patience-s", type=float, default=300.0, help="how long all tasks may take to be whole")
    parser.add_argument("--strace-s", type=int, default=0, help="count the server's fsyncs at rest for so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="the directory of logs and store; otherwise a temporary one")
    return parser.parse_args()


async def main() -> int:
    options = arguments()
    me = asyncio.current_task()
    assert me is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, me.cancel)
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        directory = (options.keep or Path(temporary)).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        soak = Soak(options, directory)
        good = False
        try:
            async with nats_cluster(directory / "servers") if options.servers > 1 else nullcontext() as cluster:
                if cluster is not None:
                    soak.use(cluster)
                good = await soak.run()
        except (Exception, asyncio.CancelledError) as error:
            soak.figures["failed"] = f"{type(error).__name__}: {error}"
            for path in sorted(directory.glob("*.log")):
                print(f"--- {path.name}", *path.read_text(errors="replace").splitlines()[-12:], sep="\n", flush=True)
        finally:
            await soak.end()
            options.out.write_text(json.dumps(soak.figures, indent=1) + "\n")
    print(report.table(soak.figures))
    report.plot(soak.figures, options.out.with_suffix(".png"))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
