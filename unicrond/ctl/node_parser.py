"""The commands of `unicronctl` that say which nodes may have workers, and when; and those about alarms."""

from __future__ import annotations

from unicrond.ctl.parsing import MOMENT_SYNTAX, NODES, REASON, add_to, moment, span_s
from unicrond.events.cli.command_line import (
    Commands,
    add_command,
    examples,
    name,
    node_name,
    number,
    option,
    switch,
)
from unicrond.events.cli.exit_codes import TIMEOUT, exit_codes
from unicrond.events.cli.shared_flags import shared


def add_node_control(commands: Commands) -> None:
    """Add the commands for nodes to the parser of `unicronctl`."""
    choice = (NODES, REASON, shared("--boot"), shared("--address", "act only where it has this one"))
    add_to(
        commands,
        "cordon",
        "give a node no new workers; those that it has stay",
        ("cordon node3 --reason 'new fan'", "cordon node3 --address $POD_IP"),
        *choice,
    )
    add_to(
        commands,
        "drain",
        "empty a node: its workers move at an iteration boundary, and nothing is lost",
        (
            "drain node3 --reason 'new fan'",
            "drain node3 node4 --wait --timeout-s 120",
            "drain node3 --by 2h",
            "drain node3 --until-return",
            "drain node3 --address $POD_IP",
        ),
        *choice,
        switch("--wait", "wait until it is empty"),
        shared("--timeout-s", "with --wait (default: for ever)"),
        option(
            "--by", "TIME", f"set a deadline; workers stay until they must move for it: {MOMENT_SYNTAX}", type=moment
        ),
        switch("--until-return", "end the drain when the node comes back with a new agent: a restart or a reboot"),
        codes=exit_codes(TIMEOUT),
    )
    add_to(
        commands,
        "uncordon",
        "give a cordoned, drained or isolated node workers again",
        ("uncordon node3 --reason 'new fan'", "uncordon node3 --address $POD_IP"),
        *choice,
    )
    add_to(
        commands,
        "forget",
        "forget a node that has left or is lost; its name is free for another machine",
        ("forget node3", "forget node3 --leave --reason 'the machine goes back'"),
        *choice,
        switch("--leave", "have a node that is up leave for good first: it is drained, and its agent ends with 0"),
    )
    _add_maintenance(commands)
    add_to(
        commands,
        "slurm-sync",
        "tell drains and isolations both ways between Slurm and this cluster, until interrupted",
        ("slurm-sync --every-s 5", "slurm-sync --once"),
        option("--every-s", "S", "ask both so often (5)", type=number(0.2, 3600, "seconds"), default=5.0),
        shared("--once"),
        switch("--ends", "give back to Slurm what only rests here, and needs no repair: the cluster ends"),
        switch("--no-holds", "do not drain in Slurm what is isolated here (that needs an operator of Slurm)"),
    )


def add_alarms(commands: Commands) -> None:
    """Add the commands for alarms to the parser of `unicronctl`."""
    alarm = option("alarm", "ALARM", "its name, as `unicronctl alarms` shows it")
    add_to(
        commands,
        "alarms",
        "list the alarms that stand: what needs somebody, and who cares for it",
        ("alarms", "alarms --json"),
    )
    add_to(
        commands,
        "acknowledge",
        "acknowledge an alarm: it notifies nobody again until it is over and comes back",
        ("acknowledge volume-full:state --reason 'disk ordered'",),
        alarm,
        REASON,
    )
    add_to(
        commands,
        "silence",
        "silence an alarm: it notifies nobody for a while",
        ("silence outbox-backlog:node3 2h",),
        alarm,
        option("for_s", "SPAN", "for how long (30m, 4h), 30 days at most", type=span_s),
        REASON,
    )
    add_to(
        commands,
        "assign",
        "assign an alarm to a person",
        ("assign node-isolated:node3 anna --reason 'on call'",),
        alarm,
        option("person", "PERSON", "who cares for it", type=name),
        REASON,
    )
    _add_explain(commands)


def _add_explain(commands: Commands) -> None:
    """Add what the documents say of an alarm, and of all else that a person reads."""
    add_command(
        commands,
        "explain",
        "show what the runbook says of an alarm, a kind of incident, a state or a message, or a document that messages "
        "name; needs no coordinator",
        examples(
            "unicronctl explain outbox-backlog:node3",
            "unicronctl explain node_lost",
            "unicronctl explain 'no coordinator at http://head:7470'",
            "unicronctl explain docs/operate/logins.md",
        ),
        option("name", "NAME", "an alarm, a kind, a state; a message; or a document, docs/..."),
        codes=exit_codes(failed="no document has it"),
    )


def _add_maintenance(commands: Commands) -> None:
    add_to(
        commands,
        "maintain",
        "plan a maintenance window: its nodes are empty while it lasts; without nodes, list those that are planned",
        (
            "maintain node3 node4 --from 2026-12-01T08:00:00+01:00 --duration 4h --reason 'new cables'",
            "maintain node3 --from 90m --duration 30m",
            "maintain",
            "maintain --cancel w1234",
        ),
        option("nodes", "NODE", "its name; several are taken together", type=node_name, nargs="*"),
        option("--from", "TIME", f"begin it then: {MOMENT_SYNTAX}", type=moment, dest="begins"),
        option("--duration", "SPAN", "have it last so long (30m, 4h)", type=span_s, dest="for_s"),
        option("--cancel", "WINDOW", "end this window, or have it not begin"),
        REASON,
    )
