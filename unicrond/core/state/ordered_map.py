"""Maps of the state that grow with the cluster: frozen, in insertion order, and changed at the cost of the change.

Rules
-----
* A map that holds no more than SMALL items is a plain dict, which nothing beats. A larger one is an `OrderedMap`: the
  items lie in chunks, in insertion order, and a changed map shares all chunks with the one before but one.
* Whoever changes a map says `put`, `put_all` or `without`, and never writes into one. Both kinds equal a dict of the
  same items.
* `changed` compares two maps at the cost of what they do not share: answers that rest on a large map are carried along
  by it (`state.Tally`, `workers_by_node.py`, `survey.py`).
"""

from __future__ import annotations

from collections.abc import Collection, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from itertools import chain, compress, islice, zip_longest
from operator import is_, is_not
from typing import Any, TypeVar, cast, overload

import immutables

V = TypeVar("V")
D = TypeVar("D")

#: Items up to which a map is a plain dict.
SMALL = 128
#: Items of a chunk, at most.
CHUNK = 64
_EMPTY: dict[str, Any] = {}


class OrderedMap(Mapping[str, V]):
    """A frozen map of names to values, in insertion order. A replaced value keeps its place."""

    __slots__ = ("_chunks", "_length", "_places")

    def __init__(self, items: Iterable[tuple[str, V]] = ()) -> None:
        every = list(dict(items).items())
        self._chunks: tuple[dict[str, V], ...] = tuple(
            dict(every[first : first + CHUNK]) for first in range(0, len(every), CHUNK)
        )
        #: Which chunk holds which name. The same object as long as the names are the same.
        self._places: immutables.Map[str, int] = immutables.Map(
            (name, number // CHUNK) for number, (name, _) in enumerate(every)
        )
        self._length = len(every)

    @classmethod
    def _of(cls, chunks: tuple[dict[str, V], ...], places: immutables.Map[str, int], length: int) -> OrderedMap[V]:
        result = cls.__new__(cls)
        result._chunks, result._places, result._length = chunks, places, length
        return result

    # --- reading ---------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> V:
        return self._chunks[self._places[name]][name]

    @overload
    def get(self, name: str) -> V | None: ...
    @overload
    def get(self, name: str, default: V | D) -> V | D: ...
    def get(self, name: str, default: Any = None) -> Any:
        """Return the value, else `default`."""
        place = self._places.get(name)
        return default if place is None else self._chunks[place][name]

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(self._chunks)

    def __reversed__(self) -> Iterator[str]:
        return chain.from_iterable(map(reversed, reversed(self._chunks)))

    def values(self) -> ValuesView[V]:
        """Return the values, in insertion order."""
        return _Values(self)

    def items(self) -> ItemsView[str, V]:
        """Return the items, in insertion order."""
        return _Items(self)

    def __eq__(self, mapping: object) -> bool:
        if self is mapping:
            return True
        return dict(self.items()) == mapping if isinstance(mapping, dict) else super().__eq__(mapping)

    __hash__ = None  # type: ignore[assignment]  # as of a dict

    def __repr__(self) -> str:
        return f"OrderedMap({dict(self.items())!r})"

    # --- changing --------------------------------------------------------------------------------

    def __or__(self, mapping: Mapping[str, V]) -> OrderedMap[V]:
        result = self
        for name, value in mapping.items():
            result = result.put(name, value)
        return result

    def put(self, name: str, value: V) -> OrderedMap[V]:
        """Return the map with `value` under `name`."""
        place, chunks = self._places.get(name), self._chunks
        if place is not None:
            return self._of(
                (*chunks[:place], chunks[place] | {name: value}, *chunks[place + 1 :]), self._places, len(self)
            )
        if chunks and len(chunks[-1]) < CHUNK:
            chunks = (*chunks[:-1], chunks[-1] | {name: value})
        else:
            chunks = (*chunks, {name: value})
        return self._of(chunks, self._places.set(name, len(chunks) - 1), len(self) + 1)

    def without(self, names: Iterable[str]) -> OrderedMap[V]:
        """Return the map without the items of these names."""
        by_chunk: dict[int, list[str]] = {}
        for name in dict.fromkeys(names):
            place = self._places.get(name)
            if place is not None:
                by_chunk.setdefault(place, []).append(name)
        if not by_chunk:
            return self
        chunks, places, length = list(self._chunks), self._places.mutate(), self._length
        for place, chunk_names in by_chunk.items():
            chunks[place] = {name: value for name, value in chunks[place].items() if name not in chunk_names}
            length -= len(chunk_names)
            for name in chunk_names:
                del places[name]
        result = self._of(tuple(chunks), places.finish(), length)
        # Chunks that have emptied stay, so that the others keep their places; now and then all are filled anew.
        return result if len(chunks) * CHUNK <= 4 * length + 8 * CHUNK else type(self)(result.items())


class _Values(ValuesView[V]):
    __slots__ = ("_map",)

    def __init__(self, of: OrderedMap[V]) -> None:
        super().__init__(of)
        self._map = of

    def __iter__(self) -> Iterator[V]:
        return chain.from_iterable(map(dict.values, self._map._chunks))

    def __reversed__(self) -> Iterator[V]:
        return chain.from_iterable(reversed(chunk.values()) for chunk in reversed(self._map._chunks))


class _Items(ItemsView[str, V]):
    __slots__ = ("_map",)

    def __init__(self, of: OrderedMap[V]) -> None:
        super().__init__(of)
        self._map = of

    def __iter__(self) -> Iterator[tuple[str, V]]:
        return chain.from_iterable(map(dict.items, self._map._chunks))


# --- for maps of both kinds ------------------------------------------------------------------------


def put(mapping: Mapping[str, V], name: str, value: V) -> Mapping[str, V]:
    """Return `mapping` with `value` under `name`."""
    if type(mapping) is dict:
        result = mapping | {name: value}
        return result if len(result) <= SMALL else OrderedMap(result.items())
    return cast("OrderedMap[V]", mapping).put(name, value)


def put_all(mapping: Mapping[str, V], updates: Mapping[str, V]) -> Mapping[str, V]:
    """Return `mapping` with all of `updates`."""
    for name, value in updates.items():
        mapping = put(mapping, name, value)
    return mapping


def without(mapping: Mapping[str, V], names: Collection[str]) -> Mapping[str, V]:
    """Return `mapping` without the items of these names; the same object where it is an OrderedMap and has none of
    them."""
    if type(mapping) is dict:
        return {name: value for name, value in mapping.items() if name not in names}
    return cast("OrderedMap[V]", mapping).without(names)


def ordered(mapping: Mapping[str, V]) -> Mapping[str, V]:
    """Return the same items as a map that changes cheaply."""
    return mapping if len(mapping) <= SMALL else OrderedMap(mapping.items())


def plain(mapping: Mapping[str, V]) -> dict[str, V]:
    """Return the same items as a dict, to be read or encoded."""
    return mapping if type(mapping) is dict else dict(mapping.items())


def newest(mapping: Mapping[str, V], count: int) -> Iterator[V]:
    """Return the values that were put in last, the last one first."""
    return islice(reversed(cast("dict[str, V]", mapping).values()), count)


def in_order(mapping: Mapping[str, V], names: Sequence[str]) -> list[str]:
    """Return those names in the order in which `mapping` has them."""
    if isinstance(mapping, OrderedMap):
        wanted_names = set(names)
        places = sorted({mapping._places[name] for name in wanted_names})
        return [name for place in places for name in mapping._chunks[place] if name in wanted_names]
    return [name for name in mapping if name in names]


def same_names(before: Mapping[str, V], after: Mapping[str, V]) -> bool:
    """Return whether both have the same names. Of two large maps: a cheap no may be wrong, a yes never is."""
    if before is after:
        return True
    if isinstance(before, OrderedMap) and isinstance(after, OrderedMap):
        return before._places is after._places
    return len(before) == len(after) and before.keys() == after.keys()


def changed(before: Mapping[str, V], after: Mapping[str, V]) -> dict[str, tuple[V | None, V | None]]:
    """Return name -> (value before, value after), None where there is none, of each item that is not the same
    object."""
    if before is after:
        return {}
    pairs = _unshared(before, after)
    if all(len(old) == len(new) and all(map(is_, old, new)) for old, new in pairs):  # names as before: mostly so
        return {
            name: (old[name], new[name])
            for old, new in pairs
            for name in compress(old, map(is_not, old.values(), new.values()))
        }
    old_items: dict[str, V] = {}
    new_items: dict[str, V] = {}
    for old, new in pairs:
        old_items.update(old)
        new_items.update(new)
    differences: dict[str, tuple[V | None, V | None]] = {}
    for name, value in old_items.items():
        now = new_items.get(name)
        if now is not value:
            differences[name] = (value, now)
    for name, value in new_items.items():
        if name not in old_items:
            differences[name] = (None, value)
    return differences


def _unshared(before: Mapping[str, V], after: Mapping[str, V]) -> list[tuple[Mapping[str, V], Mapping[str, V]]]:
    if isinstance(before, OrderedMap) and isinstance(after, OrderedMap):
        pairs = zip_longest(before._chunks, after._chunks, fillvalue=_EMPTY)
        return [(old, new) for old, new in pairs if old is not new]
    return [(before, after)]
