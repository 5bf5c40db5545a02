"""The rights of each login, as data."""

from __future__ import annotations

import pytest

from unicrond.events.log.subjects import EVENT_STREAM
from unicrond.events.trust.logins import BadLogin, Role, rights, role_of


def test_login_rights_name_no_foreign_subject() -> None:
    for node in ("n1", "n-2"):
        for allowed in (*rights(f"agent-{node}").publish, *rights(f"agent-{node}").subscribe):
            assert node in allowed or allowed in (
                f"$JS.API.STREAM.INFO.{EVENT_STREAM}",
                f"$JS.API.DIRECT.GET.{EVENT_STREAM}.unicron.v1.term",
                "unicron.v1.term",
            )


def test_only_coordinator_and_operator_make_consumers() -> None:
    for login in ("agent-n1", Role.API, Role.READER):
        assert not [right for right in rights(login).publish if ".CONSUMER.CREATE" in right or ".CONSUMER.D" in right]


@pytest.mark.parametrize(
    "login",
    [
        "agent",
        "agent-",
        "agent-api",
        "agent-a.b",
        "agent-*",
        "agent->",
        "node-n1",
        "api-1",
        "",
        "reader-1",
        "agent-a b",
    ],
)
def test_role_lookup_refuses_unknown_login(login: str) -> None:
    with pytest.raises(BadLogin):
        role_of(login)
