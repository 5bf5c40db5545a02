"""Keeps this node's processes: the fork server and its connection, the workers' sockets, and the counts of OOM kills.

Rules
-----
* What a process says goes to the shell in the order in which it comes; nothing is decided here. Flights and stacks
  alone, answers to questions, do not reach the core.
* The fork server and its workers outlive the agent unless `retire` is called: `close` only ends connections.
* A fork server that does not fit (fork_server_link.py) is renewed when its last worker has ended, after the core has
  heard of that end.
* The kernel counts a kill a little before its victim's end is seen: a cause compares with the older of two looks.

How a fork server is found, started and told from a dead one: fork_server_link.py. Whose connection is whose:
worker_sockets.py. What workers write: worker_output.py. Their states: memory_keeper.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable

from unicrond.agents.core.state import WorkerDisconnected, WorkerSaid
from unicrond.agents.core.worker_budgets import WorkerHeldUp
from unicrond.agents.fork_server.cgroups import NoCgroup, own_cgroup, prepare
from unicrond.agents.host import oom_kill_counts as kill_counts
from unicrond.agents.host.task_users import not_separated, visible_environment
from unicrond.agents.output.stacks import Questions
from unicrond.agents.protocol.messages import (
    Flight,
    FromForkServer,
    FromWorker,
    Hello,
    ProcessExited,
    Stacks,
    Sum,
    ToForkServer,
    ToWorker,
)
from unicrond.agents.protocol.peers import plain
from unicrond.agents.shell.fork_server_link import ForkLink
from unicrond.agents.shell.options import Options
from unicrond.agents.shell.run_dir import RunDir
from unicrond.agents.shell.shell import Shell
from unicrond.agents.shell.worker_sockets import WorkerSockets
from unicrond.events.vocabulary import ExitCause, WorkerId

logger = logging.getLogger("unicrond.agents")

_COUNT_EVERY_S = 1.0


class KillWatch:
    """Reads how many processes the OOM killer has killed, for this agent and the next one."""

    def __init__(self, run_dir: RunDir) -> None:
        """Look for the first time."""
        self._run_dir = run_dir
        #: Of two looks, the older first.
        self._looks = (kill_counts.look(),) * 2

    def cause_since_last_agent(self) -> ExitCause:
        """Return why a process may have vanished while no agent looked."""
        return kill_counts.cause(self._run_dir.recall_kills(), self._looks[1])

    def cause_now(self) -> ExitCause:
        """Return why a process may have died just now."""
        return kill_counts.cause(self._looks[0], kill_counts.look())

    async def run(self) -> None:
        """Write the counts down whenever they are others than before, without end."""
        last_written = None
        while True:
            self._looks = self._looks[1], kill_counts.look()
            if self._looks[1] != last_written:
                last_written = self._looks[1]
                with contextlib.suppress(OSError):  # then the next agent knows less
                    self._run_dir.remember_kills(last_written)
            await asyncio.sleep(_COUNT_EVERY_S)


class ProcessKeeper:
    """Keeps the fork server and the workers' connections. `on_death(cause)` is called when the fork server has died,
    and its workers with it."""

    def __init__(
        self,
        shell: Shell,
        options: Options,
        run_dir: RunDir,
        kills: KillWatch,
        state_max_bytes: int,
        on_death: Callable[[ExitCause], None],
    ) -> None:
        """Start nothing yet. `state_max_bytes`: of one state in memory. Raise NoCgroup."""
        self._shell = shell
        self._sockets = WorkerSockets(
            run_dir.agent_socket,
            on_connected=self._worker_connected,
            on_message=self._worker_said,
            on_disconnected=self._worker_disconnected,
            on_held_up=lambda worker, frames: shell.feed(WorkerHeldUp(worker=worker, frames=frames)),
        )
        #: What workers are asked, and have not answered yet.
        self.questions = Questions(self._sockets.send)
        self._link = ForkLink(
            run_dir,
            arguments=[
                *("--address", options.address),
                *("--lease-s", str(options.lease_s)),
                *("--memory-max-bytes", str(state_max_bytes)),
                *separation(options),
                *options.fork_server_arguments,
            ],
            on_message=self._fork_server_said,
            on_death=lambda: on_death(kills.cause_now()),
            environment=visible_environment(os.environ, options.pass_env) if options.users else os.environ,
            separates=bool(options.users),
        )

    async def start(self) -> None:
        """Listen to workers. Raise OSError."""
        await self._sockets.start()

    async def close(self) -> None:
        """Close the workers' connections; they look for the next agent."""
        await self._sockets.close()

    # --- workers ---------------------------------------------------------------------------------

    def tell_worker(self, worker: WorkerId, message: ToWorker) -> None:
        """Send the message, where the worker is connected."""
        self._sockets.send(worker, message)

    def disconnect(self, worker: WorkerId, reason: str) -> None:
        """Close a worker's connection, and log the reason."""
        logger.error("%s: connection refused, %s", worker, reason)
        self._sockets.disconnect(worker)

    def _worker_connected(self, hello: Hello) -> None:
        self.questions.connected(hello)
        self._shell.worker_connected(hello)

    def _worker_said(self, worker: WorkerId, message: FromWorker) -> None:
        if isinstance(message, Flight | Stacks):
            self.questions.receive(worker, message)
        else:
            self._shell.feed(WorkerSaid(worker=worker, message=message, now_us=time.monotonic_ns() // 1000))

    def _worker_disconnected(self, worker: WorkerId) -> None:
        self.questions.disconnected(worker)
        self._shell.feed(WorkerDisconnected(worker=worker))

    # --- the fork server -------------------------------------------------------------------------

    @property
    def trouble(self) -> str:
        """Return why no fork server takes orders, in one line; "" where one does."""
        return "" if self._link.serves else self._link.trouble or "waits for its fork server"

    @property
    def fork_server_pid(self) -> int:
        """Return the pid of the fork server that is connected, or was last."""
        return self._link.pid

    async def keep_fork_server(self) -> None:
        """Keep a fork server and a connection to it, until retired."""
        await self._link.run()

    def tell_fork_server(self, message: ToForkServer) -> None:
        """Send the message in the fork server's schema, where there is a fork server."""
        self._link.send(plain(message, self._link.schema))

    def sum(self, order: Sum) -> str:
        """Send the order to sum; return "", or why that is impossible."""
        return self._link.sum(order)

    def kill_fork_server(self) -> None:
        """Send SIGKILL to the fork server: its workers and the store die with it."""
        self._link.kill()

    def retire(self) -> None:
        """Have the fork server kill its workers and end; `keep_fork_server` returns once it has."""
        self._link.retire()

    def _fork_server_said(self, message: FromForkServer) -> None:
        self._shell.fork_server_said(message)
        if isinstance(message, ProcessExited) and not self._shell.state.memory.workers:
            self._link.renew()


def separation(options: Options) -> list[str]:
    """Return the flags of the fork server that separate workers. Log what is not separated.

    Raise NoCgroup where a limit needs one.
    """
    lacks, flags = "", [f"--limit={limit}" for limit in options.limits]
    if options.users:
        flags.append("--separate")
        of_cgroups = [limit.name for limit in options.limits if limit.resource < 0]
        try:
            flags += ["--cgroup", str(prepare(options.cgroup or own_cgroup(), options.node, of_cgroups))]
        except NoCgroup as error:
            if options.cgroup or of_cgroups:
                raise
            lacks = str(error)
    for sentence in not_separated(options.users, lacks):
        logger.warning("not separated: %s", sentence)
    return flags
