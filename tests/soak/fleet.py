"""Many nodes in one process: `python -m tests.soak.fleet SETTINGS`, a JSON file.

Orders come on stdin, reports go to stdout, as JSON lines; times are those of the machine's monotonic clock, which
processes share.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.soak.node import Clock, Node, Worker
from unicrond.agents.protocol.messages import GroupMembership
from unicrond.events.nats.connection import Login

_REPORT_S = 0.2


class Fleet:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._clock = Clock(settings["iteration_s"], settings["kept_every_s"])
        seed, ca = (Path(settings[name]) if settings[name] else None for name in ("nkey_seed", "tls_ca"))
        self._login = Login(nkey_seed=seed, tls_ca=ca)
        self.nodes: dict[str, Node] = {}
        #: (task, generation) -> urgent, members, nodes of these.
        self._memberships: dict[tuple[str, int], tuple[bool, int, int]] = {}
        self._told: dict[tuple[str, int], dict[str, float]] = {}
        self._following: dict[str, tuple[str, int]] = {}
        self._was_following: Counter[tuple[str, int]] = Counter()
        #: producer -> boot -> number -> seq
        self._acknowledged: dict[str, dict[int, dict[int, int]]] = {}
        self._doubled = 0

    def make(self, name: str) -> Node:
        settings = self._settings
        self.nodes[name] = node = Node(
            name,
            settings["urls"],
            self._login,
            settings["slots"],
            settings["heartbeat_s"],
            self._clock,
            on_told=self._was_told,
            on_regrouped=self._regrouped,
            note=self._note,
        )
        return node

    def _note(self, producer: str, boot: int, number: int, seq: int) -> None:
        numbers = self._acknowledged.setdefault(producer, {}).setdefault(boot, {})
        self._doubled += number in numbers
        numbers[number] = seq

    def _was_told(self, node: Node, membership: GroupMembership, task: str) -> None:
        key = task, membership.generation
        if key not in self._memberships:
            hosts = {member.node for member in membership.members}
            self._memberships[key] = membership.urgent, len(membership.members), len(hosts)
        self._told.setdefault(key, {})[node.name] = time.monotonic()

    def _regrouped(self, worker: Worker, membership: GroupMembership) -> None:
        self._following[worker.name] = worker.task, membership.generation

    async def report(self, say: Callable[[dict[str, Any]], None]) -> None:
        joined: set[str] = set()
        while True:
            await asyncio.sleep(_REPORT_S)
            told, self._told = self._told, {}
            for key, times in told.items():
                urgent, members, hosts = self._memberships[key]
                say({"told": [*key, urgent, members, hosts], "at": times})
            alive = {name for node in self.nodes.values() for name in node.workers}
            self._following = {name: key for name, key in self._following.items() if name in alive}
            following = Counter(self._following.values())
            if following != self._was_following:
                self._was_following = following
                say({"following": [[*key, count] for key, count in following.items()], "s": time.monotonic()})
            fresh = {name: node.joined_s for name, node in self.nodes.items() if node.joined_s and name not in joined}
            if fresh:
                joined |= set(fresh)
                say({"joined": fresh})

    async def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        node = self.nodes.get(order.get("node", ""))
        match order["do"]:
            case "kill_worker" if node is not None:
                at_s = time.monotonic()
                worker = node.kill_worker()
                tasks = [worker.rpartition(".")[0]]
                return {"fault": order["id"], "worker": worker, "node": node.name, "tasks": tasks, "s": at_s}
            case "drop_node" if node is not None:
                at_s = time.monotonic()
                tasks = sorted({worker.task for worker in node.workers.values()})
                await node.die()
                asyncio.get_running_loop().call_later(order["for_s"], lambda: self.make(node.name).start())
                return {"fault": order["id"], "node": node.name, "tasks": tasks, "s": at_s}
            case "acknowledged":
                write(order["path"], self._acknowledged)
                unsent = sum(len(node.outbox) for node in self.nodes.values())
                lost = sum(node.outbox.lost_count for node in self.nodes.values())
                return {"written": order["path"], "unsent": unsent, "lost": lost, "doubled": self._doubled}
            case "end":
                await asyncio.gather(*(node.die() for node in self.nodes.values()))
                return {"ended": len(self.nodes)}
            case unknown:
                return {"refused": unknown}


def write(path: str, value: object) -> None:
    Path(path).write_text(json.dumps(value))


async def main(settings: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    out = sys.stdout.buffer

    def say(told: dict[str, Any]) -> None:
        out.write(json.dumps(told).encode() + b"\n")
        out.flush()

    fleet = Fleet(settings)

    async def switch_on() -> None:
        for name in settings["names"]:
            fleet.make(name).start()
            await asyncio.sleep(settings["join_every_s"])
        gc.freeze()

    async def obey() -> None:
        while line := await reader.readline():
            order = json.loads(line)
            say(await fleet.obey(order))
            if order["do"] == "end":
                break
        for task in working:
            task.cancel()

    async with asyncio.TaskGroup() as group:  # what fails ends the fleet, with its traceback
        working = [group.create_task(fleet.report(say)), group.create_task(switch_on())]
        group.create_task(obey())


if __name__ == "__main__":
    import uvloop

    uvloop.run(main(json.loads(Path(sys.argv[1]).read_text())))
