"""Small figures by matplotlib (extra `plot`). Only this module imports matplotlib, and only when it draws."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from unicrond.events.cli.command_line import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def require_matplotlib() -> None:
    """Raise UsageError where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("--plot: matplotlib is missing; install it with: pip install 'unicrond[plot]'") from None


def canvas(title: str) -> tuple[Figure, Any]:
    """Create a figure and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.25)
    return figure, axes


def save(figure: Figure, path: Path) -> None:
    """Write the figure; with one version of matplotlib, equal figures give equal bytes. Raise UsageError."""
    try:
        figure.savefig(path, dpi=100, metadata={"Software": None})
    except (OSError, ValueError) as problem:
        raise UsageError(f"--plot: cannot write {path}: {problem}") from problem
