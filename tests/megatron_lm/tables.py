"""The table that says how far two trainings are apart, by what Megatron-LM has logged of each and by their final
parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from tests.megatron_lm import runs

#: What Megatron-LM logs of the machine, not of training.
_OF_THE_MACHINE = ("elapsed time", "throughput", "energy", "power")
ITERATION = re.compile(r" iteration +(\d+)/ *\d+ \|(.*)")
_EVALUATION = re.compile(r" validation(\S*) loss at ([^|]*?) \|(.*)")
#: The last unit that is printed may be another where the values differ by next to nothing.
_ROUNDING = Decimal("1.01")
PARAMETERS = "final parameters"
PARAMETERS_EQUAL = 1e-7


# --- what was logged -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Printed:
    """A number as it was printed, and the last unit that it was printed with."""

    value: float
    unit: float

    @staticmethod
    def parse(text: str) -> Printed | None:
        """Return the number; None where the text is none."""
        try:
            number = Decimal(text.strip())
        except InvalidOperation:
            return None
        exponent = number.as_tuple().exponent
        return Printed(float(number), 10.0**exponent if isinstance(exponent, int) else 0.0)


#: By metric, and by the place at which it was printed (an iteration, an evaluation).
Series = Mapping[str, Mapping[str, Printed]]


def series_of(logs: Sequence[str]) -> Series:
    """Return what Megatron-LM has logged, in whichever of these logs."""
    series: dict[str, dict[str, Printed]] = {}
    for log in logs:
        for match in ITERATION.finditer(log):
            _take(series, f"iteration {match[1]}", match[2], "")
        for match in _EVALUATION.finditer(log):
            _take(series, match[2], match[3], f"validation{match[1]}: ")
    return series


def _take(series: dict[str, dict[str, Printed]], place: str, line: str, prefix: str) -> None:
    for part in line.partition("[")[0].split("|")[:-1]:  # what another rank has printed into the line is no metric
        name, _, text = part.rpartition(":")
        printed = Printed.parse(text)
        if name and printed is not None and not name.strip().startswith(_OF_THE_MACHINE):
            series.setdefault(prefix + name.strip(), {}).setdefault(place, printed)


# --- the table -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A metric. `differences`: the largest, from each run of Megatron-LM; `place`: where the nearest run's is.
    `own`: Megatron-LM's from itself; None where it ran once. `equal`: differences up to it are the printing's.
    `tolerance`: what passes. `missing`: places that Megatron-LM has logged and the task has not."""

    metric: str
    count: int
    differences: tuple[float, ...]
    place: str
    own: float | None
    equal: float
    tolerance: float
    missing: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """Say it in words: `equal`, `within X` or `different`."""
        nearest = min(self.differences)
        if self.missing or not nearest <= max(self.equal, self.tolerance):
            return "different"
        return "equal" if nearest <= self.equal else f"within {max(self.tolerance, self.equal):.2g}"


def difference(one: float, other: float) -> float:
    """Return how far apart two numbers are; infinite where one of them is no number."""
    if one == other or (one != one and other != other):
        return 0.0
    return abs(one - other) if abs(one) < float("inf") and abs(other) < float("inf") else float("inf")


def _farthest(one: Mapping[str, Printed], other: Mapping[str, Printed]) -> tuple[float, str]:
    """Return the largest difference at places that both have, and the place."""
    places = [place for place in other if place in one]
    farthest = max(places, key=lambda place: difference(one[place].value, other[place].value), default="")
    return (difference(one[farthest].value, other[farthest].value), farthest) if farthest else (0.0, "")


def rows(ours: Series, alone: Sequence[Series], tolerance: float, excused: Sequence[str] = ()) -> list[Row]:
    """Return a row for each metric that one of them has. `alone`: of the runs of Megatron-LM. `tolerance`: what passes,
    of the largest value; twice Megatron-LM's own difference passes in any case. `excused`: places that may be
    missing."""
    table = []
    for metric in dict.fromkeys(metric for series in (*alone, ours) for metric in series):
        mine, theirs = ours.get(metric, {}), [series.get(metric, {}) for series in alone]
        farthest = [_farthest(mine, other) for other in theirs]
        nearest = min(farthest)
        numbers = [printed for printed in (*mine.values(), *theirs[0].values()) if abs(printed.value) < float("inf")]
        own = _farthest(theirs[0], theirs[1])[0] if len(theirs) > 1 else None
        unit = max((printed.unit for printed in numbers), default=0.0)
        # A metric that only one of them has is as much a difference as a place that is missing.
        missing = [place for place in theirs[0] if place not in mine and place not in excused]
        missing += [f"{place} (in Megatron-LM)" for place in mine if not any(place in other for other in theirs)]
        table.append(
            Row(
                metric,
                len(mine),
                tuple(apart for apart, _ in farthest),
                nearest[1] if nearest[0] else "",
                own,
                float(_ROUNDING) * unit,
                max(2 * (own or 0.0), tolerance * max((abs(printed.value) for printed in numbers), default=0.0)),
                tuple(missing),
            )
        )
    return table


def parameters_row(
    ours: Sequence[runs.Parameters], alone: Sequence[Sequence[runs.Parameters]], tolerance: float
) -> Row:
    """Return the row of the final parameters."""
    largest = max(float(tensor.abs().max()) for shard in alone[0] for tensor in shard.values() if tensor.numel())
    own = runs.furthest(alone[0], alone[1]) if len(alone) > 1 else None
    return Row(
        PARAMETERS,
        sum(len(shard) for shard in ours),
        tuple(runs.furthest(ours, parameters) for parameters in alone),
        "",
        own,
        PARAMETERS_EQUAL,
        max(2 * (own or 0.0), tolerance * largest),
    )


@dataclass(frozen=True)
class Comparison:
    """What came of it. `ranks`: of the runs of Megatron-LM. `kill`: which fault, in words."""

    flags: Sequence[str]
    kill: str
    ranks: Sequence[int]
    rows: Sequence[Row]
    notes: Sequence[str]

    @property
    def is_different(self) -> bool:
        return any(row.verdict == "different" for row in self.rows)

    @property
    def verdict(self) -> str:
        """Say in one word or two what all rows come to."""
        if self.is_different:
            return "different: " + ", ".join(row.metric for row in self.rows if row.verdict == "different")
        within = [row.metric for row in self.rows if row.verdict != "equal"]
        return f"equal, but within the tolerance: {', '.join(within)}" if within else "equal"

    def json(self) -> str:
        """Return it for programs."""
        return json.dumps(
            {
                "verdict": self.verdict,
                "exit_status": int(self.is_different),
                "flags": list(self.flags),
                "kill": self.kill,
                "ranks": list(self.ranks),
                "notes": list(self.notes),
                "rows": [
                    {
                        "metric": row.metric,
                        "count": row.count,
                        "differences": dict(zip(map(str, self.ranks), row.differences, strict=True)),
                        "place": row.place,
                        "own": row.own,
                        "tolerance": row.tolerance,
                        "missing": list(row.missing),
                        "verdict": row.verdict,
                    }
                    for row in self.rows
                ],
            },
            indent=2,
        )

    def text(self) -> str:
        """Return the table for people."""
        head = ["metric", "values", *(f"from {ranks} ranks" if ranks > 1 else "from 1 rank" for ranks in self.ranks)]
        head += ["stock from itself", "largest at", "verdict"]
        lines = [head]
        for row in self.rows:
            own = "" if row.own is None else f"{row.own:.2g}"
            distances = [f"{apart:.2g}" for apart in row.differences]
            lines.append([row.metric, str(row.count), *distances, own, row.place, row.verdict])
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        table = [
            "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        table.insert(1, "  ".join("-" * width for width in widths))
        table += [f"{row.metric}: not logged: {', '.join(row.missing[:8])}" for row in self.rows if row.missing]
        return "\n".join([self.kill, *self.notes, "", *table, "", f"verdict: {self.verdict}"])
