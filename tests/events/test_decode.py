"""`python -m unicrond.events.nats.decode`: one line whatever comes in, nothing on stderr, exit code 0, soon."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import EVENT_TYPES, envelopes
from unicrond.events.nats.decode import line
from unicrond.events.vocabulary import NodeLeft
from unicrond.events.wire.codec import MAX_EVENT_BYTES, encode
from unicrond.events.wire.envelope import Envelope

LEFT = Envelope(
    producer="n1", boot=3, number=4, observed_at_us=1_700_000_000_123_456, caused_by="c-1-2",
    event=NodeLeft(node="n1", reason="upgrade\nof the kernel"),
)  # fmt: skip
SENTENCE = "2023-11-14T22:13:20.123Z n1-3-4 NodeLeft: node n1 left: upgrade of the kernel (because of c-1-2)"


def run(body: bytes, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "unicrond.events.nats.decode", *arguments],
        input=body,
        capture_output=True,
        timeout=20,
        check=False,
    )


@pytest.mark.parametrize(
    ("body", "arguments", "expected"),
    [
        (encode(LEFT), (), SENTENCE),
        (b"", (), ""),
        (b"", ("--json",), ""),
        (b"\xc1", (), "not a valid event: "),
        (b"\xc1", ("--json",), '{"error": "not msgpack: '),
        (b"a" * (MAX_EVENT_BYTES + 10), (), f"not a valid event: {MAX_EVENT_BYTES + 1} bytes long"),
        (b"", ("--help",), "usage: "),
    ],
)
def test_decode_program_prints_one_line(body: bytes, arguments: tuple[str, ...], expected: str) -> None:
    done = run(body, *arguments)
    assert (done.returncode, done.stderr) == (0, b"")
    text = done.stdout.decode()
    assert text.endswith("\n")
    assert text.count("\n") == 1
    assert text.startswith(expected)


def test_decode_json_shows_every_field() -> None:
    shown = json.loads(run(encode(LEFT), "--json").stdout)
    assert shown["event"] == {"type": "NodeLeft", "node": "n1", "reason": "upgrade\nof the kernel"}
    assert shown["caused_by"] == "c-1-2"


def test_decode_survives_closed_stdout() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "unicrond.events.nats.decode"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        assert process.stdin and process.stdout and process.stderr
        process.stdout.close()
        process.stdin.write(encode(LEFT))
        process.stdin.close()
        assert process.stderr.read() == b""
        assert process.wait(20) == 0


@given(st.one_of(st.binary(max_size=80), envelopes(kinds=EVENT_TYPES).map(encode)), st.booleans())
def test_decode_prints_one_line_for_any_bytes(body: bytes, as_json: bool) -> None:
    text = line(body, as_json=as_json)
    assert "\n" not in text
    assert bool(text) == bool(body)
    if as_json and body:
        json.loads(text)


def test_decode_imports_nothing_heavy() -> None:
    """One process per message: 40 ms measured, of which 16 ms are Python's."""
    heavy = "import sys, unicrond.events.nats.decode\n"
    heavy += "print([m for m in ('asyncio', 'nats', 'torch', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", heavy], capture_output=True, check=True).stdout == b"[]\n"
