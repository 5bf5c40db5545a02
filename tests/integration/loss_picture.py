"""Draw README's picture: the losses of examples/own_loop.py with SIGKILLs, beside a run on one worker without any.

    python -m tests.integration.loss_picture docs/results/plots/healed.svg

Both are real: nats-server, coordinator, four agents; and one agent, thus one worker. Exit code 1 unless every loss that
a worker printed, and the last one in the log to its last bit, is the same in both runs.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
from pathlib import Path

import msgspec
import uvloop

from unicrond.core.state.state import ClusterState, TaskStatus
from unicrond.display.loss_plot import LossCurve, svg
from unicrond.intake.task_file import load
from unicrond.local.demo import DemoStory
from unicrond.local.dev import small_cluster

ROOT = Path(__file__).parents[2]
TASK, ITERATIONS = "own", 160
TASK_FILE = f"""\
name: {TASK}
entry: {ROOT}/examples/own_loop.py
min_workers: 1
max_workers: 3
global_batch: 12
micro_batch: 1
iterations: {ITERATIONS}
"""
LINE = re.compile(r"^iteration (\d+): loss (\S+)$", re.MULTILINE)


class PictureStory(DemoStory):
    """One run of the task, and what is killed in it."""

    async def train(self, *, kills: bool) -> tuple[LossCurve, float | None]:
        """Train to the end; the losses that workers printed, and the log's last one."""
        path = self.cluster.directory / "task.yaml"
        path.write_text(TASK_FILE)
        await self.cluster.submit(msgspec.to_builtins(load(path)))
        if kills:
            await self.kill_worker(40, rank=1)
            await self.kill_worker(75, rank=0)
            await self.kill_node(110)
        for iteration in range(20, ITERATIONS, 20):  # each within the time that the demo gives a wait
            await self.until(f"iteration {iteration}", lambda s, at=iteration: s.tasks[TASK].progress.iteration >= at)
        state = await self.until("the task is complete", lambda s: s.tasks[TASK].status is TaskStatus.COMPLETED)
        title = "up to three workers, three SIGKILLs" if kills else "the same task on one worker, undisturbed"
        curve = LossCurve(title, tuple(sorted(self.printed().items())), tuple(self.marks.get(TASK, ())))
        return curve, state.tasks[TASK].progress.loss

    async def at(self, iteration: int) -> ClusterState:
        """Wait for this iteration, trained by three workers, without an open incident."""

        def holds(state: ClusterState) -> bool:
            membership = state.tasks[TASK].membership
            whole = membership is not None and len(membership.members) == 3 and state.tasks[TASK].confirmed
            return whole and not state.incidents and state.tasks[TASK].progress.iteration >= iteration

        return await self.until(f"three workers are past iteration {iteration}", holds)

    async def kill_worker(self, iteration: int, rank: int) -> None:
        task = (await self.at(iteration)).tasks[TASK]
        assert task.membership is not None
        worker = task.workers[task.membership.members[rank].worker]
        os.kill(worker.pid, signal.SIGKILL)
        self._mark(TASK, f"SIGKILL of rank {rank}")

    async def kill_node(self, iteration: int) -> None:
        task = (await self.at(iteration)).tasks[TASK]
        assert task.membership is not None
        await self.cluster.kill_node(task.membership.members[2].node)
        self._mark(TASK, "SIGKILL of a whole node")

    def printed(self) -> dict[int, float]:
        """The loss of each iteration, which all workers that printed it must have alike."""
        losses: dict[int, float] = {}
        for path in self.cluster.directory.glob(f"run/*/logs/{TASK}/*"):
            for iteration, loss in LINE.findall(path.read_text(errors="replace")):
                assert losses.setdefault(int(iteration), float(loss)) == float(loss), (path, iteration)
        return losses


async def run(*, kills: bool) -> tuple[LossCurve, float | None]:
    """Run the task in a new cluster."""
    with tempfile.TemporaryDirectory(prefix="unicron-picture-") as name:
        async with small_cluster(Path(name), nodes=4 if kills else 1) as cluster:
            return await PictureStory(cluster, Path(name), ITERATIONS).train(kills=kills)


def main() -> int:
    """Run it twice, compare, draw; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="the SVG to write")
    out = parser.parse_args().out
    (broken, last), (calm, calm_last) = (uvloop.run(run(kills=kills)) for kills in (True, False))
    same = broken.points == calm.points and len(calm.points) == ITERATIONS and last == calm_last
    print(f"{len(broken.points)} and {len(calm.points)} losses, last {last!r} and {calm_last!r}: same: {same}")
    out.write_text(svg([broken, calm]), encoding="utf-8")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
