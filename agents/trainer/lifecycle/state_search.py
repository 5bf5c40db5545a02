"""Finds a state where no member has any: the member that is nearest to the newest one loads it (`candidates.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from unicrond.agents.trainer.lifecycle.candidates import is_storage_seen, newest, oldest_allowed, ordered
from unicrond.agents.trainer.lifecycle.effects import CheckPeers, Flow, GatherRows, LoadState, Log, Send
from unicrond.agents.trainer.lifecycle.member_state import MemberState, resume_after
from unicrond.agents.trainer.lifecycle.results import LoadedState, StateLost
from unicrond.events.vocabulary import SOURCES_MAX, StateLoaded, StateSource

_TRIED_CHARS = 1024


def find_state(member: MemberState) -> Flow[int]:
    """Have one member load the newest state that any can; return its rank. Where storage does not answer, only what
    is as new as the newest checkpoint that is known is tried before it is seen. Throws GroupBroken,
    MembershipSuperseded; raises StateLost."""
    assert member.membership is not None
    started_s, rank = member.clock(), member.rank
    failures: list[str] = []
    row = yield from CheckPeers(rank == 0, member.membership)
    rows = yield from GatherRows(row)
    loaded_iteration, loader = yield from _program_states(member)
    source = yield from _load_best(member, rows, loaded_iteration, started_s, failures)
    if source is None and not is_storage_seen(rows):
        row = yield from CheckPeers(rank == 0, member.membership, must_see_storage=True)
        rows = yield from GatherRows(row)
        source = yield from _load_best(member, rows, loaded_iteration, started_s, failures)
    if source is not None:
        return source
    seed = loader if loaded_iteration else (yield from _untouched(member))
    if rank == seed:
        member.origin = "checkpoint" if loaded_iteration else "init"
        yield from resume_after(member, loaded_iteration)
        yield from report_loaded(
            member, member.origin, LoadedState(loaded_iteration, 0.0, 0), started_s, failures, loaded_iteration
        )
    return seed


def _load_best(
    member: MemberState, rows: Sequence[Sequence[int]], loaded_iteration: int, started_s: float, failures: list[str]
) -> Flow[int | None]:
    """Have one member load the newest state that `rows` name, that is newer than the program's, and may be loaded by
    what is known of storage; return its rank, None where none is sound. Adds to `failures`."""
    rank = member.rank
    for candidate in ordered(rows):
        if candidate.iteration < max(loaded_iteration + 1, oldest_allowed(rows)):
            break
        outcome: LoadedState | str = ""
        if candidate.rank == rank:
            outcome = yield from LoadState(candidate)
        size_bytes = outcome.size_bytes if isinstance(outcome, LoadedState) else 0
        if isinstance(outcome, LoadedState):
            yield from adopt_state(member, outcome)
            member.origin = candidate.kind
        elif outcome:
            failures.append(f"{candidate}: {outcome}"[:_TRIED_CHARS])
            yield from Log(f"no state from {failures[-1]}")
        answers = yield from GatherRows([size_bytes])
        if answers[candidate.rank][0]:
            if isinstance(outcome, LoadedState):
                stored = newest(rows, "checkpoint") if is_storage_seen(rows) else None
                yield from report_loaded(member, candidate.kind, outcome, started_s, failures, stored)
            return candidate.rank
    return None


def _program_states(member: MemberState) -> Flow[tuple[int, int]]:
    """Return the newest iteration whose state a member's program has loaded, and that member's rank; 0 for none."""
    if member.loaded_iteration is None:
        return 0, 0
    rows = yield from GatherRows([0 if member.has_trained else member.loaded_iteration])
    iteration = max(row[0] for row in rows)
    return iteration, [row[0] for row in rows].index(iteration)


def _untouched(member: MemberState) -> Flow[int]:
    """Return the first member whose parameters are still those of the seed. Raises StateLost."""
    if member.shares is None:
        return 0
    rows = yield from GatherRows([int(member.has_trained)])
    untouched = [rank for rank, (trained,) in enumerate(rows) if not trained]
    if not untouched:
        raise StateLost(
            "all holders of a part of the optimizer's state are lost, and nothing was saved: training must start"
            " again, in new processes"
        )
    return untouched[0]


def adopt_state(member: MemberState, loaded: LoadedState) -> Flow[None]:
    """Note that the state has been loaded here."""
    member.loss, member.pace_s, member.has_trained = loaded.loss, loaded.pace_s, True
    yield from resume_after(member, loaded.iteration)


def report_loaded(
    member: MemberState,
    source: StateSource,
    loaded: LoadedState,
    started_s: float,
    failures: Sequence[str] = (),
    stored: int | None = 0,
) -> Flow[None]:
    """Report the loaded state. `started_s`: when the search began; `failures`: what was not sound; `stored`: the newest
    iteration on storage, None where that was not seen."""
    iterations = member.last_iteration - stored if source in ("memory", "peer") and stored is not None else 0
    yield from Send(
        StateLoaded(
            **member.launch.reporter,
            generation=member.generation,
            source=source,
            iteration=member.last_iteration,
            size_bytes=loaded.size_bytes,
            duration_us=int((member.clock() - started_s) * 1e6),
            failed_sources=tuple(failures)[:SOURCES_MAX],
            storage_iteration=stored or 0,
            saved_us=int(max(0, iterations) * member.pace_s * 1e6),
            resharded_from=loaded.resharded_from,
        )
    )
