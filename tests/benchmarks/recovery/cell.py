"""What is trained and how often it is killed: the same for every system.

The same GPT at every number of ranks, four micro-batches on each. The more ranks share the machine's two cores, the
smaller a micro-batch, so that an iteration lasts about 200 ms (plain Megatron-core, quiet machine) at each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from unicrond.events.vocabulary import CheckpointSpec, ModelSpec, OptimizerSpec, TaskSpec

#: `unicrond-follow`: with sums that follow the deal (`numerics: follow`).
System: TypeAlias = Literal["unicrond", "unicrond-follow", "torchrun", "torchft"]
SYSTEMS: tuple[System, ...] = get_args(System)
OURS: tuple[System, ...] = ("unicrond", "unicrond-follow")
#: Samples of 64 tokens in a micro-batch, by ranks.
SAMPLES = {2: 8, 3: 4, 4: 3, 6: 2}
MICRO_BATCHES_PER_RANK = 4
#: Steps that every rank makes at the full global batch between two faults, at least; at most nine more, by chance.
STEADY_STEPS = 8
#: Where nothing is killed.
CALM_STEPS = 60


@dataclass(frozen=True, slots=True)
class Cell:
    """One system at one number of ranks. `paced_s`: each micro-batch lasts so long at least (asleep, as a host is while
    its device computes); 0: it lasts as long as it takes this machine's cores."""

    system: System
    ranks: int
    repetitions: int
    seed: int
    paced_s: float = 0.0

    @property
    def micro_batches(self) -> int:
        """Of one iteration over all ranks."""
        return MICRO_BATCHES_PER_RANK * self.ranks

    @property
    def samples(self) -> int:
        """Of one micro-batch."""
        return 1 if self.paced_s else SAMPLES[self.ranks]

    def task(self, data: str) -> TaskSpec:
        return TaskSpec(
            name="recovery",
            max_workers=self.ranks,
            model=PACED_MODEL if self.paced_s else MODEL,
            optimizer=OptimizerSpec(lr=1e-3, clip_grad=1.0),
            data=data,
            global_batch=self.micro_batches * self.samples,
            micro_batch=self.samples,
            iterations=1_000_000,
            checkpoint=CheckpointSpec(interval=0),
        )


MODEL = ModelSpec(layers=4, hidden=128, heads=4, seq=64)
PACED_MODEL = ModelSpec(layers=2, hidden=64, heads=4, seq=32)
