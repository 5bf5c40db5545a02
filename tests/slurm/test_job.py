"""deploy/slurm/unicron.sbatch on a real Slurm of four nodes: submit, kill, drain, isolate, add, end, go on.

`make slurm`; needs Debian's slurmctld, slurmd, slurm-client and munge. Beside much other work `UNICRON_TEST_PATIENCE=5
make slurm` waits five times as long for everything.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.lab import PATIENCE, Lab, lab, missing, until
from unicrond.core.state.state import ClusterState
from unicrond.ctl.client import ApiError, Client
from unicrond.local.dev import free_port

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(420 * PATIENCE)]
SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "unicron.sbatch"
TASK = """\
name: small
min_workers: 1
max_workers: 3
model: {layers: 2, hidden: 32, heads: 4, seq: 64, vocab: 256}
optimizer: {lr: 1e-3, warmup_iterations: 10}
global_batch: 12
micro_batch: 1
iterations: 1000000
checkpoint: {interval: 200}
"""


class Cluster:
    """What the job starts."""

    def __init__(self, slurm: Lab, directory: Path) -> None:
        self.slurm, self.directory = slurm, directory
        port = free_port()
        self.client = Client(f"http://127.0.0.1:{port}")
        (directory / "task.yaml").write_text(TASK)
        self.more = {
            "UNICRON_DIR": str(directory / "cluster"),
            "UNICROND_NATS_PORT": str(free_port()),
            "UNICROND_API_PORT": str(port),
            "UNICROND_NATS_AUTH": "keys",
            "UNICROND_INJECTION": "true",
            "UNICRON_AGENT_ACCELERATORS": "fake",
            "UNICRON_GRACE_S": "30",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:{slurm.env['PATH']}",
        }

    def sbatch(self, nodes: int, *files: str, **more: str) -> str:
        """Submit the job; its number."""
        out = f"--output={self.directory}/job-%j.out"
        said = self.slurm.run("sbatch", f"--nodes={nodes}", out, str(SCRIPT), *files, more={**self.more, **more})
        return said.rpartition(" ")[2]

    def state(self) -> ClusterState | None:
        """As the coordinator has it; None where none answers."""
        try:
            return self.client.state()[0]
        except ApiError:
            return None

    def trains(self, workers: int, after: int = -1, without: str = "") -> bool:
        """So many workers are members and have committed an iteration above `after`, none of them on `without`."""
        state = self.state()
        task = state.tasks.get("small") if state else None
        if task is None or not task.confirmed or task.progress.committed_generation != task.generation:
            return False
        nodes = [worker.node for worker in task.workers.values() if worker.alive]
        return len(nodes) == workers and without not in nodes and task.progress.iteration > after

    def iteration(self) -> int:
        """The last that was committed."""
        state = self.state()
        assert state is not None
        return state.tasks["small"].progress.iteration

    def output(self) -> str:
        """What the jobs have said."""
        return "\n".join(path.read_text() for path in sorted(self.directory.glob("job-*.out")))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    lacking = missing()
    if lacking:
        pytest.skip(f"no Slurm here ({lacking}): apt-get install slurmctld slurmd slurm-client munge")
    with lab(4) as slurm:
        made = Cluster(slurm, tmp_path)
        try:
            yield made
        finally:
            print(made.output())


def test_slurm_job_heals_drains_isolates_grows_and_requeues(cluster: Cluster) -> None:
    slurm = cluster.slurm
    job = cluster.sbatch(4, str(cluster.directory / "task.yaml"), UNICRON_REQUEUE="1")
    until(lambda: cluster.trains(3), 60, "training on three of four nodes")

    # A node that Slurm drains is drained, and gets workers again when Slurm has it back.
    slurm.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=a fan")
    until(lambda: cluster.trains(3, without="n2") and drain_of(cluster, "n2") == "slurm: a fan", 30, "drained n2")
    slurm.run("scontrol", "update", "NodeName=n2", "State=RESUME")
    until(lambda: drain_of(cluster, "n2") == "", 30, "n2 in use")

    # A node that is isolated is drained in Slurm, with the reason.
    cluster.client.inject({"kind": "xid", "xid": 79, "node": "n3", "counts": True})
    until(lambda: "unicron: " in slurm.state_of("n3"), 30, "drain of n3 in Slurm")
    assert slurm.state_of("n3").startswith("drain")
    cluster.client.uncordon("n3", "it was a drill")
    until(lambda: "unicron: " not in slurm.state_of("n3"), 30, "n3 given back")

    # A node dies; the job and the task live on.
    until(lambda: cluster.trains(3), 30, "training on three nodes")
    before = cluster.iteration()
    slurm.kill_node("n4")
    until(lambda: cluster.trains(3, after=before, without="n4"), 30, "training without n4")
    until(lambda: slurm.state_of("n4").startswith("down"), 30, "n4 down")
    assert slurm.job_state(job) == "RUNNING"

    # It comes back by a job of its own, which can be ended by itself.
    slurm.start_node("n4")
    until(lambda: slurm.state_of("n4").startswith("idle"), 30, "n4 idle")
    more = cluster.sbatch(1, UNICRON_JOIN=job)
    until(lambda: is_up(cluster, "n4"), 30, "n4 in the cluster")
    slurm.run("scancel", "--batch", "--signal=TERM", more)
    until(lambda: slurm.job_state(more) == "COMPLETED", 40, "end of the second job")
    assert not is_up(cluster, "n4") and cluster.trains(3)

    # The time limit comes: the state is saved, and the same job goes on where it ended.
    before = cluster.iteration()
    slurm.run("scancel", "--batch", "--signal=TERM", job)
    until(lambda: cluster.state() is None, 60, "end of the head")
    until(lambda: slurm.job_state(job) == "RUNNING" and cluster.trains(3, after=before), 90, "training once more")
    records = {worker.node for worker in (cluster.state() or fail()).tasks["small"].workers.values()}
    assert len(records) == 3
    slurm.run("scancel", "--batch", "--signal=TERM", job)


def test_slurm_job_ends_with_its_tasks(cluster: Cluster) -> None:
    short = cluster.directory / "short.yaml"
    short.write_text(TASK.replace("1000000", "30"))
    job = cluster.sbatch(2, str(short), UNICROND_NATS_AUTH="")
    until(lambda: cluster.slurm.job_state(job) == "COMPLETED", 90, "end of the job")
    assert "small: completed" in cluster.output()
    assert not [pid for name in ("n1", "n2") for pid in cluster.slurm.processes_of(name)]
    left = [path.name for path in Path("/dev/shm").glob(f"unicron-{os.getuid()}-{job}/*")]
    assert not left


def drain_of(cluster: Cluster, node: str) -> str | None:
    """Why it is drained; "" where it is not."""
    state = cluster.state()
    return state.nodes[node].cordon.reason if state else None


def is_up(cluster: Cluster, node: str) -> bool:
    state = cluster.state()
    return state is not None and state.nodes[node].status.value == "up"


def fail() -> ClusterState:
    raise AssertionError("no coordinator")
