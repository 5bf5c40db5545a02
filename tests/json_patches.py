"""JSON patches and replacements of a kustomization, applied as kustomize does, for where there is no kubectl."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml


def apply(document: dict[str, Any], steps: Iterable[Mapping[str, Any]]) -> None:
    """Apply the steps of a JSON patch (RFC 6902) in place."""
    for step in steps:
        *parts, last = step["path"].strip("/").split("/")
        at: Any = document
        for part in parts:
            at = at[int(part)] if part.isdecimal() else at[part]
        key: Any = int(last) if last.isdecimal() else last
        match step["op"]:
            case "test":
                assert at[key] == step["value"], step["path"]
            case "add" if last == "-":
                at.append(step["value"])
            case "add" if isinstance(at, list):
                at.insert(key, step["value"])
            case "add" | "replace":
                at[key] = step["value"]
            case "remove":
                del at[key]


def patch(document: dict[str, Any], overlay: Path) -> None:
    """Apply an overlay's patches for this object."""
    for each in yaml.safe_load((overlay / "kustomization.yaml").read_text()).get("patches", ()):
        if each.get("target") == {"kind": document["kind"], "name": document["metadata"]["name"]}:
            apply(document, yaml.safe_load(each["patch"]))


def manifests(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file. Where its kustomization fills them from another base, they are filled, and patched
    by the kustomization above it."""
    documents = [*yaml.safe_load_all(path.read_text())]
    replacements = yaml.safe_load((path.parent / "kustomization.yaml").read_text()).get("replacements", ())
    for each in replacements:
        source, (target,) = each["source"], each["targets"]
        (base,) = (other for other in path.parent.glob("../../*/*.yaml") if _holds(other, source["kind"]))
        value = _at(next(yaml.safe_load_all(base.read_text())), source["fieldPath"].split("."))
        for document in documents:
            if document["kind"] == target["select"]["kind"]:
                *parts, last = target["fieldPaths"][0].split(".")
                _at(document, parts)[last] = copy.deepcopy(value)
    if replacements:
        for document in documents:
            patch(document, path.parents[1])
    return documents


def objects(part: Path) -> list[dict[str, Any]]:
    """Return the objects of a kustomization: those of its files, and those of another one with its patches, by JSON
    patch, `$patch: delete`, or a file in the place of an object."""
    kustomization = yaml.safe_load((part / "kustomization.yaml").read_text())
    paths = [part / name for name in kustomization["resources"]]
    documents = [each for path in paths for each in (objects(path) if path.is_dir() else manifests(path))]
    for each in kustomization.get("patches", ()):
        if "target" not in each:
            own = yaml.safe_load((part / each["path"]).read_text() if "path" in each else each["patch"])
            documents = [document for document in documents if _name(document) != _name(own)]
            documents += [own] if "$patch" not in own else []
    for document in documents:
        patch(document, part)
    return documents


def _name(document: dict[str, Any]) -> tuple[str, str]:
    return document["kind"], document["metadata"]["name"]


def _holds(path: Path, kind: str) -> bool:
    return path.name != "kustomization.yaml" and f"\nkind: {kind}\n" in path.read_text()


def _at(document: Any, parts: list[str]) -> Any:
    for part in parts:
        document = document[int(part)] if part.isdecimal() else document[part]
    return document
