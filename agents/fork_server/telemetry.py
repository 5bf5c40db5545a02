"""Connects OpenTelemetry's spans of a worker (Megatron-LM's `--otel-enabled`, or its program's own) with unicrond's
spans of incidents and commands: by attributes of the same names (unicrond/views/spans.py).
"""

from __future__ import annotations

from unicrond.agents.protocol.messages import Launch


def resource_attributes(attributes: str, launch: Launch) -> str:
    """Return the value for OTEL_RESOURCE_ATTRIBUTES, which every SDK reads: `attributes`, and the worker's; one of the
    former stays as it is."""
    ours = {"unicron.task": launch.task, "unicron.worker": launch.worker, "unicron.node": launch.node}
    names = {part.partition("=")[0].strip() for part in attributes.split(",")}
    return ",".join(
        [*filter(None, [attributes]), *(f"{name}={value}" for name, value in ours.items() if name not in names)]
    )
