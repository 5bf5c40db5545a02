"""Helpers for handlers of the HTTP API: a request's JSON and numbers in, JSON and refusals out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from unicrond.core.rules.fault_targets import OrderRefused
from unicrond.core.state.field_faults import faults

T = TypeVar("T", bound=msgspec.Struct)
#: How long a request's body may take.
BODY_S = 10.0
#: Digits of a number in a query; no log, rank or file has so many.
_DIGITS_MAX = 15
#: Nesting of a request's JSON; the deepest of ours is four.
_DEPTH_MAX = 32


async def body_of(request: web.Request, kind: type[T]) -> T:
    """Return the request's JSON as a `kind`; no body is an empty object. Raises Refused with the first fault."""
    value = await json_of(request)
    for fault in faults(value, kind):
        raise OrderRefused(400, str(fault))
    return msgspec.convert(value, kind, strict=True)


async def json_of(request: web.Request) -> Any:
    """Return the request's JSON; no body is an empty object. Raises Refused."""
    try:
        async with asyncio.timeout(BODY_S):
            body = await request.read()
    except TimeoutError:
        raise OrderRefused(408, f"body: it did not come within {BODY_S:g} s") from None
    try:
        value = msgspec.json.decode(body or b"{}")
    except msgspec.DecodeError as wrong:
        raise OrderRefused(400, f"body: not valid JSON: {wrong}") from None
    except RecursionError:
        raise OrderRefused(400, "body: not valid JSON: brackets are nested too deep") from None
    if _depth(value) > _DEPTH_MAX:
        raise OrderRefused(400, f"body: brackets are nested more than {_DEPTH_MAX} deep")
    return value


def _depth(value: Any) -> int:
    """Return how deep lists and objects are nested, without recursion: what is deep here would overflow elsewhere."""
    depth, level = 0, [value]
    while level := [inner for outer in level if isinstance(outer, dict | list) for inner in _inner(outer)]:
        depth += 1
    return depth


def _inner(outer: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return outer.values() if isinstance(outer, dict) else outer


def number_in(request: web.Request, field: str) -> int | None:
    """Return a number of the query, None where it is absent. Raises Refused."""
    text = request.query.get(field)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX):
        quote = ascii(text[:40])  # as it is written may be what JSON cannot carry
        raise OrderRefused(400, f"{field}: {quote} is not a number; give an integer from 0 to {'9' * _DIGITS_MAX}")
    return int(text)


def is_from_elsewhere(request: web.Request) -> bool:
    """Return whether another site's page has a browser send it. Programs that are no browsers do not say where they
    come from.

    A browser's own word counts for more than names, which a proxy may change: no page can set Sec-Fetch-Site. Browsers
    leave it out where neither TLS nor loopback vouches for the address; they send Origin with every POST.
    """
    if (site := request.headers.get("Sec-Fetch-Site")) is not None:
        return site not in ("same-origin", "none")
    origin = request.headers.get("Origin")
    return origin is not None and urlsplit(origin).netloc != request.host


def answer(value: Any, status: int = 200) -> web.Response:
    """Return a response with a JSON value."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def error(status: int, text: str) -> web.Response:
    """Return a refusal with one line of text."""
    # Bytes of a header that are no text arrive as what JSON cannot carry.
    return answer({"error": text.encode(errors="backslashreplace").decode()}, status)
