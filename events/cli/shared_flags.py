"""The flags that several commands have, in whatever program: one word, one type of value, one meaning.

Rules
-----
* A flag of two or more commands stands in SHARED (tests/events/test_command_grammar.py walks all parsers).
* A command may add to the help text, never change its beginning; it may narrow the bounds of the value.
* `--since` and `--until` cut a range out of a log, `--at` names a moment: each takes a sequence number, a time with its
  zone, or a span before the end. Times to come are `--from`, `--by` and `--duration`.
* A number of seconds ends in `-s`. A file to write is `--out`, a picture `--plot`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from unicrond.events.cli.command_line import (
    Flag,
    Parser,
    add,
    address,
    event_type,
    existing_file,
    name,
    node_name,
    number,
    point_argument,
    setting,
    whole,
)
from unicrond.events.nats.url import parse_urls


class SharedFlag(NamedTuple):
    """What all uses of a flag have in common. `metavar` None: it has no value. `action` "append": repeatable."""

    metavar: str | None
    meaning: str
    type: Callable[[str], Any] | None = None
    short: str | None = None
    action: str | None = None


_POINT = "SEQ|TIME"

SHARED: dict[str, SharedFlag] = {
    # the log, and where in it
    "--since": SharedFlag(_POINT, "leave out everything up to and with this point", point_argument),
    "--until": SharedFlag(_POINT, "leave out everything after this point", point_argument),
    "--at": SharedFlag(_POINT, "show what was at this point", point_argument),
    "--limit": SharedFlag("N", "show only the last N", whole(1, 1_000_000), "-n"),
    "--follow": SharedFlag(None, "go on with what is new", None, "-f"),
    "--type": SharedFlag("TYPE", "take only events of this type", event_type, None, "append"),
    "--from-snapshot": SharedFlag(None, "start from the coordinator's snapshot, fold only later entries"),
    "--log": SharedFlag("PATH", "read this exported log, or directory of segments", Path),
    "--other-log": SharedFlag("PATH", "compare with this exported log", Path),
    "--state-dir": SharedFlag("DIR", "use this directory of a coordinator", Path),
    "--archive": SharedFlag("DIR", "read the log's older part here", Path),
    # who, and which
    "--task": SharedFlag("TASK", "a task's name", name),
    "--node": SharedFlag("NODE", "a node's name", node_name),
    "--rank": SharedFlag("N", "a worker's rank", whole()),
    "--boot": SharedFlag("BOOT", "act only on this boot of the agent (`unicronctl describe node`)", whole()),
    "--address": SharedFlag("IP", "the address of the node's agent", address),
    "--slots": SharedFlag("N", "workers at a time on each node", whole(0, 10_000)),
    "--gpu-type": SharedFlag("TYPE", "a type of GPU, as h100-80g"),
    "--iterations": SharedFlag("N", "train up to this iteration", whole(1)),
    "--tp": SharedFlag("N", "set the tensor parallel degree", whole(1)),
    "--pp": SharedFlag("N", "set the pipeline parallel degree", whole(1)),
    "--min-workers": SharedFlag("N", "set the fewest workers", whole(1)),
    "--max-workers": SharedFlag("N", "set the most workers", whole(1)),
    "--micro-batch": SharedFlag("N", "set the sequences per micro-batch", whole(1)),
    # how it is shown
    "--json": SharedFlag(None, "print JSON instead of text"),
    "--out": SharedFlag("FILE", "write to this file", Path),
    "--plot": SharedFlag("FILE", "draw a picture to this file (needs matplotlib)", Path),
    "--once": SharedFlag(None, "do it once, and end"),
    "--peak-tflops": SharedFlag("N", "compare with so many TFLOP/s of one worker, dense, for MFU", whole(0, 10**6)),
    # how it is done
    "--check": SharedFlag(None, "check only, and change nothing"),
    "--reason": SharedFlag("TEXT", "give a reason for the log"),
    "--timeout-s": SharedFlag("S", "wait at most so long", number(0, 1e9, "seconds")),
    "--allow-injection": SharedFlag(None, "allow ordered faults (`unicronctl inject`)"),
    "--new-log": SharedFlag(None, "begin on whatever log is there"),
    "--port": SharedFlag("PORT", "listen on this port of loopback; 0: any free one", whole(0, 65535)),
    "--dir": SharedFlag("DIR", "keep state, logs and checkpoints here", Path),
    "--keep-dir": SharedFlag(None, "keep the new directory"),
    "--nodes": SharedFlag("N", "start so many agents", whole(1, 64)),
    # other clusters, and other pasts
    "--lose": SharedFlag("NODE", "plan without this node", node_name, None, "append"),
    "--add-nodes": SharedFlag("N", "plan with so many more nodes", whole(0, 10_000)),
    "--set": SharedFlag("PATH=VALUE", "change this setting", setting, None, "append"),
    "--seeds": SharedFlag("N", "run so many seeds", whole(0, 10_000)),
    "--first-seed": SharedFlag("N", "begin with this seed", whole()),
    "--processes": SharedFlag("N", "run so many at one time", whole(0, 10_000)),
    # servers and logins
    "--config": SharedFlag("FILE", "read the coordinator's configuration here", Path),
    "--url": SharedFlag("URL[,URL]", "ask the coordinator's API here; of several heads give all"),
    "--token-file": SharedFlag("FILE", "read the API's bearer token here", Path),
    "--nats": SharedFlag("URL[,URL]", "use this NATS server, or cluster", parse_urls),
    "--key": SharedFlag("FILE", "log in by a key of `unicrond enroll` or `unicrond nats-config`", existing_file),
    "--user": SharedFlag("NAME", "log in by this name; with --password-file"),
    "--password-file": SharedFlag("FILE", "read the password here; the file has nothing else", existing_file),
    "--creds": SharedFlag("FILE", "log in by a NATS credentials file", existing_file),
    "--nkey-seed": SharedFlag("FILE", "log in by an nkey seed file", existing_file),
    "--tls-ca": SharedFlag("FILE", "trust this CA certificate", Path),
    "--tls-cert": SharedFlag("FILE", "show this certificate, if the server wants one", existing_file),
    "--tls-key": SharedFlag(
        "FILE", "read that certificate's private key here (default: in the same file)", existing_file
    ),
}


def shared(flag: str, detail: str = "", **settings: Any) -> Flag:
    """Make a flag of SHARED. `detail`: what it is in this command, behind its meaning. `settings`: default, required,
    dest, a type with other bounds."""
    metavar, meaning, type_, short, action = SHARED[flag]
    help_text = f"{meaning}{' ' if detail.startswith('(') else '; ' if detail else ''}{detail}"
    names = (short, flag) if short else (flag,)
    if metavar is None:
        return Flag(names, {"action": "store_true", "help": help_text, **settings})
    if action == "append":
        settings = {"action": action, "default": [], **settings}
        help_text += "; repeatable"
    return Flag(names, {"metavar": metavar, "type": type_, "help": help_text, **settings})


def add_login(parser: Parser, *, tls_ca: bool = True) -> None:
    """Add the flags of a login to NATS; `command_line.login_of` reads them. `tls_ca`: with the server's CA."""
    flags = ("--key", "--user", "--password-file", "--creds", "--nkey-seed", "--tls-cert", "--tls-key")
    group = parser.add_argument_group("login to NATS")
    add(group, *map(shared, flags), *([shared("--tls-ca", "switches TLS on", type=existing_file)] if tls_ca else []))
