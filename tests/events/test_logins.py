"""The rights of each login, as data."""

from __future__ import annotations

import pytest

from unicrond.events.log.subjects import EVENT_STREAM
from unicrond.events.trust.logins import READER_CONSUMERS, BadLogin, Role, User, authorization, rights, role_of


def test_login_rights_name_no_foreign_subject() -> None:
    for node in ("n1", "n-2"):
        for allowed in (*rights(f"agent-{node}").publish, *rights(f"agent-{node}").subscribe):
            assert node in allowed or allowed in (
                f"$JS.API.STREAM.INFO.{EVENT_STREAM}",
                f"$JS.API.DIRECT.GET.{EVENT_STREAM}.unicron.v1.term",
                "unicron.v1.term",
            )


def test_reader_login_owns_its_consumers() -> None:
    named = [right for right in rights(Role.READER).publish if ".CONSUMER." in right and "OBJ_" not in right]
    assert len(named) == 4 * READER_CONSUMERS
    assert all(right.rpartition(".")[2].startswith("reader-") for right in named)


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


def test_authorization_refuses_empty_list() -> None:
    with pytest.raises(BadLogin, match="would let everybody in"):
        authorization([])


def test_authorization_needs_unique_keys() -> None:
    user = User("agent-n1", "U" + "A" * 55)
    with pytest.raises(BadLogin, match="occurs twice"):
        authorization([user, User("agent-n2", user.key)])
    with pytest.raises(BadLogin, match="not the public nkey"):
        authorization([User("agent-n1", 'U"}')])
