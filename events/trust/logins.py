"""Logins: which role may publish and subscribe to which subjects on NATS, as data. Pure.

Rules
-----
* One login for each agent and one for each other role; a login has one nkey (`keys.py`), and its inbox is its own, so
  that no login receives the answers to another.
* A subject says who wrote on it: the observations and beats of a node stand under its name, decisions and commands
  under the coordinator's, requests under the API's. Each login may publish on its own subjects alone, so what stands on
  a subject was written by that login; the body must name the same producer (`subjects.py`), or it is quarantined.
* The server checks neither the reply subject of a request nor the subject to which a consumer delivers: it writes its
  answer there. So no login may have stored bytes of its own choice sent back as they are: an agent has no direct get
  of what it writes, and cannot make a consumer. What the server itself writes is JSON, which is no event: quarantined.
* For the same reason no login has `allow_responses`: a client that may publish where it listens can send itself a
  message with any reply subject, and may then write there. Agents answer on a subject of their own
  (`worker_queries.py`).
* Only the operator may delete, purge or change the streams of the log. The coordinator's own cache is its own, and so
  is the heads' lease.
* A reader's consumers have names from a fixed list: else it could change those of the agents.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum
from operator import itemgetter
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
#: How many consumers one reader may have at a time.
READER_CONSUMERS = 16
#: Where the coordinator keeps its snapshots (an object store); a cache.
CACHE_BUCKET = "UNICRON_SNAPSHOTS"
_CACHE = f"OBJ_{CACHE_BUCKET}"
#: Which head leads (lease.py).
HEADS_BUCKET = "UNICRON_HEADS"
_HEADS = f"KV_{HEADS_BUCKET}"
#: A user's public nkey, as `events/vocabulary` has it.
KEY_PATTERN = r"^U[A-Z2-7]{55}\Z"


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


def consumer_names(login: str) -> tuple[str, ...]:
    """Return the names that the login's readers may give their consumers; empty: any."""
    if login != Role.READER:
        return ()
    return tuple(f"{login}-{number}" for number in range(READER_CONSUMERS))


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
            return Rights(_reader(login), (inbox,))
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
            *(f"{API}.CONSUMER.{verb}.{EVENT_STREAM}" for verb in ("LIST", "NAMES")),
            *(f"{API}.CONSUMER.{verb}.{name}.>" for verb in ("CREATE", "INFO", "DELETE") for name in streams),
            *(f"$JS.FC.{name}.>" for name in streams),
            f"$O.{CACHE_BUCKET}.>",
            *(f"{API}.STREAM.{verb}.{_CACHE}" for verb in ("CREATE", "PURGE")),
            *_reading_the_cache(),
            f"$KV.{HEADS_BUCKET}.>",
            *(f"{API}.STREAM.{verb}.{_HEADS}" for verb in ("CREATE", "INFO", "MSG.GET")),
            USER_INFO,
        ),
        (inbox, f"$KV.{HEADS_BUCKET}.leader", OWN_BEATS_SUBJECT),
    )


def _reader(login: str) -> tuple[str, ...]:
    """Return the subjects on which a reader may publish."""
    streams = (EVENT_STREAM, BEAT_STREAM)
    return (
        *(f"{API}.STREAM.{verb}.{name}" for verb in ("INFO", "MSG.GET") for name in streams),
        *(
            f"{API}.CONSUMER.{verb}.{name}.{consumer}"
            for name in streams
            for verb in ("CREATE", "DELETE")
            for consumer in consumer_names(login)
        ),
        *(f"$JS.FC.{name}.{consumer}.>" for name in streams for consumer in consumer_names(login)),
        *_reading_the_cache(),
    )


def _reading_the_cache() -> tuple[str, ...]:
    """Return the subjects that reading the snapshots needs."""
    return (
        *(f"{API}.STREAM.{verb}.{_CACHE}" for verb in ("INFO", "MSG.GET")),
        f"{API}.DIRECT.GET.{_CACHE}.>",
        *(f"{API}.CONSUMER.{verb}.{_CACHE}" for verb in ("CREATE", "DELETE")),
        *(f"{API}.CONSUMER.{verb}.{_CACHE}.>" for verb in ("CREATE", "INFO", "DELETE")),
        f"$JS.ACK.{_CACHE}.>",
        f"$JS.FC.{_CACHE}.>",
    )


# --- the server's configuration ------------------------------------------------------------------


def authorization(users: Iterable[User], shared: tuple[str, str] | None = None) -> list[str]:
    """Return lines of a nats-server's configuration that admit these users, and nobody else. Raises BadLogin.

    `shared`: user and password of a login with every right, while a cluster is moved to keys.
    """
    lines = [f"    {json.dumps({'user': shared[0], 'password': shared[1]})}"] if shared else []
    lines += [f"    {_line(user)}" for user in _checked(users) if user.login != Role.SYSTEM]
    if not lines:
        raise BadLogin("a server without users would let everybody in; give one")
    return ["authorization {", "  users: [", *lines, "  ]", "}"]


def whole_configuration(users: Sequence[User]) -> list[str]:
    """Return `authorization`, and the servers' own account where `users` has one for it.

    A running server applies a change of the users (SIGHUP); the account it needs from the start. Raises BadLogin.
    """
    system = [{"nkey": user.key} for user in _checked(users) if user.login == Role.SYSTEM]
    account = [f"accounts {{ SYS {{ users: {json.dumps(system)} }} }}", "system_account: SYS"] if system else []
    return [*authorization(users), *account]


def nsc_commands(logins: Iterable[str]) -> list[str]:
    """Return, for servers in operator mode, a command of NATS's tool nsc for each login, which makes its user.

    The system account has its own users there. Raises BadLogin.
    """
    rights_by_login = {login: rights(login) for login in logins if role_of(login)[0] is not Role.SYSTEM}
    return [
        shlex.join([*f"nsc add user --name {login} --allow-pub".split(), ",".join(user_rights.publish)])
        + f" --allow-sub {shlex.quote(','.join(user_rights.subscribe))}"
        for login, user_rights in rights_by_login.items()
    ]


def _line(user: User) -> str:
    """Format a user with its rights."""
    user_rights = rights(user.login)
    permissions = {"publish": {"allow": user_rights.publish}, "subscribe": {"allow": user_rights.subscribe}}
    return json.dumps({"nkey": user.key, "permissions": permissions})


def _checked(users: Iterable[User]) -> list[User]:
    """Sort the users by login. Raises BadLogin where two have one login or one key."""
    by_login = sorted(users)
    for user in by_login:
        if not re.fullmatch(KEY_PATTERN, user.key):
            raise BadLogin(f"{user.login}: {user.key!r} is not the public nkey of a user")
    for field in ("login", "key"):
        value, count = max(
            Counter(getattr(user, field) for user in by_login).items(), key=itemgetter(1), default=("", 0)
        )
        if count > 1:
            raise BadLogin(f"{field} {value} occurs twice")
    return by_login
