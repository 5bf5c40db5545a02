"""The fork server as a process of its own, with real forks."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.agents.conftest import Agents, ForkServers
from tests.agents.processes import AgentSide, ForkServerProcess, children, eventually, has_ended
from unicrond.agents.protocol.memory import Memory
from unicrond.agents.protocol.messages import (
    Kill,
    Launch,
    MemoryReserved,
    ProcessExitAck,
    ProcessExited,
    ProcessForked,
    ReleaseMemory,
    ReserveMemory,
    Retire,
    Spawn,
    SpawnFailed,
)
from unicrond.events.vocabulary import StoreAddress, TaskSpec


def spawn(run_dir: Path, worker: str, entry: str, *args: str, slot: int = 0, **spec: object) -> Spawn:
    task = worker.rpartition(".")[0]
    launch = Launch(
        worker=worker,
        task=task,
        node="n1",
        address="127.0.0.1",
        agent_socket=str(run_dir / "agent.sock"),
        replica=0,
        shard=0,
        store=StoreAddress(host="127.0.0.1", port=1),
        spec=TaskSpec(name=task, entry=entry, args=args, **spec),  # type: ignore[arg-type]
    )
    return Spawn(launch=launch, log_path=str(log_of(run_dir, worker)), slot=slot)


def log_of(run_dir: Path, worker: str) -> Path:
    return run_dir / "logs" / worker.rpartition(".")[0] / f"{worker}.log"


def born(agent: AgentSide, order: Spawn) -> int:
    agent.send(order)
    forked = agent.next(ProcessForked)
    assert forked.worker == order.launch.worker
    return int(forked.pid)


def test_fork_server_greets_agent_with_inventory_and_store(fork_server: ForkServers, agent: Agents) -> None:
    fork_server()
    inventory = agent().inventory()
    assert {"cp", "etp"} <= set(inventory.degrees)
    assert inventory.workers == ()
    socket.create_connection(("127.0.0.1", inventory.store_port), timeout=30).close()


def test_worker_starts_with_clean_process_state(fork_server: ForkServers, agent: Agents, run_dir: Path) -> None:
    fork_server()
    side = agent()
    order = spawn(run_dir, "a.1", "describe", env={"COLOUR": "red"}, cwd="/usr")
    pid = born(side, order)
    assert os.WEXITSTATUS(side.next(ProcessExited).status) == 0
    tale = json.loads(log_of(run_dir, "a.1").read_text())
    assert (tale["pid"], tale["sid"], tale["pgid"]) == (pid, pid, pid)
    line, mark, memory = tale["given"]
    assert sorted(tale["fds"]) == sorted(["0", "1", "2", line, mark]), tale["fds"]
    assert (memory, tale["cwd"]) == ("", "/usr")
    assert tale["env"] == {"COLOUR": "red", "OMP_NUM_THREADS": "1"}
    assert tale["sigterm"] and tale["sigchld"]


def test_worker_reads_secrets_on_its_node(fork_server: ForkServers, agent: Agents, run_dir: Path) -> None:
    fork_server()
    side = agent()
    (run_dir / "secret").write_text("s3cret\n")
    born(side, spawn(run_dir, "a.1", "describe", secrets={"COLOUR": f"file:{run_dir / 'secret'}"}))
    assert os.WEXITSTATUS(side.next(ProcessExited).status) == 0
    said = json.loads(log_of(run_dir, "a.1").read_text())["env"]["COLOUR"]
    assert said == "(hidden)", "it has the value and prints it, and its log does not show it"
    for worker, source, why in (
        ("a.2", "file:/nowhere", "/nowhere: No such file or directory; each node of the task needs it"),
        ("a.3", "env:NO_SUCH", "the agent has no variable NO_SUCH; set it in the agent's environment"),
    ):
        born(side, spawn(run_dir, worker, "describe", secrets={"COLOUR": source}))
        assert os.WEXITSTATUS(side.next(ProcessExited).status) == 1
        assert log_of(run_dir, worker).read_text() == f"secret COLOUR: {why}\n"


def test_exit_is_repeated_until_acknowledgement(fork_server: ForkServers, agent: Agents, run_dir: Path) -> None:
    fork_server()
    first = agent()
    pid = born(first, spawn(run_dir, "a.1", "exit", "7"))
    exited = first.next(ProcessExited)
    assert (exited.pid, os.WEXITSTATUS(exited.status)) == (pid, 7)
    second = agent()
    inventory = second.inventory()
    assert second.received == [exited, inventory], "exits come before the inventory"
    second.send(ProcessExitAck(worker="a.1"))
    born(second, spawn(run_dir, "a.2", "sleep"))  # the acknowledgement has been read before this
    third = agent()
    assert third.inventory().workers[0].worker == "a.2"
    assert len(third.received) == 1


def test_workers_survive_agent_and_newest_agent_commands(
    fork_server: ForkServers, agent: Agents, run_dir: Path
) -> None:
    fork_server()
    first = agent()
    pid = born(first, spawn(run_dir, "a.1", "sleep", slot=1))
    second = agent()
    (worker,) = second.inventory().workers
    assert (worker.worker, worker.task, worker.pid, worker.slot) == ("a.1", "a", pid, 1)
    assert first.ends()
    begun = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    exited = second.next(ProcessExited)
    print(f"exit status seen after {(time.monotonic() - begun) * 1e3:.2f} ms")
    assert os.WTERMSIG(exited.status) == signal.SIGKILL


def test_kill_signals_worker_by_name(fork_server: ForkServers, agent: Agents, run_dir: Path) -> None:
    fork_server()
    side = agent()
    born(side, spawn(run_dir, "a.1", "sleep"))
    side.send(Kill(worker="a.9", signal=signal.SIGKILL))
    side.send(Kill(worker="a.1", signal=signal.SIGTERM))
    assert os.WTERMSIG(side.next(ProcessExited).status) == signal.SIGTERM


def test_repeated_spawn_starts_one_worker(fork_server: ForkServers, agent: Agents, run_dir: Path) -> None:
    fork_server()
    side = agent()
    order = spawn(run_dir, "a.1", "sleep")
    assert born(side, order) == born(side, order)


def test_failed_spawn_tells_reason(fork_server: ForkServers, agent: Agents, run_dir: Path) -> None:
    fork_server()
    side = agent()
    side.send(spawn(run_dir, "a.1", "sleep", cwd="/no/such/place"))
    assert "/no/such/place" in side.next(SpawnFailed).reason
    born(side, spawn(run_dir, "a.2", "sleep"))


def test_log_is_complete_when_exit_is_reported(fork_server: ForkServers, agent: Agents, run_dir: Path) -> None:
    fork_server()
    side = agent()
    lines = 100_000
    side.send(spawn(run_dir, "a.1", "print", str(lines)))
    assert os.WEXITSTATUS(side.next(ProcessExited).status) == 1
    text = log_of(run_dir, "a.1").read_text()
    assert f"line {lines - 1:06d}\n" in text
    assert text.endswith("RuntimeError: and then it broke\n")


def test_orphans_end_with_their_worker(fork_server: ForkServers, agent: Agents, run_dir: Path) -> None:
    server = fork_server()
    side = agent()
    born(side, spawn(run_dir, "a.1", "orphan"))
    side.next(ProcessExited)
    assert has_ended(int(log_of(run_dir, "a.1").read_text()))
    assert eventually(lambda: len(children(server.pid)) == 1), "only the store is left: orphans are reaped"


def test_fork_server_fences_itself_without_agent(fork_server: ForkServers, agent: Agents, run_dir: Path) -> None:
    server = fork_server("--lease-s", "0.3")
    side = agent()
    pids = [born(side, spawn(run_dir, f"a.{number}", "sleep")) for number in (1, 2)]
    pids += children(server.pid)
    side.close()
    assert server.process.wait(60) == 0
    assert all(has_ended(pid, 0) for pid in pids), "it ends after its children"
    assert "no agent for 0.3 s" in server.log()


@pytest.mark.parametrize("with_agent", [True, False])
def test_fork_server_binds_unlinked_socket_again(
    fork_server: ForkServers, agent: Agents, run_dir: Path, with_agent: bool
) -> None:
    server = fork_server("--lease-s", "30")
    first = agent()
    pid = born(first, spawn(run_dir, "a.1", "sleep"))
    if with_agent:
        (run_dir / "fork.sock").unlink()
        first.close()
    else:
        first.close()
        assert eventually(lambda: "the agent is gone" in server.log())
        (run_dir / "fork.sock").unlink()
    assert eventually((run_dir / "fork.sock").exists, within_s=30)
    assert [entry.pid for entry in agent().inventory().workers] == [pid], "its workers live, and are adopted"
    assert "fork.sock was gone: bound it again" in server.log()


def test_connected_agent_suspends_lease(fork_server: ForkServers, agent: Agents) -> None:
    server = fork_server("--lease-s", "0.2")
    agent()
    assert not has_ended(server.pid, 0.6)


@pytest.mark.parametrize("how", ["retire", "sigterm"])
def test_fork_server_ends_with_all_children(fork_server: ForkServers, agent: Agents, run_dir: Path, how: str) -> None:
    server = fork_server()
    side = agent()
    pids = [born(side, spawn(run_dir, f"a.{number}", "sleep")) for number in (1, 2, 3)]
    pids += children(server.pid)
    if how == "retire":
        side.send(Retire())
    else:
        os.kill(server.pid, signal.SIGTERM)
    assert server.process.wait(60) == 0
    assert all(has_ended(pid, 0) for pid in pids)
    assert not (run_dir / "fork.sock").exists()


def test_kernel_ends_workers_of_killed_fork_server(fork_server: ForkServers, agent: Agents, run_dir: Path) -> None:
    server = fork_server()
    side = agent()
    born(side, spawn(run_dir, "a.1", "sleep"))
    theirs = children(server.pid)
    assert len(theirs) == 2, "a worker and the store"
    os.kill(server.pid, signal.SIGKILL)
    assert all(has_ended(pid) for pid in theirs)


def test_store_is_replaced_on_same_port(fork_server: ForkServers, agent: Agents) -> None:
    server = fork_server()
    port = agent().inventory().store_port
    (store,) = children(server.pid)
    with socket.create_connection(("127.0.0.1", port), timeout=30) as first:
        assert first.recv(1) == b"!"
        os.kill(store, signal.SIGKILL)
        assert first.recv(1) == b"", "the store has died"
    with socket.create_connection(("127.0.0.1", port), timeout=30) as second:
        assert second.recv(1) == b"!"


def test_bad_frame_closes_only_its_connection(fork_server: ForkServers, agent: Agents, run_dir: Path) -> None:
    fork_server()
    side = agent()
    pid = born(side, spawn(run_dir, "a.1", "sleep"))
    side.socket.sendall(b"\0\0\0\4haha")
    assert side.ends()
    assert agent().inventory().workers[0].pid == pid


def test_second_fork_server_in_directory_is_refused(fork_server: ForkServers, agent: Agents, run_dir: Path) -> None:
    fork_server()
    second = ForkServerProcess(run_dir)
    assert not second.is_ready
    assert second.process.wait(60) == 3
    assert agent().inventory().workers == ()


def test_fork_server_with_torch_has_one_thread_and_forks_fast(
    fork_server: ForkServers, agent: Agents, run_dir: Path
) -> None:
    from datetime import timedelta

    from torch.distributed import TCPStore

    flags = ("--preload=unicrond.agents.trainer.entry.preload", "--worker=tests.agents.entries:run")
    server = fork_server(flags=flags)
    assert len(list(Path(f"/proc/{server.pid}/task").iterdir())) == 1, server.log()
    side = agent()
    port = side.inventory().store_port
    begun = time.monotonic()
    born(side, spawn(run_dir, "a.1", "exit", "0"))
    forked = time.monotonic()
    side.next(ProcessExited)
    print(f"forked in {(forked - begun) * 1e3:.1f} ms, ended after {(time.monotonic() - begun) * 1e3:.1f} ms")
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
    store.set("key", "value")
    assert store.get("key") == b"value"


# --- the memory of states ---------------------------------------------------------------------------


def opened(pid: int, kept: MemoryReserved) -> Memory:
    return Memory(f"/proc/{pid}/fd/{kept.fd}", kept.max_bytes)


def test_memory_outlives_worker_and_agent_until_release(fork_server: ForkServers, agent: Agents, run_dir: Path) -> None:
    server = fork_server("--memory-max-bytes=65536")
    first = agent()
    first.inventory()
    first.send(ReserveMemory(task="a", shard=1))
    kept = first.next(MemoryReserved)
    assert (kept.task, kept.shard, kept.max_bytes) == ("a", 1, 65536)
    memory = opened(server.pid, kept)
    draft = memory.draft(5)
    assert draft is not None
    draft.view[:] = b"state"
    head = draft.seal(3, 1)
    memory.close()

    second = agent()
    assert second.inventory().reserved_memory == (kept,)
    again = opened(server.pid, kept)
    assert again.newest() == head
    again.close()
    second.send(ReleaseMemory(task="another"))
    second.send(ReserveMemory(task="a", shard=1))
    assert second.next(MemoryReserved) == kept, "there already"
    second.send(ReleaseMemory(task="a"))
    third = agent()
    assert third.inventory().reserved_memory == ()
    assert not [fd for fd in Path(f"/proc/{server.pid}/fd").iterdir() if "unicron" in os.readlink(fd)]  # noqa: PTH115


def test_worker_inherits_memory_of_its_shard_only(fork_server: ForkServers, agent: Agents, run_dir: Path) -> None:
    server = fork_server("--memory-max-bytes=65536")
    side = agent()
    side.inventory()
    side.send(ReserveMemory(task="other", shard=0))
    side.next(MemoryReserved)
    side.send(spawn(run_dir, "a.1", "describe"))
    kept = side.next(MemoryReserved)
    assert (kept.task, kept.shard) == ("a", 0)
    assert os.WEXITSTATUS(side.next(ProcessExited).status) == 0
    tale = json.loads(log_of(run_dir, "a.1").read_text())
    assert sorted(tale["fds"]) == sorted(["0", "1", "2", *tale["given"]]), tale["fds"]
    assert "unicron a/0" in tale["fds"][tale["given"][2]], "of its shard, and of no other"
    opened(server.pid, kept).close()
