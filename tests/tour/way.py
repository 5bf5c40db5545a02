"""From a trace to the way of one failure: who made each log entry, what folded it, who took it and what came of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from functools import cache
from types import FunctionType
from typing import Any, get_args

from tests.tour.trace import QUIET_S, ROOT, Process, Trace
from unicrond.agents.core import machine
from unicrond.agents.protocol.messages import IterationCommitted
from unicrond.agents.trainer.lifecycle import effects
from unicrond.core.decide import decide
from unicrond.core.fold import FOLDS
from unicrond.events import vocabulary as v

#: Rooms through which every event and message passes; the tour does not stop there.
TRANSPORT = ("events/", "agents/protocol/")
#: The pure cores, and the room of theirs that only holds values.
PURE = ("unicrond/core/", "agents/core/", "agents/trainer/lifecycle/")
ACCESSORS = ("unicrond/core/state/",)
#: Two buckets of the tracer: what ran so shortly before the fault may have run after it.
QUIET_END_US = 20_000
CHAIN_MAX = 6
TAKEN_MAX = 8
#: How long after an entry what its reader does still belongs to it.
REACTION_US = 100_000
#: The fields that tell one event of a type from another, from its first sighting on.
IDENTITY = ("node", "task", "worker", "kind", "generation", "iteration", "source", "peer")
SEAMS = tuple(seam.__name__ for seam in get_args(effects.Seam))
LAST = "TransitionCompleted"
#: What a busy machine's training brings beside the failure, and what the head learns from it.
ASIDE = (
    "DegradationObserved", "StragglerObserved", "StragglerRecovered", "FailureRateEstimated", "ThroughputCorrected",
)  # fmt: skip

Json = dict[str, Any]


def function_name(function: Any) -> str:
    """Return `file:function`, the file relative to the root."""
    assert isinstance(function, FunctionType)
    path = function.__module__.replace(".", "/")
    resolved = (ROOT / f"{path}.py").resolve().relative_to(ROOT)
    return f"{resolved.as_posix()}:{function.__qualname__}"


@cache
def functions_of(file: str) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the functions that a file defines, by qualified name; those inside other functions not."""
    functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}
    scopes: list[tuple[str, ast.Module | ast.ClassDef]] = [("", ast.parse((ROOT / file).read_text()))]
    while scopes:
        prefix, scope = scopes.pop()
        for node in scope.body:
            if isinstance(node, ast.ClassDef):
                scopes.append((f"{prefix}{node.name}.", node))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions[prefix + node.name] = node
    return functions


def function_docstring(function: str) -> str:
    """Return the docstring of `file:function`, or ""."""
    file, _, name = function.partition(":")
    return ast.get_docstring(functions_of(file)[name]) or ""


def first_sentence(text: str) -> str:
    """Return a docstring's first sentence on one line."""
    line = " ".join(text.split())
    return re.split(r"(?<=\.) ", line)[0] if line else ""


def is_stop(function: str) -> bool:
    """Return whether the tour stops at this function: not in transport, nor in a nameless one."""
    return not (function.startswith(TRANSPORT) or "<" in function or function.endswith("__iter__"))


def way(trace: Trace) -> Json:
    """Return the recording that the document is made of."""
    entries = [
        entry for entry in trace.entries if entry["at_us"] >= trace.killed_at_us and not entry.get("quarantined")
    ]
    end_us = next(entry["at_us"] for entry in entries if _type(entry) == LAST)
    leader = _survivor(trace)
    by_id = {_event_id(entry): entry["seq"] for entry in trace.entries}
    kept: dict[str, Json] = {}
    for entry in entries:
        name = key(entry)
        is_before = _type(entry) == "StepCommitted" and entry["envelope"]["event"]["generation"] < 2
        if entry["at_us"] > end_us or is_before or _type(entry) in ASIDE:
            continue
        if name in kept:
            kept[name]["again_ms"].append(_after_ms(trace, entry["at_us"]))
        else:
            kept[name] = _stop(trace, entry, by_id.get(entry["envelope"].get("caused_by", ""), 0))
    return {
        "worker": trace.worker,
        "node": trace.node,
        "entries": list(kept.values()),
        "survivor": _effects(trace, leader, trace.quiet_types()),
        "newcomer": _effects(trace, _newcomer(trace), trace.quiet_types() - {"Send"}),
        "pure": _pure_functions(trace, leader),
        "files": files_entered(trace, leader),
    }


def key(entry: Json) -> str:
    """Return what tells this entry's stop from others: its type, and its variety."""
    event = entry["envelope"]["event"]
    variety = event.get("source") or (event.get("kind") if event["type"] == "ErrorReported" else "")
    if event["type"] == "MembershipDecided":
        variety = "urgent" if event["urgent"] else "planned"
    return f"{event['type']} {variety}".strip()


def _stop(trace: Trace, entry: Json, cause: int) -> Json:
    process, made = _maker(trace, entry)
    message = None if process is None or process.role != "agent" else _message_before(trace, process, made["at_us"])
    return {
        "key": key(entry),
        "seq": entry["seq"],
        "after_ms": _after_ms(trace, entry["at_us"]),
        "again_ms": [],
        "sentence": entry["sentence"],
        "cause": cause,
        "process": process.title if process else "",
        "made": _chain(made),
        "message": message,
        "fold": (fold := _fold(trace, entry)),
        "fold_says": first_sentence(function_docstring(fold)),
        "taken": _taken(trace, entry),
    }


def _maker(trace: Trace, entry: Json) -> tuple[Process | None, Json]:
    """Return the process that made the event, and where it saw it first."""
    event = entry["envelope"]["event"]
    first: tuple[Process, Json] | None = None
    for process in trace.processes:
        for line in process.sightings(event["type"]):
            is_here = "fields" in line and trace.killed_at_us <= line["at_us"] <= entry["at_us"]
            is_made = is_here and not line["function"].startswith(TRANSPORT) and _agrees(line["fields"], event)
            if is_made and _chain(line) and (first is None or line["at_us"] < first[1]["at_us"]):
                first = process, line
    assert first is not None, f"nobody made {event}"
    return first


def _agrees(fields: Json, event: Json) -> bool:
    return all(event.get(name, item) == item for name, item in fields.items() if name in IDENTITY)


def _chain(line: Json) -> list[str]:
    """Return who made it, innermost first, up to the pure function that decided or handled."""
    callers = [line["function"], *line["callers"]] if line["kind"] == "return" else line["callers"]
    chain: list[str] = []
    ends = {function_name(decide), function_name(machine.handle)}
    for function in callers:
        if is_stop(function) and function not in chain:
            chain.append(function)
        if function in ends:
            break
    return chain[:CHAIN_MAX]


def _message_before(trace: Trace, agent: Process, at_us: int) -> Json | None:
    """Return the message upon which an agent made an event, with its sender."""
    lines = [
        line
        for line in agent.sightings()
        if line["base"] == "WireMessage" and "fields" in line and line["function"].startswith(TRANSPORT)
        if at_us - REACTION_US <= line["at_us"] <= at_us
    ]
    for line in reversed(lines):
        senders = [
            (process, sent)
            for process in trace.processes
            if process.node == agent.node and process.role in ("worker", "fork server")
            for sent in process.sightings(line["sighting"])
            if "fields" in sent and sent["at_us"] <= line["at_us"] and _agrees(sent["fields"], line["fields"])
        ]
        if senders:
            process, sent = min(senders, key=lambda item: line["at_us"] - item[1]["at_us"])
            sent = next(
                each
                for each in process.sightings(line["sighting"])
                if each["at_us"] >= sent["at_us"] - REACTION_US and "fields" in each
            )
            return {"type": line["sighting"], "process": process.title, "made": _chain(sent)[:3]}
    return None


def _fold(trace: Trace, entry: Json) -> str:
    """Return the function of FOLDS that the head was seen to run on the entry; the one behind it, where it is a
    lambda."""
    event_type = getattr(v, _type(entry))
    # The coordinator, not a process that it has started for a while.
    head = max((process for process in trace.processes if process.role == "head"), key=lambda each: len(each.lines))
    objects = {line["object"] for line in head.sightings() if line["seq"] == entry["seq"]}
    functions = [str(line["function"]) for line in head.sightings(_type(entry)) if line["object"] in objects]
    registered = function_name(FOLDS[event_type])
    if "<" in registered:
        return next(name for name in functions[functions.index(registered) + 1 :] if is_stop(name))
    if FOLDS[event_type].__name__ != "_ignore":
        assert registered in functions, f"{registered} did not run on {entry}"
    return registered


def _taken(trace: Trace, entry: Json) -> list[Json]:
    """Return what an agent did with the entry, and with the messages that it sent upon it: the agent of the node that
    the entry names, otherwise the leader's."""
    node = entry["envelope"]["event"].get("node", _survivor(trace).node)
    (agent,) = (process for process in trace.processes if process.role == "agent" and process.node == node)
    objects = {line["object"] for line in agent.sightings(_type(entry)) if line["seq"] == entry["seq"]}
    lines = [line for line in agent.sightings(_type(entry)) if line["object"] in objects and line["kind"] == "call"]
    if not lines:
        return []
    step = {"process": agent.title, "what": _type(entry), "functions": _unique(lines)}
    return [step, *_reactions(trace, agent, lines[0]["at_us"])]


def _reactions(trace: Trace, agent: Process, begin_us: int) -> list[Json]:
    begin_quiet_us = trace.killed_at_us - int(QUIET_S * 1e6)
    usual = {line["sighting"] for line in agent.sightings() if begin_quiet_us <= line["at_us"] < trace.killed_at_us}
    steps: list[Json] = []
    for line in agent.sightings():
        is_sent = line["base"] == "WireMessage" and not line["function"].startswith(TRANSPORT)
        if not (is_sent and "fields" in line and begin_us <= line["at_us"] <= begin_us + REACTION_US):
            continue
        if line["sighting"] in usual or any(step["what"] == line["sighting"] for step in steps):
            continue
        for process in trace.processes:
            if process.node != agent.node or process.role not in ("worker", "fork server"):
                continue
            end_us = line["at_us"] + REACTION_US
            lines = [each for each in process.sightings(line["sighting"]) if line["at_us"] <= each["at_us"] <= end_us]
            if _unique(lines):
                steps.append({"process": process.title, "what": line["sighting"], "functions": _unique(lines)})
                break
    return steps


def _unique(lines: Iterable[Json]) -> list[str]:
    return list(dict.fromkeys(line["function"] for line in lines if is_stop(line["function"])))[:TAKEN_MAX]


def _survivor(trace: Trace) -> Process:
    """Return the leader's process: the first that committed an iteration in the next generation."""
    return min((process for process in trace.processes if _committed_us(process)), key=_committed_us)


def _committed_us(process: Process) -> int:
    lines = (line for line in process.sightings(IterationCommitted.__name__) if process.role == "worker")
    return next((line["at_us"] for line in lines if line.get("fields", {}).get("generation") == 2), 0)


def _newcomer(trace: Trace) -> Process:
    """Return the process that took the dead worker's place."""
    workers = (process for process in trace.processes if process.role == "worker" and process.node == trace.node)
    return next(
        process for process in workers if process.lines and process.lines[0].get("at_us", 0) > trace.killed_at_us
    )


def _effects(trace: Trace, worker: Process, without: set[str]) -> list[Json]:
    """Return the lifecycle's effects up to the next optimizer's step: who asked, who carried it out."""
    rows: dict[str, Json] = {}
    lines = [line for line in worker.sightings() if line["base"] == "Effect" and line["at_us"] >= trace.killed_at_us]
    done = {line["object"]: line for line in reversed(lines) if line["kind"] == "call" and is_stop(line["function"])}
    for line in lines:
        name = line["sighting"]
        is_due = name not in without or (name in SEAMS and bool(rows))
        if "callers" not in line or name in rows or not is_due:
            continue
        asked = next((caller for caller in line["callers"] if is_stop(caller)), "")
        carried = done.get(line["object"], {}).get("function", "")
        rows[name] = {
            "effect": name,
            "after_ms": _after_ms(trace, line["at_us"]),
            "asked": asked,
            "carried_out": carried,
        }
        rows[name]["says"] = first_sentence(getattr(effects, name).__doc__ or "")
        if name == SEAMS[-1]:
            break
    return list(rows.values())


def _pure_functions(trace: Trace, survivor: Process) -> dict[str, list[str]]:
    """Return the functions of the pure cores, by file, that ran until the survivors had committed and not before."""
    begin_us = trace.killed_at_us - int(QUIET_S * 1e6)
    before = set().union(*trace.functions(begin_us, trace.killed_at_us - QUIET_END_US).values())
    ran = set().union(*trace.functions(trace.killed_at_us, _committed_us(survivor)).values())
    functions: dict[str, list[str]] = {}
    for name in sorted(ran - before):
        file, _, function = name.partition(":")
        if file.startswith(PURE) and not file.startswith(ACCESSORS) and is_stop(name) and "__" not in function:
            functions.setdefault(file, []).append(function)
    return functions


def files_entered(trace: Trace, survivor: Process) -> dict[str, dict[str, int]]:
    """Return how many files had a function that ran, by role and in all, from the SIGKILL until the survivors had
    committed; in training without a fault before it; and how many handled an event, message or effect of the failure.
    """
    end_us, begin_us = _committed_us(survivor), trace.killed_at_us - int(QUIET_S * 1e6)
    ran = _files(trace.functions(trace.killed_at_us, end_us))
    quiet = _files(trace.functions(begin_us, trace.killed_at_us - QUIET_END_US))
    types = trace.quiet_types()
    handled: dict[str, set[str]] = {}
    for process in trace.processes:
        for line in process.sightings():
            if line["sighting"] not in types and trace.killed_at_us <= line["at_us"] <= end_us:
                names = [line["function"], *line.get("callers", [])[:1]]
                handled.setdefault(process.role, set()).update(names)
    touched = _files(handled)
    more = {role: files - quiet.get(role, set()) for role, files in ran.items()}
    return {
        name: _counts(files) for name, files in (("ran", ran), ("quiet", quiet), ("more", more), ("touched", touched))
    }


def _files(functions: dict[str, set[str]]) -> dict[str, set[str]]:
    return {role: {name.partition(":")[0] for name in names} for role, names in functions.items()}


def _counts(files: dict[str, set[str]]) -> dict[str, int]:
    return {role: len(names) for role, names in sorted(files.items())} | {"all": len(set().union(*files.values()))}


def _type(entry: Json) -> str:
    return str(entry["envelope"]["event"]["type"])


def _event_id(entry: Json) -> str:
    envelope = entry["envelope"]
    return f"{envelope['producer']}-{envelope['boot']}-{envelope['number']}"


def _after_ms(trace: Trace, at_us: int) -> int:
    return round((at_us - trace.killed_at_us) / 1000)
