"""Settings of the coordinator from environment variables: UNICROND_NATS_HOST for `nats.host`.

Rules
-----
* A variable comes before the configuration file, and a flag before a variable.
* The value is read as YAML, as in the file; for a setting that is text it is used unchanged.
* A variable of a whole section ("off" for `tls`) replaces that section; one of a field is set in it.
* An empty variable counts as none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec

from unicrond.core.state.field_faults import Place, dotted
from unicrond.events.cli import environment_flags as variables
from unicrond.intake.strict_yaml import BadYaml, parse

PROGRAM = "unicrond"


def variable(place: Place) -> str:
    """Return the name of a setting's variable."""
    return variables.prefix(PROGRAM) + dotted(place).upper().replace(".", "_")


def settings(kind: type[msgspec.Struct], place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yield each setting of `kind` and its type; for a section that may also be a single word, the section too."""
    for field in msgspec.structs.fields(kind):
        field_place = (*place, field.name)
        choices = get_args(field.type) if get_origin(field.type) in (Union, UnionType) else (field.type,)
        section = next((choice for choice in choices if _is_struct(choice)), None)
        if section is None or section is not field.type:
            yield field_place, field.type
        if section is not None:
            yield from settings(section, field_place)


def with_variables(value: Mapping[str, Any], kind: type[msgspec.Struct], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return `value` overridden by the variables. Raise BadYaml, whose text names the variable."""
    settings_by_name = dict(value)
    for place, field in settings(kind):
        text = environ.get(variable(place))
        if not text:
            continue
        section = settings_by_name
        for name in place[:-1]:
            inner = section.get(str(name))
            section[str(name)] = section = dict(inner) if isinstance(inner, dict) else {}
        section[str(place[-1])] = text if _is_text(field) else _read(place, text)
    return settings_by_name


def origin(place: Place, environ: Mapping[str, str]) -> str | None:
    """Return the variable that the value at `place` comes from, or None."""
    names = (variable(place[:length]) for length in range(len(place), 0, -1))
    return next((name for name in names if environ.get(name)), None)


def set_variables(kind: type[msgspec.Struct], environ: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that are set."""
    return [name for place, _ in settings(kind) if environ.get(name := variable(place))]


def _read(place: Place, text: str) -> Any:
    try:
        return parse(text).value
    except BadYaml as error:
        raise BadYaml(f"{variable(place)}: {error.reason}", 1) from None


def _is_text(kind: Any) -> bool:
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    return kind is str


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)
