"""Write `docs/one-failure.md` from the recording."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tests.tour.trace import ROOT
from tests.tour.way import Json

RECORDING = Path(__file__).parent / "recording.json"
DOCUMENT = ROOT / "docs/one-failure.md"

#: What a reader should know of an entry beyond its sentence, by its key. Every key of the recording has its note.
NOTES = {
    "ErrorReported process_exit": (
        "The cause of death, with the end of the worker's output. Its fold opens the incident, or names the cause of"
        " the one that a survivor's report has opened: there is one for each task and generation. An incident's number"
        " is that of the entry which opened it."
    ),
    "WorkerExited": (
        "The death itself. Only now is the process known to be gone: the fold drops the worker from the members that"
        " live, and what it had computed is counted as lost."
    ),
    "ErrorReported connection_broken": (
        "A survivor's end of the broken collective. Whichever report comes first opens the incident; the others are"
        " its symptoms, and `blame` finds the worker at fault."
    ),
    "MembershipDecided urgent": (
        "The answer to all of the above. `decide` reads the whole state, not the entries: a member is gone, so the"
        " others go on without it, at once. The agents of the task's nodes read this entry in the log themselves."
    ),
    "StartWorker": (
        "The same batch holds the command for a new worker: the plan still fits, so it has the dead one's node. The"
        " agent acts once for each command id; its fork server forks a process that has imported torch already."
    ),
    "WorkerJoinedGroup own": (
        "The survivors train again. The leader's report stands for all members that kept their state (`own`)."
    ),
    "WorkerStarted": "The fork server has started the new process, which builds its model while the survivors train.",
    "CommandApplied": "The agent's answer to the command. A command without an answer is given again.",
    "StepCommitted": (
        "The iteration in which the worker died is committed, with the dead worker's micro-batches computed again by"
        " the survivors. The agent sums up a second's commits."
    ),
    "WorkerReady": "The new worker has its model and waits for a membership.",
    "MembershipDecided planned": (
        "Everybody whom the plan wants is ready, so the newcomer joins: planned, at an iteration boundary that all"
        " members agree on."
    ),
    "StateLoaded replica": "For people: where the newcomer's state came from. It changes no state of the cluster.",
    "WorkerJoinedGroup replica": "The newcomer is in, with a survivor's state.",
    "TransitionCompleted": (
        "All members of the newest generation have joined: `close_incident` finds the task whole, and the decision"
        " holds what the failure has cost. Detected: from the first observer's clock to the log. Transition: from there"
        " until the survivors trained again, not until the newcomer was in."
    ),
}

INTRODUCTION = """# One failure

One worker of a task dies by SIGKILL in the middle of an iteration; this is what happens until all three train again.
It is written from a **recording of a real run**: nats-server, coordinator, three agents with their fork servers and
three workers with Megatron-core on one machine, every process under a tracer. `make tour` records it anew and writes
this page; the tests run the failure again and compare.

Read it beside the code, from top to bottom: half an hour. Each section is an entry of the log: what it says; **made
by**, the innermost function first, up to the pure function that handles or decides; **upon**, the message that led to
it, and its sender; **fold**, what it does to the head's state; **leads to** and **because of**, the decisions and
answers that follow from an entry; **taken by**, what a node does with a decision. Times are milliseconds after the
SIGKILL, under the tracer, which slows everything down, beside other work on two cores. The tour does not stop in
transport: `events/` (codec, log, NATS) and `agents/protocol/`.
"""


def write_document(recording: Json) -> str:
    """Return the document's text."""
    return "\n".join(
        [
            INTRODUCTION,
            *_overview(recording),
            *(line for entry in recording["entries"] for line in _section(entry, recording)),
            *_pure(recording),
            *_files(recording),
        ]
    )


def stop_functions(recording: Json) -> set[str]:
    """Return the functions at which the tour stops: `file:function`."""
    functions: set[str] = set()
    for entry in recording["entries"]:
        functions |= {*entry["made"], entry["fold"], *(entry["message"] or {"made": []})["made"]}
        functions.update(*(step["functions"] for step in entry["taken"]))
    for row in (*recording["survivor"], *recording["newcomer"]):
        functions |= {row["asked"], row["carried_out"]} - {""}
    return functions


def all_functions(recording: Json) -> set[str]:
    """Return every function that the document names."""
    pure = {f"{file}:{name}" for file, names in recording["pure"].items() for name in names}
    return stop_functions(recording) | pure


def load_recording() -> Json:
    """Return the recording that the document is made of."""
    recording: Json = json.loads(RECORDING.read_text())
    return recording


def _overview(recording: Json) -> Iterator[str]:
    yield f"Recorded on {recording['date']} with {recording['versions']}:"
    yield f"{recording['worker']} on {recording['node']} dies.\n"
    yield "| ms | entry | in | made by | fold |\n|--:|---|---|---|---|"
    for entry in recording["entries"]:
        made, fold = _link(entry["made"][0]), _link(entry["fold"])
        yield f"| {entry['after_ms']} | [{_title(entry)}](#{_anchor(entry)}) | {entry['process']} | {made} | {fold} |"
    yield ""


def _section(entry: Json, recording: Json) -> Iterator[str]:
    by_seq = {each["seq"]: each for each in recording["entries"]}
    again = f", and again after {', '.join(map(str, entry['again_ms']))} ms" if 0 < len(entry["again_ms"]) < 4 else ""
    yield f"## {_title(entry)}\n\n> {_sentence(entry['sentence'])}\n"
    yield f"After {entry['after_ms']} ms{again}. {NOTES[entry['key']]}\n"
    yield "| | |\n|---|---|"
    if entry["message"]:
        message = entry["message"]
        yield f"| **upon** | `{message['type']}`, sent by the {message['process']}: {_chain(message['made'])} |"
    if entry["cause"] in by_seq:
        cause = by_seq[entry["cause"]]
        yield f"| **because of** | [{_title(cause)}](#{_anchor(cause)}) |"
    yield f"| **made by** | {entry['process']}: {_chain(entry['made'])} |"
    yield f"| **fold** | {_link(entry['fold'])}: {entry['fold_says'] or 'the state stays as it is.'} |"
    effects = [each for each in recording["entries"] if each["cause"] == entry["seq"]]
    if effects:
        yield f"| **leads to** | {', '.join(f'[{_title(each)}](#{_anchor(each)})' for each in effects)} |"
    for step in entry["taken"]:
        yield f"| **taken by** | {step['process']}, `{step['what']}`: {_chain(step['functions'], ' → ')} |"
    yield ""
    if entry["key"] == "MembershipDecided urgent":
        yield from _effects(
            recording,
            "survivor",
            "In a survivor, the lifecycle asks its driver, from the broken collective to the optimizer's step. Its"
            " first rows come before this entry; at `AwaitMembership` it waits for it:",
        )
    if entry["key"] == "MembershipDecided planned":
        yield from _effects(recording, "newcomer", "In the newcomer, beside what a survivor does:")


def _effects(recording: Json, whose: str, title: str) -> Iterator[str]:
    usual = {row["effect"] for row in recording["survivor"]} if whose == "newcomer" else set()
    yield f"{title}\n\n| ms | effect | asked by | carried out by |\n|--:|---|---|---|"
    for row in recording[whose]:
        if row["effect"] not in usual:
            carried = _link(row["carried_out"]) if row["carried_out"] else "the training loop"
            yield f"| {row['after_ms']} | `{row['effect']}`: {row['says']} | {_link(row['asked'])} | {carried} |"
    yield ""


def _pure(recording: Json) -> Iterator[str]:
    yield "## Where it is decided\n"
    yield "Functions of the pure cores that ran from the SIGKILL until the survivors had committed, and did not run in"
    yield "the 3 s of training before.\n\n| file | functions |\n|---|---|"
    for file, names in recording["pure"].items():
        yield f"| [{file}](../{file}) | {', '.join(f'`{name}`' for name in names)} |"
    yield ""


def _files(recording: Json) -> Iterator[str]:
    files, before = recording["files"], recording["files_before"]
    roles = ("head", "agent", "fork server", "worker", "all")
    rows = {
        "ran": "entered: a function of theirs ran",
        "quiet": "entered in the 3 s of training before",
        "more": "entered because of the failure: the first without the second",
        "touched": "handled an event, message or effect that training without a fault has not",
    }
    yield "## Files that one failure enters\n"
    yield "Files of the project of which at least one function ran in a process of this kind, from the SIGKILL until"
    yield "the survivors had committed the iteration; *all* counts a file once. In brackets: the same task and cluster,"
    yield f"by the same tracer, at `{before['commit']}`, before the folders were made into rooms.\n"
    yield "| files | " + " | ".join(roles) + " |\n|---|" + "--:|" * len(roles)
    for name, title in rows.items():
        counts = [f"{files[name].get(role, 0)} ({before[name].get(role, 0)})" for role in roles]
        yield f"| {title} | {' | '.join(counts)} |"
    stops = {function.partition(":")[0] for function in stop_functions(recording)}
    folders = {name.rpartition("/")[0] for name in stops}
    yield f"\nThe functions of this tour, without those of the last section but one, stand in {len(stops)} files and"
    yield f"{len(folders)} folders. A count of that kind, by hand, gave 41 and 14 at `{before['commit']}`."


def _title(entry: Json) -> str:
    return str(entry["key"]).replace(" ", ": ", 1).replace("_", " ")


def _anchor(entry: Json) -> str:
    return _title(entry).lower().replace(":", "").replace(" ", "-")


def _sentence(text: str) -> str:
    """Return the sentence on one line, without what Markdown would read as a link, and without a library's advice."""
    return text.partition(". This is typically")[0].replace("[", "(").replace("]", ")")


def _chain(functions: list[str], arrow: str = " ← ") -> str:
    return arrow.join(map(_link, functions))


def _link(function: str) -> str:
    file, _, name = function.partition(":")
    return f"[`{name}`](../{file})"
