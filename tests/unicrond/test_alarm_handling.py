"""Alarms by name: acknowledged, silenced, assigned, and over."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from tests.seeds import at_most
from tests.unicrond.cluster import MiniCluster, trained
from tests.unicrond.serving import Served, healed_cluster, serving
from tests.unicrond.test_notify import CALM, Hands, notifier, sent
from tests.unicrond.test_tables import shown
from unicrond.core.rules.requests import SILENCE_MAX_US, request_problem
from unicrond.core.state.alarms import ALARMS_MAX, NAMES, Alarm, AlarmHandling
from unicrond.core.state.holds import StandingHold
from unicrond.core.state.state import ClusterState
from unicrond.ctl.main import main
from unicrond.display.alarms import alarm_line, alarm_rows, alarms_table
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary.alarms import ALARM_PATTERN
from unicrond.page.attention import attention, state_alarms
from unicrond.page.view import view
from unicrond.service.coordinator.alarms import GONE_US, HOLDS_MAX, AlarmBoard, hold_alarms

DISK = Alarm("volume-full", "the volume of /var has 1.0 GiB free of 50.0", "state")
MINUTE_US = 60_000_000
ROOT = Path(__file__).parent.parent.parent


def ask(cluster: MiniCluster, event: Any) -> None:
    cluster.append(event, "api", cluster.state.term)


def acknowledge(cluster: MiniCluster, alarm: str = DISK.key) -> None:
    ask(cluster, v.AlarmAcknowledged(alarm=alarm, reason="disk ordered", requester="anna"))


# --- the state --------------------------------------------------------------------------------------


def test_handling_is_folded_shown_and_over() -> None:
    cluster = trained(2)
    acknowledge(cluster)
    ask(cluster, v.AlarmAssigned(alarm=DISK.key, person="bob", reason="on call", requester="anna"))
    ask(cluster, v.AlarmSilenced(alarm=DISK.key, for_us=180 * MINUTE_US, reason="later"))
    (row,) = alarm_rows(cluster.state, [DISK], cluster.state.now_us + 5 * MINUTE_US)
    assert row["handling"] == "acknowledged by anna 5 min ago; silenced by - for 2 h more; assigned to bob"
    assert row["is_quiet"] and (row["reason"], row["assigned_by"]) == ("later", "anna")
    assert alarm_line(row) == f"{DISK} [volume-full:state; {row['handling']}]"
    cluster.append(v.AlarmEnded(alarm=DISK.key), "coordinator", cluster.state.term)
    assert cluster.state.alarms == {}
    assert alarm_line(alarm_rows(cluster.state, [DISK], 0)[0]) == f"{DISK} [volume-full:state]"


def test_silence_ends_with_its_time() -> None:
    cluster = trained(2)
    ask(cluster, v.AlarmSilenced(alarm=DISK.key, for_us=10 * MINUTE_US, reason="later", requester="anna"))
    until_us = cluster.state.now_us + 10 * MINUTE_US
    during, after = (alarm_rows(cluster.state, [DISK], until_us + shift)[0] for shift in (-1, 0))
    assert during["is_quiet"] and "silenced by anna" in during["handling"]
    assert "is_quiet" not in after and "handling" not in after and "silenced_by" not in after


def test_silence_that_is_over_in_a_quiet_log_is_over_on_the_page() -> None:
    """The log's time stands still with it."""
    cluster = trained(2)
    cluster.append(v.NodeIsolated(node="n0", until_us=None, reason="by hand"), "coordinator", cluster.state.term)
    ask(cluster, v.AlarmSilenced(alarm="node-isolated:n0", for_us=10 * MINUTE_US, reason="later", requester="anna"))
    until_us = cluster.state.now_us + 10 * MINUTE_US
    during, after = (view(cluster.state, now_us=until_us + shift)["attention"][-1] for shift in (-1, 0))
    assert during["handling"].startswith("silenced by anna") and after["handling"] == ""
    assert view(cluster.state)["attention"][-1]["handling"].startswith("silenced by anna"), "of a replayed log"


@pytest.mark.parametrize("width", [40, 60, 80])
def test_table_of_alarms_fits_the_terminal(width: int) -> None:
    rows = [
        {"alarm": f"decisions-held:withdrawal.{'n' * 63}.{'m' * 63}", "text": "the link is silent " * 9},
        {"alarm": "volume-full:state", "text": "1 GiB is free", "handling": "acknowledged by anna 5 min ago; " * 4},
    ]
    lines = shown(alarms_table(rows), width)
    assert len(lines) > 4 and any("1 GiB is free" in line for line in lines)


def test_quiet_alarms_come_last() -> None:
    cluster, other = trained(2), Alarm("log-large", "the log holds much")
    acknowledge(cluster)
    rows = alarm_rows(cluster.state, [DISK, other], cluster.state.now_us)
    assert [row["alarm"] for row in rows] == [other.key, DISK.key]


@pytest.mark.parametrize(
    ("for_us", "problem"), [(0, "would be over"), (SILENCE_MAX_US + 1, "30 days at most"), (MINUTE_US, "")]
)
def test_silence_is_bounded(for_us: int, problem: str) -> None:
    event = v.AlarmSilenced(alarm=DISK.key, for_us=for_us, reason="")
    assert problem in request_problem(ClusterState(), event)
    assert bool(problem) == bool(request_problem(ClusterState(), event))


def test_names_are_documented_and_are_keys() -> None:
    document = (ROOT / "docs/operate/alarms.md").read_text()
    rows = re.findall(r"^\| `([a-z-]+)(:[A-Z]+)?` \|", document, re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(NAMES)
    assert all(re.match(ALARM_PATTERN, Alarm(name, "text", "node3").key) for name in NAMES)
    with pytest.raises(ValueError, match="is not in NAMES"):
        Alarm("nonsense", "text")


def test_each_held_decision_is_an_alarm_of_its_own() -> None:
    """Who had acknowledged one heard of no other."""
    long = "n" * 63
    holds = [
        StandingHold(action="isolation", limit="isolated_share", reason="strikes", since_us=1, node=long),
        StandingHold(
            action="withdrawal", limit="evictions_per_hour", reason="silent", since_us=1, node=long, task=long
        ),
        StandingHold(action="eviction", limit="observe", reason="hangs", since_us=1, node="n1", task="t", worker="t.7"),
        StandingHold(action="failure", limit="observe", reason="it fails", since_us=1, task="t"),
        StandingHold(action="plan", limit="observe", reason="t 1 -> 2", since_us=1),
    ]
    alarms = hold_alarms(replace(ClusterState(), holds={str(number): hold for number, hold in enumerate(holds)}))
    assert [alarm.subject for alarm in alarms] == [
        f"isolation.{long}", f"withdrawal.{long}.{long}", "eviction.t.7", "failure.t", "plan",
    ]  # fmt: skip
    assert all(re.match(ALARM_PATTERN, alarm.key) for alarm in alarms)
    many = {str(number): holds[0] for number in range(HOLDS_MAX + 2)}
    *_, rest = hold_alarms(replace(ClusterState(), holds=many))
    assert (rest.key, str(rest)) == ("decisions-held", "2 more decisions are held")


def test_hold_of_a_node_that_has_left_is_no_alarm() -> None:
    """Its driver had reported a fault; the node has gone for good, and nothing could end the alarm."""
    cluster = trained(2)
    hold = StandingHold(
        action="isolation", limit="isolated_share", reason="ECC", since_us=1, node="n1", cause="hardware"
    )
    cluster.state = replace(cluster.state, holds={"isolation/n1": hold})
    assert [alarm.subject for alarm in hold_alarms(cluster.state)] == ["isolation.n1"]
    assert any("ECC" in row["what"] for row in attention(cluster.state))
    cluster.say(cluster.hosts["n1"], v.NodeLeft(node="n1", reason="sold"))
    assert not hold_alarms(cluster.state) and not any("ECC" in row["what"] for row in attention(cluster.state))
    assert cluster.state.holds, "it is known, should the node come back"


def test_nodes_and_tasks_that_need_somebody_are_alarms() -> None:
    cluster = trained(2)
    cluster.append(v.NodeIsolated(node="n0", until_us=None, reason="by hand"), "coordinator", cluster.state.term)
    assert "node-isolated:n0" in {alarm.key for alarm in state_alarms(cluster.state)}
    acknowledge(cluster, "node-isolated:n0")
    (row,) = [row for row in attention(cluster.state) if row["alarm"] == "node-isolated:n0"]
    assert row["what"].startswith("node n0 is isolated: by hand") and row["handling"].startswith("acknowledged by anna")


# --- the board, as a machine --------------------------------------------------------------------------


class Handling(RuleBasedStateMachine):
    """Alarms come and go, people handle them, heads change. What is handled is bounded, and ends a minute after its
    alarm, said once."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = trained(1)
        self.board = AlarmBoard()
        self.standing: dict[str, int] = {}
        self.gone_us: dict[str, int] = {}
        self.now_us = 0

    keys = st.integers(0, 5).map(lambda number: f"outbox-backlog:n{number}")

    @rule(key=keys)
    def comes(self, key: str) -> None:
        self.standing[key] = self.now_us
        self.gone_us.pop(key, None)

    @rule(key=keys)
    def goes(self, key: str) -> None:
        if self.standing.pop(key, None) is not None:
            self.gone_us[key] = self.now_us

    @rule(key=keys, act=st.integers(0, 2))
    def is_handled(self, key: str, act: int) -> None:
        events = (
            v.AlarmAcknowledged(alarm=key, reason=""),
            v.AlarmAssigned(alarm=key, person="bob", reason=""),
            v.AlarmSilenced(alarm=key, for_us=MINUTE_US, reason=""),
        )
        ask(self.cluster, events[act])

    @rule(span_us=st.integers(1, 2 * GONE_US))
    def time_passes(self, span_us: int) -> None:
        self.look()
        self.now_us += span_us
        ended = self.look()
        for key in ended:
            assert key not in self.standing
            assert self.now_us - self.gone_us.get(key, 0) >= min(GONE_US, span_us)
        assert not self.look(), "said twice"
        for key in ended:
            self.cluster.append(v.AlarmEnded(alarm=key), "coordinator", self.cluster.state.term)
        if span_us >= GONE_US:
            assert set(self.cluster.state.alarms) <= set(self.standing), "what people did outlives its alarm"

    @rule()
    def head_changes(self) -> None:
        self.board.begin()

    def look(self) -> list[str]:
        return [event.alarm for event in self.board.endings(self.cluster.state, lambda: self.standing, self.now_us)]

    @invariant()
    def is_bounded(self) -> None:
        assert len(self.cluster.state.alarms) <= ALARMS_MAX


TestHandling = Handling.TestCase
TestHandling.settings = settings(max_examples=at_most(40), stateful_step_count=25, deadline=None)


async def test_alarm_that_comes_back_after_its_end_ends_again(tmp_path: Path) -> None:
    """Where it was the only one that people had handled."""
    async with serving(tmp_path, trained(2).log) as served:
        coordinator, stands = served.coordinator, [DISK]
        coordinator.add_alarms(lambda: stands)
        said: list[Any] = []
        coordinator._post = said.append  # type: ignore[method-assign]
        for _ in range(2):
            coordinator.state = replace(coordinator.state, alarms={DISK.key: AlarmHandling(acknowledged_us=1)})
            coordinator._end_alarms()
            stands.clear()
            coordinator._end_alarms()
            coordinator._board._absent_us[DISK.key] -= GONE_US
            coordinator._end_alarms()
            coordinator.state = replace(coordinator.state, alarms={})
            coordinator._end_alarms()
            stands.append(DISK)
        assert said == [v.AlarmEnded(alarm=DISK.key)] * 2


def test_oldest_handling_goes_first() -> None:
    cluster = trained(1)
    for number in range(ALARMS_MAX + 2):
        acknowledge(cluster, f"node-lost:m{number}")
    assert len(cluster.state.alarms) == ALARMS_MAX and "node-lost:m0" not in cluster.state.alarms


# --- notifications -----------------------------------------------------------------------------------


def row(alarm: Alarm) -> dict[str, str]:
    return {"alarm": alarm.key, "text": str(alarm)}


def told(one: Any, hands: Hands, condition: dict[str, Any]) -> list[bool]:
    """Look, wait, look: the messages, each whether it is an end."""
    for _ in range(2):
        one.look(condition)
        hands.now_us += 4_000_000
    return [message.last.is_over for message in sent(one)]


def test_quiet_alarm_notifies_nobody_until_it_is_over_and_back() -> None:
    cluster, hands = trained(1), Hands()
    one, stands = notifier(hands), CALM | {"alarms": [row(DISK)]}
    acknowledge(cluster)
    one._state = cluster.state
    assert told(one, hands, stands) == []
    assert told(one, hands, CALM) == [], "its beginning was not told either"
    cluster.append(v.AlarmEnded(alarm=DISK.key), "coordinator", cluster.state.term)
    one._state = cluster.state
    assert told(one, hands, stands) == [False], "it came back"
    acknowledge(cluster)
    one._state = cluster.state
    hands.now_us += 10**12
    assert told(one, hands, stands) == [], "told again"
    assert told(one, hands, CALM) == [True], "whoever was told of it hears of its end"


def test_alarm_that_outlives_its_silence_notifies() -> None:
    cluster, hands = trained(1), Hands()
    one, stands = notifier(hands), CALM | {"alarms": [row(DISK)]}
    until_us = hands.wall_us() + 3600_000_000
    ask(cluster, v.AlarmSilenced(alarm=DISK.key, for_us=MINUTE_US, reason=""))
    one._state = silenced_until(cluster.state, until_us)
    assert told(one, hands, stands) == []
    hands.now_us += 3601_000_000
    assert told(one, hands, stands) == [False]


def test_alarm_that_was_told_before_a_short_silence_notifies_after_it() -> None:
    cluster, hands = trained(1), Hands()
    one, stands = notifier(hands), CALM | {"alarms": [row(DISK)]}
    one._state = cluster.state
    assert told(one, hands, stands) == [False]
    ask(cluster, v.AlarmSilenced(alarm=DISK.key, for_us=MINUTE_US, reason=""))
    one._state = silenced_until(cluster.state, hands.wall_us() + 600_000_000)
    assert told(one, hands, stands) == []
    hands.now_us += 601_000_000
    assert told(one, hands, stands) == [False], "within repeat_s, too"
    assert told(one, hands, CALM) == [True]


def test_node_that_is_still_isolated_when_its_silence_ends_notifies() -> None:
    cluster, hands, alarm = trained(2), Hands(), "node-isolated:n0"
    cluster.append(v.NodeIsolated(node="n0", until_us=None, reason="by hand"), "coordinator", cluster.state.term)
    hands.now_us = cluster.state.now_us
    one = notifier(hands)
    ask(cluster, v.AlarmSilenced(alarm=alarm, for_us=MINUTE_US, reason=""))
    one._state = cluster.state
    assert told(one, hands, CALM) == []
    hands.now_us += 2 * MINUTE_US
    one.look(CALM)
    hands.now_us += 4_000_000
    one.look(CALM)
    assert [message.last.key for message in sent(one)] == [f"alarm:{alarm}"]
    assert told(one, hands, CALM) == [], "once"


def silenced_until(state: ClusterState, until_us: int) -> ClusterState:
    """The silence by the clock of the test."""
    handling = replace(state.alarms[DISK.key], silenced_until_us=until_us)
    return replace(state, alarms={DISK.key: handling})


# --- the API and unicronctl ------------------------------------------------------------------------------


async def alarms_of(http: aiohttp.ClientSession) -> list[dict[str, Any]]:
    async with http.get("/v1/alarms") as response:
        return list((await response.json())["alarms"])


async def until_handled(served: Served, http: aiohttp.ClientSession) -> dict[str, Any]:
    for _ in range(200):
        rows = [row for row in await alarms_of(http) if row.get("handling")]
        if rows:
            return rows[0]
        await asyncio.sleep(0.02)
    raise AssertionError("nothing was handled")


async def test_people_handle_alarms_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def ctl(*words: str) -> tuple[int, str]:
        code = await asyncio.to_thread(main, ["--url", served.url, *words])
        output = capsys.readouterr()
        return int(code or 0), output.out + output.err

    cluster = healed_cluster()
    async with serving(tmp_path, cluster.log) as served, aiohttp.ClientSession(served.url) as http:
        served.coordinator.add_alarms(lambda: [DISK])
        assert (await alarms_of(http))[0]["alarm"] == DISK.key
        code, text = await ctl("acknowledge", DISK.key, "--reason", "disk ordered")
        assert (code, text) == (0, f"alarm {DISK.key} is acknowledged\n")
        assert "acknowledged by - 0 min ago" in (await until_handled(served, http))["handling"]
        assert "is silenced for 2 h" in (await ctl("silence", DISK.key, "2h"))[1]
        assert "is assigned to bob" in (await ctl("assign", DISK.key, "bob"))[1]
        assert "assigned to bob" in (await ctl("alarms"))[1]
        assert f"ALARM 1      {DISK} [{DISK.key}; acknowledged" in " ".join((await ctl("status"))[1].split("\n"))
        code, text = await ctl("acknowledge", "log-large")
        assert code == 1 and "no alarm log-large stands; see `unicronctl alarms`" in text
        code, text = await ctl("silence", DISK.key, "40d")
        assert code == 1 and "30 days at most" in text
        async with http.get("/metrics") as response:
            assert f'unicron_alarm{{alarm="{DISK.key}",quiet="1"}} 1.0' in await response.text()
        async with http.get("/healthz") as response:
            assert [row["alarm"] for row in (await response.json())["alarms"]] == [DISK.key]


async def test_probe_without_token_does_not_tell_who_cares_for_an_alarm(tmp_path: Path) -> None:
    async with serving(tmp_path, healed_cluster().log, token="t" * 32) as served, AsyncExitStack() as stack:
        served.coordinator.add_alarms(lambda: [DISK])
        own, stranger, liar = [
            await stack.enter_async_context(aiohttp.ClientSession(served.url, headers=headers))
            for headers in ({"Authorization": "Bearer " + "t" * 32}, {}, {"Authorization": "Bearer x"})
        ]
        order = {"person": "anna", "reason": "call 555"}
        async with own.post(f"/v1/alarms/{DISK.key}/assign", json=order) as response:
            assert response.status == 202
        await until_handled(served, own)
        told = []
        for http in (own, stranger, liar):
            async with http.get("/healthz") as response:
                assert response.status == 200
                told.append((await response.json())["alarms"][0])
        assert (told[0]["person"], told[0]["reason"]) == ("anna", "call 555")
        assert told[1] == told[2] == {"alarm": DISK.key, "text": str(DISK)}
