"""Runs a training process from its start to its end, in a child of the fork server, which has set the task's
environment and working directory.

Exit codes: 0 done or asked to end; 1 an exception, or the end of the program in mid-training, told to the agent
beforehand; 69 no agent (`channel.py`); 75 no membership after a fault (`driver.py`); what the user's script exits with.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn
from weakref import WeakKeyDictionary

from unicrond.agents.protocol.injection import FaultInjector
from unicrond.agents.protocol.marks import Marker
from unicrond.agents.protocol.messages import Launch
from unicrond.agents.trainer.lifecycle.results import QuitRequested
from unicrond.agents.trainer.process import context
from unicrond.agents.trainer.process.channel import AgentChannel
from unicrond.agents.trainer.process.context import Context, WorkerSettings
from unicrond.agents.trainer.process.faults import LeftEarly, TrainsAlone, error_report
from unicrond.events.megatron import command_line as megatron_lm
from unicrond.events.vocabulary import TaskSpec

_FLUSH_TIMEOUT_S = 2.0
#: What torchrun tells a script of its world.
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: How often an optimizer may step before Hook.attach: some are stepped once or twice to make their state.
_STEPS_ALONE_MAX = 10
#: An argument of a script that stands for a number of its task.
_OF_TASK = re.compile(r"(--[\w-]+=)?\{(iterations|global_batch|micro_batch|seed)\}")


class RankIsMissing(KeyError):
    """The program asks torchrun's environment which rank it is, and no rank stays what it is here."""

    def __str__(self) -> str:
        return str(self.args[0])


def run(launch: Launch) -> NoReturn:
    """Run the worker that `launch` describes. Never returns: groups that hang must not hold up the end."""
    channel: AgentChannel | None = None
    code = 1
    try:
        settings = WorkerSettings.from_environment()
        channel = AgentChannel(launch, settings.lease_s)
        channel.start()
        code = _train(launch, channel, settings)
    except QuitRequested:
        code = 0
    except SystemExit as end:  # of ours
        code = end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        if channel is not None:
            code = 0 if channel.quit_requested() else 1
            if code:
                _tell(channel, error)  # before anything that may block
        traceback.print_exc()
    finally:
        if channel is not None:
            channel.flush(_FLUSH_TIMEOUT_S)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _train(launch: Launch, channel: AgentChannel, settings: WorkerSettings) -> int:
    import torch

    from unicrond.agents.trainer.process import cpu_shim
    from unicrond.agents.trainer.process.replica import ReplicaWorld

    spec = launch.spec
    # Or torch's watchdog ends the process when a peer dies: what is to be done about that is decided elsewhere.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if torch.cuda.is_available():
        torch.cuda.set_device(0)  # CUDA_VISIBLE_DEVICES shows this worker's own
    else:
        cpu_shim.apply()
    if spec.backend == "nccl" and not torch.cuda.is_available():
        raise RuntimeError("backend: nccl needs a GPU, and torch sees none; use auto or gloo")
    backend = "nccl" if torch.cuda.is_available() and spec.backend != "gloo" else "gloo"
    injection = FaultInjector(launch.worker, os.environ.get("UNICRON_FAULT", ""), channel.ordered_faults)
    mark = Marker(Path(launch.mark) if launch.mark else None)
    process = Context(launch, channel, ReplicaWorld(launch, backend), settings, injection, mark=mark)
    context.enter(process)
    code = _run(spec)
    if code == 0 and not channel.quit_requested():
        if process.finish is None:
            raise LeftEarly("the program ended without training: it must loop over hook.steps()")
        process.finish()
    return code


def _run(spec: TaskSpec) -> int:
    """Run the program to its end; return its exit code."""
    try:
        if spec.entry == "gpt":
            from unicrond.agents.trainer.loop import pretrain_gpt

            pretrain_gpt.main(spec)
        elif spec.entry == megatron_lm.ENTRY:
            from unicrond.agents.trainer.megatron import entry

            entry.main(spec)
        else:
            run_script(spec.entry, script_arguments(spec))
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        context.current().has_ended = True  # what is left of its loop is not left early
        raise
    return 0


def script_arguments(spec: TaskSpec) -> list[str]:
    """Return the arguments of a task's script: one that is {iterations}, or --flag={iterations}, is the task's number,
    and so for global_batch, micro_batch and seed. So a script says none of them again, and learns what
    `unicronctl set --iterations` has changed."""
    matches = [(argument, _OF_TASK.fullmatch(argument)) for argument in spec.args]
    return [f"{match[1] or ''}{getattr(spec, match[2])}" if match else argument for argument, match in matches]


def run_script(entry: str, args: Sequence[str]) -> None:
    """Run the program as `python SCRIPT ARGS` would: modules beside it can be imported. FileNotFoundError,
    RankIsMissing."""
    script = Path(entry)
    if not script.is_file():
        raise FileNotFoundError(f"entry: no script {script} in {Path.cwd()}; give its path or set cwd")
    # Before the script's folder is looked in: it may hold modules of the same names.
    import torch.distributed as dist

    from unicrond.agents.trainer.process import replica

    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.resolve().parent))
    dist.init_process_group = replica.refuse_second_world
    _refuse_training_alone()
    try:
        runpy.run_path(str(script), run_name="__main__")
    except KeyError as error:
        if not error.args or error.args[0] not in _TORCHRUN:
            raise
        raise RankIsMissing(
            f"{error.args[0]} is not in the environment: torchrun sets it, and here replicas come and go while the"
            " script runs. Leave out ranks, init_process_group and DistributedDataParallel, and loop over hook.steps();"
            " docs/use/adapters.md has a port of such a script"
        ) from error


def _refuse_training_alone() -> None:
    """Have TrainsAlone raised in a program whose optimizer steps on and on without the hook, as that of a trainer with
    a loop of its own does: each worker would train the whole of it by itself."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    counts: WeakKeyDictionary[object, int] = WeakKeyDictionary()

    def count(optimizer: object, *_: object) -> None:
        """Count a step of an optimizer, as long as nothing is attached."""
        if context.current().finish is not None:
            return
        counts[optimizer] = counts.get(optimizer, 0) + 1
        if counts[optimizer] > _STEPS_ALONE_MAX:
            name = type(optimizer).__name__
            raise TrainsAlone(
                f"{name} has stepped {_STEPS_ALONE_MAX} times before Hook.attach: each worker trains alone. Loop over"
                " hook.steps(), or take HuggingFaceTrainer or LightningStrategy (docs/use/adapters.md). What is trained"
                " beforehand belongs into a script of its own"
            )

    register_optimizer_step_pre_hook(count)


def _tell(channel: AgentChannel, error: BaseException) -> None:
    try:
        process = context.current()
    except RuntimeError:
        channel.send(error_report(channel.reporter, error, 0, 0, "start"))
    else:
        channel.send(error_report(process.launch.reporter, error, process.generation, process.iteration, process.phase))
