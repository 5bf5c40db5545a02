"""Record the tour anew, and write `docs/one-failure.md`. With `--write`, only write the document from the recording."""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import tempfile
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from tests.tour import document
from tests.tour.trace import record
from tests.tour.way import way

#: Counted by this tracer on the tree of that commit, on 24 November 2026; the same task, cluster and machine.
BEFORE = {
    "commit": "2de3e62",
    "ran": {"head": 81, "agent": 49, "fork server": 18, "worker": 65, "all": 179},
    "quiet": {"head": 61, "agent": 37, "fork server": 0, "worker": 38, "all": 122},
    "more": {"head": 24, "agent": 19, "fork server": 18, "worker": 28, "all": 68},
    "touched": {"head": 27, "agent": 22, "fork server": 6, "worker": 16, "all": 63},
}


def main() -> int:
    """Record and write."""
    parser = argparse.ArgumentParser(prog="python -m tests.tour", description=__doc__)
    parser.add_argument("--write", action="store_true", help="only write the document, from the recording")
    arguments = parser.parse_args()
    if not arguments.write:
        with tempfile.TemporaryDirectory(prefix="unicron-tour-") as folder:
            recording = way(asyncio.run(record(Path(folder) / "trace")))
        recording["date"] = f"{datetime.now(UTC):%d %B %Y}"
        recording["versions"] = f"Python {platform.python_version()}, torch {metadata.version('torch')}"
        recording["files_before"] = BEFORE
        document.RECORDING.write_text(json.dumps(recording, indent=1, ensure_ascii=False) + "\n")
    document.DOCUMENT.write_text(document.write_document(document.load_recording()) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
