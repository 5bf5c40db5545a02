"""How isolated nodes return to service, as the operator configures it. The head runs the repair command:
service/coordinator/repairs.py."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Argument = Annotated[str, Meta(min_length=1, max_length=1024)]
Argv = Annotated[tuple[Argument, ...], Meta(max_length=64)]
Limit = Annotated[float, Meta(ge=1.0, le=86_400.0)]


class Readmission(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a node that was isolated for its hardware returns. Times in seconds.

    `check`: a command that agents run; empty: their own self-test. It passes with exit code 0, within `timeout_s`.
    `repair`: a command that the head runs for a node that needs a reboot or another part; empty: a person does it.
    """

    check: Argv = ()
    timeout_s: Limit = 60.0
    repair: Argv = ()
    repair_timeout_s: Limit = 900.0
