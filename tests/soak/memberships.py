"""What the workers of all fleets were told, and follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Known(NamedTuple):
    """A membership. `at_s`: when the last worker of each node was told of it."""

    urgent: bool
    members: int
    hosts: int
    at_s: dict[str, float]


class Memberships:
    def __init__(self) -> None:
        self.known: dict[str, dict[int, Known]] = {}
        #: (time, whether all tasks were whole, sum of the newest generations)
        self.timeline: list[tuple[float, bool, int]] = []
        self._following: dict[int, dict[tuple[str, int], int]] = {}
        self._tasks: tuple[Sequence[str], int] = ((), 0)

    def told(self, task: str, generation: int, urgent: bool, members: int, hosts: int, at_s: dict[str, float]) -> None:
        known = self.known.setdefault(task, {}).setdefault(generation, Known(urgent, members, hosts, {}))
        known.at_s.update(at_s)

    def following(self, fleet: int, counts: list[list[Any]], now_s: float) -> None:
        """How many workers of a fleet follow each generation."""
        self._following[fleet] = {(task, generation): count for task, generation, count in counts}
        tasks, wanted = self._tasks
        if tasks:
            whole = self.all_whole(tasks, wanted)
            self.timeline.append((now_s, whole, sum(self.generations().values())))

    def generations(self) -> dict[str, int]:
        """The newest of each task."""
        return {task: max(known) for task, known in self.known.items()}

    def followers(self, task: str, generation: int) -> int:
        return sum(counts.get((task, generation), 0) for counts in self._following.values())

    def all_whole(self, tasks: Sequence[str], wanted: int) -> bool:
        """Each task has as many members as it may, and all of them follow its newest membership."""
        self._tasks = tasks, wanted
        newest = self.generations()
        return all(
            task in newest
            and self.known[task][newest[task]].members == wanted
            and self.followers(task, newest[task]) == wanted
            for task in tasks
        )

    def story(self, wanted: int) -> str:
        parts = [
            f"{task}: generation {newest}, {self.known[task][newest].members} members, "
            f"{self.followers(task, newest)} follow"
            for task, newest in sorted(self.generations().items())
            if self.followers(task, newest) != wanted
        ]
        return "; ".join(parts[:5]) or "no task has a membership"

    def reached(self, fault: dict[str, Any]) -> dict[str, Any]:
        """When the first membership without the lost worker or node was told to its first and its last node, and when
        all tasks were whole again; in seconds from the fault, None where that did not come. A spare node is missed by
        no task."""
        begin_s, before = fault["s"], fault["before"]
        found = [self._told_after(task, before.get(task, 0), begin_s) for task in fault["tasks"]]
        if not found:
            return {"first_s": None, "last_s": None, "complete": None, "whole_s": 0.0}
        enough = sum(before.values()) + 2 * len(found)
        whole_s = next(
            (s - begin_s for s, whole, generations in self.timeline if s > begin_s and whole and generations >= enough),
            None,
        )
        told = [one for one in found if one is not None]
        return {
            "first_s": min((one[0] for one in told), default=None),
            "last_s": max((one[1] for one in told), default=None),
            "complete": len(told) == len(found) and all(one[2] for one in told),
            "whole_s": whole_s,
        }

    def _told_after(self, task: str, generation: int, begin_s: float) -> tuple[float, float, bool] | None:
        """Of the first urgent membership after that: when its first and last node was told, and whether all were."""
        for later in sorted(g for g in self.known.get(task, {}) if g > generation):
            known = self.known[task][later]
            if known.urgent and min(known.at_s.values()) >= begin_s:
                times = [at_s - begin_s for at_s in known.at_s.values()]
                return min(times), max(times), len(times) >= known.hosts
        return None
