"""Which kernel computes, and what an import brings along."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from random import Random

import pytest

from tests.planning.clusters import random_problem, random_situation
from unicrond.core.planning import kernel_choice as kernel
from unicrond.core.planning import kernel_numpy
from unicrond.core.planning.solution import Solution
from unicrond.core.planning.solver import solve
from unicrond.core.planning.table import Planner


@pytest.fixture(autouse=True)
def numpy_afterwards() -> Iterator[None]:
    yield
    kernel.use("numpy")


@pytest.fixture(scope="module")
def compiled() -> None:
    """The compiled kernel lies in numba's cache. Compiling takes tens of seconds of a slow core, and a test
    that competes with it for the interpreter's lock would double that: it is done in a process of its own."""
    code = "from unicrond.core.planning import kernel_choice; kernel_choice.warm()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_planner_import_skips_compiler() -> None:
    """The coordinator serves within a second of its start: numba alone would take longer."""
    modules = "unicrond.core.planning.solver, unicrond.core.planning.table, unicrond.core.planning.placement"
    code = f"import sys, {modules}; print([m for m in ('numba', 'llvmlite', 'torch') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_plans_stay_same_during_kernel_warm_up(compiled: None) -> None:
    """Solve on and on while another thread switches kernels: no plan is ever made of both."""
    problems = [random_problem(Random(seed), most_tasks=8, most_workers=32) for seed in range(30)]
    expected = [solve(problem) for problem in problems]
    assert kernel.active() is kernel_numpy
    warming = threading.Thread(target=kernel.warm)
    warming.start()
    found: list[list[Solution]] = []
    while warming.is_alive() or not found:
        found.append([solve(problem) for problem in problems])
        # Without a pause the import, which gives up the interpreter's lock at every file, waits 5 ms for each.
        warming.join(timeout=0.05)
    assert kernel.active() is not kernel_numpy
    found.append([solve(problem) for problem in problems])
    assert all(each == expected for each in found)


def test_rows_of_one_kernel_serve_other(compiled: None) -> None:
    """A table begun in numpy is refreshed compiled: reused rows are the same bits."""
    reused = 0
    for seed in range(60):
        situation = random_situation(Random(seed))
        kernel.use("numpy")
        planner = Planner()
        first = planner.refresh(situation)
        kernel.use("numba")
        second = planner.refresh(situation)
        assert second.effort.rows_computed == 0
        reused += second.effort.rows_reused
        for event in situation.expected():
            assert first.solution(event) == second.solution(event)
    assert reused > 300
