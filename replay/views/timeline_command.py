"""`unicron-replay timeline`: the course of a log in the terminal, as a page or as a picture."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from unicrond.events.cli.command_line import UsageError
from unicrond.replay.reading.opening import as_json, open_source, require_place, require_reached, resolve, say
from unicrond.replay.reading.progress import show
from unicrond.replay.reading.source import REDACTOR
from unicrond.replay.views.timeline import Timeline
from unicrond.replay.views.timeline_drawing import html_page
from unicrond.replay.views.timeline_text import text_page


async def timeline_command(options: argparse.Namespace) -> int:
    """Print text on stdout, unless --html or --plot name a file."""
    for kind, path in (("html", options.html), ("plot", options.plot)):
        if path is not None:
            _require_drawing(kind, path, options.log)
    timeline = Timeline()
    async with open_source(options) as source:
        await show(source, timeline, "drawing", until=await resolve(source, options.until))
    require_reached(options.until, timeline.state.seq)
    timeline.finish()
    title = f"{options.log or options.state_dir or options.url or ', '.join(options.nats)}"
    paths: list[Path] = []
    if options.html is not None:
        options.html.write_text(REDACTOR.text(html_page(timeline, title)), encoding="utf-8")
        paths.append(options.html)
    if options.plot is not None:
        _draw(timeline, options.plot, title)
        paths.append(options.plot)
    if options.json:
        say(as_json(_json(timeline)))
    elif paths:
        say("\n".join(str(path) for path in paths))
    else:
        say(text_page(timeline, min(shutil.get_terminal_size((100, 24)).columns, 200)))
    return 0


def _require_drawing(kind: str, path: Path, log: Path | None) -> None:
    """Check that a drawing can be written there. It replaces an older one, never the log. Raises UsageError."""
    require_place(f"--{kind}", path)
    suffix = ".png" if kind == "plot" else f".{kind}"
    if path.suffix != suffix:
        raise UsageError(f"--{kind}: {path} does not end in {suffix}; name it so")
    if log is not None and log.exists() and path.exists() and path.samefile(log):
        raise UsageError(f"--{kind}: {path} is the log itself; name another place")


def _draw(timeline: Timeline, path: Path, title: str) -> None:
    try:
        from unicrond.replay.views.timeline_drawing import write_png

        write_png(timeline, path, title)
    except ImportError:
        raise UsageError("--plot: matplotlib is not installed; pip install 'unicrond[plot]', or use --html") from None


def _json(timeline: Timeline) -> dict[str, object]:
    return {
        "start_us": timeline.start_us,
        "end_us": timeline.end_us,
        "nodes": {name: [span._asdict() for span in spans] for name, spans in timeline.nodes.items()},
        "tasks": {name: [span._asdict() for span in spans] for name, spans in timeline.tasks.items()},
        "incidents": timeline.incidents,
        "waf": [point._asdict() for point in timeline.waf],
    }
