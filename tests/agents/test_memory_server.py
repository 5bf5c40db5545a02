"""The exchange of states, and strangers at its door: who names the token does not wait for who says nothing."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

import pytest

from tests.integration.memory_nodes import OtherNode
from unicrond.agents.memory import server as memory_server
from unicrond.agents.protocol.memory import Digesting, digest_of
from unicrond.agents.protocol.memory_exchange import ask


@pytest.fixture(autouse=True)
def _strangers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_server, "REQUEST_TIMEOUT_S", 300.0)


@pytest.mark.parametrize("strangers", [memory_server.CONNECTIONS_MAX, memory_server.STRANGERS_MAX + 8])
def test_silent_connections_never_delay_requests(strangers: int) -> None:
    with OtherNode("n2", {}) as service, ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection((service.host, service.port), 10)) for _ in range(strangers)
        ]
        assert ask(service, "a") == {}, "answered while all of them are silent"
        for early in silent[: max(0, strangers + 1 - memory_server.STRANGERS_MAX)]:
            early.settimeout(10)
            assert early.recv(1) == b"", "the oldest had to leave"


def test_slow_request_takes_no_connection_slot() -> None:
    with OtherNode("n2", {}) as service, ExitStack() as stack:
        for _ in range(memory_server.CONNECTIONS_MAX):
            dripping = stack.enter_context(socket.create_connection((service.host, service.port), 10))
            dripping.sendall(b"\0\0")
        assert ask(service, "a") == {}


@pytest.mark.parametrize("size_bytes", [0, 1, 3 << 20, (4 << 20) + 1, 13 << 20])
def test_digest_is_computed_while_receiving(size_bytes: int) -> None:
    data = random.Random(7).randbytes(size_bytes)
    view = memoryview(bytearray(data))
    with Digesting(view) as digesting:
        for at in (*range(0, size_bytes, 700_001), size_bytes):
            digesting.reached(at)
        assert digesting.digest() == digest_of(data)
    with pytest.raises(ZeroDivisionError), Digesting(view) as digesting:  # a connection that breaks
        digesting.reached(size_bytes)
        raise ZeroDivisionError
