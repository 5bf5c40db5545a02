"""`python -m unicrond.agents.fork_server`, started by the agent: reads the flags, imports the heavy modules, serves."""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import os
import sys
import threading
import time
from pathlib import Path
from pkgutil import resolve_name
from typing import NoReturn

from unicrond.agents.fork_server.cgroups import Cgroups
from unicrond.agents.fork_server.limits import parse
from unicrond.agents.fork_server.server import READY, ForkServer
from unicrond.agents.fork_server.workers import ChildPrograms, Separation

logger = logging.getLogger("unicrond.agents.fork_server")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m unicrond.agents.fork_server", description="Started by unicron-agent; not for people."
    )
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--address", default="127.0.0.1", help="where the rendezvous store listens")
    parser.add_argument("--lease-s", type=float, default=60.0, help="ends itself after this long without an agent")
    parser.add_argument("--memory-max-bytes", type=int, default=0, help="limit of each shard's memory; 0: keep none")
    parser.add_argument(
        "--preload", default="unicrond.agents.trainer.entry.preload", help="module with the heavy imports"
    )
    parser.add_argument(
        "--worker", default="unicrond.agents.trainer.entry.worker:run", help="function that a worker runs"
    )
    parser.add_argument(
        "--store", default="unicrond.agents.trainer.groups.rendezvous_store:serve", help="function that the store runs"
    )
    parser.add_argument(
        "--sum", default="unicrond.agents.health.pair_sum:run", help="function that a sum with other nodes runs"
    )
    parser.add_argument("--ready-fd", type=int, default=-1, help="notified when agents may connect")
    parser.add_argument("--separate", action="store_true", help="every worker becomes the user that its order names")
    parser.add_argument("--limit", action="append", default=[], type=parse, help="of each worker, NAME=VALUE")
    parser.add_argument("--cgroup", type=Path, help="directory for the workers' cgroups")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> NoReturn:
    """Parse the flags, preload, serve, exit."""
    options = _parse(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def announce() -> None:
        if options.ready_fd >= 0:
            os.write(options.ready_fd, READY)
            os.close(options.ready_fd)

    begun_s = time.monotonic()
    importlib.import_module(options.preload)
    programs = ChildPrograms(
        run=resolve_name(options.worker),
        serve_store=resolve_name(options.store),
        add_up=resolve_name(options.sum),
        preload=options.preload,
        worker=options.worker,
    )
    separation = Separation(
        users=options.separate,
        limits={limit.resource: limit.number for limit in options.limit if limit.resource >= 0},
        cgroups=Cgroups(options.cgroup, {limit.name: limit.value for limit in options.limit if limit.resource < 0}),
    )
    server = ForkServer(
        options.run_dir,
        programs,
        separation,
        address=options.address,
        lease_s=options.lease_s,
        memory_max_bytes=options.memory_max_bytes,
    )
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
    if threads > 1 or threading.active_count() > 1:
        logger.error("the preloaded modules have started %d threads: forked workers may hang", threads - 1)
    gc.collect()
    gc.freeze()  # these objects stay: collections in children shall not copy their pages
    logger.info("preloaded in %.1f s, serving %s", time.monotonic() - begun_s, options.run_dir)
    server.serve(announce)
    sys.exit(0)


if __name__ == "__main__":
    main()
