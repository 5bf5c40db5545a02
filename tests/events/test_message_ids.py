"""Nobody can take a place in the log from somebody else: message ids cannot be guessed, nor borrowed."""

from __future__ import annotations

from pathlib import Path

from tests.contracts.logs import envelope_of, fact, facts, history
from unicrond.events.log.subjects import MessageIds, entry, headers, quarantine_id, subject
from unicrond.events.nats.connection import connect
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import create_streams
from unicrond.events.vocabulary.phrases import clean
from unicrond.events.wire.codec import encode
from unicrond.events.wire.envelope import QuarantinedMessage


def test_message_id_depends_on_process_and_message() -> None:
    ids, others = MessageIds(), MessageIds()
    assert ids.of(fact(1)) == ids.of(fact(1)) != others.of(fact(1))
    assert ids.of(fact(1)).partition(".")[0] == fact(1).event_id
    assert ids.of(fact(1)).partition(".")[2] != ids.of(fact(2)).partition(".")[2]


def test_reason_in_an_id_is_one_plain_line_whoever_wrote_it() -> None:
    for reason in ("all\nwell\x1b[2J", "it was written under the id"):
        message = QuarantinedMessage(7, 1, "unicron.v1.obs.n1.NodeJoined", reason, 3)
        again = entry(7, 1, message.subject, b"abc", quarantine_id(message))
        assert isinstance(again, QuarantinedMessage) and again.reason == " ".join(clean(reason).split())
    for forged in ("quarantined.7.!!!!", "quarantined.7.\n\x1b", "quarantined.7.//79"):
        again = entry(7, 1, "unicron.v1.obs.n1.NodeJoined", b"abc", forged)
        assert isinstance(again, QuarantinedMessage) and "it was written under the id" in again.reason
        assert again.reason.isprintable()


async def test_squatted_id_is_detected_and_loses_nothing(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "nats")
    await server.start()
    try:
        connection = await connect(server.url, name="test", timeout_s=10)
        try:
            await create_streams(connection)
            log = NatsEventLog(connection)
            session = await connection.session()
            # n2 writes something valid of its own under the id of what n1 will say next.
            squatter = fact(1, "n2")
            await session.request(subject(squatter), encode(squatter), headers(squatter, fact(2).event_id))
            assert await log.append(facts(1, 3)) == [2, 3, 4]
            assert await log.append(facts(1, 3)) == [2, 3, 4], "its own repetitions are known"
            first, *rest = await history(log)
            assert isinstance(first, QuarantinedMessage)
            assert "n2-1-1 was written under the id of another message, 'n1-1-2'" in first.reason
            assert [envelope_of(entry) for entry in rest] == facts(1, 3)
        finally:
            await connection.close()
    finally:
        await server.kill()
