"""The habits that ruff does not check: functions of at most 60 lines, files of at most 450, and few exceptions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

FUNCTION_LINES_MAX = 60
FILE_LINES_MAX = 450

#: File, or "file:function", and why it may be longer.
EXCEPTIONS = {
    "replay/simulation/checks/invariants.py": "all rules at one place: a table, and one small function for each",
    "agents/shell/daemon.py": "the one holder of sockets, clocks and signals, behind all ports of shell.py",
    "unicrond/core/planning/kernel_numba.py:useful": "one loop: numba compiles it as one, calls in it cost time",
    "unicrond/core/planning/kernel_numba.py:answer": "one loop: numba compiles it as one, calls in it cost time",
}

_ROOT = Path(__file__).parent.parent


def _too_long() -> Iterator[tuple[str, int]]:
    """Each file and function over its limit, with its lines."""
    for package in ("events", "unicrond", "agents", "replay"):
        for path in sorted((_ROOT / package).rglob("*.py")):
            name, text = path.relative_to(_ROOT).as_posix(), path.read_text()
            if len(text.splitlines()) > FILE_LINES_MAX:
                yield name, len(text.splitlines())
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    lines = (node.end_lineno or 0) - node.lineno + 1
                    if lines > FUNCTION_LINES_MAX:
                        yield f"{name}:{node.name}", lines


def test_functions_and_files_are_short() -> None:
    long = {name: lines for name, lines in _too_long() if name not in EXCEPTIONS}
    assert not long, "split these, or give a reason in EXCEPTIONS"


def test_every_exception_is_still_needed() -> None:
    assert set(EXCEPTIONS) <= {name for name, _ in _too_long()}
