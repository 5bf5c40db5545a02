"""Runs everything about the node's health: the watch over GPUs, health checks, doctor's checks, and ordered faults.

Rules
-----
* Accelerators are watched from when the log knows the node and its workers: an earlier report would mean nothing to
  readers.
* What is seen goes to the core, which says what it means; nothing here ends a worker. An ordered fault alone does harm,
  and the core asks for it.
* A check takes nothing from a worker: only GPUs of slots that no worker has are used.
* What preflight finds at the start is logged and holds up nothing.

How a GPU is judged: accelerators/. What a check does: health/. Whether the node may work: the core. Whether the agent
itself works: `condition` in daemon.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from unicrond.agents.accelerators.diagnosis import GpuFinding
from unicrond.agents.accelerators.driver import GpuDriver
from unicrond.agents.accelerators.watch import AcceleratorWatch
from unicrond.agents.core.state import AcceleratorSaw, RunCheck
from unicrond.agents.health import preflight
from unicrond.agents.health.doctor_checks import Checks
from unicrond.agents.health.health_check import Health
from unicrond.agents.health.node_faults import NodeFaults
from unicrond.agents.protocol.gpus import visible_gpus
from unicrond.agents.shell.options import Options
from unicrond.agents.shell.process_keeper import ProcessKeeper
from unicrond.agents.shell.run_dir import RunDir
from unicrond.agents.shell.shell import Shell
from unicrond.events.queries.node_checks import Finding
from unicrond.events.trust.keys import read_key
from unicrond.events.vocabulary import Fault, WorkerId


class HealthKeeper:
    """Runs the health of one node. `driver`: of its GPUs, None where none is to be watched."""

    def __init__(
        self, shell: Shell, options: Options, run_dir: RunDir, driver: GpuDriver | None, processes: ProcessKeeper
    ) -> None:
        """Watch and check nothing yet."""
        self._shell = shell
        self._driver = driver
        self._accelerators: AcceleratorWatch | None = None
        self._faults = NodeFaults(processes.kill_fork_server, self._report_xid)
        self._health = Health(options.node, options.slots, options.accelerators, shell.feed)
        self._checks = Checks(
            options.node,
            options.address,
            lambda: findings_here(options),
            processes.sum,
            run_dir.sum_socket,
            self._free_gpus,
            runs_as_others=bool(options.users),
        )

    # --- accelerators ----------------------------------------------------------------------------

    def watch_accelerators(self) -> None:
        """Watch the accelerators from now on; repeating this is harmless."""
        if self._driver and not self._accelerators:
            self._accelerators = AcceleratorWatch(self._driver, self._workers_by_slot, self._report)

    async def stop_watching(self) -> None:
        """Stop watching the accelerators."""
        if self._accelerators:
            await self._accelerators.close()

    def _workers_by_slot(self) -> dict[int, WorkerId]:
        workers = self._shell.state.memory.workers
        return {record.slot: worker for worker, record in workers.items() if not record.foreign}

    def _report(self, accelerator: str, worker: str, finding: GpuFinding) -> None:
        self._shell.feed(
            AcceleratorSaw(
                accelerator=accelerator,
                worker=worker,
                kind=finding.kind,
                xid=finding.xid,
                message=finding.message,
                repair_need=finding.needs,
                predicts_failure=finding.predicts_failure,
            )
        )

    # --- checks and faults -----------------------------------------------------------------------

    def check(self, order: RunCheck) -> None:
        """Begin a health check; its outcome is fed to the core."""
        self._health.check(order)

    def begin_check(self, body: bytes, respond: Callable[[bytes], Awaitable[None]]) -> bool:
        """Begin the check for doctor that a request asks for. Return False where it asks for none."""
        return self._checks.begin(body, respond)

    def inject(self, fault: Fault) -> str:
        """Inject the fault into this node; return why that is impossible, or "". Does not return from a kill."""
        return self._faults.inject(fault)

    async def close(self) -> None:
        """Cancel the checks that run."""
        await self._health.close()
        await self._checks.close()

    def _free_gpus(self) -> list[str]:
        """Return those of slots that no worker has."""
        busy_slots = {record.slot for record in self._shell.state.memory.workers.values()}
        return [gpu for slot, gpu in enumerate(visible_gpus()) if slot not in busy_slots]

    def _report_xid(self, code: int, worker: str) -> str:
        if self._accelerators is None:
            return (
                "xid: no accelerator is watched here; start the agent with --accelerators fake to drill on a CPU node"
            )
        return self._accelerators.report_xid(code, worker)


def findings_here(options: Options) -> list[Finding]:
    """Return `node_findings`; none where all is on one machine: there most of it is meant."""
    is_alone = not preflight.is_remote(options.nats) and preflight.is_loopback(options.address)
    return [] if is_alone else node_findings(options)


def node_findings(options: Options) -> list[Finding]:
    """Return what is likely to go wrong on this node. Raise BadKey."""
    flags = preflight.NodeFlags(
        slots=options.slots,
        address=options.address,
        run_dir=options.run_dir,
        logs_dir=options.logs_dir or options.run_dir,
        memory_bytes=options.memory_bytes,
        nats_is_remote=preflight.is_remote(options.nats),
    )
    key = read_key(options.login.key) if options.login.key else None
    return preflight.findings(flags, preflight.look(flags, key))
