"""Decisions that are not carried out: what the coordinator would do, what holds it, and the mode in which it only says
what it would do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal, TypeAlias

from unicrond.events.vocabulary.base import Decision, Request
from unicrond.events.vocabulary.field_types import NameOrNone, Text, WorkerOrNone

#: What is not carried out.
HeldAction: TypeAlias = Literal["isolation", "eviction", "withdrawal", "failure", "plan"]
#: What holds it: a limit of the policy, or the mode.
HoldLimit: TypeAlias = Literal["isolations_per_hour", "isolated_share", "evictions_per_hour", "observe"]
#: Whether the coordinator does what it decides, or restarts what has died and only says the rest.
Mode: TypeAlias = Literal["heal", "observe"]


class ModeRequested(Request, frozen=True, kw_only=True):
    """The cluster is to be in this mode, or one task of it."""

    mode: Mode
    task: NameOrNone = ""
    reason: Text

    def wish(self) -> str:
        """Say what the person asks for."""
        return f"{f'task {self.task}' if self.task else 'the cluster'} in mode {self.mode}: {self.reason}"

    def tasks_named(self) -> Iterator[str]:
        """Yield the task, if there is one."""
        yield from filter(None, (self.task,))


class HoldDecision(Decision, frozen=True, kw_only=True):
    """A decision about a hold. `node`, `task`, `worker`: whom the held action concerns, as far as it names them."""

    is_noteworthy: ClassVar[bool] = True

    action: HeldAction
    node: NameOrNone = ""
    task: NameOrNone = ""
    worker: WorkerOrNone = ""
    reason: Text

    @property
    def key(self) -> str:
        """Return what names the hold."""
        return hold_key(self.action, node=self.node, task=self.task, worker=self.worker)

    def nodes_named(self) -> Iterator[str]:
        """Yield the node, if there is one."""
        yield from filter(None, (self.node,))

    def tasks_named(self) -> Iterator[str]:
        """Yield the task, if there is one."""
        yield from filter(None, (self.task,))


class DecisionHeld(HoldDecision, frozen=True, kw_only=True):
    """Say once that the coordinator does not do what `reason` asks for: `limit` holds it, as `detail` says."""

    limit: HoldLimit
    detail: Text

    def sentence(self) -> str:
        """Say it in one sentence."""
        action = held_action(self.action, node=self.node, task=self.task, worker=self.worker)
        return f"{action}: {self.detail}; the reason: {self.reason}"


class HoldLifted(HoldDecision, frozen=True, kw_only=True):
    """The coordinator wants the action no longer."""

    def sentence(self) -> str:
        """Say it in one sentence."""
        action = held_action(self.action, node=self.node, task=self.task, worker=self.worker)
        return f"no longer held: {action} ({self.reason})"


def hold_key(action: str, *, node: str = "", task: str = "", worker: str = "") -> str:
    """Return what names a hold: its action, and the worker, node or task."""
    return f"{action}/{worker or '@'.join(filter(None, (task, node)))}"


def held_action(action: str, *, node: str = "", task: str = "", worker: str = "") -> str:
    """Say, for people, what is not done."""
    return {
        "isolation": f"node {node} is not isolated",
        "eviction": f"worker {worker} on {node} is not evicted",
        "withdrawal": f"{task} does not go on without its workers on {node}",
        "failure": f"task {task} is not failed",
        "plan": "no worker is moved",
    }[action]
