"""When a head that stands by may take the lease. Pure; time is the shell's monotonic clock, handed in.

Rules
-----
* A lease that another head holds is never taken.
* One whose holder has said that it leaves is taken at once; so is one whose holder was a process of this very machine
  that runs no more.
* Any other free lease is taken only once the log has answered for GRACE_US without an interruption. A holder that could
  not renew it because the log was away connects again within that time and renews it first: an outage of the log
  deposes no head. An interruption is a question without an answer, an answer over another connection than the last, or
  a long time without one (this process slept).
* Nor is it taken while a coordinator of the newest term sends beats: it lives, and may be of a version without leases.
  Beats that say that their sender hears nothing (DEAF_BEATS in lease.py) do not count: it can neither decide nor renew.
* This head's own name in the lease is no reason to lead: it may be left over from a term that it has lost.
* A head that has just started need not wait for GRACE_US, unless it was started to stand by (`is_patient`): alone it
  would wait for no other.
"""

from __future__ import annotations

from unicrond.core.nodes.liveness import OWN_BEATS
from unicrond.events.log.lease import LeaseEntry

GRACE_US = 2_000_000
#: So long without an answer is an interruption.
GAP_US = 1_000_000
#: A coordinator whose beats are heard lives. It has missed four of them, at the usual heartbeat.
SILENT_US = 1_000_000


class Candidacy:
    """Private mutable state of one head, from when it begins to stand by until it leads."""

    def __init__(self, head: str, heartbeat_us: int, now_us: int, *, is_patient: bool) -> None:
        """Begin to stand by. `head`: this one's name in the lease. `heartbeat_us`: a coordinator sends OWN_BEATS beats
        in it."""
        self._head = head
        self._silent_us = max(SILENT_US, 2 * heartbeat_us // OWN_BEATS)
        self._answering_us: int | None = None if is_patient else now_us - GRACE_US
        self._answered_us = now_us
        self._beat_us = now_us - self._silent_us - 1

    def beat(self, now_us: int) -> None:
        """Note that a coordinator of the newest term is heard."""
        self._beat_us = now_us

    def unanswered(self) -> None:
        """Note that the log does not say who leads."""
        self._answering_us = None

    def answered(self, lease: LeaseEntry | None, now_us: int, *, is_anew: bool = False, is_gone: bool = False) -> str:
        """Take what the log says of the lease; return why it is to be taken now, "" where it is not.

        `is_anew`: it came over another connection than the last answer. `is_gone`: its holder ran on this machine, and
        has ended.
        """
        if is_anew or self._answering_us is None or now_us - self._answered_us > GAP_US:
            self._answering_us = now_us
        self._answered_us = now_us
        holder = lease.holder if lease is not None else None
        if holder is not None and holder.head != self._head:
            if holder.has_left:
                return f"the head {holder.process} has left"
            return f"the head {holder.process} of this machine has ended" if is_gone else ""
        if now_us - self._beat_us <= self._silent_us or now_us - self._answering_us < GRACE_US:
            return ""
        return "no head leads"
