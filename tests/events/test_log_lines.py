"""Nobody forges a line of a daemon's log."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys

import pytest

from unicrond.events.host.daemon_log import JsonLines, PlainLines, escape, is_news

HOSTILE = "ended\n2026-01-01 00:00:00 INFO unicrond: all is well\r\x1b[2J\x9b31m\u2028\udc80"


@pytest.fixture
def written() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def logger(written: io.StringIO) -> logging.Logger:
    handler = logging.StreamHandler(written)
    handler.setFormatter(PlainLines("%(levelname)s %(name)s: %(message)s"))
    logger = logging.Logger("unicrond")
    logger.addHandler(handler)
    return logger


def test_log_line_escapes_control_characters(logger: logging.Logger, written: io.StringIO) -> None:
    logger.warning("quarantined sequence %d: %s", 7, HOSTILE)
    line = written.getvalue()
    assert line.count("\n") == 1 and line[:-1].isprintable(), line
    assert r"ended\n2026-01-01" in line and r"\r\x1b[2J\x9b31m\u2028\udc80" in line


def test_traceback_lines_never_look_like_records(logger: logging.Logger, written: io.StringIO) -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logger.exception("a part ended")
    first, *more = written.getvalue().splitlines()
    assert first == "ERROR unicrond: a part ended"
    assert all(line.startswith("    ") and line.isprintable() for line in more), more
    assert any("INFO unicrond: all is well" in line for line in more)


def test_tls_shutdown_noise_of_asyncio_is_dropped() -> None:
    def record(name: str, text: str) -> logging.LogRecord:
        return logging.LogRecord(name, logging.WARNING, "", 1, text, None, None)

    noise = "returning true from eof_received() has no effect when using ssl"
    assert not is_news(record("asyncio", noise))
    assert is_news(record("agents", noise)) and is_news(record("asyncio", "socket.send() raised exception"))


def test_plain_text_is_not_escaped() -> None:
    assert escape("Größe 3 µs, größer als 2; 'b'") == "Größe 3 µs, größer als 2; 'b'"


@pytest.mark.parametrize("program", ["unicrond.commands.cli", "unicrond.agents.shell.cli"])
def test_daemons_escape_log_lines(program: str) -> None:
    code = (
        "import asyncio, logging, sys; from importlib import import_module; import uvloop\n"
        "def run(work):\n    work.close()\n    logging.getLogger('x').warning('a\\nb')\n    return 0\n"
        "uvloop.run = run\n"
        f"sys.exit(import_module({program!r}).main(sys.argv[1:]))"
    )
    arguments = (
        ["run"]
        if program == "unicrond.commands.cli"
        else ["--nats", "nats://127.0.0.1:9", "--node", "n1", "--slots", "1"]
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr.count("\n") == 1 and r"a\nb" in done.stderr, done.stderr


def test_json_log_line_holds_whole_record(written: io.StringIO) -> None:
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonLines())
    logger = logging.Logger("unicrond")
    logger.addHandler(handler)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logger.exception("quarantined %s", HOSTILE)
    line = written.getvalue()
    assert line.count("\n") == 1 and line.isascii()
    told = json.loads(line)
    assert told["message"] == f"quarantined {HOSTILE}" and told["level"] == "ERROR" and told["logger"] == "unicrond"
    assert "ValueError" in told["traceback"] and told["time"].endswith("+00:00")
