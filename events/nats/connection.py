"""One lasting connection to NATS, made of short ones.

Rules
-----
* A `Session` is one TCP connection. It never reconnects: nats-py's own reconnection buffers, replays
  half-sent batches and can lose its reader without noticing. Whatever kills a session (server gone,
  missed pongs, an unknown -ERR, an exception in the reader) ends its reading task, and that end is the
  one signal, `disconnected`, that everybody waits for.
* A `Connection` replaces a lost session by a new one, without end, with a back-off of at most a second.
* Users of a session repeat their work on the next one: readers go on from the last sequence, a
  publisher repeats its message ids.
* `NATS errors never raise here`: a request that got no answer raises `NoReply`, which means "unknown,
  try again", never "no". Only `PublishDenied` says no: this login may not ask; its rights may still change.
* What the connection presents is read anew for each session; a session that stands moves to what has changed, and what
  waits on it repeats (credentials.py). While no name server answers, the last address is tried (addresses.py).
* Waits between attempts are drawn at random: thousands of clients that lost one server do not come back as one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from unicrond.events.host.backoff import RETRY_DELAY_S
from unicrond.events.host.backoff import Backoff as Backoff
from unicrond.events.log.event_log import LogError, LogUnavailable
from unicrond.events.nats.addresses import Addresses
from unicrond.events.nats.client import NatsClient, NoLogins, NoTls, Sink, describe
from unicrond.events.nats.credentials import CredentialHistory
from unicrond.events.nats.login import ConnectArguments, refusal, tls_trouble
from unicrond.events.nats.login import Login as Login
from unicrond.events.nats.request_reply import Inquiry
from unicrond.events.nats.request_reply import NoReply as NoReply
from unicrond.events.nats.request_reply import PublishDenied as PublishDenied
from unicrond.events.nats.request_reply import ReplyTimeout as ReplyTimeout
from unicrond.events.nats.url import parse_urls
from unicrond.events.trust.accounts import client_name

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 3.0
PING_INTERVAL_S = 5
#: How often a standing session looks at the files of its login, and tries again what the server has refused.
LOOK_EVERY_S = 1.0
MOVE_AGAIN_S = 5.0
#: The message of a server that refuses to publish on a subject.
_DENIED = re.compile(r'permissions violation for publish to "([^"]+)"', re.IGNORECASE)


class LoginRefused(LogUnavailable):
    """The server refuses this login; the text says why, and the fix."""


class Session:
    """One TCP connection and the requests that wait on it. Made by `Connection` only."""

    def __init__(self, client: NatsClient, *, makes_consumers: bool = True) -> None:
        """Create a session over a connected client. `makes_consumers`: the login may make consumers."""
        self.client = client
        self.makes_consumers = makes_consumers
        #: The client's name in the server's reports, as the caller of `connect` chose it.
        self.client_name = str(client.options.get("name") or "a client")
        self.disconnected = asyncio.Event()
        self._waiting: dict[str, Inquiry] = {}
        self._numbers = itertools.count(1)
        self._inbox = client.new_inbox()

    async def start(self) -> None:
        """Watch the reading task, and open the inbox for answers."""
        reading = self.client._reading_task
        assert reading is not None, "a connected client reads"
        reading.add_done_callback(self._on_lost)
        await self.client.subscribe(f"{self._inbox}.*", cb=self._on_answer)

    async def request(
        self, subject: str, body: bytes, headers: Mapping[str, str] | None = None, timeout_s: float = REQUEST_TIMEOUT_S
    ) -> Msg:
        """Send a request and return its answer; raise NoReply after `timeout_s`, without responders, or if the session
        is lost."""
        if self.disconnected.is_set():
            raise NoReply(f"{subject}: connection lost")
        with self.inquiry() as inquiry:
            return await inquiry.ask(subject, body, headers, timeout_s)

    @contextlib.contextmanager
    def inquiry(self) -> Iterator[Inquiry]:
        """Open a request that may be repeated."""
        token = str(next(self._numbers))
        inquiry = Inquiry(self.publish, f"{self._inbox}.{token}")
        self._waiting[token] = inquiry
        try:
            yield inquiry
        finally:
            del self._waiting[token]

    async def publish(
        self, subject: str, body: bytes, headers: Mapping[str, str] | None = None, reply: str = ""
    ) -> None:
        """Write a message to the socket. Raises NoReply if the session is lost."""
        try:
            await self.client.publish(subject, body, reply=reply, headers=dict(headers) if headers else None)
        except nats.errors.MaxPayloadError:
            raise LogError(f"{subject}: {len(body)} bytes exceed the server's max_payload; raise that limit") from None
        except (nats.errors.Error, OSError) as error:
            raise NoReply(f"{subject}: {describe(error)}") from None

    async def subscribe_raw(self, subject: str, sink: Sink) -> Subscription:
        """Give each message on `subject` to `sink`, in order, at once."""
        subscription = await self.client.subscribe(subject, cb=_never)
        self.client.sinks[subscription._id] = sink
        return subscription

    async def unsubscribe_raw(self, subscription: Subscription) -> None:
        """End `subscribe_raw`. Raises nats.errors.Error where the session is lost."""
        await subscription.unsubscribe()
        self.client.sinks.pop(subscription._id, None)

    async def close(self) -> None:
        """Close the socket; never raises."""
        await self.client.give_up()
        self._on_lost(None)

    async def _on_answer(self, message: Msg) -> None:
        inquiry = self._waiting.get(message.subject.rpartition(".")[2])
        if inquiry is not None:
            inquiry.resolve(message)

    def deny(self, subject: str) -> bool:
        """Fail the requests on `subject`, on which the server refused to publish; return whether there were any.

        nats-py gives the subject in small letters.
        """
        inquiries = [inquiry for inquiry in self._waiting.values() if inquiry.subject.lower() == subject]
        for inquiry in inquiries:
            inquiry.deny()
        return bool(inquiries)

    def _on_lost(self, _: object) -> None:
        self.disconnected.set()
        for inquiry in self._waiting.values():
            inquiry.fail()


async def _never(_: Msg) -> None:
    raise AssertionError("a sink takes its messages before")


def parse_headers(raw: bytes) -> tuple[str, dict[str, str]]:
    """Parse the headers of a message as a sink gets them; return status ("" for none) and headers.

    The description is under "Description".
    """
    first, _, rest = raw.partition(b"\r\n")
    status, _, description = first.decode("utf-8", "replace").removeprefix("NATS/1.0").strip().partition(" ")
    parsed = NatsClient._parse_header_lines(rest)
    return status, {**parsed, "Description": description} if description else parsed


Handler = Callable[[Msg], Awaitable[None]]


class Connection:
    """A connection: sessions, one after the other, until `close`. Made by `connect`."""

    def __init__(self, urls: Sequence[str], *, name: str, login: Login) -> None:
        self._urls = list(urls)
        self._name = name
        self._login = login
        self._credentials = CredentialHistory(login)
        self._addresses = Addresses(urls)
        self._is_refused = False
        self._is_denied = False
        #: Since when (monotonic) a login that was let in before is refused at each attempt; None: it is not.
        self.denied_since_s: float | None = None
        self._session: Session | None = None
        self._changed = asyncio.Event()
        self._closed = False
        self._subscriptions: dict[str, Handler] = {}
        self._reason = "no answer yet"
        self._has_reason = False
        self._refusal = ""
        self._logged_reason = ""
        self._keeper: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        """Say whether there is a session now, as far as is known."""
        return self._session is not None

    @property
    def live_session(self) -> Session | None:
        """Return the present session, as far as is known."""
        return self._session

    @property
    def trouble(self) -> str:
        """Return the reason why there is no session, in one line; "" where there is one."""
        return "" if self.is_up else f"no NATS at {self.urls}: {self._refusal or self._reason}"

    @property
    def urls(self) -> str:
        """Return the servers' addresses, for messages to people."""
        return ", ".join(self._urls)

    @property
    def servers(self) -> list[str]:
        """Return the servers' addresses, one by one."""
        return list(self._urls)

    @property
    def login(self) -> Login:
        """Return the login of this connection."""
        return self._login

    async def session(self) -> Session:
        """Return a live session; wait for one as long as it takes. Raises LogUnavailable after `close`."""
        while not self._closed:
            if self._session is not None and not self._session.disconnected.is_set():
                return self._session
            await self._changed.wait()
        raise LogUnavailable("the connection to NATS was closed")

    async def request(
        self, subject: str, body: bytes, headers: Mapping[str, str] | None = None, timeout_s: float = REQUEST_TIMEOUT_S
    ) -> Msg:
        """Send a request on the current session (`Session.request`); wait at most `timeout_s` for a session."""
        try:
            session = await self.session_within(timeout_s)
        except NoReply as error:
            raise NoReply(f"{subject}: {error}") from None
        return await session.request(subject, body, headers, timeout_s)

    async def session_within(self, timeout_s: float) -> Session:
        """Return a live session. Raises NoReply where there is none within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self.session()
        except TimeoutError:
            raise NoReply(f"no connection to {self.urls} ({self._reason})") from None

    async def publish_now(self, subject: str, body: bytes, headers: Mapping[str, str] | None = None) -> bool:
        """Send if there is a connection at this moment; return whether it was sent.
        For messages that are stale soon."""
        if self._session is None:
            return False
        try:
            await self._session.publish(subject, body, headers)
        except NoReply:
            return False
        return True

    async def subscribe(self, subject: str, handler: Handler) -> None:
        """Call `handler` for each core message on `subject`, in this and every later session."""
        self._subscriptions[subject] = handler
        if self._session is not None:
            with contextlib.suppress(nats.errors.Error):  # lost just now: the next session subscribes
                await self._session.client.subscribe(subject, cb=handler)

    async def close(self) -> None:
        """Close for good; callers that wait for a session get LogUnavailable."""
        self._closed = True
        if self._keeper is not None:
            while not self._keeper.done():  # nats-py swallows a cancellation now and then
                self._keeper.cancel()
                await asyncio.wait([self._keeper], timeout=RETRY_DELAY_S)
        if self._session is not None:
            await self._session.close()
            self._session = None
        self._announce()

    async def start(self, timeout_s: float | None) -> None:
        """Begin to keep a session.

        Raises LogUnavailable (LoginRefused) if there is none within `timeout_s` (None: no limit).
        """
        self._keeper = asyncio.create_task(self._keep(), name="nats-connection")
        try:
            async with asyncio.timeout(timeout_s):
                await self.session()
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                if self._refusal:  # whatever an attempt after it said: a server may just hang up
                    raise LoginRefused(f"{self._refusal} ({self.urls})") from None
                raise LogUnavailable(
                    f"cannot reach NATS at {self.urls}: {self._reason}; is the server running?"
                ) from None
            raise

    async def _keep(self) -> None:
        was_let_in = False
        while True:
            backoff = Backoff(f"connecting to NATS at {self.urls}")
            begin = time.monotonic()
            while (session := await self._open_session()) is None:
                if not (was_let_in and self._is_denied):
                    self.denied_since_s = None
                elif self.denied_since_s is None:
                    self.denied_since_s = time.monotonic()
                await backoff.wait_after(LogError(self._reason))
            was_let_in, self.denied_since_s = True, None
            logger.info("connected to NATS at %s after %.2f s", self.urls, time.monotonic() - begin)
            while session is not None:
                self._session = session
                self._logged_reason = self._refusal = ""
                self._announce()
                replacement = None
                try:
                    replacement = await self._replacement(session)
                finally:
                    self._session = replacement
                    await session.close()
                session = replacement
            logger.warning("lost the connection to NATS at %s; reconnecting", self.urls)

    async def _replacement(self, session: Session) -> Session | None:
        """Wait until the session is lost, and return None; or until the login's files have changed and the server
        accepts what they hold, and return a session with that."""
        pause_s = LOOK_EVERY_S
        while not await _is_set_within(session.disconnected, pause_s):
            pause_s = LOOK_EVERY_S
            if self._login.files and self._credentials.has_changed():
                replacement = await self._open_session(is_replacement=True)
                self._refusal = ""
                if replacement is not None:
                    with contextlib.suppress(nats.errors.Error, TimeoutError, OSError):
                        await replacement.client.flush(REQUEST_TIMEOUT_S)  # it hears all before the other one ends
                    logger.info("the login to NATS has changed, and is in use")
                    return replacement
                pause_s = MOVE_AGAIN_S
        return None

    async def _open_session(self, *, is_replacement: bool = False) -> Session | None:
        """Open a session with what the login's files hold, else with what worked last; return None where the server
        accepts neither. `is_replacement`: one with the latter stands."""
        self._has_reason = self._is_denied = False
        choices: list[ConnectArguments] = []
        try:
            choices = self._credentials.load()
        except (ValueError, OSError) as error:
            await self._on_error(error)
        for credentials in [*choices, *([] if is_replacement else self._credentials.previous())]:
            self._is_refused = False
            session = await self._open_session_with(credentials)
            if session is not None:
                self._credentials.accept(credentials)
                if credentials not in choices:
                    logger.warning(
                        "NATS does not accept what the files of the login hold now: the previous one is used"
                    )
                return session
            if not self._is_refused:  # by nobody: other credentials change nothing
                return None
        return None

    async def _open_session_with(self, credentials: ConnectArguments) -> Session | None:
        client = NatsClient()
        arguments = dict(credentials.arguments)
        client.wants_logins = self._login.is_for_locked_servers
        client.wants_tls = "tls" in arguments or any(url.startswith("tls:") for url in self._urls)
        try:
            servers = await self._addresses.servers()
            if servers.tls_name:
                arguments.setdefault("tls_hostname", servers.tls_name)
            await client.connect(
                servers=servers.urls,
                name=self._name,
                allow_reconnect=False,
                # With 1, a server that refuses is tried twice, then it is our turn to back off.
                max_reconnect_attempts=1,
                reconnect_time_wait=RETRY_DELAY_S,
                connect_timeout=2,
                ping_interval=PING_INTERVAL_S,
                max_outstanding_pings=2,
                error_cb=self._on_error,
                **arguments,
            )
            session = Session(client, makes_consumers=credentials.makes_consumers)
            await session.start()
            for subject, handler in self._subscriptions.items():
                await client.subscribe(subject, cb=handler)
        except (nats.errors.Error, OSError, TimeoutError, AssertionError, ValueError) as error:
            await self._on_error(error)
            await client.give_up()
            return None
        except asyncio.CancelledError:
            await client.give_up()
            raise
        self._addresses.note_connected(*client.endpoint)
        return session

    async def _on_error(self, error: Exception) -> None:
        """Record whatever nats-py reports. Must not raise: that would kill the reader."""
        text = client_name(describe(error))
        is_plain = isinstance(error, ValueError | NoTls | NoLogins) and not isinstance(error, OSError)  # BadKey, BadCa
        denied = "" if is_plain else refusal(text, self._login)
        self._is_denied |= bool(denied)
        explanation = str(error) if is_plain else denied or tls_trouble(error, self._login)
        denial = _DENIED.search(text)
        is_handled = denial is not None and self._session is not None and self._session.deny(denial[1].lower())
        # The first error of an attempt tells the cause; "connection reset" and "no servers" only follow.
        if not self._has_reason:
            self._reason, self._has_reason = explanation or text, True
        self._refusal = explanation or self._refusal
        self._is_refused |= bool(explanation) and not isinstance(error, NoTls | NoLogins)
        # _keep reports an outage. The rest (permissions!) is reported here, but not the same every second.
        if explanation or not isinstance(
            error, OSError | nats.errors.UnexpectedEOF | TimeoutError | nats.errors.NoServersError
        ):
            line = explanation or f"NATS says: {text}"
            # The sender of a denied request handles the refusal itself.
            logger.log(logging.DEBUG if is_handled or line == self._logged_reason else logging.WARNING, "%s", line)
            self._logged_reason = line

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def connect(
    urls: str | Sequence[str], *, name: str, login: Login | None = None, timeout_s: float | None = None
) -> Connection:
    """Open a lasting connection to a NATS server or cluster. `urls`: as people write them (url.py), or one by one.
    `name`: what `nats server report connections` shows.

    Waits for the first session: without end, or at most `timeout_s` (then LogUnavailable says why). Raises ValueError
    for a URL that is none.
    """
    servers = list(parse_urls(urls) if isinstance(urls, str) else urls)
    connection = Connection(servers, name=name, login=login or Login())
    await connection.start(timeout_s)
    return connection


async def _is_set_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for the event, at most so long; return whether it is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()
