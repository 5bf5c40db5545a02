"""Answers requests over NATS about this node and its workers: logs, stacks, marks, flights, and checks for doctor.

Rules
-----
* A request changes nothing: it is no input of the core and leaves no trace in the log. A renewed warrant alone is an
  input, after it was verified: whoever sends it can replace a good warrant by another good one.
* One subscription takes them all; a check for doctor is known by its request, and answered when it has ended.
* Whatever a request holds, it is answered or dropped; neither ends the agent, nor does a requester that has gone.

What stands in an answer: output/query_service.py; the checks: health_keeper.py. Commands come by another way, through
the log: event_log_keeper.py.
"""

from __future__ import annotations

import contextlib

from unicrond.agents.output.query_service import answer
from unicrond.agents.protocol.marks import Mark
from unicrond.agents.shell.health_keeper import HealthKeeper
from unicrond.agents.shell.memberships import Memberships
from unicrond.agents.shell.process_keeper import ProcessKeeper
from unicrond.agents.shell.progress_watch import MarkFiles
from unicrond.agents.shell.run_dir import RunDir
from unicrond.agents.shell.shell import Shell
from unicrond.events.nats.connection import Connection
from unicrond.events.queries.worker_queries import LogsReply, WarrantRenewal, decode_renewal, encode, logs_subject
from unicrond.events.vocabulary import Name, WorkerId


class NodeQueries:
    """Answers the requests about one node. `processes` asks workers, `health` runs the checks."""

    def __init__(
        self, shell: Shell, run_dir: RunDir, processes: ProcessKeeper, health: HealthKeeper, memberships: Memberships
    ) -> None:
        self._memberships = memberships
        self._shell = shell
        self._run_dir = run_dir
        self._processes = processes
        self._health = health

    async def serve(self, connection: Connection) -> None:
        """Answer requests from now on, as long as the connection stands."""
        node = self._shell.state.config.node

        async def on_request(message: object) -> None:
            data, respond = message.data, message.respond  # type: ignore[attr-defined]  # a nats Msg
            if self._health.begin_check(data, respond):
                return
            if (renewal := decode_renewal(data)) is not None:
                reply = LogsReply(node=node, error=self._renew(renewal))
                with contextlib.suppress(Exception):
                    await respond(encode(reply))
                return
            with contextlib.suppress(Exception):  # a requester that has gone does not concern this agent
                logs, questions = self._run_dir.logs, self._processes.questions
                await respond(await answer(node, logs, self._pid_of, data, self._marks_of, questions))

        await connection.subscribe(logs_subject(node), on_request)

    def _renew(self, renewal: WarrantRenewal) -> str:
        """Take a renewed warrant; return why it is not taken, "" where it is, or concerns no membership of here."""
        problem = self._memberships.problem(renewal.task, renewal.generation, renewal.warrant)
        if not problem:
            self._shell.feed(renewal)
        return problem

    def _marks_of(self, task: Name) -> dict[WorkerId, Mark]:
        """Return the marks of the task's workers that run here; one that has made none is left out."""
        files = MarkFiles(self._run_dir.marks)
        running = (name for name in self._shell.state.memory.workers if name.rpartition(".")[0] == task)
        return {name: mark for name in running if (mark := files.mark(name)) is not None}

    def _pid_of(self, worker: WorkerId) -> int:
        """Return the pid of the worker's process, 0 where it does not run here."""
        record = self._shell.state.memory.workers.get(worker)
        return record.pid if record else 0
