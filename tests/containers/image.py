"""The image: deploy/container/Containerfile, line by line, on a Debian made by debootstrap.

What is not as in `podman build`: the base (Debian's own Python instead of the one of python:...-slim), and packages
from the index. They are big (torch), so this environment's lie below /opt/dependencies, mounted read-only; pip finds
them there and installs what is left, which is ours. There is no network while it is built.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.containers.oci import Box, run_to_its_end
from tests.integration.installation import ROOT, SITE, source_files

CONTAINERFILE = ROOT / "deploy" / "container" / "Containerfile"
DEPENDENCIES = "/opt/dependencies"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: pip looks at what is there, and nowhere else. (Off is said to it by "no".)
_PIP = {"PYTHONPATH": DEPENDENCIES, "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "no", "PIP_FIND_LINKS": ""}
_MIRROR = "http://deb.debian.org/debian"


@dataclass
class Image:
    """`root`: its file system. The rest: as the Containerfile says."""

    root: Path
    env: dict[str, str] = field(default_factory=lambda: {"PATH": _PATH})
    cwd: str = "/"
    user: tuple[int, int] = (0, 0)
    entrypoint: list[str] = field(default_factory=list)
    stop_signal: str = "SIGTERM"

    @property
    def mounts(self) -> dict[str, tuple[Path, str]]:
        return {DEPENDENCIES: (SITE, "ro")}


def base() -> tuple[str, str]:
    """Python's version and Debian's suite, as the Containerfile's FROM names them."""
    pattern = r"^FROM \S+python:(\d+\.\d+)-slim-(\w+)(?:@sha256:\w+)?$"
    found = re.search(pattern, CONTAINERFILE.read_text(), re.MULTILINE)
    assert found, "the Containerfile begins with another image"
    return found[1], found[2]


def instructions() -> Iterator[tuple[str, str]]:
    """Of the Containerfile: the word and what follows."""
    lines = (line for line in CONTAINERFILE.read_text().splitlines() if not line.lstrip().startswith("#"))
    for line in "\n".join(lines).replace("\\\n", "").splitlines():
        if line.strip():
            word, _, rest = line.partition(" ")
            yield word, rest.strip()


def context() -> list[str]:
    """The files that COPY sees: of git's those that .dockerignore names again after it has left out all."""
    first, *kept = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert first == "*" and all(line.startswith("!") for line in kept)
    named = tuple(line.removeprefix("!") for line in kept)
    return [file for file in source_files() if any(file == name or file.startswith(f"{name}/") for name in named)]


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Two runs beside each other make a thing once."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "image.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def bootstrap(directory: Path) -> str:
    """Debian's packages into `directory`, where they do not lie already; why that failed, or "". Needs the network,
    which the tests' own namespace has not."""
    _, suite = base()
    with _alone(directory):
        bare = directory / suite
        return "" if (bare / "usr" / "bin" / "python3").exists() else _debootstrap(suite, bare)


def built(directory: Path) -> Image:
    """The image of this tree, from `directory` where it lies already, and else on the Debian there."""
    with _alone(directory):
        return _built(directory)


def _built(directory: Path) -> Image:
    _, suite = base()
    bare, root, key = directory / suite, directory / "image", directory / "image.key"
    wanted = _key()
    is_new = not key.exists() or key.read_text() != wanted
    if is_new:
        key.unlink(missing_ok=True)
        shutil.rmtree(root, ignore_errors=True)
        subprocess.run(["cp", "-a", bare, root], check=True)
        (root / "usr" / "local" / "bin" / "python").symlink_to("/usr/bin/python3")  # as that image has it
        (root / DEPENDENCIES.lstrip("/")).mkdir()
    image = Image(root)
    for number, (word, rest) in enumerate(instructions()):
        _follow(image, word, rest, directory, f"build-{number}", runs=is_new)
    if is_new:
        site = next((root / "opt" / "unicron" / "lib").glob("python*/site-packages"))
        (site / "dependencies.pth").write_text(f"{DEPENDENCIES}\n")
        # What is no module: pip would have put it there.
        shutil.copy2(Path(sys.executable).with_name("nats-server"), root / "opt" / "unicron" / "bin")
        for place in ("etc/hosts", "etc/hostname"):
            (root / place).write_text("")
        key.write_text(wanted)
    return image


def _follow(image: Image, word: str, rest: str, directory: Path, name: str, *, runs: bool) -> None:
    """One instruction. `runs`: what changes the file system too."""
    if word == "ARG":
        key, _, value = rest.partition("=")
        image.env[key] = value.strip('"')
    elif word == "ENV":
        for each in shlex.split(rest):
            key, _, value = each.partition("=")
            image.env[key] = value.replace("$PATH", image.env["PATH"])
    elif word == "WORKDIR":
        image.cwd = rest
        (image.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
    elif word == "COPY" and runs:
        assert rest == ". .", rest
        for file in context():
            target = image.root / image.cwd.lstrip("/") / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, target, follow_symlinks=False)
    elif word == "RUN" and runs:
        box = Box(
            root=image.root,
            args=("/bin/sh", "-ec", rest),
            env=image.env | _PIP,
            cwd=image.cwd,
            writable_root=True,
            mounts=image.mounts,
            capabilities=("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER"),
        )
        run_to_its_end(directory, name, box, 400)
    elif word == "USER":
        uid, gid = rest.split(":")
        image.user = int(uid), int(gid)
    elif word == "STOPSIGNAL":
        image.stop_signal = rest
    elif word == "ENTRYPOINT":
        image.entrypoint = [each.strip('", ') for each in rest.strip("[]").split(",")]
    else:
        assert word in ("FROM", "CMD", "COPY", "RUN"), f"the Containerfile has {word}, which is not followed here"


def _debootstrap(suite: str, target: Path) -> str:
    draft = target.with_name(f"{target.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    words = ["debootstrap", "--variant=minbase", "--include=python3,python3-venv", suite, str(draft), _MIRROR]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line.removeprefix("E: ") for line in (done.stdout + done.stderr).splitlines() if line.startswith("E:")]
        return f"debootstrap of {suite} from {_MIRROR} failed: {' '.join(said) or f'exit code {done.returncode}'}"
    draft.rename(target)
    return ""


def _key() -> str:
    """What the image is made from."""
    found = hashlib.sha256(f"{SITE} {sys.version}".encode())
    for name in (*context(), CONTAINERFILE.relative_to(ROOT)):
        path = ROOT / name
        found.update(f"{name}\n".encode() + (bytes(path.readlink()) if path.is_symlink() else path.read_bytes()))
    return found.hexdigest()
