"""Layouts: how many workers a replica has, and what they share."""

from __future__ import annotations

import pytest

from unicrond.events.vocabulary import TaskSpec
from unicrond.events.vocabulary.shape import Shape


@pytest.mark.parametrize(
    ("shape", "workers", "data"),
    [
        (Shape(), 1, 1),
        (Shape(2, 4), 8, 1),
        (Shape(2, 2, cp=4), 16, 1),
        (Shape(4, 2, ep=2), 8, 1),  # each expert in 2 parts
        (Shape(4, 2, ep=4, etp=1), 8, 1),
        (Shape(2, cp=2, ep=4, etp=1), 4, 1),
        (Shape(1, ep=4), 4, 4),
        (Shape(1, 2, ep=4), 8, 4),
        (Shape(2, ep=4), 4, 2),
        (Shape(2, ep=2, etp=2), 4, 2),
        (Shape(1, cp=2, ep=4), 4, 2),
        (Shape(2, cp=2, etp=4), 4, 1),
        (Shape(2, ep=3), 6, 3),
    ],
)
def test_replica_has_the_fewest_workers_that_hold_its_experts(shape: Shape, workers: int, data: int) -> None:
    assert (shape.workers, shape.data, shape.groups) == (workers, data, workers // shape.tp)
    assert shape.tp * shape.cp * shape.data % (shape.ep * shape.expert_tp) == 0
    spec = TaskSpec(name="a", **shape._asdict() | {"micro_batch": 2}, global_batch=24)
    assert (spec.replica_workers, spec.replica_batch, spec.micro_batches) == (workers, 2 * data, 12 // data)


def test_layouts_that_mean_the_same_have_one_form() -> None:
    assert Shape(4, ep=2, etp=2).plain == Shape(4, ep=2)
    assert Shape(4, etp=4).plain == Shape(4)
    assert Shape(4, ep=2, etp=1).plain == Shape(4, ep=2, etp=1)
