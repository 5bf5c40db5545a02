"""What a worker may try with the files of its pod; run in an agent's container, prints a line for each try.

    python thief.py OWN_NODE OTHER_NODE

NAME: refused, WHY | done, WHAT. It has the agent's key and everything else that the agent's user may read.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path

from nats.aio.client import Client

from unicrond.events.log.subjects import BEAT_STREAM, EVENT_STREAM, TERM_SUBJECT, command_subjects
from unicrond.events.nats.login import Login

KEY, CA = Path("/run/unicron/login/agent.key"), Path("/etc/unicron/ca/ca.pem")
NATS, API, KUBERNETES = "nats://unicron-head:4222", "https://unicron-head:7470", "https://kubernetes.default.svc"
_TOKENS = Path("/var/run/secrets")
_WAIT_S = 1.5


class TryRefused(Exception):
    """The try came to nothing; the text says why."""


async def attempt(name: str, act: Callable[[], Awaitable[str]]) -> None:
    """Print what comes of an act."""
    try:
        text = f"done, {await act()}"
    except (TryRefused, OSError) as error:
        text = f"refused, {type(error).__name__}: {error}"
    print(f"{name}: {text[:300]}", flush=True)


async def ask(client: Client, violations: list[str], subject: str, body: bytes = b"{}") -> str:
    """Return what answers a request. Raises TryRefused."""
    violations.clear()
    try:
        message = await client.request(subject, body, timeout=_WAIT_S)
    except Exception as error:
        raise TryRefused(violations[0] if violations else str(error) or type(error).__name__) from None
    text = message.data.decode(errors="replace")
    if '"error"' in text:
        raise TryRefused(text)
    return text


def get(url: str, method: str = "GET", ca: Path | None = None) -> str:
    """Return what a server says to somebody without a token. Raises TryRefused."""
    context = ssl.create_default_context(cafile=str(ca)) if ca else ssl._create_unverified_context()
    request = urllib.request.Request(url, method=method, data=b"{}" if method == "POST" else None)
    try:
        with urllib.request.urlopen(request, timeout=5, context=context) as answer:
            return str(answer.status)
    except urllib.error.HTTPError as error:
        raise TryRefused(f"HTTP {error.code}") from None


def tokens() -> str:
    """Return the tokens that lie in the container. Raises TryRefused."""
    files = [str(path) for path in _TOKENS.rglob("*") if path.is_file()] if _TOKENS.is_dir() else []
    if not files:
        raise TryRefused("no token is there")
    return ", ".join(files)


def renamed_key(other: str) -> Path:
    """Return a copy of the key that says another node's name."""
    text = KEY.read_text()
    own = next(line for line in text.splitlines() if "agent-" in line)
    stolen = Path("/tmp") / f"{os.getpid()}.key"
    stolen.write_text(text.replace(own, own.rpartition("agent-")[0] + f"agent-{other}"))
    stolen.chmod(0o600)
    return stolen


async def other_name(other: str) -> str:
    """Return that the key was taken for another node's. Raises TryRefused."""
    violations: list[str] = []

    async def note(error: Exception) -> None:
        """Keep the server's refusals."""
        violations.append(str(error))

    client, login = Client(), Login(key=renamed_key(other), tls_ca=CA)
    try:
        await client.connect(NATS, error_cb=note, allow_reconnect=False, connect_timeout=3, **login.options())
        return f"let in, {await ask(client, violations, f'unicron.v1.beat.{other}')}"
    except Exception as error:
        raise TryRefused(str(error) or type(error).__name__) from None
    finally:
        await client.close()


async def main(own: str, other: str) -> None:
    """Try everything."""
    violations: list[str] = []

    async def note(error: Exception) -> None:
        """Keep the server's refusals."""
        violations.append(str(error))

    client = Client()
    await client.connect(NATS, error_cb=note, **Login(key=KEY, tls_ca=CA).options())
    requests = {
        "observation of another node": f"unicron.v1.obs.{other}.NodeLeft",
        "decision": f"unicron.v1.decision.{other}.NodeIsolated",
        "term of a head": TERM_SUBJECT,
        "command to another node": command_subjects(other).replace("*", "StopWorker"),
        "command to its own node": command_subjects(own).replace("*", "StopWorker"),
        "purge of the log": f"$JS.API.STREAM.PURGE.{EVENT_STREAM}",
        "deletion of the log": f"$JS.API.STREAM.DELETE.{EVENT_STREAM}",
        "deletion of the beats": f"$JS.API.STREAM.DELETE.{BEAT_STREAM}",
        "update of the log": f"$JS.API.STREAM.UPDATE.{EVENT_STREAM}",
        "deletion of another agent's consumer": f"$JS.API.CONSUMER.DELETE.{EVENT_STREAM}.agent-{other}",
        "next command of another agent": f"$JS.API.CONSUMER.MSG.NEXT.{EVENT_STREAM}.agent-{other}",
        "list of connections": "$SYS.REQ.SERVER.PING.CONNZ",
    }
    for name, subject in requests.items():
        await attempt(name, lambda subject=subject: ask(client, violations, subject))
    await client.close()
    await attempt("login as another node", lambda: other_name(other))
    await attempt("state by the API", lambda: asyncio.to_thread(get, f"{API}/v1/state", "GET", CA))
    await attempt("cordon by the API", lambda: asyncio.to_thread(get, f"{API}/v1/nodes/{other}/cordon", "POST", CA))
    await attempt("tokens of Kubernetes", lambda: asyncio.to_thread(tokens))
    await attempt("nodes of Kubernetes", lambda: asyncio.to_thread(get, f"{KUBERNETES}/api/v1/nodes"))
    await attempt(
        "secrets of Kubernetes", lambda: asyncio.to_thread(get, f"{KUBERNETES}/api/v1/namespaces/training/secrets")
    )


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
