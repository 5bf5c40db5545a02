"""The names that completion offers: of tasks, nodes, workers, incidents, plans and windows, from the coordinator's API.

It has the flags and the environment of the command that is being typed, and no more time than
`events/cli/completion.py` gives it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

#: More names than anyone reads are none at all.
NAMES_MAX = 2000


def live_names(kind: str, words: Sequence[str]) -> Iterable[str]:
    """Return the names of this kind that there are now. `words`: the command line so far. Raises whatever goes
    wrong."""
    if kind not in ("task", "node", "worker", "incident", "plan", "window"):
        return ()
    from unicrond.ctl.client_options import client_of

    options = argparse.Namespace(url=None, token_file=None, tls_ca=None)
    for flag, value in pairwise(words):
        if flag in ("--url", "--token-file", "--tls-ca"):
            setattr(options, flag[2:].replace("-", "_"), value if flag == "--url" else Path(value))
    state = client_of(options).state()[0]
    names: dict[str, Iterable[str]] = {
        "task": state.tasks,
        "node": state.nodes,
        "worker": (worker for task in state.tasks.values() for worker in task.workers),
        "incident": (*reversed(state.incidents), *(incident.id for incident in reversed(state.closed_incidents))),
        "plan": (str(state.plan.epoch),),
        "window": state.windows,
    }
    return [name for _, name in zip(range(NAMES_MAX), names[kind], strict=False)]
