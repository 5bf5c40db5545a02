"""A vocabulary parts of which came with a later schema: what is told to readers of an older one is tested with it."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated

import msgspec
import pytest

from unicrond.events.vocabulary import Event
from unicrond.events.vocabulary.field_defaults import Since
from unicrond.events.wire import schemas
from unicrond.events.wire.schemas import SCHEMA

#: A schema that is still to come.
NEXT = SCHEMA + 1


@contextmanager
def younger(
    *types: type[Event],
    fields: Mapping[type[msgspec.Struct], Mapping[str, Since]] | None = None,
    schema: int = NEXT,
) -> Iterator[None]:
    """As if `schema` had brought the types, and these fields were marked so in the vocabulary."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in types:
            patch.setattr(kind, "since", schema)
        for struct, marks in (fields or {}).items():
            hints = typing.get_type_hints(struct, include_extras=True)
            for name, mark in marks.items():
                patch.setitem(struct.__annotations__, name, Annotated[hints[name], mark])
        schemas._watched.cache_clear()
        yield
    schemas._watched.cache_clear()
