"""`unicron-replay story`: a causal account of a node, a task, an incident or a plan."""

from __future__ import annotations

import argparse

from unicrond.events.cli.command_line import UsageError
from unicrond.replay.reading.opening import as_json, open_source, require_reached, resolve, say
from unicrond.replay.reading.progress import show
from unicrond.replay.views.story import Index, NoSuchSubject, Story


async def story_command(options: argparse.Namespace) -> int:
    """Read the log twice, first for the subjects and then for the story, and print it."""
    async with open_source(options) as source:
        index, until = Index(), await resolve(source, options.until)
        await show(source, index, "looking", until=until)
        require_reached(options.until, index.state.seq)
        try:
            subject = index.subject(options.kind, options.name)
        except NoSuchSubject as error:
            raise UsageError(f"NAME: {error.args[0]}") from None
        story = Story(subject, index)
        await show(source, story, "telling", until=until)
    page = story.page()
    say(as_json({"kind": subject.kind, "name": subject.name, "story": page.splitlines()}) if options.json else page)
    return 0
