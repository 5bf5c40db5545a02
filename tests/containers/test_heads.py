"""The head's pod: killed, moved, two of them on one shared directory, a log that is another."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.containers.cluster import NODES, Cluster, until
from tests.containers.pods import Pod

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]
Record = Callable[..., None]


#: Seconds until the planner's compiled kernel has been used; 14 of CPU where it is compiled.
_WARM = """
import time
from unicrond.core.planning import kernel_choice as kernel
began_s = time.process_time()
kernel.warm()
print(time.process_time() - began_s)
"""


class SharedStorage:
    """One directory that several machines mount, as by NFS without locks: each mount is a file system of its own
    (FUSE), so a lock on one is not seen on another, and each can stand still alone."""

    def __init__(self, directory: Path) -> None:
        self._source = directory / "log"
        self._directory = directory
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def mounted(self, machine: str) -> Path:
        place = self._directory / f"storage-{machine}"
        place.mkdir()
        self._daemons[machine] = subprocess.Popen(["bindfs", "-f", str(self._source), str(place)])
        while not place.is_mount():
            time.sleep(0.02)
        return place

    def stand_still(self, machine: str) -> None:
        self._daemons[machine].send_signal(signal.SIGSTOP)

    def go_on(self, machine: str) -> None:
        self._daemons[machine].send_signal(signal.SIGCONT)

    def unmount(self) -> None:
        for machine, daemon in self._daemons.items():
            daemon.send_signal(signal.SIGCONT)
            place = self._directory / f"storage-{machine}"
            subprocess.run(["umount", "--lazy", str(place)], check=False, capture_output=True)
            daemon.kill()
            daemon.wait()


@pytest.fixture
def storage(directory: Path) -> Iterator[SharedStorage]:
    made = SharedStorage(directory)
    yield made
    made.unmount()


def on_machine(name: str, directory: Path, storage: SharedStorage) -> dict[str, object]:
    """Of a pod there: its storage, and a kernel that was started at another time than the others'."""
    boot = directory / f"boot-{name}"
    boot.write_text(f"00000000-0000-0000-0000-{name:0>12}\n")
    hook = ("mount", "--bind", str(boot), "{root}/proc/sys/kernel/random/boot_id")
    return {"volumes": {"log": storage.mounted(name)}, "hooks": (hook,)}


def serves(pod: Pod) -> bool:
    """Whether a nats-server runs there."""
    return any("nats-server" in command.split(" ")[0] for command in pod.box.pids().values())


async def test_two_heads_share_one_directory(
    cluster: Cluster, directory: Path, storage: SharedStorage, record: Record
) -> None:
    await cluster.start_head(**on_machine("a", directory, storage))
    first = cluster.head
    await cluster.start_agents(*NODES[:2])
    await cluster.train(2)

    # Two at a time, as after `kubectl scale` or a deletion by force: the second waits, for as long as the first works.
    second = cluster.new_head(**on_machine("b", directory, storage))
    began_s = time.monotonic()
    while time.monotonic() - began_s < 40:
        assert second.box.is_running() and not serves(second)
        is_ready, why = await asyncio.to_thread(second.probe, "readinessProbe")
        assert not is_ready
        await asyncio.sleep(1)
    assert "in use by another head, on unicron-head-0" in why, why
    assert (await asyncio.to_thread(second.probe, "livenessProbe"))[0]
    await cluster.training(0, beyond=5)
    record("two heads", waited=40, said=why)

    # The machine of the first is cut off: no network, and its storage stands still.
    known = [(line.seq, line.type) for line in await asyncio.to_thread(cluster.lines)]
    watch = await cluster.watch()
    watch.act()
    first.cut()
    storage.stand_still("a")
    cluster.lead_to(second)
    ended_s = await until(lambda: not serves(first), 60, "end of the server that is cut off")
    assert not serves(second), "the old one has ended before the new one begins"
    await until(lambda: second.probe("readinessProbe")[0], 60, "a head that has taken the store")
    ready_s = time.monotonic() - watch.began_s
    storage.go_on("a")
    first.mend()
    await cluster.training(None, beyond=5)
    lines = [(line.seq, line.type) for line in await asyncio.to_thread(cluster.lines)]
    assert lines[: len(known)] == known and [seq for seq, _ in lines] == [*range(1, len(lines) + 1)]
    await asyncio.sleep(5)
    assert not serves(first) and serves(second)
    damage = await watch.damage()
    record("head cut off", old_ended=ended_s, whole=ready_s, lost_events=0, faults=damage["faults"])
    first.remove()

    # In order: the lease is given back, and another machine takes the store at once.
    watch = await cluster.watch()
    watch.act()
    code, took_s = await asyncio.to_thread(second.delete)
    assert code == 0
    await cluster.start_head(**on_machine("c", directory, storage))
    ready_s = time.monotonic() - watch.began_s
    await cluster.training(None, beyond=5)
    await watch.clean()
    record("head deleted", whole=ready_s, pod_s=took_s)


async def test_killed_head_and_stalled_server_cause_no_damage(cluster: Cluster, record: Record) -> None:
    cold_s = await cluster.start_head()
    await cluster.start_agents(*NODES[:2])
    await cluster.train(2)
    head = cluster.head
    done = await asyncio.to_thread(
        head.box.run_inside, "sh", "-c", "id -u; touch /a || touch /opt/unicron/a || exit 30"
    )
    assert done.returncode == 30 and done.stdout == "10001\n", done
    done = await asyncio.to_thread(head.box.run_inside, "python", "-c", _WARM)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 7
    record("read-only root", whole=cold_s, kernel_s=float(done.stdout))

    watch = await cluster.watch()
    watch.act()
    head.box.kill(signal.SIGKILL)
    assert await asyncio.to_thread(head.box.wait, 20) == 128 + signal.SIGKILL
    await asyncio.to_thread(head.restart)
    await until(lambda: head.probe("readinessProbe")[0], 60, "the next head")
    ready_s = time.monotonic() - watch.began_s
    await cluster.training(0, beyond=5)
    await watch.clean()
    record("head killed", whole=ready_s)

    watch = await cluster.watch()
    (server,) = (pid for pid, command in head.box.pids().items() if command.split(" ")[0].endswith("nats-server"))
    watch.act()
    os.kill(server, signal.SIGSTOP)
    unready_s = await until(lambda: not head.probe("readinessProbe")[0], 30, "a head that is not ready")
    alive = 0
    while not (await asyncio.to_thread(head.probe, "readinessProbe"))[0]:
        assert (await asyncio.to_thread(head.probe, "livenessProbe"))[0] and head.box.is_running()
        alive += 1
        assert time.monotonic() - watch.began_s < 120
        await asyncio.sleep(0.5)
    ready_s = time.monotonic() - watch.began_s
    await cluster.training(0, beyond=5)
    await watch.clean()
    record("server stands still", told=unready_s, whole=ready_s, live_probes=alive)


async def test_head_with_empty_volume_waits_for_its_log(cluster: Cluster, directory: Path, record: Record) -> None:
    await cluster.start_head()
    await cluster.start_agents(*NODES[:2])
    await cluster.train(2)
    watch = await cluster.watch()
    empty = directory / "empty"
    empty.mkdir()
    os.chown(empty, 0, 10001)
    empty.chmod(0o2775)
    await asyncio.to_thread(cluster.head.delete)
    watch.act()
    await cluster.start_head(volumes={"log": empty})
    agent = cluster.agents[NODES[0]]
    told_s = await until(lambda: "is not of the CA" in agent.probe("readinessProbe")[1], 60, "an agent that says so")
    await asyncio.sleep(10)
    is_ready, why = await asyncio.to_thread(agent.probe, "readinessProbe")
    is_alive, _ = await asyncio.to_thread(agent.probe, "livenessProbe")
    nodes = sorted((await cluster.state())[0].nodes)
    record("empty volume", told=told_s, said=why)
    assert is_alive and not is_ready and not nodes, "an agent of another cluster joins none by itself"

    await asyncio.to_thread(cluster.head.delete)
    watch.act()
    await cluster.start_head()  # on the volume that it had
    await until(lambda: agent.probe("readinessProbe")[0], 60, "an agent on the log that it knows")
    back_s = time.monotonic() - watch.began_s
    await cluster.training(None, beyond=5)
    found = await watch.damage()
    record("empty volume, back", whole=back_s, faults=found["faults"], repeated=found["repeated"])


async def test_head_with_unwritable_volume_ends_in_one_line(cluster: Cluster, directory: Path, record: Record) -> None:
    closed = directory / "closed"
    closed.mkdir(mode=0o755)
    pod = cluster.new_head(volumes={"log": closed})
    code = await asyncio.to_thread(pod.box.wait, 60)
    said = pod.box.said().strip().splitlines()
    record("closed volume", code=code, said=said[-1])
    assert code in (1, 2) and "Traceback" not in pod.box.said() and len(said) == 1, said
