"""A loop that waits for its data: `hook.loader` beside DistributedDataParallel with as many loader processes.

    python -m tests.benchmarks.loader --rounds 3

Two replicas, two loader processes each; a sample takes 20 ms to read (it sleeps), an iteration has 16. Told are seconds
of an iteration, the mean of each run's behind its warm-up, in turns, and their ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from unicrond import Hook

ITERATIONS, WARM_UP, BATCH, MICRO_BATCH, REPLICAS, PROCESSES, READING_S = 80, 20, 16, 4, 2, 2, 0.02
WORKERS = tuple(f"t.{number + 1}" for number in range(REPLICAS))


class Slow(Dataset[torch.Tensor]):
    """Samples that take READING_S to read."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, sample: int) -> torch.Tensor:
        time.sleep(READING_S)
        return torch.full((64,), float(sample % 7))


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))


def ours() -> list[float]:
    """Train by the hook; return the end of each iteration."""
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), 0.001)
    hook = Hook.attach(network, optimizer)
    loader, ends = hook.loader(Slow(), num_workers=PROCESSES), []
    for step in hook.steps():
        for batch in loader(step):
            step.backward(network(batch).square().mean())
        optimizer.step()
        ends.append(time.monotonic())
    return ends


def theirs() -> list[float]:
    """Train by DistributedDataParallel; return the end of each iteration."""
    torch.distributed.init_process_group("gloo")
    network = torch.nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.SGD(network.parameters(), 0.001)
    data, size, ends = Slow(), BATCH // REPLICAS, []
    loader = DataLoader(data, batch_size=size, sampler=DistributedSampler(data), num_workers=PROCESSES)
    for number, batch in enumerate(loader):
        optimizer.zero_grad()
        network(batch).square().mean().backward()
        optimizer.step()
        ends.append(time.monotonic())
        if number + 1 == ITERATIONS:
            break
    torch.distributed.destroy_process_group()
    return ends


def run_ours(directory: Path) -> None:
    """Run the hook's loop in workers of a fork server."""
    from tests.integration.regroup_rig import ForkServer, Rig
    from unicrond.events.vocabulary import CheckpointSpec, TaskSpec

    spec = TaskSpec(
        name="t", entry=__file__, args=("ours", str(directory)), max_workers=REPLICAS, global_batch=BATCH,
        micro_batch=MICRO_BATCH, iterations=ITERATIONS, checkpoint=CheckpointSpec(interval=0, memory_interval=0),
        env={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    with ForkServer() as server, Rig(server, directory, spec) as rig:
        rig.start(*WORKERS)
        rig.until(lambda: rig.ready(*WORKERS), 60)
        rig.tell(1, WORKERS)
        rig.until(lambda: rig.completed and not rig.living(), 600)


def run_theirs(directory: Path) -> None:
    """Run the plain loop under torchrun."""
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={REPLICAS}", __file__, "theirs"]
    subprocess.run([sys.executable, *words, str(directory)], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def seconds(directory: Path) -> float:
    """Return the mean iteration of a run: two loader processes deliver two batches at once, so that every other
    iteration waits for nothing, and a median is either's."""
    (ends, *_) = ([float(line) for line in path.read_text().split()] for path in sorted(directory.glob("ends-*")))
    return (ends[-1] - ends[WARM_UP]) / (len(ends) - 1 - WARM_UP)


def main() -> None:
    """Print a line for each round, and the medians."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=3)
    medians: dict[str, list[float]] = {"ours": [], "theirs": []}
    for number in range(options.parse_args().rounds):
        for name, run in (("ours", run_ours), ("theirs", run_theirs)):
            with tempfile.TemporaryDirectory() as scratch:
                run(Path(scratch))
                medians[name].append(seconds(Path(scratch)))
        print(f"round {number + 1}: ours {medians['ours'][-1]:.4f} s, DDP {medians['theirs'][-1]:.4f} s", flush=True)
    ours_s, theirs_s = statistics.median(medians["ours"]), statistics.median(medians["theirs"])
    print(f"an iteration: ours {ours_s:.4f} s, DDP {theirs_s:.4f} s, ratio {ours_s / theirs_s:.3f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["ours"] or sys.argv[1:2] == ["theirs"]:
        lines = ours() if sys.argv[1] == "ours" else theirs()
        Path(sys.argv[2], f"ends-{os.getpid()}").write_text("\n".join(map(str, lines)))
    else:
        main()
