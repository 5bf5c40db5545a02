"""The packages as others install them: sdists, wheels of them, environments that know nothing of this checkout.

`make packages` runs it: both projects' sdist and wheel, into dist/.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
#: The projects of this tree, by the folder of their pyproject.toml.
UNICROND, LABORATORY = ".", "replay"
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


def build(directory: Path, project: str = UNICROND) -> tuple[Path, Path]:
    """Return (sdist, wheel) of one project; the wheel is made from the sdist. No network, nothing is written into this
    checkout."""
    built = directory / f"built-{Path(project).name}"
    built.mkdir(parents=True)
    sdist = built / _hook("build_sdist", built, _copy(built / "source") / project)
    offline = ("--no-build-isolation", "--no-deps", "--no-index", "--quiet")
    must(sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", built, sdist, cwd=built)
    return sdist, next(built.glob("*.whl"))


def build_from_tree(directory: Path, project: str = UNICROND) -> Path:
    """Return the wheel of one project made from the tree itself, as `pip install .` does it."""
    built = directory / f"tree-{Path(project).name}"
    built.mkdir(parents=True)
    return built / _hook("build_wheel", built, _copy(built / "source") / project)


def _copy(directory: Path) -> Path:
    """Copy the project's own files, links as links; return the directory."""
    for name in source_files():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, directory / name, follow_symlinks=False)
    return directory


def _hook(name: str, target: Path, project: Path) -> str:
    """Have setuptools build something into `target`; return the name of the file."""
    program = f"from setuptools import build_meta; import sys; print(build_meta.{name}(sys.argv[1]))"
    return must(sys.executable, "-c", program, target, cwd=project).splitlines()[-1]


def files_of(archive: Path) -> dict[str, bytes]:
    """Return what a wheel or an sdist holds, by path (in an sdist: below its one folder). No signatures of it."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist() if not name.endswith("/RECORD")}
    with tarfile.open(archive) as sdist:
        return {
            member.name.partition("/")[2]: file.read()
            for member in sdist.getmembers()
            if member.isfile() and (file := sdist.extractfile(member)) is not None
        }


def install(wheel: Path, directory: Path, dependencies: Path) -> Path:
    """Make a fresh environment with the wheel alone, that sees `dependencies` too; return its directory of commands."""
    must(sys.executable, "-m", "venv", "--without-pip", directory, cwd=directory.parent)
    pip(directory / "bin", "install", "--no-deps", "--no-index", wheel)
    site = next((directory / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(f"{dependencies}\n")
    return directory / "bin"


def pip(commands: Path, *words: object) -> None:
    """Run pip for another environment, which has none of its own."""
    must(sys.executable, "-m", "pip", "--python", commands / "python", *words, "--quiet", cwd=commands)


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


def main(target: Path) -> None:
    """Build both projects; replace what is in `target`."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="unicron-packages-") as name:
        for project in (UNICROND, LABORATORY):
            for archive in build(Path(name), project):
                print(shutil.copy2(archive, target))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
