"""How bad an error is: one table (Unicron, arXiv 2401.00134, "In-band error detection", "Response by severity").

Rules
-----
* The reporter says what it saw (kind); the severity is the coordinator's, from this table alone.
* SEV3 reattempt in place: same processes, same state, a new generation of the group.
* SEV2 restart the process: same node, new process, state from the nearest source.
* SEV1 reconfigure: isolate the node, plan anew for all tasks.
* A failed reattempt becomes SEV2, a failed restart SEV1 (deciding/response.py does the counting).
* The configuration may set other severities; those in force stand in the log (CoordinatorStarted), so that
  the fold needs nothing else to know them.
"""

from __future__ import annotations

from collections.abc import Mapping

from unicrond.core.state.state import Severity
from unicrond.events import vocabulary as v

SEVERITY: dict[str, Severity] = {
    "node_lost": Severity.SEV1,
    "domain_lost": Severity.SEV1,
    "ecc_error": Severity.SEV1,
    "nvlink_error": Severity.SEV1,
    "driver_error": Severity.SEV1,
    "dma_error": Severity.SEV1,
    "gpu_broken": Severity.SEV1,
    "process_exit": Severity.SEV2,
    "start_failed": Severity.SEV2,
    "cuda_error": Severity.SEV2,
    "illegal_memory_access": Severity.SEV2,
    "nccl_error": Severity.SEV2,
    "out_of_memory": Severity.SEV2,
    "exception": Severity.SEV2,
    "nan_loss": Severity.SEV2,
    "data_error": Severity.SEV2,
    "hang": Severity.SEV2,
    "corruption": Severity.SEV2,
    "gpu_fault": Severity.SEV2,
    "left_early": Severity.SEV2,
    "link_fault": Severity.SEV2,
    "connection_broken": Severity.SEV3,
    "collective_timeout": Severity.SEV3,
    "store_error": Severity.SEV3,
    "head_deaf": Severity.SEV3,
}

#: The response to each severity, as plans and incident tables name it.
RESPONSE: dict[Severity, str] = {
    Severity.SEV1: "reconfigure",
    Severity.SEV2: "restart the process",
    Severity.SEV3: "reattempt in place",
}


#: Impossible severities: a process that has ended is not reattempted in place, nor restarted on a lost node; and where
#: the head hears nobody, nothing has failed that could be replaced.
IMPOSSIBLE: dict[str, tuple[Severity, ...]] = {
    "node_lost": (Severity.SEV2, Severity.SEV3),
    "domain_lost": (Severity.SEV2, Severity.SEV3),
    "process_exit": (Severity.SEV3,),
    "start_failed": (Severity.SEV3,),
    "head_deaf": (Severity.SEV1, Severity.SEV2),
}


def kind_of(event: v.AnyEvent) -> str:
    """Return the kind of error that an event reports; "" where it reports none."""
    match event:
        case v.NodeLost():
            return "node_lost"
        case v.NodesLost():
            return "domain_lost"
        case v.SilenceHeld():
            return "head_deaf"
        case v.ErrorReported():
            return event.kind
        case v.AcceleratorReported():
            return event.kind or ""
        case v.WorkerExited():
            return "" if event.is_expected else "process_exit"
        case v.HangSuspected():
            return "hang"
        case v.CorruptionSuspected():
            return "corruption"
        case _:
            return ""


def severity_of(kind: str, overrides: Mapping[str, int]) -> Severity:
    """Return the severity of an error kind; unknown kinds are SEV2 (restart the process)."""
    override = overrides.get(kind)
    return SEVERITY.get(kind, Severity.SEV2) if override is None else Severity(override)
