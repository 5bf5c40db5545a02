"""What unicrond costs Megatron-LM where nothing fails: beside Megatron-LM alone on the same flags, interleaved.

    python -m tests.benchmarks.megatron_overhead --pairs 40 --replicas 2

Two jobs train with the same unmodified `pretrain_gpt.py`: one as Megatron-LM's own data parallelism, one under the
adapter. Both stay alive; in turns one is stopped while the other runs for a window, so that both meet the same machine.
Iterations are counted by the lines that Megatron-LM logs, by their own times. Compared are neighbouring windows; the
interval is Student's, at 95 %, over the pairs. CPU time is that of all threads of a job's processes, per iteration.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import psutil

from tests.benchmarks.trainer_overhead import interval
from tests.integration.regroup_rig import ForkServer, Rig
from tests.megatron_lm.fixtures import CPU, checkout, task
from tests.megatron_lm.runs import names

_ROOT = Path(__file__).parents[2]
_LINE = re.compile(r"^ ?\[(\S+ \S+)\] iteration +(\d+)/", re.MULTILINE)


@dataclass
class Job:
    """`log`: where the one process that logs does so."""

    pids: list[int]
    log: Path
    wait: Callable[[float], None]
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def signal(self, number: int) -> None:
        for pid in self.pids:
            os.kill(pid, number)

    def used_s(self) -> float:
        times = [psutil.Process(pid).cpu_times() for pid in self.pids]
        return sum(own.user + own.system for own in times)

    def logged_s(self) -> list[float]:
        """When each iteration was logged, in seconds of the wall clock."""
        return [datetime.fromisoformat(at).timestamp() for at, _ in _LINE.findall(self.log.read_text())]

    def window(self, length_s: float) -> None:
        """Run for so long, then stop."""
        used_s, begun_s = self.used_s(), time.time()
        self.signal(signal.SIGCONT)
        self.wait(length_s)
        ended_s = time.time()
        self.signal(signal.SIGSTOP)
        logged = [at for at in self.logged_s() if begun_s < at < ended_s]
        each_s = (logged[-1] - logged[0]) / (len(logged) - 1)
        self.wall_s.append(each_s)
        self.cpu_s.append((self.used_s() - used_s) * each_s / (ended_s - begun_s))


def alone(stack: ExitStack, scratch: Path, flags: list[str], ranks: int) -> Job:
    """Megatron-LM's own data parallelism."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids: list[int] = []
    script = str(_ROOT / "tests/megatron_lm/stock.py")
    for rank in range(ranks):
        environment = {
            **os.environ,
            "PYTHONPATH": str(_ROOT),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONWARNINGS": "ignore",
            "PYTHONUNBUFFERED": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        }
        command = [sys.executable, script, str(scratch / "dump"), str(checkout() / "pretrain_gpt.py"), *flags]
        log = stack.enter_context((scratch / f"alone.{rank}.log").open("wb"))
        process = subprocess.Popen([*command, *CPU.split()], env=environment, stdout=log, stderr=log)
        stack.callback(process.kill)
        pids.append(process.pid)
    return Job(pids, scratch / f"alone.{ranks - 1}.log", time.sleep)


def healed(stack: ExitStack, scratch: Path, model: str, replicas: int, numerics: str) -> Job:
    """The same under the adapter."""
    server = stack.enter_context(ForkServer())
    spec = task(model=model, replicas=replicas, numerics=numerics)
    rig = stack.enter_context(Rig(server, scratch, spec))
    workers = names(spec, range(replicas))
    rig.start(*workers)
    rig.until(lambda: rig.ready(*workers))
    rig.tell(1, workers)

    def wait(length_s: float) -> None:
        until = time.monotonic() + length_s
        rig.until(lambda: time.monotonic() > until)

    stack.callback(lambda: [rig.signal(worker, signal.SIGCONT) for worker in workers])
    return Job([rig.pids[worker] for worker in workers], scratch / f"{workers[0]}.log", wait)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40, help="windows of each job (40)")
    parser.add_argument("--window-s", type=float, default=3.0, help="seconds of a window (3)")
    parser.add_argument("--replicas", type=int, default=2, help="data-parallel ranks (2)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--overlap", action="store_true", help="--overlap-grad-reduce for both")
    parser.add_argument("--numerics", choices=("fixed", "follow"), default="fixed")
    chosen = parser.parse_args()
    model = (
        f"--num-layers {chosen.layers} --hidden-size {chosen.hidden} --num-attention-heads 4 --seq-length 64"
        f" --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size {4 * chosen.replicas}"
        " --train-iters 1000000 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --mock-data"
        " --tokenizer-type NullTokenizer --vocab-size 255 --split 99,1,0 --eval-iters 0 --eval-interval 2000000"
        " --log-interval 1 --seed 1234 --attention-dropout 0 --hidden-dropout 0 --num-workers 0"
        + (" --overlap-grad-reduce" if chosen.overlap else "")
    )
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        scratch = Path(name)
        jobs = {
            "alone": alone(stack, scratch, model.split(), chosen.replicas),
            "healed": healed(stack, scratch, model, chosen.replicas, chosen.numerics),
        }
        for job in jobs.values():
            job.signal(signal.SIGCONT)
            deadline = time.monotonic() + 240
            while not job.log.exists() or len(job.logged_s()) < 20:
                job.wait(0.5)
                assert time.monotonic() < deadline, job.log.read_text()[-4000:]
            job.signal(signal.SIGSTOP)
        for number in range(chosen.pairs):
            turns = list(jobs.values())
            for job in turns if number % 2 == 0 else reversed(turns):
                job.window(chosen.window_s)
        for job in jobs.values():
            job.signal(signal.SIGCONT)
    for what in ("wall", "cpu"):
        mine, theirs = (getattr(jobs[job], f"{what}_s") for job in ("healed", "alone"))
        mean, half = interval([a / b for a, b in zip(mine, theirs, strict=True)])
        apart = f"ratio {mean:.4f} +- {half:.4f} (95 %, {len(mine)} pairs)"
        medians = [statistics.median(values) * 1e3 for values in (theirs, mine)]
        print(f"{what}: alone {medians[0]:.2f} ms, under unicrond {medians[1]:.2f} ms an iteration; {apart}")


if __name__ == "__main__":
    main()
