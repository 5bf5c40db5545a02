"""Flips bits in real training and counts who is found: by audits of micro-batches and the digests of parameters.

    python -m tests.benchmarks.corruption                # 360 faults, some ten minutes on two quiet cores
    python -m tests.benchmarks.corruption --every 4      # one iteration in four is audited
    python -m tests.benchmarks.corruption --faults 40 --seed 2 --json

Three replicas train a small net. One bit of one replica's numbers is another: in a layer's output, a gradient, a weight
or the optimizer's state, at five places of a float32, once or from then on. Whoever more than half of the replicas
accuse, or who ends with an error, is given up, as a head would do it. Told is how many culprits were named, how many
innocents, how many iterations were committed with other bits than a sound run's before that, and whether the run ended
with those of a sound one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.integration.regroup_rig import ForkServer, Rig
from unicrond.events.vocabulary import LANES, CheckpointSpec, CorruptionSuspected, ErrorReported, TaskSpec

SURFACES = ("output", "gradient", "weight", "optimizer")
#: The lowest bit of the mantissa, one in its middle, its highest, the exponent's lowest, and its highest but one.
BITS = (0, 11, 22, 23, 29)
LIFETIMES = ("once", "sticky")
ITERATIONS, FIRST = 24, 9
WORKERS = ("t.1", "t.2", "t.3")
MICRO_BATCHES = 6
NO_FAULT = ("none", 0, "once", 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one fault. `named`: who was given up; `wrong_iterations`: committed ones whose bits are no sound
    run's; `delay`: iterations from the fault to the one in which the culprit was named, -1 for never."""

    surface: str
    bit: int
    lifetime: str
    culprit: str
    named: str
    delay: int
    wrong_iterations: int
    ends_sound: bool

    @property
    def is_harmless(self) -> bool:
        """Return whether no bit of what was committed is another, and nobody was named: it had no effect."""
        return not self.named and not self.wrong_iterations


def spec_of(fault: tuple[str, int, str, int, int, int], every: int) -> TaskSpec:
    """Return the task that is hit by the fault, one iteration in `every` audited (0: none)."""
    budget = len(WORKERS) / (MICRO_BATCHES * every) if every else 0.0
    return TaskSpec(
        name="t",
        entry=str(Path(__file__).with_name("corrupted_net.py")),
        args=tuple(map(str, fault)),
        max_workers=len(WORKERS),
        global_batch=2 * MICRO_BATCHES,
        micro_batch=2,
        accumulation="exact",  # numerics: fixed
        iterations=ITERATIONS,
        env={"OMP_NUM_THREADS": "1", LANES: str(len(WORKERS)), "UNICRON_AUDIT_BUDGET": f"{budget:.4f}"},
        checkpoint=CheckpointSpec(interval=0, memory_interval=0),
    )


def digests(directory: Path, worker: str) -> dict[int, str]:
    """Return the digests that the worker printed, by iteration."""
    text = (directory / f"{worker}.log").read_text()
    return {int(number): words for number, words in re.findall(r"^iteration (\d+): (\w+)$", text, re.MULTILINE)}


def convicted(rig: Rig, members: list[str]) -> tuple[str, int]:
    """Return who is to be given up, and in which iteration; "" for nobody."""
    votes = Counter(
        (message.suspect, message.iteration)
        for _, message in rig.said
        if isinstance(message, CorruptionSuspected) and message.sign in ("checksum", "micro_batch")
    )
    for (suspect, iteration), count in votes.items():
        if suspect in members and 2 * count > len(members):
            return suspect, iteration
    for worker, message in rig.said:
        if isinstance(message, ErrorReported) and worker in members and message.kind != "connection_broken":
            return worker, message.iteration
    return "", 0


def train(server: ForkServer, directory: Path, spec: TaskSpec) -> tuple[str, int, dict[int, str]]:
    """Train through; return who was given up, in which iteration, and the digests of one who was not."""
    members = list(WORKERS)
    with Rig(server, directory, spec) as rig:
        rig.start(*members)
        rig.until(lambda: rig.ready(*members))
        rig.tell(1, members)
        rig.until(lambda: rig.completed or convicted(rig, members)[0])
        named, at = convicted(rig, members)
        if named:
            members.remove(named)
            rig.signal(named, signal.SIGKILL)
            rig.tell(2, members, urgent=True)
        rig.until(lambda: rig.completed)
    return named, at, digests(directory, members[-1])


def faults(count: int, seed: int) -> Iterator[tuple[str, int, str, int, int, int]]:
    """Yield so many faults, evenly over what there is of them."""
    draw = random.Random(seed)
    kinds = itertools.cycle(itertools.product(SURFACES, BITS, LIFETIMES))
    for number, (surface, bit, lifetime) in enumerate(itertools.islice(kinds, count)):
        yield surface, bit, lifetime, 1 + number // 40 % len(WORKERS), FIRST + draw.randrange(8), draw.randrange(10**6)


def run(count: int, seed: int, every: int) -> list[Outcome]:
    """Inject them, one run of training each."""
    outcomes = []
    with ForkServer() as server, tempfile.TemporaryDirectory() as name:
        (Path(name) / "sound").mkdir()
        _, _, sound = train(server, Path(name) / "sound", spec_of(NO_FAULT, 0))
        for number, fault in enumerate(faults(count, seed)):
            directory = Path(name) / str(number)
            directory.mkdir()
            surface, bit, lifetime, culprit, first, _ = fault
            named, at, other = train(server, directory, spec_of(fault, every))
            outcomes.append(
                Outcome(
                    surface=surface,
                    bit=bit,
                    lifetime=lifetime,
                    culprit=f"t.{culprit}",
                    named=named,
                    delay=at - first if named else -1,
                    wrong_iterations=sum(other.get(iteration) != words for iteration, words in sound.items()),
                    ends_sound=other.get(ITERATIONS) == sound[ITERATIONS],
                )
            )
            print(f"\r{number + 1} of {count} faults", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return outcomes


def table(outcomes: list[Outcome]) -> str:
    """Return the table by surface and lifetime."""
    lines = [
        "| hit | lifetime | faults | named | innocents | no effect | latest, iterations | wrong ones | ends sound |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for surface, lifetime in itertools.product(SURFACES, LIFETIMES):
        group = [outcome for outcome in outcomes if (outcome.surface, outcome.lifetime) == (surface, lifetime)]
        cells = (
            surface,
            lifetime,
            len(group),
            sum(outcome.named == outcome.culprit for outcome in group),
            sum(outcome.named not in ("", outcome.culprit) for outcome in group),
            sum(outcome.is_harmless for outcome in group),
            max((outcome.delay for outcome in group), default=-1),
            sum(outcome.wrong_iterations for outcome in group),
            sum(outcome.ends_sound for outcome in group),
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    """Inject, and print what became of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=360, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn (default: %(default)s)")
    parser.add_argument(
        "--every", type=int, default=1, help="audit each n-th iteration, 0: none (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="one object for each fault, instead of the table")
    options = parser.parse_args()
    outcomes = run(options.faults, options.seed, options.every)
    print(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) if options.json else table(outcomes))


if __name__ == "__main__":
    main()
