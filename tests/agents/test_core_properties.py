"""The agent's core under any order of commands, deaths, lost connections and restarts of the agent itself.

What must hold at every step is in the model (node.py: apply, check); what must hold once all is quiet is here.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.agents.node import NODE, STORE, Node, committed, decision, membership, part, reporter, start, stop
from tests.seeds import at_most
from unicrond.agents.core.state import LeaveNow, WorkerDisconnected
from unicrond.events.vocabulary import (
    CommandApplied,
    CommandFailed,
    NodeLeft,
    Start,
    StartWorkers,
    TaskSpec,
    WorkerExited,
    WorkerReady,
    WorkerStarted,
)
from unicrond.events.vocabulary.placements import starts

TASKS = ("a", "b")
tasks = st.sampled_from(TASKS)


class AgentMachine(RuleBasedStateMachine):
    """Drives one node; the environment answers late, not at all, or dies."""

    def __init__(self) -> None:
        super().__init__()
        self.node = Node()
        self.numbers = dict.fromkeys(TASKS, 0)
        self.generations = dict.fromkeys(TASKS, 0)
        self.commands: list[tuple[object, int]] = []
        self.epoch = 1

    def send(self, command: object) -> None:
        self.commands.append((command, 1))
        self.node.command(command)  # type: ignore[arg-type]

    def number(self) -> int:
        return len(self.commands) + 1

    # --- the coordinator -------------------------------------------------------------------------

    @rule(task=tasks)
    def start(self, task: str) -> None:
        self.numbers[task] += 1
        self.send(start(f"{task}.{self.numbers[task]}", self.number(), epoch=self.epoch))

    @rule(task=tasks, number=st.integers(1, 6))
    def stop(self, task: str, number: int) -> None:
        self.send(stop(f"{task}.{number}", self.number(), epoch=self.epoch))

    @rule(task=tasks, chosen=st.sets(st.integers(1, 6), min_size=1), back=st.booleans())
    def set_membership(self, task: str, chosen: set[int], back: bool) -> None:
        self.generations[task] += 0 if back and self.generations[task] else 1
        members = [f"{task}.{number}" for number in sorted(chosen)]
        self.node.tell(membership(task, self.generations[task], members))

    @rule(task=tasks, count=st.integers(1, 3))
    def start_together(self, task: str, count: int) -> None:
        """One command; each start of it is answered."""
        numbers = range(self.numbers[task] + 1, self.numbers[task] + count + 1)
        self.numbers[task] += count
        command = StartWorkers(
            command_id=f"1.{self.epoch}.{NODE}.{self.number()}",
            node=NODE,
            epoch=self.epoch,
            spec=TaskSpec(name=task),
            starts=tuple(Start(number=number, replica=0, shard=0, store=STORE) for number in numbers),
        )
        self.node.command(command)
        self.commands += [(one, 1) for one in starts(command)]

    @rule(task=tasks, chosen=st.sets(st.integers(1, 6), min_size=1), parts=st.integers(0, 2), torn=st.booleans())
    def tell_membership(self, task: str, chosen: set[int], parts: int, torn: bool) -> None:
        generation = self.generations[task] + 1
        before = {worker: process.generation for worker, process in self.node.processes.items()}
        for number in range(1, parts + 1):
            self.node.tell(part(task, generation, number, [f"{task}.{90 + number}"]))
        if torn:
            self.node.tell(decision(task, generation, [f"{task}.{n}" for n in sorted(chosen)], parts=parts + 1))
            assert {worker: process.generation for worker, process in self.node.processes.items()} == before
            return
        self.generations[task] = generation
        self.node.tell(decision(task, generation, [f"{task}.{n}" for n in sorted(chosen)], parts=parts))
        assert len(self.node.state.memory.memberships[task].members) == parts + len(chosen)

    @rule()
    def next_epoch(self) -> None:
        self.epoch += 1

    @precondition(lambda self: self.commands)
    @rule(data=st.data())
    def redeliver(self, data: st.DataObject) -> None:
        command, term = data.draw(st.sampled_from(self.commands))
        self.node.command(command, term=term)  # type: ignore[arg-type]

    # --- the fork server and the workers ---------------------------------------------------------

    @rule()
    def boot(self) -> None:
        if not self.node.has_fork_server:
            self.node.port += 1
        self.node.unforked.clear()  # a Spawn on the older connection may be lost
        self.node.boot(port=self.node.port)

    @precondition(lambda self: self.node.unforked)
    @rule()
    def fork(self) -> None:
        self.node.fork()

    @precondition(lambda self: self.node.has_fork_server)
    @rule()
    def kill_fork_server(self) -> None:
        self.node.kill_fork_server()

    @precondition(lambda self: self.node.processes)
    @rule(data=st.data(), status=st.sampled_from([0, 9, 256]))
    def die(self, data: st.DataObject, status: int) -> None:
        self.node.die(data.draw(st.sampled_from(sorted(self.node.processes))), status)

    @precondition(lambda self: self.node.processes)
    @rule(data=st.data(), ready=st.booleans())
    def hello(self, data: st.DataObject, ready: bool) -> None:
        worker = data.draw(st.sampled_from(sorted(self.node.processes)))
        self.node.hello(worker)
        if ready:
            self.node.say(worker, WorkerReady(**reporter("a.1")))

    @precondition(lambda self: any(p.connected for p in self.node.processes.values()))
    @rule(data=st.data())
    def disconnect(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from([w for w, p in sorted(self.node.processes.items()) if p.connected]))
        self.node.processes[worker].connected = False
        self.node.feed(WorkerDisconnected(worker=worker))

    @precondition(lambda self: any(p.connected and p.generation for p in self.node.processes.values()))
    @rule(data=st.data(), step=st.integers(0, 3))
    def commit(self, data: st.DataObject, step: int) -> None:
        able = [w for w, p in sorted(self.node.processes.items()) if p.connected and p.generation]
        worker = data.draw(st.sampled_from(able))
        process = self.node.processes[worker]
        process.iteration += step  # 0: told again, 2 and 3: a gap
        if process.iteration:
            self.node.say(worker, committed(process.generation, process.iteration))

    # --- the log and the clock -------------------------------------------------------------------

    @rule()
    def confirm(self) -> None:
        self.node.confirm()

    @precondition(lambda self: self.node.timers)
    @rule(data=st.data())
    def fire(self, data: st.DataObject) -> None:
        self.node.fire(*data.draw(st.sampled_from(sorted(self.node.timers))))

    @rule()
    def restart_agent(self) -> None:
        self.node.restart_agent()
        self.node.unforked.clear()
        if self.node.has_fork_server:
            self.node.boot(port=self.node.port)

    # --- what must hold --------------------------------------------------------------------------

    @invariant()
    def no_commit_stands_in_the_log_twice(self) -> None:
        assert all(count == 1 for count in self.node.committed.values())

    @invariant()
    def no_answer_is_ever_changed(self) -> None:
        answers: dict[str, str] = {}
        for event in self.node.appended:
            if isinstance(event, CommandApplied | CommandFailed):
                reason = event.reason if isinstance(event, CommandFailed) else ""
                assert answers.setdefault(event.command_id, reason) == reason

    def teardown(self) -> None:
        """Let the environment do its part: then everything is answered, told and gone."""
        node = self.node
        if not node.has_fork_server:
            self.boot()
        node.feed(LeaveNow(reason="the end"))
        for _ in range(50):
            while node.unforked:
                node.fork()
            for worker, process in sorted(node.processes.items()):
                if process.quit:
                    node.die(worker, 0)
            node.confirm()
            if node.finished:
                break
            for timer in sorted(node.timers):
                if timer in node.timers:
                    node.fire(*timer)
        node.confirm()
        assert node.finished and isinstance(node.of(NodeLeft)[-1], NodeLeft)
        assert not node.processes and not node.exits
        for command, _ in self.commands:
            assert node.answers(command.command_id), f"{command} was never answered"  # type: ignore[attr-defined]
        started = {event.worker for event in node.of(WorkerStarted)}
        assert started <= {event.worker for event in node.of(WorkerExited)}


AgentMachine.TestCase.settings = settings(max_examples=at_most(150), stateful_step_count=40, deadline=None)
TestAgentMachine = AgentMachine.TestCase
