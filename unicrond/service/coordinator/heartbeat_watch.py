"""The coordinator's watch over its nodes: its own beats out, all beats in, and what follows from them.

liveness.py, which is pure, judges what follows; the watch receives the beats and has the clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing

from unicrond.core.nodes.liveness import JUDGEMENTS, OWN_BEATS, OWN_NAME, Liveness, VerdictLimiter
from unicrond.core.nodes.outages import held_domains
from unicrond.core.state.state import ClusterState, Node
from unicrond.events.log.event_log import BeatLog
from unicrond.events.vocabulary import AnyEvent, Heartbeat, NodeJoined, NodeLost, NodesLost
from unicrond.events.wire.envelope import Envelope, QuarantinedMessage, RecordedEvent
from unicrond.service.coordinator.clock import Clock


class NodeWatch:
    """The watch of one coordinator."""

    def __init__(
        self,
        beat_log: BeatLog,
        heartbeat_s: float,
        clock: Clock,
        on_quarantined: Callable[[QuarantinedMessage], object] = lambda _: None,
        *,
        silence_s: float,
    ) -> None:
        """Take the log of the beats. `on_quarantined`: called with messages among the beats that are not valid ones.
        `silence_s`: how long the silence of all nodes is held."""
        self._on_quarantined = on_quarantined
        self.liveness = Liveness(int(heartbeat_s * 1e6), clock.monotonic_us(), silence_us=int(silence_s * 1e6))
        self._beat_log = beat_log
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._lost_us: int | None = None
        self._reports = VerdictLimiter()

    def folded(self, event: AnyEvent, *, live: bool) -> None:
        """Note an event that the coordinator has folded. `live`: it has just happened."""
        if isinstance(event, NodeJoined):
            self.liveness.on_join(event.node, self._clock.monotonic_us())
        elif isinstance(event, NodeLost | NodesLost) and live:
            self._lost_us = self._clock.monotonic_us()

    async def beat(self, term: int) -> None:
        """Send our own beats while this runs: they tell a silent bus from silent nodes."""
        number = 0
        while True:
            number += 1
            self.liveness.on_own_beat(self._clock.monotonic_us())
            own_term, own_number = self.liveness.own_beat
            beat = Heartbeat(
                node=OWN_NAME,
                agent_boot=term,
                beat=number,
                workers=0,
                load_milli=0,
                memory_free_bytes=0,
                echo_beat=own_number if own_term == term else 0,
            )
            await self._beat_log.publish(
                Envelope(producer=OWN_NAME, boot=term, number=number, observed_at_us=self._clock.wall_us(), event=beat)
            )
            await asyncio.sleep(self._heartbeat_s / OWN_BEATS)

    async def listen(self) -> None:
        """Receive all beats while this runs."""
        async with aclosing(self._beat_log.subscribe()) as entries:
            async for entry in entries:
                if isinstance(entry, QuarantinedMessage):
                    self._on_quarantined(entry)
                elif isinstance(entry, RecordedEvent) and isinstance(entry.envelope.event, Heartbeat):
                    self.liveness.on_beat(
                        entry.envelope.event, entry.seq, entry.recorded_at_us, self._clock.monotonic_us()
                    )
        raise RuntimeError("the heartbeat log ended, which must not happen")

    def delivered(self) -> None:
        """Note that something came from the log: an entry, or an acknowledgement."""
        self.liveness.on_message(self._clock.monotonic_us())

    async def pause(self) -> None:
        """Wait until it is time to judge again."""
        await asyncio.sleep(self._heartbeat_s / JUDGEMENTS)

    def verdicts(self, state: ClusterState) -> list[AnyEvent]:
        """Return what the beats call for now. To be called at each judgement, else that counts as a pause of ours."""
        now_us = self._clock.monotonic_us()
        return self.liveness.verdicts(state.nodes, now_us, state.silence, held_domains(state))

    def news(self, verdicts: list[AnyEvent]) -> list[AnyEvent]:
        """Return those of the verdicts that are to be appended."""
        return self._reports.news(verdicts, self._clock.monotonic_us())

    def gathers(self, nodes: Mapping[str, Node]) -> bool:
        """Return whether a plan waits for more losses now."""
        return self.liveness.gathers(self._lost_us, nodes, self._clock.monotonic_us())
