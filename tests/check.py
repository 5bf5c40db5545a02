"""List the tests of `make check`: those that a change touches first, then the pure cores.

A test file is touched by a change where it imports a changed module, or has changed itself. What starts a cluster, a
nats-server or a browser, and what takes longer than a few seconds, is left to `make test`.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests import house

ROOT = house.ROOT
#: What a test file names that starts a server, a process, a cluster or a browser, or brings torch.
IMPURE = (
    "nats_server",
    "EmbeddedServer",
    "DevCluster",
    "serving(",
    "running(",
    "subprocess",
    "AgentProcess",
    "import torch",
)
#: What starts clusters, or machines of its own, and is never part of `make check`.
APART = (
    "tests/benchmarks/", "tests/browser/", "tests/containers/", "tests/gpu/", "tests/integration/",
    "tests/megatron_lm/", "tests/simulation/", "tests/slurm/", "tests/soak/", "tests/trainer/",
)  # fmt: skip
#: Files that take more seconds than `make check` can give each time; a change that touches them runs them.
LONG = (
    "tests/agents/test_container.py", "tests/agents/test_fork_server.py", "tests/agents/test_kubernetes_node.py",
    "tests/agents/test_link_probe.py", "tests/agents/test_preflight.py", "tests/agents/test_preloaders.py",
    "tests/events/test_archive.py", "tests/events/test_seats.py", "tests/planning/test_layouts.py",
    "tests/planning/test_placement.py", "tests/planning/test_pools.py", "tests/planning/test_solve_cli.py",
    "tests/planning/test_solver.py", "tests/planning/test_table.py", "tests/planning/test_throughput.py",
    "tests/planning/test_throughput_calibration.py", "tests/planning/test_throughput_cli.py",
    "tests/replay/test_beat_evidence.py", "tests/replay/test_courses.py", "tests/replay/test_difference.py",
    "tests/replay/test_policies.py", "tests/replay/test_program_days.py", "tests/replay/test_replayer.py",
    "tests/replay/test_simulate.py", "tests/replay/test_simulate_cli.py", "tests/replay/test_simulate_traces.py",
    "tests/replay/test_story.py", "tests/replay/test_timeline.py", "tests/replay/test_verify.py",
    "tests/replay/test_what_if.py", "tests/supply/", "tests/test_recovery_figures.py",
    "tests/unicrond/test_collector.py", "tests/unicrond/test_connections.py", "tests/unicrond/test_entry_costs.py",
    "tests/unicrond/test_escalation.py", "tests/unicrond/test_evidence.py",
    "tests/unicrond/test_foresight_of_types.py", "tests/unicrond/test_lives.py", "tests/unicrond/test_noise.py",
    "tests/unicrond/test_owners.py", "tests/unicrond/test_plan_problems.py", "tests/unicrond/test_task_file.py",
)  # fmt: skip
#: Run all the same: memory and file logs held to the contract, the trainer's pure core, the seeds of the simulation.
ALWAYS = (
    "tests/contracts/test_event_log.py",
    "tests/trainer/test_lifecycle.py",
    "tests/simulation/test_seeds.py::test_rules_hold_under_every_seed",
)


def changed() -> list[str]:
    """Return the files that differ from the last commit, and those that git does not track yet."""
    words = (("diff", "--name-only", "HEAD"), ("ls-files", "--others", "--exclude-standard"))
    listed = [
        subprocess.run(["git", *word], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
        for word in words
    ]
    return [name for names in listed for name in names]


def imported_modules(path: Path) -> Iterator[str]:
    """Yield the dotted names that a test file imports, and their parents."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_files() -> dict[str, Path]:
    """Return every test file by its path from the root."""
    return {path.relative_to(ROOT).as_posix(): path for path in sorted((ROOT / "tests").rglob("test_*.py"))}


def touched(names: list[str]) -> list[str]:
    """Return the test files that the changed files touch, but what is apart."""
    modules = {house.module_name(name) for name in names if name.endswith(".py")}
    return [
        name
        for name, path in test_files().items()
        if not name.startswith(APART) and (name in names or modules & set(imported_modules(path)))
    ]


def pure() -> list[str]:
    """Return the test files that start nothing and are quick."""
    return [
        name
        for name, path in test_files().items()
        if not (name.startswith((*APART, *LONG)) or any(mark in path.read_text() for mark in IMPURE))
    ]


def main() -> None:
    """Print the test files, a line each."""
    print("\n".join(dict.fromkeys([*touched(changed()), *ALWAYS, *pure()])))


if __name__ == "__main__":
    main()
