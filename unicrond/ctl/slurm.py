"""`unicronctl slurm-sync`: drains and isolations, synchronised between Slurm and the coordinator
(slurm_nodes.py)."""

from __future__ import annotations

import argparse
import subprocess
import sys

from unicrond.ctl.client import ApiError, ApiRefused, Client
from unicrond.ctl.client_options import client_of
from unicrond.ctl.slurm_nodes import SlurmNode, SyncStep, read, steps
from unicrond.ctl.streams import states

#: Slurm's clients wait for minutes for a controller that is away.
_LIMIT_S = 20.0
_STEP_TEXTS = {
    "drain": "node {0.node}: drained here ({0.reason})",
    "uncordon": "node {0.node}: may have workers again ({0.reason})",
    "hold": "node {0.node}: drained in Slurm ({0.reason})",
    "release": "node {0.node}: given back to Slurm",
}


class NoSlurm(ApiError):
    """Slurm does not answer, or refuses; one line."""


def slurm_sync(options: argparse.Namespace) -> int:
    """Bring both together until interrupted, or `--once`. A refused step is reported once, and tried each time."""
    client, failed_steps = client_of(options), set[SyncStep]()
    for state in states(client, options.every_s):
        try:
            for step in steps(slurm_nodes(), state.nodes, options.ends):
                if not (options.no_holds and step.act == "hold"):
                    _do(client, step, failed_steps)
        except NoSlurm as error:
            if options.once:
                raise
            print(f"unicronctl: {error}; trying again", file=sys.stderr, flush=True)
        if options.once:
            break
    return 1 if failed_steps else 0


def slurm_nodes() -> dict[str, SlurmNode]:
    """Return the nodes as Slurm has them now. Raises NoSlurm."""
    return read(_slurm("sinfo", "--Node", "--noheader", "--format=%N|%T|%E").splitlines())


def _do(client: Client, step: SyncStep, failed_steps: set[SyncStep]) -> None:
    """Execute one step, and report it; a refused step is reported once."""
    try:
        match step.act:
            case "drain":
                client.cordon(step.node, drain=True, reason=step.reason)
            case "uncordon":
                client.uncordon(step.node, step.reason)
            case "hold":
                _slurm("scontrol", "update", f"NodeName={step.node}", "State=DRAIN", f"Reason={step.reason}")
            case _:
                _slurm("scontrol", "update", f"NodeName={step.node}", "State=RESUME")
    except (NoSlurm, ApiRefused) as error:
        if step not in failed_steps:
            print(f"unicronctl: {error}", file=sys.stderr, flush=True)
        failed_steps.add(step)
        return
    failed_steps.discard(step)
    print(_STEP_TEXTS[step.act].format(step), flush=True)


def _slurm(*command: str) -> str:
    """Run one of Slurm's commands; return its output. Raises NoSlurm."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except FileNotFoundError:
        raise NoSlurm(f"{command[0]} is not there: run this where Slurm's commands are") from None
    except subprocess.TimeoutExpired:
        raise NoSlurm(f"{command[0]} gives no answer within {_LIMIT_S:g} s") from None
    if process.returncode:
        last = (process.stderr.strip() or process.stdout.strip()).rpartition("\n")[2]
        raise NoSlurm(f"{' '.join(command[:3])}: {last or f'exit code {process.returncode}'}")
    return process.stdout
