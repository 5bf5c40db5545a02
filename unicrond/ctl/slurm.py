"""`unicronctl slurm-sync`: drains and isolations, told both ways between Slurm and the coordinator (slurm_nodes.py)."""

from __future__ import annotations

import argparse
import subprocess
import sys

from unicrond.ctl.asking import client_of
from unicrond.ctl.client import ApiError, Client, Refused
from unicrond.ctl.reading import states
from unicrond.ctl.slurm_nodes import SlurmNode, Step, read, steps

#: Slurm's clients wait for minutes for a controller that is away.
_LIMIT_S = 20.0
_SAID = {
    "drain": "node {0.node}: drained here ({0.reason})",
    "uncordon": "node {0.node}: may have workers again ({0.reason})",
    "hold": "node {0.node}: drained in Slurm ({0.reason})",
    "release": "node {0.node}: given back to Slurm",
}


class NoSlurm(ApiError):
    """Slurm does not answer, or refuses; one line."""


def slurm_sync(options: argparse.Namespace) -> int:
    """Bring both together until interrupted, or `--once`. What is refused is said once, and tried each time."""
    client, refused = client_of(options), set[Step]()
    for state in states(client, options.every_s):
        try:
            for step in steps(slurm_nodes(), state.nodes, options.ends):
                if not (options.no_holds and step.act == "hold"):
                    _do(client, step, refused)
        except NoSlurm as error:
            if options.once:
                raise
            print(f"unicronctl: {error}; trying again", file=sys.stderr, flush=True)
        if options.once:
            break
    return 1 if refused else 0


def slurm_nodes() -> dict[str, SlurmNode]:
    """As Slurm has them now. Raises NoSlurm."""
    return read(_slurm("sinfo", "--Node", "--noheader", "--format=%N|%T|%E").splitlines())


def _do(client: Client, step: Step, refused: set[Step]) -> None:
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
    except (NoSlurm, Refused) as error:
        if step not in refused:
            print(f"unicronctl: {error}", file=sys.stderr, flush=True)
        refused.add(step)
        return
    refused.discard(step)
    print(_SAID[step.act].format(step), flush=True)


def _slurm(*command: str) -> str:
    """Run one of Slurm's commands; what it says. Raises NoSlurm."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except FileNotFoundError:
        raise NoSlurm(f"{command[0]} is not there: run this where Slurm's commands are") from None
    except subprocess.TimeoutExpired:
        raise NoSlurm(f"{command[0]} gives no answer within {_LIMIT_S:g} s") from None
    if ran.returncode:
        last = (ran.stderr.strip() or ran.stdout.strip()).rpartition("\n")[2]
        raise NoSlurm(f"{' '.join(command[:3])}: {last or f'exit code {ran.returncode}'}")
    return ran.stdout
