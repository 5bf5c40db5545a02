"""deploy/kubernetes and deploy/container: held against the schemas of Kubernetes and against our own programs."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.containers.rows import END
from tests.json_patches import manifests, objects, patch
from tests.kubernetes.machine import PROGRAMS, missing
from tests.kubernetes.rows import BEGIN, events_table, table
from unicrond.agents.shell import cli, pod_login, probe
from unicrond.commands.cli import parser
from unicrond.events.cli import environment_flags as variables
from unicrond.events.host.kubernetes_account import ACCOUNT_DIR
from unicrond.events.trust.keys import make_key, write_key
from unicrond.intake.config import Config, load
from unicrond.intake.pod_logins import NodeOfPod

DEPLOY = Path(__file__).parents[1] / "deploy"
ROOT = DEPLOY / "kubernetes"
#: The oldest and the newest that are supported upstream, and the one that it ran on.
VERSIONS = ("1.33", "1.34", "1.35")
FILES = sorted(path for path in ROOT.rglob("*.yaml") if path.name != "kustomization.yaml")
KUSTOMIZATIONS = sorted(ROOT.rglob("kustomization.yaml"))


def documents() -> Iterator[Any]:
    for path in FILES:
        for number, each in enumerate(manifests(path)):
            yield pytest.param(each, id=f"{path.relative_to(ROOT)}#{number}")
    for each in PAIR:
        yield pytest.param(each, id=f"head-external-nats {each['kind']}")


def pods(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The pod templates of an object, however deep."""
    if "containers" in document.get("spec", {}):
        yield document
    for inner in document.values():
        for one in inner if isinstance(inner, list) else [inner]:
            if isinstance(one, dict):
                yield from pods(one)


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


PAIR = objects(ROOT / "head-external-nats")  # made of the files of another
PODS = [pod for each in [*(each for path in FILES for each in manifests(path)), *PAIR] for pod in pods(each)]


def head_of(part: str) -> dict[str, Any]:
    """The StatefulSet of a kind of heads."""
    return next(each for each in objects(ROOT / part) if each["kind"] == "StatefulSet")


@pytest.mark.parametrize("document", [*documents()])
def test_manifests_fit_kubernetes_schemas(document: dict[str, Any]) -> None:
    if document["kind"] == "JobSet":
        pytest.skip("JobSet is no core kind: its pods are looked at below")
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)


def test_schema_check_detects_wrong_field() -> None:
    wrong = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": {"port": 1}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[1], strict=True)


def test_kustomizations_cover_every_file() -> None:
    named = {(ROOT / "head-external-nats" / "config.yaml").resolve()}  # a patch
    for path in KUSTOMIZATIONS:
        for resource in yaml.safe_load(path.read_text())["resources"]:
            found = (path.parent / resource).resolve()
            assert found.is_file() or (found / "kustomization.yaml").is_file(), f"{path}: {resource}"
            named.add(found)
    assert {path.resolve() for path in FILES} <= named
    parts = {path.parent.resolve() for path in KUSTOMIZATIONS if "overlays" not in path.parts}
    assert parts <= named


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here")
@pytest.mark.parametrize("overlay", sorted(path.name for path in (ROOT / "overlays").iterdir()))
def test_kubectl_builds_every_overlay(overlay: str) -> None:
    words = ["kubectl", "kustomize", str(ROOT / "overlays" / overlay)]
    built = subprocess.run(words, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    found = [*yaml.safe_load_all(built.stdout)]
    kinds = {each["kind"] for each in found}
    assert {"StatefulSet", "ConfigMap", "PodDisruptionBudget", "NetworkPolicy", "PriorityClass"} <= kinds
    assert {each["metadata"].get("namespace", "training") for each in found} == {"training"}
    images = {container["image"] for each in found for pod in pods(each) for container in containers(pod)}
    assert images == {"registry.example.org/unicrond:0.1.0"}, "JobSet's pods too"
    for each in found:
        for version in VERSIONS if each["kind"] != "JobSet" else ():
            kubernetes_validate.validate(each, version, strict=True)


def agents_of(overlay: str) -> dict[str, Any]:
    (agents,) = yaml.safe_load_all((ROOT / "agents-daemonset" / "daemonset.yaml").read_text())
    patch(agents, ROOT / "overlays" / overlay)
    for version in VERSIONS:
        kubernetes_validate.validate(agents, version, strict=True)
    return dict(agents)


def test_agents_patch_for_other_nats_servers_leaves_nothing_of_the_heads_login() -> None:
    text = str(agents_of("external-nats"))
    assert "unicron-ca" not in text and "login" not in text and "'token'" not in text and "nats://nats:4222" in text


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """What the init container leaves to the agent of gpu07."""
    write_key(tmp_path / "agent.key", make_key("agent-gpu07"))
    return tmp_path / "agent.key"


def test_node_object_patch_gives_valid_daemonset(monkeypatch: pytest.MonkeyPatch, key: Path) -> None:
    agents = agents_of("node-object")
    (container,) = agents["spec"]["template"]["spec"]["containers"]
    assert str(ACCOUNT_DIR) in [mount["mountPath"] for mount in container["volumeMounts"]]
    for one in container["env"]:
        monkeypatch.setenv(one["name"], one.get("value", "10.0.0.7").replace("$(POD_IP)", "10.0.0.7"))
    monkeypatch.setenv("UNICRON_AGENT_NODE", "gpu07")
    monkeypatch.setenv("UNICRON_AGENT_KEY", str(key))
    monkeypatch.setenv("UNICRON_AGENT_TLS_CA", str(key))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    found = cli.parse([]).kubernetes
    assert found is not None and found.cordon_means == "drain" and found.account == ACCOUNT_DIR


def test_node_object_rights_match_requests_of_agent() -> None:
    role, binding, *policies = yaml.safe_load_all((ROOT / "node-object" / "rights.yaml").read_text())
    given = {(resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    on_nodes = {("nodes", "get"), ("nodes", "watch"), ("nodes", "patch"), ("nodes/status", "patch")}
    assert given == on_nodes | {("events", "create")}
    (account,) = binding["subjects"]
    user = f"system:serviceaccount:{account['namespace']}:{account['name']}"
    narrowed = {}
    for policy, in_force in zip(policies[::2], policies[1::2], strict=True):
        assert user in policy["spec"]["matchConditions"][0]["expression"]
        assert in_force["spec"] == {"policyName": policy["metadata"]["name"], "validationActions": ["Deny"]}
        (rule,) = policy["spec"]["matchConstraints"]["resourceRules"]
        narrowed |= dict.fromkeys(rule["resources"], rule["operations"])
    assert narrowed == {"nodes": ["UPDATE"], "nodes/status": ["UPDATE"], "events": ["CREATE"]}


def test_agents_are_one_template() -> None:
    """What a DaemonSet, a StatefulSet and a Job have of their own is where a pod is put and which node it is."""
    agents = [pod for pod in PODS if pod["metadata"]["labels"]["app"] == "unicron-agent"]
    assert len(agents) == 3
    nodes = [pod["spec"]["containers"][0]["env"] for pod in agents]
    named = [next(one for one in env if one["name"] == "UNICRON_AGENT_NODE") for env in nodes]
    assert [one.get("value") or one["valueFrom"]["fieldRef"]["fieldPath"] for one in named] == [
        "spec.nodeName",
        "unicron-agent-agents-0-$(INDEX)",
        "metadata.name",
    ]
    own = ("nodeSelector", "topologySpreadConstraints", "restartPolicy", "containers")
    rests = [{key: value for key, value in pod["spec"].items() if key not in own} for pod in agents]
    assert rests[0] == rests[1] == rests[2]


def test_pair_of_heads_is_the_one_head_on_other_servers() -> None:
    kinds = {(each["kind"], each["metadata"]["name"]) for each in PAIR}
    assert kinds == {("ConfigMap", "unicron"), ("Service", "unicron-head"), ("StatefulSet", "unicron-head")}
    assert {port["port"] for each in PAIR if each["kind"] == "Service" for port in each["spec"]["ports"]} == {7470}
    text = str(PAIR)
    assert "HTTPS" not in text and "4222}" not in text and "tls-init" not in text and "replicas: 3" in text


def test_selectors_match_pods() -> None:
    labels = [pod["metadata"]["labels"] for pod in PODS]
    for path in FILES:
        for each in manifests(path):
            spec = each.get("spec") or {}
            wanted = spec.get("podSelector") or spec.get("selector") or {}
            wanted = wanted.get("matchLabels", wanted)
            assert not wanted or any(wanted.items() <= label.items() for label in labels), path


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: str(pod["metadata"]["labels"]["app"]))
def test_pods_run_our_programs_without_rights(
    pod: dict[str, Any], monkeypatch: pytest.MonkeyPatch, key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = pod["spec"]
    (container,) = spec["containers"]
    is_agent = pod["metadata"]["labels"]["app"] == "unicron-agent"
    assert spec["securityContext"]["runAsNonRoot"] and not (is_agent and spec["automountServiceAccountToken"])
    claimed = set() if is_agent else {"log", "state"}
    for each in containers(pod):
        assert each["securityContext"]["readOnlyRootFilesystem"]
        assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        mounted = {mount["name"] for mount in each["volumeMounts"]}
        assert mounted <= {volume["name"] for volume in spec["volumes"]} | claimed
    assert "token" not in {mount["name"] for mount in container["volumeMounts"]}, "the init container alone has it"
    program, *words = container["args"]
    env = {one["name"]: one.get("value", "10.0.0.7") for one in container["env"]}
    if program == "unicrond":
        arguments = parser().parse_args(words)
        assert arguments.config == Path("/etc/unicron/config/unicron.yaml")
        assert "/readyz" not in str(container["livenessProbe"])
        assert not spec.get("initContainers"), "a second or more at each start, in which nobody decides"
        assert arguments.standby or arguments.tls_init == ["unicron-head", "unicron-head-0.unicron-head"]
        return
    (login,) = spec["initContainers"]
    assert login["args"][0] == program and pod_login.is_asked(login["args"][1:])
    (at,) = (word for word in login["args"] if word.endswith(".key"))
    assert at == env["UNICRON_AGENT_KEY"]
    words_here = [str(key) if word == at else word for word in login["args"][1:]]
    assert cli.main(words_here) == 0 and "agent-gpu07 already" in capsys.readouterr().out
    variables.check(program, variables.program_variables(cli.parser()), env)
    for name, value in env.items():
        monkeypatch.setenv(name, "job-0" if "INDEX" in value else value.replace("$(POD_IP)", "10.0.0.7"))
    monkeypatch.setenv("UNICRON_AGENT_NODE", "gpu07")
    monkeypatch.setenv("UNICRON_AGENT_KEY", str(key))
    monkeypatch.setenv("UNICRON_AGENT_TLS_CA", str(key))
    assert cli.parse(words).nats == ("nats://unicron-head:4222",)
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked, *flags = container[kind]["exec"]["command"]
        assert asked == program and probe.is_asked(flags)
    assert "ready" not in container["livenessProbe"]["exec"]["command"]
    assert container["livenessProbe"]["timeoutSeconds"] > probe.TIMEOUT_S


@pytest.mark.parametrize("head", ["head", "head-external-nats"])
def test_head_configuration_is_valid(tmp_path: Path, head: str) -> None:
    text = yaml.safe_load((ROOT / head / "config.yaml").read_text())["data"]["unicron.yaml"]
    for name in ("nats-password", "api-token"):
        (tmp_path / name).write_text("secret\n")
    (tmp_path / "unicron.yaml").write_text(text.replace("/etc/unicron/secret", str(tmp_path)))
    config = load(tmp_path / "unicron.yaml", {})
    assert config.api.port == 7470
    assert head != "head" or (config.has_keys and config.nats_tls and config.api_tls and config.own_token)
    kinds = {str(NodeOfPod.__args__)}  # type: ignore[attr-defined]
    for overlay in ("statefulset", "jobset"):
        (patch,) = yaml.safe_load((ROOT / "overlays" / overlay / "kustomization.yaml").read_text())["patches"]
        (step,) = yaml.safe_load(patch["patch"])
        assert step["value"]["name"] == "UNICROND_POD_LOGINS_NODE" and step["value"]["value"] in str(kinds)


@pytest.mark.parametrize("head", ["head", "head-external-nats"])
def test_head_remembers_its_log_on_volume(head: str) -> None:
    """An empty store never becomes a new log while a head knows another one, though its pod is made anew."""
    text = yaml.safe_load((ROOT / head / "config.yaml").read_text())["data"]["unicron.yaml"]
    settings = yaml.safe_load(text)
    state_dir = Path(settings["state_dir"])
    found = head_of(head)
    claims = {claim["metadata"]["name"] for claim in found["spec"]["volumeClaimTemplates"]}
    (container,) = found["spec"]["template"]["spec"]["containers"]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] in claims}
    assert any(state_dir.is_relative_to(mount) for mount in mounts)
    assert "log" not in settings and Config(state_dir=str(state_dir)).archive.parent == state_dir, "so does the archive"


def test_commands_that_restore_log_fit_pods_and_programs() -> None:
    """Those of docs/operate/kubernetes.md: the pod's name, the program's flags, the configuration that it has."""
    page = (ROOT.parents[1] / "docs" / "operate" / "kubernetes.md").read_text()
    pattern = r"^\$ kubectl -n training exec (\S+) -- unicrond ((?:restore|backup) .*)$"
    commands = re.findall(pattern, page, re.MULTILINE)
    assert len(commands) == 5
    for head in ("head", "head-external-nats"):
        found = head_of(head)
        (container,) = found["spec"]["template"]["spec"]["containers"]
        ours = parser().parse_args(container["args"][1:])
        for pod, words in commands:
            assert pod == f"{found['metadata']['name']}-0"
            asked = parser().parse_args(words.split())
            assert asked.directory in (None, Path("/checkpoints/unicron-1")) and asked.config == ours.config


def test_head_may_have_tokens_reviewed_and_nothing_else() -> None:
    role, binding = yaml.safe_load_all((ROOT / "head" / "rights.yaml").read_text())
    (rule,) = role["rules"]
    assert rule == {"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"]}
    assert [subject["name"] for subject in binding["subjects"]] == ["unicron-head"]


def test_make_kubernetes_names_missing_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UNICRON_KUBERNETES", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    text = missing()
    assert f"neither {tmp_path} nor PATH" in text and "coredns (of CoreDNS)" in text and "kubelet" in text
    for name in PROGRAMS:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert missing() == ""


def test_image_compiles_a_kernel_that_there_is() -> None:
    (program,) = re.findall(r'python -c "(.*?)"', (DEPLOY / "container" / "Containerfile").read_text())
    imports, _, call = program.partition("; ")
    names: dict[str, Any] = {}
    exec(imports, names)
    assert callable(eval(call.removesuffix("()"), names))


def test_image_runs_without_root_and_passes_signals() -> None:
    text = (DEPLOY / "container" / "Containerfile").read_text()
    assert "\nUSER 10001:10001\n" in text and "\nSTOPSIGNAL SIGTERM\n" in text
    enter = (DEPLOY / "container" / "enter").read_text()
    assert enter.index("trap ") < enter.index("cp -r") < enter.index('"$@" &'), "tests/unicrond/test_first_moments.py"


def test_table_of_cluster_keeps_rows_that_were_not_run() -> None:
    page = f"text\n{BEGIN}\nold\n\n| act | seen | run |\n|---|---|---|\n| a | 1 s | then |\n| b | 2 s | then |\n{END}"
    rows = {name: {"seen": "3 s | 4", "day": "today", "commit": "c", "load": 5} for name in ("b", "new")}
    assert table(rows, page).splitlines()[2:] == [
        "| a | 1 s | then |",
        "| b | 3 s / 4 | today, c, load 5 |",
        "| new | 3 s / 4 | today, c, load 5 |",
    ]


def test_events_of_cluster_are_sorted_by_reason() -> None:
    def event(reason: str, kind: str, message: str, **more: Any) -> dict[str, Any]:
        about = {"metadata": {"creationTimestamp": f"2026-11-28T10:00:0{len(message)}Z"}, "message": message}
        return {"reason": reason, "type": "Normal", "involvedObject": {"kind": kind}, **about, **more}

    events = [
        event("Started", "Pod", "second"),
        event("Killing", "Pod", "a|b"),
        event("Started", "Pod", "one", count=2),
    ]
    assert events_table(events).splitlines()[2:] == [
        '| Killing | Normal | 1 | Pod | "a/b" |',
        '| Started | Normal | 3 | Pod | "second" |',
    ]


def test_agents_can_be_applied_after_the_head() -> None:
    """README.md selects by this label: agents' pods that come before the head's CA begin with failed mounts."""
    assert "-l 'app!=unicron-agent'" in (ROOT / "README.md").read_text()
    agents = [each for path in FILES if "agents-" in str(path) for each in manifests(path) if [*pods(each)]]
    assert {each["kind"] for each in agents} == {"DaemonSet", "StatefulSet", "JobSet"}
    assert all(each["metadata"]["labels"] == {"app": "unicron-agent"} for each in agents)
