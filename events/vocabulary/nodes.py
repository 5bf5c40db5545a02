"""Nodes: their agents, machines and accelerators, and their answers to commands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from msgspec import Meta

from unicrond.events.vocabulary.base import Observation, Value
from unicrond.events.vocabulary.field_defaults import always
from unicrond.events.vocabulary.field_types import (
    AUTHORITIES_MAX,
    SLOTS_MAX,
    AuthorityOrNone,
    Boot,
    Count,
    Duration,
    ErrorKind,
    Gpu,
    MachineHold,
    Micros,
    Name,
    NameOrNone,
    ObjectStores,
    Pid,
    Port,
    RepairNeed,
    Serial,
    Slots,
    Small,
    Text,
    Users,
    WorkerId,
    WorkerOrNone,
    Workers,
)
from unicrond.events.vocabulary.phrases import count, seconds, task_of


class StoreAddress(Value, frozen=True, kw_only=True):
    """A rendezvous store (TCPStore) that lives beside an agent, never in a rank."""

    host: Text
    port: Port


class MemoryService(Value, frozen=True, kw_only=True):
    """The address at which a node's agent takes and gives states of training. `token`: requesters must name it."""

    node: Name
    host: Text
    port: Port
    token: Text


class RunningWorker(Value, frozen=True, kw_only=True):
    """A worker that an agent found alive when it started, and adopts."""

    worker: WorkerId
    task: Name
    pid: Pid
    generation: Serial


class NodeJoined(Observation, frozen=True, kw_only=True):
    """An agent is up and serves `slots` workers; `workers` are those it adopted.

    `users`: those that tasks may run as, the first where a task names none; empty: all tasks run as the agent's own.
    `gpu`: the type of its GPUs; "": not known. `probe_port`: where the agent answers probes of its links; 0: nowhere.
    `domain`: what fails as one with it, as a rack or a switch; "": not told. `object_stores`: schemes of URLs to which
    its workers can write checkpoints.
    """

    is_noteworthy: ClassVar[bool] = True

    node: Name
    address: Text
    slots: Slots
    store: StoreAddress
    agent_boot: Boot
    version: Text
    workers: Annotated[tuple[RunningWorker, ...], Meta(max_length=SLOTS_MAX)] = always(())
    memory: MemoryService | None = always(None)
    users: Users = ()
    gpu: Gpu = ""
    probe_port: Port = 0
    domain: NameOrNone = ""
    object_stores: ObjectStores = ()

    def sentence(self) -> str:
        """Say it in one sentence."""
        adopted = f", adopting {count(len(self.workers), 'worker')}" if self.workers else ""
        return f"node {self.node} joined with {count(self.slots, 'slot')} at {self.address}{adopted}"

    def tasks_named(self) -> Iterator[str]:
        """Yield the tasks that it names."""
        for running in self.workers:
            yield running.task


class NodeLeft(Observation, frozen=True, kw_only=True):
    """An agent was stopped on purpose and has ended its workers."""

    is_noteworthy: ClassVar[bool] = True

    node: Name
    reason: Text

    def sentence(self) -> str:
        """Say it in one sentence."""
        return f"node {self.node} left: {self.reason}"


class NodeLeaving(Observation, frozen=True, kw_only=True):
    """An agent was asked to end, and will within `grace_us`: from now on the node is drained. NodeLeft follows once its
    workers are gone; if it does not, the workers ended with the agent, and that was no failure.
    """

    is_noteworthy: ClassVar[bool] = True

    node: Name
    grace_us: Duration
    reason: Text

    def sentence(self) -> str:
        """Say it in one sentence."""
        return f"node {self.node} is drained and leaves within {self.grace_us / 1e6:g} s: {self.reason}"


class MachineReported(Observation, frozen=True, kw_only=True):
    """The owner of the machine that the node is on wants this of it: `hold`, "" = no more. Kubernetes: by its Node
    object.
    """

    is_noteworthy: ClassVar[bool] = True

    node: Name
    hold: MachineHold
    reason: Text

    def sentence(self) -> str:
        """Say it in one sentence."""
        return f"machine of node {self.node}: {self.hold or 'in use'}{': ' if self.reason else ''}{self.reason}"


_NEEDS: dict[RepairNeed, str] = {
    "": "",
    "reset": " (it needs a reset)",
    "reboot": " (it needs a reboot of the node)",
    "replace": " (it needs to be replaced)",
    "other": " (it needs an action that this version does not know)",
}


class AcceleratorReported(Observation, frozen=True, kw_only=True):
    """An accelerator of the node has failed or has news, outside any process of ours. `accelerator`: its name.

    `worker`: the one on it, "" = none. `kind` None: nothing has failed; that is news for people, unless it `foretells`
    a failure: then the node is emptied and checked. `xid`: the driver's code, 0 = seen in counters or states.
    `repair_need`: what has to be done before it can be used again.
    """

    is_noteworthy: ClassVar[bool] = True

    node: Name
    accelerator: Text
    worker: WorkerOrNone
    kind: ErrorKind | None
    xid: Small
    message: Text
    repair_need: RepairNeed = ""
    predicts_failure: bool = False

    def sentence(self) -> str:
        """Say it in one sentence."""
        report = f" reports {self.kind}" if self.kind else " foretells a failure" if self.predicts_failure else ""
        where = f" (worker {self.worker})" if self.worker else ""
        return f"accelerator {self.accelerator} of {self.node}{where}{report}: {self.message}{_NEEDS[self.repair_need]}"

    def tasks_named(self) -> Iterator[str]:
        """Yield the tasks that it names."""
        if self.worker:
            yield task_of(self.worker)


class NodeChecked(Observation, frozen=True, kw_only=True):
    """The health check that the CheckNode of `command_id` asked for has ended. `detail`: its finding, in a line."""

    is_noteworthy: ClassVar[bool] = True

    node: Name
    command_id: Text
    has_passed: bool
    duration_us: Duration
    detail: Text

    def sentence(self) -> str:
        """Say it in one sentence."""
        how = "passed" if self.has_passed else "failed"
        return f"node {self.node} {how} its health check in {seconds(self.duration_us)}: {self.detail}"


class CommandApplied(Observation, frozen=True, kw_only=True):
    """The node has obeyed the command."""

    node: Name
    command_id: Text

    def sentence(self) -> str:
        """Say it in one sentence."""
        return f"node {self.node} applied command {self.command_id}"


class CommandFailed(Observation, frozen=True, kw_only=True):
    """The command was not obeyed. `readable_schema`: the newest schema that the agent reads, where it could not read
    the command at all; else 0.
    """

    is_noteworthy: ClassVar[bool] = True

    node: Name
    command_id: Text
    reason: Text
    readable_schema: Count = 0

    def sentence(self) -> str:
        """Say it in one sentence."""
        return f"node {self.node} did not apply command {self.command_id}: {self.reason}"


class Heartbeat(Observation, frozen=True, kw_only=True):
    """An agent lives. It is on the heartbeat stream, not on the event stream.

    `outbox_backlog`: observations that the event log has not taken for a second or more; `outbox_backlog_us`: the
    oldest's age. `read_seq`: the last entry of its commands that this agent has handled; 0: none yet.
    `dropped_messages`: of its workers within the last minute or two, beyond their budgets; `flooding_worker`: whose are
    most. `echo_beat`: the last of its sender's own beats that NATS has given back to it; 0: not said.
    `authorities`: the CA that has signed its certificate ("": it has none), then each CA that it trusts
    (events/trust/certificates.py); empty: not said.
    """

    node: Name
    agent_boot: Boot
    beat: Count
    workers: Workers
    load_milli: Count
    memory_free_bytes: Count
    outbox_backlog: Count = 0
    outbox_backlog_us: Micros = 0
    read_seq: Count = 0
    dropped_messages: Count = 0
    flooding_worker: WorkerOrNone = ""
    echo_beat: Count = 0
    authorities: Annotated[tuple[AuthorityOrNone, ...], Meta(max_length=AUTHORITIES_MAX)] = ()

    @property
    def echo_lag(self) -> int:
        """Return how many beats before this one have not come back to their sender; 0 where it does not say."""
        return max(0, self.beat - 1 - self.echo_beat) if self.echo_beat else 0

    def sentence(self) -> str:
        """Say it in one sentence."""
        return f"node {self.node} is alive, beat {self.beat}, {count(self.workers, 'worker')}"
