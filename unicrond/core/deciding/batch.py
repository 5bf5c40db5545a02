"""A batch: the decisions of one call, which commit together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from msgspec.structs import replace

from events import vocabulary as v
from events.schemas import lowered
from unicrond.core.state import NodeStatus, Task, Worker, WorkerStatus
from unicrond.core.survey import Survey


class Batch:
    """The decisions of one call, with command ids that are unique by construction."""

    def __init__(self, survey: Survey) -> None:
        self.survey = survey
        self.state = survey.state
        self.events: list[v.AnyEvent] = []
        #: Per node, how many workers this batch starts there.
        self.started: Counter[str] = Counter()
        self._numbers: dict[str, int] = {}
        #: Workers whose end it orders.
        self._stopped: set[str] = set()

    def occupied(self, node: str) -> int:
        """Slots in use on the node, by every process that is not known to be gone, and what this batch starts."""
        return len(self.state.by_node.on(node)) + self.started[node]

    def add(self, event: v.AnyEvent, readers: Iterable[int] = ()) -> None:
        """Takes a decision into the batch in its reader's schema; what the reader does not know is left out. `readers`:
        the schemas of the nodes that read it themselves. A command is for the agent that is known now."""
        schema = min([self.state.schema, *readers])
        if isinstance(event, v.Command):
            node = self.state.nodes[event.node]
            schema = min(schema, node.schema)
            event = replace(event, agent_boot=node.agent_boot)
        told = lowered(event, schema)
        if told is not None:
            self.events.append(told)

    def command_id(self, node: str) -> str:
        """The next command id of the node: "term.epoch.node.number"."""
        number = self._numbers.get(node, self.state.nodes[node].commands) + 1
        self._numbers[node] = number
        return f"{self.state.term}.{self.state.plan.epoch}.{node}.{number}"

    def has_room(self, nodes: tuple[str, ...]) -> bool:
        """Whether each of the nodes has a free slot for each time that it is named, and is not cordoned."""
        known = self.state.nodes
        return all(self.occupied(n) + nodes.count(n) <= known[n].slots and not known[n].cordoned for n in nodes)

    def stop(self, task: Task, worker: Worker, reason: str, *, kill: bool = False) -> None:
        """Orders the worker's end, where its node can hear it. `kill`: it may not be able to end itself."""
        node = self.state.nodes.get(worker.node)
        if node is None or node.status is not NodeStatus.UP or worker.status is WorkerStatus.STOPPING:
            return
        if worker.worker in self._stopped:
            return  # one reason is enough
        self._stopped.add(worker.worker)
        self.add(
            v.StopWorker(
                command_id=self.command_id(worker.node),
                node=worker.node,
                epoch=self.state.plan.epoch,
                task=task.name,
                worker=worker.worker,
                reason=reason,
                kill=kill,
            )
        )
