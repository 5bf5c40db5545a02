"""Masking of output: `unicron-replay` shows everything but the secrets that the log holds, and what looks like one.

The values are learnt from the entries as they are read, in one place for the whole command: a value is printed only
after the entry that holds it was read.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from unicrond.events.wire.envelope import Entry, Envelope, RecordedEvent
from unicrond.service.api.redaction import Discretion, redact

#: The masking of this command.
REDACTOR = Discretion()


def mask_entries(entries: Sequence[Entry]) -> list[Entry]:
    """Mask secrets in entries that are to be passed on; texts keep their length, everything else is unchanged."""
    return [_masked(entry) if isinstance(entry, RecordedEvent) else entry for entry in entries]


def _masked(entry: RecordedEvent) -> RecordedEvent:
    mask = REDACTOR.mask()
    plain = msgspec.to_builtins(entry.envelope)
    masked_plain = redact(plain, lambda text: mask.overwrite(text.encode()).decode())
    envelope = entry.envelope if masked_plain == plain else msgspec.convert(masked_plain, Envelope, strict=True)
    return RecordedEvent(entry.seq, entry.recorded_at_us, envelope)
