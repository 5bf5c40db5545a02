"""What a task's own program does to its training: it ends too early, it says stop. On a live cluster."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.integration.live import Live, live_cluster, members, seats
from unicrond.agents.trainer.loop import corpus
from unicrond.core.rules.healing_proofs import proof_text
from unicrond.core.state.state import ClusterState, Severity, TaskStatus
from unicrond.ctl.inject import inject

ENTRY = Path(__file__).with_name("wilful_gpt.py")
#: The cluster's limit of a start, which one task outlasts; the others have their own, as a busy machine takes longer.
CLUSTER_START_S, START_S = 8.0, 120.0
in_one_loop = pytest.mark.asyncio(loop_scope="module")
matrix = pytest.mark.matrix
pytestmark = pytest.mark.timeout(600)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Live]:
    directory = tmp_path_factory.mktemp("programs")
    corpus.build(directory / "stdlib")
    async with live_cluster(
        directory, nodes=2, workers=2, policy={"worker_start_s": CLUSTER_START_S}, injection=True
    ) as live:
        yield live


async def ended(live: Live, name: str, *orders: str, **fields: object) -> ClusterState:
    """The task, once it has ended and nothing of it is left."""
    await live.submit(
        name, entry=str(ENTRY), args=[str(live.directory), *orders], data=str(live.directory / "stdlib"),
        checkpoint={"dir": str(live.directory / name), "interval": 0},
        **{"iterations": 40, "start_timeout_s": START_S, **fields},
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
        pytest.param("breaks", "5:all:break", "LeftEarly: the program left the loop over hook.steps() in iteration"),
        pytest.param("exits", "5:all:exit", "exit code 0 in mid-training", marks=matrix),
        pytest.param(
            "sysexits", "5:all:sys.exit", "LeftEarly: the program left the loop over hook.steps()", marks=matrix
        ),
        pytest.param("leads", "5:lead:break", "LeftEarly", marks=matrix),
    ],
)
async def test_early_exit_fails_task_with_reason(live: Live, name: str, order: str, says: str) -> None:
    """Iteration 5, every time: each new process comes to it again. The lead's alone: a new lead each time."""
    orders = [f"{iteration}:lead:break" for iteration in range(5, 40)] if name == "leads" else [order]
    before, _ = await live.dev.state()
    state = await ended(live, name, *orders)
    task = state.tasks[name]
    assert task.status is TaskStatus.FAILED
    assert "its program ended 3 times in mid-training without hook.stop(reason)" in task.ending.reason
    assert says in task.ending.reason and "let hook.steps() run to its end" in task.ending.reason
    incidents = [incident for incident in state.closed_incidents if name in incident.generations]
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
async def test_program_stop_completes_task(live: Live, name: str, order: str, last: int | None) -> None:
    before, _ = await live.dev.state()
    state = await ended(live, name, order)
    task = state.tasks[name]
    assert task.status is TaskStatus.COMPLETED, task.ending.reason
    assert task.ending.reason == f"stopped by its program after iteration {task.progress.iteration} of 40: enough"
    assert task.progress.iteration == last if last else task.progress.iteration >= 6
    assert task.progress.checkpoint_iteration == task.progress.iteration, "its state is saved"
    assert not [i for i in state.closed_incidents if name in i.generations and i.severity is not Severity.SEV3]

    def goes_on(_: ClusterState) -> bool:
        return {path.stem for path in live.directory.glob(f"{name}.*.end")} >= {f"{name}.1", f"{name}.2"}

    await live.until("the program goes on behind its loop", goes_on)
    assert not live.events("NodeIsolated", after=before.seq)
    if last:
        assert len([e for e in live.events("StartWorker") if e["spec"]["name"] == name]) == 2, "nobody was replaced"


# --- what takes long, and who hangs ---------------------------------------------------------------


@in_one_loop
async def test_evaluation_section_and_long_start_are_no_faults(live: Live) -> None:
    """Twice the least limit of a hang (3 s here), on both replicas, once declared and once not; a start longer than the
    cluster's limit."""
    before, _ = await live.dev.state()
    orders = ["12:all:busy=7/60", "20:all:busy=7"]
    state = await ended(live, "patient", *orders, env={"START_S": str(CLUSTER_START_S + 1)})
    assert state.tasks["patient"].status is TaskStatus.COMPLETED, state.tasks["patient"].ending.reason
    assert state.incidents_total == before.incidents_total
    told = live.events("WorkerBusy", after=before.seq)
    assert [event["section"] for event in told].count("evaluation") == 4


@in_one_loop
@matrix
async def test_task_waits_for_evaluation_of_one_replica(live: Live) -> None:
    before, _ = await live.dev.state()
    state = await ended(live, "alone", "12:lead:busy=12/60")
    assert state.tasks["alone"].status is TaskStatus.COMPLETED, state.tasks["alone"].ending.reason
    assert state.incidents_total == before.incidents_total


@in_one_loop
async def test_busy_overrun_counts_as_hang(live: Live) -> None:
    state = await ended(live, "dawdles", "12:other:busy=600/2", iterations=20)
    incidents = [incident for incident in state.closed_incidents if "dawdles" in incident.generations]
    assert (
        incidents[0].kind == "hang" and "busy with evaluation for longer than it has declared" in incidents[0].message
    )


@in_one_loop
async def test_hang_in_a_short_section_is_found_before_the_iteration_is_late(live: Live) -> None:
    """Iterations of 3 s may last 9 s. Fetching takes no time: five floors are its limit, and twice that is a hang."""
    env = {"LASTS_S": "3", "UNICRON_HANG_FLOOR_S": "0.3"}
    state = await ended(live, "stalls", "10:other:stall", iterations=11, env=env)
    (incident,) = [incident for incident in state.closed_incidents if "stalls" in incident.generations]
    assert incident.kind == "hang" and "has not moved in fetch for" in incident.message
    assert next(iter(incident.sections)) == incident.worker and incident.sections[incident.worker][0] == "fetch"
    assert 3.0 <= (incident.detected_us - incident.occurred_us) / 1e6 < 8.0
    shown = await live.run("unicronctl", "--url", live.dev.url, "describe", "incident", incident.id)
    assert f"longest: {incident.worker} in fetch for" in shown


@in_one_loop
async def test_hang_after_join_is_found_at_once(live: Live) -> None:
    name = "joined"
    await live.submit(
        name, entry=str(ENTRY), args=[str(live.directory), "2:new:hang"], data=str(live.directory / "stdlib"),
        iterations=1_000_000, checkpoint={"dir": str(live.directory / name), "interval": 0, "memory_interval": 0},
        start_timeout_s=START_S,
    )  # fmt: skip
    state = await live.until(
        "they train", lambda s: name in s.tasks and s.tasks[name].progress.iteration > 60, may_fail=True
    )
    was = seats(state, name)
    await inject(live.client).kill(task=name, rank=1)
    state = await live.until(
        "the newcomer hung and was replaced",
        lambda s: (
            f"{name}.4" in members(s, name)
            and s.tasks[name].confirmed
            and not s.incidents
            and s.tasks[name].progress.iteration > s.tasks[name].group.formed_after + 5
        ),
        may_fail=True,  # others before it
    )
    hang = next(i for i in state.closed_incidents if i.worker == f"{name}.3")
    assert hang.kind == "hang" and "which it has not entered" in hang.message
    assert hang.iterations_lost == 0 and hang.state_from == "", "the others kept their state"
    survivor = f"{name}.1"
    assert seats(state, name)[survivor] == was[survivor], "the same process"
    limits = {e["limit_us"] for e in live.events("HangSuspected") if e["task"] == name}
    assert max(limits) < START_S * 1e6, "the limit of the task, not that of the unknown, which a start may take"
    await live.run("unicronctl", "--url", live.dev.url, "cancel", name)


@in_one_loop
async def test_task_is_armed_by_the_kill_of_one_worker(live: Live) -> None:
    """As ordered with its submission, and again while it runs."""
    name, before = "proved", await live.until("both nodes are there", lambda s: len(s.nodes) == 2, may_fail=True)
    await live.submit(name, data=str(live.directory / "stdlib"), start={"prove": True}, start_timeout_s=START_S)
    text, killed = "", 0
    for _ in range(2):

        def is_armed(state: ClusterState) -> bool:
            nonlocal text
            text = proof_text(state, state.tasks[name]) if name in state.tasks else ""
            return text.startswith("armed") and f"at iteration {killed}," not in text  # noqa: B023

        state = await live.until("it is armed", is_armed, may_fail=True)
        match = re.fullmatch(r"armed: SIGKILL of rank 1 at iteration (\d+), same bits", text)
        assert match is not None, text
        killed = int(match[1])
        assert text in await live.run("unicronctl", "--url", live.dev.url, "status")
        await live.run("unicronctl", "--url", live.dev.url, "prove", name)
    assert not state.tasks[name].troubles.strikes and not live.events("NodeIsolated", after=before.seq)
    await live.run("unicronctl", "--url", live.dev.url, "cancel", name)
