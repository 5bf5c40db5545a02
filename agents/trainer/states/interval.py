"""How often to save: the interval that loses least time to saving and to doing lost work again (Young, Daly).

Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps", equation 37: with a cost of
`c` for each save and a mean time `m` between failures,

    sqrt(2 c m) * (1 + sqrt(c / 2m) / 3 + (c / 2m) / 9) - c      for c < 2m, else m

of work between two saves. Its first term is Young's estimate. Pure.
"""

from __future__ import annotations

from math import sqrt

#: Where the failure rate is not known: a failure a day.
MTBF_DEFAULT_S = 86400.0
#: However rare failures are said to be: no more work than this is ever put at stake.
INTERVAL_MAX_S = 3600.0


def optimal_s(cost_s: float, mtbf_s: float) -> float:
    """Return the seconds of work between two saves that lose least time."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return sqrt(2 * cost_s * mtbf_s) * (1 + sqrt(ratio) / 3 + ratio / 9) - cost_s


def iterations(cost_s: float, pace_s: float, mtbf_s: float) -> int:
    """Return the same in iterations of `pace_s`, at least 1. `mtbf_s` 0: not known."""
    interval_s = min(optimal_s(cost_s, mtbf_s or MTBF_DEFAULT_S), INTERVAL_MAX_S)
    return max(1, round(interval_s / pace_s)) if pace_s > 0 else 1
