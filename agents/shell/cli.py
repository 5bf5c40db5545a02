"""unicron-agent: the command line of the node agent."""

from __future__ import annotations

import logging
import os
import sys
from argparse import SUPPRESS, Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

from unicrond.agents.accelerators.driver import Choice, NoDriver
from unicrond.agents.fork_server.cgroups import NoCgroup
from unicrond.agents.fork_server.limits import exceeds_hard_limit
from unicrond.agents.fork_server.limits import parse as limit
from unicrond.agents.health import preflight
from unicrond.agents.host.paths import default_run_dir
from unicrond.agents.host.prctl import CAP_SYS_RESOURCE, capabilities
from unicrond.agents.host.task_users import BadUser, identities
from unicrond.agents.kubernetes.node_object import CordonMeans, NodeObject
from unicrond.agents.protocol.messages import Identity
from unicrond.agents.shell import flag_values as value
from unicrond.agents.shell import pod_login, probe
from unicrond.agents.shell.daemon import installed_version, run_agent
from unicrond.agents.shell.health_keeper import node_findings
from unicrond.agents.shell.options import Options
from unicrond.agents.shell.run_dir import BadRunDir, RunDir
from unicrond.events.cli import command_line
from unicrond.events.cli import environment_flags as variables
from unicrond.events.cli.command_line import (
    Flag,
    Parser,
    SettableParser,
    UsageError,
    add,
    login_of,
    number,
    option,
    repeated,
    switch,
)
from unicrond.events.cli.exit_codes import (
    DONE,
    FORGOTTEN,
    INTERRUPTED,
    SHUT_OUT,
    SUPERSEDED,
    TERMINATED,
    USAGE,
    exit_codes,
)
from unicrond.events.cli.shared_flags import add_login, shared
from unicrond.events.host import daemon_log as log_lines
from unicrond.events.host import optional_dependencies as extras
from unicrond.events.host.init_process import InitProcess, fork
from unicrond.events.host.kubernetes_account import ACCOUNT_DIR, in_cluster_url
from unicrond.events.trust.keys import read_key
from unicrond.events.trust.logins import agent_login

#: The most slots of one node.

#: --supervise: after this many restarts within this time it gives up, so that the container is made anew.
_RESTARTS, _RESTARTS_WITHIN_S = 10, 600.0
#: Exit codes after which it does not start the agent again: ended on request, bad usage, a newer agent runs or may run.
_NOT_AGAIN = (DONE, USAGE, SUPERSEDED, SHUT_OUT, INTERRUPTED, TERMINATED)

_EXAMPLE = f"""example:
  unicron-agent --nats nats://head:4222 --key /etc/unicron.key \\
      --node gpu07 --slots 8 --address 10.0.0.7
  The same line with --check looks at the node before it joins.
  unicron-agent --probe ready --node gpu07     exit code 0 once it has joined; for Kubernetes and scripts

SIGTERM drains the node: its workers leave at the end of an iteration, then the node leaves the cluster, all within
--grace-s. With --hand-over SIGTERM ends the agent alone: workers go on and are adopted by the next agent of the same
run directory (under systemd, set KillMode=process). SIGINT ends the workers at once, and the node leaves.

{exit_codes(TERMINATED, SUPERSEDED, FORGOTTEN, SHUT_OUT)}"""


def parser() -> Parser:
    """Build the parser of `unicron-agent` with all its flags."""
    agent_parser = SettableParser(
        prog="unicron-agent",
        description="The agent of one node: starts, watches and adopts the training processes of a unicron cluster.",
        epilog=_EXAMPLE,
        version=installed_version(),
    )
    add(
        agent_parser,
        shared("--nats", required=True),
        shared("--node", "unique in the cluster; dots become -", type=value.node_name, required=True),
        shared(
            "--slots",
            "one per GPU; auto: as many as visible GPUs, or without any as CPUs that may be used",
            metavar="N|auto",
            type=value.slots,
            required=True,
        ),
        shared("--address", "where other nodes reach it (%(default)s)", default="127.0.0.1"),
        option("--run-dir", "DIR", "sockets, logs, memory ($XDG_RUNTIME_DIR/unicron/NAME)", type=Path),
        option(
            "--heartbeat-s", "S", "time between heartbeats (%(default)s)", type=number(0.05, 60, "seconds"), default=1.0
        ),
        *_ends(),
        option(
            "--memory-gib",
            "GIB",
            "memory for training states, kept and copied between nodes; 0: none (a quarter of the host's, or of the "
            "container's limit)",
            type=value.gib,
        ),
        *_logs(),
        option(
            "--accelerators",
            None,
            "source of the GPUs' health: nvml, fake (only ordered XIDs), none (auto: nvml where it works)",
            choices=get_args(Choice),
            default="auto",
        ),
        shared("--gpu-type", "the node's (default: as NVML has it)", type=value.gpu),
        option(
            "--domain",
            "NAME",
            "what fails as one with the node: its rack, its switch (none)",
            type=command_line.node_name,
        ),
        switch("--states-in-clear", "exchange training states between nodes in clear; the same on all nodes"),
        *_separation(),
        *_kubernetes(),
        *_looking(),
        # For tests and experiments: another --preload, --worker or --store for the fork server.
        option("--fork-server", "FLAG=VALUE", SUPPRESS, action="append", default=[]),
    )
    add_login(agent_parser)
    return agent_parser


def _ends() -> tuple[Flag, ...]:
    """Return the flags for what becomes of workers when the agent ends."""
    return (
        option(
            "--lease-s",
            "S",
            "workers end themselves after this long without an agent (%(default)s)",
            type=number(1, 3600, "seconds"),
            default=60.0,
        ),
        option(
            "--grace-s",
            "S",
            "drain for at most so long after SIGTERM; keep it below the supervisor's kill timeout (%(default)s)",
            type=number(1, 86_400, "seconds"),
            default=25.0,
        ),
        switch("--hand-over", "leave the workers to the next agent here after SIGTERM, for at most --lease-s"),
    )


def _logs() -> tuple[Flag, ...]:
    """Return the flags for what becomes of workers' output."""
    return (
        option(
            "--logs-dir",
            "DIR",
            "directory of workers' logs; on a disk, they survive a reboot (RUN_DIR/logs)",
            type=Path,
        ),
        option(
            "--worker-output",
            "WHERE",
            "stdout: workers' output on this agent's standard output too, each line behind the worker's name; the log "
            "files stay (%(default)s)",
            choices=("files", "stdout"),
            default="files",
        ),
        option("--logs-days", "DAYS", "how long to keep logs of workers that have ended (14)", type=value.days),
        option(
            "--logs-gib",
            "GIB",
            "limit of all workers' logs; the oldest of ended workers go (4, or a tenth of a smaller volume)",
            type=value.gib,
        ),
    )


def _looking() -> tuple[Flag, ...]:
    """Return the flags that look at something instead of starting an agent."""
    return (
        option(
            "--probe",
            "WHAT",
            "ask the running agent of --node or --run-dir, and end: live (it answers) or ready (joined, fork server "
            "serves, NATS lets it in)",
            choices=probe.KINDS,
        ),
        switch(
            "--supervise",
            "in a container: be its first process, start the agent again where it dies (workers live on), reap, pass "
            "signals on",
        ),
        shared("--new-log", "else an agent with workers waits for a person"),
        shared("--check", "look at this node and at NATS, and tell what is likely to go wrong"),
    )


def _kubernetes() -> tuple[Flag, ...]:
    """Return the flags for the machine's Node object of Kubernetes."""
    return (
        option(
            "--kubernetes-node",
            "NAME",
            "this machine's Node object: cordon, drain taints and NotReady become this cluster's cordon and drain, an "
            "isolation becomes a taint and a condition (docs/operate/kubernetes.md)",
        ),
        option(
            "--kubernetes-cordon",
            "WHAT",
            "what `kubectl cordon` and `kubectl drain` of the machine mean here: cordon or drain (%(default)s)",
            choices=get_args(CordonMeans),
            default="cordon",
        ),
        option(
            "--pod-login",
            "URL",
            "in an init container: have this head's API enroll the pod's node, write its key to --key, and end",
        ),
        option(
            "--pod-token", "FILE", "the token for --pod-login: one of the pod's own, for audience unicrond", type=Path
        ),
        option("--kubernetes-url", "URL", "the API server (that of the pod's cluster)"),
        option(
            "--kubernetes-account",
            "DIR",
            "directory with the service account's token and ca.crt (%(default)s)",
            type=Path,
            default=ACCOUNT_DIR,
        ),
    )


def _separation() -> tuple[Flag, ...]:
    """Return the flags for the users that tasks run as, and for the limits of their workers."""
    return (
        option(
            "--run-as",
            "USER[,USER]",
            "users that tasks may run as, the first where a task names none (this agent's own user)",
            type=value.name_list,
            default=(),
        ),
        repeated(
            "--worker-limit",
            "NAME=VALUE",
            "limit each worker under --run-as: nofile=65536, memory.max=64G",
            type=limit,
        ),
        option("--cgroup", "DIR", "cgroup (v2) for the workers' own under --run-as (the agent's)", type=Path),
        option(
            "--pass-env",
            "NAME[,NAME]",
            "variables of the agent that tasks may see under --run-as, beside PATH, LC_*, CUDA_*, NCCL_* and the like",
            type=value.name_list,
            default=(),
        ),
    )


def parse(argv: Sequence[str] | None = None) -> Options:
    """Return the options of a command line; print one line on stderr and exit with code 2 where it is not valid."""
    agent_parser = parser()
    arguments = agent_parser.parse_args(argv)
    try:
        variables.check(agent_parser.prog, variables.program_variables(agent_parser), os.environ)
    except variables.BadVariable as error:
        agent_parser.error(str(error))
    run_dir = arguments.run_dir or default_run_dir(arguments.node)
    try:
        login = replace(login_of(arguments), is_for_locked_servers=bool(arguments.run_as))
        if login.key and (name := read_key(login.key).login) != agent_login(arguments.node):
            raise UsageError(f"--key: {login.key} is the key of {name}, not of node {arguments.node}")
        RunDir(run_dir)
        users = _users(arguments)
        if arguments.kubernetes_node and not (arguments.kubernetes_url or in_cluster_url()):
            raise UsageError(
                "--kubernetes-node: KUBERNETES_SERVICE_HOST is not set, as it is in a pod; give --kubernetes-url"
            )
    except UsageError as error:
        agent_parser.error(str(error))
    except BadRunDir as error:
        agent_parser.error(f"--{error}")
    return Options(
        nats=arguments.nats,
        node=arguments.node,
        slots=arguments.slots,
        address=arguments.address,
        run_dir=run_dir,
        heartbeat_s=arguments.heartbeat_s,
        lease_s=arguments.lease_s,
        grace_s=arguments.grace_s,
        hand_over=arguments.hand_over,
        login=login,
        memory_bytes=arguments.memory_gib,
        logs_dir=arguments.logs_dir,
        shows_output=arguments.worker_output == "stdout",
        logs_max_age_s=arguments.logs_days,
        logs_max_bytes=arguments.logs_gib,
        accelerators=arguments.accelerators,
        gpu_type=arguments.gpu_type or "",
        domain=arguments.domain or "",
        states_in_clear=arguments.states_in_clear,
        users=users,
        limits=tuple(arguments.worker_limit),
        cgroup=arguments.cgroup,
        pass_env=arguments.pass_env,
        only_checks=arguments.check,
        supervise=arguments.supervise,
        new_log=arguments.new_log,
        kubernetes=_node_object(arguments),
        fork_server_arguments=tuple(arguments.fork_server),
    )


def _node_object(arguments: Namespace) -> NodeObject | None:
    if not arguments.kubernetes_node:
        return None
    return NodeObject(
        url=(arguments.kubernetes_url or in_cluster_url()).rstrip("/"),
        name=arguments.kubernetes_node,
        account=arguments.kubernetes_account,
        cordon_means=arguments.kubernetes_cordon,
    )


def _check(options: Options) -> int:
    """Run the preflight, print its findings and return the exit code."""
    import asyncio

    for noisy in ("unicrond.events", "asyncio"):  # NATS's own messages are among the findings
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    findings = [
        *node_findings(options),
        *asyncio.run(preflight.nats_findings(options.nats, options.login, installed_version())),
    ]
    for finding in findings:
        print(finding)
    print(
        f"{len(findings)} finding{'s' * (len(findings) != 1)}"
        if findings
        else f"Nothing found: {options.node} may join."
    )
    return 1 if findings else 0


def _users(arguments: Namespace) -> tuple[Identity, ...]:
    """Return the users of --run-as. Raise UsageError where the node cannot do what the flags ask for."""
    dependent = [name for name in ("worker_limit", "cgroup", "pass_env") if getattr(arguments, name)]
    if dependent and not arguments.run_as:
        raise UsageError(
            f"--{dependent[0].replace('_', '-')}: is for tasks that run as users of their own; give --run-as"
        )
    for bound in arguments.worker_limit:
        if bound.resource >= 0 and exceeds_hard_limit(bound) and CAP_SYS_RESOURCE not in capabilities():
            raise UsageError(
                f"--worker-limit: {bound} is more than the agent itself has; raise that (Limit... in its unit)"
            )
    try:
        return identities(arguments.run_as)
    except BadUser as error:
        raise UsageError(f"--run-as: {error}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the agent from the command line and return the exit code."""
    return command_line.run("unicron-agent", lambda: _run(argv))


def _supervise(options: Options) -> int:
    """Keep an agent running in a process of its own; return the exit code of the last one. Each is a fork of this
    process, which has imported and parsed all that it needs."""
    start = partial(fork, partial(command_line.run, "unicron-agent", partial(_serve, options)))
    return InitProcess(start, restarts=_RESTARTS, within_s=_RESTARTS_WITHIN_S, last=_NOT_AGAIN).run()


def _run(argv: Sequence[str] | None) -> int:
    if probe.is_asked(sys.argv[1:] if argv is None else argv):
        return probe.main(argv)
    if pod_login.is_asked(sys.argv[1:] if argv is None else argv):
        return pod_login.main(argv)
    options = parse(argv)
    extras.require("unicron-agent", "node")
    if options.only_checks:
        return _check(options)
    return _supervise(options) if options.supervise else _serve(options)


def _serve(options: Options) -> int:
    """Run the agent until it ends; return its exit code. Raise UsageError."""
    import uvloop

    from unicrond.events.trust.certificates import BadCertificate

    log_lines.set_up(logging.INFO, f"%(asctime)s %(levelname)s {options.node} %(message)s", sys.stderr)
    try:
        return uvloop.run(run_agent(options))
    except BadRunDir as error:
        raise UsageError(f"--{error}") from None
    except BadCertificate as error:
        raise UsageError(f"--key: {error}") from None
    except NoDriver as error:
        raise UsageError(f"--accelerators: {error}") from None
    except NoCgroup as error:
        raise UsageError(f"--cgroup: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
