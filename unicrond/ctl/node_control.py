"""`unicronctl cordon`, `drain`, `uncordon`, `maintain`, `forget`: which nodes may have workers, and when."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Collection
from typing import Any

from msgspec.structs import asdict

from events.command_line import UsageError
from events.times import to_the_second
from unicrond.core.state import ClusterState, NodeStatus
from unicrond.ctl.asking import client_of, print_json
from unicrond.ctl.moment import as_body
from unicrond.ctl.reading import states
from unicrond.ctl.waiting import POLL_S, TIME_IS_OVER
from unicrond.display.cluster_tables import windows_table
from unicrond.display.tables import show


def cordon(options: argparse.Namespace) -> None:
    """No new workers for nodes."""
    client = client_of(options)
    meant = _meant(options)
    answers = {node: client.cordon(node, drain=False, reason=options.reason, **meant) for node in options.nodes}
    _say(options, answers, "gets no new workers")


def drain(options: argparse.Namespace) -> int:
    """No workers at all for nodes; with `--wait-s`, the exit code says whether they are empty."""
    client = client_of(options)
    meant = _meant(options) | ({"until_return": True} if options.until_return else {})
    meant |= {"by": as_body(options.by)} if options.by else {}
    answers = {node: client.cordon(node, drain=True, reason=options.reason, **meant) for node in options.nodes}
    if options.wait_s is None:
        _say(options, answers, _drained(answers), "; see `unicronctl nodes`")
        return 0
    left, ends_s = dict.fromkeys(options.nodes, 0), time.monotonic() + options.wait_s
    for state in states(client, POLL_S):
        left = occupied(state, options.nodes)
        if not left or time.monotonic() >= ends_s:
            break
    if options.json:
        print_json({"answers": answers, "left": left})
    elif not left:
        print("\n".join(f"node {node} is empty" for node in options.nodes))
    for node, count in {} if options.json else left.items():
        workers = f"{count} {'worker' if count == 1 else 'workers'}"
        print(f"unicronctl: node {node} still has {workers} after {options.wait_s:g} s", file=sys.stderr)
    return TIME_IS_OVER if left else 0


def uncordon(options: argparse.Namespace) -> None:
    """Workers again for nodes."""
    client = client_of(options)
    meant = _meant(options)
    answers = {node: client.uncordon(node, options.reason, **meant) for node in options.nodes}
    _say(options, answers, "may have workers again")


def _drained(answers: dict[str, Any]) -> str:
    by_us = max(answer.get("empty_by_us", 0) for answer in answers.values())
    return f"will be empty by {to_the_second(by_us)}" if by_us else "is being emptied"


def maintain(options: argparse.Namespace) -> None:
    """A maintenance window, the end of one, or what is planned."""
    client = client_of(options)
    nodes = [name for given in options.nodes for name in given.split(",") if name]
    if options.cancel:
        if nodes or options.begins or options.for_s:
            raise UsageError("--cancel: ends the window that it names; give nothing but --reason beside it")
        answer = client.cancel_maintenance(options.cancel, options.reason)
        _tell(options, answer, f"maintenance {options.cancel} is over")
    elif nodes:
        if not (options.begins and options.for_s):
            raise UsageError("--from and --for: a window needs both, such as --from 2h --for 90m")
        told = client.maintain(nodes, as_body(options.begins), options.for_s, options.reason)
        when = f"{to_the_second(told['from_us'])} to {to_the_second(told['until_us'])}"
        _tell(options, told, f"maintenance w{told['seq']} of {', '.join(told['nodes'])}: {when}")
    elif options.begins or options.for_s:
        raise UsageError("NODE: name the nodes of the window")
    else:
        state = client.snapshot().state
        if options.json:
            print_json({name: asdict(window) for name, window in state.windows.items()})
        else:
            show(windows_table(state))


def _tell(options: argparse.Namespace, answer: dict[str, Any], said: str) -> None:
    if options.json:
        print_json(answer)
    else:
        print(said)


def forget(options: argparse.Namespace) -> None:
    """Nodes that have gone leave the state; with `--leave`, those that are up are told to go."""
    client = client_of(options)
    meant = _meant(options)
    answers = {node: client.forget(node, options.reason, leave=options.leave, **meant) for node in options.nodes}
    _say(options, answers, "leaves for good, then it is forgotten" if options.leave else "is forgotten")


def _meant(options: argparse.Namespace) -> dict[str, Any]:
    """Which agent the node must have; nothing where any will do. Raises UsageError."""
    meant = {"boot": options.boot, "address": options.address}
    meant = {name: value for name, value in meant.items() if value}
    if meant and len(options.nodes) > 1:
        raise UsageError(f"--{next(iter(meant))}: is of one node; name that one alone")
    return meant


def occupied(state: ClusterState, nodes: Collection[str]) -> dict[str, int]:
    """How many workers there are on those of `nodes` that are up and not empty."""
    up = [name for name in nodes if name in state.nodes and state.nodes[name].status is NodeStatus.UP]
    return {name: count for name in up if (count := len(state.by_node.on(name)))}


def _say(options: argparse.Namespace, answers: dict[str, Any], what: str, more: str = "") -> None:
    if options.json:
        print_json(answers if len(answers) > 1 else next(iter(answers.values())))
        return
    for node, answer in answers.items():
        print(f"node {node} {what}, from sequence {answer.get('seq')} on{more}")
