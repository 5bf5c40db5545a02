"""Compares what a set of flags trains to in Megatron-LM alone, under torchrun, and in a task of unicrond one of whose
workers is killed: losses, gradient norms, learning rates, skipped iterations, all else that is logged, and the final
parameters.

    make compare FLAGS="--bf16 --num-experts 4 --disable-bias-linear"
    python -m tests.megatron_lm.compare --kill-at 8 --kill-rank 0 -- --train-iters 12 --swiglu
    python -m tests.megatron_lm.compare --checkout /opt/Megatron-LM --plain -- --num-layers 4 --hidden-size 128 ...

Flags that are not given are those of a tiny GPT on mock data (--plain: none is added). Everything runs on this
machine's CPU; flags that only a GPU could obey are left out, with a line that says so.

Exit status: 0 equal, or within the tolerance; 1 different; 2 not compared: one line says which flag is refused, by
whom, and why.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.regroup_rig import ForkServer
from tests.megatron_lm import runs
from tests.megatron_lm.fixtures import CPU, MODEL, checkout, task
from tests.megatron_lm.tables import ITERATION, Comparison, parameters_row, rows, series_of
from unicrond.events.megatron.command_line import BadFlags, CommandLine, degrees
from unicrond.events.vocabulary import TaskSpec

#: Flags of the tiny GPT that give way to one of these.
_INSTEAD = {
    "--train-iters": ("--train-samples",),
    "--mock-data": ("--data-path", "--train-data-path", "--data-args-path", "--per-split-data-args-path"),
    "--split": ("--train-data-path", "--per-split-data-args-path"),
    "--max-position-embeddings": ("--seq-length",),
    "--lr-decay-style": ("--lr-wsd-decay-style",),
}


#: Flags that name a directory to write to.
_WRITES = ("--save", "--tensorboard-dir")


class NotCompared(Exception):
    """There is nothing to compare. The text is one line: which flag, refused by whom, and why."""


# --- the runs ------------------------------------------------------------------------------------


def with_defaults(flags: Sequence[str]) -> list[str]:
    """Return the flags behind those of the tiny GPT that they leave open."""
    given = CommandLine.parse(["script", *flags]).flags
    default = CommandLine.parse(["script", *MODEL.split()]).flags
    if "--seq-length" in given and "--max-position-embeddings" not in given:
        default = {**default, "--max-position-embeddings": given["--seq-length"]}
    missing = [
        word
        for flag, values in default.items()
        if flag not in given and not any(other in given for other in _INSTEAD.get(flag, ()) if other != "--seq-length")
        for word in (flag, *values)
    ]
    return [*missing, *flags]


def for_cpu(flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the flags without those that a CPU obeys in one way only, and which these are."""
    fixed = {word for word in CPU.split() if word.startswith("--")} | {"--transformer-impl", "--tp-comm-overlap"}
    rest: list[str] = []
    omitted: list[str] = []
    skips = False
    for word in flags:
        if word.startswith("--"):
            skips = word.partition("=")[0] in fixed
            if skips:
                omitted.append(word)
        if not skips:
            rest.append(word)
    return rest, omitted


@dataclass(frozen=True)
class Request:
    """What is to be compared. `ranks`: of the runs of Megatron-LM alone; `kill_rank`: None for no fault."""

    flags: Sequence[str]
    script: str
    replicas: int
    ranks: Sequence[int]
    kill_rank: int | None
    kill_at: int
    joins: bool
    tolerance: float
    timeout_s: float


class Progress:
    """Says on stderr how far the run has come whose logs lie in a directory."""

    def __init__(self, is_quiet: bool) -> None:
        self._is_quiet = is_quiet
        self._began_s = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line with the seconds since the beginning."""
        if not self._is_quiet:
            print(f"[{time.monotonic() - self._began_s:5.0f} s] {text}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def of(self, title: str, directory: Path, logs: str, iterations: int) -> Iterator[None]:
        """Say, while the run lasts, which iteration it has logged last. `logs`: the pattern of their names."""
        self.say(f"{title}: it starts")
        ends = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(title, directory, logs, iterations, ends), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ends.set()
            watcher.join()
        self.say(f"{title}: it has ended")

    def _watch(self, title: str, directory: Path, logs: str, iterations: int, ends: threading.Event) -> None:
        last = 0
        while not ends.wait(2.0):
            numbers = [int(match[1]) for log in directory.glob(logs) for match in ITERATION.finditer(log.read_text())]
            if max(numbers, default=0) > last:
                last = max(numbers)
                self.say(f"{title}: iteration {last} of {iterations}")


def in_place(flags: Sequence[str], place: Path) -> list[str]:
    """Return the flags with directories of this run's own for what it writes: none reads what another has saved."""
    words: list[str] = []
    for word in flags:
        flag = words[-1] if words else ""
        words.append(str(place / flag.removeprefix("--")) if flag in _WRITES else word)
    return words


def task_of(request: Request, place: Path | None = None) -> TaskSpec:
    """Return the task. `place`: where it writes. Raises NotCompared with the product's own sentence where it refuses a
    flag, or where the fault cannot be ordered."""
    try:
        flags = request.flags if place is None else in_place(request.flags, place)
        spec = task(flags, model="", replicas=request.replicas + 1, script=request.script)
    except BadFlags as refusal:
        raise NotCompared(f"unicrond refuses these flags: {refusal}") from None
    workers = request.replicas * spec.replica_workers
    if request.kill_rank is not None and not 0 <= request.kill_rank < workers:
        raise NotCompared(f"--kill-rank: {request.kill_rank} is none of the ranks 0 to {workers - 1}; give one of them")
    if request.kill_rank is not None and not 1 <= request.kill_at < spec.iterations:
        raise NotCompared(
            f"--kill-at: {request.kill_at} is not within training; give an iteration from 1 to {spec.iterations - 1}"
        )
    if request.kill_rank is not None and request.replicas < 2:
        raise NotCompared("--replicas: 1 leaves none to heal with; give 2 or more, or --no-kill")
    wrong = [ranks for ranks in request.ranks if ranks < 1 or ranks % spec.replica_workers]
    if wrong:
        raise NotCompared(
            f"--ranks: {wrong[0]} is no multiple of a replica's {spec.replica_workers} ranks (tp {spec.tp} x pp"
            f" {spec.pp}); give multiples"
        )
    return spec


def compare(request: Request, directory: Path, progress: Progress, server: ForkServer) -> Comparison:
    """Run Megatron-LM alone and the task, and compare them. Raises NotCompared."""
    spec = task_of(request, directory / "unicrond")
    size = spec.replica_workers
    ranks = list(dict.fromkeys(request.ranks or (request.replicas * size, size)))
    alone, parameters = [], []
    for count in ranks:
        place = directory / f"stock-{count}"
        with progress.of(f"Megatron-LM alone, {count} rank(s) under torchrun", place, "log", spec.iterations):
            parameters.append(_alone(request, place, count, spec))
        alone.append(series_of([(place / "log").read_text()]))
    fault = f"kill@iteration={request.kill_at},at=backward"
    place, kill = directory / "unicrond", f"{request.replicas} replica(s) of {size} worker(s); none was killed"
    if request.kill_rank is not None:
        kill = (
            f"{request.replicas} replicas of {size} worker(s); rank {request.kill_rank} was killed (SIGKILL) in the"
            f" backward of iteration {request.kill_at}{', and a new replica joined' if request.joins else ''}"
        )
    try:
        title = f"unicrond, {request.replicas} replica(s)"
        # What the rig prints of a run that fails stands in the logs too.
        with progress.of(title, place, "t.*.log", spec.iterations), contextlib.redirect_stdout(io.StringIO()):
            if request.kill_rank is None:
                outcome = runs.unbroken(server, place, spec, request.replicas, request.timeout_s)
            else:
                outcome = runs.broken(
                    server, place, spec, fault, replicas=request.replicas, rank=request.kill_rank,
                    joins=request.joins, timeout_s=request.timeout_s,
                )  # fmt: skip
    except runs.RunFailed as failure:
        if failure.reason.startswith("args: "):
            raise NotCompared(f"unicrond refuses these flags: {failure.reason.removeprefix('args: ')}") from None
        raise
    except runs.FaultMissed:
        raise NotCompared(
            f"--kill-at: training ended before iteration {request.kill_at}; give an earlier one"
        ) from None
    ours = series_of([outcome.logs[worker] for worker in sorted(outcome.logs, key=lambda name: int(name[2:]))])
    # A leader that is killed takes along what it has not logged yet of the iteration behind it.
    leads = request.kill_rank is not None and request.kill_rank < size
    excused = [f"iteration {request.kill_at - 1}"] if leads else []
    table = rows(ours, alone, request.tolerance, excused)
    table.append(parameters_row(outcome.shards, parameters, request.tolerance))
    return Comparison(request.flags, kill, ranks, table, _notes(request))


def _notes(request: Request) -> list[str]:
    line = CommandLine.parse(["script", *request.flags])
    dropouts = [line.text(flag, default="0.1") for flag in ("--attention-dropout", "--hidden-dropout")]
    if any(float(text) for text in dropouts):
        return [
            "Dropout draws other random numbers than Megatron-LM's, the same whatever fails: compare with"
            " --attention-dropout 0 --hidden-dropout 0."
        ]
    return []


def _alone(request: Request, place: Path, ranks: int, spec: TaskSpec) -> list[runs.Parameters]:
    try:
        return runs.stock(
            place,
            in_place(request.flags, place),
            ranks,
            tp=spec.tp,
            pp=spec.pp,
            cp=spec.cp,
            data=spec.cut.data,
            script=request.script,
            timeout_s=request.timeout_s,
        )
    except runs.RunFailed as failure:
        raise NotCompared(f"Megatron-LM itself ends with these flags on {ranks} rank(s): {failure.reason}") from None
    except subprocess.TimeoutExpired:
        raise NotCompared(
            f"Megatron-LM itself has not ended in {request.timeout_s:.0f} s; give fewer --train-iters, or --timeout-s"
        ) from None


# --- the command ---------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """Return the parser of what stands before `--`."""
    made = argparse.ArgumentParser(
        prog="python -m tests.megatron_lm.compare",
        usage="%(prog)s [options] -- FLAGS OF MEGATRON-LM",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--checkout", help="a checkout of Megatron-LM (else $MEGATRON_LM, else the tests' files)")
    made.add_argument("--script", default="pretrain_gpt.py", help="in the checkout, or elsewhere by its whole path")
    made.add_argument("--replicas", type=int, default=3, help="of the task (3)")
    ranks = "of Megatron-LM alone, a run for each (as many as the task has workers, and as one replica has)"
    made.add_argument("--ranks", type=int, nargs="+", default=[], metavar="N", help=ranks)
    made.add_argument("--kill-at", type=int, default=3, metavar="ITERATION", help="in whose backward a rank dies (3)")
    made.add_argument("--kill-rank", type=int, metavar="RANK", help="which dies (the second replica's first)")
    made.add_argument("--no-kill", action="store_true", help="no rank dies")
    made.add_argument("--no-join", action="store_true", help="no new replica joins behind the kill")
    made.add_argument("--plain", action="store_true", help="the flags as they are: none is added")
    tolerance = "what passes, of a metric's largest value (1e-6); twice stock's own difference passes in any case"
    made.add_argument("--tolerance", type=float, default=1e-6, help=tolerance)
    made.add_argument("--timeout-s", type=float, default=1800.0, help="of one run (1800)")
    made.add_argument("--keep", type=Path, metavar="DIR", help="where the logs stay (else nowhere)")
    made.add_argument("--json", action="store_true", help="the table as JSON")
    made.add_argument("--quiet", action="store_true", help="no progress on stderr")
    return made


def request_of(argv: Sequence[str]) -> tuple[Request, argparse.Namespace, list[str]]:
    """Return what the command line asks for, its own options, and flags that a CPU leaves out. Raises NotCompared,
    SystemExit."""
    own, flags = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, ())
    options = parser().parse_args(own)
    try:
        given, omitted = for_cpu(flags if options.plain else with_defaults(flags))
        line = CommandLine.parse([options.script, *given])
        size = degrees(line).workers
    except BadFlags as error:
        raise NotCompared(f"the flags cannot be read: {error}") from None
    given += [] if "--log-interval" in line.flags else ["--log-interval", "1"]
    rank = size if options.kill_rank is None else options.kill_rank
    request = Request(
        flags=given,
        script=options.script,
        replicas=options.replicas,
        ranks=options.ranks,
        kill_rank=None if options.no_kill else rank,
        kill_at=options.kill_at,
        joins=not options.no_join,
        tolerance=options.tolerance,
        timeout_s=options.timeout_s,
    )
    return request, options, omitted


def main(argv: Sequence[str]) -> int:
    """Compare, and print the table. Return the exit status."""
    try:
        request, options, omitted = request_of(argv)
        if options.checkout:
            os.environ["MEGATRON_LM"] = str(Path(options.checkout).resolve())
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        _require_script(request.script)
        task_of(request)
        with contextlib.ExitStack() as stack:
            directory = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compare-")))
            progress = Progress(options.quiet)
            if omitted:
                progress.say(f"left out, for a CPU has its own: {' '.join(omitted)}")
            comparison = compare(request, directory.resolve(), progress, stack.enter_context(ForkServer()))
    except NotCompared as reason:
        print(f"not compared: {reason}", file=sys.stderr)
        return 2
    except TimeoutError as late:
        print(f"different: unicrond has not ended where Megatron-LM has: {late}", file=sys.stderr)
        return 1
    except runs.RunFailed as failure:
        print(f"different: unicrond ends where Megatron-LM trains: {failure.reason}", file=sys.stderr)
        return 1
    print(comparison.json() if options.json else comparison.text())
    return int(comparison.is_different)


def _require_script(script: str) -> None:
    """Require checkout and script; let a checkout's own Megatron-core go before the installed one."""
    try:
        place = checkout()
    except (pytest.skip.Exception, pytest.fail.Exception) as error:
        raise NotCompared(f"{error}, or give --checkout") from None
    if not (place / script).is_file():
        raise NotCompared(f"--script: there is no {place / script}; give a script of the checkout, or its whole path")
    if (place / "megatron" / "core").is_dir():
        os.environ["PYTHONPATH"] = f"{place}:{os.environ.get('PYTHONPATH', '')}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
