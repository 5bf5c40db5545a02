"""How many nodes to keep back as warm spares: a pure question to the planner, which changes nothing.

Rules
-----
* Of N nodes k are kept back, the N - k largest train. Each training node fails once in MTBF / slots and is away for
  `repair`, so the number of nodes away is Poisson distributed with mean (N - k) slots repair / MTBF.
* With d nodes away min(N - k, N - d) train: a spare takes the place of the first k. What they achieve is the exact plan
  for so many nodes, T as it is known today.
* The stall is the same either way, a regroup at the fault and a move when a node comes, spare or repaired: it is left
  out. So a spare pays only where it would achieve nothing by training itself, or little: where tasks need whole
  replicas, or have as many workers as they may.
* As many pay as bring the most; of equals the most, since a node that adds nothing may as well wait.
"""

from __future__ import annotations

import math
from functools import cache

import msgspec
from msgspec.structs import replace

from unicrond.core.deciding.plans import FLOPS_MAX
from unicrond.core.plan_problems import healthy_problem_of
from unicrond.core.planning.solver import solve
from unicrond.core.policy import Policy
from unicrond.core.state import ClusterState, Node, NodeStatus
from unicrond.core.survey import Survey

_SECOND_US = 1_000_000
DAY_S = 86_400
#: As many numbers of spares are looked at; each asks for some exact plans.
KEPT_MAX = 16
#: Numbers of nodes away that together are as rare are left out.
RARE = 1e-6


class KeptBack(msgspec.Struct, frozen=True, kw_only=True):
    """`kept` nodes wait. `waf`: what the others achieve while none of them is away; `expected_waf`: on average over
    failures and repairs, weighted FLOP/s. `covered`: the share of time in which no more nodes are away than wait.
    """

    kept: int
    waf: int
    expected_waf: int
    covered: float


class Spares(msgspec.Struct, frozen=True, kw_only=True):
    """`rows`: one for each number of nodes kept back, from 0. `pay`: the number that pays best.

    `next_node_waf`: what one more node would add to that number's `expected_waf`, training or waiting as pays best.
    """

    nodes: int
    node_mtbf_s: float
    repair_s: float
    away: float
    rows: tuple[KeptBack, ...]
    pay: int
    next_node_waf: int


def spares(state: ClusterState, policy: Policy, repair_s: float, mtbf_s: float = 0) -> Spares:
    """What each number of spares brings, of the nodes that have not left. `mtbf_s`: of one worker; 0: as it is known.

    Takes the time of some tens of plans. Raises ValueError without nodes, and where most of them would be away.
    """
    survey = Survey(state, policy)
    if survey.types:
        raise ValueError(
            f"the nodes have GPUs of several types ({', '.join(survey.types)}); spares are told for one type"
        )
    known = [node for node in state.nodes.values() if node.status is not NodeStatus.LEFT]
    if not known:
        raise ValueError("there are no nodes yet")
    worker_mtbf_s = mtbf_s or survey.worker_mtbf_us / _SECOND_US
    slots = sorted((node.slots for node in known), reverse=True)
    usual = max(slots, key=lambda count: (slots.count(count), count))
    one_more = [*slots, usual]
    away = sum(slots) * repair_s / worker_mtbf_s
    if away > len(slots) / 2:
        rates = (
            f"a node would fail once in {worker_mtbf_s / usual / 3600:.4g} h and be away for {repair_s / 3600:.4g} h"
        )
        raise ValueError(f"mtbf_s: {rates}, so most nodes would be away; give a longer mtbf_s or a shorter repair_s")

    @cache
    def waf(count: int) -> int:
        nodes = {f"{n}": _whole(known[0], f"{n}", size) for n, size in enumerate(one_more[:count])}
        changed = Survey(replace(state, nodes=nodes), policy, survey)  # the curves are the same
        return min(solve(healthy_problem_of(changed)).waf, FLOPS_MAX) if count else 0

    def table(total: int) -> list[KeptBack]:
        return [row(total, kept) for kept in range(min(total, KEPT_MAX + 1))]

    def row(total: int, kept: int) -> KeptBack:
        training = total - kept
        away = poisson(sum(one_more[:training]) * repair_s / worker_mtbf_s, total)
        expected = math.fsum(share * waf(min(training, total - count)) for count, share in enumerate(away) if share)
        covered = min(1.0, math.fsum(away[: kept + 1]))
        return KeptBack(kept=kept, waf=waf(training), expected_waf=round(expected), covered=covered)

    rows = table(len(slots))
    best = max(rows, key=lambda row: (row.expected_waf, row.kept))
    return Spares(
        nodes=len(slots),
        node_mtbf_s=worker_mtbf_s / usual,
        repair_s=repair_s,
        away=away,
        rows=tuple(rows),
        pay=best.kept,
        next_node_waf=max(row.expected_waf for row in table(len(slots) + 1)) - best.expected_waf,
    )


def poisson(mean: float, most: int) -> list[float]:
    """P(0), P(1), ... of a Poisson distribution, up to `most`, which stands for all above; what is rarer than RARE is
    left out."""
    shares = [_share(mean, count) for count in range(most)]
    shares.append(1.0 - math.fsum(shares))
    kept = [share if share > RARE else 0.0 for share in shares]
    return [share / math.fsum(kept) for share in kept]


def _share(mean: float, count: int) -> float:
    if not mean:
        return 1.0 if count == 0 else 0.0
    return math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))


def _whole(like: Node, name: str, slots: int) -> Node:
    return replace(like, name=name, slots=slots, slots_max=slots, status=NodeStatus.UP, cordoned=False)
