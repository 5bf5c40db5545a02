"""What a task's own program does to its training: it ends too early, it says stop. On a live cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agents.trainer import corpus
from tests.integration.live import Live, live_cluster
from unicrond.state import ClusterState, Severity, TaskStatus

ENTRY = Path(__file__).with_name("wilful_gpt.py")
in_one_loop = pytest.mark.asyncio(loop_scope="module")
matrix = pytest.mark.matrix
pytestmark = pytest.mark.timeout(300)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Live]:
    directory = tmp_path_factory.mktemp("programs")
    corpus.build(directory / "stdlib")
    async with live_cluster(directory, nodes=2, workers=2) as live:
        yield live


async def ended(live: Live, name: str, *orders: str, **fields: object) -> ClusterState:
    """The task, once it has ended and nothing of it is left."""
    await live.submit(
        name, entry=str(ENTRY), args=[str(live.directory), *orders], data=str(live.directory / "stdlib"),
        iterations=40, checkpoint={"dir": str(live.directory / name), "interval": 0}, **fields,
    )  # fmt: skip
    return await live.until(
        f"{name} has ended",
        lambda s: (
            name in s.tasks
            and s.tasks[name].status is not TaskStatus.ACTIVE
            and not s.tasks[name].workers
            and not s.incidents
        ),
        may_fail=True,
    )


@in_one_loop
@pytest.mark.parametrize(
    ("name", "order", "says"),
    [
        pytest.param("breaks", "5:all:break", "LeftEarly: the loop over hook.steps() was left in iteration"),
        pytest.param("exits", "5:all:exit", "exit code 0 in mid-training", marks=matrix),
        pytest.param("sysexits", "5:all:sys.exit", "LeftEarly: the loop over hook.steps() was left", marks=matrix),
        pytest.param("leads", "5:lead:break", "LeftEarly", marks=matrix),
    ],
)
async def test_a_program_that_ends_early_fails_with_the_reason(live: Live, name: str, order: str, says: str) -> None:
    """Iteration 5, every time: each new process comes to it again. The lead's alone: a new lead each time."""
    orders = [f"{iteration}:lead:break" for iteration in range(5, 40)] if name == "leads" else [order]
    before, _ = await live.dev.state()
    state = await ended(live, name, *orders)
    task = state.tasks[name]
    assert task.status is TaskStatus.FAILED
    assert "its program ended 3 times in mid-training, and never said hook.stop(reason)" in task.reason
    assert says in task.reason and "let hook.steps() run to its end" in task.reason
    incidents = [incident for incident in state.closed if name in incident.generations]
    # Of two that leave at once the second may be told of with the first, and what is left of it is its exit.
    kinds = {one.kind for one in incidents}
    assert "left_early" in kinds and kinds <= {"left_early", "process_exit"}
    assert len(live.events("StartWorker", after=before.seq)) <= 8
    assert not live.events("NodeIsolated", after=before.seq), "no node can help that"


@in_one_loop
@pytest.mark.parametrize(
    ("name", "order", "last"),
    [
        pytest.param("one-stops", "5:other:stop", 6),
        pytest.param("all-stop", "5:all:stop", 6, marks=matrix),
        pytest.param("all-leave", "5:all:leave", 5),
        pytest.param("one-leaves", "5:other:leave", None, marks=matrix),
        pytest.param("lead-leaves", "5:lead:leave", None, marks=matrix),
    ],
)
async def test_a_program_that_says_stop_completes_its_task(live: Live, name: str, order: str, last: int | None) -> None:
    before, _ = await live.dev.state()
    state = await ended(live, name, order)
    task = state.tasks[name]
    assert task.status is TaskStatus.COMPLETED, task.reason
    assert task.reason == f"stopped by its program after iteration {task.iteration} of 40: enough"
    assert task.iteration == last if last else task.iteration >= 6
    assert task.checkpoint_iteration == task.iteration, "its state is saved"
    assert not [i for i in state.closed if name in i.generations and i.severity is not Severity.SEV3]
    ends = {path.stem for path in live.directory.glob(f"{name}.*.end")}
    assert ends >= {f"{name}.1", f"{name}.2"}, "the program goes on behind its loop"
    assert not live.events("NodeIsolated", after=before.seq)
    if last:
        assert len([e for e in live.events("StartWorker") if e["spec"]["name"] == name]) == 2, "nobody was replaced"
