"""The package as others install it: an sdist, the wheel of it, environments that know nothing of this checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
#: Folders of the repository that are packages in `unicrond`, where links stand for them.
LINKED = ("events", "agents", "replay")
#: This environment's packages, where all that the wheel depends on is.
SITE = Path(sysconfig.get_path("purelib"))


def run(*command: object, cwd: Path, **more: object) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, at most four minutes; nothing of this environment's paths reaches it."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=clean,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        **more,  # type: ignore[call-overload]
    )


def must(*command: object, cwd: Path) -> str:
    """Like `run`; AssertionError with all that was said where it fails. The output."""
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return str(done.stdout)


def source_files() -> list[str]:
    """The project's own files, relative to its root; in an unpacked sdist, which no git knows, those of the sdist."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    if listed.returncode == 0:
        return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]
    sources = next(ROOT.glob("*.egg-info")) / "SOURCES.txt"
    return [name for name in sources.read_text().splitlines() if ".egg-info" not in name]


def build(directory: Path) -> tuple[Path, Path]:
    """(sdist, wheel); the wheel is made from the sdist. No network, nothing is written into this checkout."""
    copy = directory / "source"
    for name in source_files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    hook = "from setuptools import build_meta; import sys; print(build_meta.build_sdist(sys.argv[1]))"
    sdist = directory / must(sys.executable, "-c", hook, directory, cwd=copy).splitlines()[-1]
    offline = ("--no-build-isolation", "--no-deps", "--no-index", "--quiet")
    must(sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", directory, sdist, cwd=directory)
    return sdist, next(directory.glob("*.whl"))


def install(wheel: Path, directory: Path, dependencies: Path) -> Path:
    """A fresh environment with the wheel alone, that sees `dependencies` too; its directory of commands."""
    must(sys.executable, "-m", "venv", "--without-pip", directory, cwd=directory.parent)
    python = directory / "bin" / "python"
    must(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel),
        cwd=directory.parent,
    )
    site = next((directory / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(f"{dependencies}\n")
    return directory / "bin"


def shown(requirements: list[str], directory: Path) -> Path:
    """A directory that shows, of this environment's packages, what these requirements bring and nothing else."""
    directory.mkdir()
    wanted, seen = [Requirement(text) for text in requirements], set[tuple[str, str]]()
    while wanted:
        requirement = wanted.pop()
        for extra in ("", *requirement.extras):
            if (requirement.name, extra) in seen:
                continue
            seen.add((requirement.name, extra))
            found = distribution(requirement.name)
            for file in found.files or ():
                top = file.parts[0]
                if top not in ("..", "__pycache__") and not (directory / top).exists():
                    (directory / top).symlink_to(SITE / top)
            needs = [Requirement(text) for text in found.requires or ()]
            wanted += [need for need in needs if need.marker is None or need.marker.evaluate({"extra": extra})]
    return directory


def required(wheel_metadata: str, extra: str = "") -> list[str]:
    """What a wheel's metadata asks for: without extras, or by one of them (its own extras followed)."""
    lines = [line.removeprefix("Requires-Dist: ") for line in wheel_metadata.splitlines() if "Requires-Dist" in line]
    found = []
    for requirement in map(Requirement, lines):
        by_extra = requirement.marker is not None and "extra" in str(requirement.marker)
        if by_extra != bool(extra) or not (requirement.marker is None or requirement.marker.evaluate({"extra": extra})):
            continue
        if canonicalize_name(requirement.name) == "unicrond":
            found += [text for other in sorted(requirement.extras) for text in required(wheel_metadata, other)]
        else:
            requirement.marker = None
            found.append(str(requirement))
    return found
