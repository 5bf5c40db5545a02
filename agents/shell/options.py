"""The settings that a person gives one agent; cli.py reads them from flags and variables.

Rules
-----
* It is a value: nothing here looks at the machine, opens a file or has a default that depends on the node.
* Which flags there are, and what may stand in them, is in cli.py; what a choice means, in the keeper that follows it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from unicrond.agents.accelerators.driver import Choice
from unicrond.agents.fork_server.limits import Limit
from unicrond.agents.kubernetes.node_object import NodeObject
from unicrond.agents.protocol.messages import Identity
from unicrond.events.nats.connection import Login
from unicrond.events.vocabulary import Gpu, Name
from unicrond.events.vocabulary.field_types import NameOrNone


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The settings of one agent (cli.py). `fork_server_arguments`: further flags of unicrond.agents.fork_server.

    `grace_s`: from SIGTERM to the end, unless `hand_over`: then SIGTERM leaves the workers to the next agent.
    `memory_bytes`: for states of training; None: a quarter of what may be used (host.py), 0: none. `accelerators`: the
    source of their health. `gpu_type`: "": as the driver has it. `domain`: what fails as one with the node; "": not
    told. `logs_dir`: of workers; None: in the run directory. `shows_output`: on stdout too (output_mirror.py).
    `logs_max_age_s`, `logs_max_bytes`: None: see output_pruning.py. `states_in_clear`: between nodes, though the node's
    key carries a certificate. `users`: that tasks may run as (task_users.py). `limits`: of each worker. `cgroup`: where
    workers get cgroups of their own; None: this process's. `pass_env`: further variables that tasks of `users` may see.
    `only_checks`: join nothing (preflight.py). `supervise`: keep an agent in a process of its own
    (events/host/init_process.py). `new_log`: begin on whatever log there is (event_log_guard.py). `kubernetes`: the
    machine's Node object, None: there is none (kubernetes/).
    """

    nats: tuple[str, ...]
    node: Name
    slots: int
    address: str = "127.0.0.1"
    run_dir: Path
    heartbeat_s: float = 1.0
    lease_s: float = 60.0
    grace_s: float = 25.0
    hand_over: bool = False
    login: Login = field(default_factory=Login)
    memory_bytes: int | None = None
    logs_dir: Path | None = None
    shows_output: bool = False
    logs_max_age_s: float | None = None
    logs_max_bytes: int | None = None
    accelerators: Choice = "auto"
    gpu_type: Gpu = ""
    domain: NameOrNone = ""
    states_in_clear: bool = False
    users: tuple[Identity, ...] = ()
    limits: tuple[Limit, ...] = ()
    cgroup: Path | None = None
    pass_env: tuple[str, ...] = ()
    only_checks: bool = False
    supervise: bool = False
    new_log: bool = False
    kubernetes: NodeObject | None = None
    fork_server_arguments: tuple[str, ...] = ()
