"""unicrond on that Kubernetes: an overlay of deploy/kubernetes, a task that trains on it, what an act brings about."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.containers.cluster import TASK, Watch, task_of
from tests.containers.image import DEPENDENCIES, SITE, built
from tests.containers.oci import cgroup_version, make_cgroups, remove_cgroups
from tests.containers.pods import MANIFESTS
from tests.containers.rows import BUILD as IMAGES
from tests.integration.live import TIMEOUT_S, Live
from tests.kubernetes.archive import UNICROND
from tests.kubernetes.machine import NODES, STORAGE_CLASS, Machine, wait_until
from tests.kubernetes.rows import BUILD, keep_events
from unicrond.agents.trainer.loop import corpus
from unicrond.core.state.state import ClusterState, NodeStatus
from unicrond.ctl.client import ApiError, Client
from unicrond.display.event_lines import EventLine

NAMESPACE = "training"
HEAD = "unicron-head-0"
AGENTS = {kind: f"{kind}/unicron-agent" for kind in ("daemonset", "statefulset", "jobset")}
#: Overlays whose agents are a DaemonSet's.
AGENTS |= dict.fromkeys(("node-object", "external-nats"), AGENTS["daemonset"])
#: The claims of states and of two heads.
_VOLUMES = {
    "unicron-checkpoints": ("ReadWriteMany", "2Ti"),
    "log-unicron-head-0": ("ReadWriteOncePod", "60Gi"),
    "log-unicron-head-1": ("ReadWriteOnce", "20Gi"),
}
_ROLLOUT_S = 220
_SLOTS = [
    {"name": "UNICRON_AGENT_SLOTS", "value": "1"},  # auto counts GPUs, and there are none
    {"name": "OMP_NUM_THREADS", "value": "1"},
    {"name": "UNICRON_HANG_FLOOR_S", "value": "10"},
]
_AGENT_SIZES = {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"memory": "2Gi", "nvidia.com/gpu": 1}}
_DEPENDENCIES_MOUNT = {"name": "dependencies", "mountPath": DEPENDENCIES, "readOnly": True}
_DEPENDENCIES_VOLUME = {"name": "dependencies", "hostPath": {"path": str(SITE)}}
_JOB, _POD = "/spec/replicatedJobs/0/template/spec", "/spec/replicatedJobs/0/template/spec/template/spec"
#: A JobSet's lists are not merged by name: the same, operation by operation, and an agent for each machine.
_JOBSET_SIZES = [
    {"op": "replace", "path": f"{_JOB}/completions", "value": 3},
    {"op": "replace", "path": f"{_JOB}/parallelism", "value": 3},
    {"op": "add", "path": f"{_POD}/volumes/-", "value": _DEPENDENCIES_VOLUME},
    {"op": "add", "path": f"{_POD}/initContainers/0/volumeMounts/-", "value": _DEPENDENCIES_MOUNT},
    {"op": "add", "path": f"{_POD}/containers/0/volumeMounts/-", "value": _DEPENDENCIES_MOUNT},
    {"op": "replace", "path": f"{_POD}/containers/0/resources", "value": _AGENT_SIZES},
    {"op": "test", "path": f"{_POD}/containers/0/env/7/name", "value": _SLOTS[0]["name"]},
    {"op": "replace", "path": f"{_POD}/containers/0/env/7", "value": _SLOTS[0]},
    *({"op": "add", "path": f"{_POD}/containers/0/env/-", "value": variable} for variable in _SLOTS[1:]),
]
_HEAD_SIZES = {"requests": {"cpu": "500m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}


class Cluster(Live):
    """One namespace with an overlay. `until`, `training` and `events` are those of a live cluster."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.directory = machine.directory
        self.volumes = machine.directory / "volumes"
        self.overlay = ""
        self.workers = 0
        #: What people have typed, and what was said.
        self.transcript: list[str] = []
        self._client: Client | None = None
        self.dev = self  # type: ignore[assignment]  # what Live asks of it: the state

    # --- kubectl ---------------------------------------------------------------------------------

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        """Return what kubectl says in this namespace."""
        return self.machine.kubectl("-n", NAMESPACE, *words, stdin=stdin)

    async def do(self, *words: str, stdin: str | None = None) -> str:
        """Run kubectl beside what else happens."""
        return await asyncio.to_thread(self.kubectl, *words, stdin=stdin)

    def pods(self, app: str = "unicron-agent") -> dict[str, dict[str, Any]]:
        """Return the pods with this label, by name."""
        found = json.loads(self.kubectl("get", "pods", "-l", f"app={app}", "-o", "json"))
        return {item["metadata"]["name"]: item for item in found["items"]}

    def pod_on(self, node: str) -> str:
        """Return the name of the agent's pod on a machine."""
        return next(name for name, pod in self.pods().items() if pod["spec"].get("nodeName") == node)

    def machine_without_head(self) -> str:
        """Return a machine on which no head runs."""
        heads = {pod["spec"].get("nodeName") for pod in self.pods("unicron-head").values()}
        return next(node for node in reversed(NODES) if node not in heads)

    def inside(self, pod: str, *words: str) -> str:
        """Return what a command in a pod says."""
        return self.kubectl("exec", pod, "--", *words)

    def pid_inside(self, pod: str, file: str, pattern: str) -> str:
        """Return the highest id of a process in a pod whose /proc/PID/`file` has the pattern; "" for none. (No ps in
        the image.)"""
        script = f"grep -las '{pattern}' /proc/[0-9]*/{file} | cut -d/ -f3 | sort -n | tail -1"
        return self.inside(pod, "sh", "-c", script)

    async def evict(self, pod: str) -> None:
        """Ask the API server for a pod's eviction, which budgets may refuse."""
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": NAMESPACE}}
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}/eviction"
        await self.do("create", "--raw", path, "-f", "-", stdin=json.dumps(body))

    # --- an overlay ------------------------------------------------------------------------------

    def make_volumes(self, overlay: str) -> None:
        """Make the namespace and a volume for each claim, as a storage class would for this overlay."""
        volumes = dict(_VOLUMES)
        if overlay == "external-nats":
            volumes["log-unicron-head-0"] = volumes["log-unicron-head-1"]
        items: list[dict[str, Any]] = [
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        ]
        for claim, (mode, size) in volumes.items():
            self.make_directory(claim)
            spec = {
                "storageClassName": STORAGE_CLASS,
                "capacity": {"storage": size},
                "accessModes": [mode],
                "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": {"namespace": NAMESPACE, "name": claim},
                "hostPath": {"path": str(self.volumes / claim)},
            }
            items.append(
                {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": claim}, "spec": spec},
            )
        self.machine.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(items))
        checkpoints = self.volumes / "unicron-checkpoints"
        corpus.build(checkpoints / "stdlib")
        (checkpoints / "orders").mkdir()
        (checkpoints / "orders").chmod(0o777)
        shutil.copy(Path(__file__).parents[1] / "containers" / "hungry_gpt.py", checkpoints)

    def make_directory(self, claim: str) -> Path:
        """Make what a claim's volume is, empty: writable by the pods' user, for fsGroup does not touch a hostPath."""
        place = self.volumes / claim
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        place.chmod(0o777)
        return place

    def apply(self, overlay: str, *words: str) -> None:
        """Apply an overlay, or what of it the words select."""
        self.overlay, self._client = overlay, None
        self.kubectl("apply", "-k", str(self.write(overlay)), *words)

    def write(self, overlay: str, image: str = UNICROND, settings: str = "") -> Path:
        """Write an overlay as it is, below one that changes what a user would: image, sizes, and more settings of the
        head; return where."""
        place = self.directory / "overlays" / overlay
        place.mkdir(parents=True, exist_ok=True)
        shutil.copytree(MANIFESTS, self.directory / "manifests", dirs_exist_ok=True)
        text = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": NAMESPACE,
            "resources": [f"../../manifests/overlays/{overlay}"],
            "images": [
                {
                    "name": "registry.example.org/unicrond",
                    "newName": image.partition(":")[0],
                    "newTag": image.partition(":")[2],
                }
            ],
            "patches": [{"patch": yaml.safe_dump(patch)} for patch in self._sizes(overlay)],
        }
        if overlay == "jobset":
            text["patches"].append({"target": {"kind": "JobSet"}, "patch": json.dumps(_JOBSET_SIZES)})
        if settings:
            config = yaml.safe_load((MANIFESTS / "head" / "config.yaml").read_text())
            config["data"]["unicron.yaml"] += settings
            text["patches"].append({"patch": yaml.safe_dump(config)})
        (place / "kustomization.yaml").write_text(yaml.safe_dump(text))
        return place

    def _sizes(self, overlay: str) -> list[dict[str, Any]]:
        """The patches: smaller pods, one slot each, and the packages of Python, which are not in the image."""
        mount, volumes = [_DEPENDENCIES_MOUNT], [_DEPENDENCIES_VOLUME]

        def patch(kind: str, name: str, container: dict[str, Any]) -> dict[str, Any]:
            spec: dict[str, Any] = {"volumes": volumes, "containers": [{"volumeMounts": mount, **container}]}
            if name == "unicron-agent" and overlay != "external-nats":
                spec["initContainers"] = [{"name": "login", "volumeMounts": mount}]
            return {
                "apiVersion": "apps/v1",
                "kind": kind,
                "metadata": {"name": name},
                "spec": {"template": {"spec": spec}},
            }

        head = patch("StatefulSet", "unicron-head", {"name": "unicrond", "resources": _HEAD_SIZES})
        if overlay == "jobset":
            return [head]
        kind = "StatefulSet" if overlay == "statefulset" else "DaemonSet"
        agent = patch(kind, "unicron-agent", {"name": "agent", "resources": _AGENT_SIZES, "env": _SLOTS})
        return [head, agent]

    def set_up(self, overlay: str) -> float:
        """Apply it as the README says; return the seconds until all pods are ready."""
        if overlay == "jobset":
            self.machine.start_jobset()
        if overlay == "external-nats":
            self.start_servers()
        began_s = time.monotonic()
        self.apply_in_order(overlay)
        self.until_rolled(AGENTS[overlay])
        return time.monotonic() - began_s

    def apply_in_order(self, overlay: str) -> None:
        """Apply an overlay: all but the agents, and these once they can have the head's CA."""
        if overlay != "external-nats":
            self.apply(overlay, "--selector", "app!=unicron-agent")
            self.until_rolled("statefulset/unicron-head")
            self.give_ca()
        self.apply(overlay)
        self.until_rolled("statefulset/unicron-head")

    def start_servers(self) -> None:
        """Start three NATS servers, with the secret that the README has people make."""
        words = [f"--from-literal={name}={os.urandom(24).hex()}" for name in ("nats-password", "api-token")]
        self.kubectl("create", "secret", "generic", "unicron", *words)
        text = Path(__file__).with_name("nats.yaml").read_text().replace("registry.example.org/unicrond", UNICROND)
        self.kubectl("apply", "-f", "-", stdin=text)
        self.until_rolled("statefulset/nats")

    def give_ca(self) -> None:
        """Put the head's CA into the ConfigMap that agents wait for."""
        ca = self.inside(HEAD, "cat", "/var/lib/unicron/state/tls/ca.pem")
        entry = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "unicron-ca"}, "data": {"ca.pem": ca}}
        self.kubectl("apply", "-f", "-", stdin=json.dumps(entry))

    def until_rolled(self, what: str) -> None:
        """Wait for a rollout's end, or for the pods of a JobSet, which has none."""
        words = ["rollout", "status", what]
        if what.startswith("jobset/"):
            wait_until(lambda: len(self.pods()) == len(NODES), _ROLLOUT_S, "pods of the JobSet")
            words = ["wait", "--for=condition=Ready", "pod", "--selector=app=unicron-agent"]
        try:
            self.kubectl(*words, f"--timeout={_ROLLOUT_S}s")
        except AssertionError as error:
            pods = self.kubectl("describe", "pods")
            logs = self.kubectl("logs", "--selector", f"app={what.partition('/')[2]}", "--all-containers", "--prefix")
            raise AssertionError(f"{error}\n{pods}\n{logs}\n{self.events_by_reason()}") from None

    def tear_down(self) -> None:
        """Remove the overlay and what its head has written."""
        self.keep_events()
        self.machine.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=150s")
        self.machine.kubectl("delete", "persistentvolume", "--all", "--timeout=60s")
        shutil.rmtree(self.volumes, ignore_errors=True)
        self.overlay, self._client = "", None

    # --- the head --------------------------------------------------------------------------------

    @property
    def client(self) -> Client:
        """Asks the head behind the Service."""
        if self._client is None:
            self._client = self._new_client()
        return self._client

    def forget_client(self) -> None:
        """Have the next request read token and CA anew: the head's volume has others."""
        self._client = None

    def _new_client(self) -> Client:
        address = self.kubectl("get", "service", "unicron-head", "-o", "jsonpath={.spec.clusterIP}")
        url = f"{address}:7470"
        if self.overlay == "external-nats":
            found = self.kubectl("get", "secret", "unicron", "-o", "jsonpath={.data.api-token}")
            return Client(f"http://{url}", base64.b64decode(found).decode(), 5.0)
        state = self.volumes / f"log-{HEAD}" / "state"
        token, ca = (state / "operator.token").read_text().strip(), state / "tls" / "ca.pem"
        return Client(f"https://{url}", token, 5.0, ca=ca, server_name="unicron-head")

    async def state(self) -> tuple[ClusterState, str]:
        """Return the head's state and its digest."""
        return await asyncio.to_thread(lambda: self.client.state())

    def lines(self, after: int = 0) -> list[EventLine]:
        """Return the log's entries after a sequence number."""
        return list(self.client.events(after))

    async def boots(self) -> dict[str, int]:
        """Return each node's agent's number."""
        state, _ = await self.state()
        return {name: node.agent.boot for name, node in state.nodes.items()}

    async def train(self, workers: int = 3) -> ClusterState:
        """Return the state once a task of so many workers trains; an earlier row's goes on."""
        self.workers = workers
        state, _ = await self.state()
        if TASK not in state.tasks:
            await asyncio.to_thread(lambda: self.client.submit(task_of(workers)))
        return await self.training(None, beyond=5)

    async def watch(self) -> Watch:
        """Return what watches from just before an act."""
        state, _ = await self.state()
        return Watch(self, state, (await asyncio.to_thread(self.lines))[-1].seq)  # type: ignore[arg-type]

    async def ready_again(self) -> float:
        """Return the seconds until the head's API says that it is live again; it must first be away."""
        began_s = time.monotonic()
        await asyncio.to_thread(wait_until, self.is_live, TIMEOUT_S, "live head")
        return time.monotonic() - began_s

    def is_live(self) -> bool:
        """Whether the head decides."""
        try:
            return bool(self.client.health()["status"] == "live")
        except ApiError:
            return False

    def keep_events(self) -> None:
        """Keep what Kubernetes says of what has happened so far; a namespace takes its events along."""
        keep_events(json.loads(self.machine.kubectl("get", "events", "--all-namespaces", "--output", "json"))["items"])

    def events_by_reason(self) -> str:
        """Return what `kubectl get events` says, sorted by reason."""
        columns = "REASON:.reason,TYPE:.type,COUNT:.count,OBJECT:.involvedObject.name,MESSAGE:.message"
        words = ("get", "events", "--all-namespaces", "--sort-by=.reason", "--output", f"custom-columns={columns}")
        return self.machine.kubectl(*words) + "\n"

    def restarts(self) -> int:
        """How often containers of head and agents were started anew in their pods."""
        pods = [*self.pods().values(), *self.pods("unicron-head").values()]
        return sum(one["restartCount"] for pod in pods for one in pod["status"].get("containerStatuses", ()))


def cpu_s() -> float:
    """Return the seconds of CPU that pods have taken so far, those that are gone too."""
    top = Path("/sys/fs/cgroup")
    if cgroup_version() == 2:
        return sum(int(path.read_text().split()[1]) for path in top.glob("unicron-kubernetes-*/cpu.stat")) / 1e6
    return sum(int(path.read_text()) for path in top.glob("cpuacct/unicron-kubernetes-*/cpuacct.usage")) / 1e9


def up_on(*nodes: str, boots: dict[str, int] | None = None) -> Callable[[ClusterState], bool]:
    """Return whether the agents of these nodes are there, each a newer one than `boots` says."""

    def holds(state: ClusterState) -> bool:
        found = [state.nodes.get(node) for node in nodes]
        return all(
            node is not None and node.status is NodeStatus.UP and node.agent.boot > (boots or {}).get(name, -1)
            for name, node in zip(nodes, found, strict=True)
        )

    return holds


@contextlib.contextmanager
def running_cluster() -> Iterator[Cluster]:
    """Yield a cluster without an overlay; it ends with the process, which is the first of its pid namespace."""
    assert os.getpid() == 1, "a cluster has to be alone in its namespaces: make kubernetes"
    subprocess.run("mount --make-rshared / && mount -t tmpfs none /run && mkdir /run/netns", shell=True, check=True)
    make_cgroups()
    image = built(IMAGES)
    remove_cgroups()
    machine = Machine(BUILD / "machine", image)
    try:
        machine.start()
        yield Cluster(machine)
    finally:
        machine.close()


def hold(overlay: str) -> int:
    """Have a task train on an overlay until a signal comes, and say how to get in."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), running_cluster() as cluster:
        cluster.make_volumes(overlay)
        ready_s = cluster.set_up(overlay)
        asyncio.run(cluster.train())
        outside = f"$(pgrep -f -n 'tests.kubernetes.cluster {overlay}')"
        print(f"{overlay}: all pods ready after {ready_s:.0f} s, a task trains. In another terminal:")
        print(f"  nsenter --target {outside} --mount --net --pid")
        print(f"  export KUBECONFIG={cluster.machine.kubeconfig} PATH={cluster.directory}/tools:$PATH", flush=True)
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(hold(sys.argv[1]))
