"""`unicron-agent --probe live|ready`: asks the agent of a run directory whether it lives, and whether it does its work.

Rules
-----
* The running agent answers on a socket in its run directory: no port has to be open, and an agent that hangs gives no
  answer. `live` is any answer. `ready`: the node has joined, its fork server serves, NATS lets the agent in.
* So an outage of NATS takes readiness away and never liveness: a restart would repair nothing and cost the workers.
* A probe asks again until the answer is yes, for 3 s: a pod whose agent has just become ready does not wait for the
  next probe, five seconds later. It asks an agent that was never ready for 15 s: Kubernetes records a failed probe as
  a warning, and to start is no failure.
* A probe runs every few seconds: this module imports next to nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from unicrond.agents.host.paths import PROBE_SOCKET, default_run_dir
from unicrond.events.cli.command_line import SettableParser, add, fail, option, run
from unicrond.events.cli.completion import COMPLETE_VARIABLE

if TYPE_CHECKING:
    import asyncio

KINDS = ("live", "ready")
#: Less than a kubelet allows a probe, if its timeoutSeconds is 5.
TIMEOUT_S = 4.0
#: So long a probe asks again; an agent that was never ready.
PATIENCE_S, START_PATIENCE_S, AGAIN_S = 3.0, 15.0, 0.1
_ANSWER_BYTES = 4096


class Condition(NamedTuple):
    """The agent's condition. `status`: what the agent does, or waits for, in one line. `is_new`: it was never ready."""

    is_ready: bool
    status: str
    is_new: bool = False


async def serve(path: Path, condition: Callable[[], Condition]) -> asyncio.Server:
    """Answer probes until the server is closed."""
    import asyncio

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        state = condition()
        with contextlib.suppress(OSError):
            writer.write(json.dumps(state._asdict()).encode())
            await writer.drain()
            writer.close()

    path.unlink(missing_ok=True)  # noqa: ASYNC240  (a file in memory)
    return await asyncio.start_unix_server(answer, path)


def ask(path: Path, timeout_s: float = TIMEOUT_S) -> Condition:
    """Return the agent's answer. Raise OSError (TimeoutError) where none answers, ValueError on an invalid answer."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        connection.connect(os.fspath(path))
        reply = b""
        while len(reply) < _ANSWER_BYTES and (part := connection.recv(_ANSWER_BYTES)):
            reply += part
    fields = json.loads(reply)
    return Condition(bool(fields["is_ready"]), str(fields["status"]), bool(fields.get("is_new")))


def ask_until(
    path: Path,
    is_enough: Callable[[Condition], bool],
    patience_s: float = PATIENCE_S,
    start_patience_s: float = START_PATIENCE_S,
) -> Condition:
    """Return the agent's first answer that is enough, or its last one within `patience_s`, within `start_patience_s`
    while it is new. Raise as `ask` does where none answers until then; TimeoutError at once, which has taken longer."""
    began_s = time.monotonic()
    while True:
        waited_s = time.monotonic() - began_s
        try:
            condition = ask(path)
        except TimeoutError:
            raise
        except OSError:  # none serves yet, or another one is about to
            if waited_s >= patience_s:
                raise
        else:
            if is_enough(condition) or waited_s >= (start_patience_s if condition.is_new else patience_s):
                return condition
        time.sleep(AGAIN_S)


def is_asked(argv: Sequence[str]) -> bool:
    """Return whether a command line is a probe's."""
    return COMPLETE_VARIABLE not in os.environ and any(word.partition("=")[0] == "--probe" for word in argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a probe from the command line; return the exit code: 0 yes, 1 no, 2 bad usage."""
    return run("unicron-agent", lambda: _probe(argv))


def _probe(argv: Sequence[str] | None) -> int:
    parser = SettableParser(prog="unicron-agent", add_help=False)
    # The flags of the agent itself may stand beside it: a manifest may say them once for both.
    add(
        parser,
        option("--probe", "KIND", "", choices=KINDS),
        option("--node", "NAME", ""),
        option("--run-dir", "DIR", "", type=Path),
    )
    arguments, _ = parser.parse_known_args(argv)
    if arguments.run_dir is None and arguments.node is None:
        return fail("unicron-agent", "--probe: give --run-dir or --node, as to the agent", 2)
    run_dir = arguments.run_dir or default_run_dir(arguments.node)
    try:
        condition = ask_until(run_dir / PROBE_SOCKET, lambda answer: arguments.probe == "live" or answer.is_ready)
    except TimeoutError:
        return fail("unicron-agent", f"the agent in {run_dir} does not answer within {TIMEOUT_S:g} s")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return fail("unicron-agent", f"no agent answers in {run_dir}: {error}")
    print(condition.status)
    return 0 if arguments.probe == "live" or condition.is_ready else 1


if __name__ == "__main__":
    sys.exit(main())
