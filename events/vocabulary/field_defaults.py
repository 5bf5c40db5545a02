"""How a field stands in the bytes: its default, and the schema that brought it.

Rule: `events/vocabulary` and the state's structs leave a field that has its default out of their bytes. So a field that
is added later changes neither the bytes nor the digest of what was written before it, and a reader that does not know
it reads on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

T = TypeVar("T")


def always(default: T, name: str | None = None) -> T:
    """Give a struct's field this default, and have it written even where it has it. `name`: its name in the bytes.

    For the fields of the state that its JSON always shows. And for a default that msgspec does not recognise: it leaves
    out what is the default itself, not what equals it. That is sure of None, of booleans, of small integers and of what
    is empty; equal structs had different bytes by any other.
    """
    # msgspec's omit_defaults compares with plain defaults only, never with what a factory makes.
    factory: Callable[[], Any] = (lambda: {}) if default == {} else (lambda: default)
    return cast(T, msgspec.field(default_factory=factory, name=name))


class Since(NamedTuple):
    """A mark of what is younger than its class: `rack: Annotated[Text, Since(2)] = ""`, a field of schema 2 with a
    default.

    `instead`: the field is old, but these values of its `Literal` are of `schema`: pairs of one and the older one that
    stands for it. `is_required`: the field is not left out for older readers: they must refuse the whole, not obey the
    rest.
    """

    schema: int
    is_required: bool = False
    instead: tuple[tuple[str, str], ...] = ()
