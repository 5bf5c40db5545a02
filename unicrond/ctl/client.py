"""The client of the HTTP API, on the standard library alone: quick to import, no proxy in between.

Its calls block. In an event loop they run in threads; `follow` does so for the events.

Where there are several heads, it asks the one that leads: the one that says so, and after that the same one until it
cannot be reached or stands by. What may have been carried out is not asked for a second time.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from unicrond.core.state.state import ClusterState
from unicrond.core.state.state_bytes import from_json
from unicrond.display.event_lines import BadEventStream, EventLine, EventStreamParser, entry_of
from unicrond.events.host.file_versions import FileVersion, file_version
from unicrond.events.trust.tls import BadCa, client_context, trouble
from unicrond.events.vocabulary.phrases import clean
from unicrond.events.wire.envelope import Entry
from unicrond.intake.own_token import NoOwnToken, file_named, own_token

DEFAULT_URL = "http://127.0.0.1:7470"
TIMEOUT_S = 15.0
#: Until the agents have looked at what doctor asks, beside the limit of the sums.
_CHECKS_S = 300.0
#: For some tens of plans, each of which may take a second in a large cluster with several types of GPU.
_PLANS_S = 180.0
#: Of the question which head leads, to each.
_WHO_LEADS_S = 3.0
RETRY_S = 0.5


class ApiError(Exception):
    """A failed call of the API; the text is one line for people."""


class Unreachable(ApiError, ConnectionError):
    """No answer, or one that is not a coordinator's; it may pass."""


class ConnectionFailed(Unreachable):
    """No connection: the request was not carried out."""


class ApiRefused(ApiError):
    """The coordinator refuses the request; `status` is HTTP's."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class NotLeader(ApiRefused):
    """The head that was asked does not lead."""


_Answer: TypeAlias = tuple[http.client.HTTPConnection, http.client.HTTPResponse]


class Snapshot(msgspec.Struct, frozen=True):
    """GET /v1/state: `body` is the answer as it came, `state` the same for programs."""

    body: dict[str, Any]
    state: ClusterState


class _Https(http.client.HTTPConnection):
    """HTTPS to a server whose certificate may have another name than its address."""

    default_port = http.client.HTTPS_PORT

    def __init__(
        self, host: str, port: int | None, timeout_s: float, context: ssl.SSLContext, server_name: str
    ) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self._tls = context
        self._server_name = server_name or host

    def connect(self) -> None:
        """Connect, and begin TLS under the server's name."""
        super().connect()
        self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._server_name)


class Client:
    """The coordinator, at one address or at that of one of several heads, with commas between: `url` is the one that is
    asked now. Every call opens a connection of its own. All raise Unreachable and Refused. Without a token it takes
    that of a head on this machine, where it may read it (own_token.py)."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        token: str = "",
        timeout_s: float = TIMEOUT_S,
        *,
        ca: Path | None = None,
        server_name: str = "",
    ) -> None:
        """Create a client. `ca`: who signs the coordinator's certificate; None: a CA that this machine knows.
        `server_name`: the name in the certificate; "": the host of `url`. Raises ValueError where `url` holds anything
        but http or https addresses."""
        self.token = token
        self.urls = [address.strip() for address in url.split(",")]
        for server_url in reversed(self.urls):
            self._point_at(server_url)
        self._knows_leader = False
        self._pointing = threading.Lock()
        self._ca, self._server_name = ca, server_name
        self._ca_version: FileVersion | None = None
        self._context: ssl.SSLContext | None = None
        self._timeout_s = timeout_s

    def _point_at(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"{url!r} is not an http address; give one like {DEFAULT_URL}")
        self.url = url.rstrip("/")
        self._host = parts.hostname
        self._port = parts.port  # a ValueError that says what is wrong, too
        self._base = parts.path.rstrip("/")
        self._tls = parts.scheme == "https"
        self._headers = _bearer(self.token)

    def health(self) -> dict[str, Any]:
        """Return {"status": "live", "standby", "catching up", ... , "trouble", ...}."""
        return self._object("GET", "/healthz")

    def snapshot(self) -> Snapshot:
        """Return the folded state."""
        body = self._object("GET", "/v1/state")
        try:
            return Snapshot(body, from_json(body.get("state")))
        except msgspec.ValidationError as error:
            raise Unreachable(
                f"{self.url} sent a state that this version cannot read ({error}); is it another version of unicrond?"
            ) from None

    def state(self) -> tuple[ClusterState, str]:
        """Return the folded state and its digest."""
        snapshot = self.snapshot()
        return snapshot.state, str(snapshot.body.get("digest"))

    def submit(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Submit a task; return {"task", "seq"}."""
        return self._object("POST", "/v1/tasks", body=spec)

    def goodput(self, peak_tflops: int = 0) -> dict[str, Any]:
        """Return where the cluster's work and time went (views/goodput_report.py)."""
        return self._object("GET", f"/v1/goodput?peak_tflops={peak_tflops}")

    def plan_table(self) -> dict[str, Any]:
        """Return the plan for each possible next event: {"epoch", "rows": [plan_preview.Row], "unforeseen"}."""
        return self._object("GET", "/v1/plan/table")

    def plan_spares(self, repair_s: int, mtbf_s: int) -> dict[str, Any]:
        """Return how many nodes to keep back: views/spares.py. `mtbf_s`: of one worker; 0: as it is known."""
        with self._patient(_PLANS_S):
            return self._object("GET", f"/v1/plan/spares?repair_s={repair_s}&mtbf_s={mtbf_s}")

    def plan_whatif(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Return the plan now and the one with the changes (views/what_if.py)."""
        return self._object("POST", "/v1/plan/whatif", body=changes)

    def cancel(self, task: str, reason: str) -> dict[str, Any]:
        """Cancel a task; return {"task", "seq"}."""
        return self._object("POST", f"/v1/tasks/{quote(task, safe='')}/cancel", body={"reason": reason})

    def update(self, task: str, order: dict[str, Any], *, of: str = "update") -> dict[str, Any]:
        """Change the worth and bounds of a running task (UpdateOrder), or its `of`; return that, {"task", "seq"}."""
        return self._object("POST", f"/v1/tasks/{quote(task, safe='')}/{of}" if task else f"/v1/{of}", body=order)

    def reshape(self, task: str, order: dict[str, Any]) -> dict[str, Any]:
        """Request another layout (unicrond.core.rules.reshape_requests.ReshapeOrder); return all of it, and {"seq"}."""
        return self._object("POST", f"/v1/tasks/{quote(task, safe='')}/reshape", body=order)

    def cordon(self, node: str, *, drain: bool, reason: str, **conditions: Any) -> dict[str, Any]:
        """Stop new workers for the node (drain: move those that it has, too); return {"node", "seq"}. `conditions`:
        `boot` or `address` that the node must have, `until_return`, `by`."""
        body = {"drain": drain, "reason": reason, **conditions}
        return self._object("POST", f"/v1/nodes/{quote(node, safe='')}/cordon", body=body)

    def forget(self, node: str, reason: str, *, leave: bool, **conditions: Any) -> dict[str, Any]:
        """Remove a node that has left (leave: or is up); return {"node", "seq"}. `conditions`: see `cordon`."""
        body = {"reason": reason, "leave": leave, **conditions}
        return self._object("POST", f"/v1/nodes/{quote(node, safe='')}/forget", body=body)

    def uncordon(self, node: str, reason: str, **conditions: Any) -> dict[str, Any]:
        """Allow workers on the node again; return {"node", "seq"}. `conditions`: see `cordon`."""
        return self._object("POST", f"/v1/nodes/{quote(node, safe='')}/uncordon", body={"reason": reason, **conditions})

    def maintain(self, nodes: Sequence[str], begins: dict[str, Any], for_s: float, reason: str) -> dict[str, Any]:
        """Plan a maintenance window `w<seq>`; return {"nodes", "from_us", "until_us", "seq"}."""
        body = {"nodes": list(nodes), "begins": begins, "for_s": for_s, "reason": reason}
        return self._object("POST", "/v1/maintenance", body=body)

    def cancel_maintenance(self, window: str, reason: str) -> dict[str, Any]:
        """Cancel the window; return {"window", "seq"}."""
        return self._object("POST", f"/v1/maintenance/{quote(window, safe='')}/cancel", body={"reason": reason})

    def alarms(self) -> list[dict[str, Any]]:
        """Return the alarms that stand (display/alarms.py)."""
        return list(self._object("GET", "/v1/alarms")["alarms"])

    def handle_alarm(self, alarm: str, act: str, **order: Any) -> dict[str, Any]:
        """Acknowledge, silence or assign an alarm; return {"alarm", "seq"} and what was ordered."""
        return self._object("POST", f"/v1/alarms/{quote(alarm, safe='')}/{act}", body=order)

    def enroll(self, node: str, key: str, unused_h: float, previous_h: float = 0.0) -> dict[str, Any]:
        """Allow the node's agent to log in with this public key; return {"node", "seq"}."""
        body = {"key": key, "unused_h": unused_h, "previous_h": previous_h}
        return self._object("POST", f"/v1/nodes/{quote(node, safe='')}/enroll", body=body)

    def revoke(self, node: str, reason: str) -> dict[str, Any]:
        """Revoke the login of the node's agent; return {"node", "seq"}."""
        return self._object("POST", f"/v1/nodes/{quote(node, safe='')}/revoke", body={"reason": reason})

    def authorities(self) -> dict[str, list[str] | None]:
        """Return, by node, the CAs that its agent has (Heartbeat.authorities); None where it was not heard."""
        return dict(self._object("GET", "/v1/authorities")["nodes"])

    def inject(self, order: dict[str, Any]) -> dict[str, Any]:
        """Order a fault (unicrond.core.rules.fault_targets.FaultOrder); return {"node", "worker", "seq"}."""
        return self._object("POST", "/v1/faults", body=order)

    def logs(self, task: str, **selection: int | str | None) -> dict[str, Any]:
        """Return a piece of a worker's log: {"worker", "node", "offset", "text"}; `offset` is where the next piece
        begins. `selection`: `rank` or `worker`, and `tail_bytes` or `offset`; None counts as left out."""
        return self._object("GET", f"/v1/logs/{quote(task, safe='')}{_query(selection)}")

    def stacks(self, task: str, rank: int) -> dict[str, Any]:
        """Return what a worker is doing: {"worker", "node", "pid", "text", "no_stacks", "collectives", "no_flight"}."""
        return self._object("GET", f"/v1/stacks/{quote(task, safe='')}{_query({'rank': rank})}")

    def marks(self, task: str) -> dict[str, Any]:
        """Return where each worker of the task is: {"marks": {worker: mark}, "silent": {node: why}}."""
        return self._object("GET", f"/v1/marks/{quote(task, safe='')}")

    def story(self, kind: str, name: str) -> dict[str, Any]:
        """Return what became of a node, a task, an incident or a plan (views/accounts.py)."""
        return self._object("GET", f"/v1/story/{kind}/{quote(name, safe='')}")

    def cluster_story(self, *, since_us: int | None = None, last_s: int | None = None) -> dict[str, Any]:
        """Return what happened in the cluster since then, or in the last seconds."""
        return self._object("GET", f"/v1/story{_query({'since_us': since_us, 'last_s': last_s})}")

    def checks(self, library: str, limit_s: float | None = None) -> dict[str, Any]:
        """Return what the agents find about nodes, links and storage. The sums between nodes may take `limit_s`."""
        body = {"library": library, **({"limit_s": limit_s} if limit_s else {})}  # older coordinators know none
        with self._patient((limit_s or 0.0) + _CHECKS_S):
            return self._object("POST", "/v1/checks", body=body)

    def metrics(self) -> str:
        """Return the metrics as Prometheus' text."""
        connection, response = self._open("GET", "/metrics")
        try:
            return response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None
        finally:
            connection.close()

    def skips(self) -> dict[int, str]:
        """Return the entries that every reader skips, and why (events/log/skips.py)."""
        return {int(seq): str(reason) for seq, reason in self._object("GET", "/v1/skips").items()}

    def entries(self, after: int, until: int) -> Iterator[Entry]:
        """Yield entries `after` + 1 to `until`, as they are folded. Raises Unreachable where one is missing."""
        from unicrond.events.log.skips import apply_skips  # brings 60 ms with it

        seq, skips = after, self.skips()
        for line in self.events(after, until=until) if until > after else ():
            if line.seq != seq + 1:
                break
            seq = line.seq
            yield apply_skips(self.entry_of(line), skips)
        if seq < until:
            raise Unreachable(f"{self.url} sent entries up to {seq}, not up to {until}; try again")

    def entry_of(self, line: EventLine) -> Entry:
        """Return the entry that a line of `events` holds. Raises Unreachable where another version wrote it."""
        try:
            return entry_of(line)
        except BadEventStream as error:
            raise Unreachable(f"{self.url}: {error}; is it a coordinator of this version?") from None

    def events(self, after: int = 0, *, follow: bool = False, until: int | None = None) -> Iterator[EventLine]:
        """Yield entries after `after`: with `follow` without end, otherwise to `until`, or the log's end."""
        end = "" if until is None else f"&until={until}"
        connection, response = self._open("GET", f"/v1/events?after={after}&follow={int(follow)}{end}")
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

    def _open(self, method: str, path: str, body: Any = None) -> _Answer:
        if len(self.urls) == 1:
            return self._open_here(method, path, body)
        with self._pointing:
            return self._open_at_leader(method, path, body)

    def _open_at_leader(self, method: str, path: str, body: Any) -> _Answer:
        if not self._knows_leader:
            self._find_leader()
        try:
            return self._open_here(method, path, body)
        except (Unreachable, NotLeader) as error:
            may_repeat = method == "GET" or isinstance(error, ConnectionFailed | NotLeader)
            if not may_repeat:
                raise
        self._find_leader()
        return self._open_here(method, path, body)

    @contextlib.contextmanager
    def _patient(self, timeout_s: float) -> Iterator[None]:
        """Allow answers to take `timeout_s` within this context."""
        previous_s, self._timeout_s = self._timeout_s, timeout_s
        try:
            yield
        finally:
            self._timeout_s = previous_s

    def _find_leader(self) -> None:
        """Set `url` to the head that reports that it leads; else to the first that answers."""
        answering, troubles = "", []
        with self._patient(min(self._timeout_s, _WHO_LEADS_S)):
            for url in self.urls:
                self._point_at(url)
                try:
                    connection, response = self._open_here("GET", "/healthz")
                    with contextlib.closing(connection):
                        health = json.loads(response.read())
                except (ApiError, OSError, http.client.HTTPException, ValueError) as error:
                    troubles.append(f"{url}: {getattr(error, 'strerror', None) or error}")
                    continue
                answering = answering or url
                if isinstance(health, dict) and health.get("leads"):
                    self._knows_leader = True
                    return
        self._knows_leader = False
        if not answering:
            raise ConnectionFailed(f"no coordinator at any of {', '.join(self.urls)}; {clean('; '.join(troubles))}")
        self._point_at(answering)

    def _open_here(self, method: str, path: str, body: Any = None) -> _Answer:
        connection = self._connection()
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.connect()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ConnectionFailed(str(self._unreachable(error))) from None
        is_own_machine = ip_address(connection.sock.getpeername()[0]).is_loopback
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
        if status == 401 and is_own_machine and not self._headers and (source := file_named(text)):
            try:
                self._headers = _bearer(own_token(source, connection.port))
            except NoOwnToken as error:
                raise ApiRefused(str(error), status) from None
            return self._open_here(method, path, body)
        raise (NotLeader if _stands_by(text) else ApiRefused)(_error_text(text, status), status)

    def _connection(self) -> http.client.HTTPConnection:
        if not self._tls:
            return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        version = file_version(self._ca) if self._ca is not None else None
        if self._context is None or version != self._ca_version:  # it is replaced under whoever looks on and on
            try:
                self._context, self._ca_version = client_context(self._ca), version
            except BadCa as error:
                raise Unreachable(str(error)) from None
        return _Https(self._host, self._port, self._timeout_s, self._context, self._server_name)

    def _unreachable(self, error: Exception) -> Unreachable:
        trusts = f"the CA in {self._ca}" if self._ca else ""
        remedy = "give the head's STATE_DIR/tls/ca.pem as --tls-ca or UNICRON_TLS_CA"
        if line := trouble(error, f"the coordinator at {self.url}", trusts=trusts, remedy=remedy):
            return Unreachable(line)
        cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
        check = "check that `unicrond run` is up there, or give --url or UNICRON_URL"
        if not self._tls and isinstance(error, ConnectionResetError):
            check = f"if it speaks TLS, give https://; {check}"
        return Unreachable(f"no coordinator at {self.url} ({clean(cause)}); {check}")


def _query(parameters: dict[str, Any]) -> str:
    query = urlencode({name: value for name, value in parameters.items() if value is not None})
    return f"?{query}" if query else ""


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


def _stands_by(body: bytes) -> bool:
    try:
        return bool(json.loads(body).get("standby"))
    except (ValueError, AttributeError):
        return False


def _error_text(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return f"refused with HTTP status {status}; is it a coordinator?"
