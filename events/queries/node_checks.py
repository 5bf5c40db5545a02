"""The checks that `unicronctl doctor` asks of agents: their nodes, the links between them, and their tasks' storage;
and findings: likely problems and their fixes, as doctor and `unicron-agent --check` report them.

A check is a request on the subjects of worker_queries.py; its field `check` distinguishes it from one for a log; the
answer is a LogsReply whose data is the check's own. An agent that is too old for it answers with an error.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from unicrond.events.queries.worker_queries import BadLogsMessage
from unicrond.events.vocabulary import Count, Name, StoreAddress, Text


class Finding(NamedTuple):
    """A likely problem. `about`: a node, or a part of one. `problem`: the problem. `fix`: what to do."""

    about: str
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.about}: {self.problem}; {self.fix}"


#: Two clocks may differ by this much.
CLOCK_MAX_S = 0.5


def clock_finding(about: str, off_s: float, round_trip_s: float, reference: str) -> list[Finding]:
    """Report a clock that differs too much from the clock of `reference`.

    `off_s`: how far it is ahead, measured by a request that took `round_trip_s`; the measurement is uncertain by that
    much.
    """
    if abs(off_s) - round_trip_s <= CLOCK_MAX_S:
        return []
    way = "ahead of" if off_s > 0 else "behind"
    return [Finding(about, f"its clock is {abs(off_s):.1f} s {way} {reference}", "run a time service there (chrony)")]


Seconds = Annotated[float, Meta(gt=0.0, le=600.0)]
#: Part of a file's name, and of a key in a store.
Token = Annotated[str, Meta(pattern=r"^[0-9a-f]{16,64}\Z")]
#: What sums: gloo, or NCCL on a GPU whose slot no worker has.
Library = Literal["gloo", "nccl"]


class Pair(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pair of nodes that sum something: `rank` 0 and 1, which meet at rank 0's store. A pair of a lower `turn` comes
    first where there can be only one at a time."""

    peer: Name
    rank: Annotated[int, Meta(ge=0, le=1)]
    store: StoreAddress
    turn: Annotated[int, Meta(ge=0, le=2)]


#: Of one node, at most.
_PEERS_MAX = 256
_PAIRS_MAX = 4
Port = Annotated[int, Meta(ge=1, le=65535)]


class Check(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="check"):
    """Base of all checks."""


class FactsCheck(Check, frozen=True, kw_only=True, tag="facts"):
    """Collect what the node's preflight finds, and what has to be alike on all nodes. Answer: NodeFacts."""


class Peer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node, and where it listens: what for -> (host, port)."""

    node: Name
    ports: dict[Text, tuple[Text, Port]]


class LinksCheck(Check, frozen=True, kw_only=True, tag="links"):
    """Connect to the peers, and sum with some of them. Answer: LinksReport."""

    token: Token
    peers: Annotated[tuple[Peer, ...], Meta(max_length=_PEERS_MAX)]
    pairs: Annotated[tuple[Pair, ...], Meta(max_length=_PAIRS_MAX)]
    library: Library
    limit_s: Seconds


class StorageCheck(Check, frozen=True, kw_only=True, tag="storage"):
    """Write, look for, or remove a mark in a directory. Answer: StorageReport."""

    directory: Text
    token: Token
    part: Literal["write", "look", "remove"]


AnyCheck: TypeAlias = FactsCheck | LinksCheck | StorageCheck


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The facts about a node. `mtu` 0: not known. `torch`, `driver`: their versions, "" where there are none. `now_us`:
    by the node's clock."""

    findings: tuple[Finding, ...]
    mtu: Count
    torch: Text
    driver: Text
    now_us: Count


class UnreachablePort(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A port of a peer that this node cannot connect to. `service`: the service that listens there. `reason`: the
    error."""

    peer: Name
    service: Text
    address: Text
    reason: Text


class PairSum(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The outcome of a sum with a peer. `trouble` "": it was right."""

    peer: Name
    trouble: Text
    duration_us: Count = 0


class LinksReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer to LinksCheck. `no_sums`: why none was tried, "" where they were."""

    unreachable_ports: tuple[UnreachablePort, ...]
    sums: tuple[PairSum, ...]
    no_sums: Text = ""


class StorageReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer to StorageCheck.

    `result`: the mark is there (`seen`), is not (`missing`), or could not be written: for want of rights (`refused`),
    or for another reason (`failed`). `directory`: where; the nearest that exists. `writable`: by this agent's user.
    `runs_as_others`: tasks run as users of their own here, so this agent's rights prove nothing.
    """

    result: Literal["seen", "missing", "refused", "failed"]
    directory: Text
    reason: Text = ""
    writable: bool = True
    runs_as_others: bool = False


T = TypeVar("T", NodeFacts, LinksReport, StorageReport)


class _Kind(msgspec.Struct):
    check: str = ""


def decode_check(body: bytes) -> AnyCheck | None:
    """Decode a check; return None for another request. Raises BadLogsMessage."""
    try:
        if not msgspec.msgpack.decode(body, type=_Kind).check:
            return None
    except msgspec.MsgspecError:
        return None  # worker_queries.py says what is wrong
    try:
        check: AnyCheck = msgspec.msgpack.decode(body, type=AnyCheck, strict=True)
        return check
    except (msgspec.MsgspecError, ValueError) as error:
        raise BadLogsMessage(" ".join(str(error).split())) from None


def encode(message: AnyCheck | NodeFacts | LinksReport | StorageReport) -> bytes:
    """Encode a check, or the LogsReply.data of its answer."""
    return msgspec.msgpack.encode(message)


def decode_report(data: bytes, kind: type[T]) -> T:
    """Decode the report in LogsReply.data. Raises BadLogsMessage."""
    try:
        return msgspec.msgpack.decode(data, type=kind, strict=True)
    except (msgspec.MsgspecError, ValueError) as error:
        raise BadLogsMessage(" ".join(str(error).split())) from None
