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

from unicrond.throughput.layouts import MICRO_BATCHES_TRIED, Layout, ThroughputQuery, tensor_degrees
from unicrond.throughput.model import memory_bytes, parts_s, usable_bytes

#: Templates are made for pipelines of 1 to so many nodes; the stages of longer ones are a layer each before that.
NODES_MAX = 128


@dataclass(frozen=True)
class Template:
    """The best form of a pipeline on `nodes` nodes. `slope_s`: seconds per micro-batch; `fill_s`: of filling and
    draining; `step_s`: the optimizer's."""

    nodes: int
    layout: Layout
    slope_s: float
    fill_s: float
    step_s: float


class Templates:
    """All templates of one task for one micro-batch size. `question`: under the system's restrictions."""

    def __init__(self, question: ThroughputQuery, micro_batch: int) -> None:
        self.question = question
        self.micro_batch = micro_batch
        self.micro_batches = question.batch // micro_batch
        self._flops: dict[tuple[tuple[int, int], ...], int] = {}
        self._reduce_s: dict[tuple[int, int], float] = {}
        self._sizes: dict[tuple[int, int], tuple[int, ...]] = {}

    @cached_property
    def by_nodes(self) -> dict[int, Template]:
        """Compute the best template for each number of nodes that has one: from the fewest that the model fits, without
        a gap up to the longest pipeline."""
        best = ((nodes, self._best(nodes)) for nodes in range(1, NODES_MAX + 1))
        return {nodes: template for nodes, template in best if template is not None}

    @property
    def fewest(self) -> int:
        """Return the nodes of the shortest pipeline. Raises ValueError if there is no template."""
        return min(self.by_nodes)

    def _best(self, nodes: int) -> Template | None:
        per_node = self.question.gpu.per_node
        fastest = None
        for tp in tensor_degrees(self.question.model, self.question.gpu):
            pp = nodes * per_node // tp
            if pp > self.question.model.layers:
                continue
            for recompute in self.question.stack.recompute:
                template = self._template(nodes, Layout(tp, pp, self.micro_batch, 1, recompute))
                if template is not None and (fastest is None or template.slope_s < fastest.slope_s):
                    fastest = template
        return fastest

    def _template(self, nodes: int, layout: Layout) -> Template | None:
        single_replica = np.array([1], dtype=np.int64)
        if memory_bytes(self.question, layout, single_replica)[0] > usable_bytes(self.question.gpu):
            return None
        compute_s, tp_s, transfer_s, bubble_s, _, step_s = parts_s(self._single, layout, single_replica)[:, 0].tolist()
        return Template(nodes, layout, compute_s + tp_s + transfer_s, bubble_s, step_s)

    @cached_property
    def _single(self) -> ThroughputQuery:
        """Return the question for one micro-batch."""
        return replace(self.question, batch=self.micro_batch)

    def flops_per_s(self, sizes: Sequence[int]) -> int:
        """Return what pipelines of these numbers of nodes achieve together, FLOP/s; 0 without any."""
        kinds = tuple(sorted(Counter(sizes).items()))
        if kinds not in self._flops:
            self._flops[kinds] = round(self.question.flops_per_iteration / self.iteration_s(sizes)) if kinds else 0
        return self._flops[kinds]

    def iteration_s(self, sizes: Sequence[int]) -> float:
        """Return the seconds of an iteration. `sizes`: at least one, each with a template."""
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
        """Return the seconds until the last micro-batch is computed, assigned as well as can be (to a millionth of
        one)."""

        def micro_batches_by(time_s: float) -> int:
            """Return how many micro-batches all pipelines finish within `time_s`."""
            return sum(count * max(0, int((time_s - kind.fill_s) / kind.slope_s)) for kind, count in kinds)

        rate = sum(count / kind.slope_s for kind, count in kinds)
        even_s = (self.micro_batches + sum(count * kind.fill_s / kind.slope_s for kind, count in kinds)) / rate
        low_s = even_s if all(kind.fill_s <= even_s for kind, _ in kinds) else 0.0
        high_s = even_s + max(kind.slope_s for kind, _ in kinds)  # then each has dealt what `even_s` would, rounded up
        for _ in range(20 if low_s else 40):
            middle_s = (low_s + high_s) / 2
            low_s, high_s = (
                (low_s, middle_s) if micro_batches_by(middle_s) >= self.micro_batches else (middle_s, high_s)
            )
        return high_s

    def even(self, nodes: int, pipelines: int) -> tuple[int, ...]:
        """Return `pipelines` sizes that differ by one node at most, with `nodes` in all; () where no template fits."""
        size, larger = divmod(nodes, pipelines)
        sizes = (size + 1,) * larger + (size,) * (pipelines - larger)
        return sizes if all(length in self.by_nodes for length in sizes) else ()

    def best_sizes(self, nodes: int, replicas: int) -> tuple[int, ...]:
        """Return the fastest even instantiation on all of `nodes`, with `replicas` pipelines or more; with fewer nodes
        than these need, as many as there can be; () where not one fits.

        Of the numbers of pipelines with one least size the smallest and the largest are tried."""
        key = nodes, replicas
        if key not in self._sizes:
            most = nodes // self.fewest
            counts = {count for size in {nodes // k for k in range(1, most + 1)} for count in _counts(nodes, size)}
            combinations = (self.even(nodes, count) for count in counts if min(replicas, most) <= count <= most)
            self._sizes[key] = max(filter(None, combinations), key=self.flops_per_s, default=())
        return self._sizes[key]


def _counts(nodes: int, size: int) -> tuple[int, int]:
    """Return the smallest and the largest number of pipelines whose least size is `size` when they share `nodes`
    evenly."""
    return nodes // (size + 1) + 1, nodes // size


@lru_cache(maxsize=256)
def _all_templates(question: ThroughputQuery) -> tuple[Templates, ...]:
    tables = (Templates(question, size) for size in MICRO_BATCHES_TRIED if question.batch % size == 0)
    return tuple(table for table in tables if table.by_nodes)


def best_templates(question: ThroughputQuery, nodes: int, replicas: int) -> Templates | None:
    """Return the templates of the micro-batch size that is fastest on `nodes` nodes, None where the model fits none."""
    fitting = [table for table in _all_templates(question) if table.best_sizes(nodes, replicas)]
    return max(fitting, key=lambda table: table.flops_per_s(table.best_sizes(nodes, replicas)), default=None)
