"""The image as an archive that containerd imports: no registry is needed."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from tests.containers.image import Image
from tests.integration.versions import PATCHES, make_tree

UNICROND = "docker.io/library/unicrond:made-here"
#: The same with one schema more (tests/integration/versions.py).
NEXT_UNICROND = "docker.io/library/unicrond:made-next"
#: A pod's own container, which holds its namespaces: the same files, and nothing but a sleep.
PAUSE = "docker.io/library/pause:made-here"
#: What no program of ours reads.
_NEEDLESS = ("usr/share/doc", "usr/share/locale", "usr/share/man", "var/cache", "var/lib/apt")


def write_archive(image: Image, path: Path) -> None:
    """Write the images to `path`: of one layer, and of one more with the files of the next version that differ. Files
    become root's, as in a build."""
    layers = [path.with_suffix(suffix) for suffix in (".layer", ".next-layer")]
    with tarfile.open(layers[0], "w") as tar:
        for entry in sorted(image.root.iterdir()):
            if entry.name not in ("proc", "sys", "dev"):
                tar.add(entry, entry.name, filter=_of_root)
    (site,) = (image.root / "opt" / "unicron" / "lib").glob("python*/site-packages")
    with tempfile.TemporaryDirectory() as trees, tarfile.open(layers[1], "w") as tar:
        package = make_tree("next", Path(trees)) / "unicrond"
        for name in (name.removeprefix("unicrond/") for name in PATCHES):
            tar.add(package / name, str(site.relative_to(image.root) / "unicrond" / name), filter=_of_root)
    digests = [f"sha256:{_digest(layer)}" for layer in layers]
    uid, gid = image.user
    env = [f"{name}={value}" for name, value in image.env.items()]
    ours = {
        "Entrypoint": image.entrypoint,
        "Env": env,
        "User": f"{uid}:{gid}",
        "WorkingDir": image.cwd,
        "StopSignal": image.stop_signal,
    }
    pause = {"Entrypoint": ["/bin/sleep", "infinity"], "Env": env}
    entries: list[dict[str, Any]] = []
    with tarfile.open(path, "w") as tar:
        for layer in layers:
            tar.add(layer, layer.name)
        for name, config, count in ((UNICROND, ours, 1), (NEXT_UNICROND, ours, 2), (PAUSE, pause, 1)):
            whole = {
                "architecture": "amd64",
                "os": "linux",
                "config": config,
                "rootfs": {"type": "layers", "diff_ids": digests[:count]},
            }
            body = json.dumps(whole).encode()
            file_name = f"{hashlib.sha256(body).hexdigest()}.json"
            _put(tar, file_name, body)
            names = [layer.name for layer in layers[:count]]
            entries.append({"Config": file_name, "RepoTags": [name], "Layers": names})
        _put(tar, "manifest.json", json.dumps(entries).encode())
    for layer in layers:
        layer.unlink()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
