"""`make lock`: deploy/locks, what each part of a cluster installs, with the hash of every file that the index has.

Rules
-----
* constraints.txt has the versions, pyproject.toml what is needed; a lock adds nothing but hashes and markers.
* A lock is for CPython 3.11 to 3.13 on Linux, x86_64 and aarch64; what others alone need is left out.
* Files that the index got after INDEX_AT are not looked at: the same versions make the same lock, to the byte.
* What torch's build for CUDA brings stands in cuda.txt alone: with a CPU build nobody downloads it.
* torch's build for the CPU, which the index does not have (torch-cpu.txt, kept by hand), counts beside its own.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "deploy" / "locks"
CONSTRAINTS = ROOT / "constraints.txt"
INDEX_AT = "2026-11-26T00:00:00Z"
#: The extras of each lock. `all` is what make installs.
EXTRAS: dict[str, tuple[str, ...]] = {
    "base": (),
    "head": ("head", "otel"),
    "node": ("node", "stacks"),
    "cuda": ("node", "gpu"),
    "all": ("all", "dev"),
    "peers": ("all", "peers"),
}
#: Of packages that no extra names: what builds unicrond, and what makes locks and bills of materials.
REQUIREMENTS: dict[str, tuple[str, ...]] = {"build": ("setuptools>=77",), "tools": ("uv", "cyclonedx-bom", "packaging")}
#: What a lock is for.
MACHINES = [
    {"python_version": version, "python_full_version": f"{version}.0", "platform_machine": machine}
    for version in ("3.11", "3.12", "3.13")
    for machine in ("x86_64", "aarch64")
]
_LINUX = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}
_CPYTHON = {"implementation_name": "cpython", "platform_python_implementation": "CPython"}
_CUDA = re.compile(r"(nvidia|cuda)-.*|triton")
_HEADER = "# Made by `make lock`; {what}\n"


def entries(text: str) -> dict[str, str]:
    """Return each requirement of a requirements file with its hashes, as its lines, by the package's name."""
    blocks = re.findall(r"^[A-Za-z0-9].*(?:(?<=\\)\n.*)*", text, re.MULTILINE)
    return {canonicalize_name(Requirement(requirement_of(block)).name): block for block in blocks}


def requirement_of(block: str) -> str:
    """Return the requirement of an entry, without its hashes and comment."""
    return re.split(r"\s--hash=|\\\n|\s#", block)[0].strip()


def hashes_of(block: str) -> set[str]:
    """Return the hashes of an entry, in hex."""
    return set(re.findall(r"--hash=sha256:([0-9a-f]{64})\b", block))


def is_needed(block: str) -> bool:
    """Say whether one of MACHINES installs this entry."""
    marker = Requirement(requirement_of(block)).marker
    return marker is None or any(marker.evaluate({**_LINUX, **_CPYTHON, **machine}) for machine in MACHINES)


def is_of(lock: str, name: str) -> bool:
    """Say whether a package of the lock's extras belongs in it."""
    is_cuda = _CUDA.fullmatch(name) is not None and name != "nvidia-ml-py"
    return is_cuda or name == "nvidia-ml-py" if lock == "cuda" else not is_cuda


def resolve(source: str, extras: Sequence[str] = (), *, is_constrained: bool = True) -> dict[str, str]:
    """Return what uv finds for requirements ("-" for pyproject.toml). CalledProcessError: uv has said why."""
    words = [Path(sys.executable).with_name("uv"), "pip", "compile", "--quiet", "--system-certs", "--universal"]
    words += ["--generate-hashes", "--no-annotate", "--no-header", "--no-config", "--python-version", "3.11"]
    words += ["--exclude-newer", INDEX_AT]
    words += ["--constraints", CONSTRAINTS] if is_constrained else []
    words += [word for extra in extras for word in ("--extra", extra)]
    words += ["pyproject.toml" if source == "-" else "-"]
    done = subprocess.run(
        words, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, input="" if source == "-" else source
    )
    return {name: block for name, block in entries(done.stdout).items() if is_needed(block)}


def with_cpu_build(found: dict[str, str]) -> dict[str, str]:
    """Return the entries, with the hashes of torch's build for the CPU. Raises SystemExit where that is of another
    version."""
    [(name, build)] = entries((LOCKS / "torch-cpu.txt").read_text()).items()
    if name in found:
        version, locked = requirement_of(build).partition("+")[0], requirement_of(found[name])
        if locked != version:
            raise SystemExit(
                f"torch-cpu.txt: has {version}, and {locked} is locked; give that version's files (pip hash)"
            )
        found[name] += "".join(f" \\\n    --hash=sha256:{digest}" for digest in sorted(hashes_of(build)))
    return found


def write(lock: str, found: dict[str, str], what: str) -> None:
    """Write one lock."""
    lines = [_HEADER.format(what=what), *(f"{found[name]}\n" for name in sorted(found) if is_of(lock, name))]
    (LOCKS / f"{lock}.txt").write_text("".join(lines))
    print(f"deploy/locks/{lock}.txt: {len(lines) - 1} packages")


def main() -> None:
    """Make every lock again."""
    for lock, extras in EXTRAS.items():
        of = f"unicrond[{','.join(extras)}]" if extras else "unicrond"
        beside = " (beside node.txt: what torch's build for CUDA needs)" if lock == "cuda" else ""
        write(lock, with_cpu_build(resolve("-", extras)), f"what {of} needs{beside}.")
    for lock, names in REQUIREMENTS.items():
        found = resolve("\n".join(names), is_constrained=lock == "build")
        write(lock, found, f"{', '.join(names)}, and what they need.")


if __name__ == "__main__":
    main()
