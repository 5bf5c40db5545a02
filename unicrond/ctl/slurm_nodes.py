"""Synchronises what Slurm and unicron know about the same nodes. Pure; slurm.py asks both and executes the steps.

Rules
-----
* A node that Slurm drains is drained here, with Slurm's reason behind `FROM_SLURM`. When Slurm drains it no longer, it
  is uncordoned; a cordon with any other reason belongs to a person, and stays.
* A node that is isolated here is drained in Slurm, with the reason behind `TO_SLURM`. When it is isolated no longer,
  Slurm gets it back; a drain with any other reason belongs to Slurm's people, and stays.
* When this cluster ends (`ends`), Slurm keeps drained only those that need a repair; the others rest here alone.
* A drain of our own making is no reason to drain here.
* A node that Slurm calls down is left alone: its agent's silence says that sooner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from unicrond.core.state.state import Node, NodeStatus

FROM_SLURM = "slurm: "
TO_SLURM = "unicron: "
#: sinfo's long words for a node that gets no new jobs.
_DRAINING = frozenset({"draining", "drained"})
#: Signs behind a state: does not answer, reserved, and the like.
_SIGNS = "*~#!%$@^-+"
#: Slurm cuts nothing, but people read it in a table.
_REASON_MAX = 160


class SlurmNode(NamedTuple):
    """One node as sinfo shows it. `reason`: "" where there is none."""

    name: str
    is_draining: bool
    reason: str


class SyncStep(NamedTuple):
    """One step of the synchronisation. `act`: drain or uncordon (here), hold or release (in Slurm)."""

    act: str
    node: str
    reason: str


def read(lines: Iterable[str]) -> dict[str, SlurmNode]:
    """Parse the output of `sinfo --Node --noheader --format=%N|%T|%E`, which has a line for each partition of a
    node."""
    nodes = {}
    for line in lines:
        name, bar, rest = line.strip().partition("|")
        state, second_bar, reason = rest.partition("|")
        if bar and second_bar:
            is_draining = state.rstrip(_SIGNS) in _DRAINING
            nodes[name] = SlurmNode(name, is_draining, "" if reason in ("none", "(null)") else reason)
    return nodes


def steps(slurm: Mapping[str, SlurmNode], nodes: Mapping[str, Node], ends: bool = False) -> Iterator[SyncStep]:
    """Yield what is to be done, node by node; nothing where both agree."""
    for name, node in nodes.items():
        slurm_node = slurm.get(name)
        if slurm_node is None or (node.status is NodeStatus.LEFT and not ends):
            continue
        is_held = node.isolation.active and not (ends and not node.health.repair_need)
        is_ours = slurm_node.is_draining and slurm_node.reason.startswith(TO_SLURM)
        is_theirs = slurm_node.is_draining and not is_ours
        if ends:
            pass  # no workers are left to be moved
        elif is_theirs and not (node.cordon.active and node.cordon.draining):
            yield SyncStep("drain", name, FROM_SLURM + (slurm_node.reason or "drained")[:_REASON_MAX])
        elif node.cordon.active and node.cordon.reason.startswith(FROM_SLURM) and not is_theirs:
            yield SyncStep("uncordon", name, f"{FROM_SLURM}drained no longer")
        if is_held and not slurm_node.is_draining:
            yield SyncStep("hold", name, TO_SLURM + (node.reason or "isolated")[:_REASON_MAX])
        elif is_ours and not is_held:
            yield SyncStep("release", name, "")
