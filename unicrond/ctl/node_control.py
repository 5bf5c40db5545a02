"""`unicronctl cordon`, `drain`, `uncordon`, `maintain`, `forget`: which nodes may have workers, and when."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Collection
from typing import Any

from unicrond.core.state.state import ClusterState, NodeStatus
from unicrond.ctl.client_options import client_of, print_json
from unicrond.ctl.lists import window_rows
from unicrond.ctl.parsing import as_body
from unicrond.ctl.streams import states
from unicrond.ctl.waiting import POLL_S
from unicrond.display.cluster_tables import windows_table
from unicrond.display.tables import show
from unicrond.events.cli.command_line import UsageError
from unicrond.events.cli.exit_codes import DONE, TIMEOUT
from unicrond.events.vocabulary.phrases import to_the_second


def cordon(options: argparse.Namespace) -> None:
    """Stop new workers for nodes."""
    client = client_of(options)
    conditions = _conditions(options)
    answers = {node: client.cordon(node, drain=False, reason=options.reason, **conditions) for node in options.nodes}
    _say(options, answers, "gets no new workers")


def drain(options: argparse.Namespace) -> int:
    """Move all workers away from nodes; with `--wait`, the exit code says whether they are empty. Raises UsageError."""
    if options.timeout_s is not None and not options.wait:
        raise UsageError("--timeout-s: is for --wait; give both")
    client = client_of(options)
    conditions = _conditions(options) | ({"until_return": True} if options.until_return else {})
    conditions |= {"by": as_body(options.by)} if options.by else {}
    answers = {node: client.cordon(node, drain=True, reason=options.reason, **conditions) for node in options.nodes}
    if not options.wait:
        _say(options, answers, _drained(answers), "; see `unicronctl nodes`")
        return DONE
    remaining = dict.fromkeys(options.nodes, 0)
    ends_s = time.monotonic() + (math.inf if options.timeout_s is None else options.timeout_s)
    for state in states(client, POLL_S):
        remaining = occupied(state, options.nodes)
        if not remaining or time.monotonic() >= ends_s:
            break
    if options.json:
        print_json(
            [{"node": node, **answer, "workers_left": remaining.get(node, 0)} for node, answer in answers.items()]
        )
    elif not remaining:
        print("\n".join(f"node {node} is empty" for node in options.nodes))
    for node, count in {} if options.json else remaining.items():
        workers = f"{count} {'worker' if count == 1 else 'workers'}"
        print(f"unicronctl: node {node} still has {workers} after {options.timeout_s:g} s", file=sys.stderr)
    return TIMEOUT if remaining else DONE


def uncordon(options: argparse.Namespace) -> None:
    """Allow workers on nodes again."""
    client = client_of(options)
    conditions = _conditions(options)
    answers = {node: client.uncordon(node, options.reason, **conditions) for node in options.nodes}
    _say(options, answers, "may have workers again")


def _drained(answers: dict[str, Any]) -> str:
    by_us = max(answer.get("empty_by_us", 0) for answer in answers.values())
    return f"will be empty by {to_the_second(by_us)}" if by_us else "is being emptied"


def maintain(options: argparse.Namespace) -> None:
    """Plan a maintenance window, end one, or show the planned ones."""
    client = client_of(options)
    nodes = options.nodes
    if options.cancel:
        if nodes or options.begins or options.for_s:
            raise UsageError("--cancel: ends the window that it names; give nothing but --reason beside it")
        answer = client.cancel_maintenance(options.cancel, options.reason)
        _tell(options, answer, f"maintenance {options.cancel} is over")
    elif nodes:
        if not (options.begins and options.for_s):
            raise UsageError("--from and --duration: a window needs both, such as --from 2h --duration 90m")
        answer = client.maintain(nodes, as_body(options.begins), options.for_s, options.reason)
        when = f"{to_the_second(answer['from_us'])} to {to_the_second(answer['until_us'])}"
        _tell(options, answer, f"maintenance w{answer['seq']} of {', '.join(answer['nodes'])}: {when}")
    elif options.begins or options.for_s:
        raise UsageError("NODE: name the nodes of the window")
    else:
        snapshot = client.snapshot()
        if options.json:
            print_json(window_rows(snapshot))
        else:
            show(windows_table(snapshot.state))


def _tell(options: argparse.Namespace, answer: dict[str, Any], text: str) -> None:
    if options.json:
        print_json(answer)
    else:
        print(text)


def forget(options: argparse.Namespace) -> None:
    """Remove nodes that have left from the state; with `--leave`, those that are up leave first."""
    client = client_of(options)
    conditions = _conditions(options)
    answers = {node: client.forget(node, options.reason, leave=options.leave, **conditions) for node in options.nodes}
    _say(options, answers, "leaves for good, then it is forgotten" if options.leave else "is forgotten")


def _conditions(options: argparse.Namespace) -> dict[str, Any]:
    """Return which agent the node must have; nothing where any will do. Raises UsageError."""
    conditions = {"boot": options.boot, "address": options.address}
    conditions = {name: value for name, value in conditions.items() if value}
    if conditions and len(options.nodes) > 1:
        raise UsageError(f"--{next(iter(conditions))}: is of one node; name that one alone")
    return conditions


def occupied(state: ClusterState, nodes: Collection[str]) -> dict[str, int]:
    """Count the workers on those of `nodes` that are up and not empty."""
    up = [name for name in nodes if name in state.nodes and state.nodes[name].status is NodeStatus.UP]
    return {name: count for name in up if (count := len(state.by_node.on(name)))}


def _say(options: argparse.Namespace, answers: dict[str, Any], outcome: str, suffix: str = "") -> None:
    if options.json:
        print_json([{"node": node, **answer} for node, answer in answers.items()])
        return
    for node, answer in answers.items():
        print(f"node {node} {outcome}, from sequence {answer.get('seq')} on{suffix}")
