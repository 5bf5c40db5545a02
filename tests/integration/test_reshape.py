"""Another tp and pp for a task in the middle of its training: real workers, real memory, real servers of memory."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from msgspec.structs import replace

from tests.integration.memory_nodes import OtherNode
from tests.integration.regroup_rig import ForkServer, Rig
from tests.integration.test_regroup import check_samples, complete, regrouped, stopped, task
from unicrond.agents.protocol.memory import Memory
from unicrond.agents.trainer.states import checkpoint
from unicrond.agents.trainer.states.resharding import layout_in
from unicrond.events.vocabulary import (
    CheckpointSaved,
    CheckpointSpec,
    ModelSpec,
    OptimizerSpec,
    StateLoaded,
    TaskSpec,
    WorkerPaused,
)
from unicrond.events.vocabulary.shape import Shape

Start: TypeAlias = Callable[[TaskSpec], AbstractContextManager[Rig]]
#: tp, pp, replicas.
Form: TypeAlias = tuple[int, int, int]
Course: TypeAlias = tuple[dict[int, float], dict[str, torch.Tensor]]
Unchanged: TypeAlias = Callable[[Form], Course]
ITERATIONS = 8
BOUNDARY = 3


@pytest.fixture
def start(server: ForkServer, tmp_path: Path) -> Start:
    return partial(Rig, server, tmp_path)


@pytest.fixture(scope="module")
def unchanged(server: ForkServer, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Unchanged:
    """Losses and parameters of a run that keeps its form; each is made once."""
    start = partial(Rig, server, tmp_path_factory.mktemp("unchanged"))
    return lru_cache(partial(trained, start, data))


def spec_of(data: Path, form: Form) -> TaskSpec:
    """Memory is written to at the handover alone, storage at the end."""
    tp, pp, replicas = form
    return task(
        data,
        tp=tp,
        pp=pp,
        max_workers=tp * pp * replicas,
        model=ModelSpec(layers=2, hidden=32, heads=2, seq=16),
        iterations=ITERATIONS,
        optimizer=OptimizerSpec(lr=1e-3, warmup_iterations=2, decay_iterations=20),
        checkpoint=CheckpointSpec(dir="(the rig says)", interval=0, memory_interval=1000),
    )


def whole_state(run: Rig, form: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Everything in the newest checkpoint that belongs to a tensor, by what it is and the tensor's global name."""
    iteration, layout = next(iter(checkpoint.newest_iterations(run.checkpoints, run.task).items()))
    assert layout == Shape(*form)
    found: dict[str, torch.Tensor] = {}
    for shard in range(form[0] * form[1]):
        tree, _ = checkpoint.load(run.checkpoints, run.task, iteration, shard)
        lies = layout_in(tree)
        values = {f"tensor:{name}": (name, tensor) for name, tensor in tree["tensors"].items()}
        for path, name in lies.optimizer.items():
            at: Any = tree["optimizer"]
            *parents, last = path.split(".")
            for part in parents:
                at = at[int(part)] if part.isdecimal() else at[part]
            what = ".".join(part for part in parents if not part.isdecimal())
            held = at[int(last)]
            entries = held if isinstance(held, dict) else {"master": held}
            values |= {f"{what}:{entry}:{name}": (name, value) for entry, value in entries.items()}
        for key, (name, value) in values.items():
            (piece,) = lies.tensors[name]
            whole_name = f"{key.removesuffix(name)}{piece.key}"
            if not value.dim():
                layer = piece.at[: len(piece.whole) - len(piece.shape)]
                found[f"{whole_name}{layer}"] = value
                continue
            whole = found.setdefault(whole_name, torch.full(piece.whole, torch.nan, dtype=value.dtype))
            box = tuple(slice(begin, end) for begin, end in piece.box)
            whole[box] = value.reshape(whole[box].shape)
    assert all(torch.isfinite(tensor).all() for tensor in found.values())
    return found


def whole_parameters(run: Rig) -> dict[str, torch.Tensor]:
    """The parameters in the newest checkpoint, by their global names, whatever its layout."""
    form = next(iter(checkpoint.newest_iterations(run.checkpoints, run.task).values()))
    named = whole_state(run, form).items()
    return {name.removeprefix("tensor:"): tensor for name, tensor in named if name.startswith("tensor:")}


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of a tensor; not of the biases of attention keys, which are rounding noise."""
    assert one.keys() == other.keys()
    names = [name for name in one if not name.endswith("linear_qkv.bias")]
    return max(float((one[name] - other[name]).norm() / other[name].norm().clamp_min(1e-9)) for name in names)


def workers_of(first: int, form: Form) -> list[str]:
    return [f"t.{first + number}" for number in range(form[0] * form[1] * form[2])]


def trained(start: Start, data: Path, form: Form) -> Course:
    """Losses by iteration, and the parameters at the end, of a run that nothing happens to."""
    with start(spec_of(data, form)) as run:
        workers = workers_of(1, form)
        run.start(*workers)
        run.until(lambda: run.ready(*workers))
        run.tell(1, workers)
        complete(run)
        return {iteration: told.loss for iteration, told in run.iterations().items()}, whole_parameters(run)


def hand_over(run: Rig, workers: list[str], *, memory: bool) -> None:
    """Train to BOUNDARY; there all leave, and the lead's replica hands the state over. Each worker has its own node."""
    for number, worker in enumerate(workers):
        fault = f"stop@iteration={BOUNDARY},micro_batch=0" if number == 0 else ""
        run.start(worker, fault=fault, node=f"n{number}", memory=memory)
    run.until(lambda: run.ready(*workers))
    run.tell(1, workers)
    run.until(lambda: stopped(run.pids[workers[0]]))
    run.tell(2, [], also=workers, handover=True)
    run.signal(workers[0], signal.SIGCONT)
    run.until(lambda: len(run.of(WorkerPaused)) == len(workers))
    run.quit(*workers)
    run.until(lambda: not run.living())


def go_on(run: Rig, spec: TaskSpec, workers: list[str]) -> None:
    """New workers of another form, on another node, which are told who keeps something of the task."""
    nodes: dict[str, dict[int, Memory]] = {}
    for (node, shard), memory in run.memories.items():
        nodes.setdefault(node, {})[shard] = memory
    run.reshape(spec)
    with ExitStack() as held:
        peers = [held.enter_context(OtherNode(node, shards)) for node, shards in nodes.items()]
        run.start(*workers, node="other", memory=True)
        run.until(lambda: run.ready(*workers))
        run.tell(3, workers, joiners=workers, urgent=True, peers=peers)
        complete(run)


FORMS = {
    "tp 1 -> tp 2": ((1, 1, 1), (2, 1, 1)),
    "tp 2 -> tp 1, two replicas": ((2, 1, 1), (1, 1, 2)),
    "tp 2 -> pp 2, two replicas": ((2, 1, 1), (1, 2, 2)),
    "tp 2 -> pp 2": ((2, 1, 1), (1, 2, 1)),
    "pp 2 -> tp 1": ((1, 2, 1), (1, 1, 1)),
}


#: In the plain suite: tensors are joined, stages are cut, and there is a second replica to give it to.
ALWAYS = ("tp 2 -> pp 2, two replicas",)


@pytest.mark.parametrize(
    "forms", [pytest.param(FORMS[name], id=name, marks=[] if name in ALWAYS else pytest.mark.matrix) for name in FORMS]
)
def test_reshape_takes_state_from_memory(
    start: Start, data: Path, unchanged: Unchanged, forms: tuple[Form, Form]
) -> None:
    before, after = forms
    old = workers_of(1, before)
    new = workers_of(1 + len(old), after)
    losses, parameters = unchanged(before)
    with start(spec_of(data, before)) as run:
        hand_over(run, old, memory=True)
        assert not run.of(CheckpointSaved), "memory is enough"
        go_on(run, spec_of(data, after), new)
        (told,) = run.of(StateLoaded, new[0])
        assert isinstance(told, StateLoaded)
        assert (told.source, told.iteration, told.failed_sources) == ("peer", BOUNDARY, ())
        assert told.resharded_from == f"tp {before[0]}, pp {before[1]}"
        assert {regrouped(run, worker).iteration for worker in new} == {BOUNDARY + 1}
        check_samples(run)
        mine = {iteration: commit.loss for iteration, commit in run.iterations().items()}
        assert mine == pytest.approx(losses, rel=1e-6)
        assert apart(whole_parameters(run), parameters) <= 1e-6


@pytest.mark.matrix
def test_reshape_with_sharded_optimizer_keeps_training(start: Start, data: Path, unchanged: Unchanged) -> None:
    """Parts are put together before all leave, and divided anew among the new replicas."""
    losses, parameters = unchanged((2, 1, 2))

    def sharded(form: Form) -> TaskSpec:
        spec = spec_of(data, form)
        return replace(spec, optimizer=replace(spec.optimizer, distributed=True))

    with start(sharded((2, 1, 2))) as run:
        hand_over(run, ["t.1", "t.2", "t.3", "t.4"], memory=True)
        go_on(run, sharded((1, 2, 3)), workers_of(5, (1, 2, 3)))
        (told,) = run.of(StateLoaded, "t.5")
        assert isinstance(told, StateLoaded) and (told.source, told.resharded_from) == ("peer", "tp 2, pp 1")
        assert {i: commit.loss for i, commit in run.iterations().items()} == pytest.approx(losses, rel=1e-6)
        assert apart(whole_parameters(run), parameters) <= 1e-6


@pytest.mark.matrix
def test_reshape_takes_state_from_storage(start: Start, data: Path, unchanged: Unchanged) -> None:
    """Where no node keeps anything."""
    losses, parameters = unchanged((2, 1, 1))
    with start(spec_of(data, (2, 1, 1))) as run:
        hand_over(run, ["t.1", "t.2"], memory=False)
        (saved,) = run.of(CheckpointSaved)
        assert isinstance(saved, CheckpointSaved) and saved.iteration == BOUNDARY
        go_on(run, spec_of(data, (1, 2, 1)), ["t.3", "t.4"])
        (told,) = run.of(StateLoaded, "t.3")
        assert isinstance(told, StateLoaded)
        assert (told.source, told.iteration, told.resharded_from) == ("checkpoint", BOUNDARY, "tp 2, pp 1")
        assert {i: commit.loss for i, commit in run.iterations().items()} == pytest.approx(losses, rel=1e-6)
        assert apart(whole_parameters(run), parameters) <= 1e-6


@pytest.mark.parametrize("entry", [pytest.param("gpt", marks=pytest.mark.matrix), "bf16"])
def test_reshape_preserves_bits_of_state(start: Start, data: Path, tmp_path: Path, entry: str) -> None:
    """Storage holds tp 2; workers of pp 2, which find everything done, save what they have taken from it."""
    before, after = (replace(spec_of(data, form), iterations=20) for form in ((2, 1, 1), (1, 2, 1)))
    if entry == "bf16":  # with fp32 masters
        script = Path(__file__).with_name("traced_gpt.py")
        before, after = (
            replace(spec, entry=str(script), args=(str(tmp_path), "--bf16", "--untraced")) for spec in (before, after)
        )
    with start(before) as run:
        hand_over(run, ["t.1", "t.2"], memory=False)
        there = whole_state(run, (2, 1))
        kinds = {name.rpartition(":")[0] for name in there}
        moments = {"state:exp_avg", "state:exp_avg_sq", "state:step"}
        if entry == "bf16":
            moments = {f"optimizer.{kind}" for kind in moments} | {"fp32_from_fp16_params:master"}
        assert kinds == {"tensor", *moments}
        go_on(run, replace(after, iterations=BOUNDARY), ["t.3", "t.4"])
        here = whole_state(run, (1, 2))
    assert there.keys() == here.keys()
    assert all(torch.equal(there[name], here[name]) for name in there)


@pytest.mark.matrix
@pytest.mark.parametrize("forms", [pytest.param(FORMS[name], id=name) for name in FORMS])
def test_reshaped_training_matches_fresh_run_bit_for_bit(start: Start, data: Path, forms: tuple[Form, Form]) -> None:
    """What takes the state from memory, against what begins in the new layout with the same state from storage."""
    before, after = forms
    old = workers_of(1, before)
    ends, sources = [], []
    for memory in (True, False):
        with start(spec_of(data, before)) as run:
            hand_over(run, old, memory=memory)
            go_on(run, spec_of(data, after), workers_of(1 + len(old), after))
            (told,) = run.of(StateLoaded, f"t.{1 + len(old)}")
            assert isinstance(told, StateLoaded) and told.iteration == BOUNDARY
            sources.append(told.source)
            losses = {iteration: commit.loss for iteration, commit in run.iterations().items()}
            ends.append((losses, whole_state(run, after[:2])))
    assert sources == ["peer", "checkpoint"]
    (losses, here), (other_losses, there) = ends
    assert losses == other_losses and max(losses) == ITERATIONS
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name], there[name]) for name in here)


def test_missing_shard_falls_back_to_older_checkpoint(start: Start, data: Path) -> None:
    spec = spec_of(data, (2, 1, 1))
    with start(replace(spec, checkpoint=replace(spec.checkpoint, interval=2))) as run:
        hand_over(run, ["t.1", "t.2"], memory=True)
        run.forget_memory("n1")
        go_on(run, replace(spec_of(data, (1, 1, 1)), iterations=BOUNDARY), ["t.3"])
        (told,) = run.of(StateLoaded, "t.3")
        assert isinstance(told, StateLoaded)
        assert (told.source, told.iteration, told.resharded_from) == ("checkpoint", 2, "tp 2, pp 1")
