"""What `unicron-replay` may show: everything but the secrets that the log tells, and what looks like one.

The values are learnt from the entries as they are read, in one place for the whole command: whatever prints comes after
the entry that told the value.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from events.envelope import Entry, Envelope, Recorded
from unicrond.service.discretion import Discretion, discreet

#: Of this command.
SHOWN = Discretion()


def given_away(entries: Sequence[Entry]) -> list[Entry]:
    """Entries for others: secrets are hidden, texts keep their length, all else is as it was."""
    return [_masked(entry) if isinstance(entry, Recorded) else entry for entry in entries]


def _masked(entry: Recorded) -> Recorded:
    mask = SHOWN.mask()
    told = msgspec.to_builtins(entry.envelope)
    shown = discreet(told, lambda text: mask.blotted(text.encode()).decode())
    envelope = entry.envelope if shown == told else msgspec.convert(shown, Envelope, strict=True)
    return Recorded(entry.seq, entry.recorded_at_us, envelope)
