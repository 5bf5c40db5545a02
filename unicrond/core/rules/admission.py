"""The one door: which valid events of the log must not be folded all the same. Pure.

Rules
-----
* An entry is refused that no honest producer writes (a boot or a term from the future, a report about another node's
  worker, an iteration that the task does not have), an observation that exceeds what its node may say
  (`authority.py`), a request that breaks the rules of requests (`requests.py`), and
  an entry that would break an invariant of the state or make its fold raise.
* A refused entry is quarantined: counted, kept with its reason (`ClusterState.refusals`), and otherwise the state stays
  as it was. Every reader of the log comes to the same verdict, a replay included.
* `last_numbers` moves on, so that a repetition is one; but not for a boot or a term from the future: its producer could
  never say anything again.
"""

from __future__ import annotations

from msgspec.structs import replace

from unicrond.core.rules.authority import AUTHORITY
from unicrond.core.rules.requests import request_problem
from unicrond.core.state.refusals import REFUSED_MAX, REFUSED_NODES_MAX, Refusal, RefusalTally
from unicrond.core.state.state import ClusterState
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import Envelope

#: A node's boot is its wall clock at most, or one more than the one before; no clock is wrong by more than that.
AHEAD_MAX_US = 366 * 86_400_000_000

#: How the reason of a quarantine begins where the fold itself raised: always a bug.
FOLD_FAILS = "its fold fails"


def from_the_future(state: ClusterState, envelope: Envelope) -> str:
    """Return why the identity of `envelope` cannot be its producer's, so that it must not count as seen; "" where it
    can."""
    event, boot = envelope.event, envelope.boot
    if not event.is_decided and not event.is_request:
        ahead = boot > state.now_us + AHEAD_MAX_US
        return f"$.boot: {boot} is more than a year ahead of the log's time {state.now_us}" if ahead else ""
    if isinstance(event, v.CoordinatorStarted):
        if event.term > state.term + 1:
            return f"$.event.term: {event.term} does not follow term {state.term}"
        return f"$.boot: {boot} is not the term {event.term}" if event.term > state.term and boot != event.term else ""
    if event.is_decided:
        rules = envelope.term == state.term
        return f"$.boot: {boot} is not the term {envelope.term}" if rules and boot != envelope.term else ""
    ahead = boot > max(1, state.term)
    return f"$.boot: the API of term {state.term} has no boot {boot}" if ahead else ""


def is_repetition(state: ClusterState, envelope: Envelope) -> bool:
    """Return whether the entry was folded already: per producer, (boot, number) only grows."""
    last = state.last_numbers.get(envelope.producer, (-1, 0))
    if (envelope.boot, envelope.number) > last:
        return False
    # The boots of the coordinator and the API are terms: one above the present belongs to no process, and disturbs
    # none.
    future = last[0] > max(state.term, envelope.boot) and envelope.event.is_decided
    return not (future and envelope.term >= state.term)


def problem(state: ClusterState, event: v.AnyEvent) -> str:
    """Return what is wrong with a valid observation, as `state` has it; "" where nothing is."""
    if event.is_request and isinstance(event, v.Request):
        return request_problem(state, event)
    task = state.tasks.get(getattr(event, "task", ""))
    if task is None:
        return ""
    worker = task.workers.get(getattr(event, "worker", ""))
    if worker is not None and worker.node != event.node:  # type: ignore[union-attr]  # every observation but requests
        return f"$.event.node: {worker.worker} runs on {worker.node}"
    if isinstance(event, v.StepCommitted):
        if event.first > event.last:
            return f"$.event.first: {event.first} is after the last, {event.last}"
        reached = event.last
    else:
        reached = getattr(event, "iteration", 0)
    if reached > task.spec.iterations + 1:  # one more: a member that has done the last waits for the next
        return f"$.event: iteration {reached} of {task.name}, which has {task.spec.iterations}"
    return AUTHORITY[type(event)](task, event)  # type: ignore[index]  # every observation but requests


def refuse(state: ClusterState, envelope: Envelope, reason: str) -> ClusterState:
    """Return `state` with the entry that it stands at quarantined."""
    refusal = Refusal(seq=state.seq, event_id=envelope.event_id, reason=reason[:1024])
    refused = (*state.refusals, refusal)[-REFUSED_MAX:]
    state = replace(state, quarantined_messages=state.quarantined_messages + 1, refusals=refused)
    event = envelope.event
    if event.is_decided or event.is_request:
        return state
    node = envelope.producer
    before = state.refused_observations.get(node, RefusalTally())
    tally = RefusalTally(count=before.count + 1, last_us=state.now_us, reason=refusal.reason)
    newest = {name: old for name, old in state.refused_observations.items() if name != node} | {node: tally}
    return replace(state, refused_observations=dict(list(newest.items())[-REFUSED_NODES_MAX:]))


def raised(error: Exception) -> str:
    """Return the reason of a quarantine, where a fold raised `error`."""
    return " ".join(f"{FOLD_FAILS}: {type(error).__name__}: {error}".split())
