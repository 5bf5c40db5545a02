"""YAML as people expect it to mean, with the line of every value; for the files that people write.

Rules
-----
* YAML 1.2's core schema: `no`, `on` and `12:30` are text, `1e-3` is a number, `010` is ten. (PyYAML's own
  schema, 1.1, reads them as false, true, 750, text and eight.)
* A key that appears twice in one mapping is an error, never "the last one wins".
* No tags, no anchors, no aliases: every value is written out in its place.
* Mapping keys are text in the result, whatever they look like.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from unicrond.core.state.field_faults import Place

DOCUMENT_BYTES_MAX = 256 * 1024


class BadYaml(ValueError):
    """An invalid or unsupported document. `line` counts from 1."""

    def __init__(self, reason: str, line: int) -> None:
        super().__init__(f"line {line}: {reason}")
        self.reason = reason
        self.line = line


def text_of(path: Path, error: type[ValueError], fix: str) -> str:
    """Read the file's text. Raise `error` with one line and the `fix`, where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as problem:
        raise error(f"{path}: cannot be read: {problem.strerror}; {fix}") from None
    except UnicodeDecodeError:
        raise error(f"{path}: is not UTF-8 text; give a YAML file") from None


class Document(NamedTuple):
    """`value`: dict, list, str, int, float, bool or None. `lines`: the line of every value, from 1."""

    value: Any
    lines: dict[Place, int]


class _Loader(yaml.SafeLoader):
    """PyYAML's parser with the core schema's resolvers in place of its own."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  (PyYAML's attribute)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Read a node as PyYAML does, but refuse anchors and aliases."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "anchor", None) is not None:
            raise BadYaml(
                "anchors and aliases (& and *) are not supported; write the value out", event.start_mark.line + 1
            )
        return super().compose_node(parent, index)


_RESOLVERS = {
    "null": (r"(?:~|null|Null|NULL|)", ["~", "n", "N", ""]),
    "bool": (r"(?:true|True|TRUE|false|False|FALSE)", list("tTfF")),
    "int": (r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)", list("-+0123456789")),
    "float": (
        r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))",
        list("-+.0123456789"),
    ),
}
for _name, (_pattern, _first) in _RESOLVERS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"^{_pattern}$"), _first)


def parse(text: str) -> Document:
    """Parse the one document in `text`; an empty text is None. Raise BadYaml and nothing else."""
    if len(text.encode(errors="replace")) > DOCUMENT_BYTES_MAX:
        raise BadYaml(f"more than {DOCUMENT_BYTES_MAX} bytes", 1)
    lines: dict[Place, int] = {}
    try:
        node = yaml.compose(text, Loader=_Loader)
        return Document(None if node is None else _value(node, (), lines), lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = error.problem or error.context or "not valid YAML"
        raise BadYaml(f"not valid YAML: {reason}", mark.line + 1 if mark else 1) from None
    except yaml.YAMLError as error:
        raise BadYaml(f"not valid YAML: {' '.join(str(error).split())}", 1) from None
    except RecursionError:
        raise BadYaml("nested too deeply", 1) from None


def _value(node: yaml.Node, place: Place, lines: dict[Place, int]) -> Any:
    lines[place] = line = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, place, lines)
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, (*place, index), lines) for index, item in enumerate(node.value)]
    text = node.value
    try:
        match node.tag.removeprefix("tag:yaml.org,2002:"):
            case "str":
                return text
            case "null":
                return None
            case "bool":
                return text.lower() == "true"
            case "int":
                return int(text, {"0x": 16, "0o": 8}.get(text[:2], 10))
            case "float":
                return float(text.replace(".inf", "inf").replace(".nan", "nan")) if "." in text else float(text)
            case _:
                raise BadYaml(f"tag {node.tag} is not supported; write the plain value", line)
    except ValueError as error:
        if isinstance(error, BadYaml):
            raise
        raise BadYaml(f"not a number: {text[:40]}", line) from None


def _mapping(node: yaml.MappingNode, place: Place, lines: dict[Place, int]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise BadYaml("a key must be a plain word or number", line)
        key = key_node.value
        if key in mapping:
            raise BadYaml(f"{key} appears twice; remove one (the other is on line {lines[(*place, key)]})", line)
        mapping[key] = _value(value_node, (*place, key), lines)
        lines[(*place, key)] = line
    return mapping
