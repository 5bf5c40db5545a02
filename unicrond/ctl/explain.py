"""`unicronctl explain`: what the documents say of a name or a message, from the copies that are installed with the
commands. It needs no coordinator.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import pairwise

from unicrond.events.cli.exit_codes import DONE, FAILED

#: Whose tables are searched.
_SEARCHED = ("operate/alarms.md", "operate/runbook.md")
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]*)\)")
_SPLIT = re.compile(r"(?<!\\)\|")


def explain(name: str) -> int:
    """Print the rows about `name`, or the document that it is the path of; return the exit code."""
    if name.startswith("docs/"):
        return _print_document(name)
    all_rows = [(path, heading, row) for path in _SEARCHED for heading, row in _rows(path)]
    rows = [item for item in all_rows if _has_name(item[2], name)] or [i for i in all_rows if _quotes(i[2], name)]
    if not rows:
        print(f"no document has a row about {name!r}; {_hint()}", file=sys.stderr)
        return FAILED
    for number, (path, heading, row) in enumerate(rows):
        print("\n" * bool(number) + f"docs/{path}, {heading}")
        for title, cell in row.items():
            if cell:
                print(f"  {title}: {cell}")
    return DONE


def _print_document(name: str) -> int:
    path = name.partition("#")[0].removeprefix("docs/")
    document = _document(path)
    if ".." in path.split("/") or not path.endswith(".md") or not document.is_file():
        print(f"{name}: no such document; {_hint()}", file=sys.stderr)
        return FAILED
    print(document.read_text(encoding="utf-8"), end="")
    return DONE


def _document(path: str) -> Traversable:
    return files("unicrond").joinpath("docs", *path.split("/"))


def _hint() -> str:
    return "`unicronctl explain docs/README.md` lists the documents"


def _rows(path: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each row of the document's tables as {title of the column: cell}, with the heading that it stands below."""
    heading, titles = "", []
    for line, after in pairwise([*_document(path).read_text(encoding="utf-8").splitlines(), ""]):
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif after.startswith("|--"):
            titles = _cells(line)
        elif line.startswith("|") and not line.startswith("|--"):
            yield heading, dict(zip(titles, _cells(line), strict=False))


def _cells(line: str) -> list[str]:
    """Return the cells of a table's line; links become their text."""
    cells = _SPLIT.split(line.strip().removeprefix("|").removesuffix("|"))
    return [_LINK.sub(r"\1", cell).replace("\\|", "|").strip() for cell in cells]


def _has_name(row: dict[str, str], name: str) -> bool:
    """Return whether the row's first cell has this name, with or without a subject, in `code`."""
    names = {code.partition(":")[0] for code in re.findall(r"`([^`]+)`", _symptom(row))}
    return name.partition(":")[0] in names


def _quotes(row: dict[str, str], message: str) -> bool:
    """Return whether the row's first cell quotes a part of this message, or the message is a part of a quote."""
    return any(quote in message or message in quote for quote in re.findall(r'"([^"]+)"', _symptom(row)))


def _symptom(row: dict[str, str]) -> str:
    return next(iter(row.values()), "")
