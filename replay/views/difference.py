"""What differs between two states: paths with the value before and after. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

from unicrond.core.state import ClusterState
from unicrond.core.state_bytes import to_json

_ABSENT = object()


class Difference(NamedTuple):
    """One value. `path` is like nodes.n1.status. `kind`: "added", "removed" or "changed"; the other side is None."""

    path: str
    kind: str
    before: Any
    after: Any


def differences(before: ClusterState, after: ClusterState) -> list[Difference]:
    """Everything that differs, in the state's own order. Equal states have equal digests and none."""
    return _compare("", to_json(before), to_json(after))


def lines(found: list[Difference]) -> list[str]:
    """Each as a line for people: + added, - removed, ~ changed."""
    return [_line(each) for each in found]


def _compare(path: str, before: Any, after: Any) -> list[Difference]:
    if isinstance(before, dict) and isinstance(after, dict):
        found: list[Difference] = []
        for key in dict.fromkeys([*before, *after]):
            inner = f"{path}.{key}" if path else str(key)
            found += _compare(inner, before.get(key, _ABSENT), after.get(key, _ABSENT))
        return found
    if _is_list(before) and _is_list(after) and path == "closed":
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


def _line(each: Difference) -> str:
    match each.kind:
        case "added":
            return f"+ {each.path}: {_told(each.after)}"
        case "removed":
            return f"- {each.path}: {_told(each.before)}"
        case _:
            return f"~ {each.path}: {_told(each.before)} -> {_told(each.after)}"


def _told(value: Any) -> str:
    """A value on one line; what is a structure in the words that identify it."""
    if isinstance(value, dict):
        inner = ", ".join(f"{key} {_told(each)}" for key, each in value.items() if each not in ("", (), [], {}, None))
        return f"({inner})"
    if _is_list(value):
        return "[" + ", ".join(_told(each) for each in value) + "]"
    return repr(value) if isinstance(value, str) and (not value or " " in value) else str(value)
