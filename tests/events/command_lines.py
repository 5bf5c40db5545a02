"""Every command of the four programs with its arguments and flags, and the document of them: docs/operate/commands.md.

python -m tests.events.command_lines > docs/operate/commands.md
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib import import_module

from unicrond.events.cli.command_line import Parser
from unicrond.events.cli.exit_codes import MEANINGS
from unicrond.events.cli.shared_flags import SHARED

PARSERS = {
    "unicrond": "unicrond.commands.cli",
    "unicronctl": "unicrond.ctl.parser",
    "unicron-agent": "unicrond.agents.shell.cli",
    "unicron-replay": "unicrond.replay.cli",
}
#: Of all commands, or of all that open a log or an API: they stand above the tables.
EVERYWHERE = {"--help", "--version", "--print-completion", "--json", "--url", "--token-file", "--tls-ca"}
LOG = {"--log", "--nats", "--state-dir", "--archive"}
LOGIN = {"--key", "--user", "--password-file", "--creds", "--nkey-seed", "--tls-cert", "--tls-key"}

HEAD = """\
# Commands

Made by `python -m tests.events.command_lines` from the parsers; a test keeps it true. The rules of the grammar:

* **One word, one meaning.** A flag that several commands have takes the same value and means the same everywhere: the
  [table](#flags-of-several-commands) below.
* **Points and ranges.** `--since` and `--until` cut a range out of a log, `--at` names a moment. Each takes a sequence
  number (`1234`), a time with its zone (`2026-11-20T09:30:00Z`), or a span before the newest entry (`8h`; units ms, s,
  m, h, d). Times to come are `--from`, `--by` and `--duration`.
* **`KIND NAME` or `NAME`**, as kubectl has it: a command that takes several kinds of things wants the kind, `describe
  node gpu07`, `story incident i52`; one that is about one kind takes names alone, `cordon gpu07 gpu08`, `cancel big`.
* **`--json`** prints a list as a list, with the fields' names of `GET /v1/state`; `events` prints a line for each.
  `unicronctl schema COMMAND` prints the JSON Schema.
* **Completion**: `eval "$(unicronctl --print-completion bash)"`, or `zsh`; `unicronctl --print-completion fish |
  source`. It knows the tasks, nodes, workers, incidents and windows that there are, by the API that the command would
  ask, and is silent where that does not answer within a second.
"""


def parser_of(program: str) -> Parser:
    """Return the parser of a program."""
    parser = import_module(PARSERS[program]).parser()
    assert isinstance(parser, Parser)
    return parser


def commands_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and those of all its commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from commands_of(command)


def flags_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return a command's flags by their long names."""
    return {
        next(name for name in action.option_strings if name.startswith("--")): action
        for action in parser._actions
        if action.option_strings and action.help != argparse.SUPPRESS
    }


def is_group(parser: argparse.ArgumentParser) -> bool:
    """Return whether the parser has commands of its own."""
    return any(isinstance(action, argparse._SubParsersAction) for action in parser._actions)


def arguments_of(parser: argparse.ArgumentParser) -> str:
    """Return a command's positional arguments as its usage has them."""
    words = []
    for action in parser._actions:
        if not action.option_strings:
            word = str(action.metavar or action.dest)
            shapes = {"?": f"[{word}]", "*": f"[{word} ...]", "+": f"{word} [{word} ...]"}
            words.append(shapes.get(str(action.nargs), word))
    return " ".join(words)


def codes_of(parser: argparse.ArgumentParser) -> str:
    """Return the exit codes that a command's help lists, without their meanings."""
    line = parser.format_help().rpartition("exit codes: ")[2].partition("\n")[0]
    return " ".join(word for word in line.replace(",", " ").split() if word.isdecimal())


def document() -> str:
    """Return docs/operate/commands.md."""
    lines = [HEAD, "## Exit codes", "", "| code | |", "|---|---|"]
    lines += [f"| {code} | {meaning} |" for code, meaning in MEANINGS.items()]
    lines += ["", "Each `--help` ends with those of its command, and with what 1 means there where that is not plain."]
    lines += ["", "## Flags of several commands", "", "| flag | value | |", "|---|---|---|"]
    for flag, entry in SHARED.items():
        name = f"`{entry.short}`, `{flag}`" if entry.short else f"`{flag}`"
        value = f"`{entry.metavar}`".replace("|", "\\|") if entry.metavar else ""
        repeats = "; repeatable" if entry.action == "append" else ""
        lines.append(f"| {name} | {value} | {entry.meaning}{repeats} |")
    for program in PARSERS:
        lines += ["", f"## {program}", "", "| command | flags of its own | JSON | exit codes |", "|---|---|---|---|"]
        for command in commands_of(parser_of(program)):
            if is_group(command):
                continue
            flags = flags_of(command)
            aside = EVERYWHERE | LOGIN | (LOG if {*flags} >= LOG else set())
            own = [f"`{flag}`" for flag in flags if flag not in aside]
            own += ["*a log*"] if {*flags} >= LOG else []
            own += ["*a login*"] if {*flags} >= LOGIN and not {*flags} >= LOG else []
            line = f"{command.prog} {arguments_of(command)}".rstrip()
            lines.append(f"| `{line}` | {' '.join(own)} | {'yes' * ('--json' in flags)} | {codes_of(command)} |")
        if program == "unicronctl":
            lines += ["", "All but `nats-context` and `schema` take `--url`, `--token-file` and `--tls-ca`."]
        if program == "unicron-replay":
            sources = "*A log*: one of `--log`, `--nats`, `--state-dir`, `--url`; with `--archive` and a login's flags."
            lines += ["", sources]
    return "\n".join(lines).replace("|NAME", "\\|NAME").replace("SEQ|TIME SEQ|TIME", "SEQ\\|TIME SEQ\\|TIME") + "\n"


if __name__ == "__main__":
    print(document(), end="")
