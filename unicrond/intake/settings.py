"""Settings of the coordinator from environment variables: UNICROND_NATS_HOST for `nats.host`.

Rules
-----
* A variable comes before the configuration file, and a flag before a variable.
* The value is read as YAML, as if it stood in the file; of a setting that is text it is taken as it is.
* A variable of a whole section ("off" for `tls`) takes the place of that section; one of a field is put into it.
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
    """The name of a setting's variable."""
    return variables.prefix(PROGRAM) + dotted(place).upper().replace(".", "_")


def settings(kind: type[msgspec.Struct], place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Each setting of `kind` and its type; of a section that may be a word also the section."""
    for field in msgspec.structs.fields(kind):
        here = (*place, field.name)
        choices = get_args(field.type) if get_origin(field.type) in (Union, UnionType) else (field.type,)
        section = next((one for one in choices if _is_struct(one)), None)
        if section is None or section is not field.type:
            yield here, field.type
        if section is not None:
            yield from settings(section, here)


def overlaid(value: Mapping[str, Any], kind: type[msgspec.Struct], environ: Mapping[str, str]) -> dict[str, Any]:
    """`value` with what the variables say. Raises BadYaml, whose text names the variable."""
    made = dict(value)
    for place, field in settings(kind):
        text = environ.get(variable(place))
        if not text:
            continue
        section = made
        for name in place[:-1]:
            inner = section.get(str(name))
            section[str(name)] = section = dict(inner) if isinstance(inner, dict) else {}
        section[str(place[-1])] = text if _is_text(field) else _read(place, text)
    return made


def origin(place: Place, environ: Mapping[str, str]) -> str | None:
    """The variable that the value at `place` comes from, or None."""
    names = (variable(place[:length]) for length in range(len(place), 0, -1))
    return next((name for name in names if environ.get(name)), None)


def given(kind: type[msgspec.Struct], environ: Mapping[str, str]) -> list[str]:
    """The variables that are set."""
    return [name for place, _ in settings(kind) if environ.get(name := variable(place))]


def _read(place: Place, text: str) -> Any:
    try:
        return parse(text).value
    except BadYaml as error:
        raise BadYaml(f"{variable(place)}: {error.what}", 1) from None


def _is_text(kind: Any) -> bool:
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    return kind is str


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)
