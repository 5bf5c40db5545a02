"""Tokens of the HTTP API: scopes, the list that is read again, refusals that are logged and throttled, who asked."""

from __future__ import annotations

import logging
from pathlib import Path

import aiohttp
import pytest

from tests.unicrond.serving import Served, serving
from unicrond.commands.cli import main
from unicrond.ctl.client_options import token_in
from unicrond.events import vocabulary as v
from unicrond.intake.config import ApiConfig, Config, ConfigError, check
from unicrond.intake.tokens import BadTokens, Scope, line_of, make_token, read_tokens
from unicrond.service.api.access import FAILURES_MAX, SAY_EVERY_S, WINDOW_S, Access, AccessDenied, scope_of

READS, SUBMITS, OPERATES, SCRAPES = (make_token() for _ in range(4))


def listed(path: Path, *also: str) -> Path:
    lines = [
        "# ours",
        line_of("ci", [Scope.READ], READS),
        line_of("ann", [Scope.READ, Scope.SUBMIT], SUBMITS),
        line_of("bob", [Scope.OPERATE], OPERATES),
        line_of("prometheus", [Scope.METRICS], SCRAPES),
    ]
    path.write_text("\n".join([*lines, *also, ""]))
    return path


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


# --- the list -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("ci read", "line 1: expected NAME SCOPES HASH"),
        (f"ci read,write {'0' * 64}", "'write' is not a scope"),
        (f"a.b read {'0' * 64}", "line 1: expected"),
        (f"ci read {'0' * 64}\nci submit {'1' * 64}", "line 2: ci is there twice"),
        (f"ci read {'0' * 64}\nann submit {'0' * 64}", "line 2: ann is there twice"),
    ],
)
def test_token_list_error_names_line(line: str, why: str) -> None:
    with pytest.raises(BadTokens, match=why):
        read_tokens(line)


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [
        ("GET", "/healthz", None),
        ("GET", "/metrics", Scope.METRICS),
        ("GET", "/v1/state", Scope.READ),
        ("GET", "/v1/logs/a", Scope.READ),
        ("POST", "/v1/plan/whatif", Scope.READ),
        ("POST", "/v1/tasks", Scope.SUBMIT),
        ("POST", "/v1/tasks/a/reshape", Scope.SUBMIT),
        ("POST", "/v1/nodes/n1/enroll", Scope.OPERATE),
        ("POST", "/v1/faults", Scope.OPERATE),
        ("DELETE", "/v1/state", Scope.OPERATE),
    ],
)
def test_request_needs_scope_of_route(method: str, path: str, scope: Scope | None) -> None:
    assert scope_of(method, path) == scope


def test_access_reloads_token_list_and_keeps_last_valid(tmp_path: Path) -> None:
    path = listed(tmp_path / "tokens")
    access = Access(path=path)

    def may(token: str) -> bool:
        try:
            return bool(access.grant("GET", "/v1/state", token, "10.0.0.1", 0.0).name)
        except AccessDenied:
            return False

    new = make_token()
    assert may(READS) and not may(new) and not may("")
    listed(path, line_of("new", [Scope.READ], new))
    assert may(new)
    path.write_text("nonsense\n")
    assert may(new) and "line 1: expected NAME" in access.alarms()[0]
    path.unlink()
    assert may(new) and "No such file" in access.alarms()[0]
    listed(path)
    assert may(READS) and not may(new) and not access.alarms()


def test_access_never_throttles_valid_token(tmp_path: Path) -> None:
    """docs/operate/security.md says so."""
    access = Access(path=listed(tmp_path / "tokens"))
    assert {access.grant("POST", "/v1/plan/whatif", READS, "10.0.0.1", 0.0).name for _ in range(1000)} == {"ci"}


# --- refusals -------------------------------------------------------------------------------------


def test_access_logs_and_throttles_wrong_tokens(caplog: pytest.LogCaptureFixture) -> None:
    access, now_s = Access("s3cret"), 100.0

    def asked(token: str, address: str = "10.0.0.1") -> int:
        try:
            access.grant("GET", "/v1/state", token, address, now_s)
        except AccessDenied as error:
            assert token not in str(error)
            return error.status
        return 200

    with caplog.at_level(logging.WARNING, "unicrond"):
        assert [asked("guess") for _ in range(FAILURES_MAX + 1)] == [401] * FAILURES_MAX + [429]
        assert [record.getMessage() for record in caplog.records] == [
            "API: refused 10.0.0.1 GET /v1/state: wrong token"
        ]
        now_s += SAY_EVERY_S
        assert asked("guess") == 429
        assert f"({FAILURES_MAX + 1} refused)" in caplog.records[-1].getMessage()
    assert "guess" not in caplog.text
    assert asked("s3cret") == 200 and asked("guess", "10.0.0.2") == 401
    now_s += WINDOW_S
    assert asked("guess") == 401


# --- over HTTP ------------------------------------------------------------------------------------


async def statuses(served: Served, token: str) -> dict[str, int]:
    asked = {"read": ("GET", "/v1/state"), "metrics": ("GET", "/metrics"), "health": ("GET", "/healthz")}
    asked |= {"submit": ("POST", "/v1/tasks/big/cancel"), "operate": ("POST", "/v1/nodes/n1/cordon")}
    found = {}
    async with aiohttp.ClientSession(served.url, headers=bearer(token)) as http:
        for name, (method, path) in asked.items():
            async with http.request(method, path, json={} if method == "POST" else None) as response:
                found[name] = response.status
    return found


async def test_scope_opens_its_routes_and_event_names_caller(tmp_path: Path) -> None:
    config = Config(api=ApiConfig(tokens_file=str(listed(tmp_path / "tokens"))))
    async with serving(tmp_path, config=config) as served:
        shut = {"read": 403, "metrics": 403, "health": 200, "submit": 403, "operate": 403}
        assert await statuses(served, READS) == shut | {"read": 200}
        assert await statuses(served, SCRAPES) == shut | {"metrics": 200}
        assert await statuses(served, OPERATES) == shut | {"operate": 202}
        assert await statuses(served, SUBMITS) == shut | {"read": 200, "submit": 202}
        await served.until(v.TaskCancelled)
        asked = {
            type(each.envelope.event): each.envelope.event.requester
            async for each in served.log.read(until_seq=await served.log.last_seq())
            if isinstance(each.envelope.event, v.NodeCordoned | v.TaskCancelled)  # type: ignore[union-attr]
        }
    assert asked == {v.NodeCordoned: "bob", v.TaskCancelled: "ann"}


# --- people ---------------------------------------------------------------------------------------


def test_token_command_creates_and_lists_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens, config, out = listed(tmp_path / "tokens"), tmp_path / "unicron.yaml", tmp_path / "new.token"
    config.write_text(f"api: {{tokens_file: {tokens}}}\n")
    words = ["token", "new", "--scopes", "read,operate", "--out", str(out)]
    assert main([*words, "--config", str(config)]) == 0
    assert out.stat().st_mode & 0o777 == 0o600
    grant = Access(path=tokens).grant("POST", "/v1/faults", out.read_text().strip(), "?", 0.0)
    assert (grant.name, grant.scopes) == ("new", {Scope.READ, Scope.OPERATE})
    assert main([*words, "--config", str(config)]) == 2, "the name is there"
    out.unlink()
    assert main(words) == 0
    assert "Add to api.tokens_file:\nnew operate,read " in capsys.readouterr().out
    assert main(["token", "new", "--scopes", "write"]) == 2


def test_public_api_requires_readable_tokens(tmp_path: Path) -> None:
    tokens = listed(tmp_path / "tokens")
    check(Config(api=ApiConfig(host="0.0.0.0", tokens_file=str(tokens))), "file")
    tokens.write_text("nonsense")
    check(Config(api=ApiConfig(host="0.0.0.0")), "file")  # the head makes one
    for api in (ApiConfig(host="0.0.0.0"), ApiConfig(tokens_file=str(tokens)), ApiConfig(tokens_file="/nowhere")):
        with pytest.raises(ConfigError, match=r"api\.(host|tokens_file)"):
            check(Config(api=api, auth="off"), "file")


def test_client_takes_token_from_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").write_text("one\n")
    (tmp_path / "given").write_text("other\n")
    monkeypatch.setenv("UNICRON_TOKEN_FILE", str(tmp_path / "mine"))
    assert (token_in(None), token_in(tmp_path / "given")) == ("one", "other")


def test_token_file_changes_without_restart(tmp_path: Path) -> None:
    """Two tokens side by side, one at a time; what cannot be read changes nothing, and the own one is made anew."""
    path = tmp_path / "token"
    path.write_text("old\n")
    access = Access(token_file=path)

    def opens(token: str) -> bool:
        try:
            return access.grant("POST", "/v1/tasks", token, "10.0.0.1", 0.0).name == "token"
        except AccessDenied:
            return False

    assert opens("old") and not opens("new")
    path.write_text("new\nold\n")
    assert opens("old") and opens("new")
    path.write_text("new\n")
    assert opens("new") and not opens("old")
    path.write_text("\n")
    assert opens("new") and [alarm.name for alarm in access.alarms()] == ["tokens-unreadable"]
    local = tmp_path / "operator.token"
    access = Access(local=local, token_file=local)
    before = local.read_text().strip()
    assert opens(before)
    local.unlink()
    assert not opens(before) and opens(local.read_text().strip()) and access.alarms() == []
