"""Logins: which role may publish and subscribe to which subjects on NATS, as data. Pure.

Rules
-----
* One login for each agent and one for each other role; a login has one nkey (`keys.py`), and its inbox is its own, so
  that no login receives the answers to another.
* A subject says who wrote on it: the observations and beats of a node stand under its name, decisions and commands
  under the coordinator's, requests under the API's. Each login may publish on its own subjects alone, so what stands on
  a subject was written by that login; the body must name the same producer (`subjects.py`), or it is quarantined.
* The server checks neither the reply subject of a request nor the subject to which a consumer delivers: it writes its
  answer there, and an empty answer is a valid call to delete a stream. What answers cannot reach is another account's:
  each kind of login has one of its own (`accounts.py`). Rights are the second wall, and part the logins within one.
* For the same reason nobody but coordinator and operator may make a consumer. Agents have theirs made, readers read by
  direct gets (`nats/direct_reads.py`). An agent has no direct get of what it writes.
* For the same reason no login has `allow_responses`: a client that may publish where it listens can send itself a
  message with any reply subject, and may then write there. Agents answer on a subject of their own
  (`worker_queries.py`).
* Only the operator may delete, purge or change the streams of the log. The coordinator makes them, empty or from an
  archive, where there are none. Its own cache is its own, and so is the heads' lease.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from unicrond.events.log.subjects import (
    BEAT_STREAM,
    EVENT_STREAM,
    OWN_BEATS_SUBJECT,
    PREFIX,
    TERM_SUBJECT,
    agent_consumer,
    joins_subject,
    standing_subjects,
)
from unicrond.events.vocabulary import NAME_PATTERN
from unicrond.events.wire.codec import RESERVED_NAMES

API = "$JS.API"
#: A server answers here with the rights of the login that asks.
USER_INFO = "$SYS.REQ.USER.INFO"
#: Where the coordinator keeps its snapshots (an object store); a cache.
CACHE_BUCKET = "UNICRON_SNAPSHOTS"
CACHE_STREAM = f"OBJ_{CACHE_BUCKET}"
#: Which head leads (lease.py).
HEADS_BUCKET = "UNICRON_HEADS"
_HEADS = f"KV_{HEADS_BUCKET}"
#: A user's public nkey, as `events/vocabulary` has it.
KEY_PATTERN = r"^U[A-Z2-7]{55}\Z"

#: What agents ask of JetStream. The coordinator hears it too, with who asks, to count it (service/trust/fuses.py).
AGENT_CALLS = (
    f"{API}.STREAM.INFO.{EVENT_STREAM}",
    *(f"{API}.CONSUMER.{call}.{EVENT_STREAM}.*" for call in ("INFO", "MSG.NEXT")),
    *(f"{API}.DIRECT.GET.{EVENT_STREAM}.{subject}" for subject in (TERM_SUBJECT, *standing_subjects("*"))),
)
#: What agents acknowledge.
AGENT_ACKS = f"$JS.ACK.{EVENT_STREAM}.*.>"


class Role(StrEnum):
    """The purpose of a login. `READER`: replay, and whoever looks. `SYSTEM`: the servers' own account."""

    AGENT = "agent"
    COORDINATOR = "coordinator"
    API = "api"
    READER = "reader"
    OPERATOR = "operator"
    SYSTEM = "system"


class BadLogin(ValueError):
    """The text is no login; the text says what is wrong with it."""


class Rights(NamedTuple):
    """The subjects, with wildcards, that a login may use; what is not there is refused."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


class User(NamedTuple):
    """A login and its public nkey."""

    login: str
    key: str


def agent_login(node: str) -> str:
    """Return the login of the node's agent. Raises BadLogin where this cannot be a node's name."""
    if not re.fullmatch(NAME_PATTERN, node) or node in RESERVED_NAMES:
        raise BadLogin(f"{node!r} is not a valid name of a node; use letters, digits, - and _, at most 63, no dots")
    return agent_consumer(node)


def role_of(login: str) -> tuple[Role, str]:
    """Return the role, and the node of an agent ("" for others). Raises BadLogin."""
    kind, dash, node = login.partition("-")
    if dash and kind == Role.AGENT:
        agent_login(node)
        return Role.AGENT, node
    if dash or login == Role.AGENT or login not in set(Role):
        raise BadLogin(f"{login!r} is not a login; use agent-NODE, {', '.join(r for r in Role if r != Role.AGENT)}")
    return Role(login), ""


def inbox_prefix(login: str) -> str:
    """Return the prefix of the subjects on which the login receives its answers."""
    return f"_INBOX_{login}"


def rights(login: str) -> Rights:
    """Return what the login may publish and subscribe to. Raises BadLogin."""
    role, node = role_of(login)
    inbox = f"{inbox_prefix(login)}.>"
    match role:
        case Role.AGENT:
            return _agent(node, inbox)
        case Role.COORDINATOR:
            return _coordinator(inbox)
        case Role.API:
            return Rights(
                (f"{PREFIX}.obs.api.*", f"{PREFIX}.logs.*"),
                (inbox, f"{PREFIX}.logged.*.*"),
            )
        case Role.READER:
            return Rights(_reader(), (inbox,))
        case Role.OPERATOR:
            return Rights((f"{API}.>", "$JS.ACK.>", "$JS.FC.>", "$JS.SNAPSHOT.>"), (">",))
        case Role.SYSTEM:
            return Rights((">",), (">",))


def _agent(node: str, inbox: str) -> Rights:
    """Return the rights of a node's agent."""
    consumer = f"{EVENT_STREAM}.{agent_consumer(node)}"
    return Rights(
        (
            f"{PREFIX}.obs.{node}.*",
            f"{PREFIX}.beat.{node}",
            f"{PREFIX}.logged.{node}.*",
            f"{API}.STREAM.INFO.{EVENT_STREAM}",
            f"{API}.CONSUMER.INFO.{consumer}",
            f"{API}.CONSUMER.MSG.NEXT.{consumer}",
            # Only what the coordinator writes.
            *(f"{API}.DIRECT.GET.{EVENT_STREAM}.{subject}" for subject in (TERM_SUBJECT, *standing_subjects(node))),
            f"$JS.ACK.{consumer}.>",
        ),
        (
            inbox,
            f"{PREFIX}.logs.{node}",
            f"{PREFIX}.beat.{node}",
            joins_subject(node),
            TERM_SUBJECT,
            *standing_subjects(node),
        ),
    )


def _coordinator(inbox: str) -> Rights:
    """Return the rights of the coordinator."""
    streams = (EVENT_STREAM, BEAT_STREAM)
    return Rights(
        (
            f"{PREFIX}.decision.*.*",
            f"{PREFIX}.command.*.*",
            TERM_SUBJECT,
            OWN_BEATS_SUBJECT,
            f"{API}.INFO",
            f"{API}.STREAM.NAMES",
            *(f"{API}.STREAM.{verb}.{name}" for verb in ("CREATE", "INFO", "MSG.GET") for name in streams),
            *(f"{API}.DIRECT.GET.{name}.>" for name in streams),
            f"{API}.STREAM.RESTORE.{EVENT_STREAM}",
            f"$JS.SNAPSHOT.RESTORE.{EVENT_STREAM}.*",
            *(f"{API}.CONSUMER.{verb}.{EVENT_STREAM}" for verb in ("LIST", "NAMES")),
            *(f"{API}.CONSUMER.{verb}.{name}.>" for verb in ("CREATE", "INFO", "DELETE") for name in streams),
            *(f"$JS.FC.{name}.>" for name in streams),
            f"$O.{CACHE_BUCKET}.>",
            *(f"{API}.STREAM.{verb}.{CACHE_STREAM}" for verb in ("CREATE", "PURGE")),
            *_reading_the_cache(),
            f"$KV.{HEADS_BUCKET}.>",
            *(f"{API}.STREAM.{verb}.{_HEADS}" for verb in ("CREATE", "INFO", "MSG.GET")),
            USER_INFO,
        ),
        # What agents write and ask for as the server hears it, to count it by node.
        (inbox, f"$KV.{HEADS_BUCKET}.leader", f"{PREFIX}.obs.*.*", f"{PREFIX}.beat.*", *AGENT_CALLS, AGENT_ACKS),
    )


def _reader() -> tuple[str, ...]:
    """Return the subjects on which a reader may publish."""
    streams = (EVENT_STREAM, BEAT_STREAM)
    return (
        *(f"{API}.STREAM.{verb}.{name}" for verb in ("INFO", "MSG.GET") for name in streams),
        *(f"{API}.DIRECT.GET.{name}" for name in streams),
        *_reading_the_cache(),
    )


def _reading_the_cache() -> tuple[str, ...]:
    """Return the subjects that reading the snapshots needs."""
    return (
        *(f"{API}.STREAM.{verb}.{CACHE_STREAM}" for verb in ("INFO", "MSG.GET")),
        f"{API}.DIRECT.GET.{CACHE_STREAM}",
    )
