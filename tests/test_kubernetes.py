"""deploy/kubernetes and deploy/container: held against the schemas of Kubernetes and against our own programs."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from unicrond.agents.shell import cli, probe
from unicrond.commands.cli import parser
from unicrond.events.cli import environment_flags as variables
from unicrond.events.host.kubernetes_account import ACCOUNT_DIR
from unicrond.intake.config import load

DEPLOY = Path(__file__).parents[1] / "deploy"
ROOT = DEPLOY / "kubernetes"
#: The oldest and the newest that are supported upstream, and the one that it ran on.
VERSIONS = ("1.33", "1.34", "1.35")
FILES = sorted(path for path in ROOT.rglob("*.yaml") if path.name != "kustomization.yaml")
KUSTOMIZATIONS = sorted(ROOT.rglob("kustomization.yaml"))


def documents() -> Iterator[Any]:
    for path in FILES:
        for number, each in enumerate(yaml.safe_load_all(path.read_text())):
            yield pytest.param(each, id=f"{path.relative_to(ROOT)}#{number}")


def pods(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The pod templates of an object, however deep."""
    if "containers" in document.get("spec", {}):
        yield document
    for inner in document.values():
        for one in inner if isinstance(inner, list) else [inner]:
            if isinstance(one, dict):
                yield from pods(one)


PODS = [pod for path in FILES for each in yaml.safe_load_all(path.read_text()) for pod in pods(each)]


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
    named = set()
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
    images = {container["image"] for each in found for pod in pods(each) for container in pod["spec"]["containers"]}
    assert images == {"registry.example.org/unicrond:0.1.0"}, "JobSet's pods too"
    for each in found:
        for version in VERSIONS if each["kind"] != "JobSet" else ():
            kubernetes_validate.validate(each, version, strict=True)


def test_agent_log_patch_matches_its_variable() -> None:
    kustomization = ROOT / "overlays" / "external-nats" / "kustomization.yaml"
    (agents,) = yaml.safe_load_all((ROOT / "agents-daemonset" / "daemonset.yaml").read_text())
    for patch in yaml.safe_load(kustomization.read_text())["patches"]:
        for step in yaml.safe_load(patch["patch"]):
            at: Any = agents
            for part in step["path"].strip("/").split("/"):
                at = at[int(part)] if part.isdecimal() else at[part]
            assert step["op"] == "replace" or at == step["value"] == "UNICRON_AGENT_NATS"


def test_node_object_patch_gives_valid_daemonset(monkeypatch: pytest.MonkeyPatch) -> None:
    kustomization = yaml.safe_load((ROOT / "overlays" / "node-object" / "kustomization.yaml").read_text())
    (agents,) = yaml.safe_load_all((ROOT / "agents-daemonset" / "daemonset.yaml").read_text())
    (patch,) = kustomization["patches"]
    assert patch["target"] == {"kind": agents["kind"], "name": agents["metadata"]["name"]}
    for step in yaml.safe_load(patch["patch"]):
        *parts, last = step["path"].strip("/").split("/")
        at: Any = agents
        for part in parts:
            at = at[int(part)] if part.isdecimal() else at[part]
        assert (step["op"], last) == ("add", "-")
        at.append(step["value"])
    for version in VERSIONS:
        kubernetes_validate.validate(agents, version, strict=True)
    (container,) = agents["spec"]["template"]["spec"]["containers"]
    assert str(ACCOUNT_DIR) in [mount["mountPath"] for mount in container["volumeMounts"]]
    for one in container["env"]:
        monkeypatch.setenv(one["name"], one.get("value", "10.0.0.7").replace("$(POD_IP)", "10.0.0.7"))
    monkeypatch.setenv("UNICRON_AGENT_NODE", "gpu07")
    monkeypatch.setenv("UNICRON_AGENT_PASSWORD_FILE", __file__)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    found = cli.parse([]).kubernetes
    assert found is not None and found.cordon_means == "drain" and found.account == ACCOUNT_DIR


def test_node_object_rights_match_requests_of_agent() -> None:
    role, binding, policy, _ = yaml.safe_load_all((ROOT / "node-object" / "rights.yaml").read_text())
    given = {(resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    assert given == {("nodes", "get"), ("nodes", "watch"), ("nodes", "patch"), ("nodes/status", "patch")}
    (account,) = binding["subjects"]
    user = f"system:serviceaccount:{account['namespace']}:{account['name']}"
    assert user in policy["spec"]["matchConditions"][0]["expression"]


def test_selectors_match_pods() -> None:
    labels = [pod["metadata"]["labels"] for pod in PODS]
    for path in FILES:
        for each in yaml.safe_load_all(path.read_text()):
            spec = each.get("spec") or {}
            wanted = spec.get("podSelector") or spec.get("selector") or {}
            wanted = wanted.get("matchLabels", wanted)
            assert not wanted or any(wanted.items() <= label.items() for label in labels), path


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: str(pod["metadata"]["labels"]["app"]))
def test_pods_run_our_programs_without_rights(pod: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    spec = pod["spec"]
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"] and not spec["automountServiceAccountToken"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    claimed = {"log"} if pod["metadata"]["labels"]["app"] == "unicron-head" else set()
    assert mounted <= {volume["name"] for volume in spec["volumes"]} | claimed
    program, *words = container["args"]
    env = {one["name"]: one.get("value", "10.0.0.7") for one in container["env"]}
    if program == "unicrond":
        assert parser().parse_args(words).config == Path("/etc/unicron/config/unicron.yaml")
        assert "/readyz" not in str(container["livenessProbe"])
        return
    variables.check(program, variables.program_variables(cli.parser()), env)
    for name, value in env.items():
        monkeypatch.setenv(name, "job-0" if "INDEX" in value else value.replace("$(POD_IP)", "10.0.0.7"))
    monkeypatch.setenv("UNICRON_AGENT_NODE", "gpu07")
    monkeypatch.setenv("UNICRON_AGENT_PASSWORD_FILE", __file__)
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
    assert load(tmp_path / "unicron.yaml", {}).api.port == 7470


def test_untested_manifests_say_so() -> None:
    for path in ("agents-jobset/jobset.yaml", "overlays/jobset/kustomization.yaml"):
        assert (ROOT / path).read_text().startswith("# NOT RUN BY US")
    assert "NOT RUN BY US" in (ROOT / "overlays" / "node-object" / "kustomization.yaml").read_text()


def test_image_runs_without_root_and_passes_signals() -> None:
    text = (DEPLOY / "container" / "Containerfile").read_text()
    assert "\nUSER 10001:10001\n" in text and "\nSTOPSIGNAL SIGTERM\n" in text
    assert (DEPLOY / "container" / "enter").read_text().rstrip().endswith('exec "$@"')
