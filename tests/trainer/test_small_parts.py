"""Ordered faults, the ledger, frames, the corpus, the preload."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from unicrond.agents.protocol import injection
from unicrond.agents.protocol.framing import BadFrame, Unframer, frame
from unicrond.agents.protocol.messages import MAX_FRAME_BYTES, Quit, ToWorker
from unicrond.agents.protocol.sampling import Sampling
from unicrond.agents.trainer.entry.worker import script_arguments
from unicrond.agents.trainer.groups import shared_results
from unicrond.agents.trainer.groups.shared_results import SharedResults
from unicrond.agents.trainer.lifecycle.ledger import IterationLedger, ReplicaAccount, Total
from unicrond.agents.trainer.loop import corpus
from unicrond.events.vocabulary import StoreAddress, TaskSpec, WorkerReady


def test_fault_parser_reads_orders() -> None:
    (first, second) = injection.parse("kill@iteration=3,micro_batch=2; stop@worker=t.2,at=reducing")
    assert (first.action, first.iteration, first.at, first.micro_batch) == ("kill", 3, "micro_batch", 2)
    assert (second.action, second.worker, second.at, second.iteration) == ("stop", "t.2", "reducing", None)


@pytest.mark.parametrize("text", ["explode@iteration=1", "kill@iteration=x", "kill@at=lunch", "kill@color=red"])
def test_fault_parser_names_wrong_order(text: str) -> None:
    with pytest.raises(ValueError, match="UNICRON_FAULT"):
        injection.parse(text)


def test_ordered_fault_fires_once_at_its_point() -> None:
    ordered = injection.FaultInjector("t.1", "raise@iteration=3,at=agreed")
    ordered.fire("agreed", 2, 1)
    ordered.fire("reduced", 3, 1)
    with pytest.raises(RuntimeError, match="agreed of iteration 3"):
        ordered.fire("agreed", 3, 1)
    ordered.fire("agreed", 3, 1)
    injection.FaultInjector("t.2", "raise@worker=t.1").fire("micro_batch", 1, 1)


@given(st.floats(allow_nan=False), st.integers(0, 2**61 - 1))
def test_replica_account_survives_round_trip(loss_sum: float, digest: int) -> None:
    account = ReplicaAccount(5, 2, 4, digest, loss_sum, 128, 1)
    assert ReplicaAccount.from_row(account.row()) == account


def test_total_covers_exactly_all_micro_batches() -> None:
    sampling = Sampling(1, 4, 1, None)
    ledgers = [
        IterationLedger(2, [0, 2], finished=2, loss_sum=3.0, tokens=8),
        IterationLedger(2, [1, 3], 2, 1.0, 8, repeated=1),
    ]
    total = Total(1, tuple(ledger.account(sampling) for ledger in ledgers))
    total.check(2, 4)
    assert (total.loss, total.samples, total.repeated, total.micro_batches_by_rank) == (0.25, 4, 1, (2, 2))
    with pytest.raises(RuntimeError, match="4 of 5"):
        total.check(2, 5)
    with pytest.raises(RuntimeError):
        total.check(3, 4)


@given(st.lists(st.text(max_size=40), max_size=6), st.integers(1, 7))
def test_unframer_accepts_any_split(reasons: list[str], piece_bytes: int) -> None:
    messages = [Quit(reason=reason) for reason in reasons]
    stream = b"".join(map(frame, messages))
    incoming: Unframer[ToWorker] = Unframer(ToWorker)
    received = []
    for start in range(0, len(stream), piece_bytes):
        received += incoming.feed(stream[start : start + piece_bytes])
    assert received == messages


@pytest.mark.parametrize(
    "data",
    [
        frame(WorkerReady(node="n", task="t", worker="t.1")),
        (MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
        b"\0\0\0\1\xc1",
        b"\0\0\0\2\x92\xc0",
    ],
)
def test_unframer_refuses_bad_frames(data: bytes) -> None:
    with pytest.raises(BadFrame):
        Unframer[ToWorker](ToWorker).feed(data)


def test_corpus_holds_standard_library_in_windows(tmp_path: Path) -> None:
    prefix = tmp_path / "deep" / "stdlib"
    corpus.build(prefix)
    before = prefix.with_name("stdlib.bin").read_bytes()
    text = corpus.Corpus(prefix, 100)
    assert len(text) == (len(before) - 1) // 100 > 1000
    for index in (0, 1, 77, len(text) - 1):
        assert bytes(text.sample(index).tolist()) == before[index * 100 : index * 100 + 101]
    assert b"from __future__" in before
    prefix.with_name("stdlib.idx").unlink()
    corpus.build(prefix)
    assert prefix.with_name("stdlib.bin").read_bytes() == before


def test_corpus_names_missing_data(tmp_path: Path) -> None:
    with pytest.raises(corpus.DataError, match="nowhere"):
        corpus.Corpus(tmp_path / "nowhere", 8)


def test_preload_imports_what_a_worker_needs() -> None:
    """A child of the fork server imports no module of ours, of torch or of Megatron that its parent could have had."""
    look = (
        "import sys, unicrond.agents.trainer.entry.preload; before = set(sys.modules);"
        "import unicrond.agents.trainer.entry.worker, unicrond.agents.trainer.loop.pretrain_gpt;"
        "print(sorted(set(sys.modules) - before), 'megatron.core.models.gpt' in before)"
    )
    look_run = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True, timeout=60)
    assert look_run.stdout.split() == ["[]", "True"]


def test_preload_leaves_process_fit_for_fork() -> None:
    look = (
        "import unicrond.agents.trainer.entry.preload, os, torch, torch.distributed as dist;"
        "print(len(os.listdir('/proc/self/task')), dist.is_initialized(), torch.cuda.is_initialized())"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    told = subprocess.run(
        [sys.executable, "-c", look], capture_output=True, text=True, check=False, env=environment, timeout=60
    )
    assert (told.stdout.split(), told.stderr) == (["1", "False", "False"], "")


def test_unframer_sets_newer_fields_aside() -> None:
    def framed(message: dict[str, object]) -> bytes:
        body = msgspec.msgpack.encode(message)
        return len(body).to_bytes(4, "big") + body

    incoming: Unframer[ToWorker] = Unframer(ToWorker)
    younger = framed({"type": "Quit", "reason": "x", "politely": True}) + framed({"type": "Sing", "song": 5})
    assert incoming.feed(younger + frame(Quit(reason="y"))) == [Quit(reason="x"), Quit(reason="y")]
    for bad in ({"type": "Quit", "reason": 5, "politely": True}, {"type": "Quit"}, {"type": 5}, {"reason": "x"}):
        with pytest.raises(BadFrame):
            Unframer(ToWorker).feed(framed(bad))


def test_arguments_of_a_script_take_numbers_of_the_task_where_they_are_alone() -> None:
    args = ("{iterations}", "--batch={global_batch}", "--out", "out_{iterations}.pt", "{lr}", "{seed}")
    spec = TaskSpec(name="t", entry="loop.py", iterations=70, global_batch=24, micro_batch=2, seed=5, args=args)
    assert script_arguments(spec) == ["70", "--batch=24", "--out", "out_{iterations}.pt", "{lr}", "5"]


def test_results_are_removed_by_their_last_reader_or_two_purposes_later() -> None:
    """Of the last purpose too, though nobody begins another; where a reader has died, by those that go on."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    address = StoreAddress(host="127.0.0.1", port=store.port)
    results = [SharedResults("big") for _ in range(3)]

    def share(purpose: str, readers: int) -> None:
        for rank, own in enumerate(results):
            own.begin(address, purpose)
            own.publish(f"0/{rank}", b"x")
        for own in results[:readers]:
            assert len(own.take(["0/0", "0/1", "0/2"])) == 3
            own.end(["0/0", "0/1", "0/2"], 3)
            own.are_there(["0/0"])  # which its thread answers once it has left

    keys = [f"results/big/{purpose}/0/{rank}" for purpose in "12" for rank in range(3)]
    share("1", 2)
    assert all(store.check([key]) for key in keys[:3]), "the third may want them"
    results[2].end(["0/0", "0/1", "0/2"], 3)
    results[2].are_there(["0/0"])
    empty = store.num_keys()
    assert not any(store.check([key]) for key in keys)
    share("2", 2)
    results.pop()
    assert all(store.check([key]) for key in keys[3:])
    for purpose in ("3", "4"):
        for own in results:
            own.begin(address, purpose)
            own.end([], 2)
            own.are_there(["0/0"])
    assert store.num_keys() == empty


def test_silent_store_of_results_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls have no limit of their own; who has none goes on alone."""
    lines = "import signal, torch.distributed as d; s = d.TCPStore('127.0.0.1', 0, None, True, wait_for_workers=False)"
    words = [sys.executable, "-c", f"{lines}; print(s.port, flush=True); signal.pause()"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            results = SharedResults("big")
            results.begin(StoreAddress(host="127.0.0.1", port=int(server.stdout.readline())), "first")
            results.publish("a", b"1")
            assert results.are_there(["a"]) and not results.are_there(["a", "b"])
            assert results.take(["a", "b"]) == {"a": b"1"}
            server.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, server.pid, os.WSTOPPED)  # each of its threads
            monkeypatch.setattr(shared_results, "ANSWER_MAX_S", 0.5)
            results.end(["a"], 1)
            assert results.is_there, "nobody waits for the end, so nobody knows yet"
            assert not results.are_there(["a"]) and not results.is_there
            assert results.take(["a"]) == {}
            results.publish("b", b"2")
            server.send_signal(signal.SIGCONT)
        finally:
            server.kill()


def test_shim_answers_what_releases_ask_of_streams() -> None:
    """In a process of its own, where torch's build for CUDA would be: `torch.accelerator` knows of CUDA there."""
    program = (
        "import torch; torch.accelerator.current_accelerator = lambda check_available=False: torch.device('cuda')\n"
        "from unicrond.agents.trainer.megatron import cpu\n"
        "from unicrond.agents.trainer.process import cpu_shim\n"
        "cpu_shim.apply()\n"
        "torch.cuda.current_stream().wait_stream(torch.cuda.current_stream())\n"
        "cpu.apply()\n"
        "assert torch.cuda.is_available() and torch.cuda.Event().query()\n"
        "assert torch.cuda.is_current_stream_capturing.__module__ == cpu.__name__\n"
        "weight = torch.nn.Parameter(torch.ones(2)); weight.grad = torch.ones(2)\n"
        "torch.optim.Adam([weight], lr=0.5).step()\n"
        "print(round(float(weight.sum()), 6))\n"
    )
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)
    assert ran.stdout == "1.0\n", ran.stderr
