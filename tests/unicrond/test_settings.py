"""Settings by environment variables, `unicrond check-config`, and the sample, deploy/unicron.yaml."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from unicrond.commands import cli
from unicrond.events.cli import environment_flags as variables
from unicrond.intake import settings
from unicrond.intake.config import Config, ConfigError, load
from unicrond.intake.strict_yaml import parse

SAMPLE = Path(__file__).parents[2] / "deploy" / "unicron.yaml"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "unicron.yaml"
    path.write_text("heartbeat_s: 2.0\nnats:\n  port: 5000\n  host: 127.0.0.2\npolicy: {regroup_s: 30}\n")
    return path


def test_variable_overrides_file(file: Path) -> None:
    environ = {
        "UNICROND_NATS_PORT": "6000",
        "UNICROND_STATE_DIR": "8",  # text, though it looks like a number
        "UNICROND_SEVERITY": "{nan_loss: 1}",
        "UNICROND_READMISSION_CHECK": '[dcgmi, diag, -r, "2"]',
        "UNICROND_INJECTION": "true",
        "UNICROND_HEARTBEAT_S": "",
    }
    found = load(file, environ)
    assert (found.nats.port, found.nats.host, found.heartbeat_s) == (6000, "127.0.0.2", 2.0)
    assert (found.state_dir, found.injection, found.policy.regroup_s) == ("8", True, 30.0)
    assert found.readmission.check == ("dcgmi", "diag", "-r", "2")
    assert {kind: int(level) for kind, level in found.severity.items()} == {"nan_loss": 1}
    assert load(None, {"UNICROND_NATS_PORT": "6000"}).nats.port == 6000


def test_variable_sets_section_word_or_its_field(file: Path) -> None:
    assert load(file, {"UNICROND_TLS": "off"}).tls == "off"
    file.write_text("tls: off\n")
    made = load(file, {"UNICROND_TLS_ALSO_PLAIN": "true"}).tls
    assert made != "off" and made.also_plain


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("UNICROND_NATS_PORT", "many", "UNICROND_NATS_PORT: expected a whole number, got text 'many'"),
        ("UNICROND_NATS_PORT", "70000", "UNICROND_NATS_PORT: must be a whole number <= 65535, got 70000"),
        ("UNICROND_SEVERITY", "{nan_los: 1}", "UNICROND_SEVERITY: "),
        ("UNICROND_READMISSION_CHECK", "[a", "UNICROND_READMISSION_CHECK: not valid YAML"),
        ("UNICROND_API_TOKEN_FILE", "/nowhere", "UNICROND_ variables: api.token_file: /nowhere is not a file"),
    ],
)
def test_bad_variable_makes_one_line_with_its_name(name: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(None, {name: value})
    assert str(raised.value).startswith(said) and "\n" not in str(raised.value)


def test_variable_names_are_unique() -> None:
    names = [settings.variable(place) for place, _ in settings.settings(Config)]
    assert len(names) == len(set(names)) and not set(names) & variables.program_variables(cli.parser())


def test_check_config_tells_source_of_each_value(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UNICROND_NATS_PORT", "6000")
    assert cli.main(["check-config", "--config", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["settings"]
    assert found == {
        "heartbeat_s": {"value": 2.0, "default": 1.0, "from": f"{file}:1"},
        "nats.port": {"value": 6000, "default": 4222, "from": "UNICROND_NATS_PORT"},
        "nats.host": {"value": "127.0.0.2", "default": "127.0.0.1", "from": f"{file}:4"},
        "policy.regroup_s": {"value": 30.0, "default": 60.0, "from": f"{file}:5"},
    }
    assert cli.main(["check-config", "--config", str(file)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^nats\.port +6000 +4222 +UNICROND_NATS_PORT$", shown, re.MULTILINE)
    assert shown.endswith(f"{file} is sound.\n")
    assert cli.main(["check-config", "--defaults", "--json"]) == 0
    everything = json.loads(capsys.readouterr().out)["settings"]
    assert {"severity", "tls.ca", "policy.churn_s", "log.keep_d"} <= everything.keys() and "tls" not in everything


@pytest.mark.parametrize("command", [["check-config"], ["run"], ["archive"]])
def test_misspelt_variable_stops_start(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UNICROND_POLICY_REGRUP_S", "3")
    assert cli.main(command) == 2
    said = (
        "unicrond: UNICROND_POLICY_REGRUP_S: unicrond knows no such variable; did you mean UNICROND_POLICY_REGROUP_S?\n"
    )
    assert capsys.readouterr().err == said


def test_sample_has_every_setting_with_default() -> None:
    text = SAMPLE.read_text()
    assert parse(text).value is None  # as it is, it changes nothing
    document = parse(
        re.sub(r"^#(?! )( *[a-z0-9_]+:)", r"\1", re.sub(r"^#( +)([a-z0-9_]+:)", r"\1\2", text, flags=re.M), flags=re.M)
    )
    assert msgspec.convert(document.value, Config, strict=True) == Config()

    def places(value: Any, place: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
        if not isinstance(value, dict) or not value:
            return {place}
        return {found for name, inner in value.items() for found in places(inner, (*place, name))}

    assert places(document.value) == {place for place, _ in settings.settings(Config)} - {("tls",)}
