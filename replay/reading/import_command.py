"""`unicron-replay import`: an exported log into an empty one."""

from __future__ import annotations

import argparse

from unicrond.events.cli.command_line import login_of
from unicrond.replay.reading.opening import as_json, file_source, say
from unicrond.replay.reading.progress import with_bar


async def import_command(options: argparse.Namespace) -> int:
    """Import into a directory of segments, or into a NATS server that has no log yet."""
    from unicrond.replay.reading.importing import (  # the NATS client takes 100 ms to import
        import_to_directory,
        import_to_nats,
    )

    source = file_source(options.path)
    chunks = with_bar(source.chunks(), "importing")
    if options.into is not None:
        last, where, times = await import_to_directory(chunks, options.into, source.beats()), str(options.into), "kept"
    else:
        from unicrond.events.nats.connection import connect

        connection = await connect(options.nats, name="unicron-replay", login=login_of(options), timeout_s=5.0)
        try:
            last, where, times = await import_to_nats(chunks, connection), connection.urls, "those of the import"
        finally:
            await connection.close()
    if options.json:
        say(as_json({"into": where, "last_seq": last, "times_kept": times == "kept"}))
    else:
        note = (
            ""
            if times == "kept"
            else " (NATS dates what it stores), and the digests differ accordingly; compare by --log"
        )
        say(f"{where}: entries 1 to {last}; the recorded times are {times}{note}" if last else f"{where}: an empty log")
    return 0
