"""What a node is made of, one value per subject. Frozen; made by the fold alone; `state.Node` holds one of each.

| value | what it holds | changed by |
|---|---|---|
| `AgentIdentity` | which agent runs there, and what it reads | folding/nodes.py, commands.py |
| `Cordon` | that it gets no new workers, or is emptied, and who wants so | nodes/drains.py |
| `Isolation` | that it is out of service (SEV1), and its way back | nodes/isolation.py |
| `NodeHealth` | what speaks against the machine | folding/nodes.py, accelerators.py |
| `NodeDeparture` | that it leaves, or is removed | folding/nodes.py |
| `Stray` | a process there that belongs to no task | folding/strays.py |
| `Window` | a maintenance window; in the state, beside the nodes | nodes/drains.py |
| `NodeLogin` | of an enrolled node, with which key it logs in; in the state, beside the nodes | folding/nodes.py |

In bytes and in JSON a node is flat (state_bytes.py); `name=` is a field's key there, where it has another.
"""

from __future__ import annotations

import msgspec

from unicrond.events.vocabulary import RepairNeed
from unicrond.events.vocabulary.field_defaults import always


class AgentIdentity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`boot`: of the agent that joined last; what an earlier one was to start is void. `schema`: what it reads
    (events/wire/schemas.py); `unreadable_commands`: commands that it could not, since it joined.
    """

    boot: int = msgspec.field(name="agent_boot")
    version: str = always("")
    schema: int = 1
    unreadable_commands: int = 0


class Cordon(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`active`: people want no new workers on it; `draining`: nor those that it has. `reason`: why.

    `until_return`: that ends when an agent comes back without workers. `empty_by_us`: when the node is to be empty, 0:
    at no time; `overdue`: that time is over. `window`: the maintenance window that wants it so, "" where a person does.
    """

    active: bool = always(False, name="cordoned")
    draining: bool = always(False)
    reason: str = always("", name="cordon_reason")
    until_return: bool = False
    empty_by_us: int = 0
    overdue: bool = False
    window: str = ""


class Probation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an isolated node has been through (isolation.py). `cause`: "hardware", "strikes" (workers ended there); "":
    it is over after a time. `attempts`: checks and repairs that failed, or had no end.

    `command_id`: of the check under way. `repaired`: the repair command has done its work. `pardon`: why a person wants
    it back. `last`, `last_us`: the last outcome, in words, and when.
    """

    cause: str = ""
    attempts: int = 0
    command_id: str = ""
    check_passed: bool = False
    repaired: bool = False
    pardon: str = ""
    last: str = ""
    last_us: int = 0


class Isolation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`active`: the node gets no workers (SEV1), until it is readmitted. `over`: it has rested for its time. `count`:
    how often it has been isolated. `probation`: what it must pass; None: only the time.
    """

    active: bool = always(False, name="isolated")
    over: bool = always(False, name="isolation_over")
    count: int = always(0, name="isolations")
    probation: Probation | None = msgspec.field(default=None, name="isolation")


class Suspicion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the node was isolated for without proof, so often: workers of `tasks` ended there, and not elsewhere."""

    count: int
    since_us: int
    cause: str
    tasks: tuple[str, ...] = ()


class NodeHealth(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`returns_us`: when it came back from the lost, since it was last isolated; the newest RETURNS_MAX.
    `is_loss_excused`: its loss says nothing of it, being ordered or the head's own; its next return is none of these.
    `repair_need`: what its hardware needs, by its driver's word. `failure_forecast`: why its failure is expected
    (drains.py). `suspicion`: what it was isolated for, kept when it returns (isolation.py).
    """

    returns_us: tuple[int, ...] = always(())
    is_loss_excused: bool = False
    repair_need: RepairNeed = ""
    failure_forecast: str = ""
    suspicion: Suspicion | None = None


class NodeDeparture(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`announced`: its agent has announced its end; what ends there from then on is no failure. `ends_us`: when that is
    over, 0: no end is. `left_us`: when it left, 0: it has not. `removal`: why it is to be forgotten once it is away
    (node_removal.py); `leave_ordered`: its agent was commanded to leave for that.
    """

    announced: bool = msgspec.field(default=False, name="leaving")
    left_us: int = 0
    removal: str = msgspec.field(default="", name="forgetting")
    leave_ordered: bool = False
    ends_us: int = 0


class Stray(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A process on the node that no command of the log has started, or that its task has forgotten: it is to end.

    `command_id`: of the order to end; "": none was given yet.
    """

    task: str
    worker: str
    pid: int
    command_id: str = ""


class PreviousKey(msgspec.Struct, frozen=True, array_like=True):
    """Name a key that a node had before, and until when it still holds."""

    key: str
    until_us: int


class NodeLogin(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Name the key with which a node's agent logs in. `is_used`: the agent has joined since. `expires_us`: when an
    unused key ends; 0: never. `previous`: keys that hold beside it while the node gets the new one."""

    key: str
    expires_us: int = 0
    is_used: bool = False
    previous: tuple[PreviousKey, ...] = ()

    def has_key(self, key: str) -> bool:
        """Return whether the key is the login's, or one that it had before and that may still hold."""
        return key == self.key or any(previous.key == key for previous in self.previous)

    def keys(self, now_us: int) -> tuple[str, ...]:
        """Return the keys that hold at this time."""
        return (self.key, *(key.key for key in self.previous if key.until_us > now_us))


class Window(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A maintenance window (drains.py). `near`: it is time to empty its nodes."""

    nodes: tuple[str, ...]
    from_us: int
    until_us: int
    reason: str
    near: bool = False
