"""What a program gives to attach trains as it does alone, or is refused with the parameter and the fix."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import distribute_module
from torch.nn.parallel import DistributedDataParallel

from unicrond import Hook, Local
from unicrond.agents.trainer.entry import worker
from unicrond.agents.trainer.gradients import carried_buffers
from unicrond.agents.trainer.gradients.carried_buffers import BufferMoved
from unicrond.agents.trainer.loop import examination, fully_sharded
from unicrond.agents.trainer.loop.examination import CannotAttach
from unicrond.agents.trainer.loop.local import LocalHook
from unicrond.agents.trainer.process import replica
from unicrond.agents.trainer.states.state import BadState, TrainingState, as_one, tensor_bytes

SGD, AdamW = torch.optim.SGD, torch.optim.AdamW


class Net(torch.nn.Module):
    """Two layers by name, and whatever stands between them."""

    def __init__(self, *between: torch.nn.Module) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.between = torch.nn.Sequential(*between)
        self.last = torch.nn.Linear(4, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.between(self.first(rows)))


class Bare:
    """An optimizer by hand, without a state."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.param_groups = [{"params": list(parameters)}]

    def step(self) -> None: ...


class Hidden:
    """An optimizer with a state, which does not say what it steps."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Odd(SGD):
    """Has a state that is no plain value."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "closure": object()}


def attach(model: Any, optimizer: Any, scheduler: Any = None, *, iterations: int = 1, **sizes: int) -> LocalHook:
    hook = Hook.attach_or_local(
        Local(iterations, sizes.get("global_batch", 4), sizes.get("micro_batch", 2)), model, optimizer, scheduler
    )
    assert isinstance(hook, LocalHook)
    return hook


@pytest.fixture
def world() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def uncovered() -> tuple[Any, ...]:
    model = Net()
    return model, SGD(model.first.parameters(), 0.1)


def of_nothing() -> tuple[Any, ...]:
    model, head = Net(), torch.nn.Linear(7, 3)
    return model, SGD([*model.parameters(), *head.parameters()], 0.1)


def with_hook() -> tuple[Any, ...]:
    model = Net()
    model.last.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return model, SGD(model.parameters(), 0.1)


def lazy() -> tuple[Any, ...]:
    model = Net(torch.nn.LazyLinear(4))
    return model, SGD(model.parameters(), 0.1)


def on_meta() -> tuple[Any, ...]:
    model = Net().to("meta")
    return model, SGD(model.parameters(), 0.1)


class Elsewhere(torch.nn.Parameter):
    """Says that it is on a GPU."""

    device = property(lambda self: torch.device("cuda:1"))  # type: ignore[assignment]


def two_devices() -> tuple[Any, ...]:
    model = Net()
    model.last.weight = Elsewhere(torch.zeros(1, 4))
    return model, SGD(model.parameters(), 0.1)


def of(make: Callable[[torch.nn.Module], Any], *between: torch.nn.Module) -> Callable[[], tuple[Any, ...]]:
    def build() -> tuple[Any, ...]:
        model = Net(*between)
        return model, make(model)

    return build


def distributed(model: Net) -> Net:
    """A model of which some parameters are DTensors, by hand."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    distribute_module(model.first, mesh)
    return model


REFUSED = {
    "in no optimizer": (
        uncovered,
        r"last\.weight, last\.bias: requires gradients and stands in no attached optimizer;",
    ),
    "in no model": (of_nothing, r"SGD steps a parameter of shape \(3, 7\) that is in no attached model; attach all"),
    "float64": (of(lambda model: SGD(model.double().parameters(), 0.1)), r"first\.weight is torch\.float64: .*convert"),
    "sync batch norm": (
        of(lambda model: SGD(model.parameters(), 0.1), torch.nn.SyncBatchNorm(4)),
        r"between\.0: SyncBatchNorm .*use BatchNorm",
    ),
    "gradient hook": (with_hook, r"last\.weight has a post-accumulate gradient hook"),
    "lazy": (lazy, r"between\.0\.weight has no shape yet: run one forward pass"),
    "meta": (on_meta, r"first\.weight is on the meta device"),
    "two devices": (two_devices, r"last\.bias on cpu and last\.weight on cuda:1: a process trains on one device"),
    "no state_dict": (of(lambda model: Bare([*model.parameters()])), r"the optimizer Bare has no state_dict"),
    "no param_groups": (of(lambda _: Hidden()), r"the optimizer Hidden has no param_groups"),
    "odd state": (of(lambda model: Odd(model.parameters(), 0.1)), r"the optimizer Odd: its state_dict must hold plain"),
    "no optimizer": (of(lambda _: []), r"no optimizer was given"),
    "LBFGS": (
        of(lambda model: torch.optim.LBFGS(model.parameters())),
        r"LBFGS computes the loss again inside its step",
    ),
    "SparseAdam": (
        of(lambda model: torch.optim.SparseAdam([*model.parameters()])),
        r"SparseAdam takes sparse gradients",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_attach_refuses(name: str) -> None:
    build, sentence = REFUSED[name]
    with pytest.raises(CannotAttach, match=sentence) as refusal:
        attach(*build())
    assert "\n" not in str(refusal.value)


def test_document_has_every_sentence_of_attach() -> None:
    text = (Path(__file__).parents[2] / "docs" / "use" / "hook.md").read_text()
    quotes = re.findall(r'"([^"]+)"', text.split("| refused | sentence |")[1].split("\n\n")[0])
    messages = []
    for build, _ in REFUSED.values():
        with pytest.raises(CannotAttach) as refusal:
            attach(*build())
        messages.append(str(refusal.value))
        assert any(quote in messages[-1] for quote in quotes), messages[-1]
    source = "".join(
        re.sub(r'"\s*\n\s*f?"', "", path.read_text())
        for path in (Path(module.__file__) for module in (examination, fully_sharded, carried_buffers, replica, worker))
    )
    elsewhere = [quote for quote in quotes if not any(quote in message for message in messages)]
    for quote in elsewhere:
        words = quote.replace("first.weight", "{name}").replace("last.weight", "{name}")
        words = words.replace("DistributedDataParallel, which", "{wrapper}, which")
        words = words.replace("AdamW has stepped 10", "{name} has stepped {_STEPS_ALONE_MAX}")
        words = words.replace("LOCAL_RANK is not", "{error.args[0]} is not")
        words = words.replace("2.0 MiB", "{place.tensor.nbytes / 2**20:.1f} MiB")
        words = words.replace("of 4 micro", "of {len(micro_batches)} micro").split("; give")[0]
        assert words in source, quote


@pytest.mark.parametrize("rates", [[0.1] * 11, [0.0] * 11, [0.0] * 10 + [0.1]])
def test_ten_iterations_that_change_nothing_are_refused_unless_no_rate_was_set(rates: list[float]) -> None:
    model = Net()
    examination_of = examination.examine([model], torch.optim.SGD(model.parameters(), 0.1), None)
    with contextlib.ExitStack() as stack:
        for iteration, rate in enumerate(rates, 1):
            examination_of.optimizers[0].param_groups[0]["lr"] = rate
            if iteration == 11 and any(rates[:10]):
                stack.enter_context(pytest.raises(CannotAttach, match="10 iterations have changed no parameter"))
            examination_of.compare(iteration, loss_scaled=False)


def test_attach_refuses_scheduler_without_state() -> None:
    model = Net()
    with pytest.raises(CannotAttach, match="the scheduler object has no state_dict"):
        attach(model, SGD(model.parameters(), 0.1), object())


def test_attach_names_parameters_of_the_model_they_are_in() -> None:
    one, other = Net(), Net()
    with pytest.raises(CannotAttach, match=r"1\.first\.weight, 1\.first\.bias, 1\.last\.weight and 1 more: requires"):
        attach([one, other], SGD(one.parameters(), 0.1))


@pytest.mark.parametrize(
    ("wrap", "sentence"),
    [
        (DistributedDataParallel, r"torch's DistributedDataParallel, .*`model\.module`"),
        (torch.nn.DataParallel, r"torch's DataParallel, .*`model\.module`"),
        (lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")), r"FullyShardedDataParallel"),
        (distributed, r"first\.weight is a DTensor of parallelize_module or distribute_tensor: .*Megatron's tp and pp"),
    ],
    ids=["ddp", "dp", "fsdp1", "dtensor"],
)
@pytest.mark.usefixtures("world")
@pytest.mark.filterwarnings("ignore")
def test_attach_refuses_what_reduces_by_itself(wrap: Callable[[torch.nn.Module], Any], sentence: str) -> None:
    model = wrap(Net())
    with pytest.raises(CannotAttach, match=sentence):
        attach(model, SGD(model.parameters(), 0.1))


def test_attach_once() -> None:
    model = Net()
    optimizer = SGD(model.parameters(), 0.1)
    attach(model, optimizer)
    with pytest.raises(CannotAttach, match="attach once"):
        attach(model, optimizer)


# --- what changes behind attach ------------------------------------------------------------------


def begin(hook: LocalHook) -> None:
    for step in hook.steps():
        for _ in step:
            step.add(1.0, 1)


def test_parameters_replaced_after_attach_are_refused() -> None:
    model = Net()
    hook = attach(model, SGD(model.parameters(), 0.1))
    model.last.weight = torch.nn.Parameter(torch.zeros(1, 4))
    with pytest.raises(CannotAttach, match="have been replaced since"):
        begin(hook)


def test_parameters_added_to_optimizer_after_attach_are_refused() -> None:
    model = Net()
    model.last.requires_grad_(False)
    optimizer = SGD(model.first.parameters(), 0.1)
    hook = attach(model, optimizer)
    optimizer.add_param_group({"params": list(model.last.parameters())})
    with pytest.raises(CannotAttach, match="have been replaced since"):
        begin(hook)


def test_hook_added_after_attach_is_refused() -> None:
    model = Net()
    hook = attach(model, SGD(model.parameters(), 0.1))
    model.first.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(CannotAttach, match=r"first\.bias has a post-accumulate gradient hook"):
        begin(hook)


def test_parameter_frozen_in_training_is_refused() -> None:
    model = Net()
    hook = attach(model, SGD(model.parameters(), 0.1), iterations=2)
    with pytest.raises(CannotAttach, match=r"last\.weight: requires_grad has changed since Hook\.attach"):
        for step in hook.steps():
            for _ in step:
                step.add(1.0, 1)
            model.last.requires_grad_(False)


# --- what is taken, beside the same program without a hook -----------------------------------------


def train_plain(model: torch.nn.Module, optimizers: list[Any], rows: torch.Tensor, iterations: int) -> None:
    """One micro-batch an iteration: nothing is summed, so all dtypes have one right result."""
    for _ in range(iterations):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(rows).float().square().sum().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(len(rows))
        for optimizer in optimizers:
            optimizer.step()


def train_attached(model: torch.nn.Module, optimizers: list[Any], rows: torch.Tensor, iterations: int) -> None:
    hook = attach(model, optimizers, iterations=iterations, global_batch=1, micro_batch=1)
    for step in hook.steps():
        for _ in step:
            loss = model(rows).float().square().sum()
            loss.backward()
            step.add(loss.detach(), len(rows))
        for optimizer in optimizers:
            optimizer.step()


class Unused(torch.nn.Module):
    """Has a weight that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


def one_optimizer(model: torch.nn.Module) -> list[Any]:
    return [AdamW(model.parameters(), 0.01, eps=1e-4, weight_decay=0.5)]


def two_optimizers(model: Any) -> list[Any]:
    weights = [model.first.weight, model.last.weight]
    return [torch.optim.Muon(weights, 0.02), AdamW([model.first.bias, model.last.bias], 0.01)]


def frozen(model: Any) -> list[Any]:
    model.first.requires_grad_(False)
    return one_optimizer(model)


def tied(model: Any) -> list[Any]:
    model.between[0].weight = model.first.weight
    return one_optimizer(model)


def compiled(model: Any) -> list[Any]:
    model.compile(backend="aot_eager")
    return one_optimizer(model)


TAKEN: dict[str, tuple[torch.dtype, Callable[[Any], list[Any]], tuple[Callable[[], torch.nn.Module], ...]]] = {
    "float32": (torch.float32, one_optimizer, ()),
    "bfloat16": (torch.bfloat16, one_optimizer, ()),
    "float16": (torch.float16, one_optimizer, ()),
    "two optimizers": (torch.float32, two_optimizers, ()),
    "two optimizers of bfloat16": (torch.bfloat16, two_optimizers, ()),
    "batch norm": (torch.float32, one_optimizer, (lambda: torch.nn.BatchNorm1d(4),)),
    "batch norm of bfloat16": (torch.bfloat16, one_optimizer, (lambda: torch.nn.BatchNorm1d(4),)),
    "frozen": (torch.float32, frozen, ()),
    "tied": (torch.float32, tied, (lambda: torch.nn.Linear(4, 4),)),
    "unused": (torch.float32, one_optimizer, (Unused,)),
    "compiled": (torch.float32, compiled, (lambda: torch.nn.BatchNorm1d(4),)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_attached_program_has_bits_of_plain_one(name: str) -> None:
    dtype, optimizers, between = TAKEN[name]
    states = []
    rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(3)).to(dtype)
    for train in (train_plain, train_attached):
        torch.manual_seed(1)
        model = Net(*(make() for make in between)).to(dtype)
        chosen = optimizers(model)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        train(model, chosen, rows, 5)
        moved = [not torch.equal(was, now) for was, now in zip(before, model.parameters(), strict=True)]
        assert sum(moved) >= len(before) - 2, "it trains"
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    for key, tensor in states[0].items():
        assert torch.equal(tensor_bytes(tensor), tensor_bytes(states[1][key])), key


def test_sums_of_16_bit_gradients_are_in_32() -> None:
    """In bfloat16 256 + 1 is 256: of 512 micro-batches that each add 1, half would be lost."""
    weight = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))])
    hook = attach(weight, SGD(weight.parameters(), 1.0), global_batch=512, micro_batch=1)
    for step in hook.steps():
        for _ in step:
            weight[0].sum().backward()
            step.add(1.0, 1)
    assert weight[0].grad is not None and weight[0].grad.dtype == torch.bfloat16
    assert weight[0].grad.item() == 1.0


class Averaging(SGD):
    """Keeps a float32 average of each parameter."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["average"] = torch.full((4,), 1.0 + 2.0**-20)


def test_loaded_optimizer_keeps_float32_of_16_bit_parameters() -> None:
    models = [torch.nn.Linear(4, 4, bias=False).bfloat16() for _ in range(2)]
    optimizers = [Averaging(model.parameters(), 0.1) for model in models]
    optimizers[0].step()
    states = [TrainingState([model], one, None) for model, one in zip(models, optimizers, strict=True)]
    states[1].restore(states[0].capture(1, 0.0))
    average = optimizers[1].state[models[1].weight]["average"]
    assert average.dtype == torch.float32 and average[0].item() == 1.0 + 2.0**-20


def test_state_of_another_number_of_optimizers_does_not_fit() -> None:
    model = Net()
    one, two = SGD(model.first.parameters(), 0.1), SGD(model.last.parameters(), 0.2)
    tree = TrainingState([model], as_one([one, two]), None).capture(1, 0.0)
    with pytest.raises(BadState, match="optimizer: this program attaches 1, the state is of others"):
        TrainingState([model], one, None).require_fitting(tree)
    two.param_groups[0]["lr"] = 0.5
    TrainingState([model], as_one([one, two]), None).restore(tree)
    assert (one.param_groups[0]["lr"], two.param_groups[0]["lr"]) == (0.1, 0.2)


# --- buffers -------------------------------------------------------------------------------------


class Counter(torch.nn.Module):
    """Counts its calls in a buffer of this dtype and size, which it replaces (`replaces`) or writes to."""

    def __init__(self, dtype: torch.dtype, size: int = 1, *, replaces: bool = False, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(size, dtype=dtype), persistent=persistent)
        self.replaces = replaces
        self.seen: list[float] = []

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.seen.append(float(self.calls[0]))
        if self.replaces:
            self.calls = self.calls + 1
        else:
            self.calls += 1
        return rows


def run(model: torch.nn.Module, *, iterations: int = 3, at_most: int | None = 1, micro_batches: int = 4) -> None:
    hook = attach(
        model, SGD(model.parameters(), 0.01), iterations=iterations, global_batch=micro_batches, micro_batch=1
    )
    for step in hook.steps():
        for numbers in step.lists(at_most):
            for number in numbers:
                (loss := model(torch.full((2, 4), float(number + 1))).sum()).backward()
                step.add(loss.detach(), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8])
@pytest.mark.parametrize("replaces", [False, True], ids=["written", "replaced"])
def test_every_micro_batch_begins_with_the_iterations_buffers(dtype: torch.dtype, replaces: bool) -> None:
    counter = Counter(dtype, 3, replaces=replaces)
    run(Net(counter))
    assert counter.seen == [0.0] * 4 + [1.0] * 4 + [2.0] * 4
    assert counter.calls.tolist() == [3] * 3 and counter.calls.dtype == dtype


def test_buffers_after_an_iteration_are_those_of_micro_batch_0() -> None:
    torch.manual_seed(1)
    norm = torch.nn.BatchNorm1d(4)
    model = Net(norm)
    expected = 0.1 * model.first(torch.ones(2, 4)).mean(0).detach()
    run(model, iterations=1)
    assert torch.allclose(norm.running_mean, expected) and norm.num_batches_tracked == 1


def test_statistics_of_a_large_norm_are_carried() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 2**18 + 1), torch.nn.BatchNorm1d(2**18 + 1))
    expected = 0.1 * model[0](torch.ones(2, 4)).mean(0).detach()
    run(model, iterations=1, micro_batches=2)
    assert model[1].num_batches_tracked == 1 and torch.allclose(model[1].running_mean, expected)


def test_carried_bits_are_exact() -> None:
    values = torch.tensor([-0.0, float("inf"), 1e-40, 3.1415927], dtype=torch.float32)

    class Values(Counter):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            self.calls = values.clone()
            return rows

    module = Values(torch.float32, 4)
    run(Net(module), iterations=1)
    assert torch.equal(module.calls.view(torch.int32), values.view(torch.int32))


def test_caches_are_left_alone() -> None:
    counter = Counter(torch.int64, persistent=False)
    run(Net(counter))
    assert counter.seen == list(range(12))


def test_large_buffer_that_changes_is_refused() -> None:
    run(Net(torch.nn.BatchNorm1d(4)))
    with pytest.raises(BufferMoved, match=r"between\.0\.calls: a buffer of 2\.0 MiB changes in a micro-batch"):
        run(Net(Counter(torch.float32, 2**19)))


def test_large_buffer_that_is_replaced_is_refused() -> None:
    with pytest.raises(BufferMoved, match=r"between\.0\.calls: a buffer of 2\.0 MiB changes in a micro-batch"):
        run(Net(Counter(torch.float32, 2**19, replaces=True)))


def test_buffers_that_change_in_a_list_are_refused() -> None:
    with pytest.raises(BufferMoved, match=r"between\.0\.calls: a buffer changes in a list of 4 micro-batches"):
        run(Net(Counter(torch.int64)), at_most=None)


def test_buffer_of_another_shape_is_refused() -> None:
    class Growing(Counter):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            self.calls = torch.cat([self.calls, self.calls])
            return rows

    with pytest.raises(BufferMoved, match=r"between\.0\.calls: this buffer has got another shape"):
        run(Net(Growing(torch.int64)))
