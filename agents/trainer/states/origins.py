"""Which run of a task's name has made a saved state, with which settings, and whether this run may go on from it.

    <dir>/iteration-00000120/made-with.json    beside the shards: run, settings, the program's own checkpoint
    <dir>/before-<run>/iteration-00000120      kept from earlier runs, out of the way of this one; never deleted

Rules
-----
* The head compares what its log holds (core/tasks/resubmission.py). This is the second door: states on storage may come
  from another log, and only a worker knows which checkpoint its program has loaded.
* States of this run are taken as they are. So are the settings of those runs that the head has compared (`continues`),
  and what `unicronctl set` has changed since: a running task does not end by its own settings. States of any other run
  with other settings: the task is refused, by OtherSettings; `--resume` takes them; `--restart` and `--fork` pass over
  them.
* Where the program loads a checkpoint of its own that is older than the one it would have loaded when the state was
  saved, a person has rolled it back: the program's is obeyed. One that is newer than all states was seen by none.
* The first save of a run moves the states of other runs aside that it does not continue. They would count as newer than
  its own, and pruning would remove its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from unicrond.agents.trainer.states.places import FOLDER, MANIFEST, StatePlace, name_of
from unicrond.agents.trainer.states.state import BadState, StateRefused
from unicrond.events.megatron.training_settings import CHANGEABLE, differences, refusal, settings_of
from unicrond.events.vocabulary import TaskSpec, TaskStart

FILE = "made-with.json"
#: In a state tree.
KEY = "made_with"
_ROLLED_BACK = "its program loads the checkpoint after iteration {now}, and loaded {before} when this was saved"


class OtherSettings(StateRefused):
    """The saved states are of another run, and this one may not go on from them unless a person says so."""


class Origin(msgspec.Struct, frozen=True):
    """Say which run has made a state. `run_id`: of the task's start; `settings`: see training_settings.py;
    `program_iteration`: of the newest checkpoint that the program itself would have loaded then, 0 for none."""

    run_id: str = ""
    settings: dict[str, str] = {}
    program_iteration: int = 0


class _ManifestFolder(msgspec.Struct, frozen=True):
    """Read of a manifest where the files of its attempt are."""

    folder: str = ""


class RunOrigin:
    """Name the origin of the states that this worker saves, and judge others by theirs."""

    def __init__(self, spec: TaskSpec) -> None:
        self.start = spec.start or TaskStart()
        self._task = spec.name
        self._settings = settings_of(spec)
        self._loaded_iteration = self._program_iteration = 0
        self._was_rolled_back = False
        #: Returns the iteration of the newest checkpoint that the program would load now; None: it stays the same.
        self.look_for_program_state: Callable[[], int] | None = None

    def note_program_state(self, iteration: int) -> None:
        """Note that the program itself has loaded its checkpoint after `iteration`, 0 for none."""
        self._loaded_iteration = self._program_iteration = iteration

    def present(self) -> Origin:
        """Return the origin of a state that is saved now."""
        return Origin(self.start.run_id, self._settings, self._program_iteration)

    def stored(self) -> Origin:
        """Return the same, after a look at the program's checkpoints: for who may wait for storage."""
        if self.look_for_program_state is not None:
            self._program_iteration = max(self._program_iteration, self.look_for_program_state())
        return self.present()

    def is_wanted(self, origin: Origin | None) -> bool:
        """Return whether a state of this origin is to be looked at: a run that begins anew has but its own."""
        return self._is_own(origin) or self.start.mode not in ("restart", "fork")

    def _is_own(self, origin: Origin | None) -> bool:
        return self.start.run_id in ("", _run_id_of(origin))

    def require(self, origin: Origin | None) -> None:
        """Accept a state of this origin. Raises BadState where it is to be passed over, OtherSettings where the task
        must end."""
        if self._is_own(origin) or self.start.mode == "resume":
            return
        if not self.is_wanted(origin):
            raise BadState(f"it is of an earlier run of the name, and this one begins anew (--{self.start.mode})")
        if origin is None:
            return
        if origin.run_id not in self.start.continues:
            changes = differences(
                origin.settings, self._settings, leave_out=CHANGEABLE if self.start.is_changed else ()
            )
            if changes:
                raise OtherSettings(refusal(self._task, changes))
        if origin.program_iteration and not self._loaded_iteration:
            change = f"its program loaded the checkpoint after iteration {origin.program_iteration} before, none now"
            raise OtherSettings(refusal(self._task, [change]))
        self._was_rolled_back |= self._loaded_iteration < origin.program_iteration
        if self._was_rolled_back:
            raise BadState(_ROLLED_BACK.format(now=self._loaded_iteration, before=origin.program_iteration))


def _run_id_of(origin: Origin | None) -> str:
    return origin.run_id if origin is not None else ""


def origin_in(tree: Mapping[str, Any]) -> Origin | None:
    """Return what a state says of its origin; None where it says nothing readable."""
    try:
        return msgspec.convert(tree.get(KEY), Origin)
    except msgspec.ValidationError:
        return None


# --- on storage ------------------------------------------------------------------------------------


def origin_of(place: StatePlace, iteration: int) -> Origin | None:
    """Return the origin of the checkpoint after `iteration`; None where nothing there says it. Raises OSError where the
    file cannot be read: whose the state is, nobody knows then."""
    name = name_of(iteration)
    for folder in dict.fromkeys((_attempt_of(place, iteration), "")):  # until now it was never in the attempt's
        try:
            return msgspec.json.decode(place.content(f"{name}/{folder}/{FILE}".replace("//", "/")), type=Origin)
        except FileNotFoundError:
            continue
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None
    return None


def _attempt_of(place: StatePlace, iteration: int) -> str:
    """Return the folder that the manifest names; "" where it names none."""
    try:
        folder = msgspec.json.decode(place.content(f"{name_of(iteration)}/{MANIFEST}"), type=_ManifestFolder).folder
    except (FileNotFoundError, msgspec.MsgspecError, ValueError, RecursionError):
        return ""
    return folder if FOLDER.fullmatch(folder) else ""


def put_aside(place: StatePlace, iterations: Iterable[int], start: TaskStart, iteration: int) -> None:
    """Move the checkpoints of other runs out of the way of a run that is about to save the state after `iteration`, as
    far as it does not continue them. What does not say whose it is stays. Raises OSError."""
    if not start.run_id:
        return
    begins_anew = start.mode in ("restart", "fork")
    for number in iterations:
        if not begins_anew and number < iteration:
            continue
        path = place.path_of(name_of(number))
        try:
            is_own = _run_id_of(origin_of(place, number)) == start.run_id
        except OSError as error:
            print(f"left {path} where it is: {error}", file=sys.stderr, flush=True)
            continue
        if not is_own and (destination := place.move(number, f"before-{start.run_id}")):
            print(f"kept {path} of an earlier run as {destination}", file=sys.stderr, flush=True)
