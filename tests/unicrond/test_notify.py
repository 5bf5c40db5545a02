"""Being told: the rules over logs, one message per matter, and real receivers on loopback."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.unicrond.cluster import MiniCluster
from tests.unicrond.stories import trained
from unicrond.core.replayer import LogStep, steps
from unicrond.core.state.state import ClusterState
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import Entry, QuarantinedMessage
from unicrond.intake.config import Config, ConfigError, check
from unicrond.intake.notify import Destination, Notify
from unicrond.service.export.notification_transports import Notification, Undelivered, deliver
from unicrond.service.export.notifier import Notifier
from unicrond.service.head.exporters import Exporters
from unicrond.views.notifications import Notice, standing, step_notices, taken_over

SEV1 = Notice("i7", "sev1", "error", "SEV1: node_lost on n1", "it is away", ("unicron-replay story incident i7",))


def notices(log: list[Entry]) -> list[Notice]:
    return [notice for step in steps(log) for notice in step_notices(step)]


def lost(cluster: MiniCluster, name: str) -> None:
    cluster.kill_host(cluster.hosts[name])
    cluster.lose(cluster.hosts[name])
    cluster.run()


def test_lost_node_is_one_notice_from_loss_to_return() -> None:
    cluster = trained(2)
    lost(cluster, "n1")
    of_it = [notice for notice in notices(list(cluster.log)) if notice.rule == "sev1"]
    assert [notice.is_over for notice in of_it] == [False, True]
    assert len({notice.key for notice in of_it}) == 1
    assert "n1" in of_it[0].title and "unicron-replay story" in of_it[0].commands[0]
    assert "micro-batches repeated" in of_it[1].text


def test_spare_notice_lasts_while_spares_are_used_up() -> None:
    cluster = trained(2)
    assert standing(cluster.state, cluster.now_us, 0, []) == []
    lost(cluster, "n1")
    (notice,) = standing(cluster.state, cluster.now_us, 0, [])
    assert notice.rule == "no_spare" and "out: n1" in notice.text
    cluster.add_host("n1")
    cluster.run()
    assert standing(cluster.state, cluster.now_us, 0, []) == []


def test_notices_cover_failed_tasks_and_isolated_nodes() -> None:
    cluster = trained(2)
    term = cluster.state.term
    cluster.append(v.NodeIsolated(node="n2", until_us=None, reason="XID 79"), "coordinator", term)
    cluster.append(v.TaskFailed(task="big", reason="struck 8 times"), "coordinator", term)
    told = {notice.rule: notice for notice in notices(list(cluster.log))}
    assert told["isolated"].text == "XID 79" and told["task_failed"].urgency == "critical"
    assert told["task_failed"].text == "struck 8 times"


def test_notices_cover_stalls_alarms_and_takeovers() -> None:
    cluster = trained(2)
    cluster.train("big")
    cluster.train("small")
    now_us = cluster.state.now_us
    assert standing(cluster.state, now_us + 500_000_000, 600_000_000, []) == []
    late = standing(cluster.state, now_us + 700_000_000, 600_000_000, ["disk: 3 MiB free"])
    assert [notice.key for notice in late] == ["progress:big", "progress:small", "trouble:disk:  MiB free"]
    cluster.take_over()
    assert taken_over(cluster.state)[0].rule == "takeover" and taken_over(ClusterState(term=1)) == []


# --- how often -----------------------------------------------------------------------------------


class Hands:
    """A clock that is set, and a courier that notes."""

    def __init__(self) -> None:
        self.now_us = 0
        self.got: list[Notification] = []

    def monotonic_us(self) -> int:
        return self.now_us

    def wall_us(self) -> int:
        return self.now_us

    async def take(self, _: Destination, message: Notification) -> None:
        self.got.append(message)


async def until(what: Callable[[], object]) -> None:
    for _ in range(500):
        if what():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it never came")


#: The body of /healthz.
CALM: dict[str, Any] = {"status": "live", "trouble": "", "alarms": []}


def notifier(hands: Hands, config: Notify | None = None, courier: Any = None) -> Notifier:
    config = config or Notify(to=(Destination(kind="command", argv=("x",)),))
    return Notifier(config, lambda: True, hands, courier or hands.take, "here")  # type: ignore[arg-type]


def sent(one: Notifier) -> list[Notification]:
    messages = [message for queue in one._queues for message in queue]
    for queue in one._queues:
        queue.clear()
    return messages


def test_notifier_sends_one_message_per_matter_and_interval() -> None:
    hands = Hands()
    one = notifier(hands)
    one._take(SEV1)
    one._take(SEV1._replace(title="SEV1: more of it"))
    one.look(CALM)
    assert sent(one) == [], "what belongs together is waited for"
    hands.now_us += 4_000_000
    one.look(CALM)
    (message,) = sent(one)
    assert len(message.notices) == 2 and "and 1 before it" in message.title and "go on with" in message.body
    for _ in range(5):
        one._take(SEV1)
        hands.now_us += 4_000_000
        one.look(CALM)
    assert sent(one) == [], "it was told"
    one._take(SEV1._replace(is_over=True, title="healed"))
    hands.now_us += 4_000_000
    one.look(CALM)
    assert [message.last.is_over for message in sent(one)] == [True]
    one._take(SEV1)
    hands.now_us += 4_000_000
    one.look(CALM)
    assert len(sent(one)) == 1, "it is a new matter after the old one was over"


def test_notifier_hides_secrets() -> None:
    hands = Hands()
    config = Notify(to=(Destination(kind="command", argv=("x",)),))
    hide = lambda _, text: text.replace("hunter2", "***")  # noqa: E731
    one = Notifier(config, lambda: True, hands, hands.take, hide=hide)  # type: ignore[arg-type]
    one._take(SEV1._replace(title="wrong password hunter2", text="hunter2 was refused"))
    hands.now_us += 4_000_000
    one.look(CALM)
    (message,) = sent(one)
    assert "hunter2" not in message.title + message.body + json.dumps(message.to_json())


def test_notifier_skips_end_of_unsent_matter() -> None:
    hands = Hands()
    one = notifier(hands)
    one._take(SEV1._replace(is_over=True))
    hands.now_us += 4_000_000
    one.look(CALM)
    assert sent(one) == []


def test_notifier_reports_start_and_end_of_trouble() -> None:
    hands, lines = Hands(), [{"alarm": "volume-full:state", "text": "disk: 3 MiB free"}]
    one, condition = notifier(hands), CALM | {"alarms": lines}
    for line in ("disk: 3 MiB free", "disk: 2 MiB free"):
        lines[:] = [{"alarm": "volume-full:state", "text": line}]
        one.look(condition)
        hands.now_us += 4_000_000
    one.look(condition)
    assert len(sent(one)) == 1
    lines.clear()
    one.look(condition)
    hands.now_us += 4_000_000
    one.look(condition)
    assert [message.last.is_over for message in sent(one)] == [True]


def test_only_leading_head_notifies() -> None:
    hands, leads = Hands(), False
    state = ClusterState(term=3)
    lines = [{"alarm": "volume-full:state", "text": "disk: 3 MiB free"}]
    condition = {"status": "standby", "trouble": "", "alarms": lines}
    config = Notify(to=(Destination(kind="command", argv=("x",)),))
    one = Notifier(config, lambda: leads, hands, hands.take)  # type: ignore[arg-type]
    one.feed(LogStep(state, QuarantinedMessage(9, 0, "unicron.v1.obs.n1.X", "not JSON", 0), state))
    one._take(SEV1)
    for _ in range(2):
        one.look(condition)
        hands.now_us += 4_000_000
    assert sent(one) == [], "another leads"
    leads = True
    for _ in range(2):
        one.look(condition)
        hands.now_us += 4_000_000
    assert sorted(message.last.rule for message in sent(one)) == ["takeover", "trouble"]


def test_head_views_collect_notices_only_while_leading() -> None:
    cluster, leads = trained(2), False
    lost(cluster, "n1")
    chain = list(steps(cluster.log))
    exporters = Exporters(Config(notify=Notify(to=(Destination(kind="command", argv=("x",)),))), lambda: leads)
    assert exporters._notifier is not None
    for step in chain:
        exporters.views.feed(step)
    assert not exporters._notifier._grouped, "another head leads"
    leads = True
    for step in chain:
        exporters.views.feed(step)
    assert {notice.rule for _, notices in exporters._notifier._grouped.values() for notice in notices} == {"sev1"}
    assert exporters.views.alarms() == [] and exporters.views.goodput.totals is not None


async def test_notifier_retries_message_and_raises_alarm() -> None:
    hands, tries = Hands(), []

    async def courier(_: Destination, message: Notification) -> None:
        tries.append(message)
        if len(tries) < 2:
            raise Undelivered("HTTP status 503")

    one = notifier(hands, Notify(to=(Destination(kind="command", argv=("x",)),), group_s=0.0), courier)
    one._take(SEV1)
    running = asyncio.create_task(one.run(lambda: CALM))
    async with asyncio.timeout(60):
        await until(one.alarms)
        assert "command cannot be reached: HTTP status 503" in one.alarms()[0]
        await until(lambda: not one.alarms())
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert len(tries) == 2


# --- receivers -----------------------------------------------------------------------------------


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[str, list[Any]]]:
    """An HTTP server that takes JSON."""
    got: list[Any] = []

    async def take(request: web.Request) -> web.Response:
        got.append(await request.json() if request.can_read_body else request.path)
        return web.Response(status=500 if request.path == "/broken" else 200)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", take)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", got
    finally:
        await runner.cleanup()


MESSAGE = Notification("here", (SEV1,))


async def test_notifier_posts_to_webhook_slack_and_pagerduty(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret-key\n")
    async with listening() as (url, got):
        (tmp_path / "url").write_text(f"{url}/slack\n")
        await deliver(Destination(kind="webhook", url=f"{url}/hook"), MESSAGE)
        await deliver(Destination(kind="slack", url_file=str(tmp_path / "url")), MESSAGE)
        pager = Destination(kind="pagerduty", url=f"{url}/pager", key_file=str(tmp_path / "key"))
        await deliver(pager, MESSAGE)
        await deliver(pager, Notification("here", (SEV1._replace(is_over=True),)))
        with pytest.raises(Undelivered, match="HTTP status 500"):
            await deliver(Destination(kind="webhook", url=f"{url}/broken"), MESSAGE)
    hook, slack, trigger, resolve, _ = got
    assert hook["title"] == SEV1.title and hook["key"] == "i7" and hook["commands"] == list(SEV1.commands)
    assert SEV1.title in slack["text"]
    assert trigger["routing_key"] == "secret-key" and trigger["event_action"] == "trigger"
    assert trigger["payload"]["severity"] == "error" and trigger["dedup_key"] == resolve["dedup_key"] == "here/i7"
    assert resolve["event_action"] == "resolve"
    with pytest.raises(Undelivered) as away:
        await deliver(Destination(kind="webhook", url=f"{url}/hook?token=secret"), MESSAGE)
    assert "secret" not in str(away.value)


async def test_notifier_sends_email() -> None:
    """A receiver that speaks as much SMTP as it takes."""
    mail: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):  # though the test has ended meanwhile
            writer.write(b"220 here\r\n")
            while line := (await reader.readline()).decode().strip():
                line = line.upper()
                if line == "DATA":
                    writer.write(b"354 go on\r\n")
                    while (text := (await reader.readline()).decode().rstrip()) != ".":
                        mail.append(text)
                writer.write(b"221 bye\r\n" if line == "QUIT" else b"250 ok\r\n")
                if line == "QUIT":
                    break

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    to = Destination(
        kind="email", server=f"127.0.0.1:{port}", sender="unicron@here", recipients=("ops@here",), starttls=False
    )
    async with server:
        await deliver(to, MESSAGE)
    text = "\n".join(mail)
    assert "Subject: [here] SEV1: node_lost on n1" in text and "To: ops@here" in text and "it is away" in text


async def test_notifier_command_gets_message_and_time_limit(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = f"import os, sys; open({str(out)!r}, 'w').write(os.environ['UNICRON_RULE'] + '\\n' + sys.stdin.read())"
    await deliver(Destination(kind="command", argv=(sys.executable, "-c", code)), MESSAGE)
    rule, _, told = out.read_text().partition("\n")
    assert rule == "sev1" and json.loads(told)["key"] == "i7"
    with pytest.raises(Undelivered, match="exit code 3"):
        await deliver(Destination(kind="command", argv=("sh", "-c", "exit 3")), MESSAGE)
    with pytest.raises(Undelivered, match="No such file"):
        await deliver(Destination(kind="command", argv=(str(tmp_path / "nothing"),)), MESSAGE)


async def test_heartbeat_ping_stops_on_trouble() -> None:
    async with listening() as (url, got):
        status, asked = "live", 0

        def told() -> dict[str, object]:
            nonlocal asked
            asked += 1
            return {"status": status, "trouble": "", "alarms": []}

        config = Notify(heartbeat_url=f"{url}/ping", heartbeat_s=0.02)
        one = Notifier(config, lambda: True)
        running = asyncio.create_task(one.run(told))
        async with asyncio.timeout(60):
            await until(lambda: len(got) > 2)
            status, seen, asked = "log takes nothing", len(got), 0
            await until(lambda: asked > 5)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert got[0] == "/ping" and len(got) <= seen + 1


@pytest.mark.parametrize(
    ("destination", "wrong"),
    [
        (Destination(kind="slack"), r"notify.to\[0\].url: slack needs url or url_file"),
        (Destination(kind="email", server="mail"), "sender: email needs sender"),
        (Destination(kind="email", server="mail", sender="a", recipients=("b",)), "server: 'mail' is not HOST:PORT"),
        (Destination(kind="webhook", url="ftp://x"), "is not an http address"),
        (Destination(kind="pagerduty", key_file="/nowhere/key"), "key_file: /nowhere/key is not a file"),
    ],
)
def test_configuration_refuses_bad_destination_by_field(destination: Destination, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        check(Config(notify=Notify(to=(destination,))), "unicron.yaml")
