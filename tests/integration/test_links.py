"""Links that are broken from outside, between real agents and workers on hosts of their own (links.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integration.links import CASES, Found
from tests.integration.namespaces import run_case, succeeds

#: Ends a connection as link_breaker.py does; fails where the kernel cannot.
_PROBE = """
import socket, subprocess
listener = socket.create_server(("127.0.0.1", 0))
port = str(listener.getsockname()[1])
with socket.create_connection(listener.getsockname()) as connection, listener.accept()[0]:
    subprocess.run(["ss", "-K", "-t", "dport", "=", port], check=True, capture_output=True)
    connection.settimeout(0.1)
    try:
        connection.recv(1)
    except ConnectionError:
        raise SystemExit(0)
    raise SystemExit(1)
"""
#: Run in the suite; `make matrix` runs all, and the first ten times.
IN_SUITE = "one, the innocent tell first"
TIMES = 10


def can_end_connections() -> bool:
    return succeeds(["sh", "-c", 'ip link set lo up && exec "$0" -c "$1"', sys.executable, _PROBE])


pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(not can_end_connections(), reason="the kernel forbids network namespaces, or ss -K, here"),
]


def run(case: str, directory: Path) -> Found:
    return run_case("tests.integration.links", case, directory, Found)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == IN_SUITE else [pytest.mark.matrix]) for case in CASES]
)
def test_bad_links_isolate_only_their_nodes(case: str, tmp_path: Path) -> None:
    found = run(case, tmp_path)
    sides = [sorted(side) for side in (CASES[case].isolated, CASES[case].other_side) if side]
    assert sorted(found.isolated) in sides, found
    assert not found.failed and found.iterations > 0, "it makes steps all the while"


@pytest.mark.matrix
@pytest.mark.timeout(4000)
def test_repeated_runs_isolate_same_bad_node(tmp_path: Path) -> None:
    isolated = []
    for number in range(TIMES):
        directory = tmp_path / str(number)
        directory.mkdir()
        isolated.append(run("one", directory).isolated)
    assert isolated == [["n2"]] * TIMES
