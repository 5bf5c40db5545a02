"""Faults that follow one node and not the program: a missing mount, a full disk, a bad library, a chip that computes
wrongly. Pure.

Rules
-----
* What a program has failed by on one node alone is tried once elsewhere: the task's next workers go to other nodes
  where these have room for all that it has there (`nodes_to_leave`; the back-off holds). The same on a second node is
  the program's, whatever it is.
* Where the task is calm again without the node, the fault is local to the node, *for that task*: its workers avoid the
  node where others have room, and people are told. Where it is calm on the node, nothing is held against it.
* It isolates no node, however many tasks have one there: a program may raise what it likes where it likes, and whoever
  may submit two tasks must not take nodes from others. Each task pays one restart; people are told of the node.
* A loss that is no finite number is asked of another replica: the survivors of its worker compute the same micro-batch
  of the same iteration with the same parameters. Is theirs not finite either, it has come on two nodes: the program's.
  Do they commit that iteration without the node, it is refuted: the node's, at once, and not forgotten when the task is
  calm there; a second one on the node isolates it. Where no member had survived, or another one of the node has
  computed it, nothing is refuted, and the rules above hold. An isolated node is checked as any other, and comes back.
* A replica that is convicted of other bits (folding/suspicions.py) is refuted likewise, once, however many of its
  workers are: the majority has computed the same from the same, on two other nodes at least. One that stands on several
  nodes accuses none: what one of them computes wrongly, all have. Such a node goes to its health check at once where
  there is a check, which tells a flipped bit from a bad chip, and where nobody pays for it: no other task has workers
  there, and the slots of the others suffice for every task's minimum. One node at a time, while no other is isolated
  or about to be, and never with the last half of what the brakes allow in an hour: that is for nodes that are known to
  be broken. Else it takes a second one, as above.
* So much is done at a task's word, and its workers say what its program says: for a day behind a conviction one on
  another node takes a second one, too.
* A task whose replicas were convicted on two nodes within an hour accuses neither, and leaves neither: a program that
  computes something else now and then does so anywhere.
* A local fault is forgotten when the node's agent starts anew, when a person uncordons the node, when it is readmitted,
  and when the task is calm on it.

What does not live here: whose fault an end is (program_faults.py), what is counted (folding/failure_counts.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from unicrond.core.state.changes import with_task
from unicrond.core.state.state import ClusterState, NodeStatus, Task
from unicrond.core.state.task_parts import CALM_ITERATIONS, Crashes, LocalFault, Troubles
from unicrond.core.state.workers import Worker
from unicrond.events.vocabulary import StepCommitted

#: Refuted losses on one node within this time accuse the node.
TOGETHER_US = 3600 * 1_000_000
#: So long behind a conviction the task's word alone sends no other node to its check.
WORD_US = 24 * TOGETHER_US


def nodes_to_leave(task: Task) -> tuple[str, ...]:
    """Return the nodes that the task's program has failed on as it has nowhere else."""
    crashes = task.troubles.crashes
    alone = crashes.nodes if crashes is not None and len(crashes.nodes) == 1 else ()
    return tuple(dict.fromkeys((*alone, *task.troubles.local_faults)))


def after_commit(task: Task, event: StepCommitted, *, calm: bool, now_us: int) -> Troubles:
    """Return the record after iterations were committed: a fault of the program may turn out to be a node's, and a calm
    program has none. `calm`: so is the newest group."""
    troubles, membership = task.troubles, task.membership
    crashes, faults = troubles.crashes, troubles.local_faults
    nodes = {member.node for member in membership.members} if membership else set()
    if crashes is not None and _is_refuted(task, event, crashes):
        (node,) = crashes.nodes
        text = f"{crashes.text}, and the same micro-batch is finite on other nodes"
        faults = faults | {node: _refuted_again(faults.get(node), text, now_us)}
        return replace(troubles, crashes=None, local_faults=faults)
    if crashes is not None and not crashes.waits and event.last >= crashes.best + CALM_ITERATIONS:
        for node in crashes.nodes if len(crashes.nodes) == 1 else ():
            if node not in nodes and node not in crashes.refusals and node not in faults:
                faults = faults | {node: LocalFault(text=crashes.text, at_us=now_us)}
        troubles = replace(troubles, crashes=None, local_faults=faults)
    if calm and any(not fault.refuted and node in nodes for node, fault in faults.items()):
        faults = {node: fault for node, fault in faults.items() if fault.refuted or node not in nodes}
        troubles = replace(troubles, local_faults=faults)
    return troubles


def _is_refuted(task: Task, event: StepCommitted, crashes: Crashes) -> bool:
    """Return whether other replicas have computed, to a finite loss, what was no finite number on one node."""
    if not crashes.same_nan or len(crashes.nodes) != 1:
        return False
    if event.last < crashes.iteration or event.generation <= crashes.generation:
        return False
    # What a group has committed is told up to a second later: the next one, with the node, may be decided by then.
    groups = [group for group in (task.membership, task.group.last_membership) if group is not None]
    members = next((group.members for group in groups if group.generation == event.generation), ())
    if any(member.node == crashes.nodes[0] for member in members):
        return False
    return any(int(member.worker.rpartition(".")[2]) < crashes.below for member in members)


def without(troubles: Troubles, node: str) -> Troubles:
    """Return the record without what is local to the node."""
    if node not in troubles.local_faults:
        return troubles
    faults = {name: fault for name, fault in troubles.local_faults.items() if name != node}
    return replace(troubles, local_faults=faults)


def forgiven(state: ClusterState, node: str) -> ClusterState:
    """Return the state in which nothing local is held against the node: it may have been mended."""
    for task in state.tasks.values():
        if node in task.troubles.local_faults:
            state = with_task(state, replace(task, troubles=without(task.troubles, node)))
    return state


def accused_nodes(state: ClusterState) -> Iterator[tuple[str, str]]:
    """Yield the nodes on which losses were refuted again, and the reason."""
    refuted: dict[str, dict[str, LocalFault]] = {}
    for task in state.open_tasks:
        for node, fault in _of_nodes(state, task):
            refuted.setdefault(node, {})[task.name] = fault
    for node, faults in refuted.items():
        if sum(fault.refuted for fault in faults.values()) > 1:
            newest = max(faults.values(), key=lambda fault: fault.at_us)
            tasks = " and ".join(sorted(faults))
            yield node, f"{tasks} {'fails' if len(faults) == 1 else 'fail'} here alone: {newest.text}"


def nodes_to_check(state: ClusterState) -> Iterator[tuple[str, str]]:
    """Yield the nodes on which a replica was convicted of other bits and no other task has workers, and the reason;
    none where no health check would look into it."""
    if not state.check_limit_us:
        return
    for task in state.open_tasks:
        for node, fault in _of_nodes(state, task):
            tenants = {name for name, worker in state.by_node.on(node) if state.tasks[name].workers[worker].alive}
            is_up = node in state.nodes and state.nodes[node].status is NodeStatus.UP
            convictions_us = task.troubles.convictions_us
            has_sent = any(place != node and state.now_us - at_us <= WORD_US for place, at_us in convictions_us.items())
            if is_up and node in convictions_us and not has_sent and tenants <= {task.name}:
                yield node, f"{task.name}: {fault.text}"


def _of_nodes(state: ClusterState, task: Task) -> Iterator[tuple[str, LocalFault]]:
    """Yield the refuted faults of the last hour that speak against their nodes, and not against the program."""
    if not task.troubles.local_faults:
        return
    since_us = state.now_us - TOGETHER_US
    places = {node for node, at_us in task.troubles.convictions_us.items() if at_us >= since_us}
    for node, fault in task.troubles.local_faults.items():
        if fault.refuted and fault.at_us >= since_us and not (node in places and len(places) > 1):
            yield node, fault


def convicted(task: Task, suspect: Worker, text: str, now_us: int) -> Task:
    """Return the task after the replica of `suspect`, which stands on one node, was convicted of other bits. `text`:
    what it has done, in words."""
    troubles, node = task.troubles, suspect.node
    convictions = {place: at_us for place, at_us in troubles.convictions_us.items() if now_us - at_us <= WORD_US}
    recent = {place for place, at_us in convictions.items() if now_us - at_us <= TOGETHER_US}
    faults = troubles.local_faults
    if recent - {node}:  # the program's: it is held against no node
        faults = {place: fault for place, fault in faults.items() if place not in recent and place != node}
    else:
        faults = faults | {node: _refuted_again(faults.get(node), text, now_us)}
    return replace(task, troubles=replace(troubles, local_faults=faults, convictions_us=convictions | {node: now_us}))


def _refuted_again(old: LocalFault | None, text: str, now_us: int) -> LocalFault:
    """Return what is held against a node where it was refuted once more. `old`: what was before."""
    times = old.refuted if old is not None and now_us - old.at_us <= TOGETHER_US else 0
    return LocalFault(text=text, at_us=now_us, refuted=times + 1)


def fault_text(task: Task, node: str) -> str:
    """Say, for people, what the task's program has failed by on this node alone."""
    return f"fails on {node} alone: {task.troubles.local_faults[node].text}"
