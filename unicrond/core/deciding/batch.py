"""A batch: the decisions of one call of `decide`, which are committed to the log together.

It is the one place where a decision that takes something out passes the brakes (nodes/brakes.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from msgspec.structs import replace

from unicrond.core.faults.program_faults import signature_of
from unicrond.core.nodes import brakes
from unicrond.core.rules.survey import Survey
from unicrond.core.state.state import NodeStatus, Task, Worker, WorkerStatus
from unicrond.events import vocabulary as v
from unicrond.events.wire.schemas import lowered

#: How many strays of one node are ordered to end at a time: an agent that invents a thousand makes the log no longer.
STRAY_STOPS_MAX = 8


class DecisionBatch:
    """The decisions of one call, with command ids that are unique by construction."""

    def __init__(self, survey: Survey) -> None:
        self.survey = survey
        self.state = survey.state
        self.events: list[v.AnyEvent] = []
        #: What a limit holds, by key.
        self.holds: dict[str, v.DecisionHeld] = {}
        #: Per node, how many workers this batch starts there.
        self.started: Counter[str] = Counter()
        self._numbers: dict[str, int] = {}
        #: Workers whose end this batch orders.
        self._ordered_stops: set[str] = set()

    def slots_in_use(self, node: str) -> int:
        """Count the slots in use on the node: every process that is not known to have ended, and the workers that this
        batch starts."""
        return len(self.state.by_node.on(node)) + len(self.state.nodes[node].strays) + self.started[node]

    def add(self, event: v.AnyEvent, readers: Iterable[int] = ()) -> None:
        """Add a decision in the schema of its readers; fields and types that they do not know are left out. `readers`:
        the schemas of the nodes that read the decision in the log. A command is for the agent that is known now. What a
        brake holds is not added, and stands in `holds`."""
        if key := self.hold_key_of(event):
            limit = brakes.limit_on(self.state, event, self.events)
            if limit is not None:
                self.holds[key] = self._hold(event, limit)
                return
        schema = min([self.state.schema, *readers])
        if isinstance(event, v.Command):
            node = self.state.nodes[event.node]
            schema = min(schema, node.agent.schema)
            event = replace(event, agent_boot=node.agent.boot)
        readable_event = lowered(event, schema)
        if readable_event is not None:
            self.events.append(readable_event)

    def hold_key_of(self, event: v.AnyEvent) -> str:
        """Return what names the hold of a decision that takes something out; "" for any other."""
        match event:
            case v.NodeIsolated():
                return v.hold_key("isolation", node=event.node)
            case v.IncidentEscalated():
                return v.hold_key("eviction", worker=event.worker)
            case v.TaskFailed():
                return v.hold_key("failure", task=event.task)
            case v.WorkersWithdrawn():
                return v.hold_key("withdrawal", task=event.task, node=event.node)
        return ""

    def _hold(self, event: v.AnyEvent, limit: brakes.BrakeLimit) -> v.DecisionHeld:
        worker = getattr(event, "worker", "")
        task = getattr(event, "task", worker.rpartition(".")[0])
        node = self.state.tasks[task].workers[worker].node if worker else getattr(event, "node", "")
        actions: dict[type, v.HeldAction] = {v.NodeIsolated: "isolation", v.TaskFailed: "failure"}
        return v.DecisionHeld(
            action=actions.get(type(event), "eviction" if worker else "withdrawal"),
            node=node,
            task=task,
            worker=worker,
            reason=getattr(event, "reason", "").partition("\n")[0][:1024],
            limit=limit.name,
            detail=limit.detail,
        )

    def tell_holds(self) -> None:
        """Add a DecisionHeld for what is held anew, or for another reason, and a HoldLifted for what nothing asks for
        any more."""
        for key, event in self.holds.items():
            old = self.state.holds.get(key)
            if old is None or old.limit != event.limit or _is_another(old.reason, event):
                self.add(event)
        executions = {self.hold_key_of(event) for event in self.events}
        for key, hold in self.state.holds.items():
            if key not in self.holds and key not in executions and not brakes.stands(self.state, hold):
                self.add(
                    v.HoldLifted(
                        action=hold.action,
                        node=hold.node,
                        task=hold.task,
                        worker=hold.worker,
                        reason="nothing asks for it any more",
                    )
                )

    def tell_plan(self, differences: str) -> None:
        """Tell what the plan would move if no mode held it; "": nothing, and what was told is over."""
        key = v.hold_key("plan")
        old = self.state.holds.get(key)
        if differences and (old is None or old.reason != differences):
            detail = "mode observe"
            self.add(v.DecisionHeld(action="plan", reason=differences[:1024], limit="observe", detail=detail))
        elif old is not None and not differences:
            self.add(v.HoldLifted(action="plan", reason="the plan would move nothing"))

    def command_id(self, node: str) -> str:
        """Return the next command id of the node: "term.epoch.node.number"."""
        number = self._numbers.get(node, self.state.nodes[node].commands) + 1
        self._numbers[node] = number
        return f"{self.state.term}.{self.state.plan.epoch}.{node}.{number}"

    def has_room(self, nodes: tuple[str, ...]) -> bool:
        """Return whether each node is up and has as many free slots as it is named times, and none is cordoned."""
        all_nodes = self.state.nodes
        return all(
            all_nodes[n].status is NodeStatus.UP
            and self.slots_in_use(n) + nodes.count(n) <= all_nodes[n].slots
            and not all_nodes[n].cordon.active
            for n in nodes
        )

    def stop(self, task: Task, worker: Worker, reason: str, *, kill: bool = False) -> None:
        """Order the end of the worker, if its node is up. `kill`: the process may not be able to end itself."""
        node = self.state.nodes.get(worker.node)
        if node is None or node.status is not NodeStatus.UP or worker.status is WorkerStatus.STOPPING:
            return
        if worker.worker in self._ordered_stops:
            return  # one reason is enough
        self._ordered_stops.add(worker.worker)
        self._add_stop(worker.node, task.name, worker.worker, reason, kill=kill)

    def end_strays(self) -> None:
        """Order the end of the processes that belong to no task, on nodes that are up, a few of a node at a time."""
        for name in self.survey.nodes.with_strays:
            node = self.state.nodes[name]
            if node.status is not NodeStatus.UP:
                continue
            waiting = [stray for stray in node.strays.values() if not stray.command_id]
            ordered = len(node.strays) - len(waiting)
            for stray in waiting[: max(0, STRAY_STOPS_MAX - ordered)]:
                self._add_stop(name, stray.task, stray.worker, "no command of this log has started it", kill=True)

    def _add_stop(self, node: str, task: str, worker: str, reason: str, *, kill: bool) -> None:
        self.add(
            v.StopWorker(
                command_id=self.command_id(node),
                node=node,
                epoch=self.state.plan.epoch,
                task=task,
                worker=worker,
                reason=reason,
                kill=kill,
            )
        )


def _is_another(reason: str, event: v.DecisionHeld) -> bool:
    """Return whether the event brings another reason than the one that was told; a task that fails has many."""
    return event.action != "failure" and signature_of(reason) != signature_of(event.reason)
