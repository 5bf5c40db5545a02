"""Types of GPU: which nodes have which, and what a task achieves on each.

Rules
-----
* A node's agent reports its type. As long as all that report one report the same, there is one type, and nothing of
  this matters: nodes that report none count as it. Where there are several, each is a pool, and nodes that report none
  are another.
* What was measured on one type is never taken for another: with a membership on another type it is put aside, until the
  task comes back. What was measured before any type was reported belongs to the first that is.
* T on a type is the task's own (`TaskSpec.throughput` and `layouts`), unless its `gpus` name the type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from unicrond.core.state.state import ClusterState, Node, NodeStatus, Task
from unicrond.core.tasks.reshaping import layout_key
from unicrond.events.vocabulary import GpuSpec, Member, TaskAssignment, TaskSpec
from unicrond.events.vocabulary.shape import Shape


def node_types(nodes: Iterable[Node]) -> tuple[str, Mapping[str, str]]:
    """Return the type of all nodes, and an empty map; or "" and the type of each, where there are several."""
    present = [node for node in nodes if node.status is not NodeStatus.LEFT]
    types = {node.gpu for node in present} - {""}
    if len(types) < 2:
        return next(iter(types), ""), {}
    return "", {node.name: node.gpu for node in present}


def of_members(state: ClusterState, members: tuple[Member, ...]) -> str:
    """Return the type that a group is on: its first member's."""
    node = state.nodes.get(members[0].node) if members else None
    return node.gpu if node is not None else ""


def of_assignment(nodes: Mapping[str, Node], assignment: TaskAssignment | None) -> str | None:
    """Return the type that most workers of a plan's share are on, the first of equals; None where it has none."""
    counts: dict[str, int] = {}
    for replica in assignment.replicas if assignment else ():
        for name in replica:
            if (node := nodes.get(name)) is not None:
                counts[node.gpu] = counts.get(node.gpu, 0) + 1
    return min(counts, key=lambda gpu: (-counts[gpu], gpu)) if counts else None


def on_type(task: Task, gpu: str) -> Task:
    """Return the task as far as it is known on this type of GPU."""
    pace = task.pace
    if gpu == pace.gpu:
        return task
    if not pace.gpu and not pace.on_gpus:
        return replace(task, pace=replace(pace, gpu=gpu))
    layout = layout_key(task.spec.shape)
    by_layout = {**pace.other_layouts, layout: pace.measurements} if pace.measurements else pace.other_layouts
    on_gpus = {name: table for name, table in pace.on_gpus.items() if name != gpu}
    if by_layout:
        on_gpus[pace.gpu] = by_layout
    tables = pace.on_gpus.get(gpu, {})
    flops, elsewhere = tables.get(layout, {}), {key: table for key, table in tables.items() if key != layout}
    pace = replace(pace, gpu=gpu, measurements=flops, other_layouts=elsewhere, on_gpus=on_gpus, circumstances={})
    return replace(task, pace=pace)


def spec_on(spec: TaskSpec, gpu: str) -> TaskSpec:
    """Return the task with T as its file has it for this type of GPU."""
    gpu_spec = next((entry for entry in spec.gpus if entry.gpu == gpu), None)
    if gpu_spec is None:
        return spec
    layouts = tuple(
        [replace(entry, throughput=_table(gpu_spec, entry.shape, entry.throughput)) for entry in spec.layouts]
    )
    shape = spec.cut._replace(micro_batch=spec.micro_batch)
    return replace(spec, throughput=_table(gpu_spec, shape, spec.throughput), layouts=layouts)


def _table(gpu_spec: GpuSpec, shape: Shape, default: dict[str, int]) -> dict[str, int]:
    """Look up the table of a layout. One that is named without micro-batches has the same table with any number, unless
    it is named with them too."""
    tables = {entry.shape: entry.throughput for entry in reversed(gpu_spec.layouts)}
    return tables.get(shape, tables.get(shape.cut, default))
