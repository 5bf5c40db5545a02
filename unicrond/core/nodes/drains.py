"""Planned departures: nodes that are to be empty at a time, and nodes that are expected to fail. Pure.

Rules
-----
* A node that is to be empty by a time (`unicronctl drain --by`) is cordoned at once and keeps its workers: they are
  worth most where they are. They leave it at an iteration boundary, at the cheapest moment (`DrainStarted`): as soon as
  the present plan has room for all of them elsewhere, or there are none; and without that when the time is near.
* Near: as long before it as starts and meetings may take at their limits.
* When the time is over, what still runs there is ended.
* The nodes of a maintenance window stay in full use until it is near. Then they are drained by its beginning; what a
  person has cordoned before stays cordoned afterwards. While it lasts their loss and return are no failures. When it
  ends, or is cancelled, they may have workers again, unless another window that is near has them.
* A node whose failure is predicted is isolated, so that its workers leave it at a boundary and its hardware is checked
  (isolation.py), where every task that has workers keeps its minimum elsewhere. Else it goes on, and is isolated when
  there is room.
* A node whose announced end is over is gone, also where no head was there to see it go; a margin covers clocks that
  differ.
* Times are the log's. The shell counts them on its monotonic clock from the moment it first sees a deadline's id.

What does not live here: which workers leave (the plan), the batch (deciding/nodes.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from math import ceil

from msgspec.structs import replace

from unicrond.core.state.changes import with_node
from unicrond.core.state.node_parts import Cordon
from unicrond.core.state.policy import Policy
from unicrond.core.state.state import ClusterState, Node, Window
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary.phrases import to_the_second

_SECOND_US = 1_000_000
#: Where all workers of a task leave, the lead's replica may have to write the whole state to storage before it does.
LAST_OUT = 10
#: A node counts as gone so long after its announced end, in microseconds.
END_MARGIN_US = 5_000_000


def is_end_over(node: Node, now_us: int) -> bool:
    """Return whether the end that the node's agent has announced is over."""
    return 0 < node.departure.ends_us < now_us - END_MARGIN_US


# --- deadlines -----------------------------------------------------------------------------------


def deadlines(state: ClusterState, policy: Policy, dated: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield (id, length in microseconds). `dated`: the nodes that are to be empty by a time."""
    for name in dated:
        node = state.nodes[name]
        if node.cordon.overdue:
            continue
        left_us = node.cordon.empty_by_us - state.now_us
        if not node.cordon.draining:
            lead_s = _lead_s(state, policy, [name])
            yield f"drain:{name}#{node.cordon.empty_by_us}.{lead_s}", max(0, left_us - lead_s * _SECOND_US)
        yield f"empty:{name}#{node.cordon.empty_by_us}", max(0, left_us)
    for name, window in state.windows.items():
        if not window.near:
            lead_s = _lead_s(state, policy, window.nodes)
            yield f"window:{name}#near.{lead_s}", max(0, window.from_us - state.now_us - lead_s * _SECOND_US)
        yield f"window:{name}#end", max(0, window.until_us - state.now_us)


def _lead_s(state: ClusterState, policy: Policy, nodes: Iterable[str]) -> int:
    """Return how long before a time these nodes' workers begin to leave: a start and a meeting at their limits, whole
    seconds. It stands in the ids, so that the shell counts anew when it changes."""
    leaving = Counter(task for name in nodes for task, _ in state.by_node.on(name))
    longest_s = 0.0
    for name, count in leaving.items():
        task = state.tasks[name]
        meet_s = max(policy.regroup_s, 4 * task.pace.iteration_us / _SECOND_US)
        meets_s = meet_s * (LAST_OUT if count == len(task.workers) else 1)
        longest_s = max(longest_s, (task.spec.start_timeout_s or policy.worker_start_s) + meets_s)
    return ceil(longest_s)


def deadline_passed(state: ClusterState, kind: str, subject: str) -> ClusterState:
    """Fold the end of `drain:`, `empty:` or `window:`; one that no longer stands changes nothing."""
    name, _, moment = subject.partition("#")
    moment = moment.partition(".")[0]
    if kind == "window":
        return _window_passed(state, name, moment)
    node = state.nodes.get(name)
    if node is None or not node.cordon.active or moment != str(node.cordon.empty_by_us):
        return state
    cordon = replace(node.cordon, draining=True, overdue=node.cordon.overdue or kind == "empty")
    return with_node(state, replace(node, cordon=cordon))


# --- folds ---------------------------------------------------------------------------------------


def drain_begun(state: ClusterState, event: v.DrainStarted) -> ClusterState:
    """Have the node's workers leave it."""
    node = state.nodes.get(event.node)
    if node is None or not node.cordon.active or not node.cordon.empty_by_us:
        return state
    return with_node(state, replace(node, cordon=replace(node.cordon, draining=True)))


def cordoned(node: Node, event: v.NodeCordoned) -> Node:
    """Return the node taken out of use by a person, whatever a window asks of it."""
    waits = event.drain and event.empty_by_us > 0
    cordon = Cordon(
        active=True,
        draining=event.drain and not waits,
        reason=event.reason,
        until_return=event.until_return,
        empty_by_us=event.empty_by_us if waits else 0,
    )
    return replace(node, cordon=cordon)


def uncordoned(node: Node) -> Node:
    """Return the node as one that may have workers again, as far as cordons go."""
    return replace(node, cordon=Cordon(), departure=replace(node.departure, removal=""))


def maintenance_planned(state: ClusterState, event: v.MaintenancePlanned) -> ClusterState:
    """Add a window, whose id is this entry's number."""
    nodes = tuple(dict.fromkeys(event.nodes))
    window = Window(nodes=nodes, from_us=event.from_us, until_us=event.until_us, reason=event.reason)
    return replace(state, windows=state.windows | {f"w{state.seq}": window})


def maintenance_cancelled(state: ClusterState, event: v.MaintenanceCancelled) -> ClusterState:
    """End the window here, whether it has begun or not."""
    return _over(state, event.window)


def _window_passed(state: ClusterState, name: str, moment: str) -> ClusterState:
    window = state.windows.get(name)
    if window is None:
        return state
    if moment == "end":
        return _over(state, name)
    state = replace(state, windows=state.windows | {name: replace(window, near=True)})
    for node_name in window.nodes:
        if node_name in state.nodes:
            state = with_node(state, _empty_for_window(state.nodes[node_name], name, window))
    return state


def _empty_for_window(node: Node, name: str, window: Window) -> Node:
    """Return the node as the window empties it; a drain that a person asked for stays his."""
    cordon = node.cordon
    if cordon.active:
        asked_by_person = cordon.draining and not cordon.empty_by_us
        by_us = min(cordon.empty_by_us or window.from_us, window.from_us)
        sooner = replace(cordon, draining=True, empty_by_us=by_us)
        return node if asked_by_person or cordon.window else replace(node, cordon=sooner)
    reason = f"maintenance {name}: {window.reason}"
    # A node that is emptied already stays as it is in all else.
    by_window = replace(cordon, active=True, draining=True, reason=reason, empty_by_us=window.from_us, window=name)
    return replace(node, cordon=by_window)


def _over(state: ClusterState, name: str) -> ClusterState:
    if name not in state.windows:
        return state
    nodes = state.windows[name].nodes
    state = replace(state, windows={key: window for key, window in state.windows.items() if key != name})
    for node_name in nodes:
        node = state.nodes.get(node_name)
        if node is not None and node.cordon.window == name:
            state = with_node(state, wanted_by_windows(state, uncordoned(node)))
    return state


def wanted_by_windows(state: ClusterState, node: Node) -> Node:
    """Return the node as the first window that is near and names it asks for it; as it is, if none does."""
    for name, window in state.windows.items():
        if window.near and node.name in window.nodes:
            return _empty_for_window(node, name, window)
    return node


# --- text for people -----------------------------------------------------------------------------


def departure_text(node: Node) -> str:
    """Say, for people, when the node is to be empty and when its workers leave; "" where no time was given."""
    if not node.cordon.empty_by_us:
        return ""
    by = f"empty by {to_the_second(node.cordon.empty_by_us)}"
    if node.cordon.overdue:
        return f"{by}, which is over"
    return by if node.cordon.draining else f"{by}: its workers leave when there is room elsewhere, or that is near"
