"""The agent's core: what one node does about what it is told. Pure: `handle(state, input) -> (state, actions)`.

Rules
-----
Commands
* A command id is answered once in the agent's memory, and memory outlives the agent: a command that comes
  again gets the same answer again and nothing else happens.
* The highest (term, epoch) seen is the fence. A command below it is refused as stale; it never acts.
* A start that has grown old (the node was away, and its commands waited for it) is refused as stale, too.
* StartWorker: a worker id is spawned at most once, ever. A start waits, bounded, while a slot is about to
  become free or the fork server is being started; with neither in sight it fails at once.
  Applied = the process exists.
* StopWorker: Quit, after `grace_s` SIGTERM, after `kill_after_s` SIGKILL; no Quit for a worker that has not
  connected yet and never was a member; with `kill` SIGKILL at once. Applied = the process is gone.
* InjectFault (ordered_faults.py): never by an old command. What ends this agent is answered before it happens, or it
  would happen to the next agent again; all else once it is done.
* SetMembership: a task's generation never goes back. The newest one is kept, and goes to every local worker
  of the task that is or ever was a member (leavers must hear that they leave); who connects later gets it then.

Workers
* A worker that the fork server neither lists nor reports as ended has ended with its fork server: the kernel
  kills the workers of a dead fork server (so that no worker runs on unattended).
* A worker whose iteration is late (watch.py) is told of as it stands; who hangs and who waits for it, the coordinator
  knows, who hears of all members.
* Exits are acknowledged to the fork server only once the log holds them, so no exit status is ever lost.
* An exit is *expected* when the worker was told to stop, or was a member and ended with code 0 (a member does
  that only when its task is complete). An unexpected one is told with its cause (ErrorReported, unless the worker
  itself has told it) and the end of its log, cause first.
* Commits are summed to at most one StepCommitted per task and `commit_interval_s`; the first after a pause is
  told at once. A sum is closed early by whatever does not continue it, by a loss that is not finite, and by any
  news of its worker that its place in the log matters to (regroup, park, trouble, completion, exit).

The life of an agent
* adopting -> up: with the log in reach, the fork server's inventory and the Hellos of the workers in it (bounded)
  the node joins. Exits that happened while there was no agent come first.
* Another log than the one remembered is another cluster: nothing that is remembered holds there (terms and worker
  ids begin anew), and the workers of the old one are ended and not spoken of.
* The node joins again whenever its store's address changes (another fork server).
* Leave: no new starts, all workers are stopped, NodeLeft, Finish (the shell then retires the fork server).
  HandOver: sums are closed, nothing else.

States in memory
* A capture that a worker tells of is copied to the first of its membership's peers; the next one while the
  copy is under way waits (copies.py). What the node's memory holds is told at most once in `held_interval_s`.
* DropState, and the log's end: the fork server gives the memory up.

What does not live here: clocks, sockets, the outbox and its numbering, the wording of exit statuses (classify.py).
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, assert_never

from msgspec.structs import replace

from agents import commit_sums, ordered_faults
from agents.classify import Exit, classify
from agents.log_layout import worker_log
from agents.state import (
    MAX_ANSWERED,
    MAX_GONE,
    MAX_TASKS,
    Action,
    Append,
    Appended,
    ArmTimer,
    Commanded,
    Config,
    CopyState,
    Disconnect,
    Finish,
    ForkServerDied,
    ForkServerSaid,
    Gone,
    HandOver,
    Held,
    Input,
    Leave,
    Link,
    LogSeen,
    Memory,
    Order,
    Stalled,
    State,
    StateHeld,
    Struck,
    TellForkServer,
    TellWorker,
    TimerFired,
    Waiting,
    Worker,
    WorkerConnected,
    WorkerDisconnected,
    WorkerSaid,
)
from agents.trainer.marks import Mark
from agents.trainer.messages import (
    Captured,
    Committed,
    Completed,
    Degraded,
    Exited,
    ExitedAck,
    Forget,
    Forked,
    FromForkServer,
    FromWorker,
    Hello,
    Inventory,
    KeepFailed,
    Kept,
    Kill,
    Launch,
    Membership,
    Parked,
    Quit,
    Ready,
    Regrouped,
    Saved,
    Spawn,
    SpawnFailed,
    Suspected,
    Taken,
    Trouble,
)
from events.vocabulary import (
    CheckpointSaved,
    CommandApplied,
    CommandFailed,
    CorruptionSuspected,
    DegradationObserved,
    DropState,
    ErrorReported,
    Fault,
    HangSuspected,
    InjectFault,
    MemoryService,
    NodeJoined,
    NodeLeft,
    Observation,
    RunningWorker,
    SetMembership,
    SetPeers,
    StartWorker,
    StateKept,
    StateTaken,
    StepCommitted,
    StopWorker,
    StoreAddress,
    TaskCompleted,
    WorkerExited,
    WorkerId,
    WorkerParked,
    WorkerReady,
    WorkerRegrouped,
    WorkerStarted,
)

#: What a worker reports when a *peer* has failed: a symptom, not the cause of its own end.
SYMPTOMS = frozenset({"connection_broken", "collective_timeout"})
#: Reports that become an observation as they are: the event has the message's fields, and says of which worker.
Reported: TypeAlias = Regrouped | Parked | Trouble | Degraded | Suspected | Taken | Saved | Completed
REPORTED: dict[type[Reported], type[Observation]] = {
    Regrouped: WorkerRegrouped,
    Parked: WorkerParked,
    Trouble: ErrorReported,
    Degraded: DegradationObserved,
    Suspected: CorruptionSuspected,
    Taken: StateTaken,
    Saved: CheckpointSaved,
    Completed: TaskCompleted,
}
_MAX_TEXT = 1024
K = TypeVar("K")
V = TypeVar("V")


def resume(config: Config, memory: Memory) -> State:
    """The state of an agent that starts, with what the one before it remembered (or an empty Memory)."""
    return State(config=config, memory=memory, summed=dict(memory.reported))


def handle(state: State, given: Input) -> tuple[State, list[Action]]:
    """Take one input; the new state and what is to be done, in this order. Never raises on an input."""
    turn = _Turn(state)
    match given:
        case Commanded():
            turn.commanded(given)
        case WorkerConnected(hello=hello):
            turn.connected(hello)
        case WorkerSaid(worker=worker, message=message):
            turn.worker_said(worker, message)
        case WorkerDisconnected(worker=worker):
            turn.disconnected(worker)
        case ForkServerSaid(message=said, log_tail=log_tail, mark=mark):
            turn.fork_server_said(said, log_tail, mark)
        case Stalled():
            turn.stalled(given)
        case ForkServerDied():
            turn.fork_server_died()
        case TimerFired():
            turn.timer_fired(given)
        case LogSeen(identity=identity):
            turn.log_seen(identity)
        case StateHeld(held=held):
            turn.held(held)
        case Appended(event=event):
            turn.appended(event)
        case Struck(command_id=command_id, reason=reason):
            turn.struck(command_id, reason)
        case Leave(reason=reason):
            turn.leave(reason)
        case HandOver():
            turn.close_all_sums()
        case _ as never:
            assert_never(never)
    return turn.state, turn.actions


@dataclass(slots=True)
class _Turn:
    """One input being handled: `state` is replaced, never changed, and `actions` grows."""

    state: State
    actions: list[Action] = field(default_factory=list)

    # --- small steps -----------------------------------------------------------------------------

    @property
    def memory(self) -> Memory:
        return self.state.memory

    @property
    def config(self) -> Config:
        return self.state.config

    def remember(self, **changes: Any) -> None:
        self.state = replace(self.state, memory=replace(self.memory, **changes))

    def change(self, worker: Worker, **changes: Any) -> Worker:
        changed = replace(worker, **changes)
        self.remember(workers={**self.memory.workers, worker.worker: changed})
        return changed

    def link(self, worker: WorkerId, link: Link) -> None:
        self.state = replace(self.state, links={**self.state.links, worker: link})

    def append(self, event: Observation, caused_by: str = "", *, confirm: bool = False) -> None:
        self.actions.append(Append(event=event, caused_by=caused_by, confirm=confirm))

    def answer(self, order: Order, reason: str = "") -> None:
        """Answer a command, now and whenever it comes again. `reason`: why it failed, "" if it did not."""
        answered = {**self.memory.answered, order.command_id: reason[:_MAX_TEXT]}
        self.remember(answered=_newest(answered, MAX_ANSWERED))
        self.say_answer(order)

    def say_answer(self, order: Order) -> None:
        reason = self.memory.answered[order.command_id]
        node, command_id = self.config.node, order.command_id
        self.append(
            CommandFailed(node=node, command_id=command_id, reason=reason)
            if reason
            else CommandApplied(node=node, command_id=command_id),
            order.cause,
        )

    # --- commands --------------------------------------------------------------------------------

    def commanded(self, given: Commanded) -> None:
        command = given.command
        if command.node != self.config.node:
            return
        order = Order(command_id=command.command_id, cause=given.cause)
        if order.command_id in self.memory.answered:
            self.say_answer(order)
            return
        if self.is_pending(order.command_id):
            return
        fence = (given.term, command.epoch)
        if fence < self.memory.fence:
            term, epoch = self.memory.fence
            self.answer(order, f"stale: term {given.term} epoch {command.epoch}, this node obeys {term} {epoch}")
            return
        if fence > self.memory.fence:
            self.remember(fence=fence)
        match command:
            case StartWorker() | InjectFault() if given.age_s > self.config.start_max_age_s:
                self.answer(
                    order,
                    f"stale: commanded {given.age_s:.0f} s ago, it acts within {self.config.start_max_age_s:g} s "
                    "(if it is not that old, the clocks of this node and of the log differ)",
                )
            case StartWorker():
                self.start(command, order)
            case StopWorker():
                self.stop_commanded(command, order)
            case SetMembership():
                self.set_membership(command, order)
            case InjectFault(fault=fault):
                self.inject(fault, order)
            case SetPeers(task=task, peers=peers):
                self.set_peers(task, peers, order)
            case DropState(task=task):
                self.drop_state(task, order)
            case _:
                self.answer(order, f"unknown command {type(command).__name__}: the agent is too old")

    def is_pending(self, command_id: str) -> bool:
        starts = [w.order for w in self.memory.waiting]
        starts += [w.starting.order for w in self.memory.workers.values() if w.starting]
        stops = [o for w in self.memory.workers.values() for o in w.stop_orders]
        return command_id in self.state.striking or any(order.command_id == command_id for order in starts + stops)

    # --- ordered faults --------------------------------------------------------------------------

    def inject(self, fault: Fault, order: Order) -> None:
        if ordered_faults.is_of_node(fault):
            if fault.kind == "kill":
                self.answer(order)
            else:
                self.state = replace(self.state, striking={**self.state.striking, order.command_id: order})
            self.actions.append(ordered_faults.on_node(fault, order.command_id))
            return
        record = self.memory.workers.get(fault.worker)
        done = ordered_faults.on_worker(fault, record, is_connected=self.is_connected(fault.worker))
        if isinstance(done, str):
            self.answer(order, done)
        else:
            self.actions.append(done)
            self.answer(order)

    def struck(self, command_id: str, reason: str) -> None:
        order = self.state.striking.get(command_id)
        if order is not None:
            self.state = replace(self.state, striking={c: o for c, o in self.state.striking.items() if c != command_id})
            self.answer(order, reason)

    # --- starting --------------------------------------------------------------------------------

    def start(self, command: StartWorker, order: Order) -> None:
        worker = command.worker
        if self.state.phase in ("leaving", "left"):
            self.answer(order, "the node is leaving")
        elif worker.rpartition(".")[0] != command.spec.name:
            self.answer(order, f"worker {worker} is not of task {command.spec.name}")
        elif worker in self.memory.workers and self.memory.workers[worker].foreign:
            self.answer(order, f"a worker {worker} of an older log has not ended yet")
        elif self.is_known(worker):
            self.answer(order)  # it exists or has existed: this start has acted already
        elif self.state.store_port and not self.free_slots() and not self.is_slot_coming():
            self.answer(order, f"no free slot: all {self.config.slots} slots hold a worker")
        else:
            self.remember(waiting=(*self.memory.waiting, Waiting(command=command, order=order)))
            self.fill_slots()
            if any(w.command.worker == worker for w in self.memory.waiting):
                self.arm_wait(worker)

    def is_known(self, worker: WorkerId) -> bool:
        memory = self.memory
        is_waiting = any(w.command.worker == worker for w in memory.waiting)
        return is_waiting or worker in memory.workers or worker in memory.gone

    def free_slots(self) -> list[int]:
        taken = {worker.slot for worker in self.memory.workers.values()}
        return [slot for slot in range(self.config.slots) if slot not in taken]

    def is_slot_coming(self) -> bool:
        """Some worker is about to end: told to, done, or its connection broke."""
        links = self.state.links
        return any(
            w.stop != "no" or w.completed or not links.get(w.worker, Link()).connected
            for w in self.memory.workers.values()
        )

    def arm_wait(self, worker: WorkerId) -> None:
        config = self.config
        after_s = config.slot_wait_s if self.state.store_port else config.fork_server_wait_s
        self.actions.append(ArmTimer(name="wait", key=worker, after_s=after_s))

    def fill_slots(self) -> None:
        """Spawn what waits, oldest first, as far as there are slots."""
        while self.memory.waiting and self.state.store_port and (free := self.free_slots()):
            first, *rest = self.memory.waiting
            command = first.command
            self.remember(waiting=tuple(rest))
            record = Worker(worker=command.worker, task=command.spec.name, slot=free[0], starting=first)
            self.remember(
                workers={**self.memory.workers, command.worker: record},
                foreign_gone=tuple(w for w in self.memory.foreign_gone if w != command.worker),
            )
            self.actions.append(TellForkServer(message=self.spawn(command, free[0])))

    def spawn(self, command: StartWorker, slot: int) -> Spawn:
        config, task = self.config, command.spec.name
        launch = Launch(
            worker=command.worker,
            task=task,
            node=config.node,
            address=config.address,
            agent_socket=config.agent_socket,
            replica=command.replica,
            shard=command.shard,
            store=command.store,
            spec=command.spec,
        )
        return Spawn(launch=launch, log_path=str(worker_log(Path(config.logs), task, command.worker)), slot=slot)

    def started(self, worker: WorkerId, pid: int) -> None:
        record = self.memory.workers.get(worker)
        if record is None or record.pid:
            return
        waiting = record.starting
        record = self.change(record, pid=pid, starting=None)
        started = WorkerStarted(node=self.config.node, task=record.task, worker=worker, pid=pid)
        self.append(started, waiting.order.cause if waiting else "")
        if waiting:
            self.answer(waiting.order)

    def give_up_start(self, waiting: Waiting, reason: str) -> None:
        self.remember(waiting=tuple(w for w in self.memory.waiting if w is not waiting))
        self.answer(waiting.order, reason)

    # --- stopping --------------------------------------------------------------------------------

    def stop_commanded(self, command: StopWorker, order: Order) -> None:
        for waiting in self.memory.waiting:
            if waiting.command.worker == command.worker:
                self.give_up_start(waiting, f"stopped before it was started: {command.reason}")
        record = self.memory.workers.get(command.worker)
        if record is None:
            self.answer(order)  # gone, or never here: nothing runs
            return
        record = self.change(record, stop_orders=(*record.stop_orders, order))
        if command.kill and record.stop != "kill":
            self.press(self.change(record, stop="kill", stop_reason=command.reason))
        self.stop(self.memory.workers[command.worker], command.reason)

    def stop(self, record: Worker, reason: str) -> None:
        """Begin to end a worker; nothing where that has begun already."""
        if record.stop == "no":
            # Who was never a member has nothing to finish; if it cannot hear either, it is not waited for.
            stage = "quit" if record.member or self.is_connected(record.worker) else "term"
            self.press(self.change(record, stop=stage, stop_reason=reason[:_MAX_TEXT]))

    def press(self, record: Worker) -> None:
        """Do what the stage of the stop asks for, and arm the next stage."""
        worker, config = record.worker, self.config
        match record.stop:
            case "quit" if self.is_connected(worker):
                self.actions.append(TellWorker(worker=worker, message=Quit(reason=record.stop_reason)))
                after_s = config.grace_s
            case "quit":  # it cannot hear now: it gets the Quit if it connects within the grace time
                after_s = config.grace_s
            case "term":
                self.actions.append(TellForkServer(message=Kill(worker=worker, signal=signal.SIGTERM)))
                after_s = config.kill_after_s
            case "kill":
                self.actions.append(TellForkServer(message=Kill(worker=worker, signal=signal.SIGKILL)))
                after_s = config.kill_after_s  # and again: a Kill may be lost with a connection
            case "no":
                return
            case _ as never:
                assert_never(never)
        self.actions.append(ArmTimer(name="stop", key=worker, after_s=after_s))

    def is_connected(self, worker: WorkerId) -> bool:
        link = self.state.links.get(worker)
        return link is not None and link.connected

    # --- membership ------------------------------------------------------------------------------

    def set_membership(self, command: SetMembership, order: Order) -> None:
        newest = self.memory.memberships.get(command.task)
        if newest and command.generation < newest.generation:
            self.answer(order, f"old generation {command.generation}: {newest.generation} is known already")
            return
        membership = Membership(
            generation=command.generation,
            members=command.members,
            joiners=command.joiners,
            urgent=command.urgent,
            store=command.store,
            peers=command.peers,
            mtbf_us=command.mtbf_us,
        )
        others = {task: m for task, m in self.memory.memberships.items() if task != command.task}
        self.remember(memberships=_newest({**others, command.task: membership}, MAX_TASKS))
        for worker in sorted(self.memory.workers):
            self.tell_membership(self.memory.workers[worker])
        self.answer(order)

    def tell_membership(self, record: Worker) -> None:
        """Give a worker its task's newest membership, if that concerns it and it has not got it yet."""
        membership = self.memory.memberships.get(record.task)
        if membership is None:
            return
        is_member = any(member.worker == record.worker for member in membership.members)
        if not is_member and not record.member:
            return  # a newcomer that waits for a later membership
        if not record.member:
            record = self.change(record, member=True)
        link = self.state.links.get(record.worker)
        if link and link.connected and link.told < membership.generation:
            self.link(record.worker, replace(link, told=membership.generation))
            self.actions.append(TellWorker(worker=record.worker, message=membership))

    # --- workers ---------------------------------------------------------------------------------

    def connected(self, hello: Hello) -> None:
        worker = hello.worker
        record = self.memory.workers.get(worker)
        if record is None or record.task != hello.task or record.pid not in (0, hello.pid):
            self.actions.append(Disconnect(worker=worker, why="no such worker was started here"))
            return
        self.link(worker, Link(told=hello.generation))
        if hello.generation > record.generation:
            record = self.change(record, generation=hello.generation, member=True)
        if hello.ready and not record.foreign:
            self.ready(record, is_news=hello.generation == 0)
        record = self.memory.workers[worker]
        self.tell_membership(record)
        if record.stop == "quit":
            self.actions.append(TellWorker(worker=worker, message=Quit(reason=record.stop_reason)))
        if worker in self.state.unheard:
            self.state = replace(self.state, unheard=self.state.unheard - {worker})
            self.join_if_complete()

    def disconnected(self, worker: WorkerId) -> None:
        link = self.state.links.get(worker)
        if link:
            self.link(worker, replace(link, connected=False))

    def ready(self, record: Worker, *, is_news: bool = True) -> None:
        if record.ready:
            return
        self.change(record, ready=True)
        if is_news:
            self.append(WorkerReady(node=self.config.node, task=record.task, worker=record.worker))

    def worker_said(self, worker: WorkerId, message: FromWorker) -> None:
        record = self.memory.workers.get(worker)
        if record is None or record.foreign:
            return
        match message:
            case Hello():
                self.connected(message)
            case Ready():
                self.ready(record)
            case Committed():
                self.committed(record, message)
            case Regrouped():
                if message.generation <= record.regrouped:
                    return  # told again to a new agent
                self.close_sum(record.task)
                generation = max(record.generation, message.generation)
                self.change(record, regrouped=message.generation, generation=generation)
                self.reached(worker, message.iteration)
                self.pass_on(record, message)
            case Parked():
                self.close_sum(record.task)
                self.reached(worker, message.iteration)
                self.pass_on(record, message)
            case Trouble():
                self.close_sum(record.task)
                self.reached(worker, message.iteration)
                if message.kind not in SYMPTOMS:
                    self.change(record, cause_told=True)
                self.pass_on(record, message)
            case Degraded() | Suspected() | Taken():
                self.pass_on(record, message)
            case Captured():
                self.captured(record.task, message)
            case Saved():
                if message.iteration == record.saved:
                    return  # told again to a new agent
                self.change(record, saved=message.iteration)
                self.pass_on(record, message)
            case Completed():
                if record.completed:
                    return
                self.close_sum(record.task)
                self.change(record, completed=True)
                self.pass_on(record, message)
            case _ as never:
                assert_never(never)

    def pass_on(self, record: Worker, message: Reported) -> None:
        """What a worker reports is an observation once it is said of which worker it is; its fields are the same."""
        said = {field: getattr(message, field) for field in message.__struct_fields__}
        kind = REPORTED[type(message)]
        self.append(kind(node=self.config.node, task=record.task, worker=record.worker, **said))

    def stalled(self, stalled: Stalled) -> None:
        record, mark = self.memory.workers.get(stalled.worker), stalled.mark
        if record is None or record.foreign or record.stop != "no":
            return
        self.close_sum(record.task)  # what was committed says that it is not the last iteration which is late
        self.append(
            HangSuspected(
                node=self.config.node,
                task=record.task,
                worker=stalled.worker,
                generation=mark.generation,
                iteration=mark.iteration,
                phase=mark.phase,
                micro_batch=mark.micro_batch,
                entered=mark.entered,
                waiting=mark.waiting,
                stopped=stalled.stopped,
                still_us=stalled.still_us,
                limit_us=mark.limit_us,
            )
        )

    def reached(self, worker: WorkerId, iteration: int) -> None:
        self.link(worker, replace(self.state.links.get(worker, Link()), iteration=iteration))

    # --- commits ---------------------------------------------------------------------------------

    def committed(self, record: Worker, commit: Committed) -> None:
        task = record.task
        here = commit_sums.position(commit)
        if here <= self.state.summed.get(task, (0, 0)):
            return  # told again to a new agent
        self.reached(record.worker, commit.iteration)
        before = self.state.sums.get(task)
        if before and not commit_sums.continues(before, record.worker, commit):
            self.close_sum(task)
            before = None
        total = commit_sums.add(before, record.worker, commit)
        state = self.state
        self.state = replace(state, sums={**state.sums, task: total}, summed={**state.summed, task: here})
        if commit_sums.urgent(commit):
            self.close_sum(task)
        if task not in state.paced:
            self.close_sum(task)
            self.pace(task)

    def pace(self, task: str) -> None:
        self.state = replace(self.state, paced=self.state.paced | {task})
        self.actions.append(ArmTimer(name="commits", key=task, after_s=self.config.commit_interval_s))

    def close_sum(self, task: str) -> None:
        total = self.state.sums.get(task)
        if total:
            self.state = replace(self.state, sums={t: s for t, s in self.state.sums.items() if t != task})
            self.append(total.event(self.config.node, task), confirm=True)

    def close_all_sums(self) -> None:
        for task in sorted(self.state.sums):
            self.close_sum(task)

    # --- states in memory ------------------------------------------------------------------------

    def captured(self, task: str, capture: Captured) -> None:
        membership = self.memory.memberships.get(task)
        peers = tuple(peer for peer in (membership.peers if membership else ()) if peer.node != self.config.node)
        if peers:
            self.actions.append(CopyState(task=task, shard=capture.shard, peers=peers))
        self.held(
            Held(
                task=task,
                shard=capture.shard,
                iteration=capture.iteration,
                generation=capture.generation,
                origin=self.config.node,
                size_bytes=capture.size_bytes,
                duration_us=capture.duration_us,
            )
        )

    def set_peers(self, task: str, peers: tuple[MemoryService, ...], order: Order) -> None:
        """What is here is copied at once: the next capture may be long in coming."""
        membership = self.memory.memberships.get(task)
        if membership is not None:
            changed = replace(membership, peers=peers)
            self.remember(memberships={**self.memory.memberships, task: changed})
        others = tuple(peer for peer in peers if peer.node != self.config.node)
        for key in sorted(self.state.holds):
            name, _, shard = key.partition("/")
            if name == task and others:
                self.actions.append(CopyState(task=task, shard=int(shard), peers=others))
        self.answer(order)

    def held(self, held: Held) -> None:
        key = f"{held.task}/{held.shard}"
        self.state = replace(self.state, holds=self.state.holds | {key})
        if key in self.state.untold or self.state.phase == "adopting":  # the node joins first
            self.state = replace(self.state, untold={**self.state.untold, key: held})
        else:
            self.tell_held(held)

    def tell_held(self, held: Held) -> None:
        key = f"{held.task}/{held.shard}"
        self.state = replace(self.state, untold={**self.state.untold, key: None})
        self.actions.append(ArmTimer(name="held", key=key, after_s=self.config.held_interval_s))
        self.append(
            StateKept(
                node=self.config.node,
                task=held.task,
                shard=held.shard,
                iteration=held.iteration,
                generation=held.generation,
                origin=held.origin,
                size_bytes=held.size_bytes,
                duration_us=held.duration_us,
            )
        )

    def drop_state(self, task: str, order: Order) -> None:
        self.forget_untold(lambda key: key.partition("/")[0] == task)
        holds = (key for key in self.state.holds if key.partition("/")[0] != task)
        self.state = replace(self.state, holds=frozenset(holds))
        self.actions.append(TellForkServer(message=Forget(task=task)))
        self.answer(order)

    def forget_untold(self, gone: Callable[[str], bool]) -> None:
        untold = {key: held for key, held in self.state.untold.items() if not gone(key)}
        self.state = replace(self.state, untold=untold)

    # --- the fork server -------------------------------------------------------------------------

    def fork_server_said(self, said: FromForkServer, log_tail: str, mark: Mark | None) -> None:
        match said:
            case Forked(worker=worker, pid=pid):
                self.started(worker, pid)
            case SpawnFailed(worker=worker, reason=reason):
                self.spawn_failed(worker, reason)
            case Exited(worker=worker, pid=pid, status=status, oom=oom):
                self.exited(worker, pid, Exit.of(status, oom), log_tail, mark)
                self.after_an_end()
            case Inventory():
                self.take_inventory(said)
            case Kept() | KeepFailed():
                pass  # descriptors are the shell's
            case _ as never:
                assert_never(never)

    def spawn_failed(self, worker: WorkerId, reason: str) -> None:
        record = self.memory.workers.get(worker)
        if record is None or record.pid:
            return
        self.forget(record, Gone(expected=True, durable=True))
        if record.starting:
            self.answer(record.starting.order, f"the process could not be started: {reason}"[:_MAX_TEXT])
        for order in record.stop_orders:
            self.answer(order)
        self.after_an_end()

    def exited(self, worker: WorkerId, pid: int, end: Exit, log_tail: str, mark: Mark | None) -> None:
        if worker in self.state.confirming:
            return
        record = self.memory.workers.get(worker)
        if record is None:
            self.exited_before(worker, end, log_tail)
            return
        if record.foreign:
            self.forget(record, None)
            self.actions.append(TellForkServer(message=ExitedAck(worker=worker)))
            return
        self.started(worker, pid)  # in case that it ended so soon that its Forked was lost
        record = self.memory.workers[worker]
        task = record.task
        self.close_sum(task)
        expected = record.stop != "no" or (end.exit_code == 0 and record.member)
        if not expected and not record.cause_told:
            self.tell_cause(record, end, log_tail, mark)
        self.forget(record, Gone(expected=expected, durable=False))
        self.tell_exit(worker, end, expected, log_tail)
        for order in record.stop_orders:
            self.answer(order)

    def exited_before(self, worker: WorkerId, end: Exit, log_tail: str) -> None:
        """An exit of a worker that is not in the memory, or that was in the outbox of the agent before."""
        gone = self.memory.gone.get(worker)
        if (gone and gone.durable) or worker in self.memory.foreign_gone:
            self.actions.append(TellForkServer(message=ExitedAck(worker=worker)))
            return
        expected = gone.expected if gone else False
        self.put_gone(worker, Gone(expected=expected, durable=False))
        self.tell_exit(worker, end, expected, log_tail)

    def tell_cause(self, record: Worker, end: Exit, log_tail: str, mark: Mark | None) -> None:
        kind, text = classify(end, ready=record.ready)
        link = self.state.links.get(record.worker, Link())
        generation, committed = self.state.summed.get(record.task, (0, 0))
        at_work = committed + 1 if generation == record.generation else 0
        self.append(
            ErrorReported(
                node=self.config.node,
                task=record.task,
                worker=record.worker,
                kind=kind,
                generation=max(record.generation, link.told),
                iteration=mark.iteration if mark else max(link.iteration, at_work),
                phase=mark.phase if mark else "unknown" if record.ready else "start",
                message=text,
                detail=log_tail,
            )
        )

    def tell_exit(self, worker: WorkerId, end: Exit, expected: bool, log_tail: str) -> None:
        self.state = replace(self.state, confirming=self.state.confirming | {worker})
        self.append(
            WorkerExited(
                node=self.config.node,
                task=worker.rpartition(".")[0],
                worker=worker,
                exit_code=end.exit_code,
                signal=end.signal,
                expected=expected,
                log_tail="" if expected else log_tail,
                cause=end.cause,
            ),
            confirm=True,
        )

    def forget(self, record: Worker, gone: Gone | None) -> None:
        worker, state = record.worker, self.state
        self.remember(workers={w: r for w, r in self.memory.workers.items() if w != worker})
        if gone:
            self.put_gone(worker, gone)
        links = {w: link for w, link in state.links.items() if w != worker}
        self.state = replace(self.state, links=links, unheard=state.unheard - {worker})

    def put_gone(self, worker: WorkerId, gone: Gone) -> None:
        self.remember(gone=_newest({**self.memory.gone, worker: gone}, MAX_GONE))

    def after_an_end(self) -> None:
        self.fill_slots()
        self.join_if_complete()
        self.leave_if_empty()

    def fork_server_died(self) -> None:
        self.state = replace(self.state, store_port=0)
        self.end_all_but(frozenset())
        self.after_an_end()

    def end_all_but(self, listed: frozenset[WorkerId]) -> None:
        """What the fork server does not list went with an earlier one, or was never asked of this one."""
        for worker in sorted(self.memory.workers.keys() - listed):
            record = self.memory.workers[worker]
            if record.pid:
                self.exited(worker, record.pid, Exit(None, signal.SIGKILL, "signalled"), "", None)
            else:
                self.requeue(record)

    def requeue(self, record: Worker) -> None:
        """The Spawn was lost with the fork server or its connection."""
        self.remember(workers={w: r for w, r in self.memory.workers.items() if w != record.worker})
        if record.starting and record.stop == "no":
            self.remember(waiting=(record.starting, *self.memory.waiting))
            self.arm_wait(record.worker)
            return
        if record.starting:
            self.answer(record.starting.order, f"stopped before it was started: {record.stop_reason}"[:_MAX_TEXT])
        for order in record.stop_orders:
            self.answer(order)

    def take_inventory(self, inventory: Inventory) -> None:
        """What the fork server holds is what there is; exits that it still knows came before this."""
        is_first = self.state.phase == "adopting" and not self.state.store_port
        self.state = replace(self.state, store_port=inventory.store_port)
        listed = {entry.worker: entry for entry in inventory.workers}
        if is_first:
            self.begin_adoption(frozenset(listed))
        for worker, entry in sorted(listed.items()):
            if worker not in self.memory.workers:
                record = Worker(worker=worker, task=entry.task, slot=entry.slot, pid=entry.pid)
                self.remember(workers={**self.memory.workers, worker: record})
                continue
            self.started(worker, entry.pid)
            self.press(self.change(self.memory.workers[worker], pid=entry.pid, slot=entry.slot))
        self.end_all_but(frozenset(listed))
        self.after_an_end()
        if self.state.phase == "up" and self.state.joined_port != self.state.store_port:
            self.join()

    def begin_adoption(self, listed: frozenset[WorkerId]) -> None:
        for waiting in self.memory.waiting:
            self.arm_wait(waiting.command.worker)
        connected = {worker for worker, link in self.state.links.items() if link.connected}
        self.state = replace(self.state, unheard=listed - connected)
        if self.state.unheard:
            self.actions.append(ArmTimer(name="adopt", key="", after_s=self.config.hello_wait_s))

    # --- the node --------------------------------------------------------------------------------

    def join_if_complete(self) -> None:
        state = self.state
        if state.phase == "adopting" and state.log_seen and state.store_port and not state.unheard:
            self.state = replace(self.state, phase="up")
            self.join()

    def join(self) -> None:
        config = self.config
        running = [
            RunningWorker(worker=w.worker, task=w.task, pid=w.pid, generation=w.generation)
            for _, w in sorted(self.memory.workers.items())
            if w.pid and not w.foreign
        ]
        self.state = replace(self.state, joined_port=self.state.store_port)
        self.append(
            NodeJoined(
                node=config.node,
                address=config.address,
                slots=config.slots,
                store=StoreAddress(host=config.address, port=self.state.store_port),
                agent_boot=config.agent_boot,
                version=config.version,
                workers=tuple(running),
                memory=config.memory,
            )
        )
        for held in self.state.untold.values():
            if held is not None:
                self.tell_held(held)

    def leave(self, reason: str) -> None:
        if self.state.phase in ("leaving", "left"):
            return
        self.state = replace(self.state, phase="leaving", leave_reason=reason[:_MAX_TEXT])
        for waiting in self.memory.waiting:
            self.give_up_start(waiting, "the node is leaving")
        for worker in sorted(self.memory.workers):
            self.stop(self.memory.workers[worker], f"the node is leaving: {reason}")
        self.leave_if_empty()

    def leave_if_empty(self) -> None:
        if self.state.phase != "leaving" or self.memory.workers:
            return
        self.close_all_sums()
        self.state = replace(self.state, phase="left")
        self.append(NodeLeft(node=self.config.node, reason=self.state.leave_reason))
        self.actions.append(Finish())

    def log_seen(self, identity: str) -> None:
        known = self.memory.log
        if known and identity and identity != known:
            self.forget_log()
        if identity:
            self.remember(log=identity)
        self.state = replace(self.state, log_seen=True)
        self.join_if_complete()

    def forget_log(self) -> None:
        memory = Memory(
            workers={w: replace(record, foreign=True) for w, record in self.memory.workers.items()},
            foreign_gone=tuple(self.memory.gone),
        )
        self.state = replace(self.state, memory=memory, sums={}, summed={}, confirming=frozenset())
        self.state = replace(self.state, holds=frozenset(), untold={})
        self.actions.append(TellForkServer(message=Forget(task="")))
        for worker in sorted(memory.workers):
            self.stop(self.memory.workers[worker], "the log that it was started from is gone")

    # --- timers and confirmations ----------------------------------------------------------------

    def timer_fired(self, fired: TimerFired) -> None:
        match fired.name:
            case "adopt":
                self.state = replace(self.state, unheard=frozenset())
                self.join_if_complete()
            case "commits":
                if fired.key in self.state.sums:
                    self.close_sum(fired.key)
                    self.pace(fired.key)
                else:
                    self.state = replace(self.state, paced=self.state.paced - {fired.key})
            case "stop":
                record = self.memory.workers.get(fired.key)
                if record and record.stop != "no":
                    self.press(self.change(record, stop="term" if record.stop == "quit" else "kill"))
            case "held":
                untold = self.state.untold.get(fired.key)
                if untold is None:
                    self.forget_untold(lambda key: key == fired.key)
                else:
                    self.tell_held(untold)
            case "wait":
                for waiting in self.memory.waiting:
                    if waiting.command.worker == fired.key:
                        lack = "no slot became free" if self.state.store_port else "the fork server did not start"
                        self.give_up_start(waiting, f"{lack} in time")
            case _ as never:
                assert_never(never)

    def appended(self, event: Observation) -> None:
        match event:
            case WorkerExited(worker=worker):
                self.state = replace(self.state, confirming=self.state.confirming - {worker})
                gone = self.memory.gone.get(worker)
                if gone:
                    self.put_gone(worker, replace(gone, durable=True))
                self.actions.append(TellForkServer(message=ExitedAck(worker=worker)))
            case StepCommitted(task=task, generation=generation, last=last):
                others = {t: position for t, position in self.memory.reported.items() if t != task}
                self.remember(reported=_newest({**others, task: (generation, last)}, MAX_TASKS))
            case _:
                pass


def _newest(mapping: dict[K, V], limit: int) -> dict[K, V]:
    """The `limit` entries that were put in last."""
    return dict(list(mapping.items())[-limit:])
