"""Warrants that go beside each membership (events/trust/membership_certificates.py), signed with the head's certificate
of the moment; and anew, for memberships that stand, once the head has another certificate.

Rules
-----
* A membership may stand for months, and who trusts the new CA alone takes no warrant of the old one. So the head that
  leads signs each again that this process has not signed with its present certificate, and sends it to the members'
  nodes (worker_queries.WarrantRenewal) until each has answered. Nothing of it stands in the log.
* So many nodes are asked in a second: after a takeover other things are more urgent. One that has not taken it waits
  behind those that were not asked yet, for longer each time: silent nodes hold up nobody else's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path

from unicrond.core.state.state import ClusterState, NodeStatus, TaskStatus
from unicrond.events.host.file_versions import FileVersion, file_version
from unicrond.events.log.subjects import WARRANT_HEADER
from unicrond.events.queries.worker_queries import WarrantRenewal, encode
from unicrond.events.trust import membership_digest as roster
from unicrond.events.trust.certificates import BadCertificate
from unicrond.events.trust.membership_certificates import make_warrant
from unicrond.events.trust.signing import Signer
from unicrond.events.vocabulary import MembershipDecided, MembershipPart
from unicrond.events.vocabulary.placements import PartialMembership, add_part, broadcast_seats
from unicrond.events.wire.envelope import Envelope

LOOK_EVERY_S = 1.0
_NODES_A_SECOND = 64
_PAUSE_LOOKS_MAX = 64


def _now() -> datetime:
    return datetime.now(UTC)


class Warrants:
    """Signs warrants. `cert`: the file of the head's certificate and its key, which may be renewed at any time. Raises
    BadCertificate, OSError."""

    def __init__(self, cert: Path, now: Callable[[], datetime] = _now) -> None:
        self._cert = cert
        self._now = now
        self._file_version = file_version(cert)
        self._signer = Signer(cert.read_bytes())
        #: By task, the generation of the last membership that was signed, and the certificate's file.
        self._signed: dict[str, tuple[int, FileVersion | None]] = {}
        self._tellings: dict[str, PartialMembership | None] = {}

    def beside(self, envelope: Envelope) -> dict[str, str]:
        """Return the headers for an event that is about to be appended."""
        match envelope.event:
            case MembershipPart() as part:
                self._tellings[part.task] = add_part(self._tellings.get(part.task), part, envelope.term)
            case MembershipDecided() as decided:
                seats = broadcast_seats(self._tellings.pop(decided.task, None), decided, envelope.term) or ()
                return self._header(decided.task, decided.generation, (run.node for run in seats))
            case _:
                pass
        return {}

    def _header(self, task: str, generation: int, nodes: Iterable[str]) -> dict[str, str]:
        return {WARRANT_HEADER: self.sign(task, generation, nodes)}

    def sign(self, task: str, generation: int, nodes: Iterable[str]) -> str:
        """Return the warrant of a membership on these nodes."""
        self._look()
        self._signed[task] = (generation, self._file_version)
        return make_warrant(self._signer, task, generation, roster.root(nodes), self._now())

    def is_signed(self, task: str, generation: int) -> bool:
        """Say whether this has signed the task's membership of that generation, with the present certificate."""
        self._look()
        return self._signed.get(task) == (generation, self._file_version)

    def _look(self) -> None:
        """Sign with the newest certificate; certificates.py says what is wrong with one that cannot be used."""
        version = file_version(self._cert)
        if version == self._file_version:
            return
        self._file_version = version
        try:
            self._signer = Signer(self._cert.read_bytes())
        except (BadCertificate, OSError):
            return


class WarrantRenewals:
    """Sends new warrants of memberships that stand. `ask`: sends a node a request, and returns once it has answered
    that it has taken it; raises RuntimeError. `leads`: whether this head does."""

    def __init__(
        self,
        warrants: Warrants,
        state: Callable[[], ClusterState],
        ask: Callable[[str, bytes], Awaitable[None]],
        leads: Callable[[], bool],
    ) -> None:
        self._warrants = warrants
        self._state = state
        self._ask = ask
        self._leads = leads
        #: By task, the renewal, and the nodes that have still to take it.
        self._waiting: dict[str, tuple[WarrantRenewal, set[str]]] = {}
        self._looks = 0
        #: By node that has not taken its last one: at which look it is asked again, and how many looks it waits then.
        self._pauses: dict[str, tuple[int, int]] = {}

    async def run(self) -> None:
        """Look now and then, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        """Sign what is to be signed, and ask some of the nodes that have not taken it."""
        if not self._leads():
            return
        self._looks += 1
        state = self._state()
        memberships = {
            name: task.membership
            for name, task in state.tasks.items()
            if task.membership is not None and task.status is TaskStatus.ACTIVE
        }
        for name, membership in memberships.items():
            generation = membership.generation
            if not self._warrants.is_signed(name, generation):
                nodes = {member.node for member in membership.members}
                warrant = self._warrants.sign(name, generation, nodes)
                self._waiting[name] = (WarrantRenewal(task=name, generation=generation, warrant=warrant), nodes)
        self._waiting = {
            name: (renewal, nodes)
            for name, (renewal, nodes) in self._waiting.items()
            if nodes and name in memberships and memberships[name].generation == renewal.generation
        }
        requests = [
            (renewal, node, nodes)
            for renewal, nodes in self._waiting.values()
            for node in nodes
            if node in state.nodes
            and state.nodes[node].status is NodeStatus.UP
            and self._next_look(node) <= self._looks
        ]
        requests.sort(key=lambda request: self._next_look(request[1]))
        await asyncio.gather(*(self._send(*each) for each in requests[:_NODES_A_SECOND]))

    def _next_look(self, node: str) -> int:
        """Return the look from which on the node is to be asked."""
        return self._pauses.get(node, (0, 1))[0]

    async def _send(self, renewal: WarrantRenewal, node: str, nodes: set[str]) -> None:
        try:
            await self._ask(node, encode(renewal))
        except RuntimeError:
            next_look, pause = self._pauses.get(node, (0, 1))
            if next_look <= self._looks:  # else another request of this look has failed
                self._pauses[node] = (self._looks + pause, min(2 * pause, _PAUSE_LOOKS_MAX))
            return
        self._pauses.pop(node, None)
        nodes.discard(node)
