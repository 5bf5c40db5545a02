"""Another tp and pp for a task in the middle of its training: real workers, real memory, real servers of memory."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeAlias

import pytest
import torch

from agents.trainer import checkpoint
from agents.trainer.memory import Memory
from agents.trainer.messages import Parked, Saved, Taken
from agents.trainer.resharding import layout_in
from events.vocabulary import CheckpointSpec, ModelSpec, TaskSpec
from tests.integration.memory_nodes import OtherNode
from tests.integration.regroup_rig import ForkServer, Rig
from tests.integration.test_regroup import check_samples, complete, regrouped, stopped, task

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
        checkpoint=CheckpointSpec(dir="(the rig says)", interval=0, memory_interval=1000),
    )


def whole_parameters(run: Rig) -> dict[str, torch.Tensor]:
    """The parameters in the newest checkpoint, by their global names, whatever its layout."""
    iteration, (tp, pp) = next(iter(checkpoint.newest_iterations(run.checkpoints, run.task).items()))
    found: dict[str, torch.Tensor] = {}
    for shard in range(tp * pp):
        tree, _ = checkpoint.load(run.checkpoints, run.task, iteration, shard)
        for name, (piece,) in layout_in(tree).tensors.items():
            whole = found.setdefault(piece.key, torch.full(piece.whole, torch.nan))
            box = tuple(slice(begin, end) for begin, end in piece.box)
            whole[box] = tree["tensors"][name].reshape(whole[box].shape)
    assert all(torch.isfinite(tensor).all() for tensor in found.values())
    return found


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
    run.until(lambda: len(run.of(Parked)) == len(workers))
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
def test_from_memory(start: Start, data: Path, unchanged: Unchanged, forms: tuple[Form, Form]) -> None:
    before, after = forms
    old = workers_of(1, before)
    new = workers_of(1 + len(old), after)
    losses, parameters = unchanged(before)
    with start(spec_of(data, before)) as run:
        hand_over(run, old, memory=True)
        assert not run.of(Saved), "memory is enough"
        go_on(run, spec_of(data, after), new)
        (told,) = run.of(Taken, new[0])
        assert isinstance(told, Taken)
        assert (told.source, told.iteration, told.tried) == ("peer", BOUNDARY, ())
        assert told.resharded_from == f"tp {before[0]}, pp {before[1]}"
        assert {regrouped(run, worker).iteration for worker in new} == {BOUNDARY + 1}
        check_samples(run)
        mine = {iteration: commit.loss for iteration, commit in run.iterations().items()}
        assert mine == pytest.approx(losses, rel=1e-6)
        assert apart(whole_parameters(run), parameters) <= 1e-6


def test_from_storage(start: Start, data: Path, unchanged: Unchanged) -> None:
    """Where no node keeps anything."""
    losses, parameters = unchanged((2, 1, 1))
    with start(spec_of(data, (2, 1, 1))) as run:
        hand_over(run, ["t.1", "t.2"], memory=False)
        (saved,) = run.of(Saved)
        assert isinstance(saved, Saved) and saved.iteration == BOUNDARY
        go_on(run, spec_of(data, (1, 2, 1)), ["t.3", "t.4"])
        (told,) = run.of(Taken, "t.3")
        assert isinstance(told, Taken)
        assert (told.source, told.iteration, told.resharded_from) == ("checkpoint", BOUNDARY, "tp 2, pp 1")
        assert {i: commit.loss for i, commit in run.iterations().items()} == pytest.approx(losses, rel=1e-6)
        assert apart(whole_parameters(run), parameters) <= 1e-6
