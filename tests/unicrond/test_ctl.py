"""unicronctl as people run it: a process of its own against a coordinator that serves its real API."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from tests.unicrond.serving import Served, healed_cluster, serving
from unicrond.events.vocabulary import (
    LeaveCluster,
    MaintenanceCancelled,
    MaintenancePlanned,
    NodeCordoned,
    NodeLeft,
    PlanAdopted,
    StepCommitted,
    TaskCancelled,
    TaskReshaped,
    TaskSubmitted,
    TaskUpdated,
)
from unicrond.events.wire.codec import encode
from unicrond.events.wire.envelope import Envelope

ROOT = Path(__file__).parents[2]


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


async def start(*arguments: str, url: str = "", stdin: int = asyncio.subprocess.DEVNULL) -> asyncio.subprocess.Process:
    env = {name: value for name, value in os.environ.items() if name != "UNICRON_URL"}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "unicrond.ctl.main", *arguments,
        stdin=stdin, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        cwd=ROOT, env=env | ({"UNICRON_URL": url} if url else {}),
    )  # fmt: skip


async def ctl(*arguments: str, url: str = "", stdin: bytes | None = None) -> Outcome:
    process = await start(*arguments, url=url, stdin=asyncio.subprocess.PIPE if stdin is not None else -3)
    out, err = await asyncio.wait_for(process.communicate(stdin), 30)
    assert process.returncode is not None
    return Outcome(process.returncode, out.decode(), err.decode())


async def read_until(process: asyncio.subprocess.Process, part: str) -> list[str]:
    assert process.stdout is not None
    lines: list[str] = []
    async with asyncio.timeout(20):
        while not lines or part not in lines[-1]:
            line = (await process.stdout.readline()).decode()
            assert line, f"ended without {part!r}: {lines}"
            lines.append(line)
    return lines


async def interrupt(process: asyncio.subprocess.Process) -> str:
    """Ctrl-C: exit code 130 and no traceback; what it had said on stderr."""
    process.send_signal(signal.SIGINT)
    _, err = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 130, err
    assert b"Traceback" not in err
    return err.decode()


def one_line(outcome: Outcome, code: int) -> str:
    assert outcome.code == code, outcome
    assert outcome.out == ""
    assert outcome.err.count("\n") == 1, outcome.err
    return outcome.err


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(tmp_path) as served:
        yield served


# --- looking -------------------------------------------------------------------------------------


async def test_status_commands_show_cluster(served: Served) -> None:
    status, nodes, tasks, plan = await asyncio.gather(
        *(ctl(*words, url=served.url) for words in (["status"], ["nodes"], ["tasks"], ["plan", "show"]))
    )
    assert [outcome.code for outcome in (status, nodes, tasks, plan)] == [0, 0, 0, 0]
    assert "live, term 2" in status.out
    assert "4 up" in status.out
    assert "0 open, 1 closed" in status.out
    assert nodes.out.splitlines()[0].split() == ["node", "status", "used", "workers", "reason"]
    assert [line.split()[:3] for line in nodes.out.splitlines()[1:]] == [[f"n{n}", "up", "1/1"] for n in range(1, 5)]
    rows = {line.split()[0]: line for line in tasks.out.splitlines()[1:]}
    assert "3 of 1..3" in rows["big"]
    assert "10/100" in rows["big"]
    assert "1.0000" in rows["small"]
    assert f"epoch {served.coordinator.state.plan.epoch}" in plan.out
    assert served.coordinator.state.plan.reason in plan.out
    for outcome in (status, nodes, tasks, plan):
        assert all(char.isprintable() or char == "\n" for char in outcome.out)


async def test_json_output_matches_state(served: Served) -> None:
    lead = served.coordinator.state.tasks["small"].membership.members[0]  # type: ignore[union-attr]
    nan = StepCommitted(
        node=lead.node, task="small", worker=lead.worker, generation=served.coordinator.state.tasks["small"].generation,
        first=11, last=11, samples=8, samples_digest=0, loss=float("nan"), duration_us=1, micro_batches_by_rank=(8,),
    )  # fmt: skip
    await served.log.append([Envelope(producer=lead.node, boot=9, number=1, observed_at_us=1, event=nan)])
    seq = await served.until(StepCommitted, await served.log.last_seq() - 1)

    def strict(text: str) -> object:
        return msgspec.json.decode(text)  # knows no NaN

    status, nodes, tasks, plan, events = [
        strict((await ctl(*words, url=served.url)).out)
        for words in (
            ["status", "--json"],
            ["--json", "nodes"],
            ["tasks", "--json"],
            ["plan", "show", "--json"],
            ["events", "--json", "--since", str(seq - 1)],
        )
    ]
    assert status["state"]["seq"] >= seq  # type: ignore[index]
    assert {node["name"] for node in nodes} == {"n1", "n2", "n3", "n4"}  # type: ignore[attr-defined]
    by_name = {task["name"]: task for task in tasks}  # type: ignore[attr-defined]
    assert by_name["small"]["loss"] is None
    assert by_name["big"]["waf"] >= 0
    assert plan["assignments"]["big"]["workers"] == 3  # type: ignore[index]
    assert events["type"] == "StepCommitted"  # type: ignore[index]


async def test_events_command_prints_sentences(served: Served) -> None:
    everything = (await ctl("events", url=served.url)).out.splitlines()
    assert len(everything) == await served.log.last_seq()
    assert everything[0].split()[0] == "1"
    some = await ctl("events", "--since", "3", "--type", "TaskSubmitted", "--type", "PlanAdopted", url=served.url)
    kinds = [line.split()[2] for line in some.out.splitlines()]
    assert set(kinds) == {"TaskSubmitted", "PlanAdopted"}
    assert "task big submitted: weight 2, 1 to 3 workers" in some.out
    assert (await ctl("events", "--since", "999999", url=served.url)) == Outcome(0, "", "")


async def test_events_command_follows_across_restart(served: Served) -> None:
    last = await served.log.last_seq()
    process = await start("events", "-f", "--since", str(last - 1), "--url", served.url)
    await read_until(process, f"{last}  ")
    await served.stop()
    await served.start()
    left = NodeLeft(node="n4", reason="maintenance \x1b[31m[bold]")
    await served.log.append([Envelope(producer="n4", boot=9, number=1, observed_at_us=1, event=left)])
    lines = await read_until(process, "node n4 left")
    assert "maintenance [31m[bold]" in lines[-1]
    numbers = [int(line.split()[0]) for line in lines]
    assert numbers == list(range(last + 1, last + 1 + len(numbers))), "nothing twice, nothing left out"
    assert "trying again" in await interrupt(process)


async def test_closed_pipe_is_no_error(served: Served) -> None:
    command = f"{sys.executable} -m unicrond.ctl.main events --url {served.url} | head -n 1; exit ${{PIPESTATUS[0]}}"
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 30)
    assert (process.returncode, out.count(b"\n"), err) == (0, 1, b"")


async def test_watch_prints_lines_without_terminal(served: Served) -> None:
    process = await start("watch", url=served.url)
    lines = await read_until(process, "coordinator started term 2")
    assert any("incident" in line and "closed by restart the process" in line for line in lines)
    assert all(char.isprintable() or char == "\n" for line in lines for char in line)
    await interrupt(process)


# --- asking for something ------------------------------------------------------------------------


async def test_ctl_submits_and_cancels_task(served: Served) -> None:
    last = await served.log.last_seq()
    done = await ctl("submit", "-", url=served.url, stdin=b"name: third\nweight: 9\n")
    assert (done.code, done.err) == (0, "")
    assert "task third submitted, at sequence" in done.out
    await served.until(TaskSubmitted, last)
    await served.until(PlanAdopted, last)
    assert served.coordinator.state.tasks["third"].spec.weight == 9
    again = await ctl("submit", "-", url=served.url, stdin=b"name: third\n")
    assert "task third already exists; choose another name" in one_line(again, 1)
    cancelled = await ctl("cancel", "third", "--reason", "done with it", "--json", url=served.url)
    assert json.loads(cancelled.out)["task"] == "third"
    await served.until(TaskCancelled, last)
    assert served.coordinator.state.tasks["third"].ending.reason == "done with it"
    assert "task: nobody is not active" in one_line(await ctl("cancel", "nobody", url=served.url), 1)


async def test_ctl_sets_worth_and_bounds_of_running_task(served: Served) -> None:
    name = next(iter(served.coordinator.state.tasks))
    last = await served.log.last_seq()
    done = await ctl("set", name, "--weight", "3", "--preemptible", "yes", "--reason", "test", url=served.url)
    assert (done.code, done.err) == (0, ""), done
    assert f"task {name} goes on with weight 3, preemptible yes, from sequence" in done.out
    await served.until(TaskUpdated, last)
    spec = served.coordinator.state.tasks[name].spec
    assert spec.weight == 3 and spec.preemptible
    both = await ctl("set", name, "--weight", "3", "--lr", "1e-4", url=served.url)
    assert "--lr: waits for the end of an iteration" in one_line(both, 2)
    assert "min_workers" in one_line(await ctl("set", name, "--min-workers", "99", url=served.url), 1)
    assert "give --weight" in one_line(await ctl("set", name, url=served.url), 2)


async def test_submit_warns_of_more_replicas_than_lanes(served: Served) -> None:
    task = b"name: third\nmax_workers: 2\nglobal_batch: 8\nenv: {UNICRON_LANES: '1'}\n"
    done = await ctl("submit", "-", url=served.url, stdin=task)
    assert done.code == 0 and "warning: env.UNICRON_LANES: 1 lanes for up to 2 replicas" in done.err
    await ctl("submit", "-", url=served.url, stdin=b"name: fourth\nmax_workers: 2\nglobal_batch: 8\n")
    grown = await ctl("reshape", "fourth", "--max-workers", "3", url=served.url)
    assert grown.code == 0 and "2 lanes for up to 3 replicas: those that share a lane compute one after" in grown.err


async def test_reshape_command_changes_workers(served: Served) -> None:
    last = await served.log.last_seq()
    done = await ctl("reshape", "big", "--max-workers", "1", "--reason", "small for a day", url=served.url)
    assert (done.code, done.err) == (0, "")
    assert "task big changes to tp 1, pp 1 and 1 to 1 workers, from sequence" in done.out
    await served.until(TaskReshaped, last)
    assert served.coordinator.state.tasks["big"].spec.max_workers == 1
    assert "already; give others" in one_line(await ctl("reshape", "big", url=served.url), 1)
    assert "tp: 64 workers" in one_line(await ctl("reshape", "big", "--tp", "64", url=served.url), 1)
    assert "task: nobody is not active" in one_line(await ctl("reshape", "nobody", "--tp", "2", url=served.url), 1)
    assert "--tp: '0' is not a whole number of 1 or more" in one_line(await ctl("reshape", "big", "--tp", "0"), 2)


async def test_ctl_reads_token_from_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    (tmp_path / "wrong").write_text("guess\n")
    async with serving(tmp_path, story=[], token="s3cret") as served:
        assert "token: missing or wrong" in one_line(await ctl("tasks", url=served.url), 1)
        wrong = await ctl("tasks", "--token-file", str(tmp_path / "wrong"), url=served.url)
        assert "token: missing or wrong" in one_line(wrong, 1)
        right = await ctl("--token-file", str(tmp_path / "token"), "tasks", url=served.url)
        assert right == Outcome(0, "no tasks\n", "")


# --- logs ----------------------------------------------------------------------------------------


async def test_logs_command_prints_log_of_rank(served: Served, tmp_path: Path) -> None:
    (tmp_path / "0").write_text("zero\n")
    (tmp_path / "1").write_text("one\ntwo\n")
    assert (await ctl("logs", "big", url=served.url)).out == "zero\n"
    assert (await ctl("logs", "big", "--rank", "1", "--tail-bytes", "4", url=served.url)).out == "two\n"
    assert json.loads((await ctl("logs", "big", "--json", url=served.url)).out)["worker"] == "big.1"
    assert "has no worker of rank 7" in one_line(await ctl("logs", "big", "--rank", "7", url=served.url), 1)


async def test_logs_command_follows_into_next_worker(served: Served, tmp_path: Path) -> None:
    log = tmp_path / "0"
    log.write_text("first\n")
    process = await start("logs", "big", "-f", url=served.url)
    await read_until(process, "first")
    with log.open("a") as file:
        file.write("second\n")
    assert await read_until(process, "second") == ["second\n"]
    log.unlink()  # between two lives nobody has that rank
    await asyncio.wait_for(served.files.missed.wait(), 10)
    served.files.worker = "big.9"
    log.write_text("the new one's first line\n")
    assert await read_until(process, "first line") == ["the new one's first line\n"]
    assert "--- big.9 on n1" in await interrupt(process)


# --- what goes wrong -----------------------------------------------------------------------------

BAD_USAGE = [
    ([], "arguments are required: COMMAND"),
    (["stats"], "no command 'stats'; did you mean status?"),
    (["tasks", "--jsn"], "unrecognized arguments: --jsn"),
    (["logs"], "arguments are required: TASK"),
    (["logs", "big", "--rank", "one"], "--rank: 'one' is not a whole number of 0 or more"),
    (["logs", "big", "--tail-bytes", "0"], "--tail-bytes: '0' is not a whole number of 1 or more"),
    (["events", "--since", "x"], "--since: 'x' is not a point of a log"),
    (["events", "--type", "PlanAdoptd"], "--type: no event type 'PlanAdoptd'; did you mean PlanAdopted?"),
    (["tasks", "--url", "head:7470"], "--url: 'head:7470' is not an http address; give one like http://127.0.0.1:7470"),
    (["tasks", "--token-file", "/nowhere"], "--token-file: /nowhere: No such file or directory"),
    (["submit", "/nowhere.yaml"], "/nowhere.yaml: cannot be read: No such file or directory"),
    (["plan", "shw"], "no command 'shw'; did you mean show?"),
    (["--json", "plan", "solve"], "arguments are required: FILE"),
    (["plan", "solve", "/nowhere.json"], "/nowhere.json"),
    (["throughput", "--gpus", "8"], "--model: missing"),
]


async def test_bad_usage_prints_one_line_and_exits_with_2(tmp_path: Path) -> None:
    task = tmp_path / "task.yaml"
    task.write_text("name: a\nmodel:\n  layerz: 2\n")
    cases = [*BAD_USAGE, (["submit", str(task)], f"{task}:3: model.layerz: unknown field; did you mean layers?")]
    for start_at in range(0, len(cases), 4):
        some = cases[start_at : start_at + 4]
        outcomes = await asyncio.gather(*(ctl(*arguments) for arguments, _ in some))
        for (arguments, said), outcome in zip(some, outcomes, strict=True):
            assert said in one_line(outcome, 2), arguments


async def answer_with(body: bytes) -> asyncio.Server:
    """A server on a free port that says `body` to whoever comes."""

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):  # though the test has ended meanwhile
            await reader.readuntil(b"\r\n\r\n")
            writer.write(body)
            await writer.drain()

    return await asyncio.start_server(speak, "127.0.0.1", 0)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n<ht>", "answers, but not like a coordinator"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n{\"state\": 1}", "is it another version of unicrond?"),
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n", "HTTP status 500"),
        (b"SSH-2.0-OpenSSH\r\n", "no coordinator at"),
        (b"", "no coordinator at"),
    ],
)  # fmt: skip
async def test_ctl_reports_foreign_server_in_one_line(body: bytes, said: str) -> None:
    server = await answer_with(body)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert said in one_line(await ctl("tasks", "--url", f"http://127.0.0.1:{port}"), 1)


async def test_broken_stream_is_error_not_end() -> None:
    event = b'id: 1\nevent: NodeLeft\ndata: {"seq":1,"recorded_at_us":1,"summary":"x"}\n\n'
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    server = await answer_with(head + f"{len(event):x}\r\n".encode() + event + b"\r\n")
    async with server:
        outcome = await ctl("events", "--url", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    assert outcome.code == 1
    assert outcome.out.count("\n") == 1
    assert "no coordinator at" in outcome.err


async def test_ctl_names_unreachable_coordinator() -> None:
    server = await answer_with(b"")
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    line = one_line(await ctl("status", "--url", f"http://127.0.0.1:{port}"), 1)
    assert f"no coordinator at http://127.0.0.1:{port} (Connection refused); check that `unicrond run` is up" in line


async def test_command_help_has_example() -> None:
    commands = ["status", "nodes", "tasks", "submit", "cancel", "logs", "events", "watch", "plan"]
    some = [[], *([command] for command in commands), ["plan", "show"]]
    for words in some:
        # In this process: eleven interpreters tell no more than one.
        outcome = await asyncio.to_thread(_help, words)
        assert re.search(r"examples?:\n  unicronctl", outcome)
        assert "usage: unicronctl" in outcome


def _help(words: list[str]) -> str:
    from unicrond.ctl.parser import parser

    found = parser()
    for word in words:
        found = next(action for action in found._actions if isinstance(action.choices, dict)).choices[word]
    return found.format_help()


# --- quick to start ------------------------------------------------------------------------------


def imported_by(code: str, stdin: bytes = b"") -> set[str]:
    tell = "import sys; sys.stderr.write(' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; {tell}"], input=stdin, capture_output=True, cwd=ROOT, check=True
    )
    return {name.partition(".")[0] for name in done.stderr.decode().split()}


def test_ctl_imports_nothing_heavy() -> None:
    heavy = {"torch", "megatron", "numba", "numpy", "aiohttp", "rich", "nats", "uvloop", "asyncio"}
    assert not imported_by("import unicrond.ctl.main, unicrond.ctl.parser, unicrond.ctl.commands") & heavy
    body = encode(healed_cluster().log[1].envelope)
    quick = imported_by("from unicrond.ctl.main import main; main(['events', 'decode'])", body)
    assert not quick & (heavy | {"argparse", "http", "yaml", "unicrond.core.state.state"})


async def test_events_decode_reads_message_of_nats_cli() -> None:
    body = encode(healed_cluster().log[1].envelope)
    decoded = await ctl("events", "decode", stdin=body)
    assert (decoded.code, decoded.err) == (0, "")
    assert "node n1 joined with 1 slot" in decoded.out
    assert await ctl("events", "decode", stdin=b"") == Outcome(0, "\n", "")


async def test_ctl_drains_by_deadline_and_in_windows(served: Served) -> None:
    drained = await ctl("drain", "n3", "--by", "2h", "--reason", "new fan", url=served.url)
    assert drained.code == 0 and "node n3 will be empty by 20" in drained.out, drained
    await served.until(NodeCordoned)
    window = await ctl(
        "maintain", "n1", "n2", "--from", "3h", "--duration", "90m", "--reason", "cables", url=served.url
    )
    assert window.code == 0 and " of n1, n2: 20" in window.out, window
    name = window.out.split()[1]
    await served.until(MaintenancePlanned)
    listed, node, plan = await asyncio.gather(
        ctl("maintain", url=served.url),
        ctl("describe", "node", "n1", url=served.url),
        ctl("plan", "show", url=served.url),
    )
    assert name in listed.out and "planned" in listed.out and "n1, n2" in listed.out and "cables" in listed.out
    assert f"{name} from 20" in node.out
    assert f"maintenance {name} of n1, n2: 20" in plan.out and "node n3 empty by 20" in plan.out
    over = await ctl("maintain", "--cancel", name, url=served.url)
    assert over.code == 0 and over.out == f"maintenance {name} is over\n"
    await served.until(MaintenanceCancelled)
    empty = await ctl("maintain", url=served.url)
    assert "no window is planned" in empty.out
    for wrong, told in (
        (("drain", "n3", "--by", "-2h"), "is no time to come"),
        (("drain", "n3", "--by", "1234"), "is no time to come"),
        (("maintain", "n1", "--from", "3h"), "--from and --duration"),
        (("maintain", "n1", "--from", "3h", "--duration", "tomorrow"), "is no duration"),
        (("maintain", "--duration", "3h"), "NODE: name the nodes"),
        (("maintain", "n1", "--cancel", "w1"), "--cancel: "),
    ):
        refused = await ctl(*wrong, url=served.url)
        assert refused.code == 2 and told in refused.err, refused


async def test_forget_command_forgets_node(served: Served) -> None:
    refused = one_line(await ctl("forget", "n1", url=served.url), 1)
    assert "n1 is up; unicronctl forget --leave n1 has it leave for good first" in refused
    told = await ctl("forget", "n1", "--leave", "--reason", "sold", url=served.url)
    assert told.code == 0 and "node n1 leaves for good, then it is forgotten, from sequence" in told.out, told
    await served.until(LeaveCluster)
