"""What sightings of one GPU amount to. Pure: `diagnose(history, sighting, workers, now_s) -> (history, findings)`.

Rules
-----
* A code says what the table says (`xids.py`), unless the driver tells its recovery action: with one, the GPU is broken
  whatever the code; with "none", what the table calls broken is a fault of what ran there.
* What may be the program's fault is the GPU's when it recurs there under another worker within RECURS_S.
* States (the GPU is lost, needs an action, cannot remap rows) are found when they begin, and again whenever there is a
  worker not yet reported: a node that is readmitted with the same broken GPU gets no training.
* Counts mean something when they grow: uncorrectable errors that no code has explained, links that go down. The first
  reading is where they are counted from.
* A high rate of corrected ECC errors foretells a failure: CORRECTED_MIN more within CORRECTED_S, or the driver's code
  for it. It has no kind, for nothing has failed yet; the coordinator empties the node and has it checked.
* Throttling, CRC errors, retrained links and pending remappings are news for people: no kind, at most once in QUIET_S
  each; throttling when SUSTAINED readings in a row show it.
* A code that comes again under the same workers within BURST_S is the same event.

What does not live here: the driver, threads, what is done about a finding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from agents.accelerators.readings import Reading, RecoveryAction, Sighting, Throttle, XidSeen
from agents.accelerators.xids import RECOVERY_ACTION_CHANGED, Xid, is_known, xid
from events.vocabulary import ErrorKind, RepairNeed, WorkerId

RECURS_S = 3600.0
BURST_S = 60.0
QUIET_S = 600.0
SUSTAINED = 3
#: So many corrected errors within so long: a healthy GPU has a few in a year.
CORRECTED_MIN = 100
CORRECTED_S = 3600.0
#: So many CRC errors and replays from one reading to the next are worth a word.
LINK_ERRORS_MIN = 100

#: What the table calls broken and the driver, asked, does not.
_BROKEN: frozenset[ErrorKind] = frozenset({"gpu_broken", "ecc_error", "nvlink_error", "driver_error"})
_REPAIRS: dict[RecoveryAction, RepairNeed] = {"reset": "reset", "reboot": "reboot", "drain": "reset", "other": "other"}
_NEEDS: dict[RecoveryAction, str] = {
    "reset": "a reset",
    "reboot": "a reboot of the node",
    "drain": "to be drained and reset",
    "other": "a recovery action that this version does not know",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`kind` None: news for people, or what `foretells` a failure. `xid` 0: not from a code. `warning`: the agent's own
    log says it aloud."""

    kind: ErrorKind | None
    message: str
    xid: int = 0
    warning: bool = False
    needs: RepairNeed = ""
    foretells: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What is remembered of one GPU. Times are monotonic seconds.

    `codes`: per code, when and under which workers it came last. `states`: per state, the workers that were told of.
    `told`: per kind of news, when it was told last. `throttled`: readings in a row with that reason. `corrected`: since
    when, and from which count on, corrected errors are counted.
    """

    reading: Reading | None = None
    codes: Mapping[int, tuple[float, tuple[WorkerId, ...]]] = field(default_factory=dict)
    states: Mapping[str, tuple[WorkerId, ...]] = field(default_factory=dict)
    told: Mapping[str, float] = field(default_factory=dict)
    throttled: Mapping[Throttle, int] = field(default_factory=dict)
    corrected: tuple[float, int] | None = None


def diagnose(
    history: History, sighting: Sighting, workers: tuple[WorkerId, ...], now_s: float
) -> tuple[History, tuple[Finding, ...]]:
    """Take one sighting. `workers`: those on the GPU now."""
    if isinstance(sighting, XidSeen):
        return _code(history, sighting, workers, now_s)
    return _reading(history, sighting, workers, now_s)


# --- codes ---------------------------------------------------------------------------------------


def _code(
    history: History, seen: XidSeen, workers: tuple[WorkerId, ...], now_s: float
) -> tuple[History, tuple[Finding, ...]]:
    before = history.codes.get(seen.code)
    if before is not None and before[1] == workers and now_s - before[0] < BURST_S:
        return history, ()
    row = xid(seen.code)
    kind, because = _kind(row, seen, before, workers, now_s)
    message = f"XID {seen.code}: {row.meaning}{because}"
    if row.kind is None and (cause := _recent(history, seen.code, now_s)):
        message += f"; after XID {cause} on the same GPU"
    elif not is_known(seen.code):
        message += f"; {row.advice}"
    said = _REPAIRS.get(seen.action, "") if seen.action is not None else row.needs
    finding = Finding(
        kind=kind,
        message=message,
        xid=seen.code,
        warning=kind is not None or not is_known(seen.code) or row.foretells,
        needs=said if kind in _BROKEN else "",
        foretells=kind is None and row.foretells,
    )
    return replace(history, codes={**history.codes, seen.code: (now_s, workers)}), (finding,)


def _kind(
    row: Xid,
    seen: XidSeen,
    before: tuple[float, tuple[WorkerId, ...]] | None,
    workers: tuple[WorkerId, ...],
    now_s: float,
) -> tuple[ErrorKind | None, str]:
    """The kind, and in words why it is not the table's."""
    if seen.action is not None and seen.action != "none":
        kind = row.kind if row.kind in _BROKEN else "gpu_broken"
        return kind, f"; the driver says that the GPU needs {_NEEDS[seen.action]}"
    if seen.code == RECOVERY_ACTION_CHANGED and seen.action == "none":
        return None, "; the driver says that the GPU needs nothing now"
    if row.recurring and before is not None and before[1] != workers and now_s - before[0] < RECURS_S:
        return "gpu_broken", ", again on this GPU under another worker"
    if row.kind in _BROKEN and seen.action == "none":
        return "gpu_fault", "; the driver says that the GPU needs no recovery"
    return row.kind, ""


def _recent(history: History, code: int, now_s: float) -> int | None:
    """The newest other code of the last BURST_S that is more than a symptom."""
    recent = [
        (at_s, other)
        for other, (at_s, _) in history.codes.items()
        if other != code and now_s - at_s < BURST_S and xid(other).kind is not None
    ]
    return max(recent)[1] if recent else None


# --- readings ------------------------------------------------------------------------------------


def _reading(
    history: History, now: Reading, workers: tuple[WorkerId, ...], now_s: float
) -> tuple[History, tuple[Finding, ...]]:
    findings: list[Finding] = []
    states = {}
    for name, kind, message, needs in states_of(now):
        told_of = history.states.get(name)
        if told_of is None or set(workers) - set(told_of):
            findings.append(Finding(kind=kind, message=message, warning=True, needs=needs))
        states[name] = workers
    # A GPU that is lost tells no counts: they go on from where they were.
    before = history.reading
    if before is not None and not now.lost:
        findings += _growth(history, before, now, now_s)
    corrected, rise = _corrected(history.corrected, now, now_s)
    if rise:
        findings.append(Finding(kind=None, message=rise, warning=True, foretells=True))
    throttled = {reason: history.throttled.get(reason, 0) + 1 for reason in now.throttles}
    told = dict(history.told)
    for topic, message in _news(before, now, throttled):
        if now_s - told.get(topic, float("-inf")) >= QUIET_S:
            told[topic] = now_s
            findings.append(Finding(kind=None, message=message))
    kept = before if now.lost and before is not None else now
    return replace(history, reading=kept, states=states, told=told, throttled=throttled, corrected=corrected), tuple(
        findings
    )


def states_of(now: Reading) -> Iterator[tuple[str, ErrorKind, str, RepairNeed]]:
    """What is wrong with a GPU at this moment: name of the state, kind, message, what it needs."""
    if now.lost:
        yield "lost", "gpu_broken", "the driver has lost the GPU", "reboot"
    if now.action is not None and now.action != "none":
        message = f"the driver says that the GPU needs {_NEEDS[now.action]}"
        yield f"action {now.action}", "gpu_broken", message, _REPAIRS[now.action]
    if now.rows_failed:
        yield "rows", "ecc_error", "no more memory rows can be remapped", "replace"


def _growth(history: History, before: Reading, now: Reading, now_s: float) -> Iterator[Finding]:
    grown = max(_more(before.ecc_volatile, now.ecc_volatile), _more(before.ecc_aggregate, now.ecc_aggregate))
    if grown and not _explained(history, now_s, "ecc_error", "gpu_fault"):
        kind: ErrorKind = "gpu_fault" if now.action == "none" else "ecc_error"
        yield Finding(kind=kind, message=f"{grown} more uncorrectable ECC errors", warning=True)
    down = _more(now.links_up, before.links_up)
    if down and not _explained(history, now_s, "nvlink_error"):
        message = f"{down} of {before.links_up} NVLinks went down"
        yield Finding(kind="nvlink_error", message=message, warning=True)


def _corrected(since: tuple[float, int] | None, now: Reading, now_s: float) -> tuple[tuple[float, int] | None, str]:
    """From when and what on corrected errors are counted further, and what is to be said of them."""
    count = now.ecc_corrected
    if now.lost or count is None:
        return since, ""
    if since is None or count < since[1]:  # the driver was loaded again
        return (now_s, count), ""
    if count - since[1] >= CORRECTED_MIN:
        return (now_s, count), f"{count - since[1]} corrected ECC errors within {(now_s - since[0]) / 60:.0f} min"
    return ((now_s, count) if now_s - since[0] > CORRECTED_S else since), ""


def _more(before: int | None, now: int | None) -> int:
    """By how much a count has grown; 0 where it is not told, or began anew."""
    return max(0, now - before) if before is not None and now is not None else 0


def _explained(history: History, now_s: float, *kinds: ErrorKind) -> bool:
    """A code has told it a moment ago."""
    return any(now_s - at_s < BURST_S and xid(code).kind in kinds for code, (at_s, _) in history.codes.items())


def _news(before: Reading | None, now: Reading, throttled: Mapping[Throttle, int]) -> Iterator[tuple[str, str]]:
    if now.rows_pending:
        yield "rows", "a row remapping takes effect at the GPU's next reset"
    for reason, count in sorted(throttled.items()):
        if count >= SUSTAINED:
            why = "too hot" if reason == "thermal" else "power capped"
            yield f"throttled {reason}", f"the GPU is throttled: {why}"
    if before is None or now.lost:
        return
    errors = _more(before.link_errors, now.link_errors)
    if errors >= LINK_ERRORS_MIN:
        yield "link errors", f"{errors} more CRC errors and replays on its NVLinks"
    recoveries = _more(before.link_recoveries, now.link_recoveries)
    if recoveries:
        yield "link recoveries", f"its NVLinks were retrained {recoveries} more times"
