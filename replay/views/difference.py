"""What differs between two states: paths with the value before and after. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

from unicrond.core.state.state import ClusterState
from unicrond.core.state.state_bytes import to_json

_ABSENT = object()


class Difference(NamedTuple):
    """One value. `path` is like nodes.n1.status. `kind`: "added", "removed" or "changed"; the other side is None."""

    path: str
    kind: str
    before: Any
    after: Any


def differences(before: ClusterState, after: ClusterState) -> list[Difference]:
    """Return everything that differs, in the state's own order. Equal states have equal digests and no difference."""
    return _compare("", to_json(before), to_json(after))


def lines(changes: list[Difference]) -> list[str]:
    """Format each change as a line for people: + added, - removed, ~ changed."""
    return [_line(change) for change in changes]


def _compare(path: str, before: Any, after: Any) -> list[Difference]:
    if isinstance(before, dict) and isinstance(after, dict):
        changes: list[Difference] = []
        for key in dict.fromkeys([*before, *after]):
            inner = f"{path}.{key}" if path else str(key)
            changes += _compare(inner, before.get(key, _ABSENT), after.get(key, _ABSENT))
        return changes
    if _is_list(before) and _is_list(after) and path == "closed_incidents":
        # A list of incidents that only grows and is cut at its beginning: by id, not by place.
        return _compare(path, {i["id"]: i for i in before}, {i["id"]: i for i in after})
    if before is _ABSENT:
        return [Difference(path, "added", None, after)]
    if after is _ABSENT:
        return [Difference(path, "removed", before, None)]
    if before == after or (before != before and after != after):  # a loss may be NaN
        return []
    return [Difference(path, "changed", before, after)]


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _line(change: Difference) -> str:
    match change.kind:
        case "added":
            return f"+ {change.path}: {_format_value(change.after)}"
        case "removed":
            return f"- {change.path}: {_format_value(change.before)}"
        case _:
            return f"~ {change.path}: {_format_value(change.before)} -> {_format_value(change.after)}"


def _format_value(value: Any) -> str:
    """Format a value on one line; a structure by the fields that identify it."""
    if isinstance(value, dict):
        inner = ", ".join(
            f"{key} {_format_value(inner_value)}"
            for key, inner_value in value.items()
            if inner_value not in ("", (), [], {}, None)
        )
        return f"({inner})"
    if _is_list(value):
        return "[" + ", ".join(_format_value(inner_value) for inner_value in value) + "]"
    return repr(value) if isinstance(value, str) and (not value or " " in value) else str(value)
