"""The locks, constraints.txt, pyproject.toml and what is installed here agree."""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
import tomllib
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.integration.installation import run
from tests.supply import lock, sbom
from tests.supply.lock import CONSTRAINTS, EXTRAS, LOCKS, ROOT, entries, hashes_of, requirement_of
from unicrond.events.nats.server_program import TESTED

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAMES = sorted(path.stem for path in LOCKS.glob("*.txt"))


def _versions(name: str) -> dict[str, str]:
    """Return the version of each package of a lock; AssertionError where one is not pinned."""
    versions = {}
    for package, block in entries((LOCKS / f"{name}.txt").read_text()).items():
        [specifier] = Requirement(requirement_of(block)).specifier
        assert specifier.operator == "==", block
        versions[package] = specifier.version
    return versions


@pytest.mark.parametrize("name", NAMES)
def test_lock_has_a_hash_of_each_package(name: str) -> None:
    text = (LOCKS / f"{name}.txt").read_text()
    blocks = entries(text)
    assert blocks and all(hashes_of(block) for block in blocks.values())
    assert sum(text.count(f"\n{line}") for line in ("-", "git+", "http:", "https:")) == 0, (
        "an option, or a package from elsewhere"
    )
    assert {
        canonicalize_name(line.partition("==")[0]) for line in text.splitlines() if re.match(r"\w.*==", line)
    } == set(blocks)


def test_locks_have_the_versions_of_constraints() -> None:
    pins = dict(line.split("==") for line in CONSTRAINTS.read_text().splitlines())
    constraints = {canonicalize_name(name): pin for name, pin in pins.items()}
    locked = {name: pin for part in (*EXTRAS, "build") for name, pin in _versions(part).items()}
    assert locked == constraints


@pytest.mark.parametrize("name", sorted(EXTRAS))
def test_lock_satisfies_pyproject(name: str) -> None:
    lines = [*PROJECT["dependencies"], *_needs(EXTRAS[name])]
    beside = _versions("node") if name == "cuda" else {}
    versions = beside | _versions(name)
    for requirement in map(Requirement, lines):
        pin = versions.get(canonicalize_name(requirement.name))
        assert pin is not None and requirement.specifier.contains(pin), f"{requirement}: {name}.txt has {pin}"


def _needs(extras: tuple[str, ...]) -> list[str]:
    """Return what extras name, those of unicrond's own followed."""
    lines = []
    for text in (line for extra in extras for line in PROJECT["optional-dependencies"][extra]):
        requirement = Requirement(text)
        lines += _needs(tuple(requirement.extras)) if requirement.name == "unicrond" else [text]
    return lines


def test_environment_has_what_is_locked_and_no_more() -> None:
    site = [path for path in sys.path if path.endswith("site-packages")]  # setuptools adds what it bundles
    installed = distributions(path=site)
    there = {canonicalize_name(str(each.metadata["Name"])): each.version.partition("+")[0] for each in installed}
    locked = _versions("all") | _versions("cuda")
    assert {name: there.get(name) for name in _versions("all")} == _versions("all")
    assert {name: pin for name, pin in there.items() if locked.get(name) != pin}.keys() <= {"unicrond", "pip"}


def test_lock_has_both_builds_of_torch() -> None:
    cpu = hashes_of(entries((LOCKS / "torch-cpu.txt").read_text())["torch"])
    for name in ("node", "all", "peers"):
        digests = hashes_of(entries((LOCKS / f"{name}.txt").read_text())["torch"])
        assert cpu < digests
    assert not [name for name in _versions("node") if name.startswith(("nvidia-", "cuda-", "triton"))]


def test_lock_refuses_cpu_build_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch-cpu.txt").write_text(f"torch==2.12.0+cpu --hash=sha256:{'a' * 64}\n")
    monkeypatch.setattr(lock, "LOCKS", tmp_path)
    with pytest.raises(SystemExit, match=r"has torch==2\.12\.0, and torch==2\.13\.0 is locked"):
        lock.with_cpu_build({"torch": f"torch==2.13.0 --hash=sha256:{'b' * 64}"})


def test_installation_refuses_file_of_another_hash(tmp_path: Path) -> None:
    """With a wheel that somebody has changed on its way: deploy/locks/install and pip, without an index."""
    wheel = tmp_path / "wheels" / "six-1.17.0-py2.py3-none-any.whl"
    wheel.parent.mkdir()
    _small_wheel(wheel)
    locks = tmp_path / "locks"
    locks.mkdir()
    shutil.copy2(LOCKS / "install", locks)
    (locks / "build.txt").write_text("")
    env = tmp_path / "env" / "bin"
    env.mkdir(parents=True)
    target = env.parent / "lib"
    (env / "python").symlink_to(sys.executable)
    (env / "pip").write_text(
        f'#!/bin/sh\nexec {sys.executable} -m pip "$@" --no-index --find-links {wheel.parent} --target {target}\n'
    )
    (env / "pip").chmod(0o755)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    for locked, outcome in ((digest, 0), ("0" * 64, 1)):
        (locks / "some.txt").write_text(f"six==1.17.0 --hash=sha256:{locked}\n")
        done = run(locks / "install", env.parent, "some", cwd=tmp_path)
        assert done.returncode == outcome, done.stderr
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in done.stderr
    # A head or an agent whose user may not write there would compile torch anew at each start.
    assert [path.name.partition(".")[0] for path in (target / "__pycache__").iterdir()] == ["six"]


def test_bill_of_materials_has_servers_that_were_tested() -> None:
    assert {
        each["hashes"][0]["content"]: f"{each['version']}, {each['bom-ref'].rpartition('-')[2]}"
        for each in sbom.servers()
    } == TESTED


def _small_wheel(path: Path) -> None:
    information = {"METADATA": "Metadata-Version: 2.1\nName: six\nVersion: 1.17.0\n"}
    information["WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py2-none-any\n"
    information["RECORD"] = ""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("six.py", "")
        for name, text in information.items():
            archive.writestr(f"six-1.17.0.dist-info/{name}", text)
