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
#: The pure cores, the codec, the contracts on memory and file logs, 25 seeds of the simulation.
ALWAYS: tuple[str, ...] = ()
#: Folders and files that are never run here, however touched: they start clusters, or take long.
SLOW: tuple[str, ...] = ()


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


def touched(names: list[str]) -> list[str]:
    """Return the test files that the changed files touch, in order."""
    modules = {house.module_name(name) for name in names if name.endswith(".py")}
    tests = sorted(path for path in (ROOT / "tests").rglob("test_*.py"))
    return [
        name
        for name, path in ((path.relative_to(ROOT).as_posix(), path) for path in tests)
        if not name.startswith(SLOW) and (name in names or modules & set(imported_modules(path)))
    ]


def main() -> None:
    """Print the test files, a line each."""
    first = touched(changed())
    print("\n".join(dict.fromkeys([*first, *ALWAYS])))


if __name__ == "__main__":
    main()
