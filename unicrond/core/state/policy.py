"""What the configuration says of decisions: the numbers that they depend on, handed to the pure core as data, and how
isolated nodes return to service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from unicrond.core.state.holds import Brakes
from unicrond.events.vocabulary.field_types import Workers
from unicrond.events.vocabulary.holds import Mode

Seconds = Annotated[float, Meta(gt=0.0, le=1e10)]
SecondsOrNone = Annotated[float, Meta(ge=0.0, le=1e7)]
Argument = Annotated[str, Meta(min_length=1, max_length=1024)]
Argv = Annotated[tuple[Argument, ...], Meta(max_length=64)]
Limit = Annotated[float, Meta(ge=1.0, le=86_400.0)]
#: What the state remembers of an hour.
HourLimit = Annotated[int, Meta(ge=0, le=256)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
#: The owner of tokens, or "*": each owner who has no quota of his own.
OwnerName: TypeAlias = Annotated[str, Meta(pattern=r"^(\*|[A-Za-z0-9][A-Za-z0-9_-]{0,62})\Z")]
#: A third of the largest event: beside its last seats a membership has room for its peers.
PART_BYTES = 256 * 1024


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How patient and how strict the coordinator is. All times in seconds.

    `symptom_window_s`: how long a broken connection waits for the death that explains it before the
    collective is tried again in place (SEV3).
    `worker_start_s`: from StartWorker to WorkerReady, where the task does not say (start_timeout_s).
    `regroup_s`: from a membership to its last member in the group; never less than four iterations of the task. Where
    no member stays, ten times as long: leavers may have to write the whole state to storage first.
    `exit_s`: how long a worker that has reported an error (SEV2, SEV1) may take to end by itself.
    `reattempts_max`: reattempts in place, none of them calm, before one end of what broke is restarted (SEV2).
    `isolation_s`: how long an isolated node gets no workers at least; doubles with each isolation, and with each health
    check that it fails (isolation.py).
    `strikes_max`: blows to a task on one node without a step between them (or, where connections break: without a
    calm) before the node is isolated (SEV1).
    `stuck_max`: blows to a task without a new iteration before the task is failed.
    `flaps_max`: returns of a lost node within `flap_window_s` before it is isolated.
    `worker_mtbf_s`: mean time between failures of one worker; D_running(n) = worker_mtbf_s / n. Counts as one
    failure seen; those in the log correct it (estimates.py).
    `transition_s`: D_transition, the expected length of a transition, until a task has had its first.
    `churn_s`: what moving a task of which nothing is broken costs on top, as time of its work; 0 = nothing.
    `forget_s`: how long after a node has left in order it is forgotten; 0: never (node_removal.py).
    `quotas`: owner -> workers whose floors go before those of tasks over quota (quotas.py).
    `starvation_s`: how long a task may wait without workers before its `min_workers` go first (starvation.py); 0 =
    without end. `silence_s`: how long the silence of all nodes is held to be the head's own trouble before they are
    lost (deafness.py). `outage_hold_s`: how long nodes that were lost together are awaited before others take their
    place; 0: not at all (outages.py). `isolations_per_hour`, `isolated_share` (of the nodes, at once),
    `evictions_per_hour` (of a task): how much is taken out without a person; `mode`: "observe" takes out and moves
    nothing (nodes/brakes.py).
    `part_bytes`: a membership whose seats take more is split into parts (events/vocabulary/placements.py).
    """

    symptom_window_s: Seconds = 0.3
    worker_start_s: Seconds = 120.0
    regroup_s: Seconds = 60.0
    exit_s: Seconds = 2.0
    reattempts_max: Annotated[int, Meta(ge=1)] = 1
    isolation_s: Seconds = 60.0
    strikes_max: Annotated[int, Meta(ge=1)] = 2
    stuck_max: Annotated[int, Meta(ge=1)] = 8
    flaps_max: Annotated[int, Meta(ge=1, le=16)] = 3
    flap_window_s: Seconds = 600.0
    worker_mtbf_s: Seconds = 7.0 * 86400
    transition_s: Seconds = 5.0
    churn_s: SecondsOrNone = 0.0
    forget_s: SecondsOrNone = 7.0 * 86400
    starvation_s: SecondsOrNone = 0.0
    silence_s: Seconds = 600.0
    outage_hold_s: SecondsOrNone = 120.0
    quotas: Mapping[OwnerName, Workers] = {}
    isolations_per_hour: HourLimit = Brakes().isolations_per_hour
    isolated_share: Share = Brakes().isolated_share
    evictions_per_hour: HourLimit = Brakes().evictions_per_hour
    mode: Mode = "heal"
    part_bytes: Annotated[int, Meta(ge=1, le=PART_BYTES)] = PART_BYTES


class Readmission(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a node that was isolated for its hardware returns. Times in seconds.

    `check`: a command that agents run; empty: their own self-test. It passes with exit code 0, within `timeout_s`.
    `repair`: a command that the head runs for a node that needs a reboot or another part; empty: a person does it.
    """

    check: Argv = ()
    timeout_s: Limit = 60.0
    repair: Argv = ()
    repair_timeout_s: Limit = 900.0


class Settings(NamedTuple):
    """All that a coordinator's decisions depend on besides the log: what CoordinatorStarted carries.

    `check_timeout_s`, `repair_timeout_s`: how long a health check of an isolated node and the operator's repair command
    may take; 0: there is none.
    """

    policy: Policy
    heartbeat_s: float
    check_timeout_s: float = 0.0
    repair_timeout_s: float = 0.0

    def numbers(self) -> dict[str, float]:
        """Return field -> number by name, for the log."""
        fields = {**msgspec.structs.asdict(self.policy), "heartbeat_s": self.heartbeat_s}
        fields |= {_QUOTA + owner: workers for owner, workers in fields.pop("quotas").items()}
        fields[OBSERVES] = fields.pop("mode") == "observe"
        fields |= {name: getattr(self, name) for name in _LIMITS if getattr(self, name)}
        for name, usual in _USUAL.items():
            if fields[name] == usual:
                del fields[name]  # readers of older versions know of no such number
        return {name: float(value) for name, value in sorted(fields.items())}


#: Numbers that came later, left out where nobody has set another.
_USUAL = {
    "part_bytes": PART_BYTES,
    "forget_s": Policy().forget_s,
    "starvation_s": 0.0,
    "silence_s": 600.0,
    "outage_hold_s": 120.0,
    **msgspec.structs.asdict(Brakes()),
    "observes": False,
}
#: 1 where the mode is to be "observe".
OBSERVES = "observes"
#: Before the owner's name, where a quota stands among the numbers.
_QUOTA = "quotas."
_LIMITS = ("check_timeout_s", "repair_timeout_s")


def settings_of(numbers: Mapping[str, float]) -> Settings:
    """Read `Settings.numbers` back; what is missing gets its default. Raise ValueError for a setting unknown to this
    version."""
    fields: dict[str, Any] = {name: int(value) if value.is_integer() else value for name, value in numbers.items()}
    heartbeat_s = float(fields.pop("heartbeat_s", 1.0))
    limits = [float(fields.pop(name, 0.0)) for name in _LIMITS]
    fields = {name: number for name, number in fields.items() if not name.startswith(_QUOTA)}
    fields["quotas"] = quotas_among(numbers)
    fields["mode"] = "observe" if fields.pop(OBSERVES, 0) else "heal"
    return Settings(msgspec.convert(fields, Policy, strict=False), heartbeat_s, *limits)


def brakes_among(numbers: Mapping[str, float]) -> Brakes:
    """Return the brakes of `Settings.numbers`; what is missing, or makes no sense, gets its default."""
    limits = {name: numbers[name] for name in Brakes.__struct_fields__ if name in numbers}
    try:
        policy = msgspec.convert({name: int(n) if n.is_integer() else n for name, n in limits.items()}, Policy)
    except (msgspec.ValidationError, OverflowError):
        return Brakes()
    return Brakes(**{name: getattr(policy, name) for name in Brakes.__struct_fields__})


def quotas_among(numbers: Mapping[str, float]) -> dict[str, int]:
    """Return the quotas of `Settings.numbers`: owner -> workers."""
    return {name.removeprefix(_QUOTA): int(number) for name, number in numbers.items() if name.startswith(_QUOTA)}
