"""The image as an archive that containerd imports: no registry is needed."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

from tests.containers.image import Image

UNICROND = "docker.io/library/unicrond:made-here"
#: A pod's own container, which holds its namespaces: the same files, and nothing but a sleep.
PAUSE = "docker.io/library/pause:made-here"
#: What no program of ours reads.
_NEEDLESS = ("usr/share/doc", "usr/share/locale", "usr/share/man", "var/cache", "var/lib/apt")


def write_archive(image: Image, path: Path) -> None:
    """Write both images, of one layer, to `path`; files become root's, as in a build."""
    layer = path.with_suffix(".layer")
    with tarfile.open(layer, "w") as tar:
        for entry in sorted(image.root.iterdir()):
            if entry.name not in ("proc", "sys", "dev"):
                tar.add(entry, entry.name, filter=_of_root)
    digest = hashlib.sha256()
    with layer.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    uid, gid = image.user
    env = [f"{name}={value}" for name, value in image.env.items()]
    ours = {
        "Entrypoint": image.entrypoint,
        "Env": env,
        "User": f"{uid}:{gid}",
        "WorkingDir": image.cwd,
        "StopSignal": image.stop_signal,
    }
    configs = {UNICROND: ours, PAUSE: {"Entrypoint": ["/bin/sleep", "infinity"], "Env": env}}
    entries: list[dict[str, Any]] = []
    with tarfile.open(path, "w") as tar:
        tar.add(layer, "layer.tar")
        for name, config in configs.items():
            whole = {
                "architecture": "amd64",
                "os": "linux",
                "config": config,
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest.hexdigest()}"]},
            }
            body = json.dumps(whole).encode()
            file_name = f"{hashlib.sha256(body).hexdigest()}.json"
            _put(tar, file_name, body)
            entries.append({"Config": file_name, "RepoTags": [name], "Layers": ["layer.tar"]})
        _put(tar, "manifest.json", json.dumps(entries).encode())
    layer.unlink()


def _of_root(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if info.name.startswith(_NEEDLESS):
        return None
    info.uid = info.gid = 0
    info.uname = info.gname = "root"
    return info


def _put(tar: tarfile.TarFile, name: str, body: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(body)
    tar.addfile(info, io.BytesIO(body))
