"""Pods of deploy/kubernetes as containers: what a kubelet makes of a pod template, as far as a machine without
Kubernetes can do it.

As there: arguments, variables, user, group, capabilities, the read-only root, volumes with their sizes and modes,
secrets, init containers, the limits' cgroup, one network namespace and address per pod, which outlive a container that
is started again in place. Whose pod a token is of, a stand-in says (tests/token_reviews.py).
Not as there: containerd's seccomp profile; a Service's fixed address (a name in /etc/hosts stands for it, which follows
the pod); sizes, which are cut to this machine's.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.containers.image import ROOT, Image
from tests.containers.oci import Box, Container
from tests.json_patches import objects, patch
from tests.token_reviews import AGENT, TokenReviewThread, account_of_head, extra, review
from unicrond.events.host.kubernetes_account import ACCOUNT_DIR

MANIFESTS = ROOT / "deploy" / "kubernetes"
GATEWAY = "10.78.0.1"
_BRIDGE = "unicron0"
MIB = 1 << 20
#: Of pods, and never used again: the kernel removes a link some time after its namespace.
_NUMBERS = itertools.count()
_UNITS = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


def make_network() -> None:
    """A bridge with the test's own address, in the network namespace that the test is in."""
    ip("link", "set", "lo", "up")
    ip("link", "add", _BRIDGE, "type", "bridge")
    ip("addr", "add", f"{GATEWAY}/16", "dev", _BRIDGE)
    ip("link", "set", _BRIDGE, "up")


def template(part: str, overlay: str = "") -> dict[str, Any]:
    """The pod template of a part of deploy/kubernetes, with what an overlay changes in it."""
    for each in objects(MANIFESTS / part):
        if each["kind"] in ("StatefulSet", "DaemonSet"):
            if overlay:
                patch(each, MANIFESTS / "overlays" / overlay)
            found: dict[str, Any] = each["spec"]["template"]["spec"]
            return found
    raise AssertionError(f"no pods in {part}")


def size_bytes(text: str) -> int:
    return int(text[:-2]) << _UNITS[text[-2:]] if text[-2:] in _UNITS else int(text)


@dataclass
class Machines:
    """What pods have in common: the image, the names of services, and a directory."""

    image: Image
    directory: Path
    config: str
    secrets: Mapping[str, str]
    pods: list[Pod] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("config", "secret", "checkpoints", "log", "ca"):
            (self.directory / name).mkdir()
        self.tokens = TokenReviewThread(GATEWAY)
        account = account_of_head(self.directory / "account")
        (self.directory / "config" / "unicron.yaml").write_text(self.config)
        for name, text in self.secrets.items():
            (self.directory / "secret" / name).write_text(text)
        gid = self.image.user[1]
        for name, mode in (("secret", 0o750), ("checkpoints", 0o2775), ("log", 0o2775)):
            place = self.directory / name
            os.chown(place, 0, gid)
            place.chmod(mode)
        for path in (*(self.directory / "secret").iterdir(), *account.iterdir()):
            os.chown(path, 0, gid)
            path.chmod(0o440)
        self.directory.chmod(0o755)
        (self.directory / "hosts").write_text("127.0.0.1 localhost\n")

    def point(self, service: str, address: str) -> None:
        """The Service's name leads there from now on, in all pods."""
        self._names[service] = address
        lines = ["127.0.0.1 localhost", *(f"{at} {name}" for name, at in self._names.items())]
        (self.directory / "hosts").write_text("\n".join(lines) + "\n")  # in place: it is mounted

    def remove(self) -> None:
        for pod in list(self.pods):
            pod.remove()
        self.tokens.close()


class Pod:
    """One pod: its volumes, its address, and the container that runs in it now."""

    def __init__(
        self,
        machines: Machines,
        part: str,
        name: str,
        *,
        overlay: str = "",
        node: str = "",
        memory_mib: int = 1024,
        cpus: float = 1.0,
        sizes_mib: Mapping[str, int] | None = None,
        env: Mapping[str, str] | None = None,
        args: list[str] | None = None,
        volumes: Mapping[str, Path] | None = None,
        hooks: tuple[tuple[str, ...], ...] = (),
    ) -> None:
        """`part`: of deploy/kubernetes, with the `overlay` of it. `node`: the machine's name. `sizes_mib`: of volumes
        in memory, instead of the manifest's. `env`, `args`: beside and instead of the manifest's (then there are no
        init containers). `volumes`: other directories for them."""
        self.name = name
        self.machines = machines
        number = next(_NUMBERS)
        self.address = f"10.78.{number // 250}.{number % 250 + 2}"
        spec = template(part, overlay)
        (self._container,) = spec["containers"]
        self.grace_s: float = spec["terminationGracePeriodSeconds"]
        self._netns = f"pod{number}"
        self.directory = machines.directory / self._netns
        self.directory.mkdir()
        self._mounted: list[Path] = []
        self._hooks = hooks
        user = spec["securityContext"]
        assert user["runAsNonRoot"] and self._container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        self.resources = {"memory_bytes": memory_mib * MIB, "cpus": cpus}
        self._places = self._volumes(spec, user["fsGroup"], dict(sizes_mib or {}), dict(volumes or {}))
        self._make_token(node or name, user["fsGroup"])
        self._account = machines.directory / "account" if spec["automountServiceAccountToken"] else None
        more = dict(env or {})
        if part == "head":
            more["UNICROND_POD_LOGINS_URL"] = machines.tokens.reviews.url
        whole = {"uid": user["runAsUser"], "gid": user["runAsGroup"], "hostname": name, "netns": self._netns}

        def box(container: dict[str, Any], words: list[str]) -> Box:
            return Box(
                root=machines.image.root,
                args=[*machines.image.entrypoint, *words],
                env=machines.image.env | self._environment(container, node or name) | more,
                writable_root=not container["securityContext"]["readOnlyRootFilesystem"],
                mounts=machines.image.mounts | self._mounts(container),
                hooks=hooks,
                **whole,
                **self.resources,
            )

        self._inits = [] if args else [box(each, each["args"]) for each in spec.get("initContainers", ())]
        self._box = box(self._container, args or self._container["args"])
        self._connect()
        self.box: Container
        machines.pods.append(self)

    def start(self) -> None:
        """The init containers, one after another, and the container; the first that fails is the last to start."""
        for init in self._inits:
            self._run(init)
            if self.box.wait(60):
                return
            self.box.remove()
        self._run(self._box)

    def restart(self) -> None:
        """As the kubelet does once the container has ended: same address, same volumes, another container."""
        self.box.remove()
        self._run(self._box)

    def _run(self, box: Box) -> None:
        self.box = Container(self.directory, f"{self.machines.directory.name}-{self._netns}", box)
        self.box.start()

    def delete(self, *, grace_s: float | None = None) -> tuple[int, float]:
        """`kubectl delete pod`: the stop signal, then SIGKILL where the grace has passed. (exit code, seconds). The
        volumes go with it."""
        began_s = time.monotonic()
        self.box.kill(signal.Signals[self.machines.image.stop_signal])
        try:
            code = self.box.wait(self.grace_s if grace_s is None else grace_s)
        except subprocess.TimeoutExpired:
            self.box.kill(signal.SIGKILL)
            code = self.box.wait(20)
        took_s = time.monotonic() - began_s
        self.remove()
        return code, took_s

    def remove(self) -> None:
        """At once and with all that it has."""
        if self in self.machines.pods:
            self.machines.pods.remove(self)
            if hasattr(self, "box"):
                self.box.remove()
            for place in reversed(self._mounted):
                subprocess.run(["umount", "--lazy", str(place)], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", self._netns], check=False, capture_output=True)

    def place(self, volume: str) -> Path:
        """Where the volume is."""
        return self._places[volume]

    def cut(self) -> None:
        """Its link is down."""
        ip("link", "set", f"{self._netns}-out", "down")

    def mend(self) -> None:
        ip("link", "set", f"{self._netns}-out", "up")

    def probe(self, kind: str) -> tuple[bool, str]:
        """As the kubelet asks: (yes, what was said). `kind`: livenessProbe, readinessProbe, startupProbe."""
        asked = self._container[kind]
        if "exec" in asked:
            done = self.box.run_inside(*asked["exec"]["command"])
            return done.returncode == 0, (done.stdout + done.stderr).strip()
        (port,) = [
            each["containerPort"] for each in self._container["ports"] if each["name"] == asked["httpGet"]["port"]
        ]
        url = f"{asked['httpGet'].get('scheme', 'HTTP').lower()}://{self.address}:{port}{asked['httpGet']['path']}"
        trust = ssl._create_unverified_context()  # as a kubelet
        try:
            with urllib.request.urlopen(url, timeout=asked.get("timeoutSeconds", 1), context=trust) as answer:
                return True, answer.read().decode()
        except urllib.error.HTTPError as error:
            return False, error.read().decode()
        except OSError as error:
            return False, str(error)

    def _environment(self, container: dict[str, Any], node: str) -> dict[str, str]:
        known = {"spec.nodeName": node, "metadata.name": self.name, "status.podIP": self.address}
        found: dict[str, str] = {}
        for each in container.get("env", ()):
            text = known[each["valueFrom"]["fieldRef"]["fieldPath"]] if "valueFrom" in each else each["value"]
            for name, value in found.items():
                text = text.replace(f"$({name})", value)
            found[each["name"]] = text
        return found

    def _volumes(
        self, spec: dict[str, Any], group: int, sizes_mib: dict[str, int], others: dict[str, Path]
    ) -> dict[str, Path]:
        """Where each volume is, by its name."""
        places = {}
        for volume in spec["volumes"]:
            name = volume["name"]
            place = places[name] = self.directory / name
            if name in others:
                places[name] = others[name]
            elif "emptyDir" in volume:
                place.mkdir()
                mode = 0o2777
                if volume["emptyDir"].get("medium") == "Memory":
                    mode = 0o3777  # a new tmpfs is sticky, and the kubelet leaves that
                    size = sizes_mib.get(name, 0) * MIB or size_bytes(volume["emptyDir"]["sizeLimit"])
                    options = f"size={size}"
                    subprocess.run(["mount", "-t", "tmpfs", "-o", options, f"{name}", str(place)], check=True)
                    self._mounted.append(place)
                os.chown(place, 0, group)
                place.chmod(mode)
            elif "projected" in volume:
                place.mkdir()
            else:  # secrets, ConfigMaps, claims: of all pods
                places[name] = self.machines.directory / name
        claim = self.machines.directory / f"state-{self.name}"  # of a StatefulSet: by the pod's name
        claim.mkdir(exist_ok=True)
        os.chown(claim, 0, group)
        claim.chmod(0o2777)
        return {"log": self.machines.directory / "log", "state": claim} | others | places

    def _make_token(self, machine: str, group: int) -> None:
        """What Kubernetes would say of this pod, for its token."""
        if "token" in self._places:
            path = self._places["token"] / "token"
            path.write_text(f"of-{self.name}\n")
            os.chown(path, 0, group)
            path.chmod(0o440)
            user = {"username": AGENT, "extra": extra(self.name, machine)}
            self.machines.tokens.reviews.answers[f"of-{self.name}"] = review(user=user)

    def _mounts(self, container: dict[str, Any]) -> dict[str, tuple[Path, str]]:
        mounts = {
            mount["mountPath"]: (self._places[mount["name"]], "ro" if mount.get("readOnly") else "rw")
            for mount in container["volumeMounts"]
        }
        mounts["/etc/hosts"] = (self.machines.directory / "hosts", "ro")
        if self._account is not None:
            mounts[str(ACCOUNT_DIR)] = (self._account, "ro")
        return mounts

    def _connect(self) -> None:
        name = self._netns
        ip("netns", "add", name)
        ip("link", "add", f"{name}-out", "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", f"{name}-out", "master", _BRIDGE, "up")
        ip("-n", name, "addr", "add", f"{self.address}/16", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "link", "set", "lo", "up")


def remove_all(directory: Path) -> None:
    with contextlib.suppress(OSError):
        shutil.rmtree(directory)
