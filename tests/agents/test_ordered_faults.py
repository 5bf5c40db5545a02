"""Ordered faults: what the core makes of them, and what strikes a real node."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import textwrap

import msgspec
import pytest

from tests.agents.node import NODE, Node, stop
from tests.agents.processes import ROOT, children, environment, has_ended
from tests.agents.test_core import running
from tests.agents.test_daemon import AgentProcess, Coordinator, agent, coordinator
from unicrond.agents.core import machine as core
from unicrond.agents.core.state import (
    Commanded,
    InjectIntoNode,
    NodeFaultInjected,
    Remembered,
    TellForkServer,
    TellWorker,
)
from unicrond.agents.health.node_faults import is_in_own_namespace
from unicrond.agents.protocol.messages import InjectIntoWorker, Kill
from unicrond.events.vocabulary import (
    AcceleratorReported,
    CommandApplied,
    CommandFailed,
    Fault,
    InjectFault,
    NodeJoined,
    WorkerExited,
)

__all__ = ["agent", "coordinator"]  # fixtures


@pytest.fixture
def node() -> Node:
    """A node that is up; a.1 runs and is ready."""
    node = Node()
    node.boot()
    running(node, "a.1", 1)
    return node


def inject(number: int, *, term: int = 1, epoch: int = 1, **fault: object) -> InjectFault:
    return InjectFault(
        command_id=f"{term}.{epoch}.{NODE}.{number}",
        node=NODE,
        epoch=epoch,
        injection="f1",
        fault=Fault(**fault),  # type: ignore[arg-type]
    )


def test_agent_without_memory_ignores_fault_order_to_predecessor(node: Node) -> None:
    """The node was killed, by order, and its run directory is gone: the order comes again, and nobody knows of it."""
    asked = msgspec.structs.replace(inject(9, kind="kill"), agent_boot=node.config.agent_boot)
    assert any(isinstance(action, InjectIntoNode) for action in node.command(asked))
    node.restart_agent()
    node.state = core.resume(node.config, Remembered())
    assert not any(isinstance(action, InjectIntoNode) for action in node.command(asked))
    assert node.answers(asked.command_id)[-1].startswith("stale: it was for an agent whose run directory is lost")
    node.restart_agent()
    later = msgspec.structs.replace(inject(10, kind="kill"), agent_boot=node.config.agent_boot - 1)
    assert any(isinstance(action, InjectIntoNode) for action in node.command(later)), "its memory goes back to there"


@pytest.mark.parametrize(("kind", "number"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)])
def test_immediate_signal_fault_is_done_by_agent(node: Node, kind: str, number: int) -> None:
    command = inject(9, kind=kind, worker="a.1")
    actions = node.command(command)  # type: ignore[arg-type]
    assert TellForkServer(message=Kill(worker="a.1", signal=number)) in actions
    assert node.answers(command.command_id) == [""]
    again = node.command(command)  # type: ignore[arg-type]
    assert not [action for action in again if isinstance(action, TellForkServer)], "once, however often it comes"


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "kill", "at_iteration": 20},
        {"kind": "stop", "phase": "reduce"},
        {"kind": "exception"},
        {"kind": "nan"},
        {"kind": "slow", "seconds": 0.5},
        {"kind": "hang"},
        {"kind": "exit"},
        {"kind": "oom"},
    ],
)
def test_training_fault_is_passed_to_worker(node: Node, fault: dict[str, object]) -> None:
    command = inject(9, worker="a.1", **fault)
    actions = node.command(command)  # type: ignore[arg-type]
    assert TellWorker(worker="a.1", message=InjectIntoWorker(fault=command.fault)) in actions
    assert node.answers(command.command_id) == [""]


def test_fault_without_target_is_refused(node: Node) -> None:
    node.command(stop("a.1", 3))
    refusals = {
        inject(10, kind="kill", worker="a.7"): "no worker a.7 runs here",
        inject(11, kind="kill", worker="a.1"): "about to end anyway",
        inject(12, kind="hang", worker="a.1", term=0): "stale",
    }
    for command, reason in refusals.items():
        actions = node.command(command, term=0 if "stale" in reason else 1)  # type: ignore[arg-type]
        assert not [a for a in actions if isinstance(a, TellWorker | TellForkServer)]
        (answer,) = node.answers(command.command_id)
        assert reason in answer


def test_fault_for_disconnected_worker_is_not_delayed(node: Node) -> None:
    node.restart_agent()
    node.boot()
    command = inject(9, kind="nan", worker="a.1")
    actions = node.command(command)  # type: ignore[arg-type]
    assert not [action for action in actions if isinstance(action, TellWorker)]
    assert "not connected" in node.answers(command.command_id)[0]
    assert not [action for action in node.hello("a.1") if isinstance(action, TellWorker)]


def test_old_fault_order_never_acts(node: Node) -> None:
    command = inject(9, kind="kill", worker="a.1")
    actions = node.feed(Commanded(command=command, term=1, cause="c", age_s=61.0))
    assert not [action for action in actions if isinstance(action, TellForkServer)]
    assert "stale" in node.answers(command.command_id)[0]


def test_node_kill_is_answered_before_it_happens(node: Node) -> None:
    """Or the next agent would hear of the order again, and die of it again."""
    command = inject(9, kind="kill")
    actions = node.command(command)  # type: ignore[arg-type]
    assert isinstance(actions[-1], InjectIntoNode) and node.answers(command.command_id) == [""]
    node.restart_agent()
    node.boot()
    assert not [a for a in node.command(command) if isinstance(a, InjectIntoNode)]  # type: ignore[arg-type]


def test_failed_node_fault_is_reported(node: Node) -> None:
    command = inject(9, kind="xid", xid=79)
    (strike,) = node.command(command)  # type: ignore[arg-type]
    assert isinstance(strike, InjectIntoNode)
    assert node.command(command) == [], "it is being done"  # type: ignore[arg-type]
    node.feed(NodeFaultInjected(command_id=command.command_id, reason="no accelerator"))
    assert node.answers(command.command_id) == ["no accelerator"]


# --- real nodes ----------------------------------------------------------------------------------


async def test_killed_node_returns_and_ignores_order(agent: AgentProcess, coordinator: Coordinator) -> None:
    await coordinator.trained("a.1")
    fork_server = agent.fork_server()
    theirs = [fork_server, *children(fork_server)]
    order = await coordinator.command(
        lambda id: InjectFault(command_id=id, node="n1", epoch=1, injection="f1", fault=Fault(kind="kill"))
    )
    assert agent.process.wait(60) == -signal.SIGKILL
    assert all(has_ended(pid) for pid in theirs)
    agent.start()
    assert (await coordinator.until(WorkerExited)).worker == "a.1"
    await coordinator.until(CommandApplied, command_id=order)
    await coordinator.trained("a.2", generation=2)
    assert agent.process.poll() is None


async def test_network_drop_needs_own_namespace(agent: AgentProcess, coordinator: Coordinator) -> None:
    if is_in_own_namespace():
        pytest.skip("these tests run in a network namespace of their own")
    await coordinator.until(NodeJoined)
    order = await coordinator.command(
        lambda id: InjectFault(command_id=id, node="n1", epoch=1, injection="f1", fault=Fault(kind="drop_network"))
    )
    failed = await coordinator.until(CommandFailed, command_id=order)
    assert "namespace of its own" in failed.reason


async def test_fault_order_stops_and_kills_real_worker(agent: AgentProcess, coordinator: Coordinator) -> None:
    await coordinator.trained("a.1")
    for kind in ("stop", "kill"):
        await coordinator.command(
            lambda id, kind=kind: InjectFault(  # type: ignore[misc]
                command_id=id, node="n1", epoch=1, injection="f1", fault=Fault(kind=kind, worker="a.1")
            )
        )
    exited = await coordinator.until(WorkerExited)
    assert (exited.signal, exited.is_expected) == (signal.SIGKILL, False)


IN_A_NAMESPACE = """
    import asyncio, socket, subprocess
    from unicrond.agents.health.node_faults import NodeFaults, is_in_own_namespace
    from unicrond.events.vocabulary import Fault

    def up():
        words = subprocess.run(["ip", "-o", "link", "show", "v0"], capture_output=True, text=True).stdout.split()
        return "UP" in words[2].strip("<>").split(",")

    async def main():
        assert is_in_own_namespace()
        faults = NodeFaults(lambda: None)
        nothing = faults.inject(Fault(kind="drop_network"))
        assert "no link" in nothing, nothing
        links = "ip link add v0 type veth peer name v1; ip link set lo up; ip link set v0 up"
        subprocess.run(links, shell=True, check=True)
        assert up()
        assert faults.inject(Fault(kind="drop_network", seconds=0.2)) == ""
        assert not up()
        assert socket.create_server(("127.0.0.1", 0)), "loopback stays"
        async with asyncio.timeout(10):
            while not up():
                await asyncio.sleep(0.02)

    asyncio.run(main())
"""


def test_network_fault_drops_and_restores_links_in_namespace() -> None:
    unshare = shutil.which("unshare")
    if unshare is None or shutil.which("ip") is None or subprocess.run([unshare, "-rn", "true"]).returncode:
        pytest.skip("no network namespaces here")
    done = subprocess.run(
        [unshare, "-rn", sys.executable, "-c", textwrap.dedent(IN_A_NAMESPACE)],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


async def test_ordered_xid_is_reported_like_real(agent: AgentProcess, coordinator: Coordinator) -> None:
    """The fake driver stands for the GPU; what it reports takes the way of a real one's."""
    await coordinator.trained("a.1")
    for number, worker, kind in ((94, "a.1", "gpu_fault"), (45, "a.1", None), (79, "", "gpu_broken")):
        fault = Fault(kind="xid", worker=worker, xid=number)
        order = await coordinator.command(
            lambda id, fault=fault: InjectFault(command_id=id, node="n1", epoch=1, injection="f1", fault=fault)
        )
        told = await coordinator.until(AcceleratorReported, xid=number)
        # Slot 0 is the worker's, and the node's first accelerator.
        assert (told.worker, told.kind, told.accelerator) == ("a.1", kind, "fake 0"), told
        await coordinator.until(CommandApplied, command_id=order)
    order = await coordinator.command(
        lambda id: InjectFault(
            command_id=id, node="n1", epoch=1, injection="f1", fault=Fault(kind="xid", worker="a.7", xid=79)
        )
    )
    assert "no worker a.7" in (await coordinator.until(CommandFailed, command_id=order)).reason
