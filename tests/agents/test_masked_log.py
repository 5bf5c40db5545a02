"""A task's secrets do not come into its workers' logs, in however many pieces they are written."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

from unicrond.agents.fork_server.masked_output import MaskedLog, masked_log, values_of
from unicrond.agents.host.paths import worker_log
from unicrond.agents.host.rotated_output import RotatedLog
from unicrond.agents.output.query_service import answer
from unicrond.agents.trainer.process.faults import mask_of, redact
from unicrond.events.queries.worker_queries import MAX_LOG_BYTES, LogsRequest, decode_reply, encode
from unicrond.events.vocabulary import ErrorReported, TaskSpec

VALUES = ["hunter2-hunter2", "hunter2-x", "hunter2-x-and-more", "aaaaab", "key-line-one\nkey-line-two\n"]


def written(path: Path, pieces: list[bytes], values: list[str]) -> bytes:
    log = MaskedLog(RotatedLog(path), values)
    for piece in pieces:
        log.write(piece)
    log.end()
    return path.read_bytes()


def test_split_secret_never_reaches_disk(tmp_path: Path) -> None:
    text = b"a hunter2-hunter2 b hunter2-x hunter2-x-and-more aaaaaaaaab c\nkey-line-one\nkey-line-two\nhunter2- end "
    text += b"hunter2-hunter"
    shown = b"a (hidden) b (hidden) (hidden) aaaa(hidden) c\n(hidden)\nhunter2- end hunter2-hunter"
    drawn = random.Random(5)
    for number in range(200):
        cuts = sorted(drawn.sample(range(1, len(text)), drawn.randrange(0, 12)))
        pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert written(tmp_path / f"{number}.log", pieces, VALUES) == shown, pieces


def test_masked_log_writes_at_once_unless_secret_may_follow(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    log = MaskedLog(RotatedLog(path), ["hunter2"])
    log.write(b"a line\n")
    assert path.read_bytes() == b"a line\n"
    log.write(b"a hunt")
    assert path.read_bytes() == b"a line\na "
    log.write(b"er\n")
    assert path.read_bytes() == b"a line\na hunter\n"
    log.write(b"hunt")
    log.close()  # as a forked child does
    log.close()
    assert path.read_bytes() == b"a line\na hunter\n"


def test_masked_log_hides_secrets_of_node_and_env(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("from-the-file\n")
    os.mkfifo(tmp_path / "pipe")
    files = {name: f"file:{tmp_path}/{file}" for name, file in (("A", "key"), ("D", "missing"), ("E", "pipe"))}
    secrets = {**files, "B": "env:THERE", "C": "env:MISSING"}
    spec = TaskSpec(name="a", env={"HF_TOKEN": "from-env", "PATH": "/bin"}, secrets=secrets)
    found = values_of(spec, None, {"THERE": "from-the-agent"})
    assert sorted(found) == ["from-env", "from-the-agent", "from-the-file"], "and a pipe is not waited for"
    log = masked_log(tmp_path / "logs" / "a.1.log", spec, None)
    log.write(b"from-the-file from-env /bin\n")
    log.end()
    assert (tmp_path / "logs" / "a.1.log").read_bytes() == b"(hidden) (hidden) /bin\n"


def served(tmp_path: Path, content: bytes, **request: int) -> list[bytes]:
    path = worker_log(tmp_path, "a", "a.1")
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    pieces, offset = [], request.get("offset", 0)
    while True:
        asked = encode(LogsRequest(task="a", worker="a.1", offset=offset))
        reply = decode_reply(asyncio.run(answer("n1", tmp_path, lambda _: 0, asked)))
        if not reply.data:
            return pieces
        pieces.append(reply.data)
        offset = reply.next_offset


def test_served_log_blots_out_secrets(tmp_path: Path) -> None:
    token = b"hf_abcdefghijklmnopqrstuvwxyz0123"
    for shift in (-40, -20, -1, 0, 5):
        before = b"x" * (MAX_LOG_BYTES + shift - 1) + b" "
        content = before + token + b"\nrest\n"
        pieces = served(tmp_path, content)
        assert len(pieces) == (1 if shift == -40 else 2)
        assert b"".join(pieces) == before + b"*" * len(token) + b"\nrest\n"


def test_error_report_hides_secrets() -> None:
    spec = TaskSpec(name="a", secrets={"A": "env:X"}, env={"DB_PASSWORD": "in-the-env"})
    trouble = ErrorReported(
        node="n1",
        task="a",
        worker="a.1",
        kind="exception",
        generation=1,
        iteration=1,
        phase="forward",
        message="s3cret-value" * 80 + " hf_abcdefghijklmnopqrstuvwxyz",
        detail="in-the-env\n" * 5000,
    )
    told = redact(trouble, mask_of(spec, {"A": "s3cret-value", "DB_PASSWORD": "in-the-env"}))
    assert "s3cret-value" not in told.message and "in-the-env" not in told.detail
    assert len(told.message) <= 1024 and len(told.detail) <= 32768
