"""Pipeline templates: the best form for every number of nodes that a pipeline may have; and what pipelines of
different sizes achieve together.

Theory
------
A template for n nodes cuts the layers into stages of whole layers; a stage is a GPU, or a tensor-parallel group
inside a node. A pipeline that computes m micro-batches takes `fill_s + m * slope_s`. The iteration's micro-batches are
dealt so that the last pipeline is ready as early as can be; then the replicas of each stage reduce their gradients.

What does not live here: which pipelines there are, and which stay after a fault (`policies/oobleck.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from unicrond.throughput.layouts import MICRO_BATCHES_TRIED, Job, Layout, tensor_degrees
from unicrond.throughput.model import memory_bytes, parts_s, usable_bytes

#: Templates are made for pipelines of 1 to so many nodes; the stages of longer ones are a layer each before that.
NODES_MAX = 128


@dataclass(frozen=True)
class Template:
    """A pipeline on `nodes` nodes. `slope_s`: seconds per micro-batch; `fill_s`: of filling and draining; `step_s`: the
    optimizer's."""

    nodes: int
    layout: Layout
    slope_s: float
    fill_s: float
    step_s: float


class Templates:
    """All templates of one task for one micro-batch size. `question`: under the system's restrictions."""

    def __init__(self, question: Job, micro_batch: int) -> None:
        self.question = question
        self.micro_batch = micro_batch
        self.micro_batches = question.batch // micro_batch
        self._flops: dict[tuple[tuple[int, int], ...], int] = {}
        self._reduce_s: dict[tuple[int, int], float] = {}
        self._sizes: dict[tuple[int, int], tuple[int, ...]] = {}

    @cached_property
    def by_nodes(self) -> dict[int, Template]:
        """The best template for each number of nodes that has one: from the fewest that the model fits, without a gap
        up to the longest pipeline."""
        made = ((nodes, self._best(nodes)) for nodes in range(1, NODES_MAX + 1))
        return {nodes: template for nodes, template in made if template is not None}

    @property
    def fewest(self) -> int:
        """Nodes of the shortest pipeline. Raises ValueError if there is no template."""
        return min(self.by_nodes)

    def _best(self, nodes: int) -> Template | None:
        per_node = self.question.gpu.per_node
        found = None
        for tp in tensor_degrees(self.question.model, self.question.gpu):
            pp = nodes * per_node // tp
            if pp > self.question.model.layers:
                continue
            for recompute in self.question.stack.recompute:
                made = self._template(nodes, Layout(tp, pp, self.micro_batch, 1, recompute))
                if made is not None and (found is None or made.slope_s < found.slope_s):
                    found = made
        return found

    def _template(self, nodes: int, layout: Layout) -> Template | None:
        one = np.array([1], dtype=np.int64)
        if memory_bytes(self.question, layout, one)[0] > usable_bytes(self.question.gpu):
            return None
        compute_s, tp_s, transfer_s, bubble_s, _, step_s = parts_s(self._single, layout, one)[:, 0].tolist()
        return Template(nodes, layout, compute_s + tp_s + transfer_s, bubble_s, step_s)

    @cached_property
    def _single(self) -> Job:
        """The question for one micro-batch."""
        return replace(self.question, batch=self.micro_batch)

    def flops_per_s(self, sizes: Sequence[int]) -> int:
        """What pipelines of these numbers of nodes achieve together; 0 without any."""
        kinds = tuple(sorted(Counter(sizes).items()))
        if kinds not in self._flops:
            self._flops[kinds] = round(self.question.flops_per_iteration / self.iteration_s(sizes)) if kinds else 0
        return self._flops[kinds]

    def iteration_s(self, sizes: Sequence[int]) -> float:
        """Seconds of an iteration. `sizes`: at least one, each with a template."""
        kinds = [(self.by_nodes[nodes], count) for nodes, count in Counter(sizes).items()]
        reduce_s = max(self._reducing_s(kind, len(sizes)) for kind, _ in kinds)
        return self._computing_s(kinds) + reduce_s + max(kind.step_s for kind, _ in kinds)

    def _reducing_s(self, kind: Template, replicas: int) -> float:
        key = kind.nodes, replicas
        if key not in self._reduce_s:
            count = np.array([replicas], dtype=np.int64)
            self._reduce_s[key] = float(parts_s(self.question, kind.layout, count)[4, 0])
        return self._reduce_s[key]

    def _computing_s(self, kinds: list[tuple[Template, int]]) -> float:
        """Until the last micro-batch is computed, dealt as well as can be (to a millionth of one)."""

        def dealt(time_s: float) -> int:
            return sum(count * max(0, int((time_s - kind.fill_s) / kind.slope_s)) for kind, count in kinds)

        rate = sum(count / kind.slope_s for kind, count in kinds)
        even_s = (self.micro_batches + sum(count * kind.fill_s / kind.slope_s for kind, count in kinds)) / rate
        low_s = even_s if all(kind.fill_s <= even_s for kind, _ in kinds) else 0.0
        high_s = even_s + max(kind.slope_s for kind, _ in kinds)  # then each has dealt what `even_s` would, rounded up
        for _ in range(20 if low_s else 40):
            middle_s = (low_s + high_s) / 2
            low_s, high_s = (low_s, middle_s) if dealt(middle_s) >= self.micro_batches else (middle_s, high_s)
        return high_s

    def even(self, nodes: int, pipelines: int) -> tuple[int, ...]:
        """`pipelines` sizes that differ by one node at most, with `nodes` in all; () where no template fits."""
        size, larger = divmod(nodes, pipelines)
        sizes = (size + 1,) * larger + (size,) * (pipelines - larger)
        return sizes if all(each in self.by_nodes for each in sizes) else ()

    def best_sizes(self, nodes: int, replicas: int) -> tuple[int, ...]:
        """The fastest even instantiation on all of `nodes`, with `replicas` pipelines or more; with fewer nodes than
        these need, as many as there can be; () where not one fits.

        Of the numbers of pipelines with one least size the smallest and the largest are tried.
        """
        key = nodes, replicas
        if key not in self._sizes:
            most = nodes // self.fewest
            counts = {count for size in {nodes // k for k in range(1, most + 1)} for count in _counts(nodes, size)}
            tried = (self.even(nodes, count) for count in counts if min(replicas, most) <= count <= most)
            self._sizes[key] = max(filter(None, tried), key=self.flops_per_s, default=())
        return self._sizes[key]


def _counts(nodes: int, size: int) -> tuple[int, int]:
    """The smallest and the largest number of pipelines whose least size is `size` when they share `nodes` evenly."""
    return nodes // (size + 1) + 1, nodes // size


@lru_cache(maxsize=256)
def _made(question: Job) -> tuple[Templates, ...]:
    made = (Templates(question, size) for size in MICRO_BATCHES_TRIED if question.batch % size == 0)
    return tuple(each for each in made if each.by_nodes)


def best_templates(question: Job, nodes: int, replicas: int) -> Templates | None:
    """The templates of the micro-batch size that is fastest on `nodes` nodes, None where the model fits none."""
    fitting = [each for each in _made(question) if each.best_sizes(nodes, replicas)]
    return max(fitting, key=lambda each: each.flops_per_s(each.best_sizes(nodes, replicas)), default=None)
