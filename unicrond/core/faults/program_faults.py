"""Whose fault an end of a worker is: the program's, the hardware's, or not known. Programs come before nodes.

Rules
-----
* *The program's*: an exception of Python, a loss that is not finite, leaving early, memory that is used up (also where
  the kernel's OOM killer ends it), an exit code of its own. It counts for the task (`Crashes`), never against a node.
* *The hardware's*: what a driver reports, and bits that no other replica has. It acts at once (severity.py).
* *Unknown*: a signal, a hang, an error of CUDA or NCCL, of a disk or a mount. It is a strike for the node; but one with
  the same *signature* as an end on another node, or as the program's last fault, without a new iteration between them,
  is the program's: it happens wherever the program runs. The strikes for it are taken back.
* A signature is what was said, without numbers, paths and addresses: the last line of a traceback, the signal and the
  innermost frame. SIGKILL, SIGTERM and a stopped process have none: anything may have caused them.
* What has come on one node alone is tried once on another, and may turn out to be the node's (local_faults.py).
* An order that an agent refuses is nobody's strike; it is tried again, later each time, and counts for the task alone.
* Workers that end together are one fault: those that were started before it and have joined no group since.
* *Back-off*: after n faults since the last calm no worker of the task is started for 0, 1, 2, 4, ... at most 60 s.
  CALM_ITERATIONS new iterations reset it. Iterations that are repeated from a checkpoint are not new.
* *Fruitless* is a fault without a new iteration since the one before, or since the submission. From its second fault on
  such a task is worth nothing to the plan until it is calm: it claims no floor and gets only workers that idle else
  (`rules/plan_problems.py`), so it takes none from others. One fault alone may be a neighbour's doing. Where the others
  need all workers it would never show that it is mended: its turn (starvation.py) counts, and `unicronctl set` gives it
  another chance.
* What such a program frees is claimed anew soon, so for CLAIM_US after its last failure, be it taken back or not, no
  plan is expected to stand for longer than that. A move of other tasks into its place that pays only later is not made
  until then (`rules/survey.py`).
* The task fails after `stuck_max` failures without a new iteration, three loss values that are not finite in one
  iteration, or three early ends without a calm (`deciding/response.py`).

Pure. What counts them: folding/failure_counts.py.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import NamedTuple

from unicrond.core.faults.local_faults import nodes_to_leave
from unicrond.core.state.state import ClusterState, Task, TaskStatus
from unicrond.core.state.task_parts import Crashes
from unicrond.core.state.workers import Worker, WorkerError, WorkerStatus
from unicrond.events import vocabulary as v

BACK_OFF_MAX_US = 60_000_000
#: Faults from which on people are told that a task is crash-looping.
LOOPING_MIN = 2
#: For how long after a program has failed again its place is expected to be claimed anew: its user mends it, takes it
#: back or submits it once more.
CLAIM_US = 1_800_000_000
_SIGNATURE_CHARS = 200
_TAIL_LINES, _TAIL_CHARS = 20, 2000

_PROGRAM = ("exception", "data_error", "nan_loss", "left_early", "out_of_memory")
_HARDWARE = ("ecc_error", "nvlink_error", "driver_error", "dma_error", "gpu_broken", "gpu_fault", "corruption")
#: Of these the end itself says more.
_AT_END = ("process_exit", "start_failed")
_BREAKS = ("connection_broken", "collective_timeout", "store_error")
#: Signals that come from outside the program, and exit codes of workers that have lost their agent.
_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
_OUTSIDE_CODES = (69, 75)
_SHELL_CODES = 126
#: What an exception of Python says that a node may have caused as well: its disk, mounts, accelerators or network.
_NODE_TEXT = re.compile(
    r"Input/output error|Stale file handle|Read-only file system|No such device|Remote I/O"
    r"|Transport endpoint|No space left on device"
    r"|CUDA|cuBLAS|CUBLAS|cuDNN|NCCL|\bECC\b|NVLink|NVSwitch|driver version"
    r"|Connection (closed|reset|refused)|Broken pipe|Socket closed|Network is unreachable|No route to host"
    r"|Dist\w+Error",
)
_TRACEBACK_END = re.compile(
    r"^(?:\[?\w*\]?:?\s*)?([A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Loss|Warning|Early))(?::\s*(.*))?$"
)
_FRAME = re.compile(r'^\s*File "([^"]+)", line \d+ in (\w+)', re.MULTILINE)


class Guilt(StrEnum):
    """Whose fault an end is, as far as it shows."""

    PROGRAM = "program"
    HARDWARE = "hardware"
    UNKNOWN = "unknown"


class FaultVerdict(NamedTuple):
    """`text`: what happened, for people. `signature`: the same wherever it happens, "" where it has none."""

    guilt: Guilt
    text: str
    signature: str = ""
    kind: str = ""
    iteration: int = 0
    is_refusal: bool = False


def judge_end(worker: Worker, event: v.WorkerExited) -> FaultVerdict:
    """Return whose fault the unexpected end is, by itself alone. What the worker has reported goes before its exit."""
    reported = worker.error
    if reported is not None and reported.kind not in (*_AT_END, *_BREAKS):
        return judge_report(reported)
    iteration = reported.iteration if reported is not None else event.iteration
    if event.cause == "oom_killed":
        text = "killed by the kernel's OOM killer"
        return FaultVerdict(Guilt.PROGRAM, text, text, "out_of_memory", iteration)
    if event.signal is not None:
        return _judge_signal(event.signal, event.log_tail, iteration)
    error = _last_exception(event.log_tail)
    code = event.exit_code or 0
    if error and code:
        return _judge_exception("exception", error, iteration)
    if code in _OUTSIDE_CODES or code >= _SHELL_CODES or (reported is not None and reported.kind in _BREAKS):
        return FaultVerdict(Guilt.UNKNOWN, f"exit code {code}", "", "process_exit", iteration)
    text = f"exit code {code}" + ("" if code else " before its end")
    return FaultVerdict(Guilt.PROGRAM, text, text, "process_exit" if code else "left_early_at_start", iteration)


def judge_report(error: WorkerError) -> FaultVerdict:
    """Return whose fault an error is that a worker has reported, or that was found of it."""
    if error.kind in _PROGRAM:
        return _judge_exception(error.kind, error.text, error.iteration)
    if error.kind in _HARDWARE:
        return FaultVerdict(Guilt.HARDWARE, error.text, "", error.kind, error.iteration)
    unclear = error.kind in (*_AT_END, *_BREAKS) or "process is stopped" in error.text
    signature = "" if unclear else f"{error.kind}: {signature_of(error.text)}"
    return FaultVerdict(Guilt.UNKNOWN, error.text[:_SIGNATURE_CHARS], signature, error.kind, error.iteration)


def judge_silence(kind: str, failure: str) -> FaultVerdict:
    """Return the verdict on a worker that was given up since it did nothing, or not in time. `failure`: in words."""
    hangs = "hangs in" in failure and "process is stopped" not in failure
    late = kind == "start_failed"
    return FaultVerdict(Guilt.UNKNOWN, failure, signature_of(failure) if hangs or late else "", kind)


def judge_refusal(reason: str) -> FaultVerdict:
    """Return the verdict on an order that an agent has refused."""
    text = f"refused: {reason}"
    return FaultVerdict(Guilt.PROGRAM, text[:_SIGNATURE_CHARS], signature_of(text), "start_failed", is_refusal=True)


def _judge_exception(kind: str, text: str, iteration: int) -> FaultVerdict:
    of_node = kind in ("exception", "data_error") and _NODE_TEXT.search(text)
    guilt = Guilt.UNKNOWN if of_node else Guilt.PROGRAM
    return FaultVerdict(guilt, text[:_SIGNATURE_CHARS], signature_of(text), kind, iteration)


def _judge_signal(number: int, tail: str, iteration: int) -> FaultVerdict:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if number in _OUTSIDE:
        return FaultVerdict(Guilt.UNKNOWN, name, "", "process_exit", iteration)
    where = crash_place(tail)
    guilt = Guilt.PROGRAM if number == signal.SIGXCPU else Guilt.UNKNOWN
    return FaultVerdict(guilt, f"{name}{where}", f"{name}{where}", "process_exit", iteration)


def _last_exception(tail: str) -> str:
    """Return the last line of the last traceback in the output, like "FileNotFoundError: ..."; "" for none."""
    _, traceback, rest = tail.rpartition("Traceback (most recent call last)")
    if not traceback:
        return ""
    lines = [line.strip() for line in rest.splitlines()]
    return next((line for line in lines if _TRACEBACK_END.match(line)), "")


def crash_place(tail: str) -> str:
    """Return in which function a process died of a signal, by what it wrote last (faulthandler): " in launch of
    kernel.py"; "" where it wrote nothing."""
    frame = _FRAME.search(tail)
    return f" in {frame[2]} of {frame[1].rpartition('/')[2]}" if frame else ""


def signature_of(text: str) -> str:
    """Return the text without what differs from one time and place to another: numbers, paths, addresses."""
    text = re.sub(r"0x[0-9a-fA-F]+", "#", text)
    text = re.sub(r"(?<![\w/])/[^\s'\",:]+/", "/", text)
    return re.sub(r"\d+", "#", text)[:_SIGNATURE_CHARS]


def last_lines(tail: str) -> str:
    """Return the last lines of a program's output."""
    return "\n".join(tail.rstrip().splitlines()[-_TAIL_LINES:])[-_TAIL_CHARS:]


# --- history ---------------------------------------------------------------------------------------


def is_part_of_last(task: Task, worker: Worker, verdict: FaultVerdict) -> bool:
    """Return whether the worker's end belongs to the program's last fault: it was started before it, and has joined no
    group since."""
    crashes = task.troubles.crashes
    if crashes is None or verdict.guilt is Guilt.HARDWARE:
        return False
    return number_of(worker) < crashes.below and task.generation_of(worker) <= crashes.generation


def is_known_of_program(task: Task, node: str, verdict: FaultVerdict) -> bool:
    """Return whether an end of unknown cause is the program's, since the same has happened elsewhere."""
    if verdict.guilt is not Guilt.UNKNOWN or not verdict.signature:
        return False
    crashes, deaths = task.troubles.crashes, task.troubles.deaths
    if crashes is not None and crashes.signature == verdict.signature:
        return task.progress.best_iteration <= crashes.best
    return any(other == verdict.signature for place, other in deaths.items() if place != node)


def is_failing(task: Task) -> bool:
    """Return whether the program has failed again without having achieved anything since the last time, and is not
    calm. One fault alone may be a neighbour's doing, and a task that is failing may never get workers again."""
    crashes = task.troubles.crashes
    return crashes is not None and crashes.fruitless > 0 and crashes.count >= LOOPING_MIN


def is_claimed_soon(task: Task, now_us: int) -> bool:
    """Return whether the task's place is expected to be claimed anew: its program has failed again within CLAIM_US
    before `now_us` (log time), and has not achieved anything since. That the task has ended meanwhile changes nothing:
    its user submits it under another name."""
    crashes = task.troubles.crashes
    return crashes is not None and now_us - crashes.last_us < CLAIM_US and is_failing(task)


def avoided_nodes(task: Task, strikes_max: int, may_leave: Callable[[Task, str], bool]) -> tuple[str, ...]:
    """Return the nodes that are not to carry the task's workers where others have room: workers have ended or could not
    be started there again and again, and nothing shows yet whether that follows the node or the program; or its program
    has failed there alone (local_faults.py). `may_leave`: whether the plan has the task elsewhere, or room; where
    it has none, a failure of the program alone is no reason for another plan."""
    troubles, nodes = task.troubles, [node for node in nodes_to_leave(task) if may_leave(task, node)]
    if troubles.strikes:
        nodes += [node for node, count in troubles.strikes.items() if count >= strikes_max]
    if troubles.crashes is not None and troubles.crashes.count >= strikes_max:
        nodes += troubles.crashes.refusals
    training = training_nodes(task) if nodes else set()
    return tuple(sorted({node for node in nodes if node not in training}))


def training_nodes(task: Task) -> set[str]:
    """Return the nodes of living members. The set is only for look-ups: its order is undefined."""
    return {worker.node for worker in task.workers.values() if worker.status is WorkerStatus.MEMBER}


def number_of(worker: Worker) -> int:
    """Return the number in the worker's name."""
    return int(worker.worker.rpartition(".")[2])


# --- back-off --------------------------------------------------------------------------------------


def back_off_us(crashes: Crashes) -> int:
    """Return how long no worker is started after the last fault."""
    return min(BACK_OFF_MAX_US, 1_000_000 << min(crashes.count - 2, 6)) if crashes.count > 1 else 0


def deadlines(state: ClusterState) -> Iterator[tuple[str, int]]:
    """Yield (id, length in microseconds): `restart:`, with the count of faults in the id."""
    for task in state.active:
        crashes = task.troubles.crashes
        if crashes is not None and crashes.waits:
            left_us = crashes.last_us + back_off_us(crashes) - state.now_us
            yield f"restart:{task.name}#{crashes.last_us}", max(0, left_us)


# --- for people ------------------------------------------------------------------------------------


def trouble_text(task: Task) -> str:
    """Say what is wrong with an active task's program: that it diverges, that it fails; "" where nothing is."""
    return "; ".join(filter(None, (diverging_text(task), looping_text(task))))


def diverging_text(task: Task) -> str:
    """Say since when an active task's program diverges, and why; "" where it does not. A task's end says it itself."""
    divergence = task.troubles.divergence
    if divergence is None or task.status is not TaskStatus.ACTIVE:
        return ""
    return v.divergence_text(divergence.since_iteration, divergence.sign)


def looping_text(task: Task) -> str:
    """Say that the task is crash-looping, like "crash-looping (9 times: FileNotFoundError: ...)"; "" if it is not."""
    crashes = task.troubles.crashes
    if crashes is None or task.status is not TaskStatus.ACTIVE:
        return ""
    if crashes.count < LOOPING_MIN:
        return f"failed once: {crashes.text}"
    wait_s = back_off_us(crashes) // 1_000_000
    waits = f"; starts again after {wait_s} s" if crashes.waits else ""
    return f"crash-looping ({crashes.count} times: {crashes.text}){waits}"


def occurrences(number: int) -> str:
    """Say how often, in words."""
    return "once" if number == 1 else f"{number} times"


def is_looping(task: Task) -> bool:
    """Return whether people are to know that the task is crash-looping."""
    crashes = task.troubles.crashes
    return crashes is not None and crashes.count >= LOOPING_MIN and task.status is TaskStatus.ACTIVE
