"""A worker's life, as the log has it: status x event -> status. A test checks `folding/` against this table.

Rules
-----
* MOVES has one row per event that can move a worker: from a status to the next. `None`: the state does not know the
  worker (any more).
* An event that has no move from a worker's status leaves the worker as it is; so does one that comes too late, or is
  about another generation: that is for the fold of each event to say.

`python -m tests.unicrond.life_diagrams` draws docs/design/lives.md from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from msgspec.structs import replace

from unicrond.core.state.state import Worker, WorkerStatus
from unicrond.events import vocabulary as v

_S = WorkerStatus
Row: TypeAlias = Mapping[WorkerStatus | None, WorkerStatus | None]

#: The task has given the worker up, though its process may run on.
GIVEN_UP: Row = {_S.STARTING: _S.LOST, _S.READY: _S.LOST, _S.MEMBER: _S.LOST, _S.PARKED: _S.LOST}
_REMOVAL: Row = dict.fromkeys(WorkerStatus)

MOVES: Mapping[type[v.AnyEvent], Row] = {
    v.StartWorker: {None: _S.STARTING},
    v.StartWorkers: {None: _S.STARTING},
    v.WorkerReady: {_S.STARTING: _S.READY},
    v.WorkerJoinedGroup: {_S.STARTING: _S.MEMBER, _S.READY: _S.MEMBER, _S.MEMBER: _S.MEMBER},
    v.WorkerPaused: {_S.STARTING: _S.PARKED, _S.READY: _S.PARKED, _S.MEMBER: _S.PARKED, _S.PARKED: _S.PARKED},
    v.StopWorker: dict.fromkeys(WorkerStatus, _S.STOPPING),
    v.WorkerExited: _REMOVAL,
    v.CommandApplied: {_S.STOPPING: None},
    v.CommandFailed: {_S.STARTING: None, _S.STOPPING: _S.LOST},
    v.DeadlineExpired: GIVEN_UP,
    v.HangSuspected: GIVEN_UP,
    v.CorruptionSuspected: GIVEN_UP,
    v.IncidentEscalated: GIVEN_UP,
    v.WorkersWithdrawn: GIVEN_UP,
    v.NodeLost: dict.fromkeys(WorkerStatus, _S.LOST),
    v.NodesLost: dict.fromkeys(WorkerStatus, _S.LOST),
    v.SilenceEnded: dict.fromkeys(WorkerStatus, _S.LOST),  # of nodes that were lost in the silence
    v.NodeLeft: _REMOVAL,
    v.NodeForgotten: _REMOVAL,  # a start may have been decided before the node was seen to leave
    v.TaskSubmitted: {_S.LOST: None},  # the next life of a task that is at rest
    v.NodeJoined: _REMOVAL,
}


def given_up(worker: Worker) -> Worker:
    """Return the worker, lost to its task. KeyError where it is so already, or ends."""
    after = GIVEN_UP[worker.status]
    assert after is not None
    return replace(worker, status=after)


def can_move(worker: Worker, event: type[v.AnyEvent]) -> bool:
    """Return whether the table has a move for the worker."""
    return worker.status in MOVES[event]


def status_after(status: WorkerStatus | None, event: type[v.AnyEvent]) -> WorkerStatus:
    """Return the status that the event leads to. KeyError where the table has no such move, or it leads out of the
    state."""
    after = MOVES[event][status]
    if after is None:
        raise KeyError(event)
    return after
