"""Tells the agent which replicas are slow (`stragglers.py`), what they are dealt for it and what that has brought
(`deal_effect.py`).

A straggler is told when it is found, again when it is known what another deal has brought, and when it is over. All
replicas follow it, so that a new leader knows what was told; the first one tells.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from unicrond.agents.protocol.marks import now_us
from unicrond.agents.protocol.messages import GroupMembership, Reporter
from unicrond.agents.trainer.detection.deal_effect import DealEffect
from unicrond.agents.trainer.detection.stragglers import StragglerFinding, Stragglers
from unicrond.agents.trainer.lifecycle.deal import Deal
from unicrond.agents.trainer.process.channel import AgentChannel
from unicrond.events.vocabulary import StragglerObserved, StragglerRecovered


class StragglerReports:
    """Compares the replicas of one shard."""

    def __init__(self, channel: AgentChannel, reporter: Reporter) -> None:
        self._channel = channel
        self._reporter = reporter
        self._stragglers = Stragglers()
        self._effect = DealEffect()
        #: What was told of the stragglers that there are, by worker.
        self._findings: dict[str, StragglerFinding] = {}

    def regrouped(self) -> None:
        """Start anew, for another group."""
        self._stragglers.regrouped()
        self._effect.regrouped()

    def judge(
        self, iteration: int, times: Sequence[tuple[int, int]], membership: GroupMembership, shard: int, deal: Deal,
        plain_us: int, *, tells: bool,
    ) -> None:  # fmt: skip
        """Judge an agreed iteration. `times`: by rank, the microseconds and for how many micro-batches. `deal`,
        `plain_us`: see `DealEffect.add`. `tells`: this is the first replica."""
        workers = [member.worker for member in membership.members if member.shard == shard]
        findings = self._stragglers.add(iteration, now_us(), dict(zip(workers, times, strict=True)))
        is_known = self._effect.add(tuple(micro_batches for _, micro_batches in times), deal, plain_us)
        self._findings = {worker: finding for worker, finding in self._findings.items() if worker in workers}
        self._findings |= {finding.worker: finding for finding in findings}
        if is_known:
            findings = list(self._findings.values())
        self._findings = {worker: finding for worker, finding in self._findings.items() if not finding.over}
        if tells:
            for finding in findings:
                self._tell(finding, iteration, membership, workers.index(finding.worker), deal)

    def _tell(
        self, finding: StragglerFinding, iteration: int, membership: GroupMembership, replica: int, deal: Deal
    ) -> None:
        rank = [member.worker for member in membership.members].index(finding.worker)
        straggler = membership.members[rank]
        fields: dict[str, Any] = {
            **self._reporter,
            "generation": membership.generation,
            "iteration": iteration,
            "straggler": straggler.worker,
            "straggler_node": straggler.node,
            "rank": rank,
            "factor": finding.factor,
        }
        if finding.over:
            self._channel.send(StragglerRecovered(**fields))
            return
        self._channel.send(
            StragglerObserved(
                **fields,
                compute_us=finding.own_us,
                others_us=finding.others_us,
                since_iteration=finding.since_iteration,
                since_us=time.time_ns() // 1000 - (now_us() - finding.since_us),
                deal=self._effect.of(replica, deal),
            )
        )
