"""`unicron-replay whatif`: decide afresh from a point, with other inputs; the difference in plan and WAF."""

from __future__ import annotations

import argparse
from typing import Any

from unicrond.core.planning.problem import ProblemError
from unicrond.core.state.policy import Policy
from unicrond.core.state.state import ClusterState
from unicrond.ctl.parsing import changes_json
from unicrond.display.tables import Table, plain
from unicrond.events.cli.command_line import UsageError
from unicrond.events.vocabulary.phrases import clean
from unicrond.replay.reading.opening import as_json, open_source, require_reached, resolve, say
from unicrond.replay.reading.progress import show
from unicrond.replay.views.report import when
from unicrond.views.view import PolicyView
from unicrond.views.what_if import ClusterChanges, WhatIfError, WhatIfOutcome, changes_of, waf_of, what_if


async def whatif_command(options: argparse.Namespace) -> int:
    """Print what the coordinator would decide with the changes; nothing is written anywhere."""
    state, policy = await _state_and_policy(options)
    try:
        changes = changes_of(changes_json(options))
        without, with_changes = what_if(state, policy, ClusterChanges()), what_if(state, policy, changes)
    except (WhatIfError, ProblemError) as error:
        raise UsageError(f"--{error}") from None
    fields = _json(state, without, with_changes)
    under = ", both under the changed settings" if options.set else ""
    say(as_json(fields) if options.json else _page(state, without, with_changes, fields, under))
    return 0


async def _state_and_policy(options: argparse.Namespace) -> tuple[ClusterState, Policy]:
    """Return the state at --at, and the policy that the coordinator of that moment had."""
    policies = PolicyView()
    async with open_source(options) as source:
        try:
            state = await show(source, policies, "replaying", until=await resolve(source, options.at))
        except ValueError as error:
            raise UsageError(f"--at: {error}") from None
    require_reached(options.at, state.seq)
    return state, policies.policy


def _json(state: ClusterState, without: WhatIfOutcome, with_changes: WhatIfOutcome) -> dict[str, Any]:
    # Both plans by the changed settings: else another weight would look like a gain.
    before, after = waf_of(with_changes.state, without.plan), waf_of(with_changes.state, with_changes.plan)
    return {
        "seq": state.seq,
        "tasks": {
            name: {
                "workers_now": state.plan.workers.get(name, 0),
                "workers_without": without.plan.workers.get(name, 0),
                "workers_with": with_changes.plan.workers.get(name, 0),
                "waf_without": before.get(name, 0),
                "waf_with": after.get(name, 0),
            }
            for name in dict.fromkeys([*without.plan.assignments, *with_changes.plan.assignments])
        },
        "waf_without": sum(before.values()),
        "waf_with": sum(after.values()),
        "reason_without": without.plan.reason,
        "reason_with": with_changes.plan.reason,
        "decisions_with": [event.sentence() for event in with_changes.decisions],
    }


def _page(
    state: ClusterState, without: WhatIfOutcome, with_changes: WhatIfOutcome, fields: dict[str, Any], under: str
) -> str:
    rows = tuple(
        (
            name,
            str(row["workers_now"]),
            str(row["workers_without"]),
            str(row["workers_with"]),
            f"{row['waf_without']:.4g}",
            f"{row['waf_with']:.4g}",
        )
        for name, row in fields["tasks"].items()
    )
    headers = ("task", "workers now", "unchanged", "what if", "WAF unchanged", "WAF what if")
    table = Table(headers, rows, frozenset(headers[1:]), "no tasks")
    before, after = fields["waf_without"], fields["waf_with"]
    share = f" ({(after - before) / before:+.1%})" if before else ""
    at_once = ", ".join(f"{count} {name}" for name, count in with_changes.counts.items())
    return "\n".join(
        [
            f"decided again at {when(state)}",
            "",
            *plain(table),
            "",
            f"WAF {before:.4g} -> {after:.4g} FLOP/s{share}{under}",
            f"unchanged: {clean(fields['reason_without'])}",
            f"what if:   {clean(fields['reason_with'])}",
            f"at once:   {at_once or 'nothing else'}",
        ]
    )
