"""What is wrong with data that people wrote, field by field, in words that say how to mend it.

msgspec checks the values; this module adds what its messages lack: the exact place, all faults and not
only the first, a guess for a misspelt name, and plain words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, Union, get_args, get_origin

import msgspec

from unicrond.events.vocabulary import NAME_PATTERN
from unicrond.events.vocabulary.phrases import guess

#: Where a value stands in a document: mapping keys and list indices from the top.
Place: TypeAlias = tuple[str | int, ...]


class FieldFault(NamedTuple):
    """`text` is one line: what is wrong there, and the fix."""

    place: Place
    text: str

    def __str__(self) -> str:
        path = dotted(self.place)
        return f"{path}: {self.text}" if path else self.text


def dotted(place: Place) -> str:
    """Return the place as text: ("model", "layers") -> "model.layers"; list indices stand in brackets."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")


def faults(value: Any, kind: Any, place: Place = ()) -> Iterator[FieldFault]:
    """Yield all that keeps `value` (dicts, lists, scalars) from being a `kind` (struct, dict, tuple or scalar type)."""
    while get_origin(kind) is Annotated and get_origin(get_args(kind)[0]) is not None:
        kind = get_args(kind)[0]
    kind = _closest_kind(value, kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield from _struct_faults(value, kind, place)
    elif get_origin(kind) is dict:
        yield from _dict_faults(value, kind, place)
    elif get_origin(kind) is tuple and isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from faults(item, get_args(kind)[0], (*place, index))
    else:
        try:
            msgspec.convert(value, kind, strict=True)
        except msgspec.ValidationError as error:
            yield FieldFault(place, _sentence(str(error), value, kind))


def _closest_kind(value: Any, kind: Any) -> Any:
    """Return, of a union of a struct and others, the kind that the value is closest to: the struct, unless it is
    text."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else ()
    structs = [option for option in kinds if isinstance(option, type) and issubclass(option, msgspec.Struct)]
    if not structs:
        return kind
    scalars = [option for option in kinds if option not in structs]
    return scalars[0] if isinstance(value, str) and scalars else structs[0]


def _struct_faults(value: Any, kind: type[msgspec.Struct], place: Place) -> Iterator[FieldFault]:
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    if not isinstance(value, dict):
        yield FieldFault(place, f"expected fields such as {', '.join(list(fields)[:3])}, got {_display(value)}")
        return
    for name in value:
        if name not in fields:
            yield FieldFault((*place, str(name)), f"unknown field; {guess(str(name), list(fields))}")
    for name, field in fields.items():
        if name in value:
            yield from faults(value[name], field.type, (*place, name))
        elif field.required:
            yield FieldFault((*place, name), f"missing; add the line `{name}: ...`")


def _dict_faults(value: Any, kind: Any, place: Place) -> Iterator[FieldFault]:
    if not isinstance(value, dict):
        yield FieldFault(place, f"expected a mapping (key: value), got {_display(value)}")
        return
    key_kind, item_kind = get_args(kind)
    for key, item in value.items():
        yield from faults(key, key_kind, (*place, str(key)))
        yield from faults(item, item_kind, (*place, str(key)))


_WORDS = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "array": "a list"}


def _sentence(message: str, value: Any, kind: Any) -> str:
    if "matching regex" in message:
        if NAME_PATTERN in (getattr(meta, "pattern", None) for meta in get_args(kind)[1:]):
            return (
                f"{value!r} is not a valid name; use letters, digits, - and _, at most 63, the first a letter or digit"
            )
        return f"{value!r} has the wrong form; {message}"
    if get_origin(kind) is Literal:
        choices = [str(choice) for choice in get_args(kind)]
        return f"unknown value {value!r}; {guess(str(value), choices)}"
    length = re.search(r"length <= (\d+)", message)
    if length:
        return f"{len(value)} characters long; at most {length[1]} are allowed"
    bound = re.match(r"Expected `(\w+)` (>=|>|<=|<) (\S+)", message)
    if bound:
        return f"must be {_WORDS.get(bound[1], bound[1])} {bound[2]} {bound[3]}, got {_display(value)}"
    wrong = re.match(r"Expected `(\w+)[^`]*`, got", message)
    if wrong:
        quotes = "; put it in quotes" if wrong[1] == "str" and isinstance(value, int | float) else ""
        return f"expected {_WORDS.get(wrong[1], wrong[1])}, got {_display(value)}{quotes}"
    return f"{message[:1].lower()}{message[1:]}, got {_display(value)}"


def _display(value: Any) -> str:
    """Return a value as it may stand in a line: short, and recognisable as what it is."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, str):
        return f"text {value[:60]!r}"
    return repr(value) if isinstance(value, float) or abs(value) < 10**30 else "a huge number"
