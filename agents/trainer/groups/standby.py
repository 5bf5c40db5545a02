"""Builds groups for the next loss of a replica before it happens.

Rules
-----
* After each change of membership, once an iteration has been committed in the new group, its members build in the
  background, for each replica that could be lost next, the group of all others. The next membership is most often
  one of those: then its group is there, and a regroup is one round in the store and an exchange of positions.
* They are offered, not imposed: the members of a new group meet anyway, and use a standby only if all of them have the
  same one, whole (`forming.py`). A standby names the generation it was built in and the replica that it lacks, and it
  is used once. The membership that they met under says which generation it then serves: the exchange of
  positions and everything after it are that generation's.
* Bounded: at most `replicas_max` replicas (sockets and threads grow with the square of their number), none for two
  (a group of one needs none), none with NCCL (its communicators are made at the first collective).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from unicrond.agents.trainer.groups.forming import Attempt, GroupPlacement
from unicrond.agents.trainer.groups.rendezvous_store import StoreConnections
from unicrond.agents.trainer.process.channel import AgentChannel

_REPLICAS_MIN = 3


class Standby:
    """This shard's standby groups. `generation`: of the membership after which they were built; 0: none."""

    def __init__(self, channel: AgentChannel, replicas_max: int, stores: StoreConnections | None = None) -> None:
        self._channel = channel
        self._stores = stores
        self._replicas_max = replicas_max
        self._attempts: dict[tuple[str, ...], tuple[str, Attempt]] = {}
        self.generation = 0

    def prepare(self, generation: int, workers: Sequence[str], place: GroupPlacement) -> None:
        """Begin to build the groups that follow the present one. `workers`: its members in rank order; `place`: this
        member's own in it, its prefix that of all standby groups of the generation."""
        self.close()
        self.generation = generation
        if place.device.type != "cpu" or not _REPLICAS_MIN <= len(workers) <= self._replicas_max:
            return
        for missing in range(len(workers)):
            if missing != place.rank:
                survivors = tuple(worker for worker in workers if worker != workers[missing])
                rank = place.rank - (missing < place.rank)
                placement = replace(place, prefix=f"{place.prefix}/{missing}", rank=rank, size=len(survivors))
                self._attempts[survivors] = (
                    f"{generation}/{missing}",
                    Attempt(placement, self._channel, stores=self._stores),
                )

    def offer(self, workers: Sequence[str]) -> tuple[str, Attempt] | None:
        """Return the standby group of exactly these members, None where it is not whole here."""
        name, attempt = self._attempts.get(tuple(workers), ("", None))
        return (name, attempt) if attempt is not None and attempt.succeeded else None

    def close(self) -> None:
        """Leave all that were not used; their threads are waited for elsewhere."""
        unused, self._attempts = list(self._attempts.values()), {}
        if unused:
            threading.Thread(target=_abandon, args=(unused,), name="leave standby groups", daemon=True).start()


def _abandon(attempts: list[tuple[str, Attempt]]) -> None:
    for _, attempt in attempts:
        attempt.abandon()
