"""The configuration of notifications: destinations, rules and intervals. Secrets are in files of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from unicrond.views.notifications import Rule

RULES: tuple[Rule, ...] = get_args(Rule)
Seconds = Annotated[float, Meta(ge=0.0, le=30 * 86400.0)]


class Destination(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A receiver of notifications. `rules`: only of these; empty: of all.

    webhook, slack: `url`, or `url_file` with it. pagerduty: `key_file` with the integration's key. email: `server`
    (HOST:PORT), `sender`, `recipients`, and `user` with `password_file`. command: `argv`.
    """

    kind: Literal["webhook", "slack", "pagerduty", "email", "command"]
    rules: tuple[Rule, ...] = ()
    url: str = ""
    url_file: str = ""
    key_file: str = ""
    server: str = ""
    sender: str = ""
    recipients: tuple[str, ...] = ()
    user: str = ""
    password_file: str = ""
    starttls: bool = True
    argv: tuple[str, ...] = ()

    def problem(self) -> str:
        """Return what is missing or wrong: "field: why"; "" where all is well."""
        needed: dict[str, tuple[tuple[str, ...], ...]] = {
            "webhook": (("url", "url_file"),),
            "slack": (("url", "url_file"),),
            "pagerduty": (("key_file",),),
            "email": (("server",), ("sender",), ("recipients",)),
            "command": (("argv",),),
        }
        for choice in needed[self.kind]:
            if not any(getattr(self, field) for field in choice):
                return f"{choice[0]}: {self.kind} needs {' or '.join(choice)}"
        if self.url and not self.url.startswith(("http://", "https://")):
            return f"url: {self.url!r} is not an http address"
        if self.server and not self.server.rpartition(":")[2].isdigit():
            return f"server: {self.server!r} is not HOST:PORT"
        for field in ("url_file", "key_file", "password_file"):
            path = getattr(self, field)
            if path and not Path(path).is_file():
                return f"{field}: {path} is not a file; create it or fix the path"
        return ""


class Notify(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of notifications. `to`: the destinations. `group_s`: notices about one matter within this time are sent
    together. `repeat_s`: the least time before a notice about a matter is repeated. `heartbeat_url`: fetched every
    `heartbeat_s` while all is well: a dead man's switch."""

    to: tuple[Destination, ...] = ()
    no_progress_s: Seconds = 600.0
    group_s: Seconds = 3.0
    repeat_s: Seconds = 3600.0
    heartbeat_url: str = ""
    heartbeat_s: Annotated[float, Meta(ge=1.0, le=86400.0)] = 60.0

    def problem(self) -> str:
        """Return the first problem, with its field; "" where all is well."""
        for number, destination in enumerate(self.to):
            if problem := destination.problem():
                return f"to[{number}].{problem}"
        if self.heartbeat_url and not self.heartbeat_url.startswith(("http://", "https://")):
            return f"heartbeat_url: {self.heartbeat_url!r} is not an http address"
        return ""
