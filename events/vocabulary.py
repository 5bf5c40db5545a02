"""The vocabulary: every fact, decision and command that may stand in the log.

Rules
-----
* Every type is immutable and says what *was observed*, *was decided* or *is commanded*; never how.
* Observations come from agents (producer = node name) or from people (producer = "api").
  Decisions and commands come from the coordinator alone, under its term.
* Times are integers in microseconds since the epoch, work is integer FLOP, losses are floats.
* A field is never renamed or given another meaning: a new schema number and an upcaster are the way.
* What is new (a type, a field, a value of a Literal) is entered in `schemas.py`, so that older readers are spared it.

What does not live here: the envelope (`envelope.py`), bytes (`codec.py`), subjects and headers
(`subjects.py`), one-line prose (`prose.py`).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta

from events.fields import always
from events.shape import Shape

# --- field types ---------------------------------------------------------------------------------

#: Names become NATS subject tokens and file names: no dots, no spaces, no slashes. (\Z: `$` would let a
#: trailing newline pass.)
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}\Z"
Name: TypeAlias = Annotated[str, Meta(pattern=NAME_PATTERN)]
NameOrNone: TypeAlias = Annotated[str, Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9_-]{0,62})?\Z")]
#: One incarnation of a worker process: "<task>.<number>"; a number is never used twice in a task.
WorkerId: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}\.[0-9]{1,9}\Z")]
WorkerOrNone: TypeAlias = Annotated[str, Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9_-]{0,62}\.[0-9]{1,9})?\Z")]
#: The public nkey of a user.
PublicKey: TypeAlias = Annotated[str, Meta(pattern=r"^U[A-Z2-7]{55}\Z")]
#: A user of a node, or none.
User: TypeAlias = Annotated[str, Meta(pattern=r"^([a-z_][a-z0-9_.-]{0,31})?\Z")]
Text: TypeAlias = Annotated[str, Meta(max_length=1024)]
#: A type of GPU, as the presets of the throughput model are named: "h100-80g".
Gpu: TypeAlias = Annotated[str, Meta(pattern=r"^([a-z0-9][a-z0-9_.-]{0,62})?\Z")]
LongText: TypeAlias = Annotated[str, Meta(max_length=32768)]
Micros: TypeAlias = Annotated[int, Meta(ge=0, lt=2**62)]
#: Bytes, beats, samples: what is only told, never looped over.
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=2**53)]
Positive: TypeAlias = Annotated[int, Meta(ge=1, lt=2**53)]
#: How long something took; a year and a day at most.
Duration: TypeAlias = Annotated[int, Meta(ge=0, le=366 * 86_400_000_000)]
SomeDuration: TypeAlias = Annotated[int, Meta(ge=1, le=366 * 86_400_000_000)]
#: Workers on one node: its GPUs, or its CPU slots.
Slots: TypeAlias = Annotated[int, Meta(ge=1, le=1024)]
#: Workers of a task or of a cluster, or ranks in it; the largest cluster this is for.
WORKERS_MAX = 131_072
Workers: TypeAlias = Annotated[int, Meta(ge=0, le=WORKERS_MAX)]
SomeWorkers: TypeAlias = Annotated[int, Meta(ge=1, le=WORKERS_MAX)]
#: Numbers that are given out one after the other and never again: terms, epochs, generations, replicas.
SERIAL_MAX = 10**9 - 1
Serial: TypeAlias = Annotated[int, Meta(ge=0, le=SERIAL_MAX)]
FirstSerial: TypeAlias = Annotated[int, Meta(ge=1, le=SERIAL_MAX)]
#: A producer's starts, numbered by its wall clock in microseconds where that is higher: up to the year 2112.
Boot: TypeAlias = Annotated[int, Meta(ge=0, lt=2**52)]
Iteration: TypeAlias = Annotated[int, Meta(ge=0, le=10**12)]
FirstIteration: TypeAlias = Annotated[int, Meta(ge=1, le=10**12)]
LearningRate: TypeAlias = Annotated[float, Meta(gt=0.0)]
#: Micro-batches, collectives, codes: what fits into 31 bits anywhere.
Small: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]
Size: TypeAlias = Annotated[int, Meta(ge=1, lt=2**31)]
Pid: TypeAlias = Annotated[int, Meta(ge=1, lt=2**31)]
ExitCode: TypeAlias = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
Signal: TypeAlias = Annotated[int, Meta(ge=1, le=127)]
#: FLOP/s of a whole cluster: 10,000 GPUs reach 5e18, which is above Count's bound.
Flops: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
#: A sum of samples' hashes modulo 2**61.
SamplesDigest: TypeAlias = Annotated[int, Meta(ge=0, lt=2**61)]
#: How many times as long as others.
Factor: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e6)]
Port: TypeAlias = Annotated[int, Meta(ge=0, le=65535)]
#: Weighted FLOP, correctly rounded: months of 10,000 GPUs are beyond 64 bits. The folded state holds the exact sums.
Work: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e40)]
#: A number of the configuration; finite.
Setting: TypeAlias = Annotated[float, Meta(ge=-1e18, le=1e18)]

#: "busy": with what the program has declared (hook.section). "done": its part of the task is complete.
Phase: TypeAlias = Literal[
    "start", "forward", "backward", "reduce", "step", "data", "checkpoint", "regroup", "unknown", "busy", "done"
]
#: What went wrong, as far as the reporter can tell. Severity is not here: it is the coordinator's.
ErrorKind: TypeAlias = Literal[
    "node_lost",
    "process_exit",
    "start_failed",
    "connection_broken",
    "collective_timeout",
    "cuda_error",
    "ecc_error",
    "nvlink_error",
    "driver_error",
    "out_of_memory",
    "store_error",
    "data_error",
    "nan_loss",
    "hang",
    "exception",
    "dma_error",
    "illegal_memory_access",
    "nccl_error",
    "corruption",
    "gpu_fault",
    "gpu_broken",
    "left_early",
]
#: How a process came to its end: by itself with a code, by a signal, by one with a core dump, or by SIGKILL from the
#: kernel's OOM killer. "maybe_oom_killed": this cannot be found out here, and no other cause is known.
ExitCause: TypeAlias = Literal["unknown", "exited", "signalled", "core_dumped", "oom_killed", "maybe_oom_killed"]
#: What a suspicion of silent corruption rests on.
CorruptionSign: TypeAlias = Literal["loss", "gradient_norm", "checksum"]
#: The response that an error kind asks for: 1 reconfigure, 2 restart the process, 3 reattempt in place.
SeverityLevel: TypeAlias = Literal[1, 2, 3]
#: How a plan was come by: looked up in the table, solved on rows that stood, solved from nothing.
PlanWay: TypeAlias = Literal["table", "incremental", "fresh"]
#: A fault that a person may order. The last two concern a node, the others a worker; kill either.
FaultKind: TypeAlias = Literal["kill", "stop", "exception", "nan", "slow", "hang", "exit", "oom", "xid", "drop_network"]
#: What broken hardware needs before it is used again, by its vendor's or its driver's word; "other": a word that this
#: version does not know; "": nothing was said.
#: What the keeper of a machine wants of it.
MachineHold: TypeAlias = Literal["", "cordon", "drain"]
RepairNeed: TypeAlias = Literal["", "reset", "reboot", "replace", "other"]
#: Where a worker's state came from, nearest first: its own, a live replica, the memory of a member's node, the memory
#: of another node, storage; "init": from the seed.
StateSource: TypeAlias = Literal["own", "replica", "memory", "peer", "checkpoint", "init"]
#: Of the built-in GPT's parameters and activations; gradients and the optimizer's masters are fp32.
Precision: TypeAlias = Literal["fp32", "bf16"]
#: Whose checkpoint it is: unicron's, or one of the program's own.
Saver: TypeAlias = Literal["unicron", "program"]
#: Where in an iteration an ordered fault happens; "": at the first chance.
FaultPhase: TypeAlias = Literal["", "forward", "backward", "reduce", "step", "checkpoint", "regroup"]


class Value(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, repr_omit_defaults=True
):
    """A part of an event, not an event by itself."""


class Event(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    repr_omit_defaults=True,
    tag=True,
):
    """Base of everything that may stand in the log; the class name is the wire tag.

    `is_decided`: a decision or a command; `is_request`. Asked of each entry of a log: `isinstance` with a base takes
    several times as long.
    """

    is_decided: ClassVar[bool] = False
    is_request: ClassVar[bool] = False


class Observation(Event, frozen=True, kw_only=True):
    """A fact that somebody saw. The fold never raises on one."""


class WorkerObservation(Observation, frozen=True, kw_only=True):
    """What was seen of a worker, told by its node's agent."""

    node: Name
    task: Name
    worker: WorkerId


class PlacedObservation(WorkerObservation, frozen=True, kw_only=True):
    """What was seen of a worker at an iteration of its group.

    Bounds: `generation` < 10**9; `iteration` <= 10**12.
    """

    generation: Serial
    iteration: Iteration


class StragglerSeen(PlacedObservation, frozen=True, kw_only=True):
    """`worker` tells of another one of its group, `straggler`, at place `rank` of the membership. `factor`: how many
    times as long it takes as the others.

    Bounds: `rank` 0..131072.
    """

    straggler: WorkerId
    straggler_node: Name
    rank: Workers
    factor: Factor


class Request(Observation, frozen=True, kw_only=True):
    """What a person asks for; its producer is the API, whatever node it names. `by`: the name of the token that came
    with it; "" where the API wants none."""

    is_request: ClassVar[bool] = True

    by: NameOrNone = ""


class Decision(Event, frozen=True, kw_only=True):
    """A choice of the coordinator, with its reason."""

    is_decided: ClassVar[bool] = True


class Command(Event, frozen=True, kw_only=True):
    """An order to one node's agent. `command_id` is "term.epoch.node.number"; agents act once per id. Each command has
    an `agent_boot`: the agent that it is for; the next agents of its run directory may obey, and no others. 0: any.

    Bounds: `epoch` < 10**9.
    """

    is_decided: ClassVar[bool] = True

    command_id: Text
    node: Name
    epoch: Serial


class BootCommand(Command, frozen=True, kw_only=True):
    """A command that has had its `agent_boot` since schema 4.

    Bounds: `agent_boot` < 2**52.
    """

    agent_boot: Boot = 0


# --- tasks ---------------------------------------------------------------------------------------


class ModelSpec(Value, frozen=True, kw_only=True):
    """A GPT in Megatron-core's terms.

    Bounds: `layers`, `hidden`, `heads`, `seq`, `vocab` < 2**31, >= 1.
    """

    layers: Size = always(2)
    hidden: Size = always(64)
    heads: Size = always(4)
    seq: Size = always(64)
    vocab: Size = always(256)
    dropout: Annotated[float, Meta(ge=0.0, lt=1.0)] = always(0.0)
    precision: Precision = "fp32"


class OptimizerSpec(Value, frozen=True, kw_only=True):
    """Adam with warm-up and cosine decay, as Megatron-core's OptimizerConfig and OptimizerParamScheduler.

    `distributed`: each replica holds its part of the optimizer's state, and a second copy of another's.

    Bounds: `warmup_iterations` <= 10**12; `decay_iterations` <= 10**12, >= 1.
    """

    lr: LearningRate = always(1e-3)
    min_lr: Annotated[float, Meta(ge=0.0)] = always(0.0)
    warmup_iterations: Iteration = always(0)
    decay_iterations: FirstIteration | None = always(None)
    weight_decay: Annotated[float, Meta(ge=0.0)] = always(0.01)
    clip_grad: Annotated[float, Meta(ge=0.0)] = always(1.0)
    distributed: bool = always(False)


class CheckpointSpec(Value, frozen=True, kw_only=True):
    """Where and how often the task's state is written, in iterations; None: from the measured cost and the failure
    rate (Young/Daly). `interval`: to storage, 0 = only at the end. `memory_interval`: to the node's memory, 0 = never.

    Bounds: `interval`, `memory_interval` <= 10**12; `keep` < 2**31, >= 1.
    """

    dir: Text = always("")
    interval: Iteration | None = always(None)
    keep: Size = always(2)
    memory_interval: Iteration | None = always(None)


#: A variable in a task's environment: the number of its lanes.
LANES = "UNICRON_LANES"
#: Another: what is done about bits that differ from worker to worker, one of DETERMINISM.
DETERMINISTIC = "UNICRON_DETERMINISTIC"
DETERMINISM = ("check", "require", "off")


class LayoutSpec(Value, frozen=True, kw_only=True):
    """A layout that a task may have: `tp` * `pp` workers in a replica, `vpp` chunks of the model in each stage, experts
    over `ep` workers. `throughput`: T(x) in it, as in TaskSpec. `micro_batch`: samples of a micro-batch in it; 0 in all
    layouts of a task: as many as that has.

    Bounds: `tp`, `pp`, `vpp`, `ep` 1..131072; `throughput` < 2**63; `micro_batch` < 2**31.
    """

    tp: SomeWorkers = always(1)
    pp: SomeWorkers = always(1)
    throughput: dict[str, Flops] = always({})
    micro_batch: Small = 0
    vpp: SomeWorkers = 1
    ep: SomeWorkers = 1

    @property
    def shape(self) -> Shape:
        """The layout."""
        return Shape(self.tp, self.pp, self.vpp, self.ep, self.micro_batch)


class GpuSpec(Value, frozen=True, kw_only=True):
    """What a task achieves on nodes with another type of GPU: T(x) for layouts of the task; those that are not named
    achieve there what the task's own `throughput` says."""

    gpu: Gpu
    layouts: tuple[LayoutSpec, ...] = always(())


class TaskSpec(Value, frozen=True, kw_only=True):
    """One training job as its file describes it (YAML, see docs/use/task-files.md).

    `min_workers` and `max_workers` are workers (ranks), multiples of tp * pp. `global_batch` and
    `micro_batch` are samples. `throughput` is T(x): workers -> achieved FLOP/s; empty = linear. `start_timeout_s`: how
    long a worker may take from its start until it is ready; None: as the cluster's policy says. `secrets`: environment
    variables whose values are on the node, each "file:PATH" or "env:NAME" of the agent's. `run_as`: the user of the
    nodes whose processes the workers are; "": the first of each node's list, or the agent's own. `preload`: modules
    that a process of the task's own imports once on each node, and the workers start with.
    `layouts`: those that the plan may give it, in the order that decides ties; empty: its own stays until a person
    asks for another. With some `min_workers` and `max_workers` need not be multiples of tp * pp.
    `gpus`: T on types of GPU for which it is not `throughput`. `vpp`: chunks of the model in each pipeline stage. `ep`:
    over how many of a tensor-parallel group's workers the experts are. Of both 0: as the program has it.

    Bounds: `min_workers`, `max_workers`, `tp`, `pp` 1..131072; `global_batch`, `micro_batch` < 2**31, >= 1;
    `iterations` <= 10**12, >= 1; `seed` < 2**53; `throughput` < 2**63; `vpp`, `ep` 0..131072.
    """

    name: Name
    weight: Annotated[float, Meta(gt=0.0, le=1e6)] = always(1.0)
    min_workers: SomeWorkers = always(1)
    max_workers: SomeWorkers = always(1)
    tp: SomeWorkers = always(1)
    pp: SomeWorkers = always(1)
    entry: Text = always("gpt")
    args: tuple[Text, ...] = always(())
    env: dict[str, Text] = always({})
    cwd: Text = always("")
    model: ModelSpec = always(ModelSpec())
    optimizer: OptimizerSpec = always(OptimizerSpec())
    data: Text = always("")
    global_batch: Size = always(8)
    micro_batch: Size = always(1)
    iterations: FirstIteration = always(100)
    seed: Count = always(1234)
    checkpoint: CheckpointSpec = always(CheckpointSpec())
    throughput: dict[str, Flops] = always({})
    backend: Literal["auto", "gloo", "nccl"] = always("auto")
    #: "exact": no bit of a sum depends on the replicas or their number. "float": the sum follows the deal.
    accumulation: Literal["float", "exact"] = always("float")
    start_timeout_s: Annotated[float, Meta(gt=0.0, le=1e6)] | None = None
    secrets: dict[str, Text] = {}
    run_as: User = ""
    preload: tuple[Text, ...] = ()
    layouts: tuple[LayoutSpec, ...] = ()
    gpus: tuple[GpuSpec, ...] = ()
    vpp: Workers = 0
    ep: Workers = 0

    @property
    def cut(self) -> Shape:
        """The layout, as far as a state depends on it."""
        return Shape(self.tp, self.pp, self.vpp or 1, self.ep or 1)

    @property
    def shape(self) -> Shape:
        """The layout, by which a plan tells it from the task's others."""
        varies = any(layout.micro_batch for layout in self.layouts)
        return self.cut._replace(micro_batch=self.micro_batch if varies else 0)

    @property
    def replica_workers(self) -> int:
        """Workers in one data-parallel replica: tp * pp."""
        return self.tp * self.pp

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one iteration over all replicas."""
        return self.global_batch // self.micro_batch

    @property
    def fewest_micro_batches(self) -> int:
        """The same in the layout of the task that has the largest."""
        return self.global_batch // max([self.micro_batch, *(layout.micro_batch for layout in self.layouts)])

    @property
    def lanes(self) -> int:
        """In how many parts an iteration's gradients are summed, whoever computes them
        (agents/trainer/gradients/lanes.py). 0: the sum follows the deal.

        A constant of the task, which its environment carries through all changes of its size: by default as many as
        there may be replicas when it is submitted."""
        if self.accumulation != "exact":
            return 0
        wanted = self.env.get(LANES, "")
        sizes = [self.replica_workers, *(layout.tp * layout.pp for layout in self.layouts)]
        replicas = self.max_workers // min(sizes)
        return max(1, min(int(wanted) if wanted.isdecimal() else replicas, self.fewest_micro_batches))


# --- parts ---------------------------------------------------------------------------------------


class Member(Value, frozen=True, kw_only=True):
    """One worker's place in a membership: shard `shard` of data-parallel replica `replica`.

    Bounds: `replica` < 10**9; `shard` 0..131072.
    """

    worker: WorkerId
    node: Name
    replica: Serial
    shard: Workers


class StoreAddress(Value, frozen=True, kw_only=True):
    """A rendezvous store (TCPStore) that lives beside an agent, never in a rank.

    Bounds: `port` 0..65535.
    """

    host: Text
    port: Port


class MemoryService(Value, frozen=True, kw_only=True):
    """Where a node's agent takes and gives states of training. `token`: requesters must name it.

    Bounds: `port` 0..65535.
    """

    node: Name
    host: Text
    port: Port
    token: Text


class RunningWorker(Value, frozen=True, kw_only=True):
    """A worker that an agent found alive when it started (adoption).

    Bounds: `pid` < 2**31, >= 1; `generation` < 10**9.
    """

    worker: WorkerId
    task: Name
    pid: Pid
    generation: Serial


class SeatRun(Value, frozen=True, kw_only=True, array_like=True):
    """`count` members of a task on one node, with consecutive numbers at consecutive seats (events/seats.py).

    `number`, `seat`: of the first one. `joins`: they are joiners. On the wire a bare array: it gets no further field.

    Bounds: `number` < 10**9; `seat` < 2**53; `count` 1..1024.
    """

    node: Name
    number: Serial
    seat: Count
    count: Slots
    joins: bool


class ToldOnce(Value, frozen=True, kw_only=True):
    """What nodes hear of a membership in the decision itself: the last of the members' runs in `seats`; `parts`
    MembershipParts before the decision hold the runs before them. `size`: tp * pp. The rest: see SetMembership.

    `lead_tells`: the first member's WorkerRegrouped says that all have met. Agents report no other member that keeps
    its state: of a large group that is one event instead of one per member. Joiners are reported as ever.

    Bounds: `size` 1..131072; `parts` < 2**31; `mtbf_us` < 2**62.
    """

    size: SomeWorkers
    seats: tuple[SeatRun, ...]
    parts: Small
    peers: tuple[MemoryService, ...]
    mtbf_us: Micros
    handover: bool
    stop: Text
    lead_tells: bool = False


class NodeRun(Value, frozen=True, kw_only=True, array_like=True):
    """The next `count` workers of a plan stand on `node`. On the wire a bare array: it gets no further field.

    Bounds: `count` 1..1024.
    """

    node: Name
    count: Slots


class Start(Value, frozen=True, kw_only=True, array_like=True):
    """One worker to start, by its number in the task (see StartWorker). On the wire a bare array: it gets no
    further field.

    Bounds: `number`, `replica` < 10**9; `shard` 0..131072.
    """

    number: Serial
    replica: Serial
    shard: Workers
    store: StoreAddress


class TaskAssignment(Value, frozen=True, kw_only=True):
    """What one plan gives one task. `replicas`: per replica, the node of each of its tp * pp shards.

    `waf`: weighted achieved FLOP/s, F(t, workers). `nodes`, `replica_workers`: the same as `replicas`, which is empty
    then, as runs over all shards of all replicas, and tp * pp; 0: `replicas` says it. `tp`, `pp`, `vpp`, `ep`,
    `micro_batch`: the layout that the plan has chosen, of a task that has a choice; `tp` 0: the task's own.

    Bounds: `workers`, `replica_workers`, `tp`, `pp` 0..131072; `waf` < 2**63; `vpp`, `ep` 1..131072;
    `micro_batch` < 2**31.
    """

    task: Name
    workers: Workers
    replicas: tuple[tuple[Name, ...], ...]
    waf: Flops
    nodes: tuple[NodeRun, ...] = ()
    replica_workers: Workers = 0
    tp: Workers = 0
    pp: Workers = 0
    vpp: SomeWorkers = 1
    ep: SomeWorkers = 1
    micro_batch: Small = 0

    @property
    def shape(self) -> Shape | None:
        """The layout that the plan has chosen; None: the task's own."""
        return Shape(self.tp, self.pp, self.vpp, self.ep, self.micro_batch) if self.tp else None


class Evidence(Value, frozen=True, kw_only=True):
    """The last beat that was seen of a node: its sequence and receive time on the heartbeat stream.

    Bounds: `beat_seq` < 2**53; `beat_at_us` < 2**62.
    """

    beat_seq: Count
    beat_at_us: Micros


# --- observations --------------------------------------------------------------------------------


class NodeJoined(Observation, frozen=True, kw_only=True):
    """An agent is up and serves `slots` workers; `workers` are those it adopted. `users`: that tasks may run as, the
    first where a task names none; empty: all tasks run as the agent's own. `since_boot`: the first agent of its run
    directory; commands for earlier agents are void. 0: not told. `gpu`: the type of its GPUs; "": not told.

    Bounds: `slots` 1..1024; `agent_boot`, `since_boot` < 2**52.
    """

    node: Name
    address: Text
    slots: Slots
    store: StoreAddress
    agent_boot: Boot
    version: Text
    workers: tuple[RunningWorker, ...] = always(())
    memory: MemoryService | None = always(None)
    users: tuple[User, ...] = ()
    since_boot: Boot = 0
    gpu: Gpu = ""


class NodeLeft(Observation, frozen=True, kw_only=True):
    """An agent was stopped on purpose and has ended its workers."""

    node: Name
    reason: Text


class NodeLeaving(Observation, frozen=True, kw_only=True):
    """An agent was asked to end, and will within `grace_us`: from now on the node is drained. NodeLeft follows once its
    workers are gone; if it does not, the workers ended with the agent, and that was no failure.

    Bounds: `grace_us` <= 366 days.
    """

    node: Name
    grace_us: Duration
    reason: Text


class MachineReported(Observation, frozen=True, kw_only=True):
    """The keeper of the machine that the node is on wants this of it: `hold`, "" = no more. Kubernetes: by its Node
    object."""

    node: Name
    hold: MachineHold
    reason: Text


class WorkerStarted(WorkerObservation, frozen=True, kw_only=True):
    """The fork server has a process for the worker.

    Bounds: `pid` < 2**31, >= 1.
    """

    pid: Pid


class WorkerReady(WorkerObservation, frozen=True, kw_only=True):
    """The worker has built its model and waits for a membership."""


class WorkerRegrouped(PlacedObservation, frozen=True, kw_only=True):
    """The worker is a member of `generation`'s group and goes on at `iteration` (the next to commit).

    `dealt`: micro-batches of lost replicas that fell to this worker in that iteration.
    `duration_us`: from receiving the membership to being in the group.
    `source`: where its state came from.
    `others_dealt`: micro-batches of lost replicas that fell to the other members, told by a lead that tells for all
    (ToldOnce.lead_tells).

    Bounds: `dealt`, `others_dealt` < 2**31; `duration_us` <= 366 days.
    """

    dealt: Small
    duration_us: Duration
    source: StateSource
    others_dealt: Small = 0


class WorkerParked(PlacedObservation, frozen=True, kw_only=True):
    """The worker left its group at an iteration boundary for a membership without it, and waits for its end.

    `iteration`: the last one it committed.
    """


class WorkerExited(WorkerObservation, frozen=True, kw_only=True):
    """A worker's process ended. Exactly one of `exit_code` and `signal` is set.

    `iteration`: the one that its mark named, 0 = none; `computed`: how many micro-batches of that it had finished, at
    least: they went with it.

    Bounds: `exit_code` < 2**31, >= -2147483648; `signal` 1..127; `iteration` <= 10**12; `computed` < 2**31.
    """

    exit_code: ExitCode | None
    signal: Signal | None
    expected: bool
    log_tail: LongText = always("")
    cause: ExitCause = always("unknown")
    iteration: Iteration = 0
    computed: Small = 0


class ErrorReported(WorkerObservation, frozen=True, kw_only=True):
    """An error seen inside or around a worker that still lives or is about to die.

    `generation`: the newest that the worker had joined; a report that is older than its worker is void. `peer`: the
    other end of the connection that broke, where that is known; `lost`: all members of the group to whom the connection
    was dead by then.

    Bounds: `generation` < 10**9; `iteration` <= 10**12.
    """

    kind: ErrorKind
    generation: Serial
    iteration: Iteration
    phase: Phase
    message: Text
    detail: LongText = always("")
    peer: WorkerOrNone = always("")
    lost: Annotated[tuple[WorkerId, ...], Meta(max_length=64)] = ()


class Checksums(Value, frozen=True, kw_only=True):
    """Of the first shard: of the bits of the parameters after iteration `after`, and of those of the gradients' sums of
    the iteration after it. 0: none was made.

    Bounds: `after` <= 10**12; `parameters`, `sums` < 2**61.
    """

    after: Iteration
    parameters: SamplesDigest
    sums: SamplesDigest = 0


class StepCommitted(WorkerObservation, frozen=True, kw_only=True):
    """Iterations first..last were committed by all replicas of `generation`.

    `samples_digest`: sum mod 2**61 of sample_hash(iteration, sample) over every sample used.
    `micro_batches_by_rank`: finished micro-batches per replica, in replica order.
    `redone`: micro-batches computed anew because a replica was lost. `loss`: of iteration `last`.
    `duration_us`: wall time of first..last. `checksums`: the newest that were made in these; None: none was.

    Bounds: `generation` < 10**9; `first`, `last` <= 10**12, >= 1; `samples` < 2**53; `samples_digest` < 2**61;
    `duration_us` <= 366 days; `micro_batches_by_rank`, `redone` < 2**31.
    """

    generation: Serial
    first: FirstIteration
    last: FirstIteration
    samples: Count
    samples_digest: SamplesDigest
    loss: float
    duration_us: Duration
    micro_batches_by_rank: tuple[Small, ...]
    redone: Small = always(0)
    checksums: Checksums | None = None


class CheckpointSaved(WorkerObservation, frozen=True, kw_only=True):
    """State after `iteration` is durable at `path`.

    Bounds: `iteration` <= 10**12; `size_bytes` < 2**53; `duration_us` <= 366 days.
    """

    iteration: Iteration
    path: Text
    size_bytes: Count
    duration_us: Duration


class SaveFailed(WorkerObservation, frozen=True, kw_only=True):
    """The state after `iteration` was not written; the one saved before stays, and training goes on.

    `by` "unicron": its own checkpoint; "program": one that the program writes by itself (Megatron-LM's `--save`).
    `reason` "": a later one was written, which the program alone tells of so.

    Bounds: `iteration` <= 10**12.
    """

    iteration: Iteration
    by: Saver
    reason: Text


class TaskCompleted(WorkerObservation, frozen=True, kw_only=True):
    """The last iteration is committed; `params_digest` identifies the final parameters.

    Bounds: `iteration` <= 10**12.
    """

    iteration: Iteration
    loss: float
    params_digest: Text


class HangSuspected(PlacedObservation, frozen=True, kw_only=True):
    """A worker's iteration lasts longer than `limit_us`, more than three times the usual; told by its own agent.

    From the worker's phase mark (agents/protocol/marks.py): `entered` counts the collectives across replicas that it
    has entered in `generation`, `waiting`: it has not left the last of them. `still_us`: for how long the mark has
    not changed. `stopped`: the kernel shows the process as stopped.

    Bounds: `micro_batch`, `told` < 2**31; `entered` < 2**53; `still_us`, `limit_us` <= 366 days.
    """

    phase: Phase
    micro_batch: Small
    entered: Count
    waiting: bool
    stopped: bool
    still_us: Duration
    limit_us: Duration
    #: What it had declared to be busy with, for at most so long (hook.section); "": nothing.
    busy: Text = ""
    #: How often that was told of this iteration; 0 in logs older than the field.
    told: Small = 0


class WorkerBusy(WorkerObservation, frozen=True, kw_only=True):
    """The worker's program is busy with what it has declared, for `at_most_us` (hook.section): no hang before that.

    `what` "": it is over. Told only of what lasts for a while.

    Bounds: `at_most_us` <= 366 days.
    """

    what: Text
    at_most_us: Duration


class WorkerWaits(WorkerObservation, frozen=True, kw_only=True):
    """The worker has answered to the membership of `generation`, and has waited for a while for the others.

    Bounds: `generation` < 10**9.
    """

    generation: Serial


class StopAsked(WorkerObservation, frozen=True, kw_only=True):
    """The program wants its training to end before the last iteration (hook.stop), and says why.

    `left`: it has left the training loop after `iteration`, which it has committed; its state is saved.

    Bounds: `iteration` <= 10**12.
    """

    iteration: Iteration
    reason: Text
    left: bool = False


class DegradationObserved(PlacedObservation, frozen=True, kw_only=True):
    """The task's iterations have taken more than 1.1 times the usual for a while. Told by the lead's agent.

    `slowest`: the worker whose computing, waits excluded, takes longest per micro-batch; "" where none stands out.
    `compute_us`: its time per micro-batch, `others_us`: the median of the other replicas' (0: there are none).

    Bounds: `iteration_us`, `usual_us`, `compute_us`, `others_us` <= 366 days.
    """

    iteration_us: Duration
    usual_us: Duration
    slowest: WorkerOrNone
    compute_us: Duration
    others_us: Duration


class StragglerObserved(StragglerSeen, frozen=True, kw_only=True):
    """A replica has been slower than the others at the same work, for at least some seconds; told once by the first
    replica's worker of its shard, and again when its `factor` has changed.

    `straggler`: its worker in that shard, `rank`: its place in the membership. `factor`: its own time per micro-batch
    over the median of the other replicas' in the same iterations; `compute_us` and `others_us`: what that is. Since
    about the beginning of `since_iteration`, `since_us` by the teller's clock.

    Bounds: `compute_us`, `others_us` <= 366 days; `since_iteration` <= 10**12; `since_us` < 2**62.
    """

    compute_us: Duration
    others_us: Duration
    since_iteration: Iteration
    since_us: Micros


class StragglerRecovered(StragglerSeen, frozen=True, kw_only=True):
    """It is as quick as the other replicas again; `factor`: what is left."""


class CorruptionSuspected(PlacedObservation, frozen=True, kw_only=True):
    """Numbers that no sound replica should have; `worker` tells it, `suspect` has them ("": unknown).

    `sign` "checksum": its parameters differ from those of the majority; else its share of the iteration has a loss or
    a gradient norm far off the usual, `value` instead of about `usual`.
    """

    sign: CorruptionSign
    suspect: WorkerOrNone
    value: float
    usual: float


class AcceleratorReported(Observation, frozen=True, kw_only=True):
    """What was seen of an accelerator of the node, outside any process of ours. `accelerator`: its name.

    `worker`: the one on it, "" = none. `kind` None: nothing has failed; that is news for people, unless it `foretells`
    a failure: then the node is emptied and checked. `xid`: the driver's code, 0 = seen in counters or states. `needs`:
    what has to be done before it can be used again.

    Bounds: `xid` < 2**31.
    """

    node: Name
    accelerator: Text
    worker: WorkerOrNone
    kind: ErrorKind | None
    xid: Small
    message: Text
    needs: RepairNeed = ""
    foretells: bool = False


class NodeChecked(Observation, frozen=True, kw_only=True):
    """How the health check ended that the CheckNode of `command_id` asked for. `detail`: what was found, in a line.

    Bounds: `duration_us` <= 366 days.
    """

    node: Name
    command_id: Text
    passed: bool
    duration_us: Duration
    detail: Text


class StateKept(Observation, frozen=True, kw_only=True):
    """The node's memory holds shard `shard` of the task's state after `iteration`. Told now and then, not each time.

    `origin`: the node whose worker captured it; another one's is a copy. `duration_us`: for how long training
    stood still for it; of a copy, how long it took to come. `shards`: how many make up the state in this layout, its
    tp * pp; 0 in logs older than the field.

    Bounds: `shard`, `shards` 0..131072; `iteration` <= 10**12; `generation` < 10**9; `size_bytes` < 2**53;
    `duration_us` <= 366 days.
    """

    node: Name
    task: Name
    shard: Workers
    iteration: Iteration
    generation: Serial
    origin: Name
    size_bytes: Count
    duration_us: Duration
    shards: Workers = always(0)


class PeersRemembered(Observation, frozen=True, kw_only=True):
    """An agent that has adopted workers of the task says to which nodes it copies the task's state.

    By what its predecessor has written down: on a full disk that is not what it was told last.
    """

    node: Name
    task: Name
    peers: tuple[Name, ...]


class StateTaken(WorkerObservation, frozen=True, kw_only=True):
    """The worker has the state after `iteration`, of `size_bytes`, from `source` within `duration_us`.

    `tried`: nearer or newer sources that failed, and why. `storage_iteration`: the newest on storage, the farthest
    source; `saved_us`: what training again from there would have taken, at the pace last measured.
    `resharded_from`: the layout of what was taken, where it is another than the task's; else "".

    Bounds: `generation` < 10**9; `iteration`, `storage_iteration` <= 10**12; `size_bytes` < 2**53; `duration_us` <=
    366 days; `saved_us` < 2**62.
    """

    generation: Serial
    source: StateSource
    iteration: Iteration
    size_bytes: Count
    duration_us: Duration
    tried: tuple[Text, ...] = always(())
    storage_iteration: Iteration = always(0)
    saved_us: Micros = always(0)
    resharded_from: Text = always("")


class CommandApplied(Observation, frozen=True, kw_only=True):
    """The node has obeyed the command."""

    node: Name
    command_id: Text


class CommandFailed(Observation, frozen=True, kw_only=True):
    """The command was not obeyed. `reads`: the newest schema that the agent reads, where it could not read the command
    at all; else 0.

    Bounds: `reads` < 2**53.
    """

    node: Name
    command_id: Text
    reason: Text
    reads: Count = 0


class TaskSubmitted(Request, frozen=True, kw_only=True):
    """A person asks for a task to be trained."""

    spec: TaskSpec


class TaskCancelled(Request, frozen=True, kw_only=True):
    """A person ends a task before it is complete."""

    task: Name
    reason: Text


class ReshapeRequested(Request, frozen=True, kw_only=True):
    """A person asks for other replicas of a running task, of `tp` * `pp` workers; it goes on from where it stands.

    `vpp`, `ep`: as in TaskSpec. `micro_batch`: 0: as it is. `iterations`, `lr`: with another end and another learning
    rate; None: as they are.

    Bounds: `tp`, `pp`, `min_workers`, `max_workers`, `vpp`, `ep` 1..131072; `iterations` <= 10**12, >= 1;
    `micro_batch` < 2**31.
    """

    task: Name
    tp: SomeWorkers
    pp: SomeWorkers
    min_workers: SomeWorkers
    max_workers: SomeWorkers
    reason: Text
    iterations: FirstIteration | None = None
    lr: LearningRate | None = None
    vpp: SomeWorkers = 1
    ep: SomeWorkers = 1
    micro_batch: Small = 0

    @property
    def shape(self) -> Shape:
        """The layout."""
        return Shape(self.tp, self.pp, self.vpp, self.ep, self.micro_batch)


class NodeCordoned(Request, frozen=True, kw_only=True):
    """The node gets no new workers. `drain`: those that it has leave it too, at an iteration boundary. `until_return`:
    until an agent joins under the name without workers. `agent_boot`, `address`: only if the node has that agent, or is
    there; 0 and "": whatever it is.

    `empty_by_us`: with `drain`, when the node is to be empty at the latest (log time): its workers stay until there is
    room for them elsewhere, or until that time is near (unicrond/core/departures.py); 0: they leave now.

    Bounds: `agent_boot` < 2**52; `empty_by_us` < 2**62.
    """

    node: Name
    drain: bool
    reason: Text
    until_return: bool = False
    agent_boot: Boot = 0
    address: Text = ""
    empty_by_us: Micros = 0


class NodeUncordoned(Request, frozen=True, kw_only=True):
    """The node may have workers again; an isolated one, whatever it waits for. `agent_boot`, `address`: see
    NodeCordoned.

    Bounds: `agent_boot` < 2**52.
    """

    node: Name
    reason: Text
    agent_boot: Boot = 0
    address: Text = ""


class MaintenancePlanned(Request, frozen=True, kw_only=True):
    """The nodes are to be empty from `from_us` to `until_us` (log time); a window `w<seq>` by this entry's number.

    Bounds: `from_us`, `until_us` < 2**62.
    """

    nodes: tuple[Name, ...]
    from_us: Micros
    until_us: Micros
    reason: Text


class MaintenanceCancelled(Request, frozen=True, kw_only=True):
    """The maintenance window is no longer wanted, or is over before its time."""

    window: Text
    reason: Text


class ForgetRequested(Request, frozen=True, kw_only=True):
    """A node that has left or is lost is to be forgotten. `leave`: one that is up is to leave for good first.
    `agent_boot`, `address`: see NodeCordoned.

    Bounds: `agent_boot` < 2**52.
    """

    node: Name
    leave: bool
    reason: Text
    agent_boot: Boot = 0
    address: Text = ""


class NodeEnrolled(Request, frozen=True, kw_only=True):
    """The node's agent may log in with this key, and with no other (events/logins.py).

    `expires_us`: if the node has not joined by then, the login ends; 0: never.

    Bounds: `expires_us` < 2**62.
    """

    node: Name
    key: PublicKey
    expires_us: Micros


class NodeRevoked(Request, frozen=True, kw_only=True):
    """The node's login has ended; its workers have not."""

    node: Name
    reason: Text


class Fault(Value, frozen=True, kw_only=True):
    """A fault that somebody ordered, for a worker or (`worker` "") for its node.

    `at_iteration` 0: at once, or at the next `phase` where one is given. `seconds`: of a slow iteration's
    delay, or until a dropped network is mended (0: never). `xid`: the code that the accelerator is to report.
    `spared`: what follows is held against neither node nor task (`unicronctl inject` without --counts).

    Bounds: `at_iteration` <= 10**12; `xid` < 2**31.
    """

    kind: FaultKind
    worker: WorkerOrNone = always("")
    at_iteration: Iteration = always(0)
    phase: FaultPhase = always("")
    seconds: Annotated[float, Meta(ge=0.0, le=86400.0)] = always(0.0)
    xid: Small = always(0)
    spared: bool = False


class InjectionRequested(Request, frozen=True, kw_only=True):
    """Somebody orders a fault on `node`; only a coordinator that was started for that takes it."""

    node: Name
    fault: Fault


class Heartbeat(Observation, frozen=True, kw_only=True):
    """An agent lives. Stands on the heartbeat stream, not on the event stream.

    `kept_back`: observations that the event log has not taken for a second or more, `kept_back_us`: the oldest's age.
    `read_seq`: the last entry of its commands that this agent has handled; 0: none yet.

    Bounds: `agent_boot` < 2**52; `beat`, `load_milli`, `memory_free_bytes`, `kept_back`, `read_seq` < 2**53;
    `workers` 0..131072; `kept_back_us` < 2**62.
    """

    node: Name
    agent_boot: Boot
    beat: Count
    workers: Workers
    load_milli: Count
    memory_free_bytes: Count
    kept_back: Count = 0
    kept_back_us: Micros = 0
    read_seq: Count = 0


# --- decisions -----------------------------------------------------------------------------------


class CoordinatorStarted(Decision, frozen=True, kw_only=True):
    """A coordinator takes over. Decisions of lower terms that come after this are inert.

    `policy`: the numbers that its decisions depend on, so that they can be made again from the log alone;
    empty in logs older than the field.
    `severity`: error kinds whose severity the configuration sets; the fold looks here first.
    `process`: the claimant, as HOST:PID; without it two claims of one term at the same time would look like one.
    `taken_us`: when a person last had a coordinator take whatever log there was, by that one's clock; 0: never. Agents
    take another log than theirs for their own where it is younger than what they know.

    Bounds: `term` < 10**9, >= 1; `taken_us` < 2**62.
    """

    term: FirstSerial
    version: Text
    policy: dict[Name, Setting] = always({})
    severity: dict[ErrorKind, SeverityLevel] = always({})
    process: Text = always("")
    taken_us: Micros = 0


class NodeLost(Decision, frozen=True, kw_only=True):
    """The node's agent is silent or away: its workers count as lost. `evidence`: the sign that decided it."""

    node: Name
    evidence: Evidence
    reason: Text


class NodeReturned(Decision, frozen=True, kw_only=True):
    """A lost node's agent gives signs of life again. `evidence`: the sign that decided it."""

    node: Name
    evidence: Evidence


class NodeForgotten(Decision, frozen=True, kw_only=True):
    """The node has gone for good: nothing is held against its name any more, and nothing is kept for it."""

    node: Name
    reason: Text


class NodeIsolated(Decision, frozen=True, kw_only=True):
    """The node gets no worker until `until_us` (log time), or until it is readmitted where that is None.

    Bounds: `until_us` < 2**62.
    """

    node: Name
    until_us: Micros | None
    reason: Text


class DrainBegun(Decision, frozen=True, kw_only=True):
    """The workers of a node that is to be empty by a time leave it now, before that time is near."""

    node: Name
    reason: Text


class NodeReadmitted(Decision, frozen=True, kw_only=True):
    """The node's isolation is over: it may get workers again."""

    node: Name
    reason: Text


class RepairEnded(Decision, frozen=True, kw_only=True):
    """The operator's repair command for the node has ended, in its `isolation`-th isolation. `detail`: what it said.

    Bounds: `isolation` < 10**9, >= 1; `duration_us` <= 366 days.
    """

    node: Name
    isolation: FirstSerial
    passed: bool
    duration_us: Duration
    detail: Text


class IncidentEscalated(Decision, frozen=True, kw_only=True):
    """The response so far has failed or does not do: from now on the incident has `severity`.

    `worker`: the culprit, given up by this decision; a new process takes its place.
    """

    incident: Text
    severity: SeverityLevel
    worker: WorkerId
    reason: Text


class DeadlinePassed(Decision, frozen=True, kw_only=True):
    """The shell's monotonic clock says that the deadline has passed."""

    deadline_id: Text


class EntrySkipped(Decision, frozen=True, kw_only=True):
    """Entry `seq` of the log is skipped by every reader, from the log's beginning on: an operator has started
    the coordinator with `--skip` (events/skips.py). It comes before this one, and is neither a claim nor a skip itself.

    Bounds: `seq` < 2**53, >= 1.
    """

    seq: Positive
    reason: Text


class PlanAdopted(Decision, frozen=True, kw_only=True):
    """The cluster's plan from now on. `waf` = sum of the assignments' waf, FLOP/s.

    `basis`: digest of the nodes and tasks that the plan was made for; another basis asks for a new plan.
    `healthy`, `healthy_waf`: workers per task, and their WAF, were every node that has not left healthy.
    `healthy_gpus`: the type of GPU that each of these would be on, where there are several.
    `transition_flop`: what the change is expected to cost, sum of F(t, x) * D_transition over the tasks it moves.
    `way`, `took_us`, `rows_reused`: how the answer was come by; the answer does not depend on it.

    Bounds: `epoch` < 10**9, >= 1; `waf`, `healthy_waf` < 2**63; `healthy` 0..131072; `took_us` <= 366 days;
    `rows_reused` < 2**31.
    """

    epoch: FirstSerial
    assignments: tuple[TaskAssignment, ...]
    waf: Flops
    basis: Text
    trigger: Text
    reason: Text
    healthy: dict[Name, Workers] = always({})
    healthy_waf: Flops = always(0)
    transition_flop: Work = always(0.0)
    way: PlanWay = always("fresh")
    took_us: Duration = always(0)
    rows_reused: Small = always(0)
    healthy_gpus: dict[Name, Gpu] = {}


class MembershipDecided(Decision, frozen=True, kw_only=True):
    """The workers that train the task from now on. `urgent`: a member is gone; leave the broken group at once.

    Not urgent: switch at the next iteration boundary that all members agree on in band; a worker that is no
    longer a member parks there. Where no member stays, the lead writes a checkpoint before it parks.
    `joiners` have no state; they take it from the other members, or from the nearest checkpoint.

    `told`: the nodes read the membership here; `members` and `joiners` are empty then. None: commands tell the nodes.

    Bounds: `generation` < 10**9, >= 1.
    """

    task: Name
    generation: FirstSerial
    members: tuple[Member, ...]
    joiners: tuple[WorkerId, ...]
    urgent: bool
    store: StoreAddress
    incident: Text
    reason: Text
    told: ToldOnce | None = None


class MembershipPart(Decision, frozen=True, kw_only=True):
    """Part `part`, counted from 1, of a membership that is too large for one event. It means nothing before the
    MembershipDecided of the same term and generation that counts it in (rules: events/seats.py).

    Bounds: `generation` < 10**9, >= 1; `part` < 2**31, >= 1.
    """

    task: Name
    generation: FirstSerial
    part: Size
    seats: tuple[SeatRun, ...]


class PeersDecided(Decision, frozen=True, kw_only=True):
    """Nodes have come or gone: from now on copies of the task's state go to the first of `peers` (see SetPeers)."""

    task: Name
    peers: tuple[MemoryService, ...]


class TaskReshaped(Decision, frozen=True, kw_only=True):
    """From now on the task's replicas have tp * pp workers: those of the old layout have handed the state over and are
    gone. What they kept is put together anew by the first of the new ones. `vpp`, `ep`, `micro_batch`, `iterations`,
    `lr`: as it was asked. `plan`: the epoch of the plan that has chosen it; 0: a person has.

    Bounds: `tp`, `pp`, `min_workers`, `max_workers`, `vpp`, `ep` 1..131072; `iterations` <= 10**12, >= 1;
    `plan` < 10**9; `micro_batch` < 2**31.
    """

    task: Name
    tp: SomeWorkers
    pp: SomeWorkers
    min_workers: SomeWorkers
    max_workers: SomeWorkers
    reason: Text
    iterations: FirstIteration | None = None
    lr: LearningRate | None = None
    plan: Serial = 0
    vpp: SomeWorkers = 1
    ep: SomeWorkers = 1
    micro_batch: Small = 0

    @property
    def shape(self) -> Shape:
        """The layout."""
        return Shape(self.tp, self.pp, self.vpp, self.ep, self.micro_batch)


class TaskFailed(Decision, frozen=True, kw_only=True):
    """The task has ended without success, and is not tried again."""

    task: Name
    reason: LongText


class TransitionCompleted(Decision, frozen=True, kw_only=True):
    """An incident is closed, with its measured costs.

    `detection_flop`, `transition_flop`: what the tasks that it hit would have achieved meanwhile.
    `sub_health_flops`: by how much the cluster runs below its healthy WAF from here on, until it is repaired.
    `micro_batches_lost`: finished ones of iterations in progress that were thrown away, at least: no whole replica was
    left that could have kept them.

    Bounds: `detection_us`, `transition_us` < 2**62; `micro_batches_redone`, `micro_batches_lost` < 2**53;
    `sub_health_flops` < 2**63.
    """

    incident: Text
    response: Text
    detection_us: Micros
    transition_us: Micros
    micro_batches_redone: Count
    reason: Text
    detection_flop: Work = always(0.0)
    transition_flop: Work = always(0.0)
    sub_health_flops: Flops = always(0)
    micro_batches_lost: Count = 0


class ThroughputCorrected(Decision, frozen=True, kw_only=True):
    """T(task, workers) is `flops` from now on: what the last `reports` reports say, by the median of their
    time per iteration, `iteration_us`. No plan is made because of it; the next one uses it.

    Bounds: `workers` 1..131072; `flops` < 2**63; `iteration_us` <= 366 days, >= 1; `reports` < 2**31, >= 1.
    """

    task: Name
    workers: SomeWorkers
    flops: Flops
    iteration_us: SomeDuration
    reports: Size
    reason: Text


class FailureRateEstimated(Decision, frozen=True, kw_only=True):
    """One worker's mean time between failures: configured, as if that had been seen once, and then learnt from
    `failures` failures in `exposed_us` of workers' time. D_running(n) = worker_mtbf_us / n.

    Bounds: `worker_mtbf_us` < 2**62, >= 1; `failures` < 2**53; `exposed_us` < 2**62.
    """

    worker_mtbf_us: Annotated[int, Meta(ge=1, lt=2**62)]
    failures: Count
    exposed_us: Micros


# --- commands ------------------------------------------------------------------------------------


class StartWorker(BootCommand, frozen=True, kw_only=True):
    """Start a process for shard `shard` of replica `replica`; the replica's own group meets at `store`.

    Bounds: `replica` < 10**9; `shard` 0..131072.
    """

    spec: TaskSpec
    worker: WorkerId
    replica: Serial
    shard: Workers
    store: StoreAddress


class StartWorkers(BootCommand, frozen=True, kw_only=True):
    """Start several workers of one task on the node: as many StartWorker, in this order (events/seats.py: starts)."""

    spec: TaskSpec
    starts: tuple[Start, ...]


class StopWorker(BootCommand, frozen=True, kw_only=True):
    """End the worker's process: Quit first, then signals after a grace time. `kill`: SIGKILL at once."""

    task: Name
    worker: WorkerId
    reason: Text
    kill: bool = always(False)


class SetMembership(BootCommand, frozen=True, kw_only=True):
    """Tell the node's workers of the task the membership of `generation` (see MembershipDecided).

    `peers`: nodes that hold the task's state in memory, or are to: copies go to the first that is not the
    node itself. `mtbf_us`: expected time to the task's next failure, 0 = not known. `handover`: workers of another
    layout are about to take the state from the nodes' memory, so that the lead need not write it to storage.

    Bounds: `generation` < 10**9, >= 1; `mtbf_us` < 2**62.
    """

    task: Name
    generation: FirstSerial
    members: tuple[Member, ...]
    joiners: tuple[WorkerId, ...]
    urgent: bool
    store: StoreAddress
    peers: tuple[MemoryService, ...] = always(())
    mtbf_us: Micros = always(0)
    handover: bool = always(False)
    #: Why training is to end at the next boundary (hook.stop); "": it is not.
    stop: Text = ""


class SetPeers(BootCommand, frozen=True, kw_only=True):
    """Nodes have come or gone: from now on copies of the task's state go to the first of `peers`."""

    task: Name
    peers: tuple[MemoryService, ...]


class DropState(BootCommand, frozen=True, kw_only=True):
    """Forget the task's state in the node's memory: the task has ended."""

    task: Name


class InjectFault(Command, frozen=True, kw_only=True):
    """Make the fault happen that `injection` asked for; stale ones never act. `agent_boot`: the agent that is asked; 0
    in logs older than the field.

    Bounds: `agent_boot` < 2**52.
    """

    injection: Text
    fault: Fault
    agent_boot: Boot = always(0)


class CheckNode(BootCommand, frozen=True, kw_only=True):
    """Run a health check of the isolated node within `limit_us`, and say NodeChecked. `argv`: the operator's command;
    empty: the agent's own self-test. `reason`: why the node is isolated.

    Bounds: `limit_us` <= 366 days, >= 1.
    """

    argv: tuple[Text, ...] = ()
    limit_us: SomeDuration
    reason: Text


class LeaveCluster(BootCommand, frozen=True, kw_only=True):
    """The node is to leave. `for_good`: drained first, within `limit_us`, and its agent is not to come back; else the
    node was forgotten while it was away: what runs there is ended at once, and the next agent joins anew.

    Bounds: `limit_us` <= 366 days, >= 1.
    """

    for_good: bool
    limit_us: SomeDuration
    reason: Text


AnyRequest: TypeAlias = (
    TaskSubmitted | TaskCancelled | ReshapeRequested | NodeCordoned | NodeUncordoned | ForgetRequested | NodeEnrolled
    | NodeRevoked | MaintenancePlanned | MaintenanceCancelled | InjectionRequested
)  # fmt: skip
AnyObservation: TypeAlias = (
    NodeJoined | NodeLeaving | NodeLeft | MachineReported | WorkerStarted | WorkerReady | WorkerRegrouped | WorkerParked
    | WorkerExited
    | ErrorReported | StepCommitted | CheckpointSaved | SaveFailed | TaskCompleted
    | HangSuspected | WorkerBusy | WorkerWaits | StopAsked
    | DegradationObserved | StragglerObserved | StragglerRecovered
    | CorruptionSuspected | AcceleratorReported | StateKept | StateTaken
    | PeersRemembered | NodeChecked
    | CommandApplied | CommandFailed | AnyRequest | Heartbeat
)  # fmt: skip
AnyDecision: TypeAlias = (
    CoordinatorStarted | NodeLost | NodeReturned | NodeForgotten | NodeIsolated | NodeReadmitted | DrainBegun
    | RepairEnded | IncidentEscalated | DeadlinePassed | EntrySkipped | PlanAdopted | MembershipPart | MembershipDecided
    | PeersDecided | TaskReshaped | TaskFailed
    | TransitionCompleted
    | ThroughputCorrected | FailureRateEstimated
)  # fmt: skip
AnyCommand: TypeAlias = (
    StartWorker
    | StartWorkers
    | StopWorker
    | SetMembership
    | SetPeers
    | DropState
    | InjectFault
    | CheckNode
    | LeaveCluster
)
AnyEvent: TypeAlias = AnyObservation | AnyDecision | AnyCommand
