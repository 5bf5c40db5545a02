"""The settings of an agent that its core uses."""

from __future__ import annotations

import msgspec

from unicrond.agents.protocol.messages import Identity
from unicrond.events.vocabulary import ExitCause, Gpu, MemoryService, Name, TaskSpec
from unicrond.events.vocabulary.field_types import NameOrNone, ObjectStores


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The settings with which an agent starts. Times in seconds."""

    node: Name
    address: str
    slots: int
    version: str
    agent_boot: int
    agent_socket: str
    logs: str
    #: From Quit to SIGTERM, and from SIGTERM to SIGKILL.
    grace_s: float = 5.0
    kill_after_s: float = 2.0
    #: How long a start waits for a slot whose worker is about to end, or for the fork server.
    slot_wait_s: float = 20.0
    fork_server_wait_s: float = 60.0
    #: A start older than this is not carried out: the coordinator has long since planned without this node.
    start_max_age_s: float = 60.0
    #: How long a new agent waits for the Hellos of the workers that it adopts.
    hello_wait_s: float = 2.0
    #: At most one StepCommitted of a task is reported in this time.
    commit_interval_s: float = 1.0
    #: At most one SnapshotStored of a shard is reported in this time: memory is written to much more often.
    held_interval_s: float = 10.0
    #: Where this node's agent receives and serves training states; None: nowhere.
    memory: MemoryService | None = None
    #: What ended the workers that the last agent of this node left alive and that no longer exist (oom_kill_counts.py).
    vanished: ExitCause = "signalled"
    #: The users that tasks may run as, the first where a task names none; empty: all run as the agent's own user.
    users: tuple[Identity, ...] = ()
    #: The type of the node's GPUs; "": unknown.
    gpu: Gpu = ""
    #: Where this agent answers probes of its links (link_probe.py); 0: nowhere.
    probe_port: int = 0
    #: What fails as one with the node, as a rack or a switch; "": not told.
    domain: NameOrNone = ""
    #: Schemes of URLs to which workers can write checkpoints: their packages are here.
    object_stores: ObjectStores = ()

    def user_of(self, spec: TaskSpec) -> Identity | None:
        """Return the user that the task runs as; None means the agent's own user, or (users.refusal) that it may not
        run at all."""
        return next((user for user in self.users if spec.run_as in ("", user.name)), None)
