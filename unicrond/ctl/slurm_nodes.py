"""What Slurm and unicron know of the same nodes, brought together. Pure; slurm.py asks both and does the steps.

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

from unicrond.core.state import Node, NodeStatus

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


class Step(NamedTuple):
    """`act`: drain or uncordon (here), hold or release (in Slurm)."""

    act: str
    node: str
    reason: str


def read(lines: Iterable[str]) -> dict[str, SlurmNode]:
    """Of `sinfo --Node --noheader --format=%N|%T|%E`, which has a line for each partition of a node."""
    found = {}
    for line in lines:
        name, bar, rest = line.strip().partition("|")
        state, second_bar, reason = rest.partition("|")
        if bar and second_bar:
            is_draining = state.rstrip(_SIGNS) in _DRAINING
            found[name] = SlurmNode(name, is_draining, "" if reason in ("none", "(null)") else reason)
    return found


def steps(slurm: Mapping[str, SlurmNode], nodes: Mapping[str, Node], ends: bool = False) -> Iterator[Step]:
    """What is to be done, node by node; nothing where both agree."""
    for name, node in nodes.items():
        known = slurm.get(name)
        if known is None or (node.status is NodeStatus.LEFT and not ends):
            continue
        is_held = node.isolated and not (ends and not node.needs)
        is_ours = known.is_draining and known.reason.startswith(TO_SLURM)
        is_theirs = known.is_draining and not is_ours
        if ends:
            pass  # no workers are left to be moved
        elif is_theirs and not (node.cordoned and node.draining):
            yield Step("drain", name, FROM_SLURM + (known.reason or "drained")[:_REASON_MAX])
        elif node.cordoned and node.cordon_reason.startswith(FROM_SLURM) and not is_theirs:
            yield Step("uncordon", name, f"{FROM_SLURM}drained no longer")
        if is_held and not known.is_draining:
            yield Step("hold", name, TO_SLURM + (node.reason or "isolated")[:_REASON_MAX])
        elif is_ours and not is_held:
            yield Step("release", name, "")
