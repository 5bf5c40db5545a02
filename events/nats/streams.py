"""The two streams, and JetStream's API as far as we use it: one JSON request, one JSON answer."""

from __future__ import annotations

import json
import logging
from typing import Any

from unicrond.events.log.event_log import LogError
from unicrond.events.log.subjects import BEAT_STREAM, BEAT_SUBJECTS, EVENT_STREAM, EVENT_SUBJECTS
from unicrond.events.nats.connection import REQUEST_TIMEOUT_S, Backoff, Connection, NoReply, PublishDenied, Session
from unicrond.events.wire.codec import MAX_EVENT_BYTES

logger = logging.getLogger(__name__)

NANOS = 1_000_000_000
#: How long the server recognises a message id. Longer outages of one publisher may leave a repeated
#: event in the log; the fold ignores it.
DUPLICATE_WINDOW_S = 600
BEAT_MAX_AGE_S = 600
#: Of one node; the oldest go first. An agent sends a tenth of it in BEAT_MAX_AGE_S.
BEATS_PER_NODE_MAX = 16_384
#: Of the event stream: one for each of 65,536 nodes, and many readers. Without a number of its own a stream of
#: nats-server 2.15 takes 1,000 (and -1 means that).
MAX_CONSUMERS = 100_000
HEADER_BYTES = 8 * 1024

STREAM_EXISTS_WITH_OTHER_CONFIG = 10058
NO_MESSAGE_FOUND = 10037
NO_STREAM = 10059
#: Mark of an event stream that was imported for looking at it; its commands are old, so no coordinator may work on it.
IMPORTED = "unicron.imported"
#: Mark of an age limit that stands only while the stream is trimmed (`archive.py`).
TRIMMING = "unicron.trimming"


class JetStreamError(LogError):
    """JetStream said no. `code`: its err_code. `is_transient`: it may say yes soon (busy, no leader, in process)."""

    def __init__(self, subject: str, code: int, status: int, description: str) -> None:
        super().__init__(f"{subject}: {description} (err_code {code})")
        self.code = code
        self.is_transient = status in (409, 429, 503)


def event_stream_config(replicas: int = 1) -> dict[str, Any]:
    """Return the configuration of the event stream: on disk, nothing deleted, atomic batches."""
    return {
        "name": EVENT_STREAM,
        "description": "unicrond: the event log; every observation, decision and command, kept for good",
        "subjects": list(EVENT_SUBJECTS),
        "storage": "file",
        "retention": "limits",
        "discard": "new",
        "num_replicas": replicas,
        "duplicate_window": DUPLICATE_WINDOW_S * NANOS,
        "max_msg_size": MAX_EVENT_BYTES + HEADER_BYTES,
        "max_consumers": MAX_CONSUMERS,
        "allow_atomic": True,
        "allow_direct": True,
        "deny_delete": True,
        "deny_purge": True,
    }


def beat_stream_config(replicas: int = 1) -> dict[str, Any]:
    """Return the configuration of the heartbeat stream: short-lived, and written to disk a moment later than delivered.

    A stream of one server stores and delivers by turns. Where each beat costs an fsync, a disk that is behind keeps the
    coordinator from hearing anything, its own beats included. A crash of the server takes the newest beats back and
    gives their numbers anew; so a beat is known by number and time (`replay/views/beat_check.py`). Replicated streams
    cannot be asynchronous: there each beat is as durable as an event.
    """
    config: dict[str, Any] = {
        "name": BEAT_STREAM,
        "description": "unicrond: heartbeats of agents and coordinator, for ten minutes",
        "subjects": list(BEAT_SUBJECTS),
        "storage": "file",
        "retention": "limits",
        "discard": "old",
        "num_replicas": replicas,
        "duplicate_window": 10 * NANOS,
        "max_msg_size": HEADER_BYTES,
        "max_age": BEAT_MAX_AGE_S * NANOS,
        "max_msgs_per_subject": BEATS_PER_NODE_MAX,
        "allow_direct": True,
    }
    return config | {"persist_mode": "async"} if replicas == 1 else config


async def create_streams(connection: Connection, *, replicas: int = 1) -> None:
    """Create what is missing; streams that exist must have our safety settings, or LogError names the wrong one."""
    for config in (event_stream_config(replicas), beat_stream_config(replicas)):
        name = config["name"]
        try:
            await api(connection, f"STREAM.CREATE.{name}", config)
        except JetStreamError as error:
            if error.code != STREAM_EXISTS_WITH_OTHER_CONFIG:
                raise
            info = await api(connection, f"STREAM.INFO.{name}", {})
            if IMPORTED in (info["config"].get("metadata") or {}):
                raise LogError(f"stream {name} was imported, for replay only; use another NATS server") from None
            _require_same(name, config, info["config"])
            actual_config = await _described(connection, info["config"], config["description"])
            actual_config = await _with_consumers(connection, name, actual_config, config.get("max_consumers", 0))
            actual_config = await _with_bound(connection, name, actual_config, config.get("max_msgs_per_subject", -1))
            if config.get("persist_mode") != actual_config.get("persist_mode") and actual_config["num_replicas"] == 1:
                logger.info(
                    "stream %s is synced to disk with each heartbeat, as older versions made it: with hundreds of "
                    "nodes delete it (nats stream rm %s) and restart the coordinator, which makes it anew",
                    name,
                    name,
                )
            if TRIMMING in (actual_config.get("metadata") or {}):
                await end_trim(connection, name, actual_config)


async def _described(connection: Connection, actual_config: dict[str, Any], description: str) -> dict[str, Any]:
    """Return the stream's configuration; add our description to one that an older version made, where that is
    allowed."""
    if actual_config.get("description"):
        return actual_config
    try:
        await api(connection, f"STREAM.UPDATE.{actual_config['name']}", {**actual_config, "description": description})
    except (JetStreamError, PublishDenied) as error:
        logger.debug("stream %s stays without a description: %s", actual_config["name"], error)
        return actual_config
    return {**actual_config, "description": description}


async def consumers_of(connection: Connection, stream: str) -> list[dict[str, Any]]:
    """Return what the server reports of all consumers of a stream."""
    consumers: list[dict[str, Any]] = []
    while True:
        page = await api(connection, f"CONSUMER.LIST.{stream}", {"offset": len(consumers)})
        batch = page.get("consumers") or []
        consumers += batch
        if not batch or len(consumers) >= int(page.get("total", 0)):
            return consumers


async def forget_restored_readers(connection: Connection) -> None:
    """Remove the readers' consumers of a restored stream: nobody listens to them, and the server keeps them."""
    for stream in (EVENT_STREAM, BEAT_STREAM):
        for consumer in await consumers_of(connection, stream):
            config = consumer["config"]
            is_readers = not config.get("durable_name") and config.get("deliver_subject", "").startswith("_INBOX")
            if is_readers and not consumer.get("push_bound"):
                logger.info("stream %s: removing consumer %s, to which nobody listens", stream, consumer["name"])
                await api(connection, f"CONSUMER.DELETE.{stream}.{consumer['name']}", {})


async def _with_consumers(
    connection: Connection, name: str, actual_config: dict[str, Any], minimum: int
) -> dict[str, Any]:
    """Return the stream's configuration, with room for at least `minimum` consumers where the server allows it."""
    if int(actual_config.get("max_consumers", -1)) >= minimum or not minimum:
        return actual_config
    wanted_config = {**actual_config, "max_consumers": minimum}
    try:
        await api(connection, f"STREAM.UPDATE.{name}", wanted_config)
    except (JetStreamError, PublishDenied) as error:
        logger.error(
            "stream %s: max_consumers is %s and cannot be raised to %d (%s); nodes beyond it cannot join",
            name,
            actual_config.get("max_consumers"),
            minimum,
            error,
        )
        return actual_config
    logger.info("stream %s: max_consumers is %d now", name, minimum)
    return wanted_config


async def _with_bound(connection: Connection, name: str, actual_config: dict[str, Any], most: int) -> dict[str, Any]:
    """Return the stream's configuration, with at most so many messages of a subject where the server allows it; -1: no
    bound. A bound that an operator has set stays."""
    if most < 0 or int(actual_config.get("max_msgs_per_subject", -1)) > 0:
        return actual_config
    wanted_config = {**actual_config, "max_msgs_per_subject": most}
    try:
        await api(connection, f"STREAM.UPDATE.{name}", wanted_config)
    except (JetStreamError, PublishDenied) as error:
        logger.warning("stream %s: messages of a node stay without a bound: %s", name, error)
        return actual_config
    return wanted_config


async def end_trim(connection: Connection, name: str, config: dict[str, Any]) -> None:
    """Remove the age limit of a trim that did not finish."""
    metadata = {key: value for key, value in config["metadata"].items() if key != TRIMMING}
    await api(connection, f"STREAM.UPDATE.{name}", {**config, "max_age": 0, "metadata": metadata})


def _require_same(name: str, wanted_config: dict[str, Any], actual_config: dict[str, Any]) -> None:
    """Raise LogError where a safety setting differs. Replicas, ages and sizes are the operator's to change."""
    for key in ("subjects", "storage", "retention", "discard", "allow_atomic", "deny_delete", "deny_purge"):
        expected, actual = wanted_config.get(key), actual_config.get(key)
        if key == "subjects":
            expected, actual = sorted(expected or []), sorted(actual or [])
        if expected is not None and expected != actual:
            raise LogError(
                f"stream {name}: {key} is {actual!r} and must be {expected!r}; run `nats stream edit {name}`"
            )


async def api(connection: Connection, subject: str, request: dict[str, Any]) -> dict[str, Any]:
    """Call the JetStream API, and repeat the call until it is answered.

    Raises JetStreamError if the answer is no, PublishDenied where the login may not ask.
    """
    backoff = Backoff(subject)
    while True:
        try:
            return await api_once(connection, subject, request)
        except PublishDenied:
            raise
        except NoReply as error:
            await backoff.wait_after(error)
        except JetStreamError as error:
            if not error.is_transient:
                raise
            await backoff.wait_after(error)


async def api_once(
    connection: Connection | Session, subject: str, request: dict[str, Any], timeout_s: float = REQUEST_TIMEOUT_S
) -> dict[str, Any]:
    """Call the JetStream API once. Raises NoReply (PublishDenied), JetStreamError."""
    message = await connection.request(f"$JS.API.{subject}", json.dumps(request).encode(), timeout_s=timeout_s)
    return answer(subject, message.data)


def answer(subject: str, body: bytes) -> dict[str, Any]:
    """Parse the JSON object in an answer.

    Raises JetStreamError if it holds an error, NoReply if it is not a JSON object.
    """
    try:
        parsed = json.loads(body)
    except ValueError:
        raise NoReply(f"{subject}: the answer is not JSON: {body[:80]!r}") from None
    if not isinstance(parsed, dict):
        raise NoReply(f"{subject}: the answer is not a JSON object: {body[:80]!r}")
    error = parsed.get("error")
    if error is not None:
        raise JetStreamError(
            subject, int(error.get("err_code", 0)), int(error.get("code", 0)), str(error.get("description", "refused"))
        )
    return parsed
