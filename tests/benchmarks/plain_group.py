"""What a user has without us: three ranks that all-reduce in a loop over plain torch.distributed (gloo).

    python -m tests.benchmarks.plain_group TIMEOUT_S PORT

The ranks' pids come on stdout as "pid RANK PID"; a rank whose collective fails says "failed RANK MICROSECONDS".
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

RANKS = 3


def rank_main(rank: int, port: int, timeout_s: float) -> None:
    store = dist.TCPStore("127.0.0.1", port, RANKS, rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=120))
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))  # a slow start is not what is measured
    say(f"pid {rank} {os.getpid()}")
    gradients = torch.ones(100_000)
    try:
        while True:
            time.sleep(0.1)
            dist.all_reduce(gradients, group=group)
            gradients.fill_(1.0)
    except RuntimeError:
        say(f"failed {rank} {time.time_ns() // 1000}")
    os._exit(0)


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # in one piece: the ranks share the pipe


def main() -> None:
    port = int(sys.argv[2])
    spawn = multiprocessing.get_context("fork")
    ranks = [
        spawn.Process(target=rank_main, args=(rank, port, float(sys.argv[1])), daemon=True) for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    for process in ranks[:2]:
        process.join()
    ranks[2].kill()  # stopped or killed: whatever it is, it is not to stay


if __name__ == "__main__":
    main()
