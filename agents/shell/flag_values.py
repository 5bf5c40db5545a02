"""Converters for the values of unicron-agent's flags: each returns the value, or raises ValueError in one line."""

from __future__ import annotations

import msgspec

from unicrond.agents.host.host_resources import cpus
from unicrond.agents.protocol.gpus import visible_gpus
from unicrond.events.cli import command_line
from unicrond.events.cli.command_line import number, whole
from unicrond.events.vocabulary import Gpu
from unicrond.events.wire.codec import RESERVED_NAMES

#: The most workers of a node.
SLOTS_MAX = 1024


def node_name(text: str) -> str:
    """Return the name that the cluster knows the node by: machines' names have dots, which separate NATS's subjects."""
    text = command_line.node_name(text)
    if text in RESERVED_NAMES:
        reserved = " and ".join((", ".join(RESERVED_NAMES[:-1]), RESERVED_NAMES[-1]))
        raise ValueError(f"{text!r} cannot be a node's name ({reserved} are taken); give the node another name")
    return text


def slots(text: str) -> int:
    """Return the number of workers; "auto": GPUs, or else CPUs."""
    if text == "auto":
        return min(SLOTS_MAX, len(visible_gpus()) or cpus())
    try:
        return whole(1, SLOTS_MAX)(text)
    except ValueError:
        raise ValueError(f"{text[:40]!r} is neither auto nor a whole number of 1 to {SLOTS_MAX}") from None


def gpu(text: str) -> str:
    """Return the type of GPU, checked."""
    try:
        return msgspec.convert(text, Gpu)
    except msgspec.ValidationError:
        raise ValueError(
            f"{text[:40]!r} cannot name a type of GPU; use up to 63 of a-z, 0-9, -, _ and ., a letter or digit first"
        ) from None


def name_list(text: str) -> tuple[str, ...]:
    """Return the names between commas."""
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ValueError(f"{text!r} has an empty name; give NAME or NAME,NAME")
    return names


def days(text: str) -> float:
    """Convert days to seconds."""
    return number(0, 36_500, "days")(text) * 86_400.0


def gib(text: str) -> int:
    """Convert GiB to bytes."""
    return int(number(0, 65_536, "GiB")(text) * 2**30)
