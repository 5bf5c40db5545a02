"""What a misspelt name was meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def guess(word: str, known: Sequence[str], otherwise: str = "") -> str:
    """ "did you mean X?", or `otherwise`: by default the list to choose from."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]}?" if close else otherwise or f"choose from {', '.join(known)}"
