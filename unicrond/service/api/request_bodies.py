"""The bodies of the API's requests about nodes."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
from msgspec import Meta

from unicrond.events.vocabulary import Boot, Mode, Name, PublicKey, SomeWorkers, Text
from unicrond.events.vocabulary.field_types import Priority, Weight


class Enrolment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Enrols a node. `unused_h`: the login ends after so many hours without a join; 0: never. `previous_h`: so long the
    keys that the node has hold as well; 0: they end at once."""

    key: PublicKey
    unused_h: Annotated[float, Meta(ge=0.0, le=8784.0)] = 24.0
    previous_h: Annotated[float, Meta(ge=0.0, le=8784.0)] = 0.0


class PodEnrolment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Enrols the node of a pod; the token that comes with the request says which pod."""

    key: PublicKey


class Reason(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why something is done, for the log."""

    reason: Text = ""


class UpdateOrder(Reason, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Changes settings of a running task, named as in its file. None: as it is."""

    weight: Weight | None = None
    priority: Priority | None = None
    preemptible: bool | None = None
    min_workers: SomeWorkers | None = None
    max_workers: SomeWorkers | None = None


class ModeOrder(Reason, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sets the mode of the cluster, or of a task."""

    mode: Mode


class OfNode(Reason, frozen=True, forbid_unknown_fields=True):
    """Concerns one node; `boot`, `address`: only if it has this agent (0 and "": any)."""

    boot: Boot = 0
    address: Text = ""


class When(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A time in the future: `at_us` (since the epoch), or `in_s` from now by this clock."""

    at_us: Annotated[int, Meta(ge=0, lt=2**61)] = 0
    in_s: Annotated[float, Meta(ge=0.0, le=366 * 86400.0)] = 0.0

    def time_us(self) -> int:
        """Return the time in microseconds since the epoch."""
        return self.at_us or time.time_ns() // 1000 + int(self.in_s * 1e6)


class ForgetOrder(OfNode, frozen=True, forbid_unknown_fields=True):
    """Forgets a node. `leave`: a node that is up leaves for good first."""

    leave: bool = False


class CordonOrder(OfNode, frozen=True, forbid_unknown_fields=True):
    """Cordons a node. `drain`: it keeps no workers at all. `by`: it is empty by then."""

    drain: bool = False
    until_return: bool = False
    by: When | None = None


class SilenceOrder(Reason, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Silences an alarm for `for_s`."""

    for_s: Annotated[float, Meta(gt=0.0, le=366 * 86400.0)]

    @property
    def for_us(self) -> int:
        """Return how long in microseconds."""
        return int(self.for_s * 1e6)


class AssignOrder(Reason, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Gives an alarm to a person."""

    person: Name


class MaintenanceOrder(Reason, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Plans a maintenance window that begins at `begins` and lasts `for_s`."""

    nodes: tuple[Name, ...]
    begins: When
    for_s: Annotated[float, Meta(gt=0.0, le=366 * 86400.0)]
