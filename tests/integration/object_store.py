"""An S3 server on this machine: moto's, in a process of its own that tests may stop, continue and end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from types import TracebackType

#: What the stores' own libraries read. The credentials are moto's: any will do.
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test-key",
    "AWS_SECRET_ACCESS_KEY": "test-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
}


def missing_packages() -> str:
    """Return why there can be no server here; "" for nothing."""
    is_there = all(find_spec(name) for name in ("moto", "flask", "s3fs"))
    return "" if is_there else "moto's server and s3fs are not installed: make object-store"


class S3Server:
    """Serve buckets on loopback while it is entered. `environment`: what a client needs."""

    def __enter__(self) -> S3Server:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{port}"
        self.environment = {**CREDENTIALS, "AWS_ENDPOINT_URL": self.endpoint}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **CREDENTIALS},
        )  # fmt: skip
        end_s = time.monotonic() + 60
        while True:
            try:
                request = urllib.request.Request(f"{self.endpoint}/bucket", method="PUT")
                urllib.request.urlopen(request, timeout=10).close()
                return self
            except OSError:
                if time.monotonic() > end_s or self.process.poll() is not None:
                    raise
                time.sleep(0.05)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()

    def url(self, prefix: str) -> str:
        return f"s3://bucket/{prefix}"

    def hang(self) -> None:
        """From now on it answers nobody, and its connections stay open."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)
