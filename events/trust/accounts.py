"""NATS accounts: which logins share one, and which subjects an account lends to another, as data. Pure.

Rules
-----
* NATS checks the subject of a request, and never the subject to which the answer is to go. It writes the answer there
  with rights of its own, within the account of the login that asked. So the log, its streams and JetStream's API are in
  an account of their own, with the coordinator; every other kind of login has another account, in which a subject such
  as `$JS.API.STREAM.DELETE.UNICRON_EVENTS` means nothing. An answer never reaches another account's API.
* An account imports what its logins need (`LOANS`), and nothing else. A service is asked across accounts, and its
  answers come back to the account that asked; a stream is heard across accounts. What an account has imported as a
  service is not asked by an answer: nats-server follows no import for a message that came by one. The rights of a login
  (`logins.py`) stand within its account, and part the agents from each other there.
* All agents share an account. With one for each, answers could not even reach another agent's inbox, which nobody
  knows; a server with 2,000 of them takes 3 times as long to start and to reload, and 4 times the memory, and an
  account that comes by a reload has no imports until the next one (measured on 2.15.1).
* Who publishes what people ask agents for, and who answers, meet without the log's account.
* A login with every right (while a cluster is moved to keys), and everybody where there are no logins, is in the log's
  account. So the log is in the same account from the first start on.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from operator import itemgetter
from typing import Any, NamedTuple

from unicrond.events.log.subjects import BEAT_STREAM, EVENT_STREAM, PREFIX, TERM_SUBJECT, standing_subjects
from unicrond.events.trust.logins import (
    AGENT_ACKS,
    AGENT_CALLS,
    API,
    CACHE_STREAM,
    KEY_PATTERN,
    BadLogin,
    Rights,
    Role,
    User,
    rights,
    role_of,
)
from unicrond.events.wire.codec import API_PRODUCER

#: Who connects without a login where there are none.
OPEN_USER = "open"
#: How calls of JetStream's API are named within accounts that lack it. A server lends the API to each account, and
#: would answer that it is not enabled there, beside the log's account: so a call gets another name first.
LOCAL_API = f"{PREFIX}.api"


class NatsAccount(StrEnum):
    """An account on the servers. `SYS`: the servers' own."""

    LOG = "LOG"
    AGENTS = "AGENTS"
    API = "API"
    READERS = "READERS"
    OPERATORS = "OPERATORS"
    SYS = "SYS"


ACCOUNT_OF = {
    Role.COORDINATOR: NatsAccount.LOG,
    Role.AGENT: NatsAccount.AGENTS,
    Role.API: NatsAccount.API,
    Role.READER: NatsAccount.READERS,
    Role.OPERATOR: NatsAccount.OPERATORS,
    Role.SYSTEM: NatsAccount.SYS,
}


_WITHOUT_API = (NatsAccount.AGENTS, NatsAccount.API, NatsAccount.READERS)


class Loan(NamedTuple):
    """A subject that one account lends to others.

    `is_service`: they ask there, and the answers come back; else they hear what is published there. `is_streamed`: one
    request may have several answers.
    """

    subject: str
    lender: NatsAccount
    borrowers: tuple[NatsAccount, ...]
    is_service: bool = True
    is_streamed: bool = False


def _service(subject: str, *borrowers: NatsAccount, is_streamed: bool = False) -> Loan:
    return Loan(subject, NatsAccount.LOG, borrowers, is_streamed=is_streamed)


def _stream(subject: str, lender: NatsAccount, *borrowers: NatsAccount) -> Loan:
    return Loan(subject, lender, borrowers, is_service=False)


#: What each account imports, and from which.
LOANS = (
    _service(f"{PREFIX}.obs.*.*", NatsAccount.AGENTS),
    _service(f"{PREFIX}.obs.{API_PRODUCER}.*", NatsAccount.API),
    _service(f"{PREFIX}.beat.*", NatsAccount.AGENTS),
    _service(f"{API}.STREAM.INFO.{EVENT_STREAM}", NatsAccount.AGENTS, NatsAccount.READERS),
    _service(f"{API}.CONSUMER.INFO.{EVENT_STREAM}.*", NatsAccount.AGENTS),
    _service(f"{API}.CONSUMER.MSG.NEXT.{EVENT_STREAM}.*", NatsAccount.AGENTS, is_streamed=True),
    *(
        _service(f"{API}.DIRECT.GET.{EVENT_STREAM}.{subject}", NatsAccount.AGENTS)
        for subject in (TERM_SUBJECT, *standing_subjects("*"))
    ),
    _service(AGENT_ACKS, NatsAccount.AGENTS),
    *(_service(f"{API}.STREAM.INFO.{name}", NatsAccount.READERS) for name in (BEAT_STREAM, CACHE_STREAM)),
    *(
        loan
        for name in (EVENT_STREAM, BEAT_STREAM, CACHE_STREAM)
        for loan in (
            _service(f"{API}.STREAM.MSG.GET.{name}", NatsAccount.READERS),
            _service(f"{API}.DIRECT.GET.{name}", NatsAccount.READERS, is_streamed=True),
        )
    ),
    *(
        _service(subject, NatsAccount.OPERATORS, is_streamed=True)
        for subject in (f"{API}.>", "$JS.ACK.>", "$JS.FC.>", "$JS.SNAPSHOT.>")
    ),
    *(_stream(subject, NatsAccount.LOG, NatsAccount.AGENTS) for subject in (TERM_SUBJECT, *standing_subjects("*"))),
    _stream(">", NatsAccount.LOG, NatsAccount.OPERATORS),
    # Agents with the shared login are in the log's account.
    _stream(f"{PREFIX}.logs.*", NatsAccount.API, NatsAccount.AGENTS, NatsAccount.LOG),
    _stream(f"{PREFIX}.logged.*.*", NatsAccount.AGENTS, NatsAccount.API),
    _stream(f"{PREFIX}.logged.*.*", NatsAccount.LOG, NatsAccount.API),
)


def local_name(subject: str, account: NatsAccount) -> str:
    """Return the name of a subject in an account. Clients there use the subject itself; rights and imports do not."""
    if account not in _WITHOUT_API or not subject.startswith(f"{API}."):
        return subject
    return f"{LOCAL_API}{subject.removeprefix(API)}"


def client_name(text: str) -> str:
    """Return a server's message to a client with the subjects that the client has used."""
    return text.replace(f'"{LOCAL_API}.', f'"{API.lower()}.')


def local_rights(login: str) -> Rights:
    """Return what the login may publish and subscribe to, as its account names it. Raises BadLogin."""
    needed, account = rights(login), ACCOUNT_OF[role_of(login)[0]]
    return needed._replace(publish=tuple(local_name(subject, account) for subject in needed.publish))


def exports(account: NatsAccount) -> Iterator[Loan]:
    """Yield what the account lends."""
    return (loan for loan in LOANS if loan.lender is account)


def imports(account: NatsAccount) -> Iterator[Loan]:
    """Yield what the account borrows."""
    return (loan for loan in LOANS if account in loan.borrowers)


def includes(pattern: str, subject: str) -> bool:
    """Say whether the pattern matches all that `subject`, a pattern too, matches."""
    wide_tokens, tokens = pattern.split("."), subject.split(".")
    for number, token in enumerate(wide_tokens):
        if token == ">":
            return len(tokens) > number
        if number >= len(tokens) or token not in ("*", tokens[number]) or tokens[number] == ">":
            return False
    return len(wide_tokens) == len(tokens)


# --- the server's configuration ------------------------------------------------------------------


def server_accounts(users: Iterable[User] | None, shared: tuple[str, str] | None = None) -> list[str]:
    """Return lines of a nats-server's configuration: the accounts, with these users and nobody else. Raises BadLogin.

    `users` None: nobody needs a login, unless there is a `shared` one: user and password of a login with every right,
    which stands beside the users while a cluster is moved to keys.
    """
    roster = _roster(users or ())
    by_account: dict[NatsAccount, list[dict[str, Any]]] = {account: [] for account in NatsAccount}
    for user in roster:
        by_account[ACCOUNT_OF[role_of(user.login)[0]]].append(_user_entry(user))
    if shared:
        by_account[NatsAccount.LOG].append({"user": shared[0], "password": shared[1]})
    elif users is None:
        by_account[NatsAccount.LOG].append({"user": OPEN_USER, "password": ""})
    if not any(entries for account, entries in by_account.items() if account is not NatsAccount.SYS):
        raise BadLogin("a server without users would let everybody in; give one")
    lines = ["accounts {"]
    for account, entries in by_account.items():
        if account is not NatsAccount.SYS or entries:
            lines += _account(account, entries)
    lines.append("}")
    if by_account[NatsAccount.SYS]:
        lines.append(f"system_account: {NatsAccount.SYS}")
    if users is None and not shared:
        lines.append(f"no_auth_user: {OPEN_USER}")
    return lines


def _account(account: NatsAccount, entries: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of one account, a user on each line. JSON is valid there."""
    lines = [f"  {account} {{"]
    if account is NatsAccount.LOG:
        lines.append("    jetstream: enabled")
    if account in _WITHOUT_API:
        lines.append(f"    mappings: {json.dumps({f'{API}.>': f'{LOCAL_API}.>'})}")
    for verb, items in (
        ("exports", [_export_entry(loan) for loan in exports(account)]),
        ("imports", [_import_entry(loan, account) for loan in imports(account)]),
        ("users", entries),
    ):
        if items:
            lines += [f"    {verb}: [", *(f"      {json.dumps(item)}" for item in items), "    ]"]
    return [*lines, "  }"]


def _export_entry(loan: Loan) -> dict[str, Any]:
    """Format an export; no other account may import it."""
    kind = "service" if loan.is_service else "stream"
    answers = {"response_type": "stream"} if loan.is_streamed else {}
    return {kind: loan.subject, **answers, "accounts": list(loan.borrowers)}


def _import_entry(loan: Loan, account: NatsAccount) -> dict[str, Any]:
    """Format an import."""
    source, local = {"account": loan.lender, "subject": loan.subject}, local_name(loan.subject, account)
    share = {"share": True} if _says_who_asks(loan, account) else {}
    name = {"to": local} if local != loan.subject else {}
    return {"service" if loan.is_service else "stream": source, **name, **share}


def _says_who_asks(loan: Loan, account: NatsAccount) -> bool:
    """Say whether the lender gets to know who asks, to count it."""
    return account is NatsAccount.AGENTS and loan.subject in AGENT_CALLS


def _user_entry(user: User) -> dict[str, Any]:
    """Format a user with its rights; in the servers' own account there are no others."""
    if user.login == Role.SYSTEM:
        return {"nkey": user.key}
    user_rights = local_rights(user.login)
    permissions = {"publish": {"allow": user_rights.publish}, "subscribe": {"allow": user_rights.subscribe}}
    return {"nkey": user.key, "permissions": permissions}


def _roster(users: Iterable[User]) -> list[User]:
    """Sort the users by login; one may have several keys, while it is given another. Raises BadLogin where two have one
    key."""
    by_login = sorted(users)
    for user in by_login:
        if not re.fullmatch(KEY_PATTERN, user.key):
            raise BadLogin(f"{user.login}: {user.key!r} is not the public nkey of a user")
    key, count = max(Counter(user.key for user in by_login).items(), key=itemgetter(1), default=("", 0))
    if count > 1:
        raise BadLogin(f"key {key} occurs twice")
    return by_login


# --- servers in operator mode --------------------------------------------------------------------


def nsc_commands(logins: Iterable[str]) -> list[str]:
    """Return, for servers in operator mode, commands of NATS's tool nsc: they make the accounts with what they lend and
    borrow, and a user for each login.

    A JWT may not lend a subject twice, so there the widest loan stands for those within it, to all accounts of the
    operator; what an account borrows is the same. The system account has its own users there. Raises BadLogin.
    """
    accounts = [account for account in NatsAccount if account is not NatsAccount.SYS]
    pairs = [(login, ACCOUNT_OF[role_of(login)[0]]) for login in logins]
    return [
        *(f"nsc add account --name {account}" for account in accounts),
        f"nsc edit account --name {NatsAccount.LOG} --js-disk-storage -1 --js-mem-storage -1 --js-streams -1 "
        "--js-consumer -1",
        *(
            f"{account}=$(nsc describe account --name {account} --field sub | tr -d '\"')"
            for account in sorted({loan.lender for loan in LOANS})
        ),
        *(
            f"nsc add mapping --account {account} --from '{API}.>' --to '{LOCAL_API}.>'"
            for account in accounts
            if account in _WITHOUT_API
        ),
        *(_nsc_export(loan) for loan in _widest(LOANS)),
        *(_nsc_import(loan, account) for account in accounts for loan in imports(account)),
        *(_nsc_user(login, account) for login, account in pairs if account is not NatsAccount.SYS),
    ]


def _widest(loans: Sequence[Loan]) -> list[Loan]:
    """Return the loans whose subject is not within another's of the same lender and kind."""
    return [
        loan
        for loan in loans
        if not any(
            wider.subject != loan.subject
            and (wider.lender, wider.is_service) == (loan.lender, loan.is_service)
            and includes(wider.subject, loan.subject)
            for wider in loans
        )
    ]


def _nsc_export(loan: Loan) -> str:
    """Return the command that lends a subject."""
    words = ["nsc", "add", "export", "--account", loan.lender, "--name", loan.subject, "--subject", loan.subject]
    return shlex.join([*words, *(["--service"] if loan.is_service else []), *_nsc_response(loan)])


def _nsc_response(loan: Loan) -> list[str]:
    return ["--response-type", "Stream"] if loan.is_streamed else []


def _nsc_import(loan: Loan, account: NatsAccount) -> str:
    """Return the command that borrows a subject; the shell knows the lender's public key by its name."""
    name = f"{loan.subject} of {loan.lender}"
    words = ["--name", name, "--remote-subject", loan.subject, "--local-subject", local_name(loan.subject, account)]
    service = " --service" * loan.is_service + " --share" * _says_who_asks(loan, account)
    return f'nsc add import --account {account} --src-account "${loan.lender}" {shlex.join(words)}{service}'


def _nsc_user(login: str, account: NatsAccount) -> str:
    """Return the command that makes a user with its rights."""
    user_rights = local_rights(login)
    words = f"nsc add user --account {account} --name {login} --allow-pub".split()
    return (
        shlex.join([*words, ",".join(user_rights.publish)])
        + f" --allow-sub {shlex.quote(','.join(user_rights.subscribe))}"
    )
