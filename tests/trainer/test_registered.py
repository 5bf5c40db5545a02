"""What a program registers beside model, optimizer and scheduler travels with the training state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unicrond.agents.trainer.states.state import BadState, TrainingState, flatten, unflatten


class Average:
    """An average of the weights, and how many it is of."""

    def __init__(self) -> None:
        self.weights, self.count = torch.zeros(3), 0

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.weights, self.count = state_dict["weights"].clone(), state_dict["count"]


def state(**registered: Any) -> TrainingState:
    model = torch.nn.Linear(2, 1)
    return TrainingState([model], torch.optim.SGD(model.parameters(), 0.1), None, registered=registered)


def travelled(tree: dict[str, object]) -> dict[str, Any]:
    skeleton, tensors = flatten(tree)
    return dict(unflatten(skeleton, tensors))


def test_registered_object_resumes() -> None:
    before, after = Average(), Average()
    before.weights, before.count = torch.ones(3), 7
    assert state(average=after).restore(travelled(state(average=before).capture(5, 0.5))) == (5, 0.5)
    assert after.count == 7 and torch.equal(after.weights, torch.ones(3))


def test_older_state_leaves_registered_object_unchanged() -> None:
    after = Average()
    after.count = 3
    tree = state().capture(5, 0.5)
    del tree["registered"]
    state(average=after).restore(travelled(tree))
    assert after.count == 3


def test_flatten_refuses_unsupported_object() -> None:
    with pytest.raises(BadState, match="object"):
        flatten({"loader": object()})
