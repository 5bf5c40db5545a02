"""Judges the readings and events of one GPU. Pure: `diagnose(history, sighting, workers, now_s) -> (history,
findings)`.

Rules
-----
* A code means what the table says (`xids.py`), unless the driver names its recovery action: with one, the GPU is broken
  whatever the code; with "none", a code that the table calls broken is a fault of the program that ran there.
* A fault that may be the program's is the GPU's when it recurs there under another worker within RECURS_S.
* States (the GPU is lost, needs an action, cannot remap rows) are reported when they begin, and again whenever there is
  a worker not yet reported: a node that is readmitted with the same broken GPU gets no training.
* Counts mean something when they grow: uncorrectable errors that no code has explained, links that go down. They
  are counted from the first reading on.
* A high rate of corrected ECC errors foretells a failure: CORRECTED_MIN more within CORRECTED_S, or the driver's code
  for it. It has no kind, for nothing has failed yet; the coordinator empties the node and has it checked.
* Throttling, CRC errors, retrained links and pending remappings are news for people: no kind, at most once in QUIET_S
  each; throttling when SUSTAINED readings in a row show it.
* A code that comes again under the same workers within BURST_S is the same event.

What does not live here: the driver, threads, the response to a finding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from unicrond.agents.accelerators.driver import GpuReading, RecoveryAction, Sighting, Throttle, XidEvent
from unicrond.agents.accelerators.xids import RECOVERY_ACTION_CHANGED, Xid, is_known, xid
from unicrond.events.vocabulary import ErrorKind, RepairNeed, WorkerId

RECURS_S = 3600.0
BURST_S = 60.0
QUIET_S = 600.0
SUSTAINED = 3
#: This many corrected errors within this time foretell a failure: a healthy GPU has a few in a year.
CORRECTED_MIN = 100
CORRECTED_S = 3600.0
#: This many CRC errors and replays from one reading to the next are worth a report.
LINK_ERRORS_MIN = 100

#: Kinds that the table calls broken, while the driver may not.
_BROKEN: frozenset[ErrorKind] = frozenset({"gpu_broken", "ecc_error", "nvlink_error", "driver_error"})
_REPAIRS: dict[RecoveryAction, RepairNeed] = {"reset": "reset", "reboot": "reboot", "drain": "reset", "other": "other"}
_NEEDS: dict[RecoveryAction, str] = {
    "reset": "a reset",
    "reboot": "a reboot of the node",
    "drain": "to be drained and reset",
    "other": "a recovery action that this version does not know",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFinding:
    """A finding about a GPU. `kind`: the error that its worker suffers, None: nothing has failed yet. `xid`: the
    driver's code, 0: none. `warning`: the agent writes it into its own log. `needs`: the repair. `predicts_failure`: an
    error is to be expected."""

    kind: ErrorKind | None
    message: str
    xid: int = 0
    warning: bool = False
    needs: RepairNeed = ""
    predicts_failure: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """One GPU, as its earlier readings and events show it. Times are monotonic seconds.

    `codes`: per code, when and under which workers it came last. `states`: per state, the workers that were reported.
    `news_s`: per kind of news, when it was reported last. `throttled`: readings in a row with that reason. `corrected`:
    since when, and from which count on, corrected errors are counted.
    """

    reading: GpuReading | None = None
    codes: Mapping[int, tuple[float, tuple[WorkerId, ...]]] = field(default_factory=dict)
    states: Mapping[str, tuple[WorkerId, ...]] = field(default_factory=dict)
    news_s: Mapping[str, float] = field(default_factory=dict)
    throttled: Mapping[Throttle, int] = field(default_factory=dict)
    corrected: tuple[float, int] | None = None


def diagnose(
    history: History, sighting: Sighting, workers: tuple[WorkerId, ...], now_s: float
) -> tuple[History, tuple[GpuFinding, ...]]:
    """Judge one sighting. `workers`: those on the GPU now."""
    if isinstance(sighting, XidEvent):
        return _code(history, sighting, workers, now_s)
    return _reading(history, sighting, workers, now_s)


# --- codes ---------------------------------------------------------------------------------------


def _code(
    history: History, event: XidEvent, workers: tuple[WorkerId, ...], now_s: float
) -> tuple[History, tuple[GpuFinding, ...]]:
    before = history.codes.get(event.code)
    if before is not None and before[1] == workers and now_s - before[0] < BURST_S:
        return history, ()
    row = xid(event.code)
    kind, because = _kind(row, event, before, workers, now_s)
    message = f"XID {event.code}: {row.meaning}{because}"
    if row.kind is None and (cause := _recent(history, event.code, now_s)):
        message += f"; after XID {cause} on the same GPU"
    elif not is_known(event.code):
        message += f"; {row.advice}"
    needs = _REPAIRS.get(event.action, "") if event.action is not None else row.needs
    finding = GpuFinding(
        kind=kind,
        message=message,
        xid=event.code,
        warning=kind is not None or not is_known(event.code) or row.predicts_failure,
        needs=needs if kind in _BROKEN else "",
        predicts_failure=kind is None and row.predicts_failure,
    )
    return replace(history, codes={**history.codes, event.code: (now_s, workers)}), (finding,)


def _kind(
    row: Xid,
    event: XidEvent,
    before: tuple[float, tuple[WorkerId, ...]] | None,
    workers: tuple[WorkerId, ...],
    now_s: float,
) -> tuple[ErrorKind | None, str]:
    """Return the kind, and in words why it is not the table's."""
    if event.action is not None and event.action != "none":
        kind = row.kind if row.kind in _BROKEN else "gpu_broken"
        return kind, f"; the driver says that the GPU needs {_NEEDS[event.action]}"
    if event.code == RECOVERY_ACTION_CHANGED and event.action == "none":
        return None, "; the driver says that the GPU needs nothing now"
    if row.recurring and before is not None and before[1] != workers and now_s - before[0] < RECURS_S:
        return "gpu_broken", ", again on this GPU under another worker"
    if row.kind in _BROKEN and event.action == "none":
        return "gpu_fault", "; the driver says that the GPU needs no recovery"
    return row.kind, ""


def _recent(history: History, code: int, now_s: float) -> int | None:
    """Return the newest other code of the last BURST_S that is more than a symptom."""
    recent = [
        (at_s, other_code)
        for other_code, (at_s, _) in history.codes.items()
        if other_code != code and now_s - at_s < BURST_S and xid(other_code).kind is not None
    ]
    return max(recent)[1] if recent else None


# --- readings ------------------------------------------------------------------------------------


def _reading(
    history: History, now: GpuReading, workers: tuple[WorkerId, ...], now_s: float
) -> tuple[History, tuple[GpuFinding, ...]]:
    findings: list[GpuFinding] = []
    states = {}
    for name, kind, message, needs in states_of(now):
        reported = history.states.get(name)
        if reported is None or set(workers) - set(reported):
            findings.append(GpuFinding(kind=kind, message=message, warning=True, needs=needs))
        states[name] = workers
    # A lost GPU has no counts: they go on from their last values.
    before = history.reading
    if before is not None and not now.is_lost:
        findings += _growth(history, before, now, now_s)
    corrected, rise = _corrected(history.corrected, now, now_s)
    if rise:
        findings.append(GpuFinding(kind=None, message=rise, warning=True, predicts_failure=True))
    throttled = {reason: history.throttled.get(reason, 0) + 1 for reason in now.throttles}
    news_s = dict(history.news_s)
    for topic, message in _news(before, now, throttled):
        if now_s - news_s.get(topic, float("-inf")) >= QUIET_S:
            news_s[topic] = now_s
            findings.append(GpuFinding(kind=None, message=message))
    last_reading = before if now.is_lost and before is not None else now
    return replace(
        history, reading=last_reading, states=states, news_s=news_s, throttled=throttled, corrected=corrected
    ), tuple(findings)


def states_of(now: GpuReading) -> Iterator[tuple[str, ErrorKind, str, RepairNeed]]:
    """Yield the GPU's present faults: name of the state, kind, message, needed repair."""
    if now.is_lost:
        yield "lost", "gpu_broken", "the driver has lost the GPU", "reboot"
    if now.action is not None and now.action != "none":
        message = f"the driver says that the GPU needs {_NEEDS[now.action]}"
        yield f"action {now.action}", "gpu_broken", message, _REPAIRS[now.action]
    if now.rows_failed:
        yield "rows", "ecc_error", "no more memory rows can be remapped", "replace"


def _growth(history: History, before: GpuReading, now: GpuReading, now_s: float) -> Iterator[GpuFinding]:
    growth = max(_more(before.ecc_volatile, now.ecc_volatile), _more(before.ecc_aggregate, now.ecc_aggregate))
    if growth and not _explained(history, now_s, "ecc_error", "gpu_fault"):
        kind: ErrorKind = "gpu_fault" if now.action == "none" else "ecc_error"
        yield GpuFinding(kind=kind, message=f"{growth} more uncorrectable ECC errors", warning=True)
    down = _more(now.links_up, before.links_up)
    if down and not _explained(history, now_s, "nvlink_error"):
        message = f"{down} of {before.links_up} NVLinks went down"
        yield GpuFinding(kind="nvlink_error", message=message, warning=True)


def _corrected(since: tuple[float, int] | None, now: GpuReading, now_s: float) -> tuple[tuple[float, int] | None, str]:
    """Return from when and which count on corrected errors are counted further, and the message about them."""
    count = now.ecc_corrected
    if now.is_lost or count is None:
        return since, ""
    if since is None or count < since[1]:  # the driver was loaded again
        return (now_s, count), ""
    if count - since[1] >= CORRECTED_MIN:
        return (now_s, count), f"{count - since[1]} corrected ECC errors within {(now_s - since[0]) / 60:.0f} min"
    return ((now_s, count) if now_s - since[0] > CORRECTED_S else since), ""


def _more(before: int | None, now: int | None) -> int:
    """Return by how much a count has grown; 0 where it is unknown, or began anew."""
    return max(0, now - before) if before is not None and now is not None else 0


def _explained(history: History, now_s: float, *kinds: ErrorKind) -> bool:
    """Return whether a code has reported it a moment ago."""
    return any(now_s - at_s < BURST_S and xid(code).kind in kinds for code, (at_s, _) in history.codes.items())


def _news(before: GpuReading | None, now: GpuReading, throttled: Mapping[Throttle, int]) -> Iterator[tuple[str, str]]:
    if now.rows_pending:
        yield "rows", "a row remapping takes effect at the GPU's next reset"
    for reason, count in sorted(throttled.items()):
        if count >= SUSTAINED:
            cause = "too hot" if reason == "thermal" else "power capped"
            yield f"throttled {reason}", f"the GPU is throttled: {cause}"
    if before is None or now.is_lost:
        return
    errors = _more(before.link_errors, now.link_errors)
    if errors >= LINK_ERRORS_MIN:
        yield "link errors", f"{errors} more CRC errors and replays on its NVLinks"
    recoveries = _more(before.link_recoveries, now.link_recoveries)
    if recoveries:
        yield "link recoveries", f"its NVLinks were retrained {recoveries} more times"
