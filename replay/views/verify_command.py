"""`unicron-replay verify`: from parsed options to what was compared, or to the first difference."""

from __future__ import annotations

import argparse
from contextlib import aclosing
from typing import Any

import msgspec

from unicrond.events.cli.command_line import UsageError
from unicrond.events.log.heartbeat_evidence import merge_beats
from unicrond.events.log.point import Point
from unicrond.events.wire.envelope import RecordedEvent
from unicrond.replay.reading.opening import as_json, open_source, resolve, say
from unicrond.replay.reading.progress import show, with_bar
from unicrond.replay.reading.source import Source, read
from unicrond.replay.views.verify import Divergence, Findings, Verifier, bases


async def verify_command(options: argparse.Namespace) -> int:
    """Print what was verified. Exit code 1 if a decision cannot be made again, or the books do not close."""
    async with open_source(options) as source:
        if not source.has_own_times:
            raise UsageError("--nats: this log was imported, so its times are those of the import; verify the file")
        until = await resolve(source, options.until)
        verifier = await _verifier(source, until)
        try:
            await show(source, verifier, "deciding again", until=until)
            if until is None:  # else the point may cut the last batch in two: it is left out
                verifier.finish()
        except Divergence as divergence:
            findings = verifier.findings
            say(as_json(_json(findings, divergence)) if options.json else _page(findings, divergence))
            return 1
    say(as_json(_json(verifier.findings, None)) if options.json else _page(verifier.findings, None))
    return 1 if verifier.findings.books else 0


async def _verifier(source: Source, until: Point | None) -> Verifier:
    needed: set[int] = set()
    async with aclosing(with_bar(read(source, until=until), "looking for decisions")) as chunks:
        async for chunk in chunks:
            needed |= bases(chunk.entries)
    beats: list[RecordedEvent] = []
    async with aclosing(source.beats()) as batches:
        async for batch in batches:
            beats += batch
    return Verifier(needed, merge_beats(beats))


def _json(findings: Findings, divergence: Divergence | None) -> dict[str, Any]:
    first = (
        {
            "seq": divergence.seq,
            "based_on": divergence.based_on,
            "recorded": divergence.recorded,
            "decided_again": divergence.decided_again,
            "differing": divergence.differing,
        }
        if divergence
        else None
    )
    return {"verified": divergence is None and not findings.books, "divergence": first, **msgspec.to_builtins(findings)}


def _page(findings: Findings, divergence: Divergence | None) -> str:
    lines = list(findings.notes)
    lines.append(
        f"{findings.entries} entries: {findings.decisions} decisions and commands in {findings.batches} batches"
        f" decided again, {findings.deadlines} deadlines, {findings.node_verdicts} node verdicts from heartbeats"
    )
    if findings.inert:
        lines.append(f"{findings.inert} decisions of an old term, or repeated, have no effect and were not compared")
    if findings.unverifiable:
        lines.append(f"{len(findings.unverifiable)} node verdicts are not verifiable:")
        lines += [f"  {text}" for text in findings.unverifiable]
    if findings.books:
        lines.append(f"NOT VERIFIED: the books do not close: {findings.books}")
    elif divergence is None:
        lines.append("verified: every decision equals today's")
    else:
        lines += [f"NOT VERIFIED: {divergence}", "  recorded:", *(f"    {text}" for text in divergence.recorded)]
        lines += ["  decided again:", *(f"    {text}" for text in divergence.decided_again or ["nothing"])]
        if divergence.differing:
            lines += ["  what differs:", *(f"    {text}" for text in divergence.differing)]
    return "\n".join(lines)
