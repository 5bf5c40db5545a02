"""The coordinator's real core in a simulated world: `fold`, `needed_solves`, `decide` and `deadlines` run as they
are; agents and trainers around them are models of how long things take (`assumptions.py`).

Rules
-----
* No policy lives here. What happens after a fault is what the core decides; this module only produces the reports
  of agents, and their times: a node dies, and `node_detect_s` later NodeLost is on the log; a command is executed
  `command_s` after it was decided; a process is ready `start_s` after it was started.
* A task keeps the layout that it has when it starts, as its task file fixes it: the fastest on the nodes of its first
  plan (`speeds.fixed_speeds`). With other `speeds` the core believes, and the trainers reach, those.
* One slot is a whole node, one worker its processes together: a worker dies when any of them does. The plan then
  assigns nodes, as the compared systems do.
* A dead node's peers report no broken connections of their own here: those only lead to a new attempt that cannot
  form, and end with NodeLost.
* How long the core took is measured, and kept out of everything that a seed must reproduce.

What does not live here: the trainers (`trainer_model.py`), what is submitted (`submission.py`), the plan
(`plan_rules.py`, `unicrond/core/planning`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from unicrond.core.decide import decide, needed_solves
from unicrond.core.fold import fold
from unicrond.core.planning.problem import Problem
from unicrond.core.planning.solution import Solution
from unicrond.core.rules.deadlines import deadlines
from unicrond.core.rules.invariants import check
from unicrond.core.rules.survey import Survey
from unicrond.core.state.policy import Settings
from unicrond.core.state.state import ClusterState, Membership
from unicrond.core.state.work import iteration_flop
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import Envelope, RecordedEvent
from unicrond.events.wire.schemas import SCHEMA, told_version
from unicrond.replay.evaluation.model.meter import CostPhase, Meter
from unicrond.replay.evaluation.model.speeds import Speeds, fixed_speeds
from unicrond.replay.evaluation.model.virtual_time import Action, Timer, to_us
from unicrond.replay.evaluation.model.world import EvaluationWorld
from unicrond.replay.evaluation.simulator.plan_rules import Rule, optimal
from unicrond.replay.evaluation.simulator.submission import first_plan, flops_scale, policy_for, task_specs
from unicrond.replay.evaluation.simulator.trainer_model import Activity, TrainerGroup, WorkerProcess

_VERSION = told_version("simulation", SCHEMA)
_TERM = 1
_STORE = v.StoreAddress(host="127.0.0.1", port=1)
#: How long a health check takes that passes (agents/health/self_test.py).
_CHECK_S = 5.0
#: Virtual seconds before time 0 in which everything starts.
_WARM_UP_S = 3600.0


@dataclass
class NodeAgent:
    """A node's agent. `boot` grows with every repair; `observations`: how many this boot has reported."""

    node: int
    boot: int = 1
    up: bool = True
    process: WorkerProcess | None = None
    observations: int = 0

    @property
    def name(self) -> str:
        """Return the node's name in the log."""
        return f"n{self.node}"


@dataclass
class CoreWork:
    """How much the coordinator's core did, and how long that took. Times are this machine's and differ from run to run.

    `cpu_s`: CPU time of the whole run, the simulated world's part included; `wall_s`: its wall time. `fold_s`: wall
    time of all folds; `decide_s`, `solve_s`: of each decision (its survey and deadlines included) and each plan.
    """

    events: int = 0
    plans: int = 0
    memberships: int = 0
    incidents: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    fold_s: float = 0.0
    decide_s: list[float] = field(default_factory=list)
    solve_s: list[float] = field(default_factory=list)

    @property
    def core_cpu_s(self) -> float:
        """Estimate the CPU time of the core alone: its wall time, less what the run as a whole waited for a CPU.

        (To ask the CPU clock at every event may cost more than the event.)"""
        core_s = self.fold_s + sum(self.decide_s) + sum(self.solve_s)
        return core_s * min(1.0, self.cpu_s / self.wall_s) if self.wall_s else 0.0

    @property
    def decide_ms(self) -> float:
        """Return the median time of a decision, milliseconds."""
        return 1000 * median(self.decide_s or [0.0])

    @property
    def solve_ms(self) -> float:
        """Return the median time of a plan, milliseconds."""
        return 1000 * median(self.solve_s or [0.0])


class CoreDriver:
    """A coordinator with its cluster. `rule` answers the plan problems; `speeds`: see the module."""

    def __init__(self, world: EvaluationWorld, rule: Rule = optimal, speeds: Speeds | None = None) -> None:
        workload, assumptions = world.workload, world.assumptions
        self.world = world
        self.speeds = speeds or fixed_speeds(workload, first_plan(workload, rule))
        self.work = CoreWork()
        self._began_s = 0.0, 0.0
        self.state = ClusterState()
        self.policy = policy_for(world)
        self.hosts = [NodeAgent(node) for node in range(workload.cluster.nodes)]
        scale = flops_scale(workload)
        self.specs = task_specs(workload, self.speeds, scale)
        worth = workload.worth_at(self.speeds)
        self.groups = {
            spec.name: TrainerGroup(
                world,
                spec.name,
                [flops // scale for flops in self.speeds[spec.name].flops],
                worth[spec.name],
                iteration_flop(spec),
                lambda node, event: self._report(self.hosts[node], event),
            )
            for spec in self.specs
        }
        self._assumptions = assumptions
        self._rule = rule
        self._resolved = 0
        self._solutions: dict[Problem, Solution] = {}
        self._survey: Survey | None = None
        self._timers: dict[str, Timer] = {}
        self._awake = False

    # --- the world's side --------------------------------------------------------------------

    def start(self) -> None:
        """Start a coordinator, all nodes and all tasks, and run virtual time until every task trains."""
        checks = Settings(self.policy, 1.0, check_timeout_s=60.0).numbers()
        self._resolve(v.CoordinatorStarted(term=_TERM, version=_VERSION, policy=checks))
        for host in self.hosts:
            self._join(host)
        for number, spec in enumerate(self.specs, start=1):
            self.submit(v.TaskSubmitted(spec=spec), number)
        self.world.clock.run(self.world.clock.now_us + to_us(_WARM_UP_S))
        self.work = CoreWork()
        self._began_s = time.process_time(), time.perf_counter()

    def finish(self) -> CoreWork:
        """Return what the core has done since everything ran."""
        cpu_s, wall_s = self._began_s
        self.work.cpu_s, self.work.wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
        return self.work

    def node_lost(self, node: int) -> None:
        """Kill agent and workers of the node; liveness notices that later."""
        host = self.hosts[node]
        host.up = False
        self._end_process(host)
        boot = host.boot
        self._after(self._assumptions.node_detect_s, lambda: self._notice_loss(host, boot))

    def node_back(self, node: int) -> None:
        """Start a new agent on the node, without workers."""
        host = self.hosts[node]
        host.up, host.boot, host.observations = True, host.boot + 1, 0
        tasks = self._believed_on(host)
        self._join(host)
        self._notice(tasks)

    def submit(self, event: v.TaskSubmitted | v.TaskCancelled, number: int) -> None:
        """Pass a person's wish on. `number`: of the API's events, each higher than the one before."""
        self._append(event, "api", 1, number)
        self._wake()

    def fault(self, node: int, severity: int) -> None:
        """Apply a fault. SEV2: the process dies. SEV3: its connection breaks; outside a training group it goes
        unnoticed."""
        host = self.hosts[node]
        process = host.process
        if process is None:
            return
        group = self.groups[process.task]
        if severity == 2:
            self._end_by_itself(host, process)
        elif process.generation and group.activity is Activity.TRAINING:
            group.break_up()
            self._after(self._assumptions.error_detect_s, lambda: self._notice_error(host, process))

    # --- noticing ----------------------------------------------------------------------------

    def _notice_loss(self, host: NodeAgent, boot: int) -> None:
        if host.boot != boot:
            return  # repaired before the loss was noticed: its NodeJoined has reported it
        tasks = self._believed_on(host)
        beat_us = max(1, self.world.clock.now_us - to_us(self._assumptions.node_detect_s))
        evidence = v.Evidence(beat_seq=1, beat_at_us=beat_us)
        self._resolve(v.NodeLost(node=host.name, evidence=evidence, reason="no heartbeat"))
        self._notice(tasks)

    def _end_by_itself(self, host: NodeAgent, process: WorkerProcess, exit_code: int = 1) -> None:
        """End a process that nobody has told to end; its agent notices that."""
        self._end_process(host)
        self._after(self._assumptions.process_detect_s, lambda: self._notice_exit(host, process, exit_code))

    def _notice_exit(self, host: NodeAgent, process: WorkerProcess, exit_code: int) -> None:
        if not host.up:
            return
        event = v.WorkerExited(
            node=host.name, task=process.task, worker=process.worker, exit_code=exit_code, signal=None,
            is_expected=False,
        )  # fmt: skip
        self._report(host, event)
        self._notice([process.task])

    def _notice_error(self, host: NodeAgent, process: WorkerProcess) -> None:
        if not host.up:
            return
        error = v.ErrorReported(
            node=host.name,
            task=process.task,
            worker=process.worker,
            kind="connection_broken",
            generation=process.generation,
            iteration=self.groups[process.task].committed,
            phase="reduce",
            message="connection reset by peer",
        )
        self._report(host, error)
        self._notice([process.task])

    def _believed_on(self, host: NodeAgent) -> list[str]:
        """Return the tasks that have a worker there, as far as the coordinator knows."""
        return [
            task.name
            for task in self.state.tasks.values()
            if any(worker.node == host.name for worker in task.workers.values())
        ]

    def _notice(self, tasks: Iterable[str]) -> None:
        """Record that the coordinator knows why these tasks stand still."""
        for task in tasks:
            if self._meter(task).phase(task) is CostPhase.DETECTION:
                self._meter(task).stall(task, CostPhase.TRANSITION)
        self._wake()

    # --- the log -----------------------------------------------------------------------------

    def _append(self, event: v.AnyEvent, producer: str, boot: int, number: int) -> None:
        now_us = self.world.clock.now_us
        envelope = Envelope(
            producer=producer,
            boot=boot,
            number=number,
            term=_TERM if producer == "coordinator" else 0,
            observed_at_us=now_us,
            event=event,
        )
        began_s = time.perf_counter()
        self.state = fold(self.state, RecordedEvent(self.state.seq + 1, now_us, envelope))
        self.work.fold_s += time.perf_counter() - began_s
        self.work.events += 1

    def _report(self, host: NodeAgent, event: v.AnyEvent) -> None:
        host.observations += 1
        self._append(event, host.name, host.boot, host.observations)
        if not isinstance(event, v.StepCommitted | v.WorkerStarted):  # these need no decision
            self._wake()

    def _resolve(self, event: v.AnyEvent) -> None:
        self._resolved += 1
        self._append(event, "coordinator", _TERM, self._resolved)

    def _after(self, delay_s: float, action: Action) -> None:
        self.world.clock.after(to_us(delay_s), action)

    # --- the coordinator ---------------------------------------------------------------------

    def _wake(self) -> None:
        """Schedule a look at the whole state once everything that happens now has been folded."""
        if not self._awake:
            self._awake = True
            self.world.clock.after(0, self._coordinate)

    def _coordinate(self) -> None:
        self._awake = False
        while events := self._decide():
            for event in events:
                self._resolve(event)
                if isinstance(event, v.PlanAdopted):
                    self.work.plans += 1
                    check(self.state)
                self.work.memberships += isinstance(event, v.MembershipDecided)
                self.work.incidents += isinstance(event, v.TransitionCompleted)
            commands = [event for event in events if isinstance(event, v.Command)]
            tasks = [event.task for event in events if isinstance(event, v.MembershipDecided)]
            memberships = {name: self.state.tasks[name].membership for name in tasks}
            if commands or memberships:
                self._after(self._assumptions.command_s, lambda c=commands, m=memberships: self._deliver(c, m))  # type: ignore[misc]
        self._arm_deadlines()
        self._mark_idle()

    def _decide(self) -> list[v.AnyEvent]:
        began_s = time.perf_counter()
        self._survey = Survey(self.state, self.policy, self._survey)
        problems = needed_solves(self._survey)
        solving_s = 0.0
        if any(problem not in self._solutions for problem in problems):
            solve_began_s = time.perf_counter()
            self._solutions = {problem: self._rule(problem) for problem in problems}
            solving_s = time.perf_counter() - solve_began_s
            self.work.solve_s.append(solving_s)
        events = decide(self._survey, self._solutions)
        self.work.decide_s.append(time.perf_counter() - began_s - solving_s)
        return events

    def _arm_deadlines(self) -> None:
        began_s = time.perf_counter()
        lengths_us = deadlines(Survey(self.state, self.policy, self._survey))
        self.work.decide_s[-1] += time.perf_counter() - began_s
        for name in [name for name in self._timers if name not in lengths_us]:
            self._timers.pop(name).cancel()
        for name, length_us in lengths_us.items():
            if name not in self._timers:
                self._timers[name] = self.world.clock.after(length_us, lambda name=name: self._pass(name))  # type: ignore[misc]

    def _pass(self, deadline: str) -> None:
        self._resolve(v.DeadlineExpired(deadline_id=deadline))
        self._wake()

    def _mark_idle(self) -> None:
        """Move tasks without workers in the plan to IDLE, and those that have workers again to TRANSITION."""
        for name, assignment in self.state.plan.assignments.items():
            meter = self._meter(name)
            phase = meter.phase(name)
            if not assignment.workers and phase is CostPhase.TRANSITION:
                meter.idle(name)
            elif assignment.workers and phase is CostPhase.IDLE:
                meter.stall(name, CostPhase.TRANSITION)

    def _meter(self, task: str) -> Meter:
        return self.groups[task].world.meter

    # --- agents ------------------------------------------------------------------------------

    def _join(self, host: NodeAgent) -> None:
        event = v.NodeJoined(
            node=host.name, address="127.0.0.1", slots=1, store=_STORE, agent_boot=host.boot, version=_VERSION
        )
        self._report(host, event)

    def _deliver(self, commands: list[v.Command], memberships: dict[str, Membership | None]) -> None:
        """Deliver what one batch of events holds: the commands, and each task's newest membership."""
        self._execute(commands)
        for name, membership in memberships.items():
            if membership is not None:
                self.groups[name].set_target(membership)

    def _execute(self, commands: list[v.Command]) -> None:
        """Execute the commands of one batch; a dead node executes none."""
        for command in commands:
            host = self.hosts[int(command.node[1:])]
            if isinstance(command, v.StartWorker) and host.up:
                self._start_process(host, command)
            elif isinstance(command, v.CheckNode) and host.up:
                self._after(_CHECK_S, lambda h=host, c=command: self._check(h, c))  # type: ignore[misc]
            elif isinstance(command, v.StopWorker):
                self._after(self._assumptions.stop_s, lambda h=host, w=command.worker: self._stop_process(h, w))  # type: ignore[misc]

    def _check(self, host: NodeAgent, command: v.CheckNode) -> None:
        """Report a health check that passed: nothing is wrong with a node of the simulation that is up."""
        if host.up:
            took_us = to_us(_CHECK_S)
            report = v.NodeChecked(
                node=host.name, command_id=command.command_id, has_passed=True, duration_us=took_us, detail="simulated"
            )
            self._report(host, report)

    def _start_process(self, host: NodeAgent, command: v.StartWorker) -> None:
        if host.process is not None:
            event = v.CommandFailed(node=host.name, command_id=command.command_id, reason="the slot is taken")
            self._report(host, event)
            return
        host.process = process = WorkerProcess(command.worker, command.spec.name, host.node)
        self.groups[process.task].add(process)
        self._report(host, v.WorkerStarted(node=host.name, task=process.task, worker=process.worker, pid=1))
        self._after(self._assumptions.start_s, lambda: self._process_ready(host, process))

    def _process_ready(self, host: NodeAgent, process: WorkerProcess) -> None:
        if host.process is process:
            process.ready = True
            self._report(host, v.WorkerReady(node=host.name, task=process.task, worker=process.worker))
            self.groups[process.task].try_to_form()

    def _stop_process(self, host: NodeAgent, worker: str) -> None:
        process = host.process
        if process is None or process.worker != worker:
            return
        self._end_process(host)
        event = v.WorkerExited(
            node=host.name, task=process.task, worker=worker, exit_code=0, signal=None, is_expected=True
        )
        self._report(host, event)
        self._notice([process.task])

    def _end_process(self, host: NodeAgent) -> None:
        process, host.process = host.process, None
        if process is not None:
            self.groups[process.task].remove(process)
