"""Tasks: what a task file describes."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from unicrond.events.vocabulary.base import Value
from unicrond.events.vocabulary.field_defaults import always
from unicrond.events.vocabulary.field_types import (
    Count,
    FirstIteration,
    Flops,
    Gpu,
    Iteration,
    LearningRate,
    Name,
    NameOrNone,
    Precision,
    Priority,
    Size,
    Small,
    SomeWorkers,
    StartMode,
    Text,
    User,
    Weight,
    Workers,
)
from unicrond.events.vocabulary.shape import Shape, replica_size


class ModelSpec(Value, frozen=True, kw_only=True):
    """A GPT in Megatron-core's terms."""

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
    """

    lr: LearningRate = always(1e-3)
    min_lr: Annotated[float, Meta(ge=0.0)] = always(0.0)
    warmup_iterations: Iteration = always(0)
    decay_iterations: FirstIteration | None = always(None)
    weight_decay: Annotated[float, Meta(ge=0.0)] = always(0.01)
    clip_grad: Annotated[float, Meta(ge=0.0)] = always(1.0)
    distributed: bool = always(False)


class CheckpointSpec(Value, frozen=True, kw_only=True):
    """The places and times of checkpoints: where and how often the task's state is written, in iterations; None: from
    the measured cost and the failure rate (Young/Daly). `interval`: to storage, 0 = only at the end. `memory_interval`:
    to the node's memory, 0 = never. `dir`: a directory, or the URL of a prefix in an object store.
    """

    dir: Text = always("")
    interval: Iteration | None = always(None)
    keep: Size = always(2)
    memory_interval: Iteration | None = always(None)


#: Of object stores, as fsspec names them: those that have been tested.
SCHEMES = ("s3",)


def is_url(directory: str) -> bool:
    """Return whether checkpoints go to an object store, and not to a directory."""
    return "://" in directory


#: A variable in a task's environment: the number of its lanes.
LANES = "UNICRON_LANES"


#: Another: what is done about bits that differ from worker to worker, one of DETERMINISM.
DETERMINISTIC = "UNICRON_DETERMINISTIC"


DETERMINISM = ("check", "require", "off")


class LayoutSpec(Value, frozen=True, kw_only=True):
    """A layout that a task may have (`Shape`). `throughput`: T(x) in it, as in TaskSpec. `micro_batch`: samples of a
    micro-batch in it; 0 in all layouts of a task: as many as that has.
    """

    tp: SomeWorkers = always(1)
    pp: SomeWorkers = always(1)
    throughput: dict[str, Flops] = always({})
    micro_batch: Small = 0
    vpp: SomeWorkers = 1
    ep: SomeWorkers = 1
    cp: SomeWorkers = 1
    etp: Workers = 0

    @property
    def shape(self) -> Shape:
        """Return the layout, in its one form."""
        shape = Shape(self.tp, self.pp, self.vpp, self.ep, self.micro_batch, self.cp, self.etp)
        return shape.plain if self.etp else shape


class GpuSpec(Value, frozen=True, kw_only=True):
    """The throughput of a task on nodes with another type of GPU: T(x) for layouts of the task.

    Layouts that are not named achieve there what the task's own `throughput` says.
    """

    gpu: Gpu
    layouts: tuple[LayoutSpec, ...] = always(())


class TaskStart(Value, frozen=True, kw_only=True):
    """Say how a task begins where states of an earlier run of its name may lie. The head makes it of a submission.

    `mode` "": it goes on from them where they were made with its settings, and is refused otherwise. "resume": it goes
    on from them in any case. "restart": it begins from the seed, or from what its program loads; they are kept under
    another name. "fork": it begins from the newest state of task `source`, in `source_dir` on storage. `run_id`:
    names this run; the states that it saves say so. `continues`: the earlier runs whose states it takes whatever they
    were made with, newest first: the head has compared. `is_changed`: a person has given the running task other
    iterations or another learning rate, which says nothing about states of earlier runs. `prove`: once it
    trains, it is to prove that it heals (ProofRequested).
    """

    mode: StartMode = ""
    run_id: Text = ""
    source: NameOrNone = ""
    source_dir: Text = ""
    continues: tuple[Text, ...] = ()
    is_changed: bool = False
    prove: bool = False


class TaskSpec(Value, frozen=True, kw_only=True):
    """One training job as its file describes it (YAML, see docs/use/task-files.md).

    `min_workers` and `max_workers` are workers (ranks), in whole replicas. `global_batch` and `micro_batch` are
    samples. `throughput` is T(x): workers -> achieved FLOP/s; empty = linear. `start_timeout_s`: how long a worker may
    take from its start until it is ready; None: as the cluster's policy says. `secrets`: environment variables whose
    values are on the node, each "file:PATH" or "env:NAME" of the agent's. `run_as`: the user of the nodes whose
    processes the workers are; "": the first of each node's list, or the agent's own. `preload`: modules that a process
    of the task's own imports once on each node, and the workers start with. `layouts`: those that the plan may give it,
    in the order that decides ties; empty: its own stays until a person asks for another. With some `min_workers` and
    `max_workers` need not be whole replicas. `gpus`: T on types of GPU for which it is not `throughput`.
    `priority`: whose `min_workers` are met first, where not all can be; the higher goes first. `preemptible`: it runs
    on what the tasks that are not leave over. `vpp`: chunks of the model in each pipeline stage. `ep`: over how many
    workers the experts are. Of both 0: as the program has it. `cp`: over how many workers a sequence is. `etp`: in how
    many parts each expert is cut; 0: as many as make tp with ep, or 1. `start`: how it begins;
    None: no run of its name is told from another. `on_divergence`: what follows where its program
    trains something else on each replica, or each time (DivergenceObserved).
    """

    name: Name
    weight: Weight = always(1.0)
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
    priority: Priority = 0
    preemptible: bool = False
    start: TaskStart | None = None
    on_divergence: Literal["stop", "report"] = "stop"
    cp: SomeWorkers = 1
    etp: Workers = 0

    @property
    def cut(self) -> Shape:
        """Return the layout, in its one form, as far as a state depends on it."""
        return self._shape(0)

    @property
    def shape(self) -> Shape:
        """Return the layout, by which a plan tells it from the task's others."""
        varies = any(layout.micro_batch for layout in self.layouts)
        return self._shape(self.micro_batch if varies else 0)

    def _shape(self, micro_batch: int) -> Shape:
        shape = Shape(self.tp, self.pp, self.vpp or 1, self.ep or 1, micro_batch, self.cp, self.etp)
        return shape.plain if self.etp else shape

    @property
    def replica_workers(self) -> int:
        """Return workers in one replica."""
        return replica_size(self.tp, self.pp, self.cp, self.ep, self.etp)

    @property
    def replica_batch(self) -> int:
        """Return samples of what a replica is assigned at a time, and computes as one: a micro-batch, or one for each
        data-parallel rank inside it."""
        return self.micro_batch * self.cut.data

    @property
    def micro_batches(self) -> int:
        """Return micro-batches of one iteration over all replicas."""
        return self.global_batch // self.replica_batch

    def micro_batches_in(self, shape: Shape) -> int:
        """Return the same in another layout."""
        return self.global_batch // ((shape.micro_batch or self.micro_batch) * shape.data)

    @property
    def fewest_micro_batches(self) -> int:
        """Return the same in the layout of the task that has the largest."""
        return min([self.micro_batches, *(self.micro_batches_in(layout.shape) for layout in self.layouts)])

    @property
    def lanes(self) -> int:
        """Return in how many parts an iteration's gradients are summed, whoever computes them
        (agents/trainer/lifecycle/lanes.py). 0: the sum follows the deal.

        A constant of the task, which its environment carries through all changes of its size: by default as many as
        there may be replicas when it is submitted."""
        if self.accumulation != "exact":
            return 0
        choice = self.env.get(LANES, "")
        sizes = [self.replica_workers, *(layout.shape.workers for layout in self.layouts)]
        replicas = self.max_workers // min(sizes)
        return max(1, min(int(choice) if choice.isdecimal() else replicas, self.fewest_micro_batches))
