"""The client of the HTTP API, on the standard library alone: quick to import, no proxy in between.

Its calls block. In an event loop they run in threads; `follow` does so for the events.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from unicrond.core.state import ClusterState
from unicrond.core.state_bytes import from_json
from unicrond.display.event_lines import BadEventStream, EventLine, EventStreamParser
from unicrond.display.tables import clean

DEFAULT_URL = "http://127.0.0.1:7470"
TIMEOUT_S = 15.0
RETRY_S = 0.5


class ApiError(Exception):
    """One line for people."""


class Unreachable(ApiError, ConnectionError):
    """No answer, or not a coordinator's; it may pass."""


class Refused(ApiError):
    """The coordinator says no; `status` is HTTP's."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class Snapshot(msgspec.Struct, frozen=True):
    """GET /v1/state: `body` is the answer as it came, `state` the same for programs."""

    body: dict[str, Any]
    state: ClusterState


class Client:
    """One coordinator. Every call opens a connection of its own. All raise Unreachable and Refused."""

    def __init__(self, url: str = DEFAULT_URL, token: str = "", timeout_s: float = TIMEOUT_S) -> None:
        """Raises ValueError where `url` is not an http or https address."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"{url!r} is not an http address; give one like {DEFAULT_URL}")
        self.url = url.rstrip("/")
        self._host = parts.hostname
        self._port = parts.port  # a ValueError that says what is wrong, too
        self._base = parts.path.rstrip("/")
        self._tls = parts.scheme == "https"
        self.token = token
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout_s = timeout_s

    def health(self) -> dict[str, Any]:
        """{"status": "live", "catching up", "log takes nothing" or "stopped deciding", "trouble", "term", "seq"}."""
        return self._object("GET", "/healthz")

    def snapshot(self) -> Snapshot:
        """The folded state."""
        body = self._object("GET", "/v1/state")
        try:
            return Snapshot(body, from_json(body.get("state")))
        except msgspec.ValidationError as error:
            raise Unreachable(
                f"{self.url} sent a state that this version cannot read ({error}); is it another version of unicrond?"
            ) from None

    def state(self) -> tuple[ClusterState, str]:
        """The folded state and its digest."""
        snapshot = self.snapshot()
        return snapshot.state, str(snapshot.body.get("digest"))

    def submit(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Submit a task; {"task", "seq"}."""
        return self._object("POST", "/v1/tasks", body=spec)

    def plan_table(self) -> dict[str, Any]:
        """What each next event would lead to: {"epoch", "rows": [what_if.Row]}."""
        return self._object("GET", "/v1/plan/table")

    def plan_whatif(self, changes: dict[str, Any]) -> dict[str, Any]:
        """The plan now, and the one that would be adopted were it so: {"now": Plan, "then": PlanAdopted}."""
        return self._object("POST", "/v1/plan/whatif", body=changes)

    def cancel(self, task: str, reason: str) -> dict[str, Any]:
        """Cancel a task; {"task", "seq"}."""
        return self._object("POST", f"/v1/tasks/{quote(task, safe='')}/cancel", body={"reason": reason})

    def reshape(self, task: str, order: dict[str, Any]) -> dict[str, Any]:
        """Ask for another layout (unicrond.core.reshape_order.ReshapeOrder); the request in full, and {"seq"}."""
        return self._object("POST", f"/v1/tasks/{quote(task, safe='')}/reshape", body=order)

    def cordon(self, node: str, *, drain: bool, reason: str) -> dict[str, Any]:
        """No new workers for the node (drain: nor those that it has); {"node", "seq"}."""
        return self._object("POST", f"/v1/nodes/{quote(node, safe='')}/cordon", body={"drain": drain, "reason": reason})

    def uncordon(self, node: str, reason: str) -> dict[str, Any]:
        """The node may have workers again; {"node", "seq"}."""
        return self._object("POST", f"/v1/nodes/{quote(node, safe='')}/uncordon", body={"reason": reason})

    def enroll(self, node: str, key: str, unused_h: float) -> dict[str, Any]:
        """The node's agent may log in with this public key; {"node", "seq"}."""
        body = {"key": key, "unused_h": unused_h}
        return self._object("POST", f"/v1/nodes/{quote(node, safe='')}/enroll", body=body)

    def revoke(self, node: str, reason: str) -> dict[str, Any]:
        """The node's agent may log in no more; {"node", "seq"}."""
        return self._object("POST", f"/v1/nodes/{quote(node, safe='')}/revoke", body={"reason": reason})

    def inject(self, order: dict[str, Any]) -> dict[str, Any]:
        """Order a fault (unicrond.core.ordering.FaultOrder); {"node", "worker", "seq"}."""
        return self._object("POST", "/v1/faults", body=order)

    def logs(
        self, task: str, *, rank: int | None = None, tail_bytes: int | None = None, offset: int | None = None
    ) -> dict[str, Any]:
        """A piece of a worker's log: {"worker", "node", "offset", "text"}; `offset` is where the next piece begins."""
        query = {"rank": rank, "tail_bytes": tail_bytes, "offset": offset}
        given = urlencode({name: value for name, value in query.items() if value is not None})
        return self._object("GET", f"/v1/logs/{quote(task, safe='')}" + (f"?{given}" if given else ""))

    def events(self, after: int = 0, *, follow: bool = False) -> Iterator[EventLine]:
        """Entries after sequence number `after`; with `follow` without end, otherwise to the log's end."""
        connection, response = self._open("GET", f"/v1/events?after={after}&follow={int(follow)}")
        try:
            if follow and connection.sock is not None:
                # A quiet log is not a sign of trouble; a peer that is gone is found by the kernel's probes.
                connection.sock.settimeout(None)
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            parser = EventStreamParser()
            # Not line by line: http.client takes a stream that breaks off for one that ends, there and only there.
            while chunk := response.read1(65536):
                yield from parser.feed(chunk)
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None
        except BadEventStream as error:
            raise Unreachable(f"{self.url}: {error}; is it a coordinator of this version?") from None
        finally:
            connection.close()

    def _object(self, method: str, path: str, *, body: Any = None) -> dict[str, Any]:
        connection, response = self._open(method, path, body)
        try:
            answer = json.loads(response.read())
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None
        except ValueError:
            raise Unreachable(f"{self.url} answers, but not like a coordinator; check --url") from None
        finally:
            connection.close()
        if not isinstance(answer, dict):
            raise Unreachable(f"{self.url} answers, but not like a coordinator; check --url")
        return answer

    def _open(
        self, method: str, path: str, body: Any = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout_s)
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, self._base + path, body=data, headers=self._headers)
            response = connection.getresponse()
            if response.status < 400:
                return connection, response
            text, status = response.read(65536), response.status
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self._unreachable(error) from None
        except BaseException:
            connection.close()
            raise
        connection.close()
        raise Refused(_error_text(text, status), status)

    def _unreachable(self, error: Exception) -> Unreachable:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        check = "check that `unicrond run` is up there, or give --url or UNICRON_URL"
        return Unreachable(f"no coordinator at {self.url} ({clean(why)}); {check}")


async def follow(client: Client, after: int = 0) -> AsyncIterator[EventLine]:
    """Every event after sequence number `after`, then each as it comes, across restarts of the coordinator."""
    import asyncio  # `unicronctl` alone pays for it where it waits for something

    loop, came = asyncio.get_running_loop(), asyncio.Queue[EventLine]()

    def read() -> None:
        last = after
        with contextlib.suppress(RuntimeError):  # the loop is closed
            while True:
                with contextlib.suppress(ApiError):  # ask again, from after the last event that came well
                    for event in client.events(last, follow=True):
                        loop.call_soon_threadsafe(came.put_nowait, event)
                        last = event.seq
                if loop.is_closed():
                    return
                time.sleep(RETRY_S)

    threading.Thread(target=read, name="events", daemon=True).start()
    while True:
        yield await came.get()


def _error_text(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return f"refused with HTTP status {status}; is it a coordinator?"
