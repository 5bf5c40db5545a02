"""Where state comes from when no replica is left: real workers, real memory, real servers of other nodes' memory."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pytest
from msgspec.structs import replace

from tests.events.certified import Certified, now
from tests.integration.memory_nodes import OtherNode
from tests.integration.regroup_rig import ForkServer, Rig
from tests.integration.test_regroup import complete, failure_free, last_commit, lose, regrouped, stopped, task
from unicrond.agents.memory.peer_tokens import Credentials
from unicrond.agents.protocol import memory_exchange
from unicrond.agents.protocol.memory import Memory
from unicrond.agents.protocol.memory_exchange import ExchangeFailed, Fetching
from unicrond.agents.protocol.messages import Passes
from unicrond.events.vocabulary import (
    CheckpointSaved,
    CheckpointSpec,
    MemoryService,
    SaveFailed,
    SnapshotStored,
    StateLoaded,
    TaskSpec,
    WorkerPaused,
)
from unicrond.events.vocabulary.shape import Shape

Start: TypeAlias = Callable[[TaskSpec], AbstractContextManager[Rig]]


@pytest.fixture
def rig(server: ForkServer, tmp_path: Path) -> Start:
    return partial(Rig, server, tmp_path)


@pytest.fixture
def spec(data: Path) -> TaskSpec:
    """Captures after every iteration; storage never before the end. The end is the same, bit by bit."""
    saves = CheckpointSpec(dir="(the rig says)", interval=0, memory_interval=1)
    return task(data, iterations=6, checkpoint=saves)


@pytest.fixture(scope="module")
def digest(server: ForkServer, data: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the parameters after a failure-free run of `spec`."""
    run = failure_free(partial(Rig, server, tmp_path_factory.mktemp("control")), task(data, iterations=6), 1)[1]
    assert run.completed is not None
    return run.completed.params_digest


def stopped_worker(run: Rig, worker: str) -> bool:
    return stopped(run.pids[worker])


def taken(run: Rig, worker: str) -> StateLoaded:
    (message,) = run.of(StateLoaded, worker)
    assert isinstance(message, StateLoaded)
    return message


def lose_the_last(run: Rig) -> int:
    """Train alone with memory up to iteration 4, and die in it; the newest iteration that the memory holds."""
    run.start("t.1", fault="stop@iteration=4,micro_batch=11", memory=True)
    run.until(lambda: run.ready("t.1"))
    run.tell(1, ["t.1"])
    run.until(lambda: stopped(run.pids["t.1"]))
    run.signal("t.1", signal.SIGKILL)
    lose(run, "t.1")
    newest = run.memory("n1").newest()
    assert newest is not None
    return newest.iteration  # 3, unless the machine was so slow that it was not sealed


def restart(run: Rig, *, node: str = "n1", peers: tuple[MemoryService, ...] = (), passes: Passes | None = None) -> None:
    run.start("t.2", node=node, memory=True)
    run.until(lambda: run.ready("t.2"))
    run.tell(2, ["t.2"], joiners=["t.2"], urgent=True, peers=peers, passes=passes)
    complete(run)


def test_memory_of_node_outlives_process(rig: Start, spec: TaskSpec, digest: str) -> None:
    with rig(spec) as run:
        kept = lose_the_last(run)
        assert kept >= 2
        restart(run)
        assert regrouped(run, "t.2").source == "memory"
        assert regrouped(run, "t.2").iteration == kept + 1, "nothing that was kept is trained again"
        told = taken(run, "t.2")
        assert (told.source, told.iteration, told.failed_sources, told.storage_iteration) == ("memory", kept, (), 0)
        assert told.size_bytes > 100_000 and told.saved_us > 0
        assert run.completed is not None and run.completed.params_digest == digest


def test_damaged_state_falls_back_to_previous(rig: Start, spec: TaskSpec, digest: str) -> None:
    with rig(spec) as run:
        kept = lose_the_last(run)
        with run.memory("n1").reading(kept) as found:
            assert found is not None
            found[1][found[0].size_bytes // 2] ^= 1
        restart(run)
        told = taken(run, "t.2")
        assert (told.source, told.iteration) == ("memory", kept - 1)
        assert (
            len(told.failed_sources) == 1
            and f"memory of iteration {kept}" in told.failed_sources[0]
            and "digest" in told.failed_sources[0]
        )
        assert run.completed is not None and run.completed.params_digest == digest


@pytest.mark.parametrize("how", ["clear", "tls"])
def test_memory_of_peer_outlives_node(rig: Start, spec: TaskSpec, digest: str, how: str, tmp_path: Path) -> None:
    sealed = how == "tls"
    certified = Certified(tmp_path / "tls")
    n1, n2, n3 = (Credentials(key, path) for path, key in map(certified.key, ("agent-n1", "agent-n2", "agent-n3")))
    with rig(spec) as run:
        kept = lose_the_last(run)
        with OtherNode("n3", {0: run.memory("n3")}, n3 if sealed else None) as service:
            with run.memory("n1").reading(kept) as found:
                assert found is not None
                brought = n1.passes(("n3",), run.task, certified.warrant("n1", run.task, 1), now()) if sealed else None
                memory_exchange.push(service, run.task, 0, "n1", *found, brought)
            gone = MemoryService(node="n1", host="127.0.0.1", port=1, token=service.token)
            passes = n2.passes(("n1", "n3"), run.task, certified.warrant("n2", run.task, 2), now()) if sealed else None
            restart(run, node="n2", peers=(gone, service), passes=passes)
        told = taken(run, "t.2")
        assert (told.source, told.iteration) == ("peer", kept)
        assert regrouped(run, "t.2").source == "peer"
        assert run.completed is not None and run.completed.params_digest == digest


def test_storage_is_last_source(rig: Start, spec: TaskSpec, digest: str) -> None:
    """Both memories are gone; what is on storage is older, and what came after it is trained again."""
    with rig(replace(spec, checkpoint=replace(spec.checkpoint, interval=1))) as run:
        run.start("t.1", fault="stop@iteration=4,at=saving", memory=True)  # 3 is half written
        run.until(lambda: run.ready("t.1"))
        run.tell(1, ["t.1"])
        run.until(lambda: stopped(run.pids["t.1"]))
        run.signal("t.1", signal.SIGKILL)
        lose(run, "t.1")
        restart(run, node="n2")
        told = taken(run, "t.2")
        assert (told.source, told.iteration, told.storage_iteration) == ("checkpoint", 2, 2)
        assert run.completed is not None and run.completed.params_digest == digest


def test_failing_storage_ends_no_training(rig: Start, spec: TaskSpec, digest: str) -> None:
    """Its directory is a file until two saves have failed, from the node's memory or from the worker's own."""
    for memory in (True, False):
        with rig(replace(spec, checkpoint=replace(spec.checkpoint, interval=1))) as run:
            run.checkpoints.write_text("no directory")
            run.start("t.1", fault="stop@iteration=4,micro_batch=0", memory=memory)
            run.until(lambda: run.ready("t.1"))
            run.tell(1, ["t.1"])
            run.until(lambda: len(run.of(SaveFailed)) >= 2)
            told = run.of(SaveFailed)[0]
            assert isinstance(told, SaveFailed) and told.saver == "unicron" and told.iteration == 1
            assert told.reason.startswith(("NotADirectoryError", "FileExistsError"))
            run.until(lambda: stopped(run.pids["t.1"]))
            run.checkpoints.unlink()
            run.signal("t.1", signal.SIGCONT)
            complete(run)
            assert run.completed is not None and run.completed.params_digest == digest
            saved = [message.iteration for message in run.of(CheckpointSaved) if isinstance(message, CheckpointSaved)]
            assert saved[-3:] == [4, 5, 6] and not {1, 2} & {*saved}


def test_training_starts_from_seed_without_any_state(rig: Start, spec: TaskSpec, digest: str) -> None:
    with rig(spec) as run:
        lose_the_last(run)
        restart(run, node="n2")
        assert (taken(run, "t.2").source, regrouped(run, "t.2").iteration) == ("init", 1)
        assert run.completed is not None and run.completed.params_digest == digest


def test_member_with_newest_memory_serves_all(rig: Start, spec: TaskSpec, digest: str) -> None:
    """Member 0 is on a node without it."""
    with rig(spec) as run:
        lose_the_last(run)
        run.start("t.2", node="n2", memory=True)
        run.start("t.3", node="n1", memory=True)
        run.until(lambda: run.ready("t.2", "t.3"))
        run.tell(2, ["t.2", "t.3"], joiners=["t.2", "t.3"], urgent=True)
        complete(run)
        assert taken(run, "t.3").source == "memory"
        assert {regrouped(run, worker).source for worker in ("t.2", "t.3")} == {"memory"}
        assert run.completed is not None and run.completed.params_digest == digest


def test_sharded_replica_takes_iteration_common_to_shards(rig: Start, spec: TaskSpec) -> None:
    sharded = replace(spec, tp=2)
    expected = failure_free(rig, sharded, 1)[1].completed
    with rig(sharded) as run:
        for worker in ("t.1", "t.2"):
            run.start(worker, fault="stop@iteration=4,micro_batch=11", memory=True)
        run.until(lambda: run.ready("t.1", "t.2"))
        run.tell(1, ["t.1", "t.2"])
        for worker in ("t.1", "t.2"):
            run.until(partial(stopped_worker, run, worker))
            run.signal(worker, signal.SIGKILL)
        lose(run, "t.1")
        lose(run, "t.2")
        kept = min(head.iteration for shard in (0, 1) for head in run.memory("n1", shard).heads()[:1])
        with run.memory("n1", shard=1).reading(kept) as found:
            assert found is not None
            found[1][100_000] ^= 1  # one shard's alone
        run.start("t.3", "t.4", memory=True)
        run.until(lambda: run.ready("t.3", "t.4"))
        run.tell(2, ["t.3", "t.4"], joiners=["t.3", "t.4"], urgent=True)
        complete(run)
        assert taken(run, "t.3").iteration == taken(run, "t.4").iteration == kept - 1
        assert (
            "another shard" in taken(run, "t.3").failed_sources[0] and "digest" in taken(run, "t.4").failed_sources[0]
        )
        assert expected is not None and run.completed is not None
        assert run.completed.params_digest == expected.params_digest


def test_capture_interval_follows_cost_and_failure_rate(rig: Start, spec: TaskSpec) -> None:
    """A failure a second asks for a capture at every iteration, one a year for the first alone."""
    free = replace(spec, iterations=40, checkpoint=CheckpointSpec(dir="(the rig says)"))
    counts = []
    for mtbf_us in (1_000, 365 * 86400 * 1_000_000):
        with rig(free) as run:
            run.start("t.1", memory=True)
            run.until(lambda: run.ready("t.1"))
            run.tell(1, ["t.1"], mtbf_us=mtbf_us)
            complete(run)
            counts.append(len(run.of(SnapshotStored)))
            assert last_commit(run).iteration == 40
    assert counts[0] > 8
    assert counts[1] <= 2


def test_task_moves_to_other_nodes_without_loss(rig: Start, spec: TaskSpec, digest: str) -> None:
    """The newcomers take state from those who leave, in place; no source but a live replica is asked."""
    with rig(spec) as run:
        run.start("t.1", fault="stop@iteration=3,micro_batch=2", memory=True)
        run.until(lambda: run.ready("t.1"))
        run.tell(1, ["t.1"])
        run.start("t.2", node="n2", memory=True)
        run.until(lambda: run.ready("t.2"))
        run.tell(2, ["t.1", "t.2"], joiners=["t.2"])
        run.until(lambda: stopped(run.pids["t.1"]))
        run.signal("t.1", signal.SIGCONT)
        run.until(lambda: run.of(StateLoaded, "t.2"))
        run.tell(3, ["t.2"], also=["t.1"])
        run.until(lambda: run.of(WorkerPaused, "t.1") or run.completed)
        run.quit("t.1")
        complete(run)
        assert taken(run, "t.2").source == "replica"
        assert run.completed is not None and run.completed.params_digest == digest


# --- the server ----------------------------------------------------------------------------------


def test_memory_server_rejects_unknown_token(rig: Start, spec: TaskSpec) -> None:
    memory = Memory.private(1 << 20)
    with OtherNode("n3", {0: memory}) as service:
        draft = memory.draft(5)
        assert draft is not None
        draft.view[:] = b"state"
        head = draft.seal(4, 1)
        assert memory_exchange.ask(service, "t") == {0: [head]}
        stranger = replace(service, token="another")
        with pytest.raises(ExchangeFailed, match="token"):
            memory_exchange.ask(stranger, "t")
        with pytest.raises(ExchangeFailed, match="token"):
            memory_exchange.push(stranger, "t", 0, "n1", head, memoryview(b"state"))
        with pytest.raises(ExchangeFailed, match="no state of it"):
            Fetching(service, "t", 1, 4, Shape())
        with pytest.raises(ExchangeFailed, match="iteration 4 is not in memory"):
            Fetching(service, "t", 0, 4, Shape(2))
        memory_exchange.push(service, "t", 0, "n1", head, memoryview(b"other"))
        memory_exchange.push(service, "t", 0, "n1", replace(head, iteration=3), memoryview(b"other"))
        assert memory_exchange.ask(service, "t") == {0: [head]}, "what is there already, or is older, is not taken"
        newer = replace(head, iteration=5)
        with pytest.raises(ExchangeFailed, match="digest"):
            memory_exchange.push(service, "t", 0, "n1", newer, memoryview(b"other"))
        assert memory.newest() == head
    memory.close()
