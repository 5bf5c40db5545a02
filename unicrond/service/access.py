"""Who may ask what over HTTP.

Rules
-----
* Every request but the probes (PROBES) and the web page's files needs a token with the scope of its route
  (`intake/tokens.py`), if there are tokens at all. The one of `api.token_file` has every scope.
* The list is read again when its file changes. One that cannot be used leaves the last in force, and is an alarm.
* A refusal is logged with the address, at most once in SAY_EVERY_S for each; the token itself never is. An address with
  FAILURES_MAX refusals within WINDOW_S hears 429 to wrong tokens until they are old. Right ones always count: several
  people may share an address.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from pathlib import Path

from unicrond.display.tables import clean
from unicrond.intake.tokens import EVERYTHING, BadTokens, Grant, Scope, hashed, read_tokens
from unicrond.page.files import is_page

log = logging.getLogger("unicrond")

#: What a probe may ask without a token.
PROBES = ("/livez", "/readyz", "/healthz")
SAY_EVERY_S = 10.0
WINDOW_S = 60.0
FAILURES_MAX = 20
#: Of so many addresses the failures are remembered; the oldest go.
_ADDRESSES_MAX = 1024


class NoAccess(Exception):
    """The request is refused; `status` is HTTP's."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class _Failures:
    """Of one address."""

    def __init__(self, now_s: float) -> None:
        self.since_s = now_s
        self.count = 0
        self.said_s = -SAY_EVERY_S
        self.unsaid = 0


class Access:
    """`token`: with every scope; "" for none. `path`: of the list of tokens; None for none."""

    def __init__(self, token: str = "", path: Path | None = None) -> None:
        self._all = {hashed(token): Grant("token", frozenset(Scope))} if token else {}
        self._path = path
        self._listed: dict[str, Grant] = {}
        self._seen: tuple[int, int, int] | None = None
        self._failures: OrderedDict[str, _Failures] = OrderedDict()
        #: Why the list is not the file's; "" where it is.
        self.trouble = ""
        self._look()

    @property
    def is_open(self) -> bool:
        """Nobody needs a token."""
        return not self._all and self._path is None

    def grant(self, method: str, path: str, token: str, address: str, now_s: float) -> Grant:
        """Who asks. Raises NoAccess. `now_s`: any clock that never steps."""
        needed = scope_of(method, path)
        if self.is_open or needed is None:
            return EVERYTHING
        self._look()
        digest = hashed(token)
        found = self._all.get(digest) or self._listed.get(digest)
        if found is None:
            raise self._failed(address, f"{method} {path}: {'wrong token' if token else 'no token'}", now_s)
        if needed not in found.scopes:
            self._failed(address, f"{method} {path}: token {found.name} lacks scope {needed}", now_s)
            raise NoAccess(f"token: {found.name} lacks scope {needed}; ask for one that has it", 403)
        return found

    def alarms(self) -> list[str]:
        """What a person has to look at."""
        return [f"api.tokens_file: {self.trouble}; the tokens of before count"] if self.trouble else []

    def _failed(self, address: str, what: str, now_s: float) -> NoAccess:
        its = self._failures.pop(address, None)
        if its is None or now_s - its.since_s > WINDOW_S:
            its = _Failures(now_s)
        self._failures[address] = its
        if len(self._failures) > _ADDRESSES_MAX:
            self._failures.popitem(last=False)
        its.count += 1
        its.unsaid += 1
        if now_s - its.said_s >= SAY_EVERY_S:
            times = f" ({its.unsaid} refused)" if its.unsaid > 1 else ""
            log.warning("API: refused %s %s%s", address, clean(what)[:200], times)
            its.said_s, its.unsaid = now_s, 0
        if its.count > FAILURES_MAX:
            return NoAccess(f"token: too many wrong ones from {address}; wait {WINDOW_S:g} s", 429)
        return NoAccess("token: missing or wrong; give --token-file, or set UNICRON_TOKEN_FILE", 401)

    def _look(self) -> None:
        """Read the list again if its file is another than before."""
        if self._path is None:
            return
        try:
            found = self._path.stat()
            seen = (found.st_mtime_ns, found.st_ino, found.st_size)
            if seen == self._seen:
                return
            self._listed = read_tokens(self._path.read_text(encoding="ascii"))
        except (OSError, UnicodeDecodeError, BadTokens) as error:
            said = error.strerror if isinstance(error, OSError) else str(error)
            trouble = f"{self._path}: {said}"
            if trouble != self.trouble:
                log.error("ALARM: api.tokens_file: %s; the tokens of before count", trouble)
            self.trouble = trouble
            return
        self._seen, self.trouble = seen, ""


def scope_of(method: str, path: str) -> Scope | None:
    """What a request needs; None: nothing."""
    if path in PROBES or (method in ("GET", "HEAD") and is_page(path)):
        return None
    if path == "/metrics":
        return Scope.METRICS
    if path.startswith("/v1/stacks/"):  # the worker stands still meanwhile
        return Scope.OPERATE
    if method in ("GET", "HEAD") or path == "/v1/plan/whatif":
        return Scope.READ
    return Scope.SUBMIT if path.startswith("/v1/tasks") else Scope.OPERATE
