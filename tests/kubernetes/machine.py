"""A Kubernetes on this machine: control plane, DNS and three kubelets, in namespaces that end with the test.

The control plane is in the test's own network namespace, each node in one of its own. What it is made of lies in the
folder that UNICRON_KUBERNETES names, or on the PATH.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.containers.image import Image
from tests.containers.oci import cgroup_version
from tests.containers.pods import ip
from tests.kubernetes.archive import PAUSE, write_archive

FOLDER = "UNICRON_KUBERNETES"
NODES = ("n0", "n1", "n2")
#: The default one. As those of block volumes are: a claim and its first pod are placed together.
STORAGE_CLASS = "lab"
_STORAGE = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "StorageClass",
    "metadata": {"name": STORAGE_CLASS, "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
    "provisioner": "kubernetes.io/no-provisioner",
    "volumeBindingMode": "WaitForFirstConsumer",
}
#: Program -> where it comes from.
PROGRAMS = {
    **dict.fromkeys(
        ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet", "kubectl"),
        "Kubernetes",
    ),
    "coredns": "CoreDNS",
    "etcd": "etcd",
    "jobset": "JobSet, with jobset-crd.yaml and jobset-webhooks.yaml beside it",
    **dict.fromkeys(("containerd", "containerd-shim-runc-v2", "ctr"), "containerd"),
    "runc": "runc",
    **dict.fromkeys(("ptp", "host-local", "loopback"), "the CNI plug-ins"),
    **dict.fromkeys(("iptables", "iptables-save", "iptables-restore", "conntrack"), "iptables and conntrack"),
    **dict.fromkeys(("ip", "nsenter", "openssl"), "iproute2, util-linux and openssl"),
}
_ADDRESS, _JOBSET_PORT = "10.77.0.1", 9443
API = f"https://{_ADDRESS}:6443"
_SERVICES = "10.96.0.0/16"
_USERS = {
    "admin": "system:masters",
    "system:kube-controller-manager": "",
    "system:kube-scheduler": "",
    "system:kube-proxy": "",
    "dns": "system:masters",
    **{f"system:node:{node}": "system:nodes" for node in NODES},
}
_CONTROLLERS = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids", "systemd")

_CPU_SHARES = 3 * 1024
#: What a kubelet sets for the whole machine (pkg/kubelet/cm/container_manager_linux.go).
_KUBELET_SETTINGS = {
    "vm/overcommit_memory": 1, "vm/panic_on_oom": 0, "kernel/panic": 10, "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1_000_000, "kernel/keys/root_maxbytes": 25_000_000,
}  # fmt: skip


def program(name: str) -> str | None:
    """Return the program's path; None where it is missing."""
    own = os.environ.get(FOLDER, "")
    folders = [own, f"{own}/bin", f"{own}/cni"] if own else []
    path = os.pathsep.join([*folders, os.environ.get("PATH", ""), "/usr/sbin", "/sbin", "/usr/lib/cni", "/opt/cni/bin"])
    return shutil.which(name, path=path)


def missing() -> str:
    """Say what a cluster lacks here; "" where all is there."""
    lacking = {name: source for name, source in PROGRAMS.items() if program(name) is None}
    if not lacking:
        return ""
    told = "; ".join(
        f"{', '.join(name for name in lacking if lacking[name] == source)} (of {source})"
        for source in dict.fromkeys(lacking.values())
    )
    where = os.environ.get(FOLDER) or f"no folder ({FOLDER} is not set)"
    return f"needs programs that neither {where} nor PATH has: {told}"


class Machine:
    """The daemons, each with its log in `directory`/log. End them with the namespace that they are in."""

    def __init__(self, directory: Path, image: Image) -> None:
        self.directory = directory
        self.image = image
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("pki", "conf", "log", "tools"):
            (directory / name).mkdir(parents=True)
        for name in PROGRAMS:
            found = program(name)
            assert found is not None
            (directory / "tools" / name).symlink_to(found)
        self._env = {
            **os.environ,
            "PATH": f"{directory}/tools:{os.environ['PATH']}:/usr/sbin:/sbin",
            "KUBECONFIG": str(self.kubeconfig),
        }
        self._commands: dict[str, tuple[str, Sequence[str]]] = {}
        #: The nodes whose link is down.
        self._cut: set[str] = set()

    def start(self) -> None:
        """Start all, and return once each node is ready and has the image."""
        self._keep_kernel_settings()
        write_archive(self.image, self.directory / "image.tar")
        self._make_network()
        self._make_keys()
        self._start_control_plane()
        for number, node in enumerate(NODES):
            self._configure_node(node, number)
            self._start_node(node, number)
        self.until_ready()
        self.kubectl("apply", "-f", "-", stdin=json.dumps(_STORAGE))
        for node in NODES:
            address, archive = str(self._socket(node)), str(self.directory / "image.tar")
            self.call("ctr", "-a", address, "-n", "k8s.io", "images", "import", archive)
            self.kubectl("label", "node", node, "nvidia.com/gpu.present=true")
            gpus = [{"op": "add", "path": "/status/capacity/nvidia.com~1gpu", "value": "2"}]
            self.kubectl("patch", "node", node, "--subresource=status", "--type=json", "-p", json.dumps(gpus))

    def start_jobset(self) -> None:
        """Start JobSet's controller beside the control plane, with its webhooks, which every pod then passes. Its
        manifests lie beside the program."""
        own, pki = self.directory / "jobset", self.directory / "pki"
        files = Path(program("jobset") or "").resolve().parent
        self.kubectl("apply", "--server-side", "-f", str(files / "jobset-crd.yaml"))
        own.mkdir(exist_ok=True)
        shutil.copy(pki / "api.crt", own / "tls.crt")
        shutil.copy(pki / "api.key", own / "tls.key")
        config = {
            "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
            "kind": "Configuration",
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "webhook": {"port": _JOBSET_PORT, "host": _ADDRESS, "certDir": str(own)},
            "metrics": {"bindAddress": ":8443", "certDir": str(own)},
            "health": {"healthProbeBindAddress": ":8081"},
        }
        (own / "config.json").write_text(json.dumps(config))
        self._daemon("jobset", "", "jobset", "--config", str(own / "config.json"))
        webhooks = list(yaml.safe_load_all((files / "jobset-webhooks.yaml").read_text()))
        for client in (webhook["clientConfig"] for entry in webhooks for webhook in entry["webhooks"]):
            client["url"] = f"https://{_ADDRESS}:{_JOBSET_PORT}{client.pop('service')['path']}"
            client["caBundle"] = base64.b64encode((pki / "ca.crt").read_bytes()).decode()
        wait_until(_takes_connections, 60, "controller of JobSet that listens")
        self.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(webhooks))

    def close(self) -> None:
        """End the daemons; what runs in pods ends with the namespace."""
        for process in self.daemons.values():
            process.kill()
        for process in self.daemons.values():
            process.wait()

    def until_ready(self, limit_s: float = 120.0) -> None:
        """Wait until Kubernetes calls each node ready."""
        wait_until(lambda: self.kubectl("get", "nodes", "--no-headers").count(" Ready") == len(NODES), limit_s, "nodes")

    # --- commands --------------------------------------------------------------------------------

    def call(self, name: str, *words: str, stdin: str | None = None, timeout_s: float = 240.0) -> str:
        """Return what a program says, of our folder first; AssertionError with its last words where it ends badly."""
        done = subprocess.run(
            [name, *words], capture_output=True, text=True, check=False, env=self._env, input=stdin, timeout=timeout_s
        )
        assert done.returncode == 0, f"{name} {' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}"
        return done.stdout.strip()

    def kubectl(self, *words: str, stdin: str | None = None, timeout_s: float = 240.0) -> str:
        """Return what kubectl says, as an administrator."""
        return self.call("kubectl", *words, stdin=stdin, timeout_s=timeout_s)

    @property
    def kubeconfig(self) -> Path:
        return self.directory / "conf" / "admin.conf"

    # --- faults of Kubernetes itself -------------------------------------------------------------

    def stop(self, name: str) -> None:
        """Have a daemon stand still."""
        self.daemons[name].send_signal(signal.SIGSTOP)

    def go_on(self, name: str) -> None:
        """Have a daemon that stands still run again."""
        self.daemons[name].send_signal(signal.SIGCONT)

    def restart(self, name: str) -> None:
        """Kill a daemon and start it again."""
        self.daemons[name].kill()
        self.daemons[name].wait()
        netns, command = self._commands[name]
        self._daemon(name, netns, *command)

    def link(self, node: str, state: str) -> None:
        """Have a node's link be "up" or "down". The first node that is up serves the test the cluster's Services."""
        ip("link", "set", f"kv{node}", state)
        (self._cut.discard if state == "up" else self._cut.add)(node)
        number = next(number for number, name in enumerate(NODES) if name not in self._cut)
        ip("route", "replace", _SERVICES, "via", f"10.77.0.1{number}")

    # --- parts -----------------------------------------------------------------------------------

    def _daemon(self, name: str, netns: str, *command: str) -> None:
        self._commands[name] = netns, command
        words = [str(self.directory / "tools" / command[0]), *command[1:]]
        if netns:
            words = [str(self.directory / "tools" / "nsenter"), f"--net=/run/netns/{netns}", *words]
        with (self.directory / "log" / f"{name}.log").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._env, start_new_session=True
            )

    def _keep_kernel_settings(self) -> None:
        """Have kubelets find their settings of the kernel in copies: the true ones are the whole machine's, and outlive
        our namespaces; and three that write at once read what is half written."""
        copies = self.directory / "kernel"
        copies.mkdir()
        for name, value in _KUBELET_SETTINGS.items():
            copy = copies / name.replace("/", ".")
            copy.write_text(f"{value}\n")
            subprocess.run(["mount", "--bind", str(copy), f"/proc/sys/{name}"], check=True)

    def _make_network(self) -> None:
        ip("link", "set", "lo", "up")
        ip("link", "add", "k8sbr", "type", "bridge")
        ip("addr", "add", f"{_ADDRESS}/24", "dev", "k8sbr")
        ip("link", "set", "k8sbr", "up")
        _write_sysctl("net/ipv4/ip_forward", "1")
        for number, node in enumerate(NODES):
            ip("netns", "add", node)
            ip("link", "add", f"kv{node}", "type", "veth", "peer", "name", "eth0", "netns", node)
            ip("link", "set", f"kv{node}", "master", "k8sbr", "up")
            ip("-n", node, "link", "set", "lo", "up")
            ip("-n", node, "addr", "add", f"10.77.0.1{number}/24", "dev", "eth0")
            ip("-n", node, "link", "set", "eth0", "up")
            ip("-n", node, "route", "add", "default", "via", _ADDRESS)
            for other in range(len(NODES)):
                if other != number:
                    ip("-n", node, "route", "add", f"10.78.{other}.0/24", "via", f"10.77.0.1{other}")
            forward = "echo 1 > /proc/sys/net/ipv4/ip_forward; echo 0 > /proc/sys/net/ipv4/conf/all/rp_filter"
            self.call("nsenter", f"--net=/run/netns/{node}", "sh", "-c", forward)
            ip("route", "add", f"10.78.{number}.0/24", "via", f"10.77.0.1{number}")
        ip("route", "add", _SERVICES, "via", "10.77.0.10")

    def _make_keys(self) -> None:
        pki = self.directory / "pki"
        names = f"subjectAltName=IP:{_ADDRESS},IP:10.96.0.1,DNS:kubernetes,DNS:kubernetes.default.svc"
        (pki / "names").write_text(names)
        script = """
            openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.crt -days 9 -subj /CN=ca
            openssl req -newkey rsa:2048 -nodes -keyout api.key -out api.csr -subj /CN=kube-apiserver
            openssl x509 -req -in api.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 9 -extfile names -out api.crt
            openssl genrsa -out sa.key 2048"""
        for line in script.strip().splitlines():
            subprocess.run(line.split(), cwd=pki, check=True, capture_output=True)
        lines = [f'{_token(user)},{user},uid-{user},"{group}"' for user, group in _USERS.items()]
        (self.directory / "conf" / "tokens.csv").write_text("\n".join(lines) + "\n")
        for user in _USERS:
            cluster = {"server": API, "certificate-authority": str(pki / "ca.crt")}
            config = {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "lab", "cluster": cluster}],
                "users": [{"name": "me", "user": {"token": _token(user)}}],
                "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "me"}}],
                "current-context": "lab",
            }
            (self.directory / "conf" / f"{user.rpartition(':')[2]}.conf").write_text(json.dumps(config))

    def _config(self, user: str) -> str:
        return str(self.directory / "conf" / f"{user}.conf")

    def _start_control_plane(self) -> None:
        pki, conf = self.directory / "pki", self.directory / "conf"
        clients, peers = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
        self._daemon(
            "etcd", "", "etcd", "--data-dir", str(self.directory / "etcd"), "--unsafe-no-fsync",
            "--listen-client-urls", clients, "--advertise-client-urls", clients, "--listen-peer-urls", peers,
        )  # fmt: skip
        self._daemon(
            "kube-apiserver", "", "kube-apiserver", "--etcd-servers", clients, "--bind-address", _ADDRESS,
            "--advertise-address", _ADDRESS, "--tls-cert-file", str(pki / "api.crt"),
            "--tls-private-key-file", str(pki / "api.key"), "--client-ca-file", str(pki / "ca.crt"),
            "--token-auth-file", str(conf / "tokens.csv"), "--authorization-mode", "Node,RBAC",
            "--service-cluster-ip-range", _SERVICES, "--service-account-issuer", API,
            "--service-account-key-file", str(pki / "sa.key"), "--allow-privileged=true",
            "--service-account-signing-key-file", str(pki / "sa.key"),
            "--kubelet-preferred-address-types", "InternalIP",
        )  # fmt: skip
        wait_until(lambda: self.kubectl("get", "--raw", "/readyz") == "ok", 90, "API server")
        self._daemon(
            "kube-controller-manager", "", "kube-controller-manager", "--leader-elect=false",
            "--kubeconfig", self._config("kube-controller-manager"), "--use-service-account-credentials",
            "--service-account-private-key-file", str(pki / "sa.key"), "--root-ca-file", str(pki / "ca.crt"),
            "--bind-address", "127.0.0.1",
        )  # fmt: skip
        self._daemon(
            "kube-scheduler", "", "kube-scheduler", "--kubeconfig", self._config("kube-scheduler"),
            "--leader-elect=false", "--bind-address", "127.0.0.1",
        )  # fmt: skip
        zone = f"kubernetes cluster.local {{ kubeconfig {self._config('dns')} lab\n ttl 5\n }}"
        (conf / "Corefile").write_text(f".:53 {{\n bind {_ADDRESS}\n {zone}\n cache 5\n}}\n")
        self._daemon("coredns", "", "coredns", "-conf", str(conf / "Corefile"))

    def _socket(self, node: str) -> Path:
        return Path(f"/run/k8s-{node}/containerd.sock")

    def _configure_node(self, node: str, number: int) -> None:
        place = self.directory / node
        for name in ("net", "cni", "containerd", "kubelet", "logs"):
            (place / name).mkdir(parents=True)
        # ptp, not bridge: what goes to a Service must pass the node's own routing, also between pods of one node.
        addresses = {
            "type": "host-local",
            "dataDir": str(place / "cni"),
            "ranges": [[{"subnet": f"10.78.{number}.0/24"}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        }
        plugin = {"type": "ptp", "ipMasq": False, "mtu": 1450, "ipam": addresses}
        network = {"cniVersion": "0.4.0", "name": "lab", "plugins": [plugin]}
        (place / "net" / "10-lab.conflist").write_text(json.dumps(network))
        # Without CAP_SYS_RESOURCE nobody may lower oom_score_adj.
        (place / "containerd.toml").write_text(f"""
version = 2
root = "{place}/containerd"
state = "/run/k8s-{node}"
[grpc]
  address = "{self._socket(node)}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{self.directory}/tools"
    conf_dir = "{place}/net"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      BinaryName = "{self.directory}/tools/runc"
      SystemdCgroup = false
""")
        settings: dict[str, Any] = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{_cgroup(node)}",
            "failCgroupV1": False,
            "failSwapOn": False,
            "containerRuntimeEndpoint": f"unix://{self._socket(node)}",
            "podLogsDir": str(place / "logs"),
            "volumePluginDir": str(place / "plugins"),
            "clusterDomain": "cluster.local",
            "clusterDNS": [_ADDRESS],
            "resolvConf": "",
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "2%", "imagefs.available": "2%"},
        }
        (place / "kubelet.json").write_text(json.dumps(settings))

    def _start_node(self, node: str, number: int) -> None:
        place = self.directory / node
        self._daemon(f"containerd-{node}", node, "containerd", "-c", str(place / "containerd.toml"))
        make_cgroups(node)
        wait_until(self._socket(node).exists, 30, f"containerd on {node}")
        self._daemon(
            f"kubelet-{node}", node, "kubelet", "--config", str(place / "kubelet.json"),
            "--kubeconfig", self._config(node), "--root-dir", str(place / "kubelet"),
            "--hostname-override", node, "--node-ip", f"10.77.0.1{number}", "--v", "2",
        )  # fmt: skip
        self._daemon(
            f"kube-proxy-{node}", node, "kube-proxy", "--kubeconfig", self._config("kube-proxy"),
            "--hostname-override", node, "--proxy-mode", "iptables", "--cluster-cidr", "10.78.0.0/16",
            "--conntrack-max-per-core", "0", "--conntrack-tcp-timeout-established", "0",
            "--conntrack-tcp-timeout-close-wait", "0", "--healthz-bind-address", "127.0.0.1:10256",
        )  # fmt: skip


def _takes_connections() -> bool:
    with contextlib.suppress(OSError), socket.create_connection((_ADDRESS, _JOBSET_PORT), 1):
        return True
    return False


def wait_until(holds: Any, limit_s: float, what: str) -> float:
    """Return the seconds until `holds()` is true, taking AssertionError for no; raise it after `limit_s`."""
    began_s, why = time.monotonic(), ""
    while time.monotonic() - began_s < limit_s:
        try:
            if holds():
                return time.monotonic() - began_s
        except AssertionError as error:
            why = str(error)
        time.sleep(0.2)
    raise AssertionError(f"no {what} within {limit_s:g} s; {why}")


def _token(user: str) -> str:
    return f"t-{user.rpartition(':')[2]}"


def _write_sysctl(name: str, value: str) -> None:
    Path("/proc/sys", name).write_text(value)


def _cgroup(node: str) -> str:
    return f"unicron-kubernetes-{node}"


def make_cgroups(node: str) -> None:
    """Make what a kubelet wants to find: its root, by each controller."""
    top = Path("/sys/fs/cgroup")
    if cgroup_version() == 2:
        (top / _cgroup(node)).mkdir(exist_ok=True)
        return
    for controller in _CONTROLLERS:
        if (top / controller).is_dir():
            (top / controller / _cgroup(node)).mkdir(exist_ok=True)
    # As much of the processors as so many processes outside have: else all pods of a node count as one.
    (top / "cpu" / _cgroup(node) / "cpu.shares").write_text(str(_CPU_SHARES))
    for name in ("cpuset.cpus", "cpuset.mems"):
        if (top / "cpuset").is_dir():
            (top / "cpuset" / _cgroup(node) / name).write_text((top / "cpuset" / name).read_text())


def remove_cgroups() -> None:
    """Remove them, once nothing runs in them."""
    for node in NODES:
        for place in [Path("/sys/fs/cgroup", _cgroup(node)), *Path("/sys/fs/cgroup").glob(f"*/{_cgroup(node)}")]:
            for directory in sorted((path for path in place.rglob("*") if path.is_dir()), reverse=True):
                directory.rmdir()
            if place.is_dir():
                place.rmdir()
