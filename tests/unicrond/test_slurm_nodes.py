"""Drains and isolations between Slurm and the cluster (unicrond/ctl/slurm_nodes.py)."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from unicrond.core.state.node_parts import AgentIdentity, Cordon, Isolation, NodeHealth
from unicrond.core.state.state import Node, NodeStatus
from unicrond.ctl.slurm_nodes import SlurmNode, SyncStep, read, steps
from unicrond.events.vocabulary import StoreAddress

STORE = StoreAddress(host="127.0.0.1", port=1)
UP = Node(
    name="n1",
    status=NodeStatus.UP,
    slots=1,
    slots_max=1,
    address="127.0.0.1",
    store=STORE,
    agent=AgentIdentity(boot=1),
    joined_us=1,
)
DRAINED_HERE = {"cordon": Cordon(active=True, draining=True, reason="slurm: a fan")}
ISOLATED = Isolation(active=True)


def test_sinfo_output_is_parsed() -> None:
    said = [
        "n1|idle|none",
        "n2|draining*|ecc errors: gpu3",
        "n2|draining*|ecc errors: gpu3",
        "n3|drained|a | b",
        "",
        "x",
    ]
    assert read(said) == {
        "n1": SlurmNode("n1", False, ""),
        "n2": SlurmNode("n2", True, "ecc errors: gpu3"),
        "n3": SlurmNode("n3", True, "a | b"),
    }


@pytest.mark.parametrize("state", ["idle", "mixed", "allocated", "down*", "fail", "planned", "completing"])
def test_other_slurm_states_are_no_drain(state: str) -> None:
    assert not read([f"n1|{state}|a reason"])["n1"].is_draining


def wanted(is_draining: bool, why: str, /, ends: bool = False, **fields: Any) -> list[tuple[str, str]]:
    found = list(steps({"n1": SlurmNode("n1", is_draining, why)}, {"n1": replace(UP, **fields)}, ends))
    assert all(isinstance(step, SyncStep) and step.node == "n1" for step in found)
    return [(step.act, step.reason) for step in found]


def test_sync_does_nothing_if_both_agree() -> None:
    assert wanted(False, "") == []
    assert wanted(True, "a fan", **DRAINED_HERE) == []
    assert wanted(True, "unicron: broken", isolation=ISOLATED) == []
    assert list(steps({}, {"n1": UP})) == []  # a node that Slurm does not know


def test_slurm_drain_applies_to_cluster_and_ends() -> None:
    assert wanted(True, "a fan") == [("drain", "slurm: a fan")]
    assert wanted(True, "") == [("drain", "slurm: drained")]
    assert wanted(False, "", **DRAINED_HERE) == [("uncordon", "slurm: drained no longer")]
    only_cordoned = {"cordon": Cordon(active=True, reason="mine")}
    assert wanted(True, "a fan", **only_cordoned) == [("drain", "slurm: a fan")]


def test_sync_leaves_manual_cordon() -> None:
    assert wanted(False, "", cordon=Cordon(active=True, draining=True, reason="new fan")) == []
    assert wanted(True, "maintenance", isolation=ISOLATED, **DRAINED_HERE) == []


def test_isolation_applies_to_slurm_and_ends() -> None:
    assert wanted(False, "", isolation=ISOLATED, reason="XID 79") == [("hold", "unicron: XID 79")]
    assert wanted(True, "unicron: XID 79") == [("release", "")]
    assert wanted(True, "unicron: XID 79", isolation=ISOLATED, **DRAINED_HERE) == [
        ("uncordon", "slurm: drained no longer")
    ]


def test_sync_ignores_departed_node() -> None:
    assert wanted(True, "a fan", status=NodeStatus.LEFT) == []


def test_cluster_end_leaves_nodes_in_need_of_repair_drained() -> None:
    held = {"isolation": ISOLATED, "status": NodeStatus.LEFT}
    assert wanted(True, "unicron: rests", ends=True, **held) == [("release", "")]
    assert wanted(True, "unicron: XID 79", ends=True, health=NodeHealth(repair_need="replace"), **held) == []
    assert wanted(True, "a fan", ends=True, status=NodeStatus.LEFT) == []
    assert wanted(False, "", ends=True, status=NodeStatus.LEFT, **DRAINED_HERE) == []
