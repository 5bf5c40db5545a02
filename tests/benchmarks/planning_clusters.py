"""Large clusters to plan for: GPT-3 models of five sizes on A800 nodes of eight, T from the throughput model."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from unicrond.core.planning.problem import Alternative, Curve, Prices, TaskProblem
from unicrond.core.planning.situation import NodeLoad, Situation
from unicrond.events.vocabulary.shape import Shape
from unicrond.intake.throughput_preset import best_layouts
from unicrond.throughput.layouts import job, pipeline_degrees, tensor_degrees
from unicrond.throughput.model import table
from unicrond.throughput.presets import GPUS, MODELS

SLOTS = 8
SIZES = ("gpt3-1.3b", "gpt3-7b", "gpt3-13b", "gpt3-70b", "gpt3-175b")
BATCHES = (None, 2048, 4096)
HOUR_US = 3600 * 10**6


@lru_cache
def curve(model: str, batch: int | None, workers: int, unit: int) -> Curve:
    """T(x) in FLOP/s for x up to `workers`, multiples of `unit` only."""
    points = table(job(MODELS[model], GPUS["a800-80g"], batch=batch), workers)
    return Curve({x: flops for x, flops in points.items() if x % unit == 0})


@lru_cache
def curves(model: str, batch: int | None, workers: int) -> dict[Shape, Curve]:
    """T(x) of each layout that is the best for some x up to `workers`."""
    question = job(MODELS[model], GPUS["a800-80g"], batch=batch)
    tables: dict[Shape, dict[str, int]] = {}
    for tp in tensor_degrees(question.model, question.gpu):
        for pp in pipeline_degrees(question.model, question.stack):
            points = table(replace(question, tp=tp, pp=pp), workers)
            tables[Shape(tp, pp)] = {str(x): flops for x, flops in points.items()}
    return {one: Curve({int(x): flops for x, flops in tables[one].items()}) for one in best_layouts(tables)}


def cluster_of_layouts(workers: int, tasks: int) -> Situation:
    """The same, GPU by GPU, but each task may have any of its layouts; it has the best for its share."""
    situation = cluster(workers, tasks, 1)
    lineup = []
    for i, task in enumerate(situation.lineup):
        known = curves(SIZES[i % len(SIZES)], BATCHES[i % len(BATCHES)], workers)
        own = max(known, key=lambda one: (known[one](task.workers), -one.workers))
        others = tuple(Alternative(one, known[one]) for one in known if one != own)
        prices = Prices(reshape_us=180 * 10**6)
        present = replace(task, throughput=known[own], unit=own.workers, tp=own.tp)
        lineup.append(replace(present, alternatives=others, prices=prices))
    return replace(situation, tasks=tuple(lineup[:-1]), queued=lineup[-1], seats_matter=True)


def cluster(workers: int, tasks: int, unit: int) -> Situation:
    """`tasks` tasks that share `workers` GPUs, and one more in the queue.

    They stand one behind the other on the nodes, so some nodes carry two. `unit` 1: GPU granularity, 8: node.
    Shares differ by a factor of seven.
    """
    weight_sum = sum(1 + i * 5 % 7 for i in range(tasks))
    loads: list[set[str]] = [set() for _ in range(workers // SLOTS)]
    lineup, seated = [], 0
    for i in range(tasks + 1):
        t = curve(SIZES[i % len(SIZES)], BATCHES[i % len(BATCHES)], workers, unit)
        least = int(t.workers[0]) if len(t) else unit
        share = max(least, workers * (1 + i * 5 % 7) // weight_sum // unit * unit)
        share = 0 if i == tasks or seated + share > workers else share
        name = f"{SIZES[i % len(SIZES)].replace('.', '_')}-{i}"
        floor = least if tasks * least * 4 < workers else 0
        lineup.append(TaskProblem(name, 1 + i % 3, share, t, min_workers=least, floor=floor, unit=unit))
        for worker in range(seated, seated + share):
            loads[worker // SLOTS].add(name)
        seated += share
    nodes = tuple(NodeLoad(f"node{j:04}", SLOTS, frozenset(there)) for j, there in enumerate(loads))
    return Situation(
        nodes=nodes,
        tasks=tuple(lineup[:-1]),
        mtbf_us=5 * 365 * 24 * HOUR_US,
        d_transition_us=60 * 10**6,
        queued=lineup[-1],
        join_slots=(SLOTS,),
    )
