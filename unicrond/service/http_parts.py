"""What a handler of the HTTP API is made of: a request's JSON and numbers in, JSON and refusals out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from unicrond.core.field_faults import faults
from unicrond.core.ordering import Refused

T = TypeVar("T", bound=msgspec.Struct)
#: Digits of a number in a query; no log, rank or file has so many.
_DIGITS_MAX = 15
#: Nesting of a request's JSON; the deepest of ours is four.
_DEPTH_MAX = 32


async def body_of(asked: web.Request, kind: type[T]) -> T:
    """The request's JSON as a `kind`; no body is an empty object. Raises Refused with what is wrong first."""
    value = await json_of(asked)
    for fault in faults(value, kind):
        raise Refused(400, str(fault))
    return msgspec.convert(value, kind, strict=True)


async def json_of(asked: web.Request) -> Any:
    """The request's JSON; no body is an empty object. Raises Refused."""
    try:
        value = msgspec.json.decode(await asked.read() or b"{}")
    except msgspec.DecodeError as wrong:
        raise Refused(400, f"body: not valid JSON: {wrong}") from None
    except RecursionError:
        raise Refused(400, "body: not valid JSON: brackets are nested too deep") from None
    if _depth(value) > _DEPTH_MAX:
        raise Refused(400, f"body: brackets are nested more than {_DEPTH_MAX} deep")
    return value


def _depth(value: Any) -> int:
    """How deep lists and objects are nested, without recursion: what is deep here would overflow elsewhere."""
    depth, level = 0, [value]
    while level := [inner for outer in level if isinstance(outer, dict | list) for inner in _inner(outer)]:
        depth += 1
    return depth


def _inner(outer: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return outer.values() if isinstance(outer, dict) else outer


def number_in(asked: web.Request, field: str) -> int | None:
    """A number of the query, None where it is not given. Raises Refused."""
    text = asked.query.get(field)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX):
        shown = ascii(text[:40])  # as it is written may be what JSON cannot carry
        raise Refused(400, f"{field}: {shown} is not a number; give an integer from 0 to {'9' * _DIGITS_MAX}")
    return int(text)


def is_from_elsewhere(asked: web.Request) -> bool:
    """Another site's page has a browser send it. Programs that are no browsers say nothing of where they come from.

    A browser's own word counts for more than names, which a proxy may change: no page can set Sec-Fetch-Site. Browsers
    leave it out where neither TLS nor loopback vouches for the address; they send Origin with every POST.
    """
    if (site := asked.headers.get("Sec-Fetch-Site")) is not None:
        return site not in ("same-origin", "none")
    origin = asked.headers.get("Origin")
    return origin is not None and urlsplit(origin).netloc != asked.host


def answer(value: Any, status: int = 200) -> web.Response:
    """A JSON value."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def error(status: int, text: str) -> web.Response:
    """A refusal, in one line."""
    # Bytes of a header that are no text arrive as what JSON cannot carry.
    return answer({"error": text.encode(errors="backslashreplace").decode()}, status)
