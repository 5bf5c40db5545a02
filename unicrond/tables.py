"""Tables of plain text cells: aligned columns for pipes and files, rich tables for terminals.

A cell may hold anything that an event holds; what could move a cursor or break a line is taken out here.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:  # rich takes 50 ms to import, and a pipe needs none of it
    import rich.table

#: How words look on a terminal wherever they are a whole cell.
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
    "left": "dim",
    "cancelled": "dim",
    "open": "bold yellow",
    "SEV1": "bold red",
    "SEV2": "yellow",
    "SEV3": "cyan",
}


@dataclass(frozen=True, slots=True)
class Table:
    """`right`: headers of the columns that are set flush right. `empty`: what to say where there are no rows."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[str] = frozenset()
    empty: str = "none"


def clean(text: str) -> str:
    """`text` on one line, without control characters."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def plain(table: Table) -> list[str]:
    """The table's lines, columns two blanks apart; header first."""
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


def for_terminal(table: Table, title: str | None = None) -> rich.table.Table:
    """The table for rich. A line that is too long is folded in the last column, and cut in no other."""
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for header in table.headers:
        last = header == table.headers[-1]
        justify = "right" if header in table.right else "left"
        shown.add_column(header, justify=justify, no_wrap=not last, header_style="dim", overflow="fold")  # type: ignore[arg-type]
    for row in table.rows:
        # Text, never markup: a message with [brackets] means itself.
        shown.add_row(*(Text(clean(cell), style=STYLES.get(cell, "")) for cell in row))
    if not table.rows:
        shown = RichTable(
            title=title, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False
        )
        shown.add_row(Text(table.empty, style="dim"))
    return shown


def interactive(stream: TextIO) -> bool:
    """Whether somebody watches: a terminal that can show more than lines."""
    import os

    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def show(table: Table, title: str | None = None, stream: TextIO | None = None) -> None:
    """Write the table the way that suits `stream` (default: stdout)."""
    stream = stream or sys.stdout
    if interactive(stream):
        from rich.console import Console

        Console(file=stream, highlight=False).print(for_terminal(table, title))
        return
    if title:
        print(title, file=stream)
    for line in plain(table):
        print(line, file=stream)
