"""Parts of sentences about events (prose.py)."""

from __future__ import annotations

from events.vocabulary import Fault, MemoryService, ReshapeRequested, TaskReshaped


def count(number: int, one: str, many: str | None = None) -> str:
    """So many of them, in words."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def nodes(peers: tuple[MemoryService, ...]) -> str:
    """Their names."""
    return ", ".join(peer.node for peer in peers) or "no node"


def seconds(duration_us: int) -> str:
    """Microseconds, in seconds."""
    return f"{duration_us / 1e6:.3f} s"


def fault(fault: Fault, node: str) -> str:
    """An ordered fault: what, where, when."""
    where = f"{fault.worker} on {node}" if fault.worker else f"node {node}"
    code = f" {fault.xid}" if fault.kind == "xid" else ""
    when = f" in iteration {fault.at_iteration}" if fault.at_iteration else ""
    phase = f" at {fault.phase}" if fault.phase else ""
    lasting = f" ({fault.seconds:g} s)" if fault.seconds else ""
    return f"{fault.kind}{code} of {where}{when}{phase}{lasting}"


def settings(event: ReshapeRequested | TaskReshaped) -> str:
    """What a reshape changes beside the layout."""
    iterations = f", {event.iterations} iterations" if event.iterations is not None else ""
    return iterations + (f", learning rate {event.lr:g}" if event.lr is not None else "")
