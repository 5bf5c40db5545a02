"""The trainer under faults: real Megatron-core workers, real sockets, real kills (see `regroup_rig.py`)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import psutil
import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from tests.integration.regroup_rig import ADDRESS, ForkServer, Rig, storm
from unicrond.agents.protocol.messages import Hello, IterationCommitted
from unicrond.agents.protocol.sampling import Sampling, samples_digest
from unicrond.agents.trainer.loop import corpus
from unicrond.agents.trainer.states import checkpoint
from unicrond.events.vocabulary import (
    CheckpointSaved,
    CheckpointSpec,
    Checksums,
    ErrorReported,
    ModelSpec,
    OptimizerSpec,
    StateLoaded,
    TaskSpec,
    WorkerJoinedGroup,
    WorkerPaused,
)

Reference: TypeAlias = dict[str, torch.Tensor]
Start: TypeAlias = Callable[[TaskSpec], AbstractContextManager[Rig]]
#: Of every second iteration.
CHECKED = {"UNICRON_CHECKSUM_EVERY": "2"}
THREE = ("t.1", "t.2", "t.3")
SMALL = ModelSpec(layers=1, hidden=32, heads=2, seq=16)


@pytest.fixture(scope="module")
def reference(server: ForkServer, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The parameters after a failure-free run of `spec` with three replicas."""
    return failure_free(partial(Rig, server, tmp_path_factory.mktemp("reference")), task(data), 3)[0]


@pytest.fixture
def rig(server: ForkServer, tmp_path: Path) -> Start:
    return partial(Rig, server, tmp_path)


@pytest.fixture
def spec(data: Path) -> TaskSpec:
    return task(data)


def task(data: Path, **changes: object) -> TaskSpec:
    """With six lanes of two micro-batches: some of them whole, some blocks, some borders inside, as replicas come and
    go."""
    fields: dict[str, object] = {
        "name": "t",
        "max_workers": 6,
        "accumulation": "exact",
        "model": SMALL,
        "optimizer": OptimizerSpec(lr=1e-3, warmup_iterations=2),
        "data": str(data),
        "global_batch": 12,
        "micro_batch": 1,
        "iterations": 4,
        "checkpoint": CheckpointSpec(dir="(the rig says)", interval=0),
        **changes,
    }
    return TaskSpec(**fields)  # type: ignore[arg-type]


def parameters(rig: Rig, size: int = 1, shard: int = 0) -> dict[str, torch.Tensor]:
    """The parameters in the newest checkpoint."""
    newest, layout = next(iter(checkpoint.newest_iterations(rig.checkpoints, rig.task).items()))
    assert layout[0] * layout[1] == size
    tree, _ = checkpoint.load(rig.checkpoints, rig.task, newest, shard)
    tensors: dict[str, torch.Tensor] = tree["tensors"]
    return tensors


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Bit by bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of any parameter tensor, relative to its norm.

    Left out: the biases of attention keys. The loss does not depend on them (softmax is blind to a shift), so their
    gradient is rounding noise, which Adam scales up to steps of its own.
    """
    assert one.keys() == other.keys()
    return max(
        float((without_key_bias(name, one[name]) - without_key_bias(name, other[name])).norm() / norm)
        for name in one
        if (norm := without_key_bias(name, other[name]).norm().clamp_min(1e-9))
    )


def without_key_bias(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not name.endswith("linear_qkv.bias"):
        return tensor
    query_key_value = tensor.view(-1, 3, 16)  # per head; 16 channels in all models here
    return query_key_value[:, [0, 2]]


def failure_free(rig: Start, spec: TaskSpec, replicas: int) -> tuple[dict[str, torch.Tensor], Rig]:
    workers = [f"t.{number}" for number in range(1, replicas * spec.replica_workers + 1)]
    with rig(spec) as run:
        begin(run, *workers)
        complete(run)
        return parameters(run, spec.replica_workers), run


def begin(run: Rig, *workers: str, fault: dict[str, str] | None = None) -> None:
    """Start the workers, each with its fault, and tell them generation 1 when all are ready."""
    for worker in workers:
        run.start(worker, fault=(fault or {}).get(worker, ""))
    run.until(lambda: run.ready(*workers))
    run.tell(1, workers)


def begin_and_tell_in_mid_iteration(
    run: Rig, workers: Sequence[str], members: Sequence[str], fault: dict[str, str] | None = None
) -> None:
    """Begin with `workers`, and tell generation 2 (planned) while they are in the middle of iteration 2, which cannot
    end meanwhile, since the first of them is stopped. Who is to join is ready by then."""
    faults, first = dict(fault or {}), workers[0]
    faults[first] = "stop@iteration=2,micro_batch=1;" + faults.get(first, "")
    everybody = [*workers, *(worker for worker in members if worker not in workers)]
    for worker in everybody:
        run.start(worker, fault=faults.get(worker, ""))
    run.until(lambda: run.ready(*everybody))
    run.tell(1, workers)
    run.until(lambda: stopped(run.pids[first]))
    leavers = [worker for worker in workers if worker not in members]
    run.tell(2, members, joiners=[worker for worker in members if worker not in workers], also=leavers)
    run.signal(first, signal.SIGCONT)


def complete(run: Rig) -> None:
    """Wait for the task's end: every living worker leaves by itself, with exit code 0."""
    staying = set(run.living())
    run.until(lambda: run.completed and not run.living())
    assert {worker: run.exits[worker] for worker in staying if run.exits[worker]} == {}


def lose(run: Rig, *workers: str) -> None:
    run.until(lambda: all(worker in run.exits for worker in workers))
    assert all(run.exits[worker] == signal.SIGKILL for worker in workers)


def check_samples(run: Rig) -> None:
    """Every iteration exactly its samples, against a computation of the test's own."""
    spec, commits = run.spec, run.iterations()
    assert list(commits) == list(range(min(commits), min(commits) + len(commits)))
    size = len(corpus.Corpus(Path(spec.data), spec.model.seq))
    sampling = Sampling(spec.seed, spec.global_batch, spec.micro_batch, size)
    for iteration, commit in commits.items():
        samples = [s for m in range(spec.micro_batches) for s in sampling.samples(iteration, m)]
        assert len(set(samples)) == commit.samples == spec.global_batch
        assert commit.samples_digest == samples_digest(iteration, samples)
        assert sum(commit.micro_batches_by_rank) == spec.micro_batches


def stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def listening(pid: int) -> set[str]:
    """The addresses on which the process can be reached over TCP."""
    found = psutil.Process(pid).net_connections("tcp")
    return {connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN}


def regrouped(run: Rig, worker: str) -> WorkerJoinedGroup:
    """What the worker said when it took its last seat."""
    told = run.of(WorkerJoinedGroup, worker)[-1]
    assert isinstance(told, WorkerJoinedGroup)
    return told


def noted(run: Rig) -> dict[int, tuple[float, int, int]]:
    """Of each iteration the loss, and the checksums of the parameters before it and of its gradients' sums."""
    numbers = {}
    for iteration, commit in run.iterations().items():
        made = commit.checksums or Checksums(iteration=0, parameters=0)
        numbers[iteration] = (commit.loss, made.parameters, made.sums)
    return numbers


def last_commit(run: Rig) -> IterationCommitted:
    return run.committed[-1]


def last_generation(run: Rig) -> int:
    return run.committed[-1].generation if run.committed else 0


# --- exactness -----------------------------------------------------------------------------------


def test_three_replicas_train_as_one(rig: Start, spec: TaskSpec) -> None:
    """And as two, four (with borders inside of lanes) and six: the same bits, the same losses and checksums."""
    spec = replace(spec, env=CHECKED)
    three, run = failure_free(rig, spec, 3)
    for replicas in (1, 2, 4, 6):
        others, other = failure_free(rig, spec, replicas)
        assert same(three, others)
        assert noted(other) == noted(run)
    assert [bool(sums) for _, _, sums in noted(run).values()] == [False, True, False, True]
    assert noted(run)[2][1:] != noted(run)[4][1:]
    check_samples(run)


def test_growing_and_shrinking_changes_no_bit(rig: Start, spec: TaskSpec) -> None:
    """By planned memberships, over 2, 4, 6, 3, 1 and 4 replicas; every step is that of a replica alone. All that join
    are ready beforehand, so that few iterations are made meanwhile."""
    spec = replace(spec, env={"UNICRON_CHECKSUM_EVERY": "1"}, optimizer=replace(spec.optimizer, decay_iterations=1000))
    sizes, ready = (2, 4, 6, 3, 1, 4), [f"t.{number}" for number in range(1, 10)]
    members: list[str] = []
    with rig(replace(spec, iterations=10**6)) as run:
        run.start(*ready)
        run.until(lambda: run.ready(*ready))
        for generation, size in enumerate(sizes, 1):
            leavers, joiners = members[size:], ready[: max(0, size - len(members))]
            members, ready = [*members[:size], *joiners], ready[len(joiners) :]
            run.tell(generation, members, joiners=joiners if generation > 1 else (), also=leavers)
            run.until(lambda generation=generation: last_generation(run) == generation)  # type: ignore[misc]
        found = noted(run)
        assert {len(commit.micro_batches_by_rank) for commit in run.committed} == set(sizes)
        check_samples(run)
    _, alone = failure_free(rig, replace(spec, iterations=max(found)), 1)
    assert found == noted(alone)


def test_following_sum_differs_only_by_rounding(rig: Start, spec: TaskSpec) -> None:
    follow = replace(spec, accumulation="float")
    three, run = failure_free(rig, follow, 3)
    one, _ = failure_free(rig, follow, 1)
    assert apart(three, one) <= 1e-6
    check_samples(run)


def test_kill_in_mid_iteration_changes_nothing(rig: Start, spec: TaskSpec) -> None:
    with_dropout = replace(spec, model=replace(spec.model, dropout=0.1), env=CHECKED)
    expected, unbroken = failure_free(rig, with_dropout, 3)
    with rig(with_dropout) as run:
        begin(run, *THREE, fault={"t.3": "kill@iteration=4,micro_batch=2"})
        lose(run, "t.3")
        run.until(lambda: run.of(ErrorReported))  # the survivors notice by themselves, and wait for the membership
        run.tell(2, ["t.1", "t.2"], urgent=True)
        complete(run)
        assert same(parameters(run), expected)
        assert noted(run) == noted(unbroken)
        assert last_commit(run).micro_batches_by_rank == (6, 6)
        assert last_commit(run).micro_batches_repeated == 4
        check_samples(run)


@pytest.mark.parametrize("victim", ["t.1", "t.3"])
@pytest.mark.parametrize("moment", ["computed", "reducing", "reduced", "agreeing", "agreed", "committed"])
def test_kill_at_collective_changes_nothing(
    rig: Start, spec: TaskSpec, reference: Reference, moment: str, victim: str
) -> None:
    with rig(spec) as run:
        begin(run, *THREE, fault={victim: f"kill@iteration=3,at={moment}"})
        lose(run, victim)
        run.tell(2, [worker for worker in THREE if worker != victim], urgent=True)
        complete(run)
        assert same(parameters(run), reference)
        check_samples(run)
        assert run.iterations()[4].micro_batches_by_rank == (6, 6)


def test_death_after_reduction_costs_no_recomputation(rig: Start, spec: TaskSpec, reference: Reference) -> None:
    """All survivors hold complete sums when the victim dies: they step with them."""
    with rig(spec) as run:
        faults = dict.fromkeys(THREE, "stop@iteration=3,at=reduced")
        begin(run, *THREE, fault=faults)
        run.until(lambda: all(stopped(run.pids[worker]) for worker in THREE))
        run.signal("t.2", signal.SIGKILL)
        lose(run, "t.2")
        run.tell(2, ["t.1", "t.3"], urgent=True)
        for worker in ("t.1", "t.3"):
            run.signal(worker, signal.SIGCONT)
        complete(run)
        commit = run.iterations()[3]
        assert (commit.generation, commit.micro_batches_repeated, commit.micro_batches_by_rank) == (1, 0, (4, 4, 4))
        assert same(parameters(run), reference)


def test_regroup_causes_no_drift_over_twenty_steps(rig: Start, spec: TaskSpec) -> None:
    longer = replace(spec, iterations=26)
    expected, _ = failure_free(rig, longer, 3)
    with rig(longer) as control:
        begin_and_tell_in_mid_iteration(control, THREE, ["t.1", "t.2"])
        control.until(lambda: control.of(WorkerPaused))
        control.quit("t.3")
        complete(control)
        last_of_three = max(i for i, c in control.iterations().items() if len(c.micro_batches_by_rank) == 3)
        assert same(parameters(control), expected)
    with rig(longer) as healed:
        begin(healed, *THREE, fault={"t.3": f"kill@iteration={last_of_three},micro_batch=2"})
        lose(healed, "t.3")
        healed.tell(2, ["t.1", "t.2"], urgent=True)
        complete(healed)
        assert last_of_three <= 6, "the control left too late for 20 steps to follow"
        assert same(parameters(healed), expected)


@pytest.mark.parametrize("wish", ["check", "require"])
def test_irreproducible_bits_are_reported_at_task_start(rig: Start, spec: TaskSpec, wish: str) -> None:
    """The second worker's first gradients are a hundred times as large as they should be."""
    odd = str(Path(__file__).with_name("odd_gpt.py"))
    env = {"UNICRON_DETERMINISTIC": wish}
    with rig(replace(spec, entry=odd, args=("gradient", "2", "1"), env=env, on_divergence="report")) as run:
        begin(run, "t.1", "t.2")
        told = "on replica 1 a micro-batch computed twice has different bits"
        if wish == "require":
            run.until(lambda: not run.living())
            assert all(
                told in message.message for message in run.of(ErrorReported) if isinstance(message, ErrorReported)
            )
        else:
            complete(run)
            assert told in (run.directory / "t.1.log").read_text()


@pytest.mark.parametrize("wish", ["check", "require"])
def test_joiner_on_other_hardware_is_reported(rig: Start, spec: TaskSpec, wish: str) -> None:
    """The third worker computes with more threads."""
    odd, env = str(Path(__file__).with_name("odd_gpt.py")), {"UNICRON_DETERMINISTIC": wish}
    with rig(replace(spec, entry=odd, args=("threads", "3", "1"), env=env, iterations=12)) as run:
        begin_and_tell_in_mid_iteration(run, ("t.1", "t.2"), THREE)
        told = "replica 2 computes on something else than replica 0"
        if wish == "require":
            run.until(lambda: "t.3" in run.exits)
            run.tell(3, ["t.1", "t.2"], urgent=True)
        complete(run)
        assert any(
            told in message.message for message in run.of(ErrorReported, "t.3") if isinstance(message, ErrorReported)
        ) == (wish == "require")
        assert told in (run.directory / "t.1.log").read_text()
        assert last_commit(run).micro_batches_by_rank == ((6, 6) if wish == "require" else (4, 4, 4))


# --- a second fault while the first is being healed ------------------------------------------------


@pytest.mark.parametrize("moment", ["forming", "formed", "exchanged"])
def test_second_death_during_regroup_changes_nothing(
    rig: Start, spec: TaskSpec, reference: Reference, moment: str
) -> None:
    with rig(spec) as run:
        faults = {"t.3": "kill@iteration=3,micro_batch=2", "t.1": f"kill@generation=2,at={moment}"}
        begin(run, *THREE, fault=faults)
        lose(run, "t.3")
        run.tell(2, ["t.1", "t.2"], urgent=True)
        lose(run, "t.1")
        run.tell(3, ["t.2"], urgent=True)
        complete(run)
        assert same(parameters(run), reference)
        assert run.iterations()[3].micro_batches_by_rank == (12,)
        check_samples(run)


@pytest.mark.parametrize("victim", ["t.1", "t.3"])
def test_death_during_state_transfer_changes_nothing(
    rig: Start, spec: TaskSpec, reference: Reference, victim: str
) -> None:
    """Source or receiver: the others throw the half-given state away, and the next source gives it anew."""
    with rig(spec) as run:
        faults = {victim: "kill@generation=2,at=giving"}
        begin_and_tell_in_mid_iteration(run, ("t.1", "t.2"), ["t.1", "t.2", "t.3", "t.4"], faults)
        lose(run, victim)
        run.tell(3, [w for w in ("t.1", "t.2", "t.3", "t.4") if w != victim], joiners=["t.3", "t.4"], urgent=True)
        complete(run)
        assert same(parameters(run), reference)
        assert regrouped(run, "t.4").source == "replica"
        check_samples(run)


def test_hung_peer_is_left_behind(rig: Start, spec: TaskSpec, reference: Reference) -> None:
    """It neither answers nor dies: the collective would never end, an urgent membership ends the wait for it."""
    with rig(spec) as run:
        begin(run, *THREE, fault={"t.3": "stop@iteration=3,at=reducing"})
        run.until(lambda: stopped(run.pids["t.3"]))
        run.until(lambda: run.reached(2))
        run.tell(2, ["t.1", "t.2"], urgent=True)
        run.until(lambda: run.completed)
        run.until(lambda: run.living() == ["t.3"])
        assert same(parameters(run), reference)
        check_samples(run)


@pytest.mark.parametrize("tp", [1, 2])
def test_trainer_survives_storm_of_random_kills(server: ForkServer, data: Path, tmp_path: Path, tp: int) -> None:
    storm(server, 4, 0, task(data, global_batch=8, iterations=10**6, tp=tp), tmp_path)


# --- joining and leaving -----------------------------------------------------------------------------


def test_joiner_takes_state_from_replica(rig: Start, spec: TaskSpec) -> None:
    longer = replace(spec, iterations=12)
    expected, _ = failure_free(rig, longer, 2)
    with rig(longer) as run:
        begin_and_tell_in_mid_iteration(run, ("t.1", "t.2"), THREE)
        complete(run)
        assert regrouped(run, "t.3").source == "replica"
        assert 3 <= regrouped(run, "t.3").iteration <= 12
        assert last_commit(run).micro_batches_by_rank == (4, 4, 4)
        assert last_commit(run).micro_batches_repeated == 0
        check_samples(run)
        assert same(parameters(run), expected)


def test_leaver_joins_last_agreement_and_parks(rig: Start, spec: TaskSpec) -> None:
    with rig(replace(spec, iterations=12)) as run:
        begin_and_tell_in_mid_iteration(run, THREE, ["t.2", "t.3"])
        run.until(lambda: run.of(WorkerPaused, "t.1"))
        run.quit("t.1")
        complete(run)
        assert run.exits["t.1"] == 0
        (parked,) = run.of(WorkerPaused, "t.1")
        assert isinstance(parked, WorkerPaused)
        assert len(run.iterations()[parked.iteration].micro_batches_by_rank) == 3
        assert len(run.iterations()[parked.iteration + 1].micro_batches_by_rank) == 2
        assert not run.of(ErrorReported)
        check_samples(run)


def test_leader_saves_before_parking_if_all_leave(rig: Start, spec: TaskSpec, reference: Reference) -> None:
    with rig(spec) as run:
        begin_and_tell_in_mid_iteration(run, ("t.1", "t.2"), [])
        run.until(lambda: len(run.of(WorkerPaused)) == 2)
        (saved,) = run.of(CheckpointSaved)
        parked = run.of(WorkerPaused)[0]
        assert isinstance(saved, CheckpointSaved) and isinstance(parked, WorkerPaused)
        assert saved.iteration == parked.iteration < 4
        run.start("t.3")
        run.until(lambda: run.ready("t.3"))
        run.tell(3, ["t.3"], joiners=["t.3"])
        run.quit("t.1", "t.2")
        complete(run)
        assert regrouped(run, "t.3").source == "checkpoint"
        assert regrouped(run, "t.3").iteration == saved.iteration + 1
        assert same(parameters(run), reference)


# --- the last resort -----------------------------------------------------------------------------------


@pytest.mark.parametrize("damaged", [False, True])
def test_last_replica_loss_falls_back_to_checkpoint(
    rig: Start, spec: TaskSpec, reference: Reference, damaged: bool
) -> None:
    with rig(replace(spec, checkpoint=replace(spec.checkpoint, interval=1))) as run:
        begin(run, "t.1", fault={"t.1": "kill@iteration=4,at=saving"})  # 3 is half written
        lose(run, "t.1")
        if damaged:
            newest = run.checkpoints / "iteration-00000002" / "shard-0" / "__0_0.distcp"
            data = bytearray(newest.read_bytes())
            data[-1] ^= 1
            newest.write_bytes(data)
        run.start("t.2")
        run.until(lambda: run.ready("t.2"))
        run.tell(2, ["t.2"], joiners=["t.2"], urgent=True)
        complete(run)
        assert regrouped(run, "t.2").source == "checkpoint"
        assert regrouped(run, "t.2").iteration == (2 if damaged else 3)
        (taken,) = run.of(StateLoaded, "t.2")
        assert isinstance(taken, StateLoaded)
        assert (taken.source, taken.iteration) == ("checkpoint", 1 if damaged else 2)
        assert len(taken.failed_sources) == damaged
        assert same(parameters(run), reference)


def test_survivors_without_membership_save_and_stop(rig: Start, spec: TaskSpec) -> None:
    with rig(replace(spec, env={"UNICRON_FAULT_WAIT_S": "0.3"})) as run:
        begin(run, *THREE, fault={"t.3": "kill@iteration=3,micro_batch=2"})
        lose(run, "t.3")
        run.until(lambda: not run.living())
        assert os.waitstatus_to_exitcode(run.exits["t.1"]) == os.waitstatus_to_exitcode(run.exits["t.2"]) == 75
        assert {message.iteration for message in run.of(CheckpointSaved) if isinstance(message, CheckpointSaved)} == {2}
        assert parameters(run)


# --- the agent -------------------------------------------------------------------------------------------


def test_training_continues_without_agent(rig: Start, spec: TaskSpec) -> None:
    with rig(replace(spec, iterations=30)) as run:
        begin(run, "t.1", "t.2")
        run.until(lambda: run.reached(3))
        run.hang_up()
        run.listen()
        complete(run)
        hello = [message for _, message in run.said if isinstance(message, Hello)][-1]
        assert (hello.generation, hello.ready) == (1, True)
        check_samples(run)


def test_worker_without_agent_ends_itself(rig: Start, spec: TaskSpec) -> None:
    with rig(replace(spec, iterations=10**6, env={"UNICRON_LEASE_S": "0.3"})) as run:
        begin(run, "t.1", "t.2")
        run.until(lambda: run.reached(3))
        run.hang_up()
        run.until(lambda: not run.living())
        assert {os.waitstatus_to_exitcode(status) for status in run.exits.values()} == {69}
        run.listen()


def test_quit_ends_worker_in_mid_training(rig: Start, spec: TaskSpec) -> None:
    with rig(replace(spec, iterations=10**6)) as run:
        begin(run, "t.1", "t.2")
        run.until(lambda: run.reached(3))
        run.quit("t.1", "t.2")
        run.until(lambda: not run.living())
        assert set(run.exits.values()) == {0}


def test_quit_ends_worker_stuck_with_its_replica(rig: Start, spec: TaskSpec) -> None:
    with rig(replace(spec, tp=2, iterations=10**6)) as run:
        begin(run, "t.1", "t.2", fault={"t.2": "stop@iteration=3,micro_batch=1"})
        run.until(lambda: stopped(run.pids["t.2"]))
        assert {host for pid in run.pids.values() for host in listening(pid)} == {ADDRESS}, "on no other network"
        anybody = dist.TCPStore(run.server.store.host, run.server.store.port, None, False)
        anybody.set("of a stranger", "may be written: docs/operate/security.md says so")
        run.quit("t.1")
        run.until(lambda: "t.1" in run.exits)
        assert run.exits["t.1"] == 0


def test_exception_is_reported_before_exit(rig: Start, spec: TaskSpec) -> None:
    with rig(spec) as run:
        begin(run, "t.1", fault={"t.1": "raise@iteration=2,at=agreed"})
        run.until(lambda: not run.living())
        assert os.waitstatus_to_exitcode(run.exits["t.1"]) == 1
        (trouble,) = run.of(ErrorReported)
        assert isinstance(trouble, ErrorReported)
        assert (trouble.kind, trouble.generation, trouble.iteration, trouble.phase) == ("exception", 1, 2, "step")
        assert "injected at agreed" in trouble.message and "hook.py" in trouble.detail


def test_missing_data_is_reported(rig: Start, spec: TaskSpec) -> None:
    with rig(replace(spec, data="/nowhere/text")) as run:
        run.start("t.1")
        run.until(lambda: "t.1" in run.exits)
        (trouble,) = run.of(ErrorReported)
        assert isinstance(trouble, ErrorReported)
        assert (trouble.kind, trouble.phase) == ("data_error", "data") and "/nowhere/text" in trouble.message


# --- a user's own loop ------------------------------------------------------------------------------------------


def test_own_loop_heals(rig: Start, spec: TaskSpec) -> None:
    script = Path(__file__).parents[2] / "examples" / "own_loop.py"
    own = replace(spec, entry=str(script), data="", global_batch=8, micro_batch=2, iterations=6)
    expected, control = failure_free(rig, own, 2)
    with rig(own) as run:
        begin(run, "t.1", "t.2", fault={"t.2": "kill@iteration=6,micro_batch=1"})
        lose(run, "t.2")
        run.tell(2, ["t.1"], urgent=True)
        complete(run)
        assert [c.samples_digest for c in run.iterations().values()] == [
            samples_digest(iteration, range((iteration - 1) * 8, iteration * 8)) for iteration in range(1, 7)
        ]
        assert last_commit(run).loss == last_commit(control).loss
        assert same(parameters(run), expected)
        assert f"iteration 6: loss {last_commit(run).loss:.4f}" in (run.directory / "t.1.log").read_text()


def test_script_reads_layout_from_parallel_state(rig: Start, spec: TaskSpec, tmp_path: Path) -> None:
    script = tmp_path / "sizes.py"
    asked = [f"{kind}_world_size" for kind in (
        "tensor_model_parallel", "pipeline_model_parallel", "virtual_pipeline_model_parallel", "expert_model_parallel",
        "expert_tensor_parallel",
    )]  # fmt: skip
    script.write_text(
        "import torch.distributed as dist\n"
        "from megatron.core import parallel_state as state\n"
        "dist.barrier()  # a peer that has ended breaks the groups that another still forms\n"
        f"print('sizes', *(getattr(state, f'get_{{name}}')() for name in {asked}), flush=True)\n"
    )
    with rig(replace(spec, entry=str(script), data="", tp=2, pp=2, vpp=2, ep=2)) as run:
        four = ["t.1", "t.2", "t.3", "t.4"]
        run.start(*four)
        run.until(lambda: run.exits.keys() == set(four))
        for worker in four:
            assert "sizes 2 2 2 2 1\n" in (run.directory / f"{worker}.log").read_text()


# --- tensor and pipeline parallel replicas --------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_loss_of_two_shard_replica_heals(rig: Start, spec: TaskSpec, tp: int, pp: int) -> None:
    sharded = replace(spec, tp=tp, pp=pp, model=replace(spec.model, layers=2))
    expected = [parameters(failure_free(rig, sharded, 2)[1], 2, shard) for shard in range(2)]
    four = ["t.1", "t.2", "t.3", "t.4"]
    moment = "micro_batch=2" if pp == 1 else "at=reducing"
    with rig(sharded) as run:
        begin(run, *four, fault={"t.4": f"kill@iteration=3,{moment}"})
        lose(run, "t.4")
        run.signal("t.3", signal.SIGKILL)  # a lost rank ends its replica
        run.until(lambda: "t.3" in run.exits)
        run.tell(2, ["t.1", "t.2"], urgent=True)
        complete(run)
        for shard in range(2):
            assert same(parameters(run, 2, shard), expected[shard])
        check_samples(run)
        assert run.iterations()[4].micro_batches_by_rank == (12,)


def test_two_shard_replica_joins(rig: Start, spec: TaskSpec) -> None:
    with rig(replace(spec, tp=2, iterations=12)) as run:
        begin_and_tell_in_mid_iteration(run, ("t.1", "t.2"), ["t.1", "t.2", "t.3", "t.4"])
        complete(run)
        assert {regrouped(run, worker).source for worker in ("t.3", "t.4")} == {"replica"}
        assert last_commit(run).micro_batches_by_rank == (6, 6)
        check_samples(run)
