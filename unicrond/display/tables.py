"""Tables of plain text cells: aligned columns for pipes and files, rich tables for terminals.

A cell may hold any text of an event; characters that could move a cursor or break a line are removed here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from unicrond.events.vocabulary.phrases import clean

if TYPE_CHECKING:  # rich takes 50 ms to import, and a pipe needs none of it
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text

#: Blanks between columns.
_GAP = 2
#: A last column with less room than this is printed below its row, indented.
_LAST_MIN = 24
_INDENT = 4
#: The least width of a cell that must be cut.
_CELL_MIN = 6

#: Styles of words on a terminal, where a word is a whole cell.
STYLES = {
    "up": "green",
    "active": "green",
    "completed": "bold green",
    "lost": "bold red",
    "failed": "bold red",
    "isolated": "yellow",
    "cordoned": "yellow",
    "drained": "yellow",
    "draining": "yellow",
    "leaving": "yellow",
    "left": "dim",
    "cancelled": "dim",
    "open": "bold yellow",
    "SEV1": "bold red",
    "SEV2": "yellow",
    "SEV3": "cyan",
}


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text cells. `right`: headers of the right-aligned columns. `empty`: the text for a table without
    rows."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[str] = frozenset()
    empty: str = "none"


def visible(text: str) -> str:
    """Return `text` without control characters, its blanks unchanged."""
    return "".join(char if char.isprintable() else " " for char in text).rstrip()


def plain(table: Table) -> list[str]:
    """Return the table's lines, header first, columns two blanks apart."""
    if not table.rows:
        return [table.empty]
    rows = [table.headers, *(tuple(clean(cell) for cell in row) for row in table.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.headers))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if header in table.right else cell.ljust(width)
            for cell, width, header in zip(row, widths, table.headers, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def for_terminal(table: Table, title: str | None = None) -> RenderableType:
    """Return the table for rich, in whatever width there is (see `_Fitting`)."""
    return _Fitting(table, title)


class _Fitting:
    """A table that fits the terminal's width.

    A last column for which too little room is left stands below its row, folded. If the rest is too wide as well,
    columns move together, headers are cut, and last the widest cells; a cut ends in "…". Words that `STYLES` knows
    (a status, a severity) are never cut.
    """

    def __init__(self, table: Table, title: str | None) -> None:
        self._table = table
        self._title = title

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        table, width = self._table, options.max_width
        if self._title:
            yield Text(self._title, style="bold")
        if not table.rows:
            yield Text(table.empty, style="dim")
            return
        rows = [[Text(clean(cell), style=STYLES.get(cell, "")) for cell in row] for row in table.rows]
        headers = [Text(header, style="dim") for header in table.headers]
        widths, last_width, gap = _widths(table, headers, rows, width)
        for row in [headers, *rows]:
            line = Text(no_wrap=True, overflow="crop", end="")
            for cell, cell_width, header in zip(row, widths, table.headers, strict=False):
                fitted = cell.copy()
                fitted.truncate(cell_width, overflow="ellipsis")
                fitted.align("right" if header in table.right else "left", cell_width)
                line.append_text(fitted).append(" " * gap)
            last = row[-1]
            if last_width:  # in its own column
                first, *more = last.wrap(console, last_width) or [Text()]
                yield _finish_line(line.append_text(first))
                indent = sum(widths) + gap * len(widths)
            else:
                yield _finish_line(line)
                more = (
                    list(last.wrap(console, max(1, width - _INDENT))) if row is not headers and str(last) != "-" else []
                )
                indent = _INDENT
            for part in more:
                yield _finish_line(Text(" " * indent, no_wrap=True, overflow="crop").append_text(part))


def _finish_line(line: Text) -> Text:
    line.rstrip()
    line.end = "\n"
    return line


def _widths(table: Table, headers: list[Text], rows: list[list[Text]], width: int) -> tuple[list[int], int, int]:
    """Compute the widths of all columns but the last; of the last, 0 where it stands below its row; and the blanks
    between columns."""
    cells = [max(row[column].cell_len for row in rows) for column in range(len(headers))]
    natural = [max(header.cell_len, cell) for header, cell in zip(headers, cells, strict=True)]
    *widths, last = natural
    room = width - sum(widths) - _GAP * len(widths)
    if room >= min(last, _LAST_MIN):
        return widths, min(last, room), _GAP
    if not widths:
        return [], width, 0
    word_widths = [
        max((row[at].cell_len for row in rows if str(row[at]) in STYLES), default=0) for at in range(len(widths))
    ]
    gap = _GAP if sum(widths) + _GAP * (len(widths) - 1) <= width else 1
    # Each column may shrink to its cells, and where that is not enough to a few characters.
    for least in (cells, [_CELL_MIN] * len(widths)):
        floors = [max(keep, low) for keep, low in zip(word_widths, least, strict=False)]
        while sum(widths) + gap * (len(widths) - 1) > width:
            spare = [has - floor for has, floor in zip(widths, floors, strict=True)]
            if max(spare) <= 0:
                break
            widest = max(range(len(widths)), key=lambda at: (spare[at] > 0, widths[at]))
            widths[widest] -= 1
    return widths, 0, gap


def interactive(stream: TextIO) -> bool:
    """Return whether a person watches: the stream is a terminal that can show more than lines."""
    import os

    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def console(stream: TextIO) -> Console:
    """Return a terminal to draw on; where the environment says NO_COLOR, without any style."""
    import os

    from rich.console import Console

    return Console(file=stream, highlight=False, color_system=None if os.environ.get("NO_COLOR") else "auto")


def show(table: Table, title: str | None = None, stream: TextIO | None = None) -> None:
    """Write the table the way that suits `stream` (default: stdout)."""
    stream = stream or sys.stdout
    if interactive(stream):
        console(stream).print(for_terminal(table, title))
        return
    if title:
        print(title, file=stream)
    for line in plain(table):
        print(line, file=stream)
