"""Turns an ordered fault (unicronctl inject) into an action on this node. Pure.

Rules
-----
* A worker's kill or stop at once is a signal; a fault that waits for an iteration or a phase, and every fault inside
  the training loop, is for the worker: it receives `InjectIntoWorker`, and injects the fault at its next chance.
* A node's fault (no worker named) and an xid are for the shell (node_faults.py).
* A fault for a worker that has ended, or is not connected, is refused: it would hit another worker, or come later.
"""

from __future__ import annotations

import signal

from unicrond.agents.core.state import Action, InjectIntoNode, TellForkServer, TellWorker, WorkerRecord
from unicrond.agents.protocol.messages import InjectIntoWorker, Kill
from unicrond.events.vocabulary import Fault

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def is_of_node(fault: Fault) -> bool:
    """Return whether it is a fault of the node, not of one of its workers."""
    return not fault.worker or fault.kind in ("xid", "drop_network")


def on_worker(fault: Fault, record: WorkerRecord | None, *, is_connected: bool) -> Action | str:
    """Return the action for a worker's fault; a text says why there is none."""
    if record is None or not record.pid or record.foreign:
        return f"no worker {fault.worker} runs here"
    if record.stop != "no":
        return f"worker {fault.worker} is about to end anyway"
    if fault.kind in _SIGNALS and not fault.at_iteration and not fault.phase:
        return TellForkServer(message=Kill(worker=fault.worker, signal=_SIGNALS[fault.kind]))
    if not is_connected:
        return f"worker {fault.worker} is not connected; try again in a moment"
    return TellWorker(worker=fault.worker, message=InjectIntoWorker(fault=fault))


def on_node(fault: Fault, command_id: str) -> InjectIntoNode:
    """Return the action for a node's fault, which the shell carries out."""
    return InjectIntoNode(fault=fault, command_id=command_id)
