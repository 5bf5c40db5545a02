"""Addresses of NATS servers, as people write them: one, or those of a cluster with commas between."""

from __future__ import annotations

from urllib.parse import urlsplit


def parse_urls(text: str) -> tuple[str, ...]:
    """Parse the addresses in `text`. Raises ValueError with one line that says what is wrong and how to write it."""
    urls = tuple(url.strip() for url in text.split(","))
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("nats", "tls") or not parts.hostname:
            raise ValueError(f"{url!r} is not a NATS URL; write nats://HOST:PORT")
        try:
            parts.port  # noqa: B018 - raises where it is not a port
        except ValueError:
            raise ValueError(f"{url!r} has a bad port; write nats://HOST:PORT") from None
    return urls
