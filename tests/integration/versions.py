"""Trees of other versions of this software, and a small cluster whose parts are of whatever version one likes.

`today`: this checkout. `next`: a copy of today's source with one schema more, a field that every agent and every
membership then says, and a command that every node then gets (`PATCHES`). A part runs a tree because its PYTHONPATH
says so: all versions share this environment's dependencies.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import yaml

from tests.integration.live import TASK, Live, members
from unicrond.core.state.state import ClusterState
from unicrond.events.wire.schemas import SCHEMA, spoken_schema
from unicrond.local.dev import DevCluster

ROOT = Path(__file__).parents[2]
#: An agent that is started again is silent for a moment, longer on a busy machine: no node is to be lost for that.
HEARTBEAT_S = 10.0

Version = Literal["today", "next"]
SCHEMAS: dict[Version, int] = {"today": SCHEMA, "next": SCHEMA + 1}

NEXT = SCHEMA + 1
#: Where a module's annotations name the schema that brought a field.
_SINCE = (
    r"(?m)^from __future__ import annotations$",
    "\\g<0>\nfrom typing import Annotated\nfrom unicrond.events.vocabulary.field_defaults import Since",
)

#: File -> (pattern, replacement): what makes `next` of today's source. Each pattern is there exactly once.
PATCHES: dict[str, list[tuple[str, str]]] = {
    "events/wire/schemas.py": [
        (rf"(?m)^SCHEMA = {SCHEMA}$", f"SCHEMA = {NEXT}"),
    ],
    "events/wire/upcast.py": [(r"(?m)^(STEPS: .* = \{)", rf"\g<1>{SCHEMA}: lambda message: message")],
    "events/vocabulary/nodes.py": [
        _SINCE,
        (r"(?s)(class NodeJoined\(.*?memory: [^\n]*\n)", rf'\1    rack: Annotated[Text, Since({NEXT})] = ""\n'),
    ],
    "events/vocabulary/workers.py": [
        _SINCE,
        (r"(?s)(class WorkerExited\(.*?cause: [^\n]*\n)", rf'\1    rack: Annotated[Text, Since({NEXT})] = ""\n'),
        (r"(?s)(class WorkerJoinedGroup\(.*?source: [^\n]*\n)", rf'\1    rack: Annotated[Text, Since({NEXT})] = ""\n'),
    ],
    "events/vocabulary/training.py": [
        _SINCE,
        (
            r"(?s)(class StepCommitted\(.*?micro_batches_repeated: [^\n]*\n)",
            rf'\1    rack: Annotated[Text, Since({NEXT})] = ""\n',
        ),
    ],
    "events/vocabulary/memberships.py": [
        _SINCE,
        (r"(?s)(class MembershipDecided\(.*?stop: [^\n]*\n)", rf"\1    hint: Annotated[Count, Since({NEXT})] = 0\n"),
        (
            r"(?m)^from unicrond.events.vocabulary.field_types import",
            "from unicrond.events.vocabulary.field_types import Count\n\\g<0>",
        ),
    ],
    "events/vocabulary/commands.py": [
        (
            r"\Z",
            "\n\nclass GreetNode(Command, frozen=True, kw_only=True):\n"
            f"    since = {NEXT}\n\n"
            "    def sentence(self):\n        return 'greet'\n",
        ),
    ],
    "events/vocabulary/__init__.py": [
        (r"(?m)^AnyObservation: TypeAlias", "from unicrond.events.vocabulary.commands import GreetNode\n\n\\g<0>"),
        (r"(?m)^AnyCommand: TypeAlias = (\(?)", r"AnyCommand: TypeAlias = \1GreetNode | "),
    ],
    "unicrond/core/fold.py": [
        (r"(?m)^( *)v\.DropState:", r"\1v.GreetNode: nodes.greeted,\n\1v.DropState:"),
    ],
    "unicrond/core/state/state.py": [
        (r"(?m)^    memory: MemoryService \| None = [^\n]*\n", r"\g<0>    greeted: bool = False\n")
    ],
    "unicrond/core/state/state_bytes.py": [(r"(?s)(\nNODE_FIELDS: .*?)\n\)", r'\1\n    "greeted",\n)')],
    "unicrond/core/folding/nodes.py": [
        (
            r"(?m)^def node_left\(",
            "def greeted(state, event, _):\n"
            "    from unicrond.core.folding.commands import count_command\n"
            "    state = count_command(state, event.node)\n"
            "    return with_node(state, replace(state.nodes[event.node], greeted=True))\n\n\n"
            "def node_left(",
        ),
    ],
    "unicrond/core/deciding/batch.py": [
        (
            r"(?m)^( *)readable_event = lowered\(",
            r"\1if isinstance(event, v.MembershipDecided):\n\1    event = replace(event, hint=7)\n\g<0>",
        ),
    ],
    "unicrond/core/decide.py": [
        (
            r"(?m)^    _inject\(batch\)$",
            "    for node in state.nodes.values():\n"
            "        if node.status == 'up' and not node.greeted:\n"
            "            batch.add(v.GreetNode(\n"
            "                command_id=batch.command_id(node.name), node=node.name, epoch=state.plan.epoch))\n"
            "    _inject(batch)",
        ),
    ],
    "agents/core/commands.py": [
        (r"(?m)^( *)case DropState\(", r"\1case v.GreetNode():\n\1    transition.answer(order)\n\1case DropState("),
        (r"(?m)^from unicrond.events.vocabulary import \($", r"from unicrond.events import vocabulary as v\n\g<0>"),
    ],
    "agents/core/transaction.py": [
        (
            r"(?m)^( *)self\.actions\.append\(Append\(event=event",
            r"\1if hasattr(event, 'rack'):\n"
            r"\1    event = replace(event, rack='r7')\n"
            r"\g<0>",
        ),
    ],
}


def make_tree(version: Version, into: Path) -> Path:
    """Where the version's packages stand."""
    if version == "today":
        return ROOT
    tree = into / version
    if tree.exists():
        return tree
    shutil.copytree(ROOT / "unicrond", tree / "unicrond", ignore=shutil.ignore_patterns("__pycache__"))
    for name, patches in PATCHES.items():
        path = tree / "unicrond" / name.removeprefix("unicrond/")
        text = path.read_text()
        for pattern, replacement in patches:
            text, count = re.subn(pattern, replacement, text, count=2)
            assert count == 1, f"{name}: {pattern} stands there {count} times; tests/integration/versions.py is stale"
        path.write_text(text)
    return tree


class MixedCluster(DevCluster):
    """A DevCluster each of whose parts can be ended and started again as another version."""

    def __init__(self, directory: Path, nodes: int, trees: Path, version: Version, writes: int) -> None:
        """`writes`: the newest schema that a coordinator may write, if it is to be taken back."""
        super().__init__(directory, nodes, 1, 0, HEARTBEAT_S)
        self.trees = trees
        self.writes = writes
        self.versions: dict[str, Version] = {}
        for name in ("coordinator", *self.agents):
            self._make(name, version)

    def _make(self, name: str, version: Version) -> None:
        part = self.coordinator if name == "coordinator" else self.agents[name]
        tree = make_tree(version, self.trees)
        part.env = part.env | {"PYTHONPATH": str(tree)}
        if name == "coordinator":
            self._limit(version)
        self.versions[name] = version

    def _limit(self, version: Version) -> None:
        """What docs/operate/upgrading.md asks for before a coordinator that may be taken back is started."""
        path = self.directory / "unicron.yaml"
        config = yaml.safe_load(path.read_text())
        config.pop("write_schema", None)
        if self.writes < SCHEMAS[version]:
            config["write_schema"] = self.writes
        path.write_text(yaml.safe_dump(config))

    async def change(self, name: str, version: Version) -> None:
        """End the part as a package manager would (SIGTERM), and start it as the other version."""
        part = self.coordinator if name == "coordinator" else self.agents[name]
        await part.stop(signal.SIGTERM)
        self._make(name, version)
        await part.start()
        if name == "coordinator":
            await self._until_live()

    async def replayed(self, seq: int) -> str:
        """The digest at `seq` that a replay by the coordinator's version finds in the stored log."""
        process = await asyncio.create_subprocess_exec(
            str(Path(self.coordinator.command[0]).parent / "unicron-replay"),
            *("digest", "--at", str(seq), "--nats", self.nats_url, "--json"),
            stdout=asyncio.subprocess.PIPE,
            env=self.coordinator.env,
        )
        output, _ = await process.communicate()
        assert process.returncode == 0
        return str(json.loads(output)["digest"])


@asynccontextmanager
async def mixed_cluster(
    directory: Path, trees: Path, version: Version, nodes: int, writes: int = SCHEMA + 1
) -> AsyncIterator[Live]:
    """All of one version; a task trains on all nodes. `writes`: see MixedCluster."""
    cluster = MixedCluster(directory, nodes, trees, version, writes)
    try:
        await cluster.start()
        live = Live(cluster, nodes)
        await live.submit(iterations=1_000_000)
        await live.training(incidents=0)
        yield live
    finally:
        await cluster.stop()


class Upgrade:
    """Parts change one after the other, in mid-training; after each change training goes on."""

    def __init__(self, live: Live) -> None:
        assert isinstance(live.dev, MixedCluster)
        self.live = live
        self.cluster = live.dev
        self.incidents = 0

    async def change(self, name: str, version: Version) -> ClusterState:
        """The part is the other version, is known as that, and twenty iterations more have been made."""
        before = (await self.cluster.state())[0]
        await self.cluster.change(name, version)

        def is_seen(state: ClusterState) -> bool:
            if name == "coordinator":
                return state.term > before.term
            return state.nodes[name].agent.boot > before.nodes[name].agent.boot

        state = await self.live.until(f"{name} is of version {version}", is_seen)
        told = spoken_schema(state.nodes[name].agent.version) if name != "coordinator" else SCHEMAS[version]
        assert told == SCHEMAS[version]
        after = await self.live.training(incidents=self.incidents, beyond=20)
        workers = [members(one) for one in (before, after)]
        assert workers[0] == workers[1], "no worker was replaced"
        return after

    async def kill_a_worker(self) -> None:
        """A fault among the versions: it heals as ever."""
        state, _ = await self.cluster.state()
        worker = state.tasks[TASK].workers[members(state)[-1]]
        os.kill(worker.pid, signal.SIGKILL)
        self.incidents += 1
        after = await self.live.training(incidents=self.incidents, beyond=10)
        assert after.closed_incidents[-1].worker == worker.worker
        assert after.closed_incidents[-1].kind == "process_exit"

    async def all_is_well(self) -> None:
        """Nothing was lost, and whoever reads the log finds what the coordinator has."""
        state, digest = await self.cluster.state()
        assert digest == await self.cluster.replayed(state.seq), "the replay has the coordinator's digest"
        assert not state.inert
