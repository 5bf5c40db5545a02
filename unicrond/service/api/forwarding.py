"""Passes what people ask of a head that stands by on to the one that leads, and its answer back.

Rules
-----
* One hop: what was passed on once is refused by a head that does not lead, with the name of the one that does.
* It goes to an address that the configuration names (`api.heads`) alone. Which head leads stands in NATS, where
  somebody with a shared login could write an address of his own; a token goes with the request.
* The head that leads judges the request as if it had come by itself, with the caller's token: heads have the same ones.
* A head that could not be reached has carried out nothing: the answer says `standby`, so a client tries another head.
  Of one that stops answering nobody knows: 504.
* Where the API speaks TLS, the other head's certificate is of the same CA, and names the address.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Sequence
from functools import partial

import aiohttp
from aiohttp import web

from unicrond.events.trust.tls import BadCa, client_context
from unicrond.events.vocabulary.phrases import clean
from unicrond.intake.config import Config
from unicrond.service.api.http_parts import answer, error

log = logging.getLogger("unicrond")

#: Names the head that passed a request on.
HOP = "Unicron-Forwarded-By"
_CONNECT_S = 3.0
#: What doctor asks takes minutes.
_ANSWER_S = 300.0
#: What the other head is told of a request, beside its body.
_HEADERS = ("Authorization", "Content-Type")


class Forwarder:
    """Passes requests on. `heads`: the addresses of all heads' APIs, HOST:PORT; none: nothing is passed on. `name`: of
    this head. `context`: makes the TLS context of a client; None: the API speaks in clear."""

    def __init__(
        self, heads: Sequence[str], name: str = "", context: Callable[[], ssl.SSLContext] | None = None
    ) -> None:
        self._heads = frozenset(heads)
        self._name = name
        self._context = context

    def may_forward(self, request: web.Request, address: str) -> bool:
        """Return whether this request may go to the head at this address."""
        return address in self._heads and HOP not in request.headers

    async def forward(self, request: web.Request, address: str) -> web.Response:
        """Pass the request on, and return the answer."""
        body = await request.read()
        headers = {name: request.headers[name] for name in _HEADERS if name in request.headers}
        scheme = "https" if self._context is not None else "http"
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S, connect=_CONNECT_S)
        try:
            connector = aiohttp.TCPConnector(ssl=self._context() if self._context is not None else True)
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session,
                session.request(
                    request.method,
                    f"{scheme}://{address}{request.raw_path}",
                    data=body,
                    headers={**headers, HOP: self._name},
                    allow_redirects=False,
                ) as reply,
            ):
                content = await reply.read()
                return web.Response(body=content, status=reply.status, content_type=reply.content_type)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, BadCa) as problem:
            text = f"this head stands by, and does not reach the one that leads, {address}: {_plain(problem)}"
            log.warning("%s", text)
            return answer({"error": f"coordinator: {text}", "standby": True}, 503)
        except (aiohttp.ClientError, OSError) as problem:  # a timeout too
            text = f"the head that leads, {address}, has not answered ({_plain(problem)}); it may have done it"
            log.warning("%s", text)
            return error(504, f"coordinator: {text}")


def client_of(config: Config) -> Callable[[], ssl.SSLContext] | None:
    """Return what makes the context of a client of the other heads; None where the API speaks in clear."""
    return partial(client_context, config.certificates.ca) if config.api_tls else None


def _plain(problem: BaseException) -> str:
    return clean(str(problem) or type(problem).__name__)[:200]
