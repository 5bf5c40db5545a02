"""The transports of notifications: webhook, Slack, PagerDuty, e-mail, a command.

Each raises Undelivered where it is worth trying again; the reason holds no secret.
"""

from __future__ import annotations

import asyncio
import json
import os
import smtplib
from email.message import EmailMessage
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from unicrond.intake.notify import Destination
from unicrond.views.notifications import Notice

PAGERDUTY_URL = "https://events.pagerduty.com/v2/enqueue"
TIMEOUT_S = 15.0


class Undelivered(Exception):
    """A message was not delivered; the text says why, in one line."""


class Notification(NamedTuple):
    """Notices of one matter, oldest first, from one cluster."""

    cluster: str
    notices: tuple[Notice, ...]

    @property
    def last(self) -> Notice:
        """The newest notice: the one that counts."""
        return self.notices[-1]

    @property
    def title(self) -> str:
        """The title, in one line."""
        more = f" (and {len(self.notices) - 1} before it)" if len(self.notices) > 1 else ""
        return f"[{self.cluster}] {self.last.title}{more}"

    @property
    def body(self) -> str:
        """The text: all that is known, and the commands to go on with."""
        lines = [notice.title for notice in self.notices[:-1]]
        lines += [self.last.title, self.last.text]
        commands = dict.fromkeys(command for notice in self.notices for command in notice.commands)
        if commands:
            lines += ["", "go on with:", *(f"  {command}" for command in commands)]
        return "\n".join(line for line in lines if line is not None)

    def to_json(self) -> dict[str, Any]:
        """Return the notification as plain JSON types, for webhooks and commands."""
        last = self.last
        return {
            "cluster": self.cluster,
            "key": last.key,
            "rule": last.rule,
            "urgency": last.urgency,
            "title": last.title,
            "text": last.text,
            "is_over": last.is_over,
            "commands": list(last.commands),
            "notices": [notice._asdict() for notice in self.notices],
        }


async def deliver(to: Destination, message: Notification) -> None:
    """Send a notification to one destination. Raises Undelivered."""
    match to.kind:
        case "webhook":
            await _post(_url(to), message.to_json())
        case "slack":
            await _post(_url(to), {"text": f"*{message.title}*\n```{message.body}```"})
        case "pagerduty":
            await _post(to.url or PAGERDUTY_URL, _page(to, message))
        case "email":
            await asyncio.to_thread(_mail, to, message)
        case "command":
            await _run(to, message)


async def _post(url: str, body: Any) -> None:
    try:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.post(url, json=body) as answer:
            if answer.status >= 300:
                raise Undelivered(f"HTTP status {answer.status}")
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise Undelivered(type(error).__name__) from None  # its text may hold the address, which may be a secret


def _page(to: Destination, message: Notification) -> dict[str, Any]:
    last = message.last
    body: dict[str, Any] = {
        "routing_key": _read(to.key_file),
        "event_action": "resolve" if last.is_over else "trigger",
        "dedup_key": f"{message.cluster}/{last.key}",
    }
    if not last.is_over:
        body["payload"] = {
            "summary": message.title[:1024],
            "source": message.cluster,
            "severity": last.urgency,
            "custom_details": {"text": message.body},
        }
    return body


def _mail(to: Destination, message: Notification) -> None:
    mail = EmailMessage()
    mail["Subject"], mail["From"], mail["To"] = " ".join(message.title.split()), to.sender, ", ".join(to.recipients)
    mail.set_content(message.body)
    host, _, port = to.server.rpartition(":")
    try:
        with smtplib.SMTP(host, int(port), timeout=TIMEOUT_S) as server:
            if to.starttls:
                server.starttls()
            if to.user:
                server.login(to.user, _read(to.password_file))
            server.send_message(mail)
    except (smtplib.SMTPException, OSError) as error:
        raise Undelivered(type(error).__name__) from None


async def _run(to: Destination, message: Notification) -> None:
    """Run the command with the notification as JSON on its standard input and in its environment."""
    last = message.last
    environment = {"UNICRON_TITLE": message.title, "UNICRON_RULE": last.rule, "UNICRON_KEY": last.key}
    try:
        process = await asyncio.create_subprocess_exec(
            *to.argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    except OSError as error:
        raise Undelivered(error.strerror or "cannot start") from None
    try:
        await asyncio.wait_for(process.communicate(json.dumps(message.to_json()).encode()), TIMEOUT_S)
    except TimeoutError:
        raise Undelivered(f"still running after {TIMEOUT_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise Undelivered(f"exit code {process.returncode}")


def _url(to: Destination) -> str:
    return to.url or _read(to.url_file)


def _read(path: str) -> str:
    """Read a file anew each time: secrets are renewed."""
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise Undelivered(f"{path}: {error.strerror}") from None
