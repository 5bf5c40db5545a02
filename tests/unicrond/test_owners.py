"""Owners: whose a task is, as which users it runs, and that nobody sees another's with scope `read-own`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from aiohttp import web
from msgspec.structs import fields

from tests.unicrond.cluster import MiniCluster
from tests.unicrond.serving import Served
from tests.unicrond.test_ctl import ctl
from unicrond.commands.cli import main
from unicrond.core.state.state import DERIVED, ClusterState, Incident, Severity
from unicrond.core.state.state_bytes import from_json, to_json
from unicrond.display.queue import pending_reason
from unicrond.events import vocabulary as v
from unicrond.events.queries.worker_queries import LogsReply, WorkerMark, decode_request, encode, encode_marks
from unicrond.intake.config import ApiConfig, Config
from unicrond.intake.tokens import BadTokens, Grant, Scope, line_of, make_token, read_tokens
from unicrond.service.api.access import OWN_READS
from unicrond.service.api.own_state import own_state
from unicrond.service.api.worker_output import LogReader
from unicrond.views.accounts import KINDS
from unicrond.views.table import VIEWS

HASH = "0" * 64
#: What no answer to anna may hold: it stands in each word of the other owner's.
OTHER = "bob"
SECRETS = {"entry": "/bob/train.py", "args": ("--bob-flag",), "data": "/bob/data", "cwd": "/bob/cwd"}


class Caller(NamedTuple):
    """A token of the list: its scopes, owner and users, and whether it sees one owner's tasks at most."""

    scopes: tuple[Scope, ...]
    owner: str = ""
    users: tuple[str, ...] = ()
    is_confined: bool = True


CALLERS = {
    "reader": Caller((Scope.READ,), is_confined=False),
    "scraper": Caller((Scope.METRICS,), is_confined=False),
    "anna-page": Caller((Scope.READ_OWN,), "anna"),
    "anna-ci": Caller((Scope.SUBMIT,), "anna", ("anna", "ml")),
    "anna": Caller((Scope.READ_OWN, Scope.SUBMIT)),
    "eve": Caller((Scope.READ_OWN, Scope.SUBMIT)),
    "bob": Caller((Scope.READ_OWN, Scope.SUBMIT), is_confined=False),
    "admin": Caller((Scope.READ, Scope.SUBMIT, Scope.OPERATE), is_confined=False),
}
TOKENS = {name: make_token() for name in CALLERS}


class Output(LogReader):
    """A LogReader whose agents have the output of every worker."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def _ask(self, node: str, body: bytes, timeout_s: float) -> bytes:
        request = decode_request(body)
        worker = request.worker or f"{request.task}.1"
        if request.marks:
            mark = WorkerMark(
                worker=worker, phase="reduce", generation=1, iteration=1, micro_batch=0,
                collectives_entered=1, is_waiting=False, still_us=1,
            )  # fmt: skip
            return encode(LogsReply(node=node, data=encode_marks([mark])))
        self.asked.append(worker)
        return encode(LogsReply(node=node, worker=worker, data=f"output of {worker}".encode(), next_offset=9))


def two_owners() -> MiniCluster:
    """Two owners' tasks on the same nodes: a worker of each has died, a node of both was lost, bob's task waits."""
    cluster = MiniCluster(seed=3)
    for number in range(1, 4):
        cluster.add_host(f"n{number}", slots=2)
    for name, owner, secrets in (("annarun", "anna", {}), ("bobrun", "bob", SECRETS), ("bobwaits", "bob", SECRETS)):
        sizes: dict[str, Any] = {"min_workers": 9, "max_workers": 9} if name == "bobwaits" else {"max_workers": 3}
        spec = v.TaskSpec(name=name, iterations=10**6, global_batch=18, **sizes, **secrets)
        cluster.append(v.TaskSubmitted(spec=spec, owner=owner, requester=owner), "api", cluster.state.term)
    cluster.run()
    for task in ("annarun", "bobrun"):
        cluster.train(task, 5)
        victim = cluster.state.tasks[task].membership.members[-1]  # type: ignore[union-attr]
        cluster.kill_worker(cluster.hosts[victim.node], victim.worker)
        cluster.run()
        cluster.train(task, 5)
    shared = next(
        name
        for name, host in cluster.hosts.items()
        if {process.task for process in host.processes.values()} == {"annarun", "bobrun"}
    )
    cluster.kill_host(cluster.hosts[shared])
    cluster.lose(cluster.hosts[shared])
    cluster.run()
    for task in ("annarun", "bobrun"):
        cluster.train(task, 5)
    cluster.run()
    return cluster


@pytest.fixture(scope="module")
def cluster() -> MiniCluster:
    return two_owners()


@asynccontextmanager
async def served_to_callers(tmp_path: Path, cluster: MiniCluster) -> AsyncIterator[Served]:
    lines = [line_of(name, caller.scopes, TOKENS[name], caller.owner, caller.users) for name, caller in CALLERS.items()]
    (tmp_path / "tokens").write_text("\n".join(lines) + "\n")
    served = Served(tmp_path, config=Config(api=ApiConfig(tokens_file=str(tmp_path / "tokens"))))
    served.files = Output()  # type: ignore[assignment]
    await served.tell(cluster.log)
    await served.start()
    try:
        yield served
    finally:
        await served.stop()


# --- the list of tokens ---------------------------------------------------------------------------


def test_token_without_words_is_its_own_owner_and_has_no_users() -> None:
    assert read_tokens(f"ci submit {HASH}")[HASH] == Grant("ci", frozenset({Scope.SUBMIT}), "ci", ())


def test_token_line_is_read_as_it_is_written() -> None:
    token = make_token()
    line = line_of("anna-ci", [Scope.SUBMIT, Scope.READ_OWN], token, "anna", ("anna", "ml"))
    (grant,) = read_tokens(line).values()
    assert grant == Grant("anna-ci", frozenset({Scope.SUBMIT, Scope.READ_OWN}), "anna", ("anna", "ml"))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("owner=", "line 1: owner: '' is not a name; use letters, digits, - and _"),
        ("owner=a.b", "line 1: owner: 'a.b' is not a name"),
        ("users=", "line 1: users: '' is not a user of the nodes; give names like anna,ml"),
        ("users=anna,", "line 1: users: '' is not a user"),
        ("users=Anna", "line 1: users: 'Anna' is not a user"),
        ("owner=a owner=b", "line 1: owner is there twice; give it once"),
        ("quota=4", "line 1: 'quota=4' is not expected after the hash; use owner=NAME, users=USER,USER"),
    ],
)
def test_token_list_error_names_word_and_fix(words: str, problem: str) -> None:
    with pytest.raises(BadTokens) as error:
        read_tokens(f"ci submit {HASH} {words}")
    assert str(error.value).startswith(problem)


def test_token_command_writes_owner_and_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["token", "ci", "--scopes", "submit,read-own", "--out", str(tmp_path / "ci.token")]
    assert main([*words, "--owner", "anna", "--users", "anna,ml"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("ci read-own,submit ") and line.endswith(" owner=anna users=anna,ml")
    assert main([*words, "--users", "No One"]) == 2
    assert "'No One' is not a user of the nodes" in capsys.readouterr().err


# --- who may run as whom, and change what ---------------------------------------------------------


async def submit(http: aiohttp.ClientSession, caller: str, **task: Any) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {TOKENS[caller]}"}
    async with http.post("/v1/tasks", json=task, headers=headers) as response:
        return response.status, (await response.json()).get("error", "")


async def test_task_runs_only_as_users_of_its_token(tmp_path: Path) -> None:
    cluster = MiniCluster(seed=1)
    cluster.add_host("n1", users=("anna", "ml", "bob"))
    async with served_to_callers(tmp_path, cluster) as served, aiohttp.ClientSession(served.url) as http:
        assert (await submit(http, "anna-ci", name="first"))[0] == 201
        assert (await submit(http, "anna-ci", name="second", run_as="ml"))[0] == 201
        status, error = await submit(http, "anna-ci", name="third", run_as="bob")
        assert status == 403 and error == (
            "run_as: bob is not a user of token anna-ci, which has anna, ml; leave it out, or have an operator add bob"
            " to users= of the token's line"
        )
        status, error = await submit(http, "eve", name="third", run_as="bob")
        assert status == 403 and "bob is not a user of token eve, which has no users" in error
        assert (await submit(http, "eve", name="third"))[0] == 201
        assert (await submit(http, "admin", name="fourth", run_as="bob"))[0] == 201
        await served.until(v.TaskSubmitted)
        async with http.get("/v1/state", headers={"Authorization": f"Bearer {TOKENS['admin']}"}) as response:
            tasks = (await response.json())["state"]["tasks"]
    assert {name: (task["owner"], task["spec"].get("run_as", "")) for name, task in tasks.items()} == {
        "first": ("anna", "anna"),
        "second": ("anna", "ml"),
        "third": ("eve", ""),
        "fourth": ("admin", "bob"),
    }


async def test_task_is_changed_by_tokens_of_its_owner_and_by_operators(tmp_path: Path, cluster: MiniCluster) -> None:
    orders = {"update": {"weight": 2}, "reshape": {"max_workers": 2}, "mode": {"mode": "observe", "reason": "x"}}
    orders |= {"cancel": {}}
    async with served_to_callers(tmp_path, cluster) as served, aiohttp.ClientSession(served.url) as http:
        for (order, body), caller in product(orders.items(), ("bob", "eve", "anna", "anna-ci", "admin")):
            headers = {"Authorization": f"Bearer {TOKENS[caller]}"}
            async with http.post(f"/v1/tasks/annarun/{order}", json=body, headers=headers) as response:
                answer = await response.json()
            if caller in ("bob", "eve"):
                text = f"task: annarun is anna's; token {caller} is {caller}'s, and lacks scope operate"
                assert (response.status, answer["error"]) == (403, text)
            elif order != "cancel":
                assert response.status in (202, 409), (order, caller, answer)  # 409: it has been said before
        # What was anna's keeps its story and its checkpoints: its name is nobody else's.
        headers = {"Authorization": f"Bearer {TOKENS['admin']}"}
        async with http.post("/v1/tasks/annarun/cancel", json={}, headers=headers) as response:
            await served.until(v.TaskCancelled)
        assert "name: annarun was another owner's" in (await submit(http, "eve", name="annarun"))[1]
        fork = {"mode": "fork", "source": "annarun"}
        assert "start.source: annarun was another owner's" in (await submit(http, "eve", name="evil", start=fork))[1]


def test_quota_is_of_the_owner_whichever_token_submits() -> None:
    from unicrond.core.state.policy import Policy
    from unicrond.core.tasks.quotas import over_quota

    cluster = MiniCluster(seed=1, policy=Policy(quotas={"anna": 1}))
    cluster.add_host("n1")
    for token in ("anna-ci", "anna-page"):
        event = v.TaskSubmitted(spec=v.TaskSpec(name=f"of-{token}"), owner="anna", requester=token)
        cluster.append(event, "api", cluster.state.term)
    assert over_quota(cluster.state) == {"of-anna-page"}


# --- what an owner sees ---------------------------------------------------------------------------


def texts(value: Any) -> Iterator[str]:
    """Yield each text and key in plain JSON types."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for pair in value.items() for part in pair for text in texts(part))
    elif isinstance(value, list | tuple):
        yield from (text for item in value for text in texts(item))


def test_owner_sees_own_tasks_whole_and_nothing_of_others(cluster: MiniCluster) -> None:
    state = cluster.state
    seen = own_state(state, "anna")
    assert seen.tasks == {"annarun": state.tasks["annarun"]}
    assert list(seen.nodes) == list(state.nodes) and all(node.address == "-" for node in seen.nodes.values())
    assert [node.slots for node in seen.nodes.values()] == [node.slots for node in state.nodes.values()]
    assert list(seen.plan.assignments) == ["annarun"] and seen.plan.epoch == state.plan.epoch
    tree = to_json(seen)
    assert not [text for text in texts(tree) if OTHER in text.lower()]
    assert from_json(tree) == seen, "unicronctl reads it as it reads the whole"
    kinds = [incident.kind for incident in (*seen.closed_incidents, *seen.incidents.values())]
    assert kinds == ["process_exit", "node_lost"]
    assert not own_state(state, "carol").tasks and not own_state(state, "carol").closed_incidents


def test_own_state_holds_no_field_that_nobody_has_named() -> None:
    """A field that the state gets stays hidden until somebody lets it through."""
    shown = {"seq", "now_us", "term", "schema", "mode", "severity", "nodes", "tasks", "incidents", "closed_incidents"}
    shown |= {"plan", "ledger", "holds", "quotas"}
    marks = {info.name: object() for info in fields(ClusterState) if info.name not in (*shown, *DERIVED)}
    state = ClusterState(**marks)  # type: ignore[arg-type]
    seen = own_state(state, "anna")
    assert not [name for name, mark in marks.items() if getattr(seen, name) is mark]


def test_incident_of_earlier_life_is_not_seen(cluster: MiniCluster) -> None:
    """A name that an operator gave to another owner does not bring the first one's past with it."""
    from msgspec.structs import replace

    task = cluster.state.tasks["annarun"]
    later = replace(task, submitted_us=cluster.state.now_us + 1)
    seen = own_state(replace(cluster.state, tasks={"annarun": later}), "anna")
    assert not seen.closed_incidents and not seen.incidents


@pytest.mark.parametrize(
    "part",
    [
        {"worker": "bobrun.1"},
        {"lost_peers": {"annarun.1": "bobrun.1"}},
        {"links": {"annarun.1": ("bobrun.1",)}},
        {"stacks": {"train.py:1": ("bobrun.1",)}},
        {"generations": {"annarun": 1, "bobrun": 1}},
    ],
)
def test_incident_of_both_owners_tells_own_part_alone(cluster: MiniCluster, part: dict[str, Any]) -> None:
    from msgspec.structs import replace

    incident = Incident(
        id="i1", kind="node_lost", severity=Severity.SEV1, node="n1", worker="", generations={"annarun": 1},
        message="bobrun.1 said so", occurred_us=0, detected_us=cluster.state.now_us, log_tail="bob",
    )  # fmt: skip
    state = replace(cluster.state, incidents={"i1": replace(incident, **part)})
    assert not [text for text in texts(to_json(own_state(state, "anna"))) if OTHER in text.lower()]


# --- every route, every token ---------------------------------------------------------------------


class Question(NamedTuple):
    """A request, and what it names itself."""

    method: str
    path: str
    body: Any
    named: str


def questions(application: web.Application) -> Iterator[Question]:
    """Yield requests for every route: about each owner's task, and about one that nobody has."""
    bodies = {"/v1/tasks/{task}/mode": {"mode": "observe", "reason": "x"}, "/v1/mode": {"mode": "heal"}}
    for route in application.router.routes():
        if route.resource is None or route.method == "HEAD":
            continue
        template = route.resource.canonical
        for task, kind, view in product(("annarun", "bobrun", "nobodys"), KINDS, VIEWS):
            if ("{kind}" not in template and kind != KINDS[0]) or (
                "{name}" not in template and view != next(iter(VIEWS))
            ):
                continue
            name = view if template == "/v1/views/{name}" else task if kind == "task" else {"node": "n1"}.get(kind, "1")
            values = {"task": task, "kind": kind, "name": name, "node": "n1", "window": "w1"}
            values |= {"alarm": "task-waiting:bobwaits", "file": "app.js"}
            path = template
            for key, value in values.items():
                path = path.replace(f"{{{key}}}", value)
            body = bodies.get(template, {"name": task, "run_as": ""} if template == "/v1/tasks" else {})
            yield Question(route.method, path, body, task if task in path or template == "/v1/tasks" else "")


async def answer_to(http: aiohttp.ClientSession, question: Question, token: str) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    body = question.body if question.method == "POST" else None
    async with http.request(question.method, question.path, json=body, headers=headers) as response:
        return response.status, (await response.read()).decode(errors="replace")


async def test_no_answer_tells_one_owner_of_another(tmp_path: Path, cluster: MiniCluster) -> None:
    """Every route x every token: whoever sees one owner's tasks at most hears nothing of another's."""
    asked = told = 0
    async with served_to_callers(tmp_path, cluster) as served, aiohttp.ClientSession(served.url) as http:
        every = list(questions(served.application))
        confined = {name: TOKENS[name] for name, caller in CALLERS.items() if caller.is_confined}
        for question, (name, token) in product(
            every, [*confined.items(), ("nobody", ""), ("guesser", "unicron_guess")]
        ):
            if question.path == "/v1/tasks/annarun/cancel":
                continue
            status, text = await answer_to(http, question, token)
            asked, told = asked + 1, told + (status == 200)
            heard = text.replace("bobrun", "").replace("bob's", "") if question.named == "bobrun" else text
            if "alarms/" in question.path:
                heard = heard.replace("task-waiting:bobwaits", "")
            assert OTHER not in heard.lower(), (name, question, status, text[:2000])
            if question.named == "bobrun":
                assert status in (401, 403, 404, 429), (name, question, status, text)
    assert asked > 400 and told > 50, (asked, told)


async def test_own_reads_answer_of_own_tasks_and_nothing_else_does(tmp_path: Path, cluster: MiniCluster) -> None:
    async with served_to_callers(tmp_path, cluster) as served, aiohttp.ClientSession(served.url) as http:
        for question in questions(served.application):
            if question.method != "GET" or not question.path.startswith("/v1/"):
                continue
            status, text = await answer_to(http, question, TOKENS["anna-page"])
            if not question.path.startswith(OWN_READS):
                assert status == 403 and "anna-page lacks scope" in text, question
            elif question.named in ("annarun", ""):
                assert status == 200, (question, text)
            else:  # the same whether it is another's or nobody's
                assert status == 404, (question, text)
        whole = json.loads((await answer_to(http, Question("GET", "/v1/state", None, ""), TOKENS["reader"]))[1])
        assert {"bobrun", "bobwaits"} < set(whole["state"]["tasks"]) and "owner" not in whole
        story = (await answer_to(http, Question("GET", "/v1/story/task/annarun", None, ""), TOKENS["anna"]))[1]
        assert "killed" in story or "ended by" in story


async def test_output_of_workers_that_may_be_anothers_is_refused(tmp_path: Path, cluster: MiniCluster) -> None:
    async with served_to_callers(tmp_path, cluster) as served, aiohttp.ClientSession(served.url) as http:

        async def asked(query: str) -> int:
            question = Question("GET", f"/v1/logs/annarun?{query}", None, "")
            return (await answer_to(http, question, TOKENS["anna-page"]))[0]

        member = cluster.state.tasks["annarun"].membership.members[0].worker  # type: ignore[union-attr]
        dead = next(each.worker for each in cluster.state.closed_incidents if each.worker.startswith("annarun"))
        assert [await asked(f"worker={name}") for name in (member, dead, "annarun.999", "bobrun.1")] == [
            200,
            200,
            404,
            404,
        ]


async def test_commands_of_owners_work(tmp_path: Path, cluster: MiniCluster) -> None:
    (tmp_path / "mine.token").write_text(TOKENS["anna-page"])
    async with served_to_callers(tmp_path, cluster) as served:
        outs = {}
        for command in ("tasks", "status", "describe task annarun", "logs annarun --rank 0", "nodes", "workers"):
            outcome = await ctl(*command.split(), "--token-file", str(tmp_path / "mine.token"), url=served.url)
            assert outcome.code == 0, (command, outcome.err)
            assert OTHER not in outcome.out.lower(), outcome.out
            outs[command] = outcome.out
        refused = await ctl("events", "--token-file", str(tmp_path / "mine.token"), url=served.url)
    assert (
        "annarun" in outs["tasks"]
        and "1 active" in outs["status"]
        and "output of annarun" in outs["logs annarun --rank 0"]
    )
    assert refused.code == 1 and "anna-page lacks scope read" in refused.err


def test_reason_of_waiting_task_says_nothing_of_what_is_not_seen(cluster: MiniCluster) -> None:
    seen = own_state(cluster.state, "bob")
    assert pending_reason(seen, seen.tasks["bobwaits"], has_all_tasks=False) == "pending: needs 9 workers"


async def test_output_of_earlier_life_is_not_shown_before_first_group(tmp_path: Path) -> None:
    """Nodes asked for the newest output of that name would have an earlier life's."""
    cluster = MiniCluster(seed=1)
    cluster.add_host("n1")
    spec = v.TaskSpec(name="annarun", min_workers=2, max_workers=2, global_batch=2)
    cluster.append(v.TaskSubmitted(spec=spec, owner="anna"), "api", cluster.state.term)
    cluster.run()
    async with served_to_callers(tmp_path, cluster) as served, aiohttp.ClientSession(served.url) as http:
        status, text = await answer_to(http, Question("GET", "/v1/logs/annarun", None, ""), TOKENS["anna-page"])
    assert status == 404 and "has formed no group yet" in text
