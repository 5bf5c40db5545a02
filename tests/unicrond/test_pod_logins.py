"""A pod of Kubernetes exchanges its token for its node's key, and for nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.token_reviews import AGENT, POD_TOKEN, TokenReviews, account_of_head, extra, review
from tests.unicrond.serving import Served, serving
from unicrond.agents.shell import cli
from unicrond.core.state.alarms import Alarm
from unicrond.ctl.client import ApiRefused, Client
from unicrond.events import vocabulary as v
from unicrond.events.trust.keys import make_key, read_key
from unicrond.intake.config import Config, ConfigError, NatsConfig, check
from unicrond.intake.pod_logins import NodeOfPod, PodLogins
from unicrond.service.api import login_api
from unicrond.service.api.access import FAILURES_MAX
from unicrond.service.trust.pod_tokens import Pod, PodRefused, PodTokens


@pytest.fixture
async def reviews() -> AsyncIterator[TokenReviews]:
    async with TokenReviews().serve() as server:
        yield server


@pytest.fixture
def settings(reviews: TokenReviews, tmp_path: Path) -> PodLogins:
    account = account_of_head(tmp_path / "account")
    return PodLogins(service_account="unicron-agent", url=reviews.url, account_dir=str(account))


@pytest.mark.parametrize(
    ("kind", "node"), [("machine", "gpu1-example"), ("pod", "unicron-agent-x7f2k"), ("index", "unicron-agent")]
)
async def test_pod_is_the_node_that_its_token_says(settings: PodLogins, kind: NodeOfPod, node: str) -> None:
    pod = await PodTokens(settings).pod_of(POD_TOKEN)
    assert pod == Pod("unicron-agent-x7f2k", "gpu1.example") and pod.node(kind) == node


@pytest.mark.parametrize(
    ("answer", "status", "problem"),
    [
        (None, 401, "Kubernetes does not take it: .invalid bearer token."),
        (review(authenticated=False), 401, "it is not for audience unicrond"),
        (review(audiences=["api"]), 401, "it is not for audience unicrond"),
        (review(audiences=None), 401, "it is not for audience unicrond"),
        ({}, 401, "it is not for audience unicrond"),
        (review(user={"username": "admin", "extra": extra()}), 403, f"of admin; pods of {AGENT} alone get logins"),
        (review(user={"username": AGENT.replace("training", "other"), "extra": extra()}), 403, "of system:.*other"),
        (review(user={"username": AGENT, "extra": {}}), 403, "names no pod or no machine"),
        (review(user={"username": AGENT, "extra": extra(machine="")}), 403, "names no pod or no machine"),
        (review(user={"username": AGENT, "extra": {"a": "b"}}), 503, "answer cannot be read"),
        ({"authenticated": "yes"}, 503, "answer cannot be read"),
    ],
)
async def test_token_of_no_such_pod_is_refused(
    reviews: TokenReviews, settings: PodLogins, answer: dict[str, Any] | None, status: int, problem: str
) -> None:
    reviews.answers = {POD_TOKEN: answer} if answer is not None else {}
    with pytest.raises(PodRefused, match=problem) as refusal:
        await PodTokens(settings).pod_of(POD_TOKEN)
    assert refusal.value.status == status


async def test_api_server_that_cannot_say_is_asked_later(reviews: TokenReviews, settings: PodLogins) -> None:
    async def problem() -> str:
        with pytest.raises(PodRefused) as refusal:
            await PodTokens(settings).pod_of(POD_TOKEN)
        assert refusal.value.status == 503
        return str(refusal.value)

    reviews.refuses = 403
    assert "tokenreviews: 403 not you" in await problem()
    (Path(settings.account_dir) / "token").unlink()
    assert "cannot read" in await problem()
    with pytest.raises(PodRefused, match="missing or too long"):
        await PodTokens(settings).pod_of("x" * 20_000)


async def test_pod_gets_no_key_while_its_node_floods(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fuse ended its login; the pod's token stays valid, and is no person's word."""
    floods = [Alarm("node-floods", "node gpu1-example flooded the log", "gpu1-example")]
    monkeypatch.setattr(served.coordinator, "standing_alarms", lambda: floods)
    client = Client(served.url, POD_TOKEN)
    with pytest.raises(ApiRefused, match="a person lets it in again: unicrond enroll gpu1-example"):
        await asyncio.to_thread(client._object, "POST", "/v1/pod-logins", body={"key": make_key("agent-p").user.key})
    assert not served.coordinator.state.logins
    monkeypatch.undo()
    key = make_key("agent-p").user.key
    await asyncio.to_thread(client._object, "POST", "/v1/pod-logins", body={"key": key})
    await served.until(v.NodeEnrolled)
    monkeypatch.setattr(served.coordinator, "standing_alarms", lambda: floods)
    answer = await asyncio.to_thread(client._object, "POST", "/v1/pod-logins", body={"key": key})
    assert answer["node"] == "gpu1-example", "the key that it has stays its own as long as its login stands"


@pytest.fixture
async def served(settings: PodLogins, tmp_path: Path) -> AsyncIterator[Served]:
    config = Config(nats=NatsConfig(auth="keys"), pod_logins=settings)
    async with serving(tmp_path, token="people's", config=config) as server:
        yield server


def exchange_token(served: Served, directory: Path, token: str = POD_TOKEN) -> tuple[int, Path]:
    """Run the init container; return its exit code and where the key is to be."""
    (directory / "token").write_text(f"{token}\n")
    key = directory / "keys" / "agent.key"
    words = ["--pod-login", served.url, "--pod-token", str(directory / "token"), "--key", str(key), "--slots", "8"]
    return cli.main(words), key


async def test_init_container_gets_the_key_of_its_node_once(
    served: Served, reviews: TokenReviews, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, path = await asyncio.to_thread(exchange_token, served, tmp_path)
    key = read_key(path)
    assert (code, key.login, path.stat().st_mode & 0o777) == (0, "agent-gpu1-example", 0o600)
    await served.until(v.NodeEnrolled)
    login = served.coordinator.state.logins["gpu1-example"]
    assert login.key == key.user.key and login.expires_us, "a key that is not used ends"
    assert (await asyncio.to_thread(exchange_token, served, tmp_path))[0] == 0
    assert reviews.reviews == 1 and "holds the key of agent-gpu1-example already" in capsys.readouterr().out


async def test_pod_gets_a_new_key_once_in_a_while_and_its_own_again(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each new key is an entry of the log, and a reload of the NATS server."""
    client = Client(served.url, POD_TOKEN)
    first, second = (make_key("agent-pod").user.key for _ in range(2))

    async def request(key: str) -> dict[str, Any]:
        return await asyncio.to_thread(client._object, "POST", "/v1/pod-logins", body={"key": key})

    enrolment = await request(first)
    await served.until(v.NodeEnrolled)
    last_seq = served.coordinator.state.seq
    assert "seq" in enrolment and await request(first) == {"node": "gpu1-example", "pem": ""}
    with pytest.raises(ApiRefused, match="gpu1-example got a key a moment ago; try again in 10 s"):
        await request(second)
    assert served.coordinator.state.seq == last_seq
    monkeypatch.setattr(login_api, "POD_LOGIN_EVERY_S", 0.0)
    await request(second)
    await served.until(v.NodeEnrolled, after=last_seq)
    assert served.coordinator.state.logins["gpu1-example"].key == second


async def test_init_container_waits_for_an_api_server_that_is_away(
    served: Served, reviews: TokenReviews, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reviews.refuses = 500
    exchange = asyncio.create_task(asyncio.to_thread(exchange_token, served, tmp_path))
    for _ in range(2):
        await asyncio.wait_for(reviews.arrivals.get(), 10)
    reviews.refuses = 0
    code, path = await exchange
    assert code == 0 and read_key(path).login == "agent-gpu1-example"
    assert capsys.readouterr().err.count("no key yet: POST /apis/authentication") == 1, "each reason once"


async def test_pods_token_opens_nothing_else(served: Served) -> None:
    client = Client(served.url, POD_TOKEN)
    for attempt in (client.state, lambda: client.enroll("n1", "U" + "A" * 55, 1), lambda: client.cancel("big", "")):
        with pytest.raises(ApiRefused, match="token: missing or wrong"):
            await asyncio.to_thread(attempt)


async def test_refusal_ends_the_init_container_with_one_line(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, path = await asyncio.to_thread(exchange_token, served, tmp_path, "guess")
    assert code == 1 and not path.exists()
    assert "--pod-login: token: Kubernetes does not take it" in capsys.readouterr().err


async def test_wrong_tokens_do_not_reach_the_api_server_for_ever(served: Served, reviews: TokenReviews) -> None:
    client = Client(served.url, "guess")
    problems = []
    for _ in range(FAILURES_MAX + 5):
        with pytest.raises(ApiRefused) as refusal:
            await asyncio.to_thread(client._object, "POST", "/v1/pod-logins", body={"key": "U" + "A" * 55})
        problems.append(refusal.value.status)
    assert problems == [401] * (FAILURES_MAX + 1) + [429] * 4 and reviews.reviews == FAILURES_MAX + 1


async def test_head_that_gives_pods_nothing_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path, token="people's", config=Config(nats=NatsConfig(auth="keys"))) as served:
        with pytest.raises(ApiRefused, match="gives pods no logins; set pod_logins"):
            await asyncio.to_thread(Client(served.url, POD_TOKEN)._object, "POST", "/v1/pod-logins", body={})


@pytest.mark.parametrize(
    "words",
    [
        ["--pod-login", "unicron-head:7470", "--pod-token", "t", "--key", "k"],
        ["--pod-login", "http://h:1", "--pod-token", "t"],
        ["--pod-login", "http://h:1", "--key", "t"],
    ],
)
def test_bad_usage_of_pod_login_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main(words)
    except SystemExit as ending:
        code = int(str(ending.code))
    assert code == 2 and capsys.readouterr().err.count("\n") == 1


def test_servers_of_ones_own_give_pods_no_logins() -> None:
    nats = NatsConfig(url="nats://n:4222", auth="keys")
    with pytest.raises(ConfigError, match="service_account: is for an embedded server"):
        check(Config(nats=nats, pod_logins=PodLogins(service_account="a")), "unicron.yaml")
