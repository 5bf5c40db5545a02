"""A task that keeps its checkpoints in S3: real workers, moto's server in a process of its own."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from tests.integration.live import TASK, live_cluster
from tests.integration.object_store import S3Server
from tests.integration.regroup_rig import ForkServer, Rig
from tests.integration.test_regroup import complete, failure_free, lose, stopped, task
from unicrond.agents.trainer.states import checkpoint
from unicrond.core.state.state import ClusterState
from unicrond.events.vocabulary import CheckpointSaved, CheckpointSpec, SaveFailed, StateLoaded

WORKERS = ["t.1", "t.2", "t.3"]


class S3Rig(Rig):
    """Play the agent of a task whose checkpoints are in the bucket."""

    def __init__(self, s3: S3Server, server: ForkServer, directory: Path, spec) -> None:  # type: ignore[no-untyped-def]
        super().__init__(server, directory, replace(spec, env={**spec.env, **s3.environment}))
        self.url = s3.url(f"{directory.name}/{self.task}")
        self.spec = replace(self.spec, checkpoint=replace(self.spec.checkpoint, dir=self.url))

    def saved(self) -> list[int]:
        return [message.iteration for message in self.of(CheckpointSaved) if isinstance(message, CheckpointSaved)]

    def failures(self) -> list[str]:
        return [message.reason for message in self.of(SaveFailed) if isinstance(message, SaveFailed)]


def test_state_in_s3_outlives_all_workers(s3: S3Server, server: ForkServer, data: Path, tmp_path: Path) -> None:
    """Three workers, all killed in iteration 5: three others go on from what is in the bucket, to the same bits."""
    spec = task(data, iterations=7, checkpoint=CheckpointSpec(interval=1))
    (tmp_path / "control").mkdir()
    expected = failure_free(partial(Rig, server, tmp_path / "control"), spec, 3)[1].completed
    assert expected is not None
    with S3Rig(s3, server, tmp_path, spec) as rig:
        rig.start(*WORKERS, fault="stop@iteration=5,micro_batch=0")
        rig.until(lambda: rig.ready(*WORKERS))
        rig.tell(1, WORKERS)
        rig.until(lambda: 3 in rig.saved() and any(stopped(rig.pids[worker]) for worker in WORKERS))
        for worker in WORKERS:
            rig.signal(worker, signal.SIGKILL)
        for worker in WORKERS:
            lose(rig, worker)
        rig.reshape(rig.spec)
        rig.spec = replace(rig.spec, checkpoint=replace(rig.spec.checkpoint, dir=rig.url))
        joiners = ["t.4", "t.5", "t.6"]
        rig.start(*joiners)
        rig.until(lambda: rig.ready(*joiners))
        rig.tell(2, joiners, joiners=joiners, urgent=True)
        complete(rig)
        (state,) = rig.of(StateLoaded, "t.4")
        assert isinstance(state, StateLoaded) and state.source == "checkpoint" and state.iteration in (3, 4)
        assert rig.completed is not None and rig.completed.params_digest == expected.params_digest
        assert list(checkpoint.newest_iterations(rig.url, rig.task)) == [7, 6]
        logs = "".join(path.read_text() for path in tmp_path.glob("*.log"))
        assert "test-secret" not in logs and "test-secret" not in str(rig.said)


def test_iterations_go_on_while_s3_hangs(s3: S3Server, server: ForkServer, data: Path, tmp_path: Path) -> None:
    spec = task(data, iterations=100_000, checkpoint=CheckpointSpec(interval=1))
    with S3Rig(s3, server, tmp_path, replace(spec, env={"UNICRON_SAVE_WAIT_S": "1"})) as rig:
        rig.start(*WORKERS)
        rig.until(lambda: rig.ready(*WORKERS))
        rig.tell(1, WORKERS)
        rig.until(lambda: len(rig.saved()) >= 2)
        s3.hang()
        try:
            rig.until(rig.failures)
            assert f"{rig.url} has not taken it since 20" in rig.failures()[0]
            iteration, newest = rig.committed[-1].iteration, rig.saved()[-1]
            rig.until(lambda: rig.reached(iteration + 20), 20)
            assert rig.saved()[-1] == newest, "nothing is said to be saved"
        finally:
            s3.go_on()
        rig.until(lambda: rig.saved()[-1] > iteration, 60)
        newest = rig.saved()[-1]
        assert max(checkpoint.newest_iterations(rig.url, rig.task)) >= newest


def test_state_in_memory_heals_while_s3_hangs(s3: S3Server, server: ForkServer, data: Path, tmp_path: Path) -> None:
    """The only worker is killed; its node's memory has the state, and nobody waits for what the bucket may have."""
    spec = task(data, iterations=7, checkpoint=CheckpointSpec(interval=0, memory_interval=1))
    with S3Rig(s3, server, tmp_path, replace(spec, env={"UNICRON_SAVE_WAIT_S": "1"})) as rig:
        rig.start("t.1", fault="stop@iteration=5,micro_batch=0", memory=True)
        rig.until(lambda: rig.ready("t.1"))
        rig.tell(1, ["t.1"])
        rig.until(lambda: stopped(rig.pids["t.1"]))
        s3.hang()
        try:
            rig.signal("t.1", signal.SIGKILL)
            lose(rig, "t.1")
            rig.start("t.2", memory=True)
            rig.until(lambda: rig.ready("t.2"))
            rig.tell(2, ["t.2"], joiners=["t.2"], urgent=True)
            rig.until(lambda: rig.of(StateLoaded, "t.2"), 60)
        finally:
            s3.go_on()
        complete(rig)
        (state,) = rig.of(StateLoaded, "t.2")
        assert isinstance(state, StateLoaded) and state.source == "memory" and state.iteration in (3, 4)
        assert max(checkpoint.newest_iterations(rig.url, rig.task)) == 7


async def test_hanging_s3_raises_alarm_that_ends(s3: S3Server, tmp_path: Path) -> None:
    """A cluster: iterations go on, `status` and /healthz have the alarm, `describe` the newest state; then it ends."""
    url = s3.url("live")
    async with live_cluster(tmp_path, nodes=3, workers=3) as live:
        env = {**s3.environment, "UNICRON_SAVE_WAIT_S": "1"}
        await live.submit(env=env, checkpoint={"interval": 5, "dir": url})
        await live.until("a checkpoint", lambda state: TASK in state.tasks and newest(state) > 0)
        s3.hang()
        try:
            state = await live.until("a failure", lambda state: state.tasks[TASK].progress.save_failures)
            before, there = state.tasks[TASK].progress.iteration, newest(state)
            await live.until("20 iterations", lambda state: state.tasks[TASK].progress.iteration > before + 20)
            described = await live.run("unicronctl", "--url", live.dev.url, "describe", "task", TASK)
            status = await live.run("unicronctl", "--url", live.dev.url, "status")
            alarms = [
                alarm["text"]
                for alarm in live.client.health()["alarms"]
                if alarm["alarm"].startswith("checkpoint-unsaved")
            ]
        finally:
            s3.go_on()
        assert url in described and f"newest of iteration {there}" in described
        (alarm,) = alarms
        assert f"{url} has not taken it since" in alarm
        assert f"the newest in {url} is of iteration {there}" in alarm and "; so since " in alarm
        assert "did not save the checkpoint of iteration" in status
        await live.until("the alarm's end", lambda state: not state.tasks[TASK].progress.save_failures)
        state = await live.until("newer ones", lambda state: newest(state) > before)
        assert not [
            alarm for alarm in live.client.health()["alarms"] if alarm["alarm"].startswith("checkpoint-unsaved")
        ]
        assert not state.closed_incidents and not state.incidents, "nobody was restarted for it"


def newest(state: ClusterState) -> int:
    return state.tasks[TASK].progress.checkpoint_iteration
