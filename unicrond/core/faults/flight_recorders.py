"""Which ranks hold the others of their replica up, by their flight recorders: attribute(standings) -> attribution.

    13 stands before number 42818 of a group, which 12 has not entered:      13 waits for 12
    0 receives from 8, which sends nothing; 8 waits for 9, and 9 for nobody: 9 holds them up
    14 is in number 42806 of a group, and others have finished 42818:        14 is stuck

Rules
-----
* A rank *waits for* each member of a group that has not entered the collective which it is in, and for whom it receives
  from, if that one does not send. What all have begun says nothing. (Numbers of a group in which some transfer between
  two are not compared: each pair counts by itself.)
* Whom others wait for and who waits for nobody holds them up. Who waits for another is a victim of that one. In a
  circle transfers are left aside, as a rank may stand still between its own; a circle that is left accuses nobody.
* A rank whose collective of NCCL others have left, and the next one as well, is *stuck*: they cannot have finished
  that without it, so it is its own GPU or thread that does not say so. At most half of a group is.
* A rank without a record is *silent*. Others may wait for it, where nothing else explains that they wait.

Pure. What does not live here: the reading of dumps (events/queries/flight_dumps.py), and which worker is given up
(hangs.py): that is judged by marks, which every worker has. This says which rank, within a replica.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from unicrond.events.vocabulary.phrases import abridge
from unicrond.events.vocabulary.stacks import GroupStanding

#: rank -> those that it waits for.
_Waits: TypeAlias = dict[int, set[int]]
#: A stuck rank is so many collectives behind at least.
_STUCK = 2


class Attribution(NamedTuple):
    """`ranks`: those that hold the others up, the stuck ones (`stalled_ranks`) among them. `silent`: gave no record,
    and others wait for them."""

    ranks: tuple[int, ...]
    stalled_ranks: tuple[int, ...]
    silent: tuple[int, ...]


def attribute(standings: Mapping[int, Sequence[GroupStanding]]) -> Attribution:
    """Return who holds the others up. `standings`: rank -> where it stands in its groups."""
    groups: dict[str, dict[int, GroupStanding]] = {}
    for rank, places in standings.items():
        for place in places:
            groups.setdefault(place.group, {})[rank] = place
    waits: _Waits = {}
    stalled_ranks: set[int] = set()
    for members in groups.values():
        if not any(place.is_p2p for place in members.values()):
            _compare(members, standings, waits)
            stalled_ranks |= _stuck(members)
    transfers = _transfers(standings)
    paths = {rank: waits.get(rank, set()) | transfers.get(rank, set()) for rank in {*waits, *transfers}}
    paths |= {rank: waits.get(rank, set()) for rank in stalled_ranks}
    reach = {rank: _reach(paths, rank) for rank in {*paths, *(peer for peers in paths.values() for peer in peers)}}
    targets = {peer for peers in waits.values() for peer in peers} | stalled_ranks
    culprits = []
    for rank in reach:
        circle = {peer for peer in reach[rank] if rank in reach[peer]} | {rank}
        is_last = not reach[rank] - circle and not waits.get(rank, set()) & circle
        if is_last and (rank in targets or circle == {rank}):
            culprits.append(rank)
    ranks = sorted(
        rank for rank in culprits if rank in standings and (rank in stalled_ranks or _is_awaited(paths, rank))
    )
    silent = sorted(rank for rank in culprits if rank not in standings)
    return Attribution(tuple(ranks), tuple(rank for rank in ranks if rank in stalled_ranks), tuple(silent))


def attribution_text(attribution: Attribution) -> str:
    """Say it in one line; "" where nobody is named."""
    behind = [rank for rank in attribution.ranks if rank not in attribution.stalled_ranks]
    parts = [
        f"{_rank_names(ranks)} {verb}"
        for ranks, verb in (
            (behind, "did not begin what the others wait in"),
            (attribution.stalled_ranks, "did not finish what the others have left"),
            (attribution.silent, "told nothing, and others wait"),
        )
        if ranks
    ]
    return "; ".join(parts)


def _rank_names(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {abridge([str(rank) for rank in ranks])}"


def _compare(
    members: Mapping[int, GroupStanding], standings: Mapping[int, Sequence[GroupStanding]], waits: _Waits
) -> None:
    """Add to `waits` for whom the members of one group wait there."""
    for rank, place in members.items():
        if place.entered <= place.finished:
            continue
        late = {peer for peer, peer_place in members.items() if peer_place.entered <= place.finished}
        all_there = all(peer_place.entered > place.finished for peer_place in members.values())
        if all_there and not any(peer_place.finished > place.finished for peer_place in members.values()):
            late = {peer for peer in place.ranks if peer not in standings}
        if late:
            waits.setdefault(rank, set()).update(late)


def _stuck(members: Mapping[int, GroupStanding]) -> set[int]:
    """Return the members whose collective others have left long ago."""
    newest = max(place.finished for place in members.values())
    stalled_ranks = {
        rank
        for rank, place in members.items()
        if place.is_nccl and place.finished < place.entered and place.finished + _STUCK <= newest
    }
    return stalled_ranks if 2 * len(stalled_ranks) <= len(members) else set()


def _transfers(standings: Mapping[int, Sequence[GroupStanding]]) -> _Waits:
    """Return who receives from a rank that does not send to it."""
    sends = {rank: {peer for place in places for peer in place.sends_to} for rank, places in standings.items()}
    waits: _Waits = {}
    for rank, places in standings.items():
        peers = {peer for place in places for peer in place.receives_from}
        late = {peer for peer in peers if rank not in sends.get(peer, set())}
        if late:
            waits[rank] = late
    return waits


def _is_awaited(waits: _Waits, rank: int) -> bool:
    return any(rank in peers for peers in waits.values())


def _reach(waits: _Waits, rank: int) -> set[int]:
    """Return those that the rank waits for, and those that these wait for, and so on."""
    closure: set[int] = set()
    pending = list(waits.get(rank, ()))
    while pending:
        peer = pending.pop()
        if peer not in closure:
            closure.add(peer)
            pending.extend(waits.get(peer, ()))
    return closure
