"""`unicronctl plan show|table|whatif|spares` against a served coordinator."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unicrond.serving import Served, serving
from tests.unicrond.test_ctl import Outcome, ctl, one_line
from unicrond.core.state.policy import Policy
from unicrond.events.vocabulary import Evidence, NodeLost, PlanAdopted
from unicrond.intake.config import Config
from unicrond.views.plan_preview import foreseen

#: Another than one that nobody has set: to move a task costs more than it brings.
RELUCTANT = Policy(churn_s=1e6)
PAST = (
    ("plan", "table"),
    ("plan", "whatif", "--lose", "n1", "--add-nodes", "4"),
    ("plan", "spares"),
)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(tmp_path) as served:
        await table_of(served, served.coordinator.state.plan.epoch)
        yield served


@pytest.fixture
async def reluctant(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(tmp_path, config=Config(policy=RELUCTANT)) as served:
        await table_of(served, served.coordinator.state.plan.epoch)
        yield served


async def table_of(served: Served, epoch: int) -> None:
    """Until what may follow plan `epoch` is foreseen."""
    async with asyncio.timeout(60):
        while served.coordinator.foresight.epoch != epoch:  # noqa: ASYNC110 - made in a thread, told to nobody
            await asyncio.sleep(0.01)


def lost_n1(served: Served) -> None:
    evidence = Evidence(beat_seq=1, beat_at_us=1)
    served.coordinator._post(NodeLost(node="n1", evidence=evidence, reason="the test says so"))


async def test_plan_show_tells_assignments_reason_method_and_cost(served: Served) -> None:
    text, data = await asyncio.gather(*(ctl("plan", "show", *more, url=served.url) for more in ([], ["--json"])))
    plan = served.coordinator.state.plan
    assert (text.code, data.code) == (0, 0), (text, data)
    assert f"epoch {plan.epoch}, WAF 7 weighted workers planned, 7 weighted workers in health" in text.out
    assert plan.reason in text.out and plan.trigger in text.out and "solved afresh in" in text.out
    told = json.loads(data.out)
    costs = told["costs"]
    parts = ("delivered", "detection", "transition", "sub_health")
    assert sum(costs[f"{part}_flop"] for part in parts) == pytest.approx(costs["failure_free_flop"])
    assert costs["transition_flop"] > 0, "the worker that died cost something"
    for word in ("failure free", "delivered", "detection", "transition", "sub health"):
        assert word in text.out
    assert told["gradients"]["big"] == {"sums": 1, "healing": 0, "results": 1}
    assert "gradients of a worker" in text.out and "in healing" in text.out
    assert told["method"] == "fresh" and told["healthy"] == {"big": 3, "small": 1}
    status = await ctl("status", url=served.url)
    assert "delivered" in status.out and "sub-health" in status.out


async def test_plan_table_tells_plan_of_each_next_event(served: Served) -> None:
    text, data = await asyncio.gather(*(ctl("plan", "table", *more, url=served.url) for more in ([], ["--json"])))
    assert (text.code, data.code) == (0, 0), (text, data)
    told = json.loads(data.out)
    assert told["epoch"] == served.coordinator.state.plan.epoch
    table = served.coordinator.foresight.table
    assert table is not None
    assert [row["workers"] for row in told["rows"]] == [row.workers for row in foreseen(table)]
    by_event = {(row["event"], row["subject"]): row for row in told["rows"]}
    assert by_event["task ends", "small"]["workers"] == {"big": 3}
    assert by_event["node joins", "1 slot"]["workers"] == {"big": 3, "small": 2}
    lost = [row for row in told["rows"] if row["event"] == "node lost"]
    assert sum(1 + len(row["nodes"]) for row in lost) == 4, "every node, those alike together"
    assert "small 1 -> 2" in text.out and "and 2 alike" in text.out


def workers_then(outcome: Outcome) -> dict[str, int]:
    return {name: share["workers"] for name, share in json.loads(outcome.out)["then"]["assignments"].items()}


async def test_whatif_answers_and_changes_nothing(served: Served) -> None:
    before = await served.log.last_seq()
    weights = ("--set", "tasks.small.weight=3", "--set", "tasks.small.max_workers=2")
    lose, add, weigh = await asyncio.gather(
        ctl("plan", "whatif", "--lose", "n1", "--lose", "n2", "--json", url=served.url),
        ctl("plan", "whatif", "--add-nodes", "1", "--slots", "2", url=served.url),
        ctl("plan", "whatif", *weights, "--json", url=served.url),
    )
    assert [outcome.code for outcome in (lose, add, weigh)] == [0, 0, 0], (lose, add, weigh)
    assert workers_then(lose) == {"big": 1, "small": 1}
    assert json.loads(lose.out)["then"]["transition_flop"] > 0
    assert "small" in add.out and "3*" in add.out and "WAF 7 weighted workers now, 9 weighted workers then" in add.out
    assert workers_then(weigh) == {"big": 2, "small": 2}
    assert await served.log.last_seq() == before


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--lose", "n9"], "unicronctl: --lose: n9 is not a node that is up; choose from n1, n2, n3, n4"),
        (["--set", "tasks.bgi.weight=2"], "unicronctl: --set: tasks.bgi.weight: bgi is not active; did you mean big?"),
        (["--set", "tasks.big.weight=-1"], "unicronctl: --set: tasks.big.weight=-1: Expected `float` > 0.0"),
        (["--set", "tasks.big.weight=0"], "unicronctl: --set: tasks.big.weight=0: "),
        (["--set", "tasks.big.max_workers=99"], "unicronctl: --set: tasks.big.max_workers: "),
        (["--set", "tasks.big.color=3"], "unicronctl: --set: tasks.big.color: no such field; choose from name, "),
        (["--set", "policy.strikes_max=0"], "unicronctl: --set: policy.strikes_max=0: Expected `int` >= 1"),
        (["--set", "big=3"], "unicronctl: --set: 'big=3' is not a setting; give tasks.TASK.FIELD=VALUE"),
        (["--add-nodes", "x"], "unicronctl: --add-nodes: 'x' is not a whole number of 0 to 10000"),
    ],
)
async def test_invalid_question_prints_one_line_and_exits_with_2(served: Served, words: list[str], told: str) -> None:
    outcome = await ctl("plan", "whatif", *words, url=served.url)
    assert one_line(outcome, 2).startswith(told)


async def test_plan_spares_tells_how_many_pay_off(served: Served) -> None:
    before = await served.log.last_seq()
    asked = ("plan", "spares", "--repair-s", "86400", "--mtbf-s", "8640000")
    text, data = await asyncio.gather(*(ctl(*asked, *more, url=served.url) for more in ([], ["--json"])))
    assert (text.code, data.code) == (0, 0), (text, data)
    told = json.loads(data.out)
    (only,) = told["types"]
    assert (only["nodes"], len(only["rows"]), only["pay"], told["repair_s"]) == (4, 4, 0, 86_400)
    assert only["counted"] == 1.0
    assert "no spare pays" in text.out and "0*" in text.out and "each fails once in 2400 h" in text.out
    wrong = await ctl("plan", "spares", "--repair-s", "0", url=served.url)
    assert one_line(wrong, 2).startswith("unicronctl: --repair-s: '0' is not a whole number of 1 to ")
    rare = await ctl("plan", "spares", "--mtbf-s", "3600", url=served.url)
    assert one_line(rare, 2).startswith("unicronctl: --mtbf-s: a node would fail once in 1 h and be away for 24 h")
    assert await served.log.last_seq() == before


async def test_lost_node_takes_plan_from_table(tmp_path: Path) -> None:
    """The whole way: foreseen in a thread, looked up when it happens, told in the log, and the next one foreseen."""
    async with serving(tmp_path) as served:
        await table_of(served, served.coordinator.state.plan.epoch)
        seq = await served.log.last_seq()
        lost_n1(served)
        await served.until(PlanAdopted, seq)
        plan = served.coordinator.state.plan
        assert plan.method == "table" and plan.duration_us < 50_000
        assert plan.waf_if_healthy > plan.waf, "one node of four is missing"
        await table_of(served, plan.epoch)


@pytest.mark.parametrize("words", PAST, ids=lambda words: words[1])
async def test_past_plan_views_match_views_of_that_time(reluctant: Served, words: tuple[str, ...]) -> None:
    served, before = reluctant, reluctant.coordinator.state.seq
    data, text = await ctl(*words, "--json", url=served.url), await ctl(*words, url=served.url)
    assert (data.code, text.code) == (0, 0), (data, text)
    await ctl("cancel", "small", url=served.url)
    await served.until(PlanAdopted, before)
    await table_of(served, served.coordinator.state.plan.epoch)
    now = await ctl(*words, "--json", url=served.url)
    assert now.code == 0 and json.loads(now.out) != json.loads(data.out), "with a task less the answer is another"
    then = await ctl(*words, "--json", "--at", str(before), url=served.url)
    assert then.code == 0 and json.loads(then.out) == json.loads(data.out)
    told = await ctl(*words, "--at", str(before), url=served.url)
    assert told.out == text.out.replace("workers now,", f"workers at entry {before},")


async def test_past_table_needs_fitting_plan(served: Served) -> None:
    before, epoch = served.coordinator.state.seq, served.coordinator.state.plan.epoch
    lost_n1(served)
    lost = await served.until(NodeLost, before)
    early = await ctl("plan", "table", "--at", "1", url=served.url)
    told = "unicronctl: table: there was no plan yet at entry 1; give a later --at\n"
    assert one_line(early, 1) == told
    between = await ctl("plan", "table", "--at", str(lost), url=served.url)
    assert one_line(between, 1).startswith(f"unicronctl: table: plan {epoch} was not made for what had just happened")
    wrong = await ctl("plan", "whatif", "--lose", "n1", "--at", str(lost), url=served.url)
    assert one_line(wrong, 2) == "unicronctl: --lose: n1 is not a node that is up; choose from n2, n3, n4\n"
    rare = await ctl("plan", "spares", "--mtbf-s", "3600", "--at", str(before), url=served.url)
    assert one_line(rare, 2).startswith("unicronctl: --mtbf-s: a node would fail once in 1 h")
    late = await ctl("plan", "spares", "--at", "99999", url=served.url)
    assert one_line(late, 2).startswith("unicronctl: --at: entry 99999 is not in the log")
