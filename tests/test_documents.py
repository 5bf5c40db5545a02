"""The documents are true: what they point to is there, their commands parse, the options that they name exist."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: [text](target) in Markdown, without addresses.
LINK = re.compile(r"\]\((?!https?:)([^)\s]+)")
MENTION = re.compile(r"\bdocs/[\w./-]+\.(?:md|png)\b")
#: A file or directory of the code in `code`, by its path from the root.
CODE_PATH = re.compile(r"^(?:agents|deploy|events|examples|replay|tests|unicrond)/[\w./-]*$")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")
PROGRAMS = {
    "unicrond": "unicrond.commands.cli",
    "unicronctl": "unicrond.ctl.main",
    "unicron-agent": "unicrond.agents.shell.cli",
    "unicron-replay": "unicrond.replay.cli",
}
#: One command line of each parser that a program has of its own beside its first.
PARSERS = [
    ("unicrond", []),
    ("unicronctl", ["status"]),
    ("unicronctl", ["plan", "solve"]),
    ("unicronctl", ["throughput"]),
    ("unicron-agent", []),
    ("unicron-replay", ["state"]),
    ("unicron-replay", ["simulate"]),
]
#: Options in the documents that are other programs': nats, Megatron-LM, and the commands of tests and benchmarks.
OTHERS = {"--layers", "--faults", "--requeue", "--no-kill", "--load", "--save", "--lr-decay-iters"}
#: Documents whose options are another program's.
OF_OTHERS = {"megatron-lm.md", "configurations.md", "checkpoints.md"}


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:  # an unpacked sdist
        return [path for pattern in patterns for path in ROOT.rglob(pattern) if ".venv" not in path.parts]
    return [ROOT / name for name in listed.stdout.splitlines()]


DOCUMENTS = sorted(path for path in tracked("*.md") if path.exists())


def anchors(document: Path) -> set[str]:
    """The names under which a document's headings can be linked to."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_document_links_lead_somewhere() -> None:
    dead = []
    for document in DOCUMENTS:
        for target in LINK.findall(document.read_text()):
            name, _, anchor = target.partition("#")
            path = document.parent / name if name else document
            if not path.exists() or (anchor and anchor not in anchors(path)):
                dead.append(f"{document.relative_to(ROOT)} -> {target}")
    assert not dead


def test_code_names_existing_documents() -> None:
    dead = [
        f"{path.relative_to(ROOT)} names {mention}"
        for path in tracked("*.md", "*.py", "*.toml", "*.yaml", "*.sh", "Makefile")
        if path.name != "test_documents.py" and path.exists()
        for mention in MENTION.findall(path.read_text())
        if not (ROOT / mention).exists()
    ]
    assert not dead


def test_readme_changes_of_a_loop_are_those_of_the_examples() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) < 600
    changes = re.findall(r"^([+-])(.+)$", text.partition("```diff\n")[2].partition("```")[0], re.MULTILINE)
    examples = {"-": ROOT / "examples" / "plain_loop.py", "+": ROOT / "examples" / "own_loop.py"}
    lines = {sign: path.read_text().splitlines() for sign, path in examples.items()}
    assert changes and [line for sign, line in changes if line not in lines[sign]] == []


def test_document_list_is_complete() -> None:
    listed = {(ROOT / "docs" / target).resolve() for target in LINK.findall((ROOT / "docs" / "README.md").read_text())}
    assert [str(path) for path in DOCUMENTS if path.parent.parent == ROOT / "docs" and path not in listed] == []


def spans(document: Path) -> list[str]:
    """What stands in `backquotes`, on one line each."""
    return [" ".join(span.split()) for span in SPAN.findall(FENCED.sub("", document.read_text()))]


def test_documents_name_existing_code() -> None:
    dead = [
        f"{document.relative_to(ROOT)} names {span}"
        for document in DOCUMENTS
        if document.name != "CHANGELOG.md"
        for span in spans(document)
        if CODE_PATH.match(span) and not (ROOT / span).exists()
    ]
    assert not dead


def test_each_promise_of_who_pays_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "operate" / "who-pays.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("|") and not re.match(r"\|(?:-| seen| # )", line)]
    assert [int(row.split("|")[1]) for row in rows if row.split("|")[1].strip().isdigit()] == list(range(1, 14))
    assert len(rows) == 13 + 8, "so many promises"
    functions: dict[str, set[str]] = {}
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, row
        for path, name in named:
            if path not in functions:
                nodes = ast.walk(ast.parse((ROOT / path).read_text()))
                kinds = ast.FunctionDef | ast.AsyncFunctionDef
                functions[path] = {node.name for node in nodes if isinstance(node, kinds)}
            assert name in functions[path], f"{path} has no {name}"


# --- commands ------------------------------------------------------------------------------------


class Parsed(Exception):
    """The parser that took a command line."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def parser_of(program: str, arguments: list[str], patch: pytest.MonkeyPatch, *, parse: bool) -> argparse.ArgumentParser:
    """The parser that the program hands these arguments to; with `parse`, they must be valid. Nothing is done."""
    real: Callable[..., object] = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, *given: object, **named: object) -> None:
        if parse:
            real(self, *given, **named)
        raise Parsed(self)

    with patch.context() as patched, pytest.raises(Parsed) as caught:
        patched.setattr(argparse.ArgumentParser, "parse_args", stop)
        patched.setattr(sys, "argv", [program, *arguments])
        import_module(PROGRAMS[program]).main(arguments)
    return caught.value.parser


#: What stands in a command line of a document for something that its reader knows.
PLACEHOLDERS = {"URL": "nats://127.0.0.1:4222", "SEQ": "1", "N": "1"}
FILES = {"--key", "--nodes-file", "--password-file", "--creds", "--nkey-seed", "--tls-ca", "--tls-cert", "--tls-key"}
STARTS = {*PROGRAMS, "make", "python", "pytest"}


def command_in(line: str) -> str:
    """The command of a line, "" where it has none of ours: without prompt, variables, comment and what it pipes to."""
    line = re.sub(r"^(?:\$ +)?(?:[A-Z_]+=\S+ +)*(?:\.venv/bin/)?", "", line.strip())
    return re.split(r" {2,}| \| | && ", line)[0] if line.split(" ")[0] in STARTS and " " in line else ""


def in_blocks(document: Path) -> Iterator[str]:
    """The commands in a document's blocks of code."""
    text = document.read_text()
    blocks = [block.partition("\n")[2] for block in FENCED.findall(text)]
    blocks += re.findall(r"(?:^ {4,}\S.*\n)+", FENCED.sub("", text), re.MULTILINE)
    return filter(None, (command_in(line) for block in blocks for line in block.splitlines()))


def in_spans(document: Path) -> Iterator[str]:
    """The commands in a document's sentences."""
    return filter(None, map(command_in, spans(document)))


IN_BLOCKS = sorted({line for document in DOCUMENTS for line in in_blocks(document)})
IN_SPANS = sorted({line for document in DOCUMENTS for line in in_spans(document)})


def ours(lines: list[str]) -> list[str]:
    return [line for line in lines if line.split()[0] in PROGRAMS and "events decode" not in line]


@pytest.mark.parametrize("line", [line for line in ours(IN_BLOCKS) if "..." not in line])
def test_code_block_commands_parse(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *words = [PLACEHOLDERS.get(word, word) for word in shlex.split(line, comments=True)]
    words = [__file__ if before in FILES else word for before, word in zip([program, *words], words, strict=False)]
    parser_of(program, words, monkeypatch, parse=True)


@pytest.fixture(scope="module")
def parsers() -> dict[str, list[argparse.ArgumentParser]]:
    with pytest.MonkeyPatch.context() as patch:
        found: dict[str, list[argparse.ArgumentParser]] = {}
        for program, words in PARSERS:
            found.setdefault(program, []).append(parser_of(program, words, patch, parse=False))
        return found


@pytest.mark.parametrize("line", ours(IN_SPANS))
def test_inline_commands_and_options_exist(line: str, parsers: dict[str, list[argparse.ArgumentParser]]) -> None:
    program, *words = line.split()
    known = [option for parser in parsers[program] for action in options(parser) for option in action.option_strings]
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= set(known)
    command = words[0].split("|") if program != "unicron-agent" and not words[0].startswith("-") else []
    assert set(command) <= {name for parser in parsers[program] for name in command_names(parser)}


def test_other_commands_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    missing = []
    for line in {*IN_BLOCKS, *IN_SPANS}:
        program, *words = line.split()
        if (
            (program == "make" and words[0] not in targets)
            or (program == "pytest" and not all((ROOT / word).exists() for word in words if word.startswith("tests/")))
            or (program == "python" and words[0] == "-m" and find_spec(words[1]) is None)
        ):
            missing.append(line)
    assert not missing


def command_names(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The commands of a parser, and what its program is called with for this parser alone."""
    yield parser.prog.rpartition(" ")[2]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield from (name, *(f"{name} {inner}" for inner in command_names(command)))


def options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """All of a parser and its commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from options(command)
        else:
            yield action


def test_options_exist_and_have_help(
    parsers: dict[str, list[argparse.ArgumentParser]],
) -> None:
    actions = [action for several in parsers.values() for parser in several for action in options(parser)]
    known = {option for action in actions for option in action.option_strings} | OTHERS
    documents = [path for path in DOCUMENTS if path.name not in OF_OTHERS]
    named = {(path.name, span) for path in documents for span in spans(path) if span.startswith("--")}
    assert {(name, span) for name, span in named if re.split(r"[ =,]", span)[0] not in known} == set()
    silent = [action.option_strings for action in actions if action.option_strings and not action.help]
    assert not silent, "give these options a help text"
