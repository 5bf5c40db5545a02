"""`unicrond check-config`: is a configuration sound, and where does each setting come from?"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import msgspec

from unicrond.core.state.field_faults import Place, dotted
from unicrond.display.tables import Table, show
from unicrond.intake import config, settings
from unicrond.intake.timeouts import contradictions

_DEFAULT = "default"


def check_config(arguments: argparse.Namespace, configuration: config.Config) -> int:
    """Print where each setting comes from, and warnings; return the exit code. `configuration`: of the file and the
    variables, checked but for its certificates. Raises ConfigError."""
    path: Path | None = arguments.config
    config.check_certificates(configuration, config.where(path, os.environ))
    _, lines = config.read(path, os.environ)
    values, usual = _flat(configuration), _flat(config.Config())
    rows = []
    for place, value in values.items():
        line = f"{path}:{lines[place]}" if place in lines else _DEFAULT
        origin = settings.origin(place, os.environ) or line
        if arguments.defaults or origin != _DEFAULT:
            rows.append((dotted(place), value, usual.get(place), origin))
    warnings = contradictions(configuration.policy, configuration.heartbeat_s, {})
    if arguments.json:
        entries = {name: {"value": value, "default": default, "from": origin} for name, value, default, origin in rows}
        print(json.dumps({"settings": entries, "warnings": warnings}, indent=2))
        return 0
    cells = tuple((name, _cell(value), _cell(default), origin) for name, value, default, origin in rows)
    show(Table(("setting", "value", "default", "from"), cells, empty="Every setting has its default."))
    for warning in warnings:
        print(f"warning: {warning}")
    print(f"{path or 'The configuration'} is sound.")
    return 0


def _flat(configuration: config.Config) -> dict[Place, Any]:
    """Return each setting as JSON would have it; a section where a word stands for it, and else its fields."""
    places = [place for place, _ in settings.settings(config.Config)]
    values: dict[Place, Any] = {}
    for place in places:
        value: Any = msgspec.to_builtins(configuration)
        for name in place:
            value = value.get(name, msgspec.UNSET) if isinstance(value, dict) else msgspec.UNSET
        is_section = isinstance(value, dict) and any(child[:-1] == place for child in places)
        if value is not msgspec.UNSET and not is_section:
            values[place] = value
    return values


def _cell(value: Any) -> str:
    return value if isinstance(value, str) and value else "" if value is None else json.dumps(value)
