"""The agent's core: how one node answers its inputs. Pure: `handle(state, input) -> (state, actions)`.

Rules
-----
Commands
* A command id is answered once in the agent's memory, and memory outlives the agent: a command that comes
  again gets the same answer again and nothing else happens.
* The highest (term, epoch) seen is the fence. A command below it is refused as stale; it never acts.
* A start that has grown old (the node was away, and its commands waited for it) is refused as stale too.
* So is a command for an agent of another run directory: that agent may have carried it out, and its workers no longer
  exist. A command for a newer agent than this one is left to that one, and this one ends (duplicate_agent.py).
* A start or a check that was ordered from an earlier agent of the run directory, and has not begun, is void: the
  coordinator has ordered anew since it read that this agent has joined.
* A command that this version cannot read (a younger coordinator wrote it for a younger agent) is answered: it failed.
* StartWorker: a worker id is spawned at most once, ever. A start waits, bounded, while a slot is about to
  become free or the fork server is being started; with neither in sight it fails at once.
  Applied = the process exists.
* StopWorker: Quit, after `grace_s` SIGTERM, after `kill_after_s` SIGKILL; no Quit for a worker that has not
  connected yet and never was a member; with `kill` SIGKILL at once. Applied = the process is gone.
* InjectFault (commands.py): never by an old command. A fault that ends this agent is answered before it happens,
  or it would happen to the next agent again; every other one is answered afterwards.
* CheckNode: one check at a time, and none by an old command; its outcome is NodeChecked, then the command is applied.
  A check that the agent's end cuts off is not reported: the coordinator hears of the next agent, and orders it again.
* ProbeLinks: applied when the probes begin; what they find is LinksProbed, and comes later again if a peer gets well.
* Stacks (stopping.py): those of a worker are read before it is killed by a StopWorker with `kill`, and those of all
  members before a membership with `takes_stacks` reaches them.
* StartWorkers is as many StartWorker; each of them is answered.

Memberships
* The agent reads them in the log, of the tasks that it follows: those that have a worker here, from before the command
  to start the first one is acknowledged until an entry comes after the last one's end (shell.py). Their term is fenced
  as a command's is; they are not answered.
* An incomplete one has no effect (events/vocabulary/placements.py); parts outlive the agent.
* Where the leader confirms that a group has met (MembershipDecided.leader_confirms), no other member that keeps its
  state is reported.
* A task's generation never goes back. The newest one is kept, and goes to every local worker of the task that is or
  ever was a member (leavers must hear that they leave), and to later connections too.

Workers
* A worker that the fork server neither lists nor reports as ended has ended with its fork server: the kernel
  kills the workers of a dead fork server (so that no worker runs on unattended).
* The agent reports a late worker (watch.py) as it stands. Only the coordinator, which sees all members, decides which
  one hangs.
* Exits are acknowledged to the fork server only once the log holds them, so no exit status is ever lost.
* An exit is *expected* when the worker was ordered to stop, or ended with code 0 and its mark says that its part of the
  task is done, or it has asked to stop training. A member that ends with code 0 otherwise has left its training loop
  early: its program has failed. An unexpected one is reported with its cause (ErrorReported, unless the worker
  itself has reported it) and the end of its log, cause first.
* What a program declares to be busy with (hook.section) is reported once it has lasted for BUSY_TOLD_AFTER_S.
* Commits are summed to at most one StepCommitted per task and `commit_interval_s`; the first after a pause is
  reported at once. A sum is closed early by a commit that does not continue it, by a loss that is not finite, and by
  any news of its worker whose place in the log matters (regroup, park, trouble, completion, exit).

The life of an agent
* adopting -> up: with the log in reach, the fork server's inventory and the Hellos of the workers in it (bounded)
  the node joins. Exits that happened while there was no agent come first.
* Another log than the one remembered (known_event_log.py) is another cluster: nothing that is remembered holds there
  (terms and worker ids begin anew), and the workers of the old one are ended and not reported. The shell hands in only
  one that may be used (event_log_guard.py).
* The node joins again whenever its store's address changes (another fork server).
* Leave: no new starts, all workers are stopped, NodeLeft, Finish (the shell then retires the fork server).
* Drain: no new starts, NodeLeaving; the coordinator moves the workers away as it does for `unicronctl drain`. After the
  last has ended: NodeLeft, Finish. What still runs after `limit_s` gets SIGTERM, and SIGKILL after `kill_after_s`.
  Where the coordinator does not answer, workers whose state may be lost save it first (last_saves.py).
  HandOver: sums are closed, nothing else.

Floods
* What a worker says goes on within its budgets (worker_budgets.py, floods.py); what this agent sees by itself (an end,
  a stall, the GPUs) has none. Budgets are not remembered: the next agent begins anew.

States in memory
* A capture that a worker reports is copied to the first of its membership's peers; the next one while the
  copy is under way waits (copies.py). What the node's memory holds is reported at most once in `held_interval_s`.
* All nodes of a task capture at once, but report it one after the other: the log takes entry by entry, and a fault
  would wait behind a thousand of them.
* DropState, and the log's end: the fork server gives the memory up.

What does not live here: clocks, sockets, the outbox and its numbering, the wording of exit statuses (exit_causes.py).
"""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from unicrond.agents.core import commands as orders
from unicrond.agents.core import commits, exits, floods, joining, last_saves, memberships, reports, starting, stopping
from unicrond.agents.core import fork_server_messages as fork_server
from unicrond.agents.core import stored_states as kept_states
from unicrond.agents.core.agent_config import AgentConfig
from unicrond.agents.core.state import (
    MAX_TASKS,
    AcceleratorSaw,
    Action,
    AgentState,
    Appended,
    Checked,
    Commanded,
    Drain,
    ForkServerDied,
    ForkServerSaid,
    HandOver,
    Input,
    LeaveNow,
    LogDecision,
    LogSeen,
    MachineSaw,
    NodeFaultInjected,
    Remembered,
    Stalled,
    StateHeld,
    TellForkServer,
    TimerFired,
    Unreadable,
    WorkerConnected,
    WorkerDisconnected,
    WorkerSaid,
)
from unicrond.agents.core.transaction import Transition, newest_of
from unicrond.agents.core.worker_budgets import WorkerHeldUp
from unicrond.agents.protocol.messages import ProcessExitAck
from unicrond.events.queries.worker_queries import WarrantRenewal
from unicrond.events.vocabulary import LinksProbed, Observation, StacksTaken, StepCommitted, WorkerExited


def resume(config: AgentConfig, memory: Remembered) -> AgentState:
    """Return the state of an agent that starts, with what the one before it remembered (or an empty Remembered)."""
    if memory == Remembered():
        memory = Remembered(since_boot=config.agent_boot)
    return AgentState(config=config, memory=memory, summed=dict(memory.reported_commits))


def handle(state: AgentState, agent_input: Input) -> tuple[AgentState, list[Action]]:  # noqa: C901  # one case for each kind of input
    """Handle one input: return the new state and the actions to take, in this order. Never raise on an input."""
    transition = Transition(state)
    match agent_input:
        case Commanded():
            orders.commanded(transition, agent_input)
        case LogDecision():
            orders.apply_decision(transition, agent_input)
        case WarrantRenewal():
            memberships.renewed(transition, agent_input)
        case WorkerConnected(hello=hello):
            reports.connected(transition, hello)
        case WorkerSaid(worker=worker, message=message, now_us=now_us):
            reports.worker_said(transition, worker, message, now_us)
        case WorkerHeldUp():
            floods.held_up(transition, agent_input)
        case WorkerDisconnected(worker=worker):
            reports.disconnected(transition, worker)
        case ForkServerSaid(message=fork_message, log_tail=log_tail, mark=mark):
            fork_server.fork_server_said(transition, fork_message, log_tail, mark)
        case Stalled():
            reports.stalled(transition, agent_input)
        case ForkServerDied(cause=cause):
            fork_server.fork_server_died(transition, cause)
        case AcceleratorSaw():
            reports.accelerator_saw(transition, agent_input)
        case TimerFired():
            _timer_fired(transition, agent_input)
        case LogSeen():
            joining.log_seen(transition, agent_input)
        case MachineSaw():
            joining.machine_saw(transition, agent_input)
        case StateHeld(snapshot=snapshot):
            kept_states.report_held(transition, snapshot)
        case Appended(event=event):
            _appended(transition, event)
        case NodeFaultInjected(command_id=command_id, reason=reason):
            orders.injected(transition, command_id, reason)
        case Unreadable():
            orders.unreadable(transition, agent_input)
        case Checked():
            orders.checked(transition, agent_input)
        case LinksProbed() | StacksTaken():
            transition.append(agent_input)
        case Drain(reason=reason, limit_s=limit_s, has_log=has_log):
            joining.drain(transition, reason, limit_s, has_log=has_log)
        case LeaveNow(reason=reason):
            joining.leave(transition, reason)
        case HandOver():
            commits.close_all_sums(transition)
        case _ as never:
            assert_never(never)
    return transition.state, transition.actions


def _timer_fired(transition: Transition, fired: TimerFired) -> None:  # noqa: C901  # one case for each kind of timer
    match fired.name:
        case "adopt":
            transition.state = replace(transition.state, unheard=frozenset())
            joining.join_if_complete(transition)
        case "commits":
            if fired.key in transition.state.sums:
                commits.close_sum(transition, fired.key)
                commits.pace(transition, fired.key)
            else:
                transition.state = replace(transition.state, paced=transition.state.paced - {fired.key})
        case "stop":
            record = transition.memory.workers.get(fired.key)
            if record and record.stop != "no":
                stopping.press(transition, transition.change(record, stop="term" if record.stop == "quit" else "kill"))
        case "held":
            untold = transition.state.untold.get(fired.key)
            if untold is None:
                kept_states.forget_untold(transition, lambda key: key == fired.key)
            else:
                kept_states.tell_held(transition, untold)
        case "busy":
            reports.tell_busy(transition, fired.key)
        case "budget":
            reports.take_due(transition, fired.key)
        case "floods":
            floods.tell_drops(transition, fired.key)
        case "drain":
            joining.end_drain(transition)
        case "save":
            stage: last_saves.Stage = next(name for name in last_saves.STAGES if name == fired.key)
            last_saves.order(transition, stage)
        case "wait":
            for waiting in transition.memory.waiting_starts:
                if waiting.command.worker == fired.key:
                    lack = "no slot became free" if transition.state.store_port else "the fork server did not start"
                    starting.give_up_start(transition, waiting, f"{lack} in time")
        case _ as never:
            assert_never(never)


def _appended(transition: Transition, event: Observation) -> None:
    match event:
        case WorkerExited(worker=worker):
            transition.state = replace(transition.state, confirming=transition.state.confirming - {worker})
            exit_record = transition.memory.ended_workers.get(worker)
            if exit_record:
                exits.remember_end(transition, worker, replace(exit_record, durable=True))
            transition.actions.append(TellForkServer(message=ProcessExitAck(worker=worker)))
        case StepCommitted(task=task, generation=generation, last=last):
            rest = {t: position for t, position in transition.memory.reported_commits.items() if t != task}
            transition.remember(reported_commits=newest_of({**rest, task: (generation, last)}, MAX_TASKS))
        case _:
            pass
