"""Access control of the HTTP API: which token may send which request.

Rules
-----
* Scope `read-own` opens some of what `read` opens (OWN_READS), and there the tasks of the token's owner alone
  (own_state.py). A task is changed by its owner, whichever token speaks for him, or by one with scope `operate`.
* Every request but the probes (PROBES) and the web page's files needs a token with the scope of its route
  (`intake/tokens.py`), if there are tokens at all. The one of `api.token_file` has every scope.
* The list and the file of `api.token_file` are read again when they change. If one cannot be used, what it held stays
  in force, and an alarm is raised. A token file may hold several tokens, a line each: old and new side by side.
* The head's own token file is made anew where it is gone.
* Who brings no token from the head's own machine is told in which file the head's own one is: whether he may read it
  is the file's mode (0600).
* A pod of Kubernetes that requests its node's key (POD_LOGINS) shows its own token. login_api.py has that reviewed; a
  token that is refused counts as a wrong one here.
* A refusal is logged with the address, at most once in SAY_EVERY_S for each; the token itself never is. An address with
  FAILURES_MAX refusals within WINDOW_S gets 429 for wrong tokens until these are old. Right ones always count: several
  people may share an address.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from unicrond.core.rules.fault_targets import OrderRefused
from unicrond.core.state.alarms import Alarm
from unicrond.core.state.state import ClusterState, Task
from unicrond.events.host.file_versions import FileVersion, file_version
from unicrond.events.host.kubernetes_account import POD_LOGINS
from unicrond.events.trust.keys import write_private
from unicrond.events.vocabulary.phrases import clean
from unicrond.intake.config import is_loopback
from unicrond.intake.tokens import FULL_GRANT, BadTokens, Grant, Scope, hash_token, make_token, read_tokens
from unicrond.page.files import is_page

log = logging.getLogger("unicrond")

#: What scope `read-own` may ask for; a path that ends with / stands for all below it.
OWN_READS = ("/v1/state", "/v1/logs/", "/v1/marks/", "/v1/ranks/", "/v1/story/task/")
#: The paths that a probe may ask for without a token.
PROBES = ("/livez", "/readyz", "/healthz")
SAY_EVERY_S = 10.0
WINDOW_S = 60.0
FAILURES_MAX = 20
#: A pod, which may do nothing else.
_POD_GRANT = Grant("pod", frozenset())
#: The failures of so many addresses are remembered; the oldest are dropped.
_ADDRESSES_MAX = 1024


class AccessDenied(Exception):
    """A request is refused; `status` is the HTTP status. `token_file`: where who asks from this machine finds a token,
    if he may read it."""

    def __init__(self, text: str, status: int, token_file: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.token_file = token_file


class _Failures:
    """The refusals of one address: since when, how many, and how many are not in the process's log yet."""

    def __init__(self, now_s: float) -> None:
        self.since_s = now_s
        self.count = 0
        self.logged_s = -SAY_EVERY_S
        self.unlogged = 0


class Access:
    """Decides which requests the API answers. `token`: has every scope; "" for none. `path`: the file with the list of
    tokens; None for none. `local`: the file of the head's own token, for this machine's people; None: they have it
    otherwise. `token_file`: holds the tokens that have every scope, in place of `token`."""

    def __init__(
        self, token: str = "", path: Path | None = None, local: Path | None = None, token_file: Path | None = None
    ) -> None:
        self._full_grants = _full_grants([token] if token else [])
        self._token_file = token_file
        self._token_file_version: FileVersion | None = None
        #: Why what `token_file` holds is not in force; "" where it is.
        self.token_trouble = ""
        self._path = path
        self._local = local
        self._listed: dict[str, Grant] = {}
        self._file_version: FileVersion | None = None
        self._failures: OrderedDict[str, _Failures] = OrderedDict()
        #: Why the list in force is not the one in the file; "" where it is.
        self.trouble = ""
        self._look()

    @property
    def is_open(self) -> bool:
        """Return whether requests need no token."""
        return not self._full_grants and self._path is None

    def grant(self, method: str, path: str, token: str, address: str, now_s: float) -> Grant:
        """Return the grant of the token that a request brings. Raises AccessDenied. `now_s`: any clock that never
        steps."""
        needed = scope_of(method, path)
        if path == POD_LOGINS:
            return _POD_GRANT
        if self.is_open or needed is None:
            return FULL_GRANT
        self._look()
        digest = hash_token(token)
        grant = self._full_grants.get(digest) or self._listed.get(digest)
        if grant is None and not token and self._local is not None and is_loopback(address):
            # unicronctl on this machine asks so first, and is told where to look: that is no guess.
            raise AccessDenied(f"token: missing; {self._local} has one, or give --token-file", 401, str(self._local))
        if grant is None:
            raise self.count_failure(address, f"{method} {path}: {'wrong token' if token else 'no token'}", now_s)
        reads_own = needed is Scope.READ and Scope.READ_OWN in grant.scopes and _is_own_read(path)
        if needed not in grant.scopes and not reads_own:
            self.count_failure(address, f"{method} {path}: token {grant.name} lacks scope {needed}", now_s)
            raise AccessDenied(f"token: {grant.name} lacks scope {needed}; ask for one that has it", 403)
        return grant

    def may_read(self, token: str, address: str, now_s: float) -> bool:
        """Return whether whoever asks a probe may read more than its bare facts; a wrong token counts as anywhere."""
        if self.is_open or not token:
            return self.is_open
        with suppress(AccessDenied):
            self.grant("GET", "/v1/alarms", token, address, now_s)
            return True
        return False

    def require_patience(self, address: str, now_s: float) -> None:
        """Raise OrderRefused where the address has sent too many wrong tokens of late. For a token that is not looked
        up here."""
        failures = self._failures.get(address)
        if failures is not None and failures.count > FAILURES_MAX and now_s - failures.since_s <= WINDOW_S:
            raise OrderRefused(429, _too_many(address))

    def alarms(self) -> list[Alarm]:
        """Return what a person has to look at."""
        text = f"api.tokens_file: {self.trouble}; the previous tokens stay valid"
        alarms = [Alarm("tokens-unreadable", text)] if self.trouble else []
        if self.token_trouble:
            alarms.append(Alarm("tokens-unreadable", f"{self.token_trouble}; the previous token stays valid"))
        return alarms

    def count_failure(self, address: str, request: str, now_s: float) -> AccessDenied:
        """Count a refusal of this address, log it if one is due, and return the error to raise. `request`: what was
        asked for, and what was wrong."""
        failures = self._failures.pop(address, None)
        if failures is None or now_s - failures.since_s > WINDOW_S:
            failures = _Failures(now_s)
        self._failures[address] = failures
        if len(self._failures) > _ADDRESSES_MAX:
            self._failures.popitem(last=False)
        failures.count += 1
        failures.unlogged += 1
        if now_s - failures.logged_s >= SAY_EVERY_S:
            times = f" ({failures.unlogged} refused)" if failures.unlogged > 1 else ""
            log.warning("API: refused %s %s%s", address, clean(request)[:200], times)
            failures.logged_s, failures.unlogged = now_s, 0
        if failures.count > FAILURES_MAX:
            return AccessDenied(_too_many(address), 429)
        return AccessDenied("token: missing or wrong; give --token-file, or set UNICRON_TOKEN_FILE", 401)

    def _look(self) -> None:
        """Read tokens and their list again if their files have changed."""
        self._look_at_tokens()
        if self._path is None:
            return
        try:
            version = file_version(self._path)
            if version is not None and version == self._file_version:
                return
            self._listed = read_tokens(self._path.read_text(encoding="ascii"))
        except (OSError, UnicodeDecodeError, BadTokens) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            trouble = f"{self._path}: {reason}"
            if trouble != self.trouble:
                log.error("ALARM: api.tokens_file: %s; the previous tokens stay valid", trouble)
            self.trouble = trouble
            return
        self._file_version, self.trouble = version, ""

    def _look_at_tokens(self) -> None:
        """Read the tokens with every scope again if their file has changed."""
        path = self._token_file
        if path is None:
            return
        try:
            if path == self._local and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                write_private(path, f"{make_token()}\n")
            version = file_version(path)
            if version is not None and version == self._token_file_version:
                return
            tokens = path.read_text(encoding="ascii").split()
            if not tokens:
                raise BadTokens("holds no token")
        except (OSError, UnicodeDecodeError, BadTokens) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            trouble = f"api.token_file: {path}: {reason}"
            if trouble != self.token_trouble:
                log.error("ALARM: %s; the previous token stays valid", trouble)
            self.token_trouble = trouble
            return
        self._full_grants, self._token_file_version, self.token_trouble = _full_grants(tokens), version, ""


def _full_grants(tokens: Iterable[str]) -> dict[str, Grant]:
    """Return grants of every scope by the hash of their token."""
    return {hash_token(token): Grant("token", frozenset(Scope)) for token in tokens}


def _too_many(address: str) -> str:
    return f"token: too many wrong ones from {address}; wait {WINDOW_S:g} s"


def scope_of(method: str, path: str) -> Scope | None:
    """Return the scope that a request needs; None: it needs no token."""
    if path in PROBES or (method in ("GET", "HEAD") and is_page(path)):
        return None
    if path == "/metrics":
        return Scope.METRICS
    if path.startswith("/v1/stacks/"):  # the worker stands still meanwhile
        return Scope.OPERATE
    if method in ("GET", "HEAD") or path == "/v1/plan/whatif":
        return Scope.READ
    return Scope.SUBMIT if path.startswith("/v1/tasks") else Scope.OPERATE


def _is_own_read(path: str) -> bool:
    return any(path.startswith(place) if place.endswith("/") else path == place for place in OWN_READS)


def require_scope_of_priority(grant: Grant, priority: int) -> None:
    """Raise OrderRefused unless the caller may put a task before all that have the usual priority."""
    if Scope.OPERATE not in grant.scopes:
        text = f"priority: {priority} goes before other people's tasks; token {grant.name} may give 0 or less"
        raise OrderRefused(403, f"{text}, one with scope operate more")


def require_owner(grant: Grant, task: Task) -> None:
    """Raise OrderRefused unless the caller's owner has submitted the task, or the caller operates the cluster. A task
    that came without a token is anybody's."""
    if task.owner and task.owner != grant.owner and Scope.OPERATE not in grant.scopes:
        text = f"task: {task.name} is {task.owner}'s; token {grant.name} is {grant.owner}'s, and lacks scope operate"
        raise OrderRefused(403, text)


def require_free_name(grant: Grant, state: ClusterState, name: str, field: str = "name") -> None:
    """Raise OrderRefused where the last task of this name was another's: its story, its workers' output and its
    checkpoints would be the new one's. `field`: of the request, which has the name."""
    task = state.tasks.get(name)
    if task is not None and task.owner and task.owner != grant.owner and Scope.OPERATE not in grant.scopes:
        text = f"{field}: {name} was another owner's; give another name (token {grant.name} lacks scope operate)"
        raise OrderRefused(403, text)


def user_of(grant: Grant, user: str) -> str:
    """Return the user that a task of the caller runs as: `user`, or where it names none the first of the token's, ""
    where it has none. Raise OrderRefused unless the token has that user, or operates the cluster."""
    if not user:
        return next(iter(grant.users), "")
    if user in grant.users or Scope.OPERATE in grant.scopes:
        return user
    users = f"has {', '.join(grant.users)}" if grant.users else "has no users"
    fix = f"leave it out, or have an operator add {user} to users= of the token's line"
    raise OrderRefused(403, f"run_as: {user} is not a user of token {grant.name}, which {users}; {fix}")
