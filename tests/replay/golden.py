"""The golden logs: bytes of each schema that every later version must read and fold.

python -m tests.replay.golden --digests         after a wanted change of the state's fields or of the fold
python -m tests.replay.golden --log PATH        the log of today's schema: made anew while that has no release
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tests.replay.logs import eventful, write_log
from unicrond.core.replayer import replay
from unicrond.core.state.state import ClusterState
from unicrond.core.state.state_bytes import digest
from unicrond.events.log.point import AtSeq
from unicrond.events.log.segments import read_entries

#: schema -> the log that its last version wrote; of today's schema, that a version of it wrote.
LOGS = {schema: Path(__file__).parents[1] / "golden" / f"log_v{schema}.bin" for schema in (1,)}
SEED = 2401


def facts(state: ClusterState) -> dict[str, Any]:
    """What must never change, however the state is built: what became of everything that the log tells of."""
    return {
        "seq": state.seq,
        "now_us": state.now_us,
        "term": state.term,
        "nodes": {node.name: [node.status, node.isolation.active, node.slots] for node in state.nodes.values()},
        "tasks": {
            task.name: [task.status, task.progress.iteration, task.generation, sorted(task.workers)]
            for task in state.tasks.values()
        },
        "plan": [state.plan.epoch, {a.task: a.workers for a in state.plan.assignments.values()}, state.plan.waf],
        "incidents_open": [incident.id for incident in state.incidents.values()],
        "incidents_closed": [
            [i.id, i.kind, int(i.severity), i.node, i.worker, i.micro_batches_repeated] for i in state.closed_incidents
        ],
        "quarantined": state.quarantined_messages,
        "duplicates": state.duplicates,
        "inert": state.inert,
    }


def expected(log: Path) -> dict[str, Any]:
    """Facts and digests of a committed log, as this version sees them."""
    entries = list(read_entries(log))
    points = [*range(0, len(entries), 50), len(entries)]
    return {
        "facts": facts(replay(entries)),
        "digests": {str(seq): digest(replay(entries, AtSeq(seq))) for seq in points},
    }


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--digests", action="store_true")
    choice.add_argument("--log", type=Path, metavar="PATH")
    if path := parser.parse_args().log:
        write_log(path, eventful(SEED))
        path.chmod(0o644)
    for log in (path,) if path else LOGS.values():
        log.with_suffix(".json").write_text(json.dumps(expected(log), indent=1) + "\n")


if __name__ == "__main__":
    _main()
