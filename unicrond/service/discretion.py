"""What does not leave by the HTTP API: the tokens of nodes' memory services, and secrets in tasks' environments.

Both stand in the log, which agents need whole; a task that names where its nodes have a secret (`TaskSpec.secrets`)
keeps it out. What is hidden keeps its place and its type. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"
#: Names of environment variables that hold secrets: HF_TOKEN, WANDB_API_KEY, DB_PASSWORD.
_SECRET_NAME = re.compile(r"token|secret|passw|credential|apikey|(^|_)key(_|$)|(^|_)pass(_|$)", re.IGNORECASE)
#: An address with a password in it.
_SECRET_ADDRESS = re.compile(r"://[^/\s@]*:[^/\s@]+@")


def discreet_state(state: dict[str, Any]) -> dict[str, Any]:
    """A state (state.to_json), changed in place: quick, as it is asked for several times a second."""
    for node in state["nodes"].values():
        _hide_token(node.get("memory"))
    for task in state["tasks"].values():
        _hide_environment(task["spec"].get("env"))
        for service in task.get("peers", ()):
            _hide_token(service)
    return state


def discreet_entry(value: Any) -> Any:
    """An entry of the log (event_lines.entry_json), changed in place, wherever in it such things stand."""
    if isinstance(value, dict):
        _hide_token(value)
        _hide_environment(value.get("env"))
        for inner in value.values():
            discreet_entry(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            discreet_entry(inner)
    return value


def _hide_token(service: dict[str, Any] | None) -> None:
    if service is not None and isinstance(service.get("token"), str) and "port" in service:
        service["token"] = HIDDEN


def _hide_environment(env: Any) -> None:
    if isinstance(env, dict):
        for name in _secrets_in(env):
            env[name] = HIDDEN


def _secrets_in(env: Mapping[str, Any]) -> list[str]:
    return [
        name
        for name, value in env.items()
        if isinstance(value, str) and (_SECRET_NAME.search(name) or _SECRET_ADDRESS.search(value))
    ]


def warnings_of(env: Mapping[str, str]) -> list[str]:
    """What to say to a person who submits a task with such an environment."""
    return [
        f"env.{name} looks like a secret, and stays in the log for whoever reads it; "
        f"use secrets: {{{name}: file:/PATH}}, with the file on each node"
        for name in _secrets_in(env)
    ]
