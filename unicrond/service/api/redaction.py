"""What people do not see of the log: the tokens of nodes' memory services, and secrets of tasks.

Both may stand in the log, which agents need whole; a task that names where its nodes have a secret
(`TaskSpec.secrets`) keeps it out. What is hidden keeps its place and its type. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any

import msgspec

from unicrond.core.state.state import ClusterState
from unicrond.events.host.masking import (
    LINE_LEAST,
    PATTERN_MASK,
    PLACEHOLDER,
    Mask,
    is_secret_flag,
    secrets_in,
    values_in,
)
from unicrond.events.vocabulary import StartWorker, StartWorkers, TaskSpec, TaskSubmitted
from unicrond.events.wire.envelope import Entry, RecordedEvent


def redact_state(state: dict[str, Any], mask: Mask = PATTERN_MASK) -> dict[str, Any]:
    """Hide secrets in a state (state.to_json), in place, and return it. Quick, as it is asked for several times a
    second: of the texts it examines only those that workers wrote."""
    hide = mask.text
    for node in state["nodes"].values():
        _hide_token(node.get("memory"))
    for task in state["tasks"].values():
        _hide_spec(task["spec"])
        for service in task.get("peers", ()):
            _hide_token(service)
        for part in ("reason", "stop", "save_failures"):
            if part in task:
                task[part] = redact(task[part], hide)
    for part in ("incidents", "closed_incidents", "refusals"):
        if part in state:
            state[part] = redact(state[part], hide)
    return state


def redact(value: Any, hide: Callable[[str], str]) -> Any:
    """Return plain JSON types with secrets hidden. `hide`: maps a text to its public form; it keeps its type."""
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, dict):
        copy = {name: redact(inner, hide) for name, inner in value.items()}
        _hide_token(copy)
        _hide_spec(copy)
        return copy
    if isinstance(value, list):
        return [redact(inner, hide) for inner in value]
    return tuple(redact(inner, hide) for inner in value) if isinstance(value, tuple) else value


def secret_values(specs: Iterable[TaskSpec]) -> frozenset[str]:
    """Return the values in these tasks' environments and arguments that are secrets by their names."""
    values = set()
    for spec in specs:
        values |= {*values_in(spec.env), *(spec.args[place] for place in _secret_places(spec.args))}
    return frozenset(values)


def mask_of(state: ClusterState) -> Mask:
    """Return what hides the secrets that this state knows."""
    return _mask(secret_values(task.spec for task in state.tasks.values()))


@lru_cache(maxsize=8)
def _mask(values: frozenset[str]) -> Mask:
    return Mask(values) if values else PATTERN_MASK


class Discretion:
    """Learns the values of secrets from the entries of a log, in the order in which they are shown, and hides them."""

    def __init__(self, specs: Iterable[TaskSpec] = ()) -> None:
        self._values = secret_values(specs)
        self._mask: Mask | None = None
        self._hide: Callable[[str], str] = str

    def see(self, entry: Entry) -> None:
        """Note the secrets in this entry. (The tokens of nodes' memory services stand in no text.)"""
        event = entry.envelope.event if isinstance(entry, RecordedEvent) else None
        if isinstance(event, TaskSubmitted | StartWorker | StartWorkers):
            self.learn([event.spec])

    def learn(self, specs: Iterable[TaskSpec]) -> None:
        """Note the secrets of these tasks."""
        values = self._values | secret_values(specs)
        if values != self._values:
            self._values, self._mask = values, None

    def text(self, text: str) -> str:
        """Return the text without secrets."""
        self.mask()
        return self._hide(text)

    def plain(self, value: Any) -> Any:
        """Return the value as plain JSON types, without secrets."""
        self.mask()
        return redact(msgspec.to_builtins(value), self._hide)

    def mask(self) -> Mask:
        """Return what hides all secrets known by now."""
        if self._mask is None:
            self._mask = Mask(self._values)
            self._hide = lru_cache(maxsize=100_000)(self._mask.text)
        return self._mask


def warnings_of(env: Mapping[str, str]) -> list[str]:
    """Return warnings for a person who submits a task with such an environment, a line each."""
    return [
        f"env.{name} looks like a secret, and stays in the log for whoever reads it; "
        f"use secrets: {{{name}: file:/PATH}}, with the file on each node"
        for name in secrets_in(env)
    ]


def _hide_token(service: dict[str, Any] | None) -> None:
    if service is not None and isinstance(service.get("token"), str) and "port" in service:
        service["token"] = PLACEHOLDER


def _hide_spec(spec: dict[str, Any]) -> None:
    """Replace the secrets in a task's environment and arguments."""
    env, arguments = spec.get("env"), spec.get("args")
    if isinstance(env, dict):
        for name in secrets_in(env):
            env[name] = PLACEHOLDER
    if isinstance(arguments, list | tuple) and (places := _secret_places(arguments)):
        spec["args"] = [PLACEHOLDER if place in places else argument for place, argument in enumerate(arguments)]


def _secret_places(arguments: Iterable[Any]) -> set[int]:
    texts = [argument if isinstance(argument, str) else "" for argument in arguments]
    return {
        place + 1
        for place, (flag, value) in enumerate(pairwise(texts))
        if is_secret_flag(flag) and len(value) >= LINE_LEAST
    }
