"""The commands of `unicronctl` that talk to a coordinator, one function each.

Results go to stdout, errors to stderr, in one line.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unicrond.core.faults.program_faults import diverging_text, is_looping, looping_text
from unicrond.core.nodes.brakes import hold_lines, mode_text
from unicrond.core.rules.healing_proofs import proof_text
from unicrond.core.state.state import ClusterState, TaskStatus
from unicrond.ctl import history
from unicrond.ctl.client import ApiRefused
from unicrond.ctl.client_options import client_of, health_of, now_us, print_json, snapshot_of
from unicrond.ctl.history import story
from unicrond.ctl.incidents import alarms, handle_alarm, incidents
from unicrond.ctl.lists import node_rows, task_rows, worker_rows
from unicrond.ctl.nats_context import nats_context
from unicrond.ctl.node_control import cordon, drain, forget, maintain, uncordon
from unicrond.ctl.slurm import slurm_sync
from unicrond.ctl.streams import events, last_events_about, logs, stacks, top, watch
from unicrond.ctl.waiting import wait
from unicrond.display.alarms import alarm_line
from unicrond.display.cluster_tables import (
    incidents_table,
    links_table,
    node_status,
    nodes_table,
    stragglers,
    stragglers_table,
    tasks_table,
    workers_table,
)
from unicrond.display.describe import UnknownName, data_of, describe_object
from unicrond.display.doctor import findings, without_clocks
from unicrond.display.doctor_nodes import diagnose_nodes
from unicrond.display.tables import Table, show, visible
from unicrond.display.worth import achieved_now, healthy_waf, planned_wafs, si, waf_in
from unicrond.events.cli.command_line import UsageError
from unicrond.events.host import optional_dependencies as extras
from unicrond.events.vocabulary.phrases import clean
from unicrond.events.vocabulary.shape import Shape

if TYPE_CHECKING:
    import argparse

    from unicrond.events.vocabulary.field_types import StartMode


#: So many of the last events are looked at for the nodes' clocks.
EVENTS_JUDGED = 2000

# --- looking -------------------------------------------------------------------------------------


def status(options: argparse.Namespace) -> None:
    """Show the cluster at a glance."""
    health, snapshot = health_of(options), snapshot_of(options)
    state = snapshot.state
    if options.json:
        print_json({"health": health, **snapshot.body})
        return
    workers = sum(assignment.workers for assignment in state.plan.assignments.values())
    planned, healthy = waf_in(state, sum(planned_wafs(state).values())), waf_in(state, healthy_waf(state))
    achieved = waf_in(state, sum(achieved_now(state, task) for task in _active(state)))
    lines = {
        "coordinator": f"{health['status']}, term {state.term}, sequence {state.seq}, at {client_of(options).url}",
        **_heads(health),
        **({"TROUBLE": str(health["trouble"])} if health.get("trouble") else {}),
        **{f"ALARM {number}": alarm_line(alarm) for number, alarm in enumerate(health.get("alarms") or (), start=1)},
        **{f"weaker {number}": str(line) for number, line in enumerate(health.get("weaker") or (), start=1)},
        **_archive(health),
        **({"mode": modes} if (modes := mode_text(state)) else {}),
        "plan": f"epoch {state.plan.epoch}, {workers} workers, "
        f"WAF {achieved} achieved, {planned} planned, {healthy} in health",
        "because of": f"{state.plan.trigger}; {state.plan.reason}" if state.plan.epoch else "no plan yet",
        "costs": costs_line(snapshot.body.get("costs")),
        "nodes": _tally([node_status(node) for node in state.nodes.values()]),
        "tasks": _tally([task.status.value for task in state.tasks.values()]),
        **_looping(state),
        **_proofs(state),
        **{f"held {number}": line for number, line in enumerate(hold_lines(state), start=1)},
        "incidents": f"{len(state.incidents)} open, {state.incidents_total - len(state.incidents)} closed",
    }
    if options.at is None:
        lines["digest"] = str(snapshot.body.get("digest"))
    if state.quarantined_messages:
        lines["quarantined"] = f"{state.quarantined_messages} messages in the log are not valid events"
    for name, text in lines.items():
        print(f"{name:<12} {text}")
    if state.incidents:
        print()
        show(incidents_table(state, now_us(options, state), last=0))
    if stragglers(state):
        print()
        show(stragglers_table(state))
    if any(link.is_poor for link in state.links.values()):
        print()
        show(links_table(state))


def _archive(health: dict[str, Any]) -> dict[str, str]:
    """Return the line of the archive; none where this head does not archive."""
    if not (archive := health.get("archive")):
        return {}
    lacks = archive["behind_entries"]
    behind = f"; {lacks} entries behind, for {archive['behind_s']:.1f} s" if lacks else ""
    return {"archive": f"entries up to {archive['seq']}{behind}"}


def _heads(health: dict[str, Any]) -> dict[str, str]:
    """Describe the heads, where there is more to say than that one head leads."""
    heads = health.get("heads") or {}
    standbys, leader = heads.get("standing_by") or [], heads.get("leader")
    if not standbys and health.get("leads", True):
        return {}
    leads = f"{leader['process']} (API {leader['api']}) leads" if leader else "none leads"
    return {"heads": ", ".join([leads, *(f"{standby} stands by" for standby in standbys)])}


def _active(state: ClusterState) -> list[Any]:
    return [task for task in state.tasks.values() if task.status is TaskStatus.ACTIVE]


def _looping(state: ClusterState) -> dict[str, str]:
    """Describe the tasks whose programs fail again and again, or diverge."""
    looping = [task for task in state.tasks.values() if is_looping(task)]
    lines = {f"failing {number}": f"{task.name}: {looping_text(task)}" for number, task in enumerate(looping, start=1)}
    diverging = [(task, text) for task in state.tasks.values() if (text := diverging_text(task))]
    return lines | {f"diverged {n}": f"{task.name}: {text}" for n, (task, text) in enumerate(diverging, start=1)}


def _proofs(state: ClusterState) -> dict[str, str]:
    """Describe which active tasks have proved that they heal, or are to."""
    texts = [f"{task.name}: {text}" for task in state.active if (text := proof_text(state, task))]
    return {f"healing {number}": text for number, text in enumerate(texts, start=1)}


def costs_line(costs: dict[str, float] | None) -> str:
    """Say in one line what share of the failure-free work was delivered, and what was lost to which cause."""
    if not costs or not costs["failure_free_flop"]:
        return "no plan yet"
    free = costs["failure_free_flop"]
    parts = [("delivered", "delivered"), ("detection", "detection"), ("transition", "transition")]
    parts += [("repeated", "repeated"), ("sub_health", "sub-health")]
    shares = ", ".join(f"{100 * costs[f'{name}_flop'] / free:.1f} % {text}" for name, text in parts)
    return f"{shares} of {si(free, 'FLOP')}"


def _tally(words: list[str]) -> str:
    counts = {word: words.count(word) for word in dict.fromkeys(words)}
    return ", ".join(f"{count} {word}" for word, count in counts.items()) or "none"


def nodes(options: argparse.Namespace) -> None:
    """Show the nodes, and what runs on them."""
    snapshot = snapshot_of(options)
    table = nodes_table(snapshot.state, outbox_backlog=snapshot.body.get("outbox_backlog"))
    show_or_json(options, node_rows(snapshot), table)


def tasks(options: argparse.Namespace) -> None:
    """Show the tasks and their progress; JSON adds what the coordinator derives ("waf", "delivered_flop")."""
    snapshot = snapshot_of(options)
    show_or_json(options, task_rows(snapshot), tasks_table(snapshot.state, has_all_tasks="owner" not in snapshot.body))


def workers(options: argparse.Namespace) -> None:
    """Show the workers: rank, node, process."""
    snapshot = snapshot_of(options)
    if options.task and options.task not in snapshot.state.tasks:
        raise ApiRefused(f"task: no task {options.task}; see `unicronctl tasks`", 404)
    show_or_json(options, worker_rows(snapshot, options.task), workers_table(snapshot.state, options.task or ""))


def describe(options: argparse.Namespace) -> None:
    """Show everything about one task, node or incident, and its last events."""
    snapshot = snapshot_of(options)
    try:
        if options.json:
            print_json(data_of(snapshot.state, options.kind, options.name))
            return
        events = last_events_about(options, snapshot.state, options.kind, options.name)
        sections = describe_object(snapshot.state, options.kind, options.name, events)
    except UnknownName as error:
        raise ApiRefused(str(error), 404) from None
    for number, section in enumerate(sections):
        print("\n" * bool(number) + section.title)
        if isinstance(section.body, dict):
            for name, text in section.body.items():
                print(f"  {name:<12} {clean(text)}")
        elif isinstance(section.body, list):
            print("\n".join(f"  {visible(line)}" for line in section.body))
        else:
            show(section.body)


def doctor(options: argparse.Namespace) -> int:
    """Show what is likely to go wrong; return 1 where there is something."""
    client = client_of(options)
    health, state = client.health(), client.snapshot().state
    events = list(client.events(max(0, state.seq - EVENTS_JUDGED), until=state.seq))
    problems, notes = findings(state, health, events), []
    if options.quick:
        notes = ["nodes, links and storage (--quick)"]
    else:
        try:
            checks = client.checks(options.library, options.timeout_s)
            node_report = diagnose_nodes(checks)
            problems, notes = [*without_clocks(problems, checks["facts"]), *node_report.findings], node_report.notes
        except ApiRefused as error:
            notes = [f"nodes, links and storage: {error}"]
    if options.json:
        print_json([problem._asdict() for problem in problems])
    elif problems:
        show(Table(("about", "problem", "fix"), tuple(problems)))
    else:
        print(f"nothing found: coordinator {health['status']}, {len(state.nodes)} nodes")
    for note in notes:
        print(f"not looked at: {note}", file=sys.stderr)
    return 1 if problems else 0


def goodput(options: argparse.Namespace) -> int | None:
    """Show where the work and the time went, up to the log's newest entry; an interval is counted from the log here."""
    from unicrond.display.goodput_tables import goodput_tables, hints

    if options.since is not None or options.until is not None:
        return history.run(options)
    report = client_of(options).goodput(options.peak_tflops)
    if options.json:
        print_json(report)
        return None
    for number, (title, table) in enumerate(goodput_tables(report)):
        print(f"{chr(10) * bool(number)}{title}")
        show(table)
    for hint in hints(report):
        print(f"\n{hint}")
    return None


def plan(options: argparse.Namespace) -> None:
    """Show the adopted plan, those foreseen, and those of other clusters: see plan.py."""
    from unicrond.ctl import plan as ctl_plan

    ctl_plan.COMMANDS[options.plan_command](options)


def show_or_json(options: argparse.Namespace, data: Any, table: Table) -> None:
    """Show the answer as a table or as JSON, as the flags ask."""
    if options.json:
        print_json(data)
    else:
        show(table)


# --- asking for something ------------------------------------------------------------------------


def submit(options: argparse.Namespace) -> None:
    """Check a task file here, then submit the task to the coordinator, which checks it again."""
    import msgspec

    from unicrond.events.megatron import command_line as megatron_lm
    from unicrond.intake import megatron_task
    from unicrond.intake.task_file import TaskFileError, load, loads, with_start

    try:
        spec = loads(sys.stdin.read(), where="stdin") if options.file == "-" else load(Path(options.file))
        mode: StartMode = "resume" if options.resume else "restart" if options.restart else ""
        spec = with_start(spec, mode, fork=options.fork or "", prove=options.prove, where=options.file)
    except TaskFileError as error:
        raise UsageError(str(error)) from None
    except UnicodeDecodeError:
        raise UsageError("stdin: is not UTF-8 text; give a YAML file") from None
    if options.check:
        summary = megatron_task.lines(spec.args) if spec.entry == megatron_lm.ENTRY else []
        _say(
            options,
            {"task": spec.name, "ok": True, **({"understood": summary} if summary else {})},
            "\n  ".join([f"{options.file}: task {spec.name} is valid", *summary]),
        )
        return
    answer = client_of(options).submit(msgspec.to_builtins(spec))
    _warn(answer)
    outlook = f"; {answer['outlook']}" if answer.get("outlook") else ""
    _say(options, answer, f"task {spec.name} submitted, at sequence {answer.get('seq')}{outlook}")


def _warn(answer: Mapping[str, Any]) -> None:
    for warning in answer.get("warnings", ()):
        print(f"warning: {warning}", file=sys.stderr)


def init_megatron(options: argparse.Namespace) -> None:
    """Print a task file for a command line of Megatron-LM."""
    from unicrond.events.megatron.command_line import BadFlags
    from unicrond.intake import megatron_init
    from unicrond.intake.task_file import TaskFileError, loads

    try:
        if options.script is None:
            command = megatron_init.parse_words(options.words)
        else:
            command = megatron_init.parse_script(options.script.read_text())
        text = megatron_init.task_file(command, name=options.task or "", base=Path.cwd())
        loads(text, where="the task file that would come of it")
    except (megatron_init.BadScript, BadFlags, TaskFileError, OSError, UnicodeDecodeError) as error:
        raise UsageError(str(error)) from None
    _say(options, {"task_file": text}, text.rstrip("\n"))


def checkpoint(options: argparse.Namespace) -> int:
    """Export a checkpoint without its layout, import or convert one. (torch is loaded in a process of its own.)"""
    extras.require("unicronctl checkpoint", "node")
    names = ("task", "to", "hf_config", "vocab_size", "pad_vocab", "model_only", "json")
    values = ((name.replace("_", "-"), getattr(options, name)) for name in names)
    words = [options.what, options.source, options.directory, *(f"--{flag}={value}" for flag, value in values if value)]
    process = subprocess.Popen([sys.executable, "-P", "-m", "unicrond.agents.trainer.converters.convert", *words])
    while True:
        with suppress(KeyboardInterrupt):  # it has got that too, and removes what it has left half done
            return process.wait()


def cancel(options: argparse.Namespace) -> None:
    """Cancel a task."""
    answer = client_of(options).cancel(options.task, options.reason)
    _say(options, answer, f"task {options.task} cancelled, at sequence {answer.get('seq')}; its checkpoints stay")


def prove(options: argparse.Namespace) -> None:
    """Have a task prove that it heals."""
    answer = client_of(options).update(options.task, {}, of="prove")
    text = f"task {options.task} will prove that it heals, ordered at sequence {answer.get('seq')}"
    _say(options, answer, f"{text}; see `unicronctl tasks`")


def reshape(options: argparse.Namespace) -> None:
    """Request another layout for a task."""
    fields = (*Shape._fields, "min_workers", "max_workers", "reason")
    order = {name: value for name in fields if (value := getattr(options, name)) is not None}
    answer = client_of(options).reshape(options.task, order)
    _warn(answer)
    form = Shape(**{name: size for name in Shape._fields if isinstance(size := answer.get(name), int)})
    workers = f"{answer.get('min_workers')} to {answer.get('max_workers')} workers"
    _say(options, answer, f"task {options.task} changes to {form} and {workers}, from sequence {answer.get('seq')} on")


def set_mode(options: argparse.Namespace) -> None:
    """Set the mode of the cluster, or of one task."""
    order = {"mode": options.mode, **_given(options, "reason")}
    answer = client_of(options).update(options.task or "", order, of="mode")
    target = f"task {options.task}" if options.task else "the cluster"
    _say(options, answer, f"{target} is in mode {options.mode} from sequence {answer.get('seq')} on")


def set_task(options: argparse.Namespace) -> None:
    """Change settings of a running task: its worth and bounds, or how far and how fast it learns."""
    worth, learning = _given(options, *_WORTH), _given(options, "iterations", "lr")
    if not worth and not learning:
        raise UsageError(f"give {', '.join(f'--{name}' for name in (*_WORTH, 'iterations'))} or --lr".replace("_", "-"))
    if worth and learning:
        first = min(learning)
        raise UsageError(f"--{first}: waits for the end of an iteration, the others do not; give it in its own command")
    if "preemptible" in worth:
        worth["preemptible"] = worth["preemptible"] == "yes"
    changes, ask = (worth, client_of(options).update) if worth else (learning, client_of(options).reshape)
    answer = ask(options.task, {**changes, **_given(options, "reason")})
    _warn(answer)
    text = ", ".join(f"{name} {_word(value)}" for name, value in changes.items())
    _say(options, answer, f"task {options.task} goes on with {text}, from sequence {answer.get('seq')} on")


#: Settings that a plan weighs, as the API names them.
_WORTH = ("weight", "priority", "preemptible", "min_workers", "max_workers")


def _word(value: float | bool) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else f"{value:g}"


def _given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def inject(options: argparse.Namespace) -> None:
    """Order a fault."""
    fields = ("task", "rank", "node", "at_iteration", "phase", "seconds", "xid", "counts")
    order = {"kind": options.kind.replace("-", "_")} | {name: getattr(options, name) for name in fields}
    answer = client_of(options).inject(order)
    target = f"{answer.get('worker')} on {answer.get('node')}" if answer.get("worker") else f"node {answer.get('node')}"
    _say(options, answer, f"ordered {options.kind} for {target}, at sequence {answer.get('seq')}")


def _say(options: argparse.Namespace, data: Any, text: str) -> None:
    if options.json:
        print_json(data)
    else:
        print(text)


#: Those that give no exit code of their own end with 0.
COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "status": status,
    "nodes": nodes,
    "tasks": tasks,
    "workers": workers,
    "incidents": incidents,
    "alarms": alarms,
    **dict.fromkeys(("acknowledge", "silence", "assign"), handle_alarm),
    "describe": describe,
    "doctor": doctor,
    "plan": plan,
    "submit": submit,
    "init-megatron": init_megatron,
    "checkpoint": checkpoint,
    "cancel": cancel,
    "prove": prove,
    "reshape": reshape,
    "set": set_task,
    "mode": set_mode,
    "cordon": cordon,
    "drain": drain,
    "uncordon": uncordon,
    "maintain": maintain,
    "forget": forget,
    "inject": inject,
    "events": events,
    "logs": logs,
    "stacks": stacks,
    "watch": watch,
    "top": top,
    "wait": wait,
    "slurm-sync": slurm_sync,
    "nats-context": nats_context,
    **dict.fromkeys(history.COMMANDS, history.run),
    "story": story,
    "goodput": goodput,
}
