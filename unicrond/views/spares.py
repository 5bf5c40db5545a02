"""How many nodes to keep back as warm spares: a pure question to the planner, which changes nothing.

Rules
-----
* A spare stands in for nodes of its own type of GPU. Of the N nodes of a type k are kept back, the N - k largest train,
  beside all nodes of the other types. Each training node fails once in MTBF / slots and is away for `repair`, so the
  number of nodes away is Poisson distributed with mean (N - k) slots repair / MTBF.
* With d nodes away min(N - k, N - d) train: a spare takes the place of the first k. What they achieve is the exact plan
  for so many nodes, T as it is known today.
* The stall is the same either way, a regroup at the fault and a move when a node comes, spare or repaired: it is left
  out. So a spare pays only where it would achieve nothing by training itself, or little: where tasks need whole
  replicas, or have as many workers as they may.
* As many pay as bring the most; of equals the most, since a node that adds nothing may as well wait.
* A plan of several types takes many solves, so there are PLANS_MAX plans at most, the same for each type,
  and PLANS_MIN for a type at least: fewer rows are made, and the average is over the likeliest numbers of nodes away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import msgspec
from msgspec.structs import replace

from unicrond.core.deciding.plans import FLOPS_MAX
from unicrond.core.planning.pools import best_of_pools
from unicrond.core.planning.problem import Problem
from unicrond.core.planning.solution import Solution
from unicrond.core.planning.solver import solve
from unicrond.core.rules.plan_problems import healthy_problem_of
from unicrond.core.rules.survey import Survey
from unicrond.core.state.node_parts import Cordon
from unicrond.core.state.policy import Policy
from unicrond.core.state.state import ClusterState, Node, NodeStatus

_SECOND_US = 1_000_000
DAY_S = 86_400
#: As many numbers of spares are looked at; each asks for some exact plans.
KEPT_MAX = 16
#: Numbers of nodes away that together are as rare are left out.
RARE = 1e-6
#: Of several types together, as many plans at most; and for each at least.
PLANS_MAX, PLANS_MIN = 48, 12


class SparesRow(msgspec.Struct, frozen=True, kw_only=True):
    """What the cluster achieves while `spare_nodes` are kept back. `waf`: what the others achieve while none of them is
    away; `expected_waf`: on average over failures and repairs, weighted FLOP/s. `covered`: the share of time in which
    no more nodes are away than wait."""

    spare_nodes: int = msgspec.field(name="kept")
    waf: int
    expected_waf: int
    covered: float


class TypeSpares(msgspec.Struct, frozen=True, kw_only=True):
    """The answer for the nodes of one type of GPU ("": not reported). `rows`: one for each number of nodes kept back,
    from 0.

    `pay`: the number that pays best.
    `next_node_waf`: what one more node would add to that number's `expected_waf`, training or waiting as pays best.
    `time_share`: the share of time that the averages are over, the least of all rows.
    """

    gpu: str
    nodes: int
    node_mtbf_s: float
    away: float
    rows: tuple[SparesRow, ...]
    pay: int
    next_node_waf: int
    time_share: float = msgspec.field(name="counted")


class Spares(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: one entry for each type of GPU that nodes have."""

    repair_s: float
    types: tuple[TypeSpares, ...]


def spares(state: ClusterState, policy: Policy, repair_s: float, mtbf_s: float = 0) -> Spares:
    """Return what each number of spares brings, of the nodes that have not left. `mtbf_s`: of one worker; 0: as it is
    known.

    Takes the time of some tens of plans. Raise ValueError without nodes, and where most of them would be away.
    """
    survey = Survey(state, policy)
    present = [node for node in state.nodes.values() if node.status is not NodeStatus.LEFT]
    if not present:
        raise ValueError("there are no nodes yet")
    rates = repair_s, mtbf_s or survey.worker_mtbf_us / _SECOND_US
    if not survey.types:
        return Spares(repair_s=repair_s, types=(_SparesOfType(survey, present, (), rates).spares(survey.nodes.gpu),))
    plans = max(PLANS_MIN, PLANS_MAX // len(survey.types))
    once = cache(solve)  # the pools of the other types are the same in most of the plans
    types = []
    for gpu in survey.types:
        pool = [node for node in present if survey.gpus[node.name] == gpu]
        rest = [node for node in present if survey.gpus[node.name] != gpu]
        types.append(_SparesOfType(survey, pool, rest, rates, plans, once).spares(gpu))
    return Spares(repair_s=repair_s, types=tuple(types))


class _SparesOfType:
    """The question for the nodes `own`, beside `others`. `rates`: repair and MTBF of a worker, seconds."""

    def __init__(
        self,
        survey: Survey,
        nodes: Sequence[Node],
        rest: Sequence[Node],
        rates: tuple[float, float],
        plans: int = 0,
        solve_pool: Callable[[Problem], Solution] = solve,
    ) -> None:
        self.survey, self.like, self.solve_pool = survey, nodes[0], solve_pool
        self.rest = {node.name: _whole(node, node.name, node.slots) for node in rest}
        self.repair_s, self.worker_mtbf_s = rates
        #: A row asks for a plan without failures, and one for each number of nodes away; the next row mostly for the
        #: same. The likeliest numbers away are others where fewer nodes train: by half of those kept back, at most.
        self.kept_max = min(KEPT_MAX, plans // 4) if plans else KEPT_MAX
        self.away_max = plans // 2 - 2 if plans else len(nodes) + 2
        slots = sorted((node.slots for node in nodes), reverse=True)
        self.usual = max(slots, key=lambda count: (slots.count(count), count))
        self.total, self.one_more = len(slots), [*slots, self.usual]
        self.waf = cache(self._waf)

    def spares(self, gpu: str) -> TypeSpares:
        """Return the spares of this type. Raise ValueError where most nodes would be away."""
        away = sum(self.one_more[: self.total]) * self.repair_s / self.worker_mtbf_s
        if away > self.total / 2:
            fails, repair = self.worker_mtbf_s / self.usual / 3600, self.repair_s / 3600
            description = f"a node would fail once in {fails:.4g} h and be away for {repair:.4g} h"
            raise ValueError(
                f"mtbf_s: {description}, so most nodes would be away; give a longer mtbf_s or a shorter repair_s"
            )
        table = [self._row(self.total, spare_count) for spare_count in range(min(self.total, self.kept_max + 1))]
        best = max((row for row, _ in table), key=lambda row: (row.expected_waf, row.spare_nodes))
        more = [
            self._row(self.total + 1, spare_count)[0] for spare_count in range(min(self.total + 1, self.kept_max + 1))
        ]
        return TypeSpares(
            gpu=gpu,
            nodes=self.total,
            node_mtbf_s=self.worker_mtbf_s / self.usual,
            away=away,
            rows=tuple(row for row, _ in table),
            pay=best.spare_nodes,
            next_node_waf=max(row.expected_waf for row in more) - best.expected_waf,
            time_share=min(coverage for _, coverage in table),
        )

    def _row(self, total: int, spare_count: int) -> tuple[SparesRow, float]:
        """Return the row, and the share of time that its average is over."""
        training = total - spare_count
        away = poisson(sum(self.one_more[:training]) * self.repair_s / self.worker_mtbf_s, total)
        likely = sorted(range(total + 1), key=lambda count: (-away[count], count))[: self.away_max]
        coverage = math.fsum(away[count] for count in likely)
        outcomes = ((away[count] / coverage, min(training, total - count)) for count in sorted(likely) if away[count])
        row = SparesRow(
            spare_nodes=spare_count,
            waf=self.waf(training),
            expected_waf=round(math.fsum(share * self.waf(count) for share, count in outcomes)),
            covered=min(1.0, math.fsum(away[: spare_count + 1])),
        )
        return row, min(1.0, round(coverage, 6))

    def _waf(self, count: int) -> int:
        """Return what the exact plan achieves with so many of these nodes."""
        sizes = self.one_more[:count] or [0]  # a node without slots: the type is still there
        pool = {f" {n}": _whole(self.like, f" {n}", size) for n, size in enumerate(sizes)}  # no node has such a name
        nodes = self.rest | pool
        survey = Survey(replace(self.survey.state, nodes=nodes), self.survey.policy, self.survey)  # the same curves
        problem = healthy_problem_of(survey)
        solution = best_of_pools(problem, self.solve_pool) if problem.pools else solve(problem)
        return min(solution.waf, FLOPS_MAX)


def poisson(mean: float, most: int) -> list[float]:
    """Return P(0), P(1), ... of a Poisson distribution, up to `most`, which stands for all above; what is rarer than
    RARE is left out."""
    shares = [_share(mean, count) for count in range(most)]
    shares.append(1.0 - math.fsum(shares))
    likely = [share if share > RARE else 0.0 for share in shares]
    return [share / math.fsum(likely) for share in likely]


def _share(mean: float, count: int) -> float:
    if not mean:
        return 1.0 if count == 0 else 0.0
    return math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))


def _whole(like: Node, name: str, slots: int) -> Node:
    return replace(like, name=name, slots=slots, slots_max=slots, status=NodeStatus.UP, cordon=Cordon())
