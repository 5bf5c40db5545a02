"""What an ordered fault (unicronctl inject) comes to on this node. Pure.

Rules
-----
* A worker's kill or stop at once is a signal; anything that waits for an iteration or a phase, and every fault inside
  the training loop, is the worker's own affair: it receives `Inject`, and obeys at its next chance.
* A node's fault (no worker named) and an xid are the shell's affair (node_faults.py).
* A fault for a worker that is gone, or cannot hear, is refused: it would hit another worker, or come later.
"""

from __future__ import annotations

import signal

from agents.protocol.messages import Inject, Kill
from agents.state import Action, InjectIntoNode, TellForkServer, TellWorker, Worker
from events.vocabulary import Fault

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def is_of_node(fault: Fault) -> bool:
    """It is a fault of the node, not of one of its workers."""
    return not fault.worker or fault.kind in ("xid", "drop_network")


def on_worker(fault: Fault, record: Worker | None, *, is_connected: bool) -> Action | str:
    """What to do about a worker's fault; a text says why nothing is done."""
    if record is None or not record.pid or record.foreign:
        return f"no worker {fault.worker} runs here"
    if record.stop != "no":
        return f"worker {fault.worker} is about to end anyway"
    if fault.kind in _SIGNALS and not fault.at_iteration and not fault.phase:
        return TellForkServer(message=Kill(worker=fault.worker, signal=_SIGNALS[fault.kind]))
    if not is_connected:
        return f"worker {fault.worker} is not connected; try again in a moment"
    return TellWorker(worker=fault.worker, message=Inject(fault=fault))


def on_node(fault: Fault, command_id: str) -> InjectIntoNode:
    """For the shell to do."""
    return InjectIntoNode(fault=fault, command_id=command_id)
