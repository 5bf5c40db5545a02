"""What must hold in every state.

Rules
-----
* The fold looks at what an event has touched (`newly_broken`) and takes nothing in that would break a rule: an
  observation is quarantined for it (`admission.py`).
* The coordinator holds whole states against the rules (`check`): before it appends what it has decided, and after
  each burst of entries. If one breaks there, our own code is wrong, and saying so with the story, and deciding nothing
  more, is worth more than going on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from unicrond.core.state.ordered_map import changed, newest, same_names
from unicrond.core.state.state import ClusterState, Node, NodeStatus, Plan, Task, Worker
from unicrond.events import vocabulary as v


class InvariantError(AssertionError):
    """The coordinator's own logic is wrong. Carries the sequence number and the broken rule."""


def check(state: ClusterState, since: ClusterState | None = None) -> None:
    """Raise InvariantError if a rule is broken. `since`: a state in which none was; only what differs is looked at."""
    story = next((story for story in _stories(state, since or ClusterState()) if story), "")
    if story:
        raise InvariantError(f"at sequence {state.seq}, term {state.term}: {story}")


def newly_broken(before: ClusterState, after: ClusterState, event: v.AnyEvent) -> str:
    """Return the story of a rule that `event` has broken, "" where none is; looks at nothing that it did not touch.

    How many workers stand on a node is left to `check`: only decisions change that, and counting takes long.
    """
    if after.tasks is not before.tasks:
        name = getattr(event, "task", "")
        touched = (name,) if name else tuple(changed(before.tasks, after.tasks))
        for task_name in touched:
            task, was = after.tasks.get(task_name), before.tasks.get(task_name)
            if task is None or task is was:
                continue
            story = _task_story(task, was)
            if not story and (was is None or task.workers is not was.workers):
                story = _strangers(_new_workers(task, was, event), after.nodes)
            if story:
                return story
    if after.plan is not before.plan:
        return next(_plan_stories(after), "")
    return ""


def _stories(state: ClusterState, since: ClusterState) -> Iterator[str]:
    touched = dict.fromkeys(changed(since.nodes, state.nodes))
    for was, task in changed(since.tasks, state.tasks).values():
        if task is None:
            continue
        yield _task_story(task, was)
        differ = changed(was.workers if was else {}, task.workers)
        workers = [worker for _, worker in differ.values() if worker is not None]
        yield _strangers(workers, state.nodes)
        touched.update(dict.fromkeys([worker.node for worker in workers]))
    for name in touched:
        node, count = state.nodes.get(name), _seats(state, name)
        if node is None:
            continue  # forgotten: a worker there would be a stranger
        if count > node.slots_max and node.status is NodeStatus.UP:
            yield f"{name}: {count} workers on {node.slots_max} slots"
    if state.plan is not since.plan:
        yield from _plan_stories(state)


def _seats(state: ClusterState, node: str) -> int:
    return sum(state.tasks[task].workers[worker].replica >= 0 for task, worker in state.by_node.on(node))


def _task_story(task: Task, was: Task | None) -> str:
    is_new = task.membership is not None and (was is None or was.membership is not task.membership)
    if is_new and task.membership and len(task.member_names) != len(task.membership.members):
        return f"{task.name}: a worker is a member twice"
    return f"{task.name}: best iteration is behind" if task.progress.iteration > task.progress.best_iteration else ""


def _new_workers(task: Task, was: Task | None, event: v.AnyEvent) -> list[Worker]:
    """Return the workers that the event may have put there: the one that it names, and those added last."""
    event_worker = task.workers.get(getattr(event, "worker", ""))
    count = len(task.workers)
    if was is not None:
        count = 0 if same_names(was.workers, task.workers) else max(1, count - len(was.workers))
    return [*newest(task.workers, count), *([event_worker] if event_worker else [])]


def _strangers(workers: Iterable[Worker], nodes: Mapping[str, Node]) -> str:
    for worker in workers:
        if worker.node not in nodes:
            return f"a worker runs on unknown node {worker.node}"
    return ""


def _plan_stories(state: ClusterState) -> Iterator[str]:
    for name, count in _planned(state.plan).items():
        if name not in state.nodes:
            yield f"plan {state.plan.epoch} uses unknown node {name}"
        elif count > state.nodes[name].slots_max:
            yield f"plan {state.plan.epoch} puts {count} workers on {name}"


def _planned(plan: Plan) -> Counter[str]:
    """Count the plan's workers per node."""
    return Counter([node for a in plan.assignments.values() for nodes in a.replicas for node in nodes])
