"""What measurements of T are worth: each stands with its circumstances, and only as long as these do.

Rules
-----
* A measurement at x workers was made on a set of nodes, until the task last ran so. A node can only be slower than a
  healthy one, so a measurement *below* what all others and the model say may be a node's or a link's fault, whether or
  not that was named. It holds while its set stands. As soon as one of its nodes has gone, or another has come since,
  the measurement no longer counts, and the task is tried there again.
* A measurement that is not below the others says what healthy nodes achieve. It outlives its nodes.
* What is old fades. Every HALF_LIFE_US since the task last ran with x workers, the belief goes half the way to what the
  others say, and no longer counts once it is within a twentieth of it. Each time the same is measured again after
  that, it lasts twice as long, up to LIFE_MAX_US.
* Of a task on one number of workers alone nothing is taken back: there is nothing better to believe.
* What was measured on another type of GPU, or in another layout, stands apart (gpu_types.py, waf.py). When the task
  comes back there, its nodes are forgotten and it fades from then on.

Who pays: a task that truly gains nothing by a worker is tried with it once for each node that comes, or goes out of
such a set, and after one hour, two, four, up to a day; each try costs a move there and back. Without it, one slow node
costs the task a worker for good. No other task pays: see estimates.py.

Pure. When it is asked and what comes of it: rules/estimates.py; the fold: folding/plans.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from unicrond.core.state.state import Node, Task
from unicrond.core.state.task_parts import Circumstances, Pace
from unicrond.core.worth.waf import flops_of
from unicrond.events.vocabulary import ThroughputCorrected

#: Reports of a group before its time per iteration is believed.
REPORTS_MIN = 8
#: After which a measurement counts half, and the longest that this may become.
HALF_LIFE_US = 3600 * 1_000_000
LIFE_MAX_US = 24 * HALF_LIFE_US


def is_near(first: int, second: int) -> bool:
    """Return whether the first differs from the second by no more than a twentieth."""
    return 20 * abs(first - second) <= second


def member_nodes(task: Task) -> tuple[str, ...]:
    """Return the nodes that the newest group is on, sorted."""
    return tuple(sorted({member.node for member in task.membership.members})) if task.membership else ()


def pace_after(task: Task, event: ThroughputCorrected, now_us: int) -> Pace:
    """Return the task's pace after the correction."""
    pace, key = task.pace, str(event.workers)
    old = pace.circumstances.get(key)
    if event.reports:
        circumstances = _new_circumstances(old, event.flops, member_nodes(task), now_us)
    elif old is not None:
        circumstances = replace(old, has_faded=True, measured_us=now_us)
    else:
        circumstances = Circumstances(flops=pace.measurements.get(key, 0), nodes=(), measured_us=now_us, has_faded=True)
    flops_at = {number: flops for number, flops in pace.measurements.items() if number != key or event.flops}
    if event.flops:
        flops_at[key] = event.flops
    return replace(pace, measurements=flops_at, circumstances=pace.circumstances | {key: circumstances})


def _new_circumstances(old: Circumstances | None, flops: int, nodes: tuple[str, ...], now_us: int) -> Circumstances:
    is_same = old is not None and 10 * abs(flops - old.flops) <= old.flops
    trials = old.trials + old.has_faded if old is not None and is_same else 0
    return Circumstances(flops=flops, nodes=nodes, measured_us=now_us, trials=trials)


def pace_at_regroup(task: Task, now_us: int) -> Pace:
    """Return the pace of a task whose group is about to change: what it was measured to achieve held until now."""
    pace, nodes = task.pace, member_nodes(task)
    key = str(len(task.membership.members)) if task.membership else ""
    circumstances = pace.circumstances.get(key)
    if circumstances is None or len(pace.timings) < REPORTS_MIN or key not in pace.measurements:
        return pace
    circumstances = replace(circumstances, nodes=nodes, measured_us=now_us)
    return replace(pace, circumstances=pace.circumstances | {key: circumstances})


def put_in_force(pace: Pace, now_us: int) -> Pace:
    """Return the pace of a task that comes back to a layout or a type: what was measured there before is dated now."""
    bare = {number: flops for number, flops in pace.measurements.items() if number not in pace.circumstances}
    if not bare:
        return pace
    dates = {number: Circumstances(flops=flops, nodes=(), measured_us=now_us) for number, flops in bare.items()}
    return replace(pace, circumstances=pace.circumstances | dates)


def expectation(task: Task, workers: int) -> int:
    """Return T on so many workers by the model and all other measurements in the same layout; 0 where there is none."""
    flops_at = {number: flops for number, flops in task.pace.measurements.items() if int(number) != workers}
    return flops_of(replace(task, pace=replace(task.pace, measurements=flops_at)))(workers) if flops_at else 0


def doubt(task: Task, workers: int, nodes: Mapping[str, Node]) -> str:
    """Return why what was measured on so many workers says nothing of the nodes that are there now; "": it does.

    Only where it is below what the others say: what is not shows what healthy nodes achieve.
    """
    circumstances = task.pace.circumstances.get(str(workers))
    if circumstances is None:
        return ""
    leavers = [name for name in circumstances.nodes if not _is_usable(nodes.get(name))]
    if leavers:
        return f"measured with {_few(leavers)}, which is gone"
    newer = [n.name for n in nodes.values() if n.joined_us > circumstances.measured_us and _is_usable(n)]
    return f"measured before {_few(newer)} joined" if newer else ""


def half_life_us(circumstances: Circumstances) -> int:
    """Return after which time the measurement counts half."""
    return min(HALF_LIFE_US << min(circumstances.trials, 8), LIFE_MAX_US)


def _is_usable(node: Node | None) -> bool:
    return node is not None and node.schedulable and not node.cordon.active


def _few(names: Iterable[str]) -> str:
    first, *rest = sorted(names)
    return f"{first} and {len(rest)} more" if rest else first
