"""The command line that the four commands share: one parser, the types of its arguments, one way to end.

Rules
-----
* Bad usage is one line on stderr that names the flag and the fix, and exit code 2.
* `--help` of each command ends with examples and its exit codes; `--version` and `--print-completion` belong to a
  program's root.
* A flag that several commands have is made by `shared_flags.shared`: one word, one type, one meaning.
* A type of an argument raises ValueError, and its message is what people read.
* Flags of the daemons come from the environment too (environment_flags.py).
* An epilog may be a function: what needs another package, such as a list of policies, is loaded when it is shown.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

from unicrond.events.cli import environment_flags as variables
from unicrond.events.cli.completion import COMPLETE_VARIABLE, SHELLS, LiveNames, complete, script
from unicrond.events.cli.exit_codes import DONE, FAILED, INTERRUPTED, USAGE, exit_codes

if TYPE_CHECKING:
    from unicrond.events.log.point import BeforeEnd, Point
    from unicrond.events.nats.connection import Login

#: The most that still fits what JSON and the log hold.
MOST = 10**15 - 1

_SPAN = re.compile(r"-[0-9.]+(ms|s|m|h|d)")
#: The words that stand before a name where a command takes several kinds of things.
KINDS = ("node", "task", "incident", "plan")
#: Stands before a span that is not a flag; no point begins with it.
_NO_FLAG = "@"

Epilog: TypeAlias = str | Callable[[], str] | None


class UsageError(Exception):
    """An argument that cannot be used; one line that names it and the fix."""


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line, examples as they were written, and the flags that every program has."""

    #: Flags may come from the environment (SettableParser).
    variables = False
    #: Names of what runs now, for completion; a program that knows them sets it.
    live_names: LiveNames | None = None
    _words: Sequence[str] = ()

    def __init__(self, *, version: str = "", **arguments: Any) -> None:
        """Create a parser. `version`: only for the root of a program."""
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **arguments)
        if version:
            self.man_short_description = self.description  # for argparse-manpage
            self.add_argument("--version", action="version", version=version)
            help_text = "print a script that completes this program's commands in a shell, and end"
            self.add_argument("--print-completion", action=_PrintCompletion, choices=SHELLS, help=help_text)

    _epilog: Epilog = None

    @property
    def epilog(self) -> str | None:
        """Return the examples."""
        return self._epilog() if callable(self._epilog) else self._epilog

    @epilog.setter
    def epilog(self, text: Epilog) -> None:
        self._epilog = text

    def commands(self, dest: str = "command") -> Commands:
        """Add subcommands to this parser; `add_command` fills them."""
        return self.add_subparsers(dest=dest, required=True, metavar="COMMAND", parser_class=type(self))

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse a command line; in a shell that completes one, print what may come next instead, and exit."""
        if COMPLETE_VARIABLE in os.environ:
            complete(self, sys.argv[1:] if args is None else args, self.live_names)
            raise SystemExit(DONE)
        self._words = list(sys.argv[1:] if args is None else args)
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print one line for bad usage and exit with code 2; argparse calls this for everything that it does not
        accept."""
        name = message.removeprefix("unrecognized arguments: ")
        before = self._words[self._words.index(name) - 1] if name != message and name in self._words else ""
        if before in KINDS:
            message += f"; give {name} alone, without {before}"
        fail(self.prog.partition(" ")[0], f"{_plainer(message)}; see {self.prog} --help")
        raise SystemExit(USAGE)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return self._registry_get("type", action.type, action.type)(arg_string)
        except ValueError as error:
            raise argparse.ArgumentError(action, str(error)) from None


class SettableParser(Parser):
    """The parser of a program whose flags may come from the environment (environment_flags.py), and of its commands."""

    variables = True

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Take variables from the environment, then parse. argparse calls this for the root, then for the command."""
        if self.variables:
            try:
                variables.take(self, os.environ)
            except variables.BadVariable as error:
                self.error(str(error))
        return super().parse_known_args(args, namespace)


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
Place: TypeAlias = "argparse._ActionsContainer"


class _PrintCompletion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: object, value: Any, flag: str | None = None) -> None:
        print(script(parser.prog, value))
        parser.exit()


class Flag(NamedTuple):
    """The arguments of argparse's add_argument; made by `switch`, `option` and `repeated`."""

    names: tuple[str, ...]
    settings: dict[str, Any]


def switch(*words: str) -> Flag:
    """Make a flag without a value: its names, then its help text."""
    return Flag(words[:-1], {"action": "store_true", "help": words[-1]})


def option(name: str, metavar: str | None, help_text: str | None, **settings: Any) -> Flag:
    """Make a flag with a value; a name without dashes makes a positional argument. `settings`: type, default, choices,
    required."""
    return Flag((name,), {"metavar": metavar, "help": help_text, **settings})


def repeated(name: str, metavar: str, help_text: str, **settings: Any) -> Flag:
    """Make a flag that may be given several times; its value is a list."""
    return option(name, metavar, f"{help_text}; repeatable", action="append", default=[], **settings)


def add(place: Place, *flags: Flag) -> None:
    """Add the flags to a parser, or to a group of one."""
    for names, settings in flags:
        place.add_argument(*names, **settings)


def add_command(
    commands: Commands,
    name: str,
    summary: str,
    epilog: Epilog,
    *flags: Flag,
    codes: str = exit_codes(),
    **settings: Any,
) -> Parser:
    """Add a command. `summary`: what it does, a sentence that begins with a verb, without its capital letter and full
    stop. `codes`: its exit codes, where it has more than the common ones."""
    command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", **settings)
    command.epilog = lambda: "\n\n".join(filter(None, (epilog() if callable(epilog) else epilog, codes)))
    add(command, *flags)
    return command


def login_of(options: argparse.Namespace) -> Login:
    """Build the login that the flags describe. Raises UsageError."""
    from unicrond.events.nats.connection import Login
    from unicrond.events.trust.keys import BadKey, read_key

    if options.key:
        if options.creds or options.nkey_seed or options.user:
            raise UsageError("--key: give no other login beside it")
        try:
            read_key(options.key)
        except BadKey as error:
            raise UsageError(f"--key: {error}") from None
    if options.creds and options.nkey_seed:
        raise UsageError("--nkey-seed: give either --creds or --nkey-seed, not both")
    if bool(options.user) != bool(options.password_file):
        raise UsageError("--user: give --user and --password-file together")
    if options.tls_key and not options.tls_cert:
        raise UsageError("--tls-key: give --tls-cert too")
    return Login(
        user=options.user,
        password_file=options.password_file,
        key=options.key,
        creds=options.creds,
        nkey_seed=options.nkey_seed,
        tls_ca=options.tls_ca,
        tls_cert=options.tls_cert,
        tls_key=options.tls_key,
    )


def examples(*lines: str) -> str:
    """Format examples as an epilog."""
    return "\n  ".join(("examples:" if len(lines) > 1 else "example:", *lines))


def run(program: str, work: Callable[[], int | None], *failures: type[Exception]) -> int:
    """Run the work of a program; return its exit code. `failures` end it with exit code 1 and their one line."""
    try:
        code = work() or 0
        sys.stdout.flush()
    except UsageError as error:
        return fail(program, error, USAGE)
    except failures as error:
        return fail(program, error)
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at exit
        return DONE
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as request:  # --help and bad usage
        return int(request.code or 0)
    return code


def fail(program: str, error: object, code: int = FAILED) -> int:
    """Print in one line what is wrong; return the exit code."""
    print(f"{program}: {error}", file=sys.stderr)
    return code


# --- types of arguments --------------------------------------------------------------------------


def mark_spans(arguments: Sequence[str]) -> list[str]:
    """Mark spans such as `-10m` as `@-10m`: argparse would take them for flags."""
    return [_NO_FLAG + argument if _SPAN.fullmatch(argument) else argument for argument in arguments]


def point_argument(text: str) -> Point | BeforeEnd:
    """Parse a point of the log (see point.POINT_SYNTAX)."""
    from unicrond.events.log.point import parse_point

    return parse_point(text.removeprefix(_NO_FLAG))


def event_type(text: str) -> str:
    """Parse the name of an event type. Raises ValueError."""
    from unicrond.events.vocabulary.phrases import guess
    from unicrond.events.wire.selection import TYPE_NAMES

    if text not in TYPE_NAMES:
        raise ValueError(f"no event type {text!r}; {guess(text, TYPE_NAMES)}")
    return text


def whole(least: int = 0, most: int = MOST) -> Callable[[str], int]:
    """Return a type for whole numbers within bounds, both included."""
    bounds = f"{least} or more" if most == MOST else f"{least} to {most}"

    def parse(text: str) -> int:
        """Parse the number. Raises ValueError."""
        if not (text.isascii() and text.isdecimal() and len(text) <= len(str(most)) and least <= int(text) <= most):
            raise ValueError(f"{text[:40]!r} is not a whole number of {bounds}")
        return int(text)

    return parse


def number(least: float, most: float, unit: str) -> Callable[[str], float]:
    """Return a type for numbers within bounds, both included; `unit` is for the message alone."""

    def parse(text: str) -> float:
        """Parse the number. Raises ValueError."""
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not least <= value <= most:
            raise ValueError(f"{text!r} is not within {least:g} to {most:g} {unit}")
        return value

    return parse


def existing_file(text: str) -> Path:
    """Parse the path of a file that exists. Raises ValueError."""
    if not Path(text).is_file():
        raise ValueError(f"{text!r} is not a file; create it or fix the path")
    return Path(text)


def name(text: str) -> str:
    """Parse the name of a node, a task or a token. Raises ValueError."""
    from unicrond.events.vocabulary import NAME_PATTERN

    if not re.fullmatch(NAME_PATTERN, text):
        raise ValueError(f"{text!r} is not a valid name; names are letters, digits, - and _, at most 63")
    return text


def node_name(text: str) -> str:
    """Parse the name of a node: machines' names have dots, which separate NATS's subjects, and become -. Raises
    ValueError."""
    return name(text.replace(".", "-"))


def setting(text: str) -> tuple[str, str]:
    """Split PATH=VALUE into (path, value). Raises ValueError."""
    path, equals, value = text.partition("=")
    if not equals or "." not in path or not value:
        raise ValueError(f"{text!r} is not a setting; give tasks.TASK.FIELD=VALUE or policy.FIELD=VALUE")
    return path, value


def kind_among(kinds: Sequence[str]) -> Callable[[str], str]:
    """Return a type for the KIND of a command that takes `KIND NAME`."""

    def parse(text: str) -> str:
        """Parse the kind. Raises ValueError, with what was probably meant where the kind is missing."""
        if text in kinds:
            return text
        if re.fullmatch(r"i[0-9]+", text) and "incident" in kinds:
            hint = f"did you mean incident {text}?"
        elif text.isdecimal() and "plan" in kinds:
            hint = f"did you mean plan {text}?"
        elif near := get_close_matches(text, kinds, 1):
            hint = f"did you mean {near[0]}?"
        else:
            hint = f"did you mean task {text} or node {text}?"
        raise ValueError(f"{text[:40]!r} is no kind of thing ({', '.join(kinds)}); {hint}")

    return parse


def address(text: str) -> str:
    """Parse an IP address that others can connect to. Raises ValueError."""
    import ipaddress

    try:
        parsed = ipaddress.ip_address(text)
    except ValueError:
        raise ValueError(f"{text!r} is not an IP address; give the one that other nodes use") from None
    if parsed.is_unspecified or parsed.is_multicast:
        raise ValueError(f"nothing can connect to {text}; give the address that other nodes use")
    return text


def _plainer(message: str) -> str:
    """Format argparse's message more plainly, with a suggestion where a name was misspelt."""
    choice = re.match(r"argument (\S+): invalid choice: '([^']*)' \(choose from (.*)\)$", message)
    if choice is None:
        return message.removeprefix("argument ")
    from unicrond.events.vocabulary.phrases import guess

    problem = "no command" if choice[1] == "COMMAND" else f"{choice[1]}: unknown"
    choices = re.findall(r"[\w-]+", choice[3])
    return f"{problem} {choice[2]!r}; {guess(choice[2], choices)}"
