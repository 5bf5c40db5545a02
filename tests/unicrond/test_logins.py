"""Who may log in: by requests in the log, as configured, and what the coordinator prepares for agents with keys."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.unicrond.cluster import MiniCluster
from unicrond.commands.cli import main
from unicrond.core.fold import fold
from unicrond.core.state.state import ClusterState, NodeLogin, TaskStatus
from unicrond.events import vocabulary as v
from unicrond.events.log.subjects import EVENT_STREAM, feed_subjects
from unicrond.events.nats.commands import NatsCommandFeed, filters
from unicrond.events.nats.connection import Connection
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import api, consumers_of
from unicrond.events.trust.keys import BadKey, load_or_create_key, make_key, read_key, rewrite_key, write_key
from unicrond.events.trust.logins import BadLogin, Role, User
from unicrond.events.wire.envelope import Envelope, RecordedEvent
from unicrond.intake.config import ApiConfig, Config, ConfigError, NatsConfig, check, login_as
from unicrond.service.event_log import consumers as consumers_module
from unicrond.service.event_log.consumers import Consumers, following
from unicrond.service.trust.node_logins import RoleLogins, expired, migration_line, next_change_us, remember, remembered

SPEC = v.TaskSpec(name="a")
KEY, OTHER, THIRD = (make_key("agent-n1").user.key for _ in range(3))


class Log:
    """Folds what is asked for, and what a node says."""

    def __init__(self) -> None:
        self.state = ClusterState()

    def say(self, event: v.AnyEvent, producer: str = "api") -> ClusterState:
        seq = self.state.seq + 1
        envelope = Envelope(producer=producer, boot=1, number=seq, observed_at_us=seq, event=event)
        self.state = fold(self.state, RecordedEvent(seq, seq, envelope))
        return self.state


def enrolled(node: str = "n1", key: str = KEY, expires_us: int = 0) -> v.NodeEnrolled:
    return v.NodeEnrolled(node=node, key=key, expires_us=expires_us)


def joined(node: str) -> v.NodeJoined:
    store = v.StoreAddress(host="127.0.0.1", port=1)
    return v.NodeJoined(node=node, address="127.0.0.1", slots=1, store=store, workers=(), version="1", agent_boot=1)


# --- the log --------------------------------------------------------------------------------------


def test_login_of_node_is_enrolled_used_and_revoked() -> None:
    log = Log()
    assert log.say(enrolled(expires_us=7)).logins == {"n1": NodeLogin(key=KEY, expires_us=7)}
    assert log.say(joined("n1"), "n1").logins["n1"].is_used
    again = log.say(enrolled(expires_us=9)).logins["n1"]
    assert again.is_used and expired({"n1": again}, 10) == [], "who is logged in with it does not join again"
    assert log.say(enrolled(key=OTHER)).logins == {"n1": NodeLogin(key=OTHER)}, "another key is not used yet"
    assert log.say(v.NodeRevoked(node="n1", reason="gone")).logins == {}
    assert log.say(v.NodeRevoked(node="n1", reason="again")).quarantined_messages == 0


def test_key_before_holds_beside_new_one_for_its_time() -> None:
    """A login that is used stays so: its agent does not join again. A pod's ends at once (previous_until_us 0)."""
    log = Log()
    log.say(enrolled())
    log.say(joined("n1"), "n1")
    login = log.say(v.NodeEnrolled(node="n1", key=OTHER, expires_us=9, previous_until_us=50)).logins["n1"]
    assert login.keys(49) == (OTHER, KEY) and login.keys(50) == (OTHER,)
    assert next_change_us({"n1": login}, 10) == 50 and expired({"n1": login}, 60) == []
    assert "is the key of node n1" in log.say(enrolled("n2")).refusals[-1].reason, "it holds still"
    third = log.say(v.NodeEnrolled(node="n1", key=THIRD, expires_us=9, previous_until_us=70)).logins["n1"]
    assert third.keys(49) == (THIRD, OTHER, KEY), "who enrolls twice does not end the key in use"
    assert log.say(enrolled(key=KEY)).logins["n1"].keys(0) == (KEY,)


def test_key_of_role_before_holds_for_a_minute(tmp_path: Path) -> None:
    path, old, new = tmp_path / "api.key", make_key("api"), make_key("api")
    write_key(path, old)
    roles = RoleLogins(tmp_path, [old.user])
    assert roles.users(0) == [old.user]
    rewrite_key(path, make_key("reader"))
    assert roles.users(0) == [old.user], "a key of another login is none of this one"
    rewrite_key(path, new)
    assert roles.users(0) == [new.user, old.user]
    assert roles.users(59_999_999) == [new.user, old.user] and roles.users(60_000_000) == [new.user]
    rewrite_key(path, old)
    rewrite_key(path, new)
    assert roles.users(70_000_000) == [new.user]


@pytest.mark.parametrize(
    ("event", "why"), [(enrolled("n2"), "is the key of node n1"), (enrolled("coordinator", OTHER), "not a name")]
)
def test_fold_refuses_bad_login_request(event: v.NodeEnrolled, why: str) -> None:
    log = Log()
    before = log.say(enrolled()).logins
    after = log.say(event)
    assert after.logins == before
    assert why in after.refusals[-1].reason


def test_unused_login_expires() -> None:
    logins = {
        "in-time": NodeLogin(key=KEY, expires_us=100),
        "late": NodeLogin(key=KEY, expires_us=50),
        "used": NodeLogin(key=KEY, expires_us=50, is_used=True),
        "ever": NodeLogin(key=KEY),
    }
    assert expired(logins, 60) == ["late"]


def test_migration_alarm_names_nodes_without_key() -> None:
    log = Log()
    assert "enroll the nodes, then set nats.auth" in migration_line(log.state), "no node is there yet"
    log.say(joined("n1"), "n1")
    assert "enroll the 1 node without a key (n1)" in migration_line(log.state)
    log.say(enrolled())
    assert "set nats.auth to keys" in migration_line(log.state)


def test_login_list_survives_restart(tmp_path: Path) -> None:
    path = tmp_path / "nodes"
    assert remembered(path) == []
    users = [User("agent-n1", KEY), User("agent-n2", OTHER)]
    remember(path, users)
    assert remembered(path) == users


# --- keys in files --------------------------------------------------------------------------------


def test_key_file_is_private_to_owner(tmp_path: Path) -> None:
    path = tmp_path / "n1.key"
    key = make_key("agent-n1")
    write_key(path, key)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_key(path) == key
    with pytest.raises(FileExistsError):
        write_key(path, key)
    path.chmod(0o640)
    with pytest.raises(BadKey, match="others can read"):
        read_key(path)


def test_key_reader_refuses_links_and_other_files(tmp_path: Path) -> None:
    write_key(tmp_path / "n1.key", make_key("agent-n1"))
    (tmp_path / "link").symlink_to(tmp_path / "n1.key")
    os.mkfifo(tmp_path / "fifo", 0o600)
    (tmp_path / "text").write_text("agent-n1\nSUABC\n")
    (tmp_path / "text").chmod(0o600)
    for name in ("link", "fifo", "text", "missing"):
        with pytest.raises(BadKey):
            read_key(tmp_path / name)
    with pytest.raises(BadLogin):
        make_key("agent-coordinator")


# --- the configuration ----------------------------------------------------------------------------


def given(**nats: object) -> Config:
    return Config(nats=NatsConfig(**nats))  # type: ignore[arg-type]


def test_configuration_selects_login_method(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("secret\n")
    shared = {"user": "u", "password_file": str(password)}
    wide = {"host": "0.0.0.0"}
    assert given().has_keys, "on loopback too"
    assert not replace(given(), auth="off").has_keys and replace(given(**wide), auth="off").has_keys
    assert given(**wide).has_keys and given(**wide).nats.shared is None
    for migrating in (given(**wide, **shared), given(**shared)):
        assert (
            migrating.has_keys and migrating.nats.shared is not None and migrating.nats.shared.passwords() == ["secret"]
        )
    assert given(**wide, **shared, auth="keys").nats.shared is None
    assert not given(url="nats://a:1", **shared).has_keys
    assert login_as(given(url="nats://a:1", auth="keys", keys="/k"), Role.API).key == Path("/k/api.key")


@pytest.mark.parametrize(
    "nats", [{"auth": "migrate"}, {"user": "u"}, {"url": "nats://a:1", "auth": "migrate"}, {"url": "nats://a:1"}]
)
def test_configuration_refuses_bad_logins(nats: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"nats\.(auth|user|url: no login)"):
        check(given(**nats), "file")


def test_external_server_without_login_is_said_to_be_open() -> None:
    check(given(url="nats://user:secret@a:1"), "file")
    check(replace(given(url="nats://a:1"), auth="off"), "file")


@pytest.mark.parametrize(
    ("nats", "api", "doors"),
    [
        ({}, {}, "write the log and order by the API"),
        ({}, {"token_file": "t"}, "write the log"),
        ({"auth": "keys"}, {}, "order by the API"),
        ({"host": "0.0.0.0"}, {"tokens_file": "t"}, ""),
    ],
)
def test_configuration_says_what_is_open(nats: dict[str, str], api: dict[str, str], doors: str) -> None:
    config = replace(given(**nats), api=ApiConfig(**api))  # type: ignore[arg-type]
    assert not config.unlocked
    assert doors in replace(config, auth="off").unlocked and bool(replace(config, auth="off").unlocked) == bool(doors)


def test_nats_config_command_prints_own_server_setup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes, keys = tmp_path / "nodes.txt", tmp_path / "keys"
    nodes.write_text("# ours\ngpu1\n\ngpu2\n")
    arguments = ["nats-config", "--nodes-file", str(nodes), "--keys", str(keys)]
    assert main(arguments) == 0
    told = capsys.readouterr().out
    assert "unicron.v1.obs.gpu2.*" in told and "system_account: SYS" in told and "\nSU" not in told
    (keys / "agent-gpu1.key").unlink()  # it is where it is used
    assert main(arguments) == 0
    assert capsys.readouterr().out == told
    assert load_or_create_key(keys, "coordinator").user.key in told
    assert main([*arguments[:3], "--nsc"]) == 0
    commands = capsys.readouterr().out.splitlines()
    users = [line for line in commands if line.startswith("nsc add user ")]
    assert len(users) == 6 and commands[-1] == users[-1]
    assert users[-1].startswith("nsc add user --account AGENTS --name agent-gpu2 --allow-pub 'unicron.v1.obs.")
    nodes.write_text("no node\n")
    assert main(arguments) == 2


# --- consumers ------------------------------------------------------------------------------------


async def follows(connection: Connection, node: str) -> list[str]:
    info = await api(connection, f"CONSUMER.INFO.{EVENT_STREAM}.agent-{node}", {})
    return sorted(filters(info["config"]))


async def test_consumers_exist_before_start_command(nats_connection: Connection) -> None:
    log = Log()
    log.say(enrolled())
    read = {"n1": 0}
    consumers = Consumers(nats_connection, lambda: log.state, lambda node: read[node])
    await consumers.look()
    assert await follows(nats_connection, "n1") == feed_subjects("n1", ())
    start = v.StartWorkers(node="n1", epoch=1, command_id="1.1.n1.1", spec=SPEC, starts=())
    await consumers.before([start])
    assert await follows(nats_connection, "n1") == sorted(feed_subjects("n1", ["a"]))
    await consumers.before([replace(start, spec=replace(SPEC, name="b"))])
    assert await follows(nats_connection, "n1") == sorted(feed_subjects("n1", ["a", "b"]))
    log.state = replace(log.state, seq=9)
    for read["n1"], begin in ((7, 8), (70, 10)):
        await api(nats_connection, f"CONSUMER.DELETE.{EVENT_STREAM}.agent-n1", {})
        await consumers.look()
        assert await follows(nats_connection, "n1") == sorted(feed_subjects("n1", ["a", "b"]))
        info = await api(nats_connection, f"CONSUMER.INFO.{EVENT_STREAM}.agent-n1", {})
        assert info["config"]["opt_start_seq"] == begin, "behind what it has read of this log, not of a longer one"
    await consumers.before([replace(start, spec=replace(SPEC, name="c"))])
    assert await follows(nats_connection, "n1") == sorted(feed_subjects("n1", ["a", "b", "c"]))


async def test_restarted_server_repeats_nothing_to_agent(
    nats_server: EmbeddedServer, nats_connection: Connection
) -> None:
    """It has forgotten what each agent has read. The coordinator has not, and does not wait for its next look."""
    log, events = Log(), NatsEventLog(nats_connection)
    log.say(enrolled())
    feed = NatsCommandFeed(nats_connection, "n1", makes_consumer=False)
    obeyed: asyncio.Queue[int] = asyncio.Queue()

    async def say(number: int) -> None:
        check = v.CheckNode(node="n1", epoch=1, command_id=f"1.1.n1.{number}", limit_us=1, reason="ill")
        await events.append(
            [Envelope(producer="coordinator", boot=1, number=number, term=1, observed_at_us=1, event=check)]
        )

    async def obey() -> None:
        async for recorded in feed.read():
            obeyed.put_nowait(recorded.seq)

    consumers = Consumers(nats_connection, lambda: log.state, lambda _: feed.handled_seq)
    at_work = [asyncio.create_task(consumers.run()), asyncio.create_task(obey())]
    try:
        async with asyncio.timeout(30):
            await say(1)
            await say(2)
            assert [await obeyed.get(), await obeyed.get()] == [1, 2]
            await nats_server.restart()
            await say(3)
            assert await obeyed.get() == 3, "nothing comes twice"
    finally:
        for task in at_work:
            task.cancel()
        await asyncio.gather(*at_work, return_exceptions=True)


def test_node_follows_its_tasks() -> None:
    cluster = MiniCluster(1)
    for name in ("n1", "n2"):
        cluster.add_host(name)
    cluster.submit("a", min_workers=2, max_workers=2)
    cluster.run()
    state = replace(cluster.state, logins={name: NodeLogin(key=KEY) for name in ("n1", "n3")})
    assert following(state) == {"n1": frozenset({"a"}), "n3": frozenset()}
    tasks = {name: replace(task, status=TaskStatus.COMPLETED) for name, task in state.tasks.items()}
    assert set(following(replace(state, tasks=tasks)).values()) == {frozenset()}


async def test_consumer_of_known_node_waits_for_its_beat(
    nats_connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its past may be long. A node that never joined has none, and a start waits for nothing."""
    log = Log()
    for node in ("n1", "n2", "n3"):
        log.say(enrolled(node, make_key(f"agent-{node}").user.key))
    for node in ("n1", "n2"):
        log.say(joined(node), node)
    read: dict[str, int] = {}
    consumers = Consumers(nats_connection, lambda: log.state, lambda node: read.get(node, 0))
    monkeypatch.setattr(consumers_module, "BEAT_WAIT_S", 600.0)
    looking = asyncio.create_task(consumers.run())
    try:
        async with asyncio.timeout(60):
            await until_exist(nats_connection, {"agent-n3"})
            await consumers.before([v.StartWorkers(node="n2", epoch=1, command_id="1.1.n2.1", spec=SPEC, starts=())])
            await until_exist(nats_connection, {"agent-n2", "agent-n3"})
            log.state, read["n1"] = replace(log.state, seq=9), 7
            await until_exist(nats_connection, {"agent-n1", "agent-n2", "agent-n3"})
        info = await api(nats_connection, f"CONSUMER.INFO.{EVENT_STREAM}.agent-n1", {})
        assert info["config"]["opt_start_seq"] == 8
        read["n1"] = 0
        monkeypatch.undo()
        await api(nats_connection, f"CONSUMER.DELETE.{EVENT_STREAM}.agent-n1", {})
        async with asyncio.timeout(60):  # an agent of an older version may say nothing of it
            await until_exist(nats_connection, {"agent-n1", "agent-n2", "agent-n3"})
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


async def until_exist(connection: Connection, names: set[str]) -> None:
    """Wait until these are all consumers of the log."""
    while {consumer["name"] for consumer in await consumers_of(connection, EVENT_STREAM)} != names:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
