"""Deliberate bugs, one at a time: does the fuzzer see them? `make mutants` prints the table.

Each mutant patches a running process (never a file), so it is applied in processes of its own. One that survives
shows that a rule or a fault is missing in the simulation, or that a second defence makes the first unnecessary.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from unicrond.replay.simulation.mutants.head_mutants import HEAD_MUTANTS
from unicrond.replay.simulation.mutants.judgement_mutants import JUDGEMENT_MUTANTS
from unicrond.replay.simulation.mutants.ledger_mutants import LEDGER_MUTANTS
from unicrond.replay.simulation.mutants.mutation import Mutant
from unicrond.replay.simulation.mutants.node_mutants import NODE_MUTANTS
from unicrond.replay.simulation.run import RunOutcome, cores, outcomes

SEEDS = 1000

#: All of them, by name.
MUTANTS: dict[str, Mutant] = HEAD_MUTANTS | NODE_MUTANTS | JUDGEMENT_MUTANTS | LEDGER_MUTANTS


def find_breach(name: str, seeds: Sequence[int], processes: int) -> tuple[RunOutcome | None, int]:
    """Return the first outcome in which a rule was broken, and how many seeds were played until then."""
    for count, outcome in enumerate(outcomes(seeds, processes, partial(_apply, name)), start=1):
        if outcome.rule:
            return outcome, count
    return None, len(seeds)


def _apply(name: str) -> None:
    MUTANTS[name].apply()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; exit code 1 if a mutant survives."""
    parser = argparse.ArgumentParser(prog="python -m unicrond.replay.simulation.mutants.table", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="MUTANT", help=f"default: all of {', '.join(MUTANTS)}")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--processes", type=int, default=cores())
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in MUTANTS]:
        parser.error(f"no mutant {unknown[0]!r}; known: {', '.join(MUTANTS)}")
    survivors = 0
    print(f"{'mutant':28} {'caught by':28} {'seeds':>5}  what it is")
    for name in options.names or MUTANTS:
        outcome, count = find_breach(name, range(options.seeds), options.processes)
        survivors += outcome is None
        print(
            f"{name:28} {outcome.rule if outcome else 'NOT CAUGHT':28} {count:5}  {MUTANTS[name].description}",
            flush=True,
        )
    print(f"{survivors} survived" if survivors else "all caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
