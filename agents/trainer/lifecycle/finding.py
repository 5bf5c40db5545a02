"""No member has state: the one that is nearest to the newest takes it (`candidates.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from agents.protocol.messages import Taken
from agents.trainer.lifecycle.books import Books, stand_after
from agents.trainer.lifecycle.candidates import newest, ordered
from agents.trainer.lifecycle.effects import Flow, LookAround, Rows, Say, Take, Tell
from agents.trainer.lifecycle.failures import NothingLeft
from agents.trainer.lifecycle.results import Loaded
from events.vocabulary import StateSource

_TRIED_CHARS = 1024


def find_state(books: Books) -> Flow[int]:
    """Have one member live in the newest state that any can take. Its rank. Throws Broken, Superseded; raises
    NothingLeft."""
    assert books.membership is not None
    started_s, rank = books.clock(), books.rank
    tried: list[str] = []
    row = yield from LookAround(rank == 0, books.membership)
    rows = yield from Rows(row)
    brought, bringer = yield from _brought(books)
    for candidate in ordered(rows):
        if candidate.iteration <= brought:
            break
        taken: Loaded | str = ""
        if candidate.rank == rank:
            taken = yield from Take(candidate)
        size_bytes = taken.size_bytes if isinstance(taken, Loaded) else 0
        if isinstance(taken, Loaded):
            yield from live_in(books, taken)
            books.origin = candidate.kind
        elif taken:
            tried.append(f"{candidate}: {taken}"[:_TRIED_CHARS])
            yield from Say(f"no state from {tried[-1]}")
        answers = yield from Rows([size_bytes])
        if answers[candidate.rank][0]:
            if isinstance(taken, Loaded):
                stored = newest(rows, "checkpoint")
                yield from tell_taken(books, candidate.kind, taken, started_s, tried, stored)
            return candidate.rank
    seed = bringer if brought else (yield from _untouched(books))
    if rank == seed:
        books.origin = "checkpoint" if brought else "init"
        yield from stand_after(books, brought)
        yield from tell_taken(books, books.origin, Loaded(brought, 0.0, 0), started_s, tried, brought)
    return seed


def _brought(books: Books) -> Flow[tuple[int, int]]:
    """The newest iteration whose state a member's program came with, and that member's rank; 0 for none."""
    if books.brings is None:
        return 0, 0
    rows = yield from Rows([0 if books.trained else books.brings])
    iteration = max(row[0] for row in rows)
    return iteration, [row[0] for row in rows].index(iteration)


def _untouched(books: Books) -> Flow[int]:
    """The first member whose parameters are still those of the seed."""
    if books.shares is None:
        return 0
    rows = yield from Rows([int(books.trained)])
    untouched = [rank for rank, (trained,) in enumerate(rows) if not trained]
    if not untouched:
        raise NothingLeft(
            "all holders of a part of the optimizer's state are lost, and nothing was saved: training must start"
            " again, in new processes"
        )
    return untouched[0]


def live_in(books: Books, loaded: Loaded) -> Flow[None]:
    """The state was taken over here: the books follow."""
    books.loss, books.pace_s, books.trained = loaded.loss, loaded.pace_s, True
    yield from stand_after(books, loaded.iteration)


def tell_taken(
    books: Books, source: StateSource, loaded: Loaded, started_s: float, tried: Sequence[str] = (), stored: int = 0
) -> Flow[None]:
    """`started_s`: when it began to look; `tried`: what was not sound; `stored`: the newest iteration on storage."""
    nearer = source in ("memory", "peer")
    yield from Tell(
        Taken(
            generation=books.generation,
            source=source,
            iteration=books.last,
            size_bytes=loaded.size_bytes,
            duration_us=int((books.clock() - started_s) * 1e6),
            tried=tuple(tried),
            storage_iteration=stored,
            saved_us=int(max(0, books.last - stored) * books.pace_s * 1e6) if nearer else 0,
            resharded_from=loaded.resharded_from,
        )
    )
