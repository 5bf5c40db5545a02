"""Environment variables in place of flags: `UNICRON_AGENT_LEASE_S` for `unicron-agent --lease-s`.

Rules
-----
* A flag comes first, then its variable, then its default. A flag that may stand there several times adds to what its
  variable says, one value there alone.
* A variable's name is the program, its command where it has several, and the flag, in capitals: `UNICROND_RUN_NATS`.
  The command may be left out, `UNICROND_NATS`; the longer name comes first.
* An empty variable counts as none. The value of a switch is yes or no.
* A name that begins like those of a program and means nothing is an error: a setting that is misspelt would be lost.
  What Kubernetes sets for a service of the program's name is passed over.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

_YES = {"1", "true", "yes", "on"}
_NO = {"0", "false", "no", "off"}
#: Kubernetes tells each container of every service: UNICROND_SERVICE_HOST, UNICROND_PORT_4222_TCP_ADDR.
_OF_A_SERVICE = re.compile(r"_(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT(?:_\d+_(?:TCP|UDP|SCTP)(?:_\w+)?)?)")


class BadVariable(ValueError):
    """A variable that cannot be used; one line that names it and the fix."""


def prefix(program: str) -> str:
    """Return the prefix of the variables of `program`."""
    return _spelt(program) + "_"


def variable_names(parser: argparse.ArgumentParser, flag: str) -> tuple[str, ...]:
    """Return the names of the variable of a parser's flag, the longest first."""
    program, _, command = parser.prog.partition(" ")
    names = (f"{program} {command} {flag[2:]}", f"{program} {flag[2:]}") if command else (f"{program} {flag[2:]}",)
    return tuple(map(_spelt, names))


def take(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    """Make the variables that are set the defaults of the parser's flags. Raises BadVariable."""
    for action, flag in _flags(parser):
        name = next((name for name in variable_names(parser, flag) if environ.get(name)), None)
        if name is None:
            continue
        try:
            value = _value(action, environ[name])
        except ValueError as error:
            raise BadVariable(f"{name}: {error}") from None
        action.default = [value] if isinstance(action.default, list) else value
        action.required = False


def program_variables(parser: argparse.ArgumentParser) -> set[str]:
    """Return the variables of a program: of all flags of all its commands."""
    names = {name for _, flag in _flags(parser) for name in variable_names(parser, flag)}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            names.update(*(program_variables(command) for command in action.choices.values() if command.variables))
    return names


def check(program: str, names: Collection[str], environ: Mapping[str, str]) -> None:
    """Raise BadVariable where a variable begins like those of `program` and is none of them."""
    begin = prefix(program)
    for name in sorted(environ):
        if name.startswith(begin) and name not in names and not _OF_A_SERVICE.fullmatch(name[len(begin) - 1 :]):
            from unicrond.events.vocabulary.phrases import guess

            raise BadVariable(f"{name}: {program} knows no such variable; {guess(name, sorted(names), 'unset it')}")


def without(environ: Mapping[str, str], *programs: str) -> dict[str, str]:
    """Return the environment of a child whose settings must be those that its parent gives it."""
    begins = tuple(map(prefix, programs))
    return {name: value for name, value in environ.items() if not name.startswith(begins)}


def _flags(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.Action, str]]:
    """Yield the flags that have a value, and switches."""
    for action in parser._actions:
        flag = next((name for name in action.option_strings if name.startswith("--")), "")
        is_setting = action.nargs != 0 or isinstance(action, argparse._StoreTrueAction)
        if flag not in ("", "--print-completion") and is_setting:
            yield action, flag


def _value(action: argparse.Action, text: str) -> Any:
    if isinstance(action, argparse._StoreTrueAction):
        if text.lower() not in _YES | _NO:
            raise ValueError(f"{text[:40]!r} is neither yes nor no")
        return text.lower() in _YES
    parse = action.type if callable(action.type) else str
    value = parse(text)
    if action.choices is not None and value not in action.choices:
        from unicrond.events.vocabulary.phrases import guess

        raise ValueError(f"unknown {text[:40]!r}; {guess(text, list(map(str, action.choices)))}")
    return value


def _spelt(text: str) -> str:
    return re.sub(r"[ .-]", "_", text).upper()
