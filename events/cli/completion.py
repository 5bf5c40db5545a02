"""Completion of command lines in bash, zsh and fish: commands, flags, their values, files, and names of what runs now.

Rules
-----
* The shell's script calls the program itself with COMPLETE_VARIABLE set and the words up to the cursor; it answers one
  candidate a line, with its help behind a tab, and last DIRECTIVES where files or directories may follow.
* Names of what runs now (tasks, nodes, incidents) come last, from a function of the program. All together takes at
  most LIMIT_S; where there is no answer there are no names, and nothing is ever said.
* What a word names is seen from its metavar: TASK, NODE, or NAME behind a KIND.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeAlias

#: Set by the shells' scripts alone.
COMPLETE_VARIABLE = "_UNICRON_COMPLETE"
SHELLS = ("bash", "zsh", "fish")
#: The most that an answer takes, the start of the interpreter aside.
LIMIT_S = 0.6
#: The last line of an answer, where the shell is to complete paths.
FILES, DIRECTORIES = ":files", ":directories"

#: (kind, words of the command line) -> the names that there are now.
LiveNames: TypeAlias = Callable[[str, Sequence[str]], Iterable[str]]

_SCRIPTS = {
    "bash": """\
_{function}() {{
    local IFS=$'\\n' current="${{COMP_WORDS[COMP_CWORD]}}" line
    COMPREPLY=()
    for line in $({variable}=1 {program} "${{COMP_WORDS[@]:1:COMP_CWORD}}" 2>/dev/null); do
        case "$line" in
            :files) compopt -o filenames 2>/dev/null; COMPREPLY+=($(compgen -f -- "$current")) ;;
            :directories) compopt -o filenames 2>/dev/null; COMPREPLY+=($(compgen -d -- "$current")) ;;
            *) COMPREPLY+=("${{line%%$'\\t'*}}") ;;
        esac
    done
}}
complete -F _{function} {program}
""",
    "zsh": """\
#compdef {program}
_{function}() {{
    local line; local -a candidates
    for line in "${{(@f)$({variable}=1 {program} "${{(@)words[2,CURRENT]}}" 2>/dev/null)}}"; do
        case "$line" in
            "") ;;
            :files) _files ;;
            :directories) _files -/ ;;
            *) candidates+=("${{${{line%%$'\\t'*}}//:/\\\\:}}:${{line#*$'\\t'}}") ;;
        esac
    done
    (( $#candidates )) && _describe '{program}' candidates
}}
if [ "$funcstack[1]" = "_{function}" ]; then _{function} "$@"; else compdef _{function} {program}; fi
""",
    "fish": """\
function __{function}_complete
    set -l words (commandline -opc) (commandline -ct)
    for line in (env {variable}=1 {program} $words[2..-1] 2>/dev/null)
        switch $line
            case ':files'; __fish_complete_path (commandline -ct)
            case ':directories'; __fish_complete_directories (commandline -ct)
            case '*'; printf '%s\\n' $line
        end
    end
end
complete -c {program} -f -a '(__{function}_complete)'
""",
}


class Place(NamedTuple):
    """Where the cursor is. `action`: the flag or argument whose value is due; None: there is none. `kind`: the word
    before a NAME."""

    parser: argparse.ArgumentParser
    action: argparse.Action | None
    takes_flags: bool
    kind: str


def script(program: str, shell: str) -> str:
    """Return the script that makes `shell` complete the program."""
    return _SCRIPTS[shell].format(program=program, function=program.replace("-", "_"), variable=COMPLETE_VARIABLE)


def complete(parser: argparse.ArgumentParser, words: Sequence[str], live_names: LiveNames | None) -> None:
    """Print what the last of the words may become. Never raises, and is over within LIMIT_S."""

    def end(*_: object) -> None:
        """End at once: what is known has been printed."""
        os._exit(0)

    with suppress(Exception):
        signal.signal(signal.SIGALRM, end)
        signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
        *before, current = words or [""]
        place = find_place(parser, before)
        for candidate in candidates(place, current):
            print(candidate, flush=True)
        kind = kind_of(place)
        if kind and live_names is not None and not (place.takes_flags and current.startswith("-")):
            for name in live_names(kind, before):
                if name.startswith(current):
                    print(f"{name}\t{kind}", flush=True)
    signal.setitimer(signal.ITIMER_REAL, 0)
    sys.stdout.flush()


def find_place(parser: argparse.ArgumentParser, words: Sequence[str]) -> Place:
    """Find where the cursor is behind these words."""
    flag: argparse.Action | None = None
    arguments, kind, takes_flags = _arguments(parser), "", True
    for word in words:
        if word == "=":  # bash cuts --flag=value in three
            continue
        if flag is not None:
            flag = None
        elif takes_flags and word == "--":
            takes_flags = False
        elif takes_flags and word.startswith("-"):
            flag = _flag(parser, word) if "=" not in word else None
        elif arguments:
            argument, kind = arguments[0], word
            if isinstance(argument, argparse._SubParsersAction):
                if word not in argument.choices:
                    return Place(parser, None, takes_flags=False, kind="")
                parser = argument.choices[word]
                arguments = _arguments(parser)
            elif argument.nargs not in ("*", "+"):
                arguments = arguments[1:]
    if flag is not None:
        return Place(parser, flag, takes_flags=False, kind="")
    return Place(parser, arguments[0] if arguments else None, takes_flags, kind)


def candidates(place: Place, current: str) -> Iterator[str]:
    """Yield what the word may become, without the names of what runs now."""
    if place.takes_flags and current.startswith("-"):
        for option in place.parser._actions:
            if option.help != argparse.SUPPRESS:
                flags = [flag for flag in option.option_strings if flag.startswith("--") and flag.startswith(current)]
                text = str(option.help).replace(" (%(default)s)", "")
                yield from (f"{flag}\t{text}" for flag in flags)
        return
    action = place.action
    if action is None:
        return
    if isinstance(action, argparse._SubParsersAction):
        for command in action._choices_actions:
            if command.dest.startswith(current):
                yield f"{command.dest}\t{command.help}"
    elif action.choices is not None:
        yield from (str(choice) for choice in action.choices if str(choice).startswith(current))
    elif metavar := str(action.metavar or ""):
        words = metavar.split("|")
        if "FILE" in words or "PATH" in words:
            yield FILES
        elif "DIR" in words:
            yield DIRECTORIES


def kind_of(place: Place) -> str:
    """Return the kind of thing that the word at the cursor names, "" where it is none that runs."""
    if place.action is None:
        return ""
    metavar = str(place.action.metavar or "")
    return place.kind if metavar == "NAME" and not place.action.option_strings else metavar.lower()


def _arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if not action.option_strings]


def _flag(parser: argparse.ArgumentParser, word: str) -> argparse.Action | None:
    """Return the flag, where a value of it is due."""
    action = parser._option_string_actions.get(word)
    return action if action is not None and action.nargs != 0 else None
