"""`unicron-replay serve`: the web page over a log, with a slider for the time."""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys

from aiohttp import web

from unicrond.events.cli.command_line import UsageError
from unicrond.replay.reading.opening import as_json, open_source, say
from unicrond.replay.reading.progress import show
from unicrond.replay.views.moments import Moments
from unicrond.replay.views.page_server import PageServer


async def serve_command(options: argparse.Namespace) -> int:
    """Serve the page until interrupted. Loopback only: a log holds tasks' arguments and environments."""
    moments = Moments()
    async with open_source(options) as source:
        await show(source, moments, "reading")
    if not moments.entries:
        raise UsageError("the log is empty: there is nothing to show")
    gc.freeze()  # what was read stays; what requests leave behind is collected again
    gc.enable()
    name = str(options.log or options.state_dir or options.url or ", ".join(options.nats))
    runner = web.AppRunner(PageServer(moments, name).application(), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", options.port)
        try:
            await site.start()
        except OSError as error:
            raise UsageError(f"--port: {options.port}: {error.strerror}; give another") from None
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        say(as_json({"url": url}) if options.json else f"{len(moments.entries)} entries at {url} (Ctrl-C ends it)")
        sys.stdout.flush()
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
    return 0
