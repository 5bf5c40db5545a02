"""`unicrond dev`: a whole small cluster on this machine, kept alive by a small supervisor.

Rules
-----
* The parts are the real ones, as processes: one `unicrond run` (with its embedded nats-server), N
  `unicron-agent`. Whatever dies is started again, after a delay that doubles while it keeps dying;
  systemd does the same on a real cluster. (The coordinator keeps the nats-server, agents keep workers.)
* Everything ends with the supervisor: in good order on Ctrl-C, by signal should it be killed itself.
* With keys, each agent has one of its own, as on a real cluster: made and enrolled here, before the agents start.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import logging
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import yaml

from unicrond.core.state.state import ClusterState
from unicrond.ctl.client import ApiError, Client
from unicrond.ctl.streams import follow
from unicrond.events.cli import environment_flags as variables
from unicrond.events.nats import cli_context as nats_cli
from unicrond.events.nats.login import Login
from unicrond.events.trust.keys import load_or_create_key
from unicrond.events.trust.logins import Role, agent_login

log = logging.getLogger("unicrond.local.dev")

_PR_SET_PDEATHSIG = 1
_RESTART_DELAY_S = 0.1
_RESTART_DELAY_MAX_S = 5.0
_STOP_TIMEOUT_S = 20.0
#: Several nodes share a machine and its disk here: while one starts, another's worker may stand still for a second.
HANG_FLOOR_S = "3"


#: An agent's final statuses: it was told to leave for good; a newer agent has its name.
_FINAL = frozenset((0, 4))


class DevError(RuntimeError):
    """The small cluster cannot start; the message is one line that says why."""


class SupervisedProcess:
    """A process, kept running until `rest`, or until it ends with a status that is `final`."""

    def __init__(
        self, name: str, command: list[str], output: Path, env: dict[str, str], final: frozenset[int] = frozenset()
    ) -> None:
        self._final = final
        self.name = name
        self.process: asyncio.subprocess.Process | None = None
        self.command = command
        self.output = output
        self.env = env
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process, and again whenever it ends."""
        await self._spawn()
        self._keeper = asyncio.create_task(self._keep(), name=f"keep {self.name}")

    async def rest(self) -> None:
        """Stop supervising the process; leave it as it is."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    async def stop(self, signum: signal.Signals = signal.SIGINT) -> None:
        """End the process in good order, by SIGKILL after a while."""
        await self.rest()
        process = self.process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signum)
        try:
            await asyncio.wait_for(process.wait(), _STOP_TIMEOUT_S)
        except TimeoutError:
            log.warning("%s did not end within %g s of %s; killing it", self.name, _STOP_TIMEOUT_S, signum.name)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _spawn(self) -> None:
        with self.output.open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.env,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    async def _keep(self) -> None:
        delay_s = _RESTART_DELAY_S
        while True:
            assert self.process is not None
            started = time.monotonic()
            status = await self.process.wait()
            if status in self._final:
                log.info("%s ended with status %d, for good (its output: %s)", self.name, status, self.output)
                return
            if time.monotonic() - started > 10 * _RESTART_DELAY_MAX_S:
                delay_s = _RESTART_DELAY_S
            log.info("%s ended with status %d; starting it again (its output: %s)", self.name, status, self.output)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _RESTART_DELAY_MAX_S)
            await self._spawn()


class DevCluster:
    """The running small cluster. Made by `small_cluster`."""

    def __init__(
        self,
        directory: Path,
        nodes: int,
        slots: int,
        api_port: int,
        heartbeat_s: float = 0.5,
        settings: dict[str, Any] | None = None,
        *,
        keys: bool = False,
        agents_hand_over: bool = True,
    ) -> None:
        """Prepare the cluster's files and processes. `settings`: further fields of the coordinator's configuration.
        `keys`: as `unicrond run` has it by itself; else `auth: off`. `agents_hand_over`: an agent that gets SIGTERM
        leaves its workers to the next one."""
        self.directory = directory
        self.api_port = api_port or free_port()
        self.nats_port = free_port()
        self.url = f"http://127.0.0.1:{self.api_port}"
        self.nats_url = f"nats://127.0.0.1:{self.nats_port}"
        self.node_names = [f"node{number}" for number in range(1, nodes + 1)]
        self.state_dir = directory / "state"
        self._keys = directory / "keys" if keys else None
        inherited = variables.without(os.environ, "unicrond", "unicron-agent")
        env = {"UNICRON_HANG_FLOOR_S": HANG_FLOOR_S} | inherited | {"PYTHONUNBUFFERED": "1"}
        env |= {variables.prefix("unicron-agent") + "HAND_OVER": "yes"} if agents_hand_over else {}
        config = {
            "state_dir": str(self.state_dir),
            "checkpoint_dir": str(directory / "checkpoints"),
            "heartbeat_s": heartbeat_s,
            "nats": {"port": self.nats_port},
            "api": {"port": self.api_port},
            **({} if keys else {"auth": "off"}),
            **(settings or {}),
        }
        self.config_path = directory / "unicron.yaml"
        self.config_path.write_text(yaml.safe_dump(config))
        scripts = Path(sys.executable).parent
        self.coordinator = SupervisedProcess(
            "coordinator",
            [str(scripts / "unicrond"), "run", "--config", str(self.config_path)],
            directory / "coordinator.log",
            env,
        )
        self.agents = {
            name: SupervisedProcess(
                name,
                [
                    *(str(scripts / "unicron-agent"), "--nats", self.nats_url, "--node", name, "--slots", str(slots)),
                    *("--run-dir", str(directory / "run" / name), "--heartbeat-s", str(heartbeat_s)),
                    *(("--accelerators", "fake") if config.get("injection") else ()),
                    *(("--key", str(self._keys / f"{agent_login(name)}.key")) if self._keys else ()),
                ],
                directory / f"{name}.log",
                env,
                _FINAL,
            )
            for name in self.node_names
        }
        self.client = Client(self.url)

    @property
    def nats_command(self) -> str:
        """Return the command line with which NATS's own client reaches the server, as the operator."""
        key = self.state_dir / "keys" / f"{Role.OPERATOR}.key" if self._keys else None
        return nats_cli.command(self.nats_url, Login(key=key))

    async def start(self) -> None:
        """Start everything; return when the coordinator is live and every agent runs."""
        await self.coordinator.start()
        await self._until_live()
        if self._keys:
            await self._enroll(self._keys)
        await asyncio.gather(*(agent.start() for agent in self.agents.values()))

    async def stop(self) -> None:
        """End everything in good order."""
        await asyncio.gather(*(agent.stop() for agent in self.agents.values()))
        await self.coordinator.stop()
        await asyncio.to_thread(self._end_leftovers)

    async def state(self) -> tuple[ClusterState, str]:
        """Return the coordinator's state and its digest. Raises ApiError while it is away."""
        return await asyncio.to_thread(self.client.state)

    async def submit(self, spec: dict[str, Any]) -> None:
        """Submit a task. Raises ApiError."""
        await asyncio.to_thread(self.client.submit, spec)

    def processes_of(self, node: str) -> list[psutil.Process]:
        """Return the agent, fork server, store and workers of a node, parents first."""
        run_dir = str(self.directory / "run" / node)
        processes: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                command = process.cmdline()
                # Ours are an agent's command, or a module of its package; others may name the directory too.
                ours = any(part.endswith("/unicron-agent") or part.startswith("unicrond.agents.") for part in command)
                if ours and run_dir in command:
                    processes[process.pid] = process
                    for child in process.children(recursive=True):
                        processes.setdefault(child.pid, child)
        return list(processes.values())

    async def kill_node(self, node: str) -> None:
        """Send SIGKILL to all of a node's processes at once, and keep it down."""
        await self.agents[node].rest()
        for process in self.processes_of(node):
            with contextlib.suppress(psutil.Error):
                process.kill()

    async def bring_back(self, node: str) -> None:
        """Start the node's agent again."""
        await self.agents[node].start()

    async def _enroll(self, keys: Path) -> None:
        logins = (await self.state())[0].logins
        for node in self.node_names:
            key = load_or_create_key(keys, agent_login(node)).user.key
            if node not in logins or logins[node].key != key:
                await asyncio.to_thread(self.client.enroll, node, key, 0)

    async def _until_live(self, timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            process = self.coordinator.process
            if process is not None and process.returncode is not None:
                raise DevError(f"the coordinator ended at once: {last_line(self.coordinator.output)}")
            with contextlib.suppress(ApiError):
                if (await asyncio.to_thread(self.client.health))["status"] == "live":
                    return
            if time.monotonic() > deadline:
                raise DevError(f"the coordinator is not ready after {timeout_s:g} s; see {self.coordinator.output}")
            await asyncio.sleep(0.05)

    def _end_leftovers(self) -> None:
        """Kill what may be left: fork servers of killed agents, a nats-server of a killed coordinator."""
        leftovers = [process for node in self.node_names for process in self.processes_of(node)]
        nats_config = str(self.state_dir.resolve() / "nats" / "nats-server.conf")
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.name() == "nats-server" and nats_config in process.cmdline():
                    leftovers.append(process)
        for process in leftovers:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(leftovers, timeout=5)


@asynccontextmanager
async def small_cluster(
    directory: Path,
    *,
    nodes: int = 4,
    slots: int = 1,
    api_port: int = 0,
    heartbeat_s: float = 0.5,
    settings: dict[str, Any] | None = None,
    keys: bool = False,
    agents_hand_over: bool = True,
) -> AsyncIterator[DevCluster]:
    """Yield a DevCluster that has started; stop it afterwards."""
    cluster = DevCluster(
        directory, nodes, slots, api_port, heartbeat_s, settings, keys=keys, agents_hand_over=agents_hand_over
    )
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.stop()


@contextlib.contextmanager
def working_directory(arguments: argparse.Namespace) -> Any:
    """Yield the directory that the arguments ask for; a temporary one is removed afterwards."""
    if arguments.dir is not None:
        try:
            arguments.dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DevError(f"--dir: cannot use {arguments.dir}: {error.strerror}; give another one") from None
        yield arguments.dir.absolute()
        return
    directory = Path(tempfile.mkdtemp(prefix="unicron-"))
    try:
        yield directory
    finally:
        if arguments.keep_dir:
            print(f"kept: {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)


#: Ports that `free_port` has returned.
_used_ports: set[int] = set()
_USED_PORTS_MAX = 4_000


def free_port() -> int:
    """Return a TCP port on loopback without a listener at this moment, which this process did not get before. It is
    below those that Linux gives to outgoing connections, of which one could take it at any moment."""
    if len(_used_ports) > _USED_PORTS_MAX:
        _used_ports.clear()
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _used_ports:
                _used_ports.add(port)
                return port


def check_port(port: int) -> None:
    """Check that nobody listens on `port`; 0 means any. Raises DevError."""
    if not port:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise DevError(f"--port: {port} is not free ({error.strerror}); give another one, or 0") from None


def last_line(path: Path) -> str:
    """Return the last line of a log, "" where there is none."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return lines[-1] if lines else ""


def start_small(
    arguments: argparse.Namespace, run: Callable[[argparse.Namespace, Path], Coroutine[Any, Any, int]]
) -> int:
    """Run `run` in the directory that the arguments ask for; return its exit code. An error is printed as one line."""
    import uvloop

    program = f"unicrond {arguments.command}"
    try:
        check_port(arguments.port)
        with working_directory(arguments) as directory:
            return uvloop.run(run(arguments, directory))
    except KeyboardInterrupt:
        return 130
    except DevError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2 if str(error).startswith("--") else 1


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)


def main(arguments: argparse.Namespace) -> int:
    """Run until Ctrl-C."""
    return start_small(arguments, _main)


async def _main(arguments: argparse.Namespace, directory: Path) -> int:
    from unicrond.ctl.live_view import watch

    stop = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    async with small_cluster(
        directory,
        nodes=arguments.nodes,
        slots=arguments.slots,
        api_port=arguments.port,
        settings={"injection": arguments.allow_injection},
        keys=True,
    ) as cluster:
        print(f"API {cluster.url}   NATS {cluster.nats_url}   files {directory}")
        print(f"submit a task:  UNICRON_URL={cluster.url} unicronctl submit examples/big.yaml   (Ctrl-C ends all)")
        print(f"page's token:   {cluster.state_dir / 'operator.token'}")
        print(f"read its log:   unicron-replay timeline --state-dir {cluster.state_dir}")
        print(f"or with nats:   {cluster.nats_command} stream ls")
        await watch(cluster.state, stop, follow(cluster.client))
    return 0
