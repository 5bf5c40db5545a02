"""Ends the agent: keeps the reason and the deadline, finishes what must be sent before the connections close, sets the
exit code.

Ends
----
* SIGTERM: the node is drained within `grace_s`, then it leaves; a second one changes nothing. If no coordinator answers
  the drain, the workers save first (core/last_saves.py). With `hand_over` (a restart) the agent goes, and fork server
  and workers stay for the next one.
* SIGINT: the node leaves, without a drain; again: at once. Workers, store and fork server end before the agent.
* Exit codes: cli.py. What a signal ended is not 0: a place that is to be filled would count as done.
* A newer agent of the same name (duplicate_agent.py): exit code SUPERSEDED, the workers end; a later boot in the
  log that no agent has: exit code 1, and the next boot is above it.
* A key that NATS let in before and refuses by now, for the lease and with no worker left here: it was replaced or
  revoked, and nothing here can hear of the agent that has the name now: exit code SHUT_OUT.
* Told by the coordinator to leave for good: drained, exit code 0. Forgotten while it was away: its workers end, exit
  code FORGOTTEN; its supervisor starts the next one.
* Anything unexpected: exit code 1 with a traceback; the agent's supervisor starts the next one.

When a drain is over, the core says (`leave`). In which order the keepers close: daemon.py.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

from unicrond.agents.core.state import Drain, HandOver, LeaveNow
from unicrond.agents.shell.options import Options
from unicrond.agents.shell.process_keeper import ProcessKeeper
from unicrond.agents.shell.run_dir import RunDir
from unicrond.agents.shell.shell import Shell
from unicrond.events.cli.exit_codes import FORGOTTEN, SHUT_OUT, SUPERSEDED

logger = logging.getLogger("unicrond.agents")

_DRAIN_TIMEOUT_S = 5.0
_RETIRE_TIMEOUT_S = 10.0
#: Of the grace time, what is left for ending workers that the coordinator has not moved away, and for the last words.
_END_S = 5.0


class Departure:
    """Ends one agent. `over` is set when its process may end."""

    def __init__(
        self, shell: Shell, options: Options, run_dir: RunDir, processes: ProcessKeeper, has_log: Callable[[], bool]
    ) -> None:
        """Take what is to be ended. `has_log`: whether the log is in reach."""
        self._shell = shell
        self._options = options
        self._run_dir = run_dir
        self._processes = processes
        self._has_log = has_log
        self.over = asyncio.Event()
        self._has_left = False
        self._has_failed = False
        self._is_shut_out = False
        #: The newer agent's boot; 0: none is heard.
        self._newer_boot = 0
        #: The first signal that asked for the end, and when it is to be over by the loop's clock.
        self._signal: signal.Signals | None = None
        self._ends_at_s = float("inf")

    # --- reasons ---------------------------------------------------------------------------------

    def heed_signals(self) -> None:
        """Handle SIGTERM and SIGINT from now on."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._hand_over if self._options.hand_over else self._drain)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)

    def ignore_signals(self) -> None:
        """Leave the signals to Python again."""
        loop = asyncio.get_running_loop()
        loop.remove_signal_handler(signal.SIGTERM)
        loop.remove_signal_handler(signal.SIGINT)

    def leave(self) -> None:
        """End the agent with its workers: the node has left."""
        self._has_left = True
        self.over.set()

    def fail(self) -> None:
        """End the agent for an error; its workers stay."""
        self._has_failed = True
        self.over.set()

    def supersede(self, boot: int) -> None:
        """End the agent for a newer one of its name; nothing goes in or out any more. Repeating this is harmless."""
        if self._newer_boot:
            return
        self._newer_boot, self._shell.closed = boot, True
        logger.critical(
            "a newer agent of the name %s is at work (boot %d, this one has %d): this one ends. "
            "Two nodes with one name? Give this one another (--node) before it is started again",
            self._options.node,
            boot,
            self._shell.state.config.agent_boot,
        )
        self.over.set()

    def shut_out(self, refusal: str) -> None:
        """End the agent, which runs no worker: NATS refuses its key for good."""
        logger.critical(
            "%s. It let this agent in before, and has refused it for %g s: the node's key is another one's now, and no "
            "worker is left here. This agent ends",
            refusal,
            self._options.lease_s,
        )
        self._is_shut_out = True
        self.leave()

    def outrun(self, boot: int) -> None:
        """End the agent for a later boot that only stands in the log, and have the next agent begin above it."""
        logger.critical(
            "the log holds a later boot of %s (%d, this one has %d) and hears no agent under it: the log ignores "
            "this agent. It ends; the next one gets a later boot",
            self._options.node,
            boot,
            self._shell.state.config.agent_boot,
        )
        self._run_dir.write_boot(boot)
        self.fail()

    def _drain(self) -> None:
        if self._signal is not None:
            logger.info("%s again: the node is leaving already", signal.SIGTERM.name)
            return
        self._signal, grace_s = signal.SIGTERM, self._options.grace_s
        self._ends_at_s = asyncio.get_running_loop().time() + grace_s
        logger.info("SIGTERM: the node is drained, then it leaves, within %g s", grace_s)
        limit_s, has_log = grace_s - min(_END_S, grace_s / 2), self._has_log()
        if not has_log:
            logger.warning("the log is not in reach: workers whose state may be lost save it first")
        self._shell.feed(Drain(reason="its agent was asked to end", limit_s=limit_s, has_log=has_log))

    def _hand_over(self) -> None:
        self._signal = self._signal or signal.SIGTERM
        logger.info("SIGTERM: this agent ends; its workers stay for the next one, at most %g s", self._options.lease_s)
        self._shell.feed(HandOver())
        self.over.set()

    def _interrupt(self) -> None:
        self._signal = self._signal or signal.SIGINT
        if self._shell.state.phase == "leaving":
            logger.warning("SIGINT again: not waiting for the workers")
            self.leave()
            return
        logger.info("SIGINT: ending the workers, then the node leaves (again: at once)")
        self._shell.feed(LeaveNow(reason="the agent was interrupted"))

    # --- the end ---------------------------------------------------------------------------------

    @property
    def is_superseded(self) -> bool:
        """Return whether a newer agent has the name: then no command is for this one any more."""
        return self._newer_boot > 0

    async def finish(self, linking: asyncio.Task[None]) -> None:
        """Finish what must be done before the connections close. `linking`: the task that keeps the fork server's."""
        if self._newer_boot:  # the log takes nothing of ours
            if self._run_dir.belongs_to(self._newer_boot):
                logger.warning("the newer agent works in %s too and keeps the workers", self._run_dir.path)
                return
            await self._retire(linking)
            return
        outbox = self._shell.outbox
        if not await outbox.drained(self._at_most_s(_DRAIN_TIMEOUT_S)):
            logger.error("%d observations did not reach the log in time and were lost", len(outbox))
        if self._has_left:
            await self._retire(linking)

    def exit_code(self) -> int:
        """Return the exit code of the agent, which has ended."""
        if self._newer_boot:
            return SUPERSEDED
        if self._shell.state.ends == "forgotten" and not self._signal:
            return FORGOTTEN
        if self._is_shut_out and not self._signal:
            return SHUT_OUT
        return 1 if self._has_failed else 128 + self._signal if self._signal else 0

    async def _retire(self, linking: asyncio.Task[None]) -> None:
        """End the workers, the store and the fork server."""
        self._processes.retire()
        if not (await asyncio.wait([linking], timeout=self._at_most_s(_RETIRE_TIMEOUT_S)))[0]:
            logger.error("the fork server does not end; see %s", self._run_dir.fork_server_log)

    def _at_most_s(self, wanted_s: float) -> float:
        """Return `wanted_s`, or what is left of the grace time; half a second at least."""
        return max(0.5, min(wanted_s, self._ends_at_s - asyncio.get_running_loop().time()))
