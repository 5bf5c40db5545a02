"""Models that `fully_shard` has spread, in a world of one worker: as whole ones, and what is refused of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset

from unicrond import Hook, Local
from unicrond.agents.protocol.sampling import Sampling
from unicrond.agents.trainer.detection.checksum import ParameterDigest, checksum
from unicrond.agents.trainer.gradients.accumulation import Accumulation
from unicrond.agents.trainer.gradients.carried_buffers import BufferMoved, CarriedBuffers
from unicrond.agents.trainer.loop import fully_sharded
from unicrond.agents.trainer.loop.examination import CannotAttach, examine
from unicrond.agents.trainer.loop.fully_sharded import ChangesSums
from unicrond.agents.trainer.loop.loader import BadLoader, DataLoaderOrder
from unicrond.agents.trainer.process.shards import is_spread, shard_of, spread_as
from unicrond.agents.trainer.states.layout import layout_of
from unicrond.agents.trainer.states.resharding import Piece, StateLayout, reshard
from unicrond.agents.trainer.states.state import BadState, TrainingState, flatten, unflatten


class Net(torch.nn.Module):
    """Two layers, and a norm that is grouped with the last, as torchtitan does it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 6)
        self.norm = torch.nn.LayerNorm(6)
        self.last = torch.nn.Linear(6, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(rows).relu()))


class Rows(torch.optim.SGD):
    """Keeps the sum of each gradient's rows."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.dim() > 1:
                self.state[parameter]["rows"] = parameter.grad.sum(1)
        return super().step(closure)


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def net(*, spread: bool = True, **options: Any) -> Net:
    torch.manual_seed(3)
    model = Net()
    if spread:
        options = {"mesh": init_device_mesh("cpu", (1,)), **options}
        fully_shard(model.first, **options)
        fully_shard([model.norm, model.last], **options)
        fully_shard(model, **options)
    return model


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.01)


def rows(number: int) -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(number))


def train(model: Net, optimizer: torch.optim.Optimizer, iterations: int = 4) -> list[float]:
    hook = Hook.attach_or_local(Local(iterations, 8, 2), model, optimizer)
    losses = []
    for step in hook.steps():
        for number in step:
            step.backward(model(rows(number)).square().mean())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            model(rows(0))  # the last layers stay whole behind it
        losses.append(step.loss)
    return losses


def test_spread_model_trains_to_the_bits_of_the_whole_one() -> None:
    plain, spread = net(spread=False), net()
    assert train(plain, adam(plain)) == train(spread, adam(spread))
    expected = dict(plain.named_parameters())
    for model in (spread,):
        model.norm.reshard()
        for name, parameter in model.named_parameters():
            assert is_spread(parameter) and torch.equal(shard_of(parameter), expected[name])


def test_gradients_are_summed_and_never_divided() -> None:
    spread = net(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    for module in (spread.first, spread.last, spread):
        module.set_gradient_divide_factor(7.0)
    examine([spread], adam(spread), None)
    sums = Accumulation(spread.parameters(), torch_grads=True)
    spread(rows(1)).sum().backward()
    assert sums._first.flat[: sums.gradients].abs().sum() > 0
    assert all(parameter.grad is None for parameter in spread.parameters())
    assert torch.equal(sums._first.places[-1], torch.full((3,), 2.0)), "of the last bias, two rows"


def test_state_of_spread_model_is_that_of_the_whole_one() -> None:
    plain, spread, newcomer = net(spread=False), net(), net()
    optimizers = [adam(model) for model in (plain, spread, newcomer)]
    for model, optimizer in zip((plain, spread), optimizers, strict=False):
        train(model, optimizer)
    states = [
        TrainingState([model], optimizer, None) for model, optimizer in zip((plain, spread), optimizers, strict=False)
    ]
    (expected, expected_tensors), (skeleton, tensors) = (flatten(state.capture(4, 0.5)) for state in states)
    assert expected == skeleton and not any(map(is_spread, tensors))
    assert all(torch.equal(one, other) for one, other in zip(expected_tensors, tensors, strict=True))
    state = TrainingState([newcomer], optimizers[2], None)
    newcomer(rows(0))  # its last layers are whole while it receives
    state.restore(unflatten(skeleton, [tensor.clone() for tensor in tensors]))
    assert state.params_digest() == states[1].params_digest()
    assert checksum(newcomer.parameters()) == checksum(plain.parameters())
    assert ParameterDigest(newcomer.parameters()).number() == ParameterDigest(plain.parameters()).number()
    moments = optimizers[2].state_dict()["state"][0]["exp_avg"]
    assert is_spread(moments) and torch.equal(shard_of(moments), optimizers[0].state_dict()["state"][0]["exp_avg"])
    whole = net(spread=False)
    other = TrainingState([whole], adam(whole), None)
    other.restore(unflatten(skeleton, [tensor.clone() for tensor in tensors]))
    for model, optimizer in ((whole, other.optimizer), (newcomer, optimizers[2])):
        model(rows(5)).sum().backward()
        optimizer.step()
    assert state.params_digest() == other.params_digest() != states[1].params_digest()


def test_state_with_shards_of_another_shape_is_refused() -> None:
    spread = net()
    with pytest.raises(ValueError, match=r"a shard of shape \(5, 4\), of a parameter whose shard is \(6, 4\)"):
        spread_as(spread.first.weight, torch.zeros(5, 4))
    optimizer = adam(spread)
    train(spread, optimizer, 1)
    tree: Any = unflatten(*flatten(TrainingState([spread], optimizer, None).capture(1, 0.0)))
    tree["optimizer"]["state"][0]["exp_avg"] = torch.zeros(5, 4)
    with pytest.raises(BadState, match="optimizer: a shard of shape"):
        TrainingState([spread], optimizer, None).restore(tree)


def test_layout_has_the_place_of_each_shard() -> None:
    spread = net()
    layout = layout_of([spread], adam(spread), 1, 1)
    assert layout is not None
    assert layout.tensors["0.first.weight"] == (Piece("first.weight", (6, 4), (0, 0), (0, 0), (6, 4)),)
    assert layout.optimizer["state.0"] == "0.first.weight"


def test_shard_without_rows_is_put_together() -> None:
    """One row over two workers: the second has none, of the tensor and of its moments."""
    whole = {"tensors": {"w": torch.ones(1, 3)}, "optimizer": {"state": {0: {"exp_avg": torch.full((1, 3), 2.0)}}}}
    piece = Piece("w", (1, 3), (0, 0), (0, 0), (1, 3))
    source = {**whole, "layout": _builtins(StateLayout(1, 1, {"w": (piece,)}, {"state.0": "w"})), "iteration": 3}
    nothing = Piece("w", (1, 3), (1, 0), (0, 0), (0, 3))
    target = {
        "tensors": {"w": torch.zeros(0, 3)},
        "optimizer": {"state": {}, "param_groups": [{"params": [0]}]},
        "layout": _builtins(StateLayout(1, 1, {"w": (nothing,)}, {"state.0": "w"})),
    }
    source["optimizer"]["param_groups"] = [{"params": [0]}]  # type: ignore[index]
    tree = reshard(target, [source])
    assert tree["tensors"]["w"].shape == (0, 3)
    assert tree["optimizer"]["state"][0]["exp_avg"].shape == (0, 3)


def _builtins(layout: StateLayout) -> object:
    import msgspec

    return msgspec.to_builtins(layout)


# --- what is refused -----------------------------------------------------------------------------


def two_dimensions() -> Net:
    return net(mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard")))


def compiled() -> Net:
    model = net()
    model.first.compile()
    return model


def unsynchronized() -> Any:
    model: Any = net()
    model.set_requires_gradient_sync(False)
    return model


def hooked() -> Any:
    model: Any = net()
    model.first.set_all_reduce_hook(lambda gradients: None)
    return model


def in_part() -> Net:
    model = net(spread=False)
    fully_shard(model.first, mesh=init_device_mesh("cpu", (1,)))
    return model


@pytest.mark.parametrize(
    ("build", "sizes", "sentence"),
    [
        (
            two_dimensions,
            {},
            r"first\.weight is on a mesh of 1 x 1, and a replica has 1 workers in one dimension: .*leave",
        ),
        (net, {"workers": 2, "sharers": 2}, r"first\.weight is on a mesh of 1, and a replica has 2 workers"),
        (
            net,
            {"workers": 1, "sharers": 2},
            r"first\.weight is sharded by fully_shard in a replica of tp, pp or cp: .*ep: 1",
        ),
        (
            lambda: net(offload_policy=CPUOffloadPolicy(pin_memory=False)),
            {},
            r"CPUOffloadPolicy\(\)\) is not taken yet",
        ),
        (compiled, {}, r"first is compiled \(torch\.compile\), which is not taken beside fully_shard yet"),
        (unsynchronized, {}, r"set_requires_gradient_sync\(False\) was called; leave it out"),
        (hooked, {}, r"set_all_reduce_hook was called; leave it out"),
        (net, {"overlap": True}, r"Hook\.attach\(overlap=True\) is not taken beside fully_shard yet"),
        (lambda: net(spread=False), {"workers": 2, "sharers": 2}, r"first\.weight is sharded by no fully_shard: its"),
    ],
)
def test_attach_refuses(build: Callable[[], Net], sizes: dict[str, int], sentence: str) -> None:
    model = build()
    with pytest.raises(CannotAttach, match=sentence):
        examine([model], adam(model), None, **sizes)  # type: ignore[arg-type]


def test_part_of_a_model_alone_is_refused_among_sharers() -> None:
    text = fully_sharded.obstacle([model := in_part()], list(model.named_parameters()), 1, 1)
    assert not text, "one worker sums with nobody"
    text = fully_sharded.obstacle([model], [*model.norm.named_parameters()], 2, 2)
    assert text.startswith("weight is sharded by no fully_shard: its gradients would not be summed over the 2 workers")


@pytest.mark.parametrize(
    ("method", "good", "bad"),
    [
        ("set_requires_gradient_sync", True, False),
        ("set_is_last_backward", True, False),
        ("set_gradient_divide_factor", 1.0, 2.0),
    ],
)
def test_what_changes_the_sums_is_refused_where_it_is_called(method: str, good: object, bad: object) -> None:
    model: Any = net()
    examine([model], adam(model), None)
    getattr(model.last, method)(good)
    with pytest.raises(ChangesSums, match=rf"fully_shard: {method}\({bad}\): each backward's gradients are summed"):
        getattr(model, method)(bad)


def test_optimizer_whose_state_is_cut_otherwise_is_refused_behind_its_first_step() -> None:
    model = net()
    with pytest.raises(CannotAttach, match=r"the optimizer Rows has a rows of shape \(6,\), which .*as AdamW or SGD"):
        train(model, Rows(model.parameters(), 0.01), 2)


# --- samples and buffers of the workers ------------------------------------------------------------


def test_samples_of_ranks_are_those_of_their_replica() -> None:
    sampling = Sampling(1, 24, 2, 100, ranks=3)
    whole = sampling.of_replica
    assert (whole.micro_batch, whole.ranks) == (6, 1)
    for micro_batch in range(4):
        parts = [sampling.samples(5, 3 * micro_batch + rank) for rank in range(3)]
        assert sum(parts, ()) == whole.samples(5, micro_batch)


@pytest.mark.parametrize(("samples", "divides"), [(12, True), (10, False)])
def test_batches_of_an_epoch_must_divide_among_ranks(samples: int, divides: bool) -> None:
    loader = DataLoader(TensorDataset(torch.zeros(samples)), 2)
    refusal = (
        contextlib.nullcontext() if divides else pytest.raises(BadLoader, match="5 batches of an epoch do not divide")
    )
    with refusal:
        DataLoaderOrder(loader, Sampling(1, 12, 2, None, ranks=2))


def test_buffer_that_changes_is_refused_among_ranks() -> None:
    model = torch.nn.BatchNorm1d(3)
    buffers = CarriedBuffers([model], ranks=2)
    buffers.begin()
    model(torch.randn(4, 3))
    with pytest.raises(BufferMoved, match=r"running_mean: a buffer changes .* on each of the 2 workers of a replica"):
        buffers.end([1], torch.zeros(buffers.size))


def test_documents_say_what_is_refused() -> None:
    text = (Path(__file__).parents[2] / "docs" / "use" / "hook.md").read_text()
    for name in (
        "CPUOffloadPolicy",
        "set_requires_gradient_sync",
        "set_is_last_backward",
        "set_all_reduce_hook",
        "ignored_params",
    ):
        assert name in text.split("## A replica that is sharded")[1]
