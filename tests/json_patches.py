"""JSON patches of a kustomization, applied as kustomize does, for where there is no kubectl."""

from __future__ import annotations

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
            case "add" | "replace":
                at[key] = step["value"]
            case "remove":
                del at[key]


def patch(document: dict[str, Any], overlay: Path) -> None:
    """Apply an overlay's patches for this object."""
    for each in yaml.safe_load((overlay / "kustomization.yaml").read_text()).get("patches", ()):
        if each["target"] == {"kind": document["kind"], "name": document["metadata"]["name"]}:
            apply(document, yaml.safe_load(each["patch"]))
